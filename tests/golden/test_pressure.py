"""The real model in a pool of 30 % of what its requests need: the tokens of a pool with room."""

import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine import build_engine
from pagedjax.sampling_params import SamplingParams
from tests.shell.books import check_books

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_REQUESTS, BLOCK, BUDGET = 64, 16, 64
NEAR_TIE = 1e-3
"""Two best tokens closer than this (logprob) may change places with the order of summation."""

MODES = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "num_host_blocks": 400},
    # Swapping is far cheaper, but there is room for two or three requests on the host.
    "auto": {"preemption_mode": "auto", "num_host_blocks": 20},
}


def requests(golden):
    """-> [(prompt ids, number of outputs)]: parts of the golden prompts, some beginning alike."""
    rng = np.random.default_rng(0)
    out = []
    for i in range(NUM_REQUESTS):
        ids = (
            golden[i % len(golden)]["prompt_ids"] + golden[(i * 7 + 3) % len(golden)]["output_ids"]
        )
        out.append((ids[: int(rng.integers(16, 160))], int(rng.integers(16, 64))))
    return out


def make_engine(gguf, **settings):
    config = EngineConfig(
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=BUDGET,
        token_buckets=(BUDGET,),
        max_num_seqs=NUM_REQUESTS,
        max_logprobs=2,
        watermark=0.0,
        compilation_cache_dir="off",
        **settings,
    )
    return build_engine(gguf, config, progress=False, warm_up=False)


def serve(engine, requests):
    """-> outputs by number; the oldest that is left gets its next token in a bounded time."""
    outputs, waited = {}, 0
    for i, (ids, num_outputs) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True, logprobs=2)
        engine.add_request(str(i), ids, params)
    oldest = 0
    for step in range(20_000):
        if not engine.has_work():
            break
        for delta in engine.step():
            i = int(delta.request_id)
            if i in outputs:
                outputs[i].add(delta)
            else:
                outputs[i] = delta
            if i == oldest:
                waited = 0
        while oldest in outputs and outputs[oldest].finished:
            oldest, waited = oldest + 1, 0
        waited += 1
        # A whole context of 256 tokens takes 4 chunks; then a few steps of the pipeline.
        assert waited < 12, (oldest, step)
        if step % 20 == 0:
            engine.device.check()
    assert len(outputs) == len(requests)
    assert all(output.finished for output in outputs.values())
    return outputs


@pytest.fixture(scope="module")
def reference(smollm2_gguf, golden):
    """Requests, their outputs in a pool with room for all, and how many blocks they need."""
    some = requests(golden)
    need = sum(-(-(len(ids) + n) // BLOCK) for ids, n in some)
    engine = make_engine(smollm2_gguf, num_blocks=need)
    outputs = serve(engine, some)
    assert engine.stats().preemptions == 0
    return some, outputs, need


def steady(output):
    """How many tokens of an output come before its first near-tie."""
    completion = output.outputs[0]
    for i, entries in enumerate(completion.logprobs):
        best, second = sorted((e.logprob for e in entries.values()), reverse=True)[:2]
        if best - second < NEAR_TIE:
            return i
    return len(completion.token_ids)


@pytest.mark.parametrize("mode", MODES)
def test_a_small_pool_gives_the_tokens_of_a_large_one(smollm2_gguf, reference, mode):
    some, expected, need = reference
    engine = make_engine(smollm2_gguf, num_blocks=int(need * 0.3), **MODES[mode])
    outputs = serve(engine, some)
    compared = 0
    for i, want in expected.items():
        n = steady(want)
        want, got = want.outputs[0], outputs[i].outputs[0]
        assert len(got.token_ids) == len(want.token_ids) == some[i][1]
        assert got.token_ids[:n] == want.token_ids[:n], i
        chosen = [[c.logprobs[j][c.token_ids[j]].logprob for j in range(n)] for c in (got, want)]
        np.testing.assert_allclose(*chosen, atol=1e-3)
        compared += n
    num_outputs = sum(n for _, n in some)
    assert compared > 0.9 * num_outputs
    stats = engine.stats()
    assert stats.prompt_tokens == sum(len(ids) for ids, _ in some)
    check_books(stats, mode, num_requests=len(some), num_outputs=num_outputs)
