"""The real model against reference outputs: the same tokens and logprobs, however they are served.

A configuration compiles one or two step sizes of a 30-layer model, so the default lane runs a few
telling ways of serving and the slow lane all of them.
"""

import jax
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine import build_engine
from pagedjax.llm import LLM
from pagedjax.sampling_params import SamplingParams

pytestmark = pytest.mark.real_model
LOGPROB_TOLERANCE = 1e-4  # the bar is 1e-3; what float32 really gives is far below
TOP_TOLERANCE = 1e-3
BUDGET = 32
FEW = 24
"""Tokens of the `short` lines' outputs, when they are served together; elsewhere 48."""


def make_llm(gguf, **settings):
    """A float32 engine that compiles nothing before it is needed."""
    defaults = {
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "num_blocks": 400,
        "max_model_len": 1040,
        "max_num_batched_tokens": 64,
        "token_buckets": (64,),
        "max_logprobs": 5,
        "max_num_seqs": 20,
        "compilation_cache_dir": "off",
    }
    config = EngineConfig(**{**defaults, **settings})
    return LLM(engine=build_engine(gguf, config, progress=False, warm_up=False))


def serve(llm, lines, *, one_at_a_time=False, num_tokens=48):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=5)
    prompts = [line["prompt_text"] for line in lines]
    if one_at_a_time:
        return [llm.generate(p, params, use_tqdm=False)[0] for p in prompts]
    return llm.generate(prompts, params, use_tqdm=False)


def check(outputs, lines, num_tokens=48):
    """Tokens up to the first near-tie, chosen and top logprobs."""
    worst = 0.0
    for output, line in zip(outputs, lines, strict=True):
        completion = output.outputs[0]
        assert output.prompt_token_ids == line["prompt_ids"], line["id"]
        assert len(completion.token_ids) == num_tokens
        n = min([num_tokens, *line["near_ties"]])
        assert list(completion.token_ids[:n]) == line["output_ids"][:n], line["id"]
        got = [completion.logprobs[i][completion.token_ids[i]].logprob for i in range(n)]
        worst = max(worst, np.abs(np.subtract(got, line["logprobs"][:n])).max(initial=0))
        for i in range(n):
            top = zip(line["top5_ids"][i], line["top5_logprobs"][i], strict=True)
            for token_id, logprob in top:
                found = completion.logprobs[i].get(token_id)
                if found is not None:  # ties at the fifth place may name another token
                    assert abs(found.logprob - logprob) < TOP_TOLERANCE, (line["id"], i)
        assert completion.finish_reason == "length"
        if n == 48:
            assert completion.text == output_text(line), line["id"]
        elif n == num_tokens:  # the last character may be there in part
            assert output_text(line).startswith(completion.text.rstrip("\ufffd")), line["id"]
    assert worst < LOGPROB_TOLERANCE, worst


def output_text(line):
    """The reference text without special tokens, which the engine leaves out by default."""
    text = line["output_text"]
    for special in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"):
        text = text.replace(special, "")
    return text


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    """One engine for all of the default lane: its pool has room for the longest line, or for all
    the `short` ones."""
    return make_llm(
        smollm2_gguf, num_blocks=72, max_num_batched_tokens=BUDGET, token_buckets=(BUDGET,)
    )


@pytest.fixture(scope="module")
def short(golden):
    return sorted(golden, key=lambda line: len(line["prompt_ids"]))[:15]


@pytest.fixture(scope="module")
def cold(llm, short):
    """15 prompts in one batch, prefill in chunks of what the budget leaves."""
    outputs = serve(llm, short, num_tokens=FEW)
    assert llm.engine.stats().preemptions == 0
    return outputs


def test_at_once(cold, short):
    check(cold, short, FEW)


def test_from_the_prefix_cache(llm, cold, short):
    outputs = serve(llm, short, num_tokens=FEW)
    check(outputs, short, FEW)
    assert sum(o.num_cached_tokens for o in outputs) > 100


def test_a_line_alone(llm, golden):
    check(serve(llm, golden[:1], one_at_a_time=True), golden[:1])


def test_all_lines_in_a_pool_so_small_that_rows_are_preempted(llm, golden):
    before = llm.engine.stats().preemptions
    check(serve(llm, golden), golden)
    assert llm.engine.stats().preemptions > before


@pytest.mark.slow
def test_all_lines_in_a_pool_that_has_room(smollm2_gguf, golden):
    llm = make_llm(smollm2_gguf)
    for _ in range(2):
        check(serve(llm, golden), golden)
    assert llm.engine.stats().preemptions == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("budget", [1, 7, 64, 512], ids="chunk{}".format)
def test_chunk_sizes(smollm2_gguf, golden, budget, caching):
    """`max_num_batched_tokens` bounds the chunk: 1 and 7 leave no prompt whole, 512 every one."""
    llm = make_llm(
        smollm2_gguf,
        max_num_batched_tokens=budget,
        token_buckets=(budget,) if budget <= 64 else (32, budget),
        max_num_seqs=20,
        enable_prefix_caching=caching,
    )
    lines = golden if budget > 1 else golden[:6]
    check(serve(llm, lines), lines)
    check(serve(llm, lines), lines)
    check(serve(llm, lines[:5], one_at_a_time=True), lines[:5])
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_line_alone(llm, golden):
    check(serve(llm, golden, one_at_a_time=True), golden)


def test_a_wrong_reference_is_noticed(cold, short):
    """The checker can fail: one token of the reference changed, one logprob shifted."""
    line, outputs = short[0], cold[:1]
    ids = list(line["output_ids"])
    ids[1] += 1
    with pytest.raises(AssertionError):
        check(outputs, [{**line, "output_ids": ids}], FEW)
    shifted = [x + 2e-3 for x in line["logprobs"]]
    with pytest.raises(AssertionError):
        check(outputs, [{**line, "logprobs": shifted}], FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-2), ("bfloat16", 1e-1)])
def test_a_pool_of_16_bits(smollm2_gguf, golden, dtype, tolerance):
    """float32 weights over keys and values of 16 bits: logprobs of the first tokens."""
    outputs = serve(make_llm(smollm2_gguf, kv_cache_dtype=dtype), golden[:8])
    for output, line in zip(outputs, golden[:8], strict=True):
        got = output.outputs[0]
        for i in range(min([4, *line["near_ties"]])):
            assert got.token_ids[i] == line["output_ids"][i], line["id"]
            logprob = got.logprobs[i][got.token_ids[i]].logprob
            assert abs(logprob - line["logprobs"][i]) < tolerance, (line["id"], i)
