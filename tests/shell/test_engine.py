"""The engine's loop: queue, rows, text, stop conditions, failures of single requests."""

import jax
import numpy as np
import pytest

from pagedjax.engine import InvalidRequestError, QueueFullError
from pagedjax.engine.request import check_request
from pagedjax.sampling_params import SamplingParams
from tests.shell.tiny import ASSISTANT, EOS, drain, make_engine, params, run

PROMPTS = ["hello world", "abcdefgh" * 5, "x", "The quick brown fox", "zzzz", "0123456789" * 3]


def greedy(**options):
    return SamplingParams(**({"temperature": 0, "ignore_eos": True, "max_tokens": 12} | options))


def alone(engine, prompt, sampling):
    return run(engine, [("alone", prompt, sampling)])["alone"].outputs[0]


def test_a_crowd_gets_what_each_gets_alone(engine):
    """More requests than rows and places, of all lengths, greedy and seeded, with and without
    logprobs: equal to each alone."""
    requests = []
    for i in range(20):
        sampling = greedy(
            max_tokens=3 + 2 * i,
            temperature=0.0 if i % 2 else 0.9,
            seed=i,
            top_k=0 if i % 3 else 20,
            logprobs=None if i % 4 else 2,
        )
        requests.append((str(i), PROMPTS[i % len(PROMPTS)] + str(i), sampling))
    together = run(engine, requests)
    for request_id, prompt, sampling in requests:
        one, many = alone(engine, prompt, sampling), together[request_id].outputs[0]
        assert many.token_ids == one.token_ids
        assert many.text == one.text
        assert many.finish_reason == one.finish_reason == "length"
        assert len(many.token_ids) == sampling.max_tokens
        assert (many.logprobs is None) == (sampling.logprobs is None)


def test_nothing_is_compiled_after_warm_up(engine):
    compiled = []

    def listen(event, _seconds, **_):
        if "compile" in event:
            compiled.append(event)

    run(engine, [("first", "a", greedy())])
    before = engine.num_compiled()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        requests = [
            (f"{i}", "p" * (1 + 7 * i % 60), greedy(max_tokens=1 + i, logprobs=i % 4 or None))
            for i in range(12)
        ]
        requests += [
            (f"s{i}", "q" * (3 * i + 1), SamplingParams(top_p=0.9, top_k=i, min_p=0.01 * i))
            for i in range(12)
        ]
        requests += [("stop", "abc", greedy(stop=["zz", "q"], min_tokens=2))]
        for request in requests:
            engine.add_request(*request)
        for step in range(10_000):
            if step == 5:
                engine.abort("3")
                engine.abort("11")
            engine.step()
            if not engine.has_work():
                break
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not engine.has_work()
    assert compiled == []
    assert engine.num_compiled() == before == len(engine.config.buckets) + 2


def test_stop_string_across_tokens(engine):
    """A stop string of several tokens: no part of it is ever shown, later tokens are dropped."""
    full = alone(engine, "hello", greedy(max_tokens=30))
    text = full.text
    assert len(text) == 30
    stop = text[10:13]
    at = text.index(stop)
    engine.add_request("s", "hello", greedy(max_tokens=30, stop=[stop]))
    deltas = drain(engine)
    assert "".join(d.outputs[0].text for d in deltas) == text[:at]
    last = deltas[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert deltas[-1].finished
    ids = [i for d in deltas for i in d.outputs[0].token_ids]
    assert ids == full.token_ids[: at + len(stop)]

    kept = alone(
        engine, "hello", greedy(stop=[stop], max_tokens=30, include_stop_str_in_output=True)
    )
    assert kept.text == text[: at + len(stop)]


def test_held_back_text_comes_at_the_end(engine):
    """Text that might have begun a stop string is shown when the request ends otherwise."""
    text = alone(engine, "hello", greedy(max_tokens=6)).text
    out = alone(engine, "hello", greedy(max_tokens=6, stop=[text[-2:] + "never"]))
    assert out.text == text
    assert out.finish_reason == "length"


def test_stop_token_ids(engine):
    full = alone(engine, "hello", greedy(max_tokens=30))
    token = full.token_ids[9]
    first = full.token_ids.index(token)
    out = alone(engine, "hello", greedy(max_tokens=30, stop_token_ids=[token]))
    assert out.token_ids == full.token_ids[: first + 1]
    assert out.text == full.text[:first]
    assert (out.finish_reason, out.stop_reason) == ("stop", token)
    later = alone(engine, "hello", greedy(max_tokens=30, stop_token_ids=[token], min_tokens=15))
    assert len(later.token_ids) > 15 or later.finish_reason == "length"


def test_end_of_sequence_is_in_the_tokens_but_not_in_the_text():
    engine = make_engine(_prefer(params(), EOS))
    out = alone(engine, "hello", SamplingParams(temperature=0, max_tokens=9))
    assert out.token_ids == [EOS]
    assert (out.text, out.finish_reason, out.stop_reason) == ("", "stop", None)
    on = alone(engine, "hello", greedy(max_tokens=4))
    assert on.token_ids == [EOS] * 4
    assert on.text == ""
    shown = alone(engine, "hello", greedy(max_tokens=2, skip_special_tokens=False))
    assert shown.text == "<eos><eos>"


def _prefer(weights, token_id):
    """Weights with which the model always gives one token."""
    trunk = dict(weights["trunk"])
    head = np.zeros(trunk["lm_head"]["weight"].shape, np.float32)
    table = np.array(trunk["embed_tokens"]["weight"])
    table[:, 0] = 50.0  # survives every layer, so the first feature is large and positive
    head[token_id, 0] = 1.0
    trunk["embed_tokens"] = {"weight": jax.numpy.asarray(table)}
    trunk["lm_head"] = {"weight": jax.numpy.asarray(head)}
    return {**weights, "trunk": trunk}


def test_logprobs_have_vllms_shape(engine):
    out = alone(engine, "hello", greedy(max_tokens=5, logprobs=3))
    assert len(out.logprobs) == 5
    for token_id, places in zip(out.token_ids, out.logprobs, strict=True):
        assert next(iter(places)) == token_id
        assert len(places) == 3  # greedy: the chosen one is among the three
        assert places[token_id].rank == 1
        ranked = sorted(places.values(), key=lambda entry: entry.rank)
        assert [entry.rank for entry in ranked] == [1, 2, 3]
        assert ranked[0].logprob >= ranked[1].logprob >= ranked[2].logprob
    chosen = [places[i].logprob for i, places in zip(out.token_ids, out.logprobs, strict=True)]
    assert out.cumulative_logprob == pytest.approx(sum(chosen))
    bare = alone(engine, "hello", greedy(max_tokens=5, logprobs=0))
    assert [len(places) for places in bare.logprobs] == [1] * 5
    assert [p[i].logprob for i, p in zip(bare.token_ids, bare.logprobs, strict=True)] == chosen


def test_cached_tokens_are_reported(engine):
    prompt = "a prompt that nobody has sent before, of 48 bytes"
    first = run(engine, [("1", prompt, greedy())])["1"]
    second = run(engine, [("2", prompt, greedy())])["2"]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(prompt) - 1
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_cached_prompt_takes_a_small_step(engine):
    """The host expects the hit: the second time the long prompt does not launch a large bucket."""
    prompt = "another prompt that nobody has sent before now"
    run(engine, [("1", prompt, greedy(max_tokens=2))])
    before = engine.stats().padded_tokens
    run(engine, [("2", prompt, greedy(max_tokens=2))])
    assert engine.stats().padded_tokens - before <= 3 * engine.config.buckets[0]


def test_queue_is_bounded():
    engine = make_engine(max_queue_size=2)
    for i in range(engine.config.table_rows + 2):
        engine.add_request(str(i), "hello", greedy())
    with pytest.raises(QueueFullError, match="max_queue_size is 2"):
        engine.add_request("more", "hello", greedy())
    outputs = {}
    for delta in drain(engine):
        outputs.setdefault(delta.request_id, []).extend(delta.outputs[0].token_ids)
    assert len(outputs) == engine.config.table_rows + 2
    assert len(set(map(tuple, outputs.values()))) == 1
    engine.add_request("more", "hello", greedy())
    assert run(engine, [])["more"].outputs[0].token_ids == outputs["0"]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "at least one token"),
        ([], {}, "at least one token"),
        ([260], {}, "from 0 to 259, got 260"),
        ([-1], {}, "from 0 to 259, got -1"),
        ([1.5], {}, "integer token ids"),
        ("x" * 96, {"max_tokens": None}, "prompt has 96 tokens.*at most 95.*max_model_len"),
        ("x" * 90, {"max_tokens": 7}, "max_tokens is 7.*at most 6.*max_model_len"),
        ("x", {"logprobs": 6}, "logprobs must be at most 5"),
        ("x", {"stop_token_ids": list(range(17))}, "at most 16"),
        ("x", {"stop_token_ids": [260]}, "from 0 to 259, got 260"),
    ],
)
def test_impossible_requests_are_refused_at_once(engine, prompt, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request("bad", prompt, greedy(**options))
    assert not engine.has_work()


def test_a_pool_smaller_than_the_model_limits_requests():
    limits = {
        "eos_token_ids": (EOS,),
        "vocab_size": 260,
        "max_model_len": 96,
        "max_pool_tokens": 49,
        "max_logprobs": 5,
        "max_stop_token_ids": 16,
        "num_rows": 8,
    }
    with pytest.raises(InvalidRequestError, match=r"at most 48.*size of the KV pool"):
        check_request([1] * 49, greedy(), **limits)
    with pytest.raises(InvalidRequestError, match=r"max_tokens is 10.*at most 9.*KV pool"):
        check_request([1] * 40, greedy(max_tokens=10), **limits)
    assert check_request([1] * 40, greedy(max_tokens=9), **limits) == 49
    assert check_request([1] * 40, greedy(max_tokens=None), **limits) == 49


def test_a_tight_pool_preempts_and_changes_nothing(engine):
    """The invariants hold after every step, and everybody gets what they get alone."""
    tight = make_engine(check_invariants=True)
    requests = [(str(i), p[:20] + str(i), greedy(max_tokens=60)) for i, p in enumerate(PROMPTS * 2)]
    outputs = run(tight, requests)
    stats = tight.stats()
    assert stats.preemptions > 0
    for request_id, prompt, sampling in requests:
        expected = alone(engine, prompt, sampling)
        assert outputs[request_id].outputs[0].token_ids == expected.token_ids
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks


def test_abort_frees_blocks_and_leaves_the_others(engine):
    expected = alone(engine, "abc", greedy(max_tokens=30)).token_ids
    for i in range(8):
        engine.add_request(str(i), "abc", greedy(max_tokens=30))
    deltas = [delta for _ in range(6) for delta in engine.step()]
    for i in (0, 2, 5, 7):
        engine.abort(str(i))
    engine.abort("never there")
    outputs, reasons = {}, {}
    for delta in deltas + drain(engine):
        outputs.setdefault(delta.request_id, []).extend(delta.outputs[0].token_ids)
        if delta.finished:
            reasons[delta.request_id] = delta.outputs[0].finish_reason
    assert {i for i, reason in reasons.items() if reason == "abort"} == {"0", "2", "5", "7"}
    for i in ("1", "3", "4", "6"):
        assert reasons[i] == "length"
        assert outputs[i] == expected


def test_abort_in_the_queue(engine):
    for i in range(12):
        engine.add_request(str(i), "abc", greedy())
    engine.abort("11")
    outputs = run(engine, [])
    assert outputs["11"].outputs[0].finish_reason == "abort"
    assert outputs["11"].outputs[0].token_ids == []
    assert sum(o.outputs[0].finish_reason == "length" for o in outputs.values()) == 11


def test_nan_logits_end_only_their_own_request(engine):
    """One token's embedding is NaN: whoever feeds it gets an error, the others are untouched."""
    trunk = dict(params()["trunk"])
    table = trunk["embed_tokens"]["weight"].at[ASSISTANT].set(np.nan)
    trunk["embed_tokens"] = {"weight": table}
    sick = make_engine({**params(), "trunk": trunk})
    bad = [*b"abc", ASSISTANT, *b"de"]
    requests = [("bad", bad, greedy()), *((f"{i}", p, greedy()) for i, p in enumerate(PROMPTS))]
    outputs = run(sick, requests)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "NaN" in outputs["bad"].error
    assert outputs["bad"].outputs[0].token_ids == []
    for i, prompt in enumerate(PROMPTS):
        assert outputs[f"{i}"].outputs[0].token_ids == alone(engine, prompt, greedy()).token_ids
    assert run(sick, [("again", bad, greedy())])["again"].outputs[0].finish_reason == "error"


def test_a_failing_detokenizer_ends_only_its_own_request(engine, monkeypatch):
    engine.add_request("good", "hello", greedy())
    engine.add_request("bad", "hello", greedy())
    broken = engine._intake._requests["bad"]
    monkeypatch.setattr(broken, "_detokenizer", object())
    outputs = run(engine, [])
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "AttributeError" in outputs["bad"].error
    assert len(outputs["good"].outputs[0].token_ids) == 12


def test_seeds(engine):
    """Unseeded requests differ from one another; the engine's seed and order fix them."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = make_engine(seed=7), make_engine(seed=7)
    requests = [(str(i), "abc", sampling) for i in range(4)]
    a, b = run(first, requests), run(second, requests)
    ids = [tuple(a[i].outputs[0].token_ids) for i in a]
    assert ids == [tuple(b[i].outputs[0].token_ids) for i in a]
    assert len(set(ids)) == 4
    other = run(make_engine(seed=8), requests)
    assert [tuple(other[i].outputs[0].token_ids) for i in a] != ids


def test_dispatch_is_one_step_ahead(engine, monkeypatch):
    """Step n + 1 is launched before output n is read, and never more than one ahead."""
    log = []
    device = engine._device
    launch, read = device.launch, device.read
    monkeypatch.setattr(device, "launch", lambda size: log.append("launch") or launch(size))
    monkeypatch.setattr(device, "read", lambda out: log.append("read") or read(out))
    run(engine, [("1", "abc", greedy(max_tokens=5))])
    # The fifth token ends it, which the host foresees: no sixth launch. The last read gives back.
    assert log == ["launch", *["launch", "read"] * 4, "read", "read"]


def test_idle_engine_does_nothing(engine):
    steps = engine.stats().steps
    assert engine.step() == []
    assert engine.stats().steps == steps


def test_a_late_abort_does_not_hit_the_next_request_of_that_id(engine, monkeypatch):
    """The abort comes while the output is read with which the request ends by itself."""
    first = engine.add_request("x", "hello", greedy(max_tokens=1))
    read = engine._device.read

    def abort_meanwhile(output):
        engine.abort("x")
        engine.abort(first)
        return read(output)

    monkeypatch.setattr(engine._device, "read", abort_meanwhile)
    deltas = [delta for _ in range(2) for delta in engine.step()]
    assert [delta.outputs[0].finish_reason for delta in deltas] == ["length"]
    monkeypatch.undo()
    second = engine.add_request("x", "hello", greedy(max_tokens=5))
    engine.abort(first)
    deltas = drain(engine)
    assert deltas[-1].outputs[0].finish_reason == "length"
    assert sum(len(delta.outputs[0].token_ids) for delta in deltas) == 5
    engine.abort(second)
    engine.abort("x")
    assert not engine.has_work()
    assert engine.step() == []


def test_an_id_is_in_use_until_its_request_has_ended(engine):
    first = engine.add_request("x", "hello", greedy(max_tokens=4))
    with pytest.raises(
        InvalidRequestError, match=r"'x' is already in use.*has not ended"
    ) as caught:
        engine.add_request("x", "other", greedy())
    assert caught.value.param == "request_id"
    twins = [engine.prepare("y", "abc", greedy()) for _ in range(2)]
    with pytest.raises(InvalidRequestError, match="'y' is already in use"):
        engine.submit(twins)
    outputs = run(engine, [])
    assert list(outputs) == ["x"]
    assert len(outputs["x"].outputs[0].token_ids) == 4
    again = engine.add_request("x", "hello", greedy())
    assert again is not first
    engine.abort(again)
    assert run(engine, [])["x"].outputs[0].finish_reason == "abort"


def test_submit_takes_all_or_none():
    engine = make_engine(max_queue_size=1)
    most = engine.config.table_rows + 1
    requests = [engine.prepare(str(i), "abc", greedy()) for i in range(most + 1)]
    with pytest.raises(QueueFullError):
        engine.submit(requests)
    assert not engine.has_work()
    assert engine.stats().refused == most + 1
    engine.check_room(most)
    with pytest.raises(QueueFullError):
        engine.check_room(most, reserved=1)
    engine.submit(requests[:most])
    assert engine.num_free_places() == 0
    for request in requests[:most]:
        engine.abort(request)
    assert len(run(engine, [])) == most


def test_far_too_long_prompts_are_refused_before_they_are_encoded(engine, monkeypatch):
    def never(*_args, **_options):
        raise AssertionError("encoded")

    monkeypatch.setattr(engine.tokenizer, "encode", never)
    longest = max(map(len, engine.tokenizer.vocabulary.token_bytes))
    with pytest.raises(AssertionError, match="encoded"):
        engine.add_request("x", "a" * 95 * longest, greedy())
    with pytest.raises(InvalidRequestError, match=rf"at most {95 * longest}.*max_model_len") as e:
        engine.add_request("x", "a" * (95 * longest + 1), greedy())
    assert e.value.code == "context_length_exceeded"

    class Ids(list):
        __iter__ = never

    with pytest.raises(InvalidRequestError, match=r"96 tokens.*at most 95"):
        engine.add_request("x", Ids([1] * 96), greedy())


def test_too_many_stop_strings_are_refused(engine):
    most = [str(i) for i in range(64)]
    with pytest.raises(InvalidRequestError, match="stop has 65 strings; at most 64"):
        engine.add_request("x", "hello", greedy(stop=[*most, "more"]))
    assert not engine.has_work()
    assert alone(engine, "hello", greedy(stop=most)).token_ids


def test_blocks_of_ended_rows_count_as_used_until_they_are_released(engine):
    """Eight rows end at once and leave the table one by one, without a step."""
    for i in range(8):
        engine.add_request(str(i), f"{i} abcdefgh", greedy(max_tokens=60))
    for _ in range(8):
        engine.step()
    for i in range(8):
        engine.abort(str(i))
    seen = set()
    for _ in range(20):
        engine.step()
        stats = engine.stats()
        if stats.num_running:
            continue  # what the last step said
        held = int((np.asarray(engine._device.state.scheduler.blocks.ref_counts) > 0).sum())
        assert stats.num_blocks - stats.num_free_blocks - stats.num_evictable_blocks == held
        seen.add(held)
    assert len(seen) > 1
    assert 0 in seen
