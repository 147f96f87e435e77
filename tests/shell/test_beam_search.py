"""Beam search through the engine, `LLM` and HTTP, against a plain search over the dense model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.engine.errors import InvalidRequestError
from pagedjax.models.forward import forward_dense
from tests.shell.test_server import serving
from tests.shell.tiny import EOS, MODEL, PRESSED, drain, make_engine, params, run

PROMPT = "seventeen tokens!"


@pytest.fixture(scope="module")
def warm():
    engine = make_engine(**PRESSED)
    engine.warm_up()
    return engine


@pytest.fixture
def engine(warm):
    """Left idle by every test, with every block given back."""
    yield warm
    drain(warm)
    stats = warm.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks


@functools.cache
def dense(length):
    """The model over a whole sequence padded to this length, without any cache."""
    return jax.jit(lambda weights, tokens: forward_dense(weights, tokens, MODEL.config))


def logprobs_of(tokens):
    """Log-probabilities of what follows these tokens, [V] float64."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(dense(64)(params(), jnp.asarray(padded)))[0, len(tokens) - 1]
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def plain_search(prompt, search, eos=EOS):
    """The search in plain Python; -> [(output tokens, cum_logprob, score)], the best first."""
    width = search.beam_width
    beams, completed = [((), 0.0)], []
    for _ in range(search.max_tokens):
        candidates = []
        for tokens, total in beams:
            logprobs = logprobs_of([*prompt, *tokens])
            for token in np.argsort(-logprobs, kind="stable")[: 2 * width].tolist():
                longer = ((*tokens, token), total + float(logprobs[token]))
                done = token == eos and not search.ignore_eos
                (completed if done else candidates).append(longer)
        beams = sorted(candidates, key=lambda c: -c[1])[:width]
    scored = []
    for tokens, total in completed + beams:
        done = tokens[-1] == eos and not search.ignore_eos
        scored.append((tokens, total, total / max(len(tokens) - done, 1) ** search.length_penalty))
    return sorted(scored, key=lambda entry: -entry[2])[:width]


def assert_same(outputs, expected):
    """Outputs of an engine against `plain_search`, which computes in float64."""
    assert len(outputs) == len(expected)
    for output, (tokens, total, _) in zip(outputs, expected, strict=True):
        assert tuple(output.token_ids) == tokens
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.5, 3.0])
@pytest.mark.parametrize("width", [1, 3])
def test_search_equals_a_plain_one(engine, width, penalty):
    search = BeamSearchParams(beam_width=width, max_tokens=7, length_penalty=penalty)
    output = run(engine, [("a", PROMPT, search)])["a"]
    assert output.finished
    assert [one.index for one in output.outputs] == list(range(width))
    assert_same(output.outputs, plain_search(list(PROMPT.encode()), search))


def likely_ends(count=3):
    """Bytes that come up in a search from PROMPT: good ends of sequence."""
    search = BeamSearchParams(beam_width=4, max_tokens=6)
    seen = [t for tokens, *_ in plain_search(list(PROMPT.encode()), search) for t in tokens[1:]]
    return sorted(set(seen), key=seen.count, reverse=True)[:count]


@pytest.mark.parametrize("penalty", [0.0, -1.0, 1.0])
def test_outputs_that_end_early(engine, penalty, monkeypatch):
    """With a likely token as end of sequence some outputs are complete and some are not."""
    eos = likely_ends()[0]
    monkeypatch.setattr(engine._intake, "_eos_token_ids", (eos,))
    prompt = list(PROMPT.encode())
    search = BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=penalty)
    expected = plain_search(prompt, search, eos)
    output = run(engine, [("a", PROMPT, search)])["a"]
    assert_same(output.outputs, expected)
    reasons = ["stop" if tokens[-1] == eos else "length" for tokens, *_ in expected]
    assert [one.finish_reason for one in output.outputs] == reasons
    assert penalty > 0 or "stop" in reasons
    for one in output.outputs:
        shown = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
        assert one.text == engine.tokenizer.decode(shown)
    going_on = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    without = run(engine, [("a", PROMPT, going_on)])["a"]
    assert {one.finish_reason for one in without.outputs} == {"length"}
    assert_same(without.outputs, plain_search(prompt, going_on, eos))


def test_searches_beside_other_requests(engine):
    """Several searches, several outputs, single requests; prompts in chunks; few places."""
    before = engine.num_compiled()
    search = BeamSearchParams(beam_width=4, max_tokens=8)
    narrow = BeamSearchParams(beam_width=2, max_tokens=12)
    sampled = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    long = PROMPT * 3
    requests = [
        ("s1", PROMPT, search),
        ("n", "something", sampled),
        ("s2", long, narrow),
        ("g", "another", greedy),
        ("s3", PROMPT, narrow),
    ]
    together = run(engine, requests)
    assert_same(together["s1"].outputs, plain_search(list(PROMPT.encode()), search))
    assert_same(together["s2"].outputs, plain_search(list(long.encode()), narrow))
    assert_same(together["s3"].outputs, plain_search(list(PROMPT.encode()), narrow))
    for name, prompt, one in (requests[1], requests[3]):
        alone = run(engine, [(name, prompt, one)])[name]
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in together[name].outputs]
    assert engine.num_compiled() == before


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_searches(caching):
    """A pool in which the searches push one another out and come back."""
    engine = make_engine(**PRESSED | {"num_blocks": 20}, enable_prefix_caching=caching)
    prompts = [PROMPT, "second prompt", "a third one"]
    search = BeamSearchParams(beam_width=3, max_tokens=18)
    outputs = run(engine, [(prompt, prompt, search) for prompt in prompts])
    assert engine.stats().preemptions > 0
    for prompt in prompts:
        assert_same(outputs[prompt].outputs, plain_search(list(prompt.encode()), search))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort(engine, num_steps):
    search = BeamSearchParams(beam_width=4, max_tokens=20)
    request = engine.add_request("a", PROMPT, search)
    for _ in range(num_steps):
        engine.step()
    engine.abort(request)
    (delta,) = drain(engine)
    assert delta.finished
    assert {output.finish_reason for output in delta.outputs} == {"abort"}


def test_limits(engine):
    def refused(**changes):
        given = BeamSearchParams(**{"beam_width": 2, "max_tokens": 5} | changes)
        with pytest.raises(InvalidRequestError) as caught:
            engine.add_request("a", PROMPT, given)
        return str(caught.value)

    assert "beam_width must be at most 8 (max_beam_width), got 9" in refused(beam_width=9)
    assert "max_tokens is 90" in refused(max_tokens=90)
    assert "blocks of the KV pool; there are 30" in refused(beam_width=8, max_tokens=79)
    narrow = make_engine(**PRESSED | {"max_logprobs": 8})
    with pytest.raises(InvalidRequestError, match=r"beam_width is 5, so 10 .* 8 \(max_logprobs\)"):
        narrow.add_request("a", PROMPT, BeamSearchParams(beam_width=5, max_tokens=5))
    off = make_engine(max_beam_width=0)
    with pytest.raises(InvalidRequestError, match="at most 0"):
        off.add_request("a", PROMPT, BeamSearchParams(beam_width=1, max_tokens=5))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"beam_width": 0}, "beam_width must be an integer in [1, 2147483647], got 0"),
        ({"beam_width": 1.5}, "beam_width must be an integer in [1, 2147483647], got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be an integer in [1, 2147483647], got 0"),
        ({"temperature": 0.5}, "temperature must be 0 or 1 in a beam search, got 0.5"),
        ({"temperature": 2}, "temperature must be a number in {0, 1}, got 2"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number in (-inf, inf)"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
)
def test_parameters_are_checked(change, says):
    with pytest.raises(ValueError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5} | change)
    assert says in str(caught.value)


def test_llm(engine):
    llm = LLM(engine=engine)
    search = BeamSearchParams(beam_width=3, max_tokens=5)
    found = llm.beam_search([PROMPT, {"prompt": "two"}], search)
    assert [len(one.sequences) for one in found] == [3, 3]
    expected = plain_search(list(PROMPT.encode()), search)
    for sequence, (tokens, total, _) in zip(found[0].sequences, expected, strict=True):
        assert sequence.tokens == [*PROMPT.encode(), *tokens]
        assert sequence.cum_logprob == pytest.approx(total, abs=1e-3)
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
    with pytest.raises(ValueError, match="prompt 1: beam_width must be at most 8"):
        llm.beam_search(["a", "b"], [search, BeamSearchParams(beam_width=9, max_tokens=5)])


def test_over_http(engine):
    ask = {"model": "tiny", "max_tokens": 5, "n": 3}
    extra = {"use_beam_search": True, "length_penalty": 0.5}
    search = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5)
    expected = run(engine, [("a", PROMPT, search)])["a"].outputs
    alone = run(engine, [("b", "<user>hi<eos><assistant>", search)])["b"].outputs
    with (
        serving(engine) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.completions.create(prompt=[PROMPT, "two"], extra_body=extra, **ask)
        assert [choice.index for choice in whole.choices] == list(range(6))
        assert [c.text for c in whole.choices[:3]] == [output.text for output in expected]
        assert whole.usage.prompt_tokens == len(PROMPT) + 3
        streamed = ["", "", ""]
        stream = client.completions.create(prompt=PROMPT, extra_body=extra, stream=True, **ask)
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == [output.text for output in expected]
        messages = [{"role": "user", "content": "hi"}]
        chat = client.chat.completions.create(messages=messages, extra_body=extra, **ask)
        assert [choice.index for choice in chat.choices] == [0, 1, 2]
        assert [c.message.content for c in chat.choices] == [output.text for output in alone]
        for change, param in (
            ({"top_p": 0.5}, "top_p"),
            ({"seed": 1}, "seed"),
            ({"stop": ["a"]}, "stop"),
            ({"temperature": 0.7}, "temperature"),
            ({"n": 9}, "beam_width"),
            ({"logprobs": 1}, "logprobs"),
            ({"best_of": 3}, "best_of"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(prompt=PROMPT, extra_body=extra, **ask | change)
            assert caught.value.param == param
        with pytest.raises(openai.BadRequestError, match="length_penalty needs use_beam_search"):
            client.completions.create(prompt=PROMPT, extra_body={"length_penalty": 2.0}, **ask)


def test_a_search_has_a_cache_salt(engine):
    for salt, known in ((None, False), ("red", False), ("red", True), (None, True)):
        search = BeamSearchParams(beam_width=2, max_tokens=2, cache_salt=salt)
        output = run(engine, [("a", "asked under several salts", search)])["a"]
        assert (output.num_cached_tokens > 0) == known
