"""The bit-exact mode on the real model: arrivals shuffled, pools and chunks of several sizes."""

import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine import build_engine
from pagedjax.llm import LLM
from pagedjax.sampling_params import SamplingParams

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_LINES, NUM_OUTPUTS = 8, 24


def make_llm(gguf, *, chunk, num_blocks=400, **settings):
    config = EngineConfig(
        dtype="float32",
        kv_cache_dtype="float32",
        deterministic=True,
        num_blocks=num_blocks,
        max_model_len=1040,
        max_num_batched_tokens=chunk,
        token_buckets=(chunk,),
        max_num_seqs=8,
        max_logprobs=5,
        watermark=0.0,
        compilation_cache_dir="off",
        **settings,
    )
    return LLM(engine=build_engine(gguf, config, progress=False, warm_up=False))


def serve(llm, lines, order):
    """-> per line, in the order of `lines`: token ids, and the five best logprobs as bits."""
    params = [
        SamplingParams(
            temperature=0.7 * (i % 2), seed=i, max_tokens=NUM_OUTPUTS, ignore_eos=True, logprobs=5
        )
        for i in order
    ]
    outputs = llm.generate([lines[i]["prompt_ids"] for i in order], params, use_tqdm=False)
    got = [None] * len(lines)
    for i, output in zip(order, outputs, strict=True):
        completion = output.outputs[0]
        bits = [
            sorted((t, np.float32(entry.logprob).tobytes()) for t, entry in entries.items())
            for entries in completion.logprobs
        ]
        got[i] = list(completion.token_ids), bits
    return got


def test_bits_do_not_depend_on_how_it_is_served(smollm2_gguf, golden):
    lines = [line for line in golden if len(line["prompt_ids"]) < 200][:NUM_LINES]
    order = list(range(len(lines)))
    need = sum(-(-(len(line["prompt_ids"]) + NUM_OUTPUTS) // 16) for line in lines)
    longest = max(-(-(len(line["prompt_ids"]) + NUM_OUTPUTS) // 16) for line in lines)
    llm = make_llm(smollm2_gguf, chunk=64)
    expected = [None] * len(lines)
    for i in order:  # one after the other, alone
        expected[i] = serve(llm, lines, [i])[i]
    rng = np.random.default_rng(0)
    assert serve(llm, lines, order) == expected  # from the cache
    swap = {"preemption_mode": "swap", "num_host_blocks": need}
    preemptions = swaps = 0
    for chunk, num_blocks, settings in (
        (64, need, {}),
        (64, longest + 2, {}),
        (64, longest + 2, swap),
        (7, need // 2, {}),
        (1, 400, {}),
    ):
        num_blocks = max(num_blocks, longest + 2)
        llm = make_llm(smollm2_gguf, chunk=chunk, num_blocks=num_blocks, **settings)
        for _ in range(2):  # cold, then warm
            got = serve(llm, lines, rng.permutation(order).tolist())
            assert got == expected, (chunk, num_blocks, settings)
        preemptions += llm.engine.stats().preemptions
        swaps += llm.engine.stats().swaps_out
    assert preemptions > swaps > 0
