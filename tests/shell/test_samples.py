"""Requests for several outputs: what each is, and that they share their prompt."""

import json
from dataclasses import replace

import httpx
import openai
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.engine.errors import InvalidRequestError, QueueFullError
from tests.shell.test_server import client, server, url, wait_until_idle  # noqa: F401 (fixtures)
from tests.shell.tiny import drain, make_engine, run

PROMPT = "seventeen tokens!"  # and blocks of four: the last one is filled in part
RANDOM = SamplingParams(temperature=1.0, seed=11, max_tokens=9, ignore_eos=True, logprobs=2)


def singles(engine, params, count):
    """The same outputs as requests of their own."""
    ones = [replace(params, n=1, best_of=None, seed=params.sample_seed(i)) for i in range(count)]
    outputs = run(engine, [(f"single{i}", PROMPT, one) for i, one in enumerate(ones)])
    return [outputs[f"single{i}"].outputs[0] for i in range(count)]


def counters(engine):
    return engine._device.state.scheduler.counters


# By default tests/core/test_fork.py shows it without the cache.
@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_outputs_are_those_of_single_requests(engine, caching):
    if not caching:
        engine = make_engine(enable_prefix_caching=False, token_buckets=(16,))
    forked = int(counters(engine).num_forked_tokens)
    before = engine.stats()
    whole = run(engine, [("a", PROMPT, replace(RANDOM, n=4))])["a"]
    after = engine.stats()
    assert [output.index for output in whole.outputs] == [0, 1, 2, 3]
    assert int(counters(engine).num_forked_tokens) - forked == 3 * (len(PROMPT) - 1)
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)
    assert after.output_tokens - before.output_tokens == 4 * 9
    # 17 + 8 of the first, and for each other one the prompt's last token once more.
    assert after.computed_tokens - before.computed_tokens == 17 + 8 + 3 * 9
    assert len({tuple(output.token_ids) for output in whole.outputs}) == 4
    for output, single in zip(whole.outputs, singles(engine, RANDOM, 4), strict=True):
        assert output.token_ids == single.token_ids
        assert output.text == single.text
        assert output.finish_reason == single.finish_reason == "length"
        assert output.cumulative_logprob == pytest.approx(single.cumulative_logprob, abs=1e-4)
        for mine, other in zip(output.logprobs, single.logprobs, strict=True):
            assert mine.keys() == other.keys()


def test_greedy_outputs_are_equal(engine):
    greedy = SamplingParams(temperature=0, n=2, max_tokens=6, ignore_eos=True)
    whole = run(engine, [("a", PROMPT, greedy)])["a"]
    one, two = whole.outputs
    assert one.token_ids == two.token_ids
    assert len(one.token_ids) == 6


def test_more_outputs_than_run_at_once(engine):
    """Eight outputs on four places, beside a request of somebody else's, in a small pool."""
    many = replace(RANDOM, n=8, max_tokens=20, logprobs=None)
    other = replace(RANDOM, seed=3, max_tokens=30)
    outputs = run(engine, [("a", PROMPT, many), ("b", "another prompt", other)])
    assert outputs["a"].finished
    for output, single in zip(outputs["a"].outputs, singles(engine, many, 8), strict=True):
        assert output.token_ids == single.token_ids
    alone = run(engine, [("c", "another prompt", other)])["c"]
    assert outputs["b"].outputs[0].token_ids == alone.outputs[0].token_ids


def test_nothing_is_compiled(engine):
    before = engine.num_compiled()
    run(engine, [("a", PROMPT, replace(RANDOM, n=4))])
    run(engine, [("b", PROMPT, replace(RANDOM, n=1, best_of=3))])
    assert engine.num_compiled() == before


def test_best_of(engine):
    """The two likeliest a token of five, told at the end, the best first."""
    five = singles(engine, RANDOM, 5)
    five.sort(key=lambda output: -output.cumulative_logprob / len(output.token_ids))
    engine.add_request("a", PROMPT, replace(RANDOM, n=2, best_of=5, logprobs=None))
    deltas = drain(engine)
    assert len(deltas) == 1
    assert deltas[0].finished
    got = deltas[0].outputs
    assert [output.index for output in got] == [0, 1]
    assert [output.token_ids for output in got] == [output.token_ids for output in five[:2]]
    assert [output.text for output in got] == [output.text for output in five[:2]]
    assert got[0].logprobs is None
    assert got[0].cumulative_logprob is None


def test_each_output_stops_by_itself(engine):
    """A stop string that some of the outputs have in them, at different places."""
    free = run(engine, [("a", PROMPT, replace(RANDOM, n=4, max_tokens=24))])["a"].outputs
    stop = next(c for c in free[0].text[1:] if c.isprintable())
    stopped = replace(RANDOM, n=4, max_tokens=24, stop=stop)
    whole = run(engine, [("a", PROMPT, stopped)])["a"]
    for output, without in zip(whole.outputs, free, strict=True):
        assert output.text == without.text.split(stop)[0]
        assert output.finish_reason == ("stop" if stop in without.text else "length")
        assert output.stop_reason == (stop if stop in without.text else None)
    assert whole.outputs[0].finish_reason == "stop"
    assert len({len(output.token_ids) for output in whole.outputs}) > 1


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_abort_ends_all(engine, num_steps):
    request = engine.add_request("a", PROMPT, replace(RANDOM, n=6, max_tokens=30))
    for _ in range(num_steps):
        engine.step()
    engine.abort(request)
    deltas = drain(engine)
    assert deltas[-1].finished
    assert [output.finish_reason for output in deltas[-1].outputs] == ["abort"] * 6
    run(engine, [("a", PROMPT, replace(RANDOM, n=2))])  # its id is free again


def test_limits_count_outputs():
    engine = make_engine(max_queue_size=2)  # and eight rows
    with pytest.raises(InvalidRequestError, match=r"n must be at most 8 \(num_rows\), got 9"):
        engine.add_request("a", PROMPT, replace(RANDOM, n=9))
    with pytest.raises(InvalidRequestError, match=r"best_of must be at most 8 .*, got 10"):
        engine.add_request("a", PROMPT, replace(RANDOM, n=2, best_of=10))
    engine.add_request("a", PROMPT, replace(RANDOM, n=8))
    assert engine.num_free_places() == 2
    with pytest.raises(QueueFullError):
        engine.add_request("b", PROMPT, replace(RANDOM, n=3))
    assert engine.num_free_places() == 2
    engine.add_request("b", PROMPT, replace(RANDOM, n=2))
    finished = [delta.request_id for delta in drain(engine) if delta.finished]
    assert sorted(finished) == ["a", "b"]


def test_llm(engine):
    llm = LLM(engine=engine)
    prompts = [PROMPT, "another", "third"]
    outputs = llm.generate(prompts, replace(RANDOM, n=3), use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [3, 3, 3]
    for output, single in zip(outputs[0].outputs, singles(engine, RANDOM, 3), strict=True):
        assert output.token_ids == single.token_ids


# -- over HTTP ---------------------------------------------------------------------------------


ASK = {"model": "tiny", "temperature": 1.0, "seed": 11, "max_tokens": 9}
EXTRA = {"ignore_eos": True}


def test_chat_client(client):  # noqa: F811
    messages = [{"role": "user", "content": "hi"}]
    ask = {"messages": messages, "n": 3, "extra_body": EXTRA, **ASK}
    whole = client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    single = client.chat.completions.create(**ask | {"n": 1})
    assert single.choices[0].message.content == texts[0]
    assert whole.usage.prompt_tokens == single.usage.prompt_tokens
    assert whole.usage.completion_tokens == 3 * 9

    streamed, roles, reasons = ["", "", ""], [], {}
    stream = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    order = []
    for chunk in stream:
        if chunk.usage is not None:
            assert chunk.usage == whole.usage.model_copy(
                update={"prompt_tokens_details": chunk.usage.prompt_tokens_details}
            )
        for choice in chunk.choices:
            order.append(choice.index)
            roles += [choice.index] if choice.delta.role else []
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert streamed == texts
    assert roles == [0, 1, 2]
    assert reasons == dict.fromkeys(range(3), "length")
    assert order != sorted(order), "the choices come interleaved"


def test_completions_client(client):  # noqa: F811
    """Two prompts, three outputs of each: choices 0 to 2 and 3 to 5."""
    ask = {"prompt": ["one prompt", "two"], "n": 3, "extra_body": EXTRA, **ASK}
    whole = client.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4, 5]
    texts = [choice.text for choice in whole.choices]
    assert whole.usage.prompt_tokens == len("one prompt") + len("two")
    assert whole.usage.completion_tokens == 6 * 9
    second = client.completions.create(**ask | {"prompt": "two", "n": 1})
    assert second.choices[0].text == texts[3]
    streamed = [""] * 6
    for chunk in client.completions.create(**ask, stream=True, echo=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [f"{'one prompt' if i < 3 else 'two'}{t}" for i, t in enumerate(texts)]

    best = client.completions.create(**ask | {"prompt": "two", "n": 1}, best_of=3, logprobs=0)
    assert len(best.choices) == 1
    assert best.choices[0].text in texts[3:]
    three = client.completions.create(**ask | {"prompt": "two"}, logprobs=0)
    means = [sum(c.logprobs.token_logprobs) / 9 for c in three.choices]
    assert best.choices[0].text == three.choices[means.index(max(means))].text
    with pytest.raises(openai.BadRequestError, match="best_of must be 1"):
        client.completions.create(prompt="a", best_of=3, stream=True, **ASK)
    with pytest.raises(openai.BadRequestError, match=r"best_of must be .*at least n"):
        client.completions.create(prompt="a", n=3, best_of=2, **ASK)


def test_leaving_ends_all(server):  # noqa: F811
    address, async_engine = server
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 70, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                assert json.loads(line[5:])["choices"]
                break
    wait_until_idle(async_engine.engine)
