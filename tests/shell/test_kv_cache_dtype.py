"""Engines whose pool holds numbers of 16 bits: swapped out, saved, resumed, and what overflows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.sampling_params import SamplingParams
from tests.shell.tiny import PRESSED, drain, make_engine, params, run

STORED = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
REQUESTS = [(str(i), "abcdefgh"[i] * (2 + 2 * i), GREEDY) for i in range(8)]


def crowded(dtype, weights=None):
    """Eight rows of up to 40 tokens in 30 blocks of 4. Engines of one type share their programs."""
    return make_engine(weights, kv_cache_dtype=dtype, **PRESSED)


def logprobs(outputs):
    """Of each request's first token: nothing but the prompt is behind it."""
    chosen = [outputs[name].outputs[0] for name, *_ in REQUESTS]
    return [x.logprobs[0][x.token_ids[0]].logprob for x in chosen]


@pytest.mark.parametrize(
    ("dtype", "most"), [("float16", 0.02), pytest.param("bfloat16", 0.15, marks=pytest.mark.slow)]
)
def test_served_under_pressure_saved_and_resumed(dtype, most, tmp_path):
    uninterrupted = run(crowded(dtype), REQUESTS)
    error = np.subtract(logprobs(uninterrupted), logprobs(run(crowded("float32"), REQUESTS)))
    assert 1e-6 < np.abs(error).max() < most
    first = crowded(dtype)
    state = first.device.state
    pools = (state.k_pool, state.v_pool, state.host_k_pool, state.host_v_pool)
    assert {x.dtype for x in pools} == {jnp.dtype(STORED[dtype])}
    for request in REQUESTS:
        first.add_request(*request)
    deltas, outputs = [], {}
    while first.stats().num_free_host_blocks == 40:
        assert first.has_work(), "nobody was swapped out"
        deltas += first.step()
    deltas += first.save(tmp_path / "state")
    second = crowded(dtype)
    second.load(tmp_path / "state")
    for delta in [*deltas, *drain(second)]:
        if delta.request_id in outputs:
            outputs[delta.request_id].add(delta)
        else:
            outputs[delta.request_id] = delta
    assert second.stats().blocks_swapped_in > 0
    for name, *_ in REQUESTS:
        got, wanted = outputs[name].outputs[0], uninterrupted[name].outputs[0]
        assert got.token_ids == wanted.token_ids, name
        assert got.cumulative_logprob == wanted.cumulative_logprob, name
    with pytest.raises(ValueError, match=r"kv dtype: \w+, not float32"):
        crowded("float32").load(tmp_path / "state")


def test_numbers_above_float16_end_their_request_with_an_error():
    """Keys that float16 cannot hold are infinite there; a request is told, nothing is clamped."""
    weights = jax.tree.map(lambda x: x * 1e6 if x.ndim > 1 else x, params())
    request = [("a", "x", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))]
    for dtype, reason in (("float32", "length"), ("float16", "error")):
        output = run(crowded(dtype, weights), request)["a"].outputs[0]
        assert output.finish_reason == reason, dtype
