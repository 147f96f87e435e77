"""Preemption through the engine: a pool far too small gives the tokens of one with room."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine import InvalidRequestError
from pagedjax.engine.build import scheduler_config
from pagedjax.sampling_params import SamplingParams
from tests.shell.books import check_books
from tests.shell.tiny import PRESSED, drain, make_engine, run

LARGE = {"num_blocks": 160, "max_num_seqs": 8, "num_rows": 16, "token_buckets": (16,)}


def requests():
    rng = np.random.default_rng(0)
    prefixes = ["", "", "the same beginning "]
    out = []
    for i in range(64):
        letters = rng.integers(97, 122, int(rng.integers(1, 20))).tolist()
        text = prefixes[i % 3] + bytes(letters).decode()
        sampling = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=int(rng.integers(8, 24)), logprobs=0
        )
        out.append((str(i), text, sampling))
    return out


@pytest.fixture(scope="module")
def expected():
    """Each of them alone, so that there is room for it; in the same program as the others."""
    engine, outputs = make_engine(**PRESSED), {}
    for request in requests():
        outputs |= run(engine, [request])
    assert engine.stats().preemptions == 0
    return outputs


@pytest.mark.slow
def test_a_large_pool_gives_the_tokens_of_each_alone(expected):
    engine = make_engine(**LARGE)
    assert_equal(run(engine, requests()), expected)
    assert engine.stats().preemptions == 0


def assert_equal(outputs, expected):
    assert outputs.keys() == expected.keys()
    for request_id, want in expected.items():
        got, want = outputs[request_id].outputs[0], want.outputs[0]
        assert got.token_ids == want.token_ids
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)


def spoil(pool, where):
    """NaN in these blocks [N]. Memory that the pool's own must stay is put back where it lay."""
    spoilt = jnp.where(where.reshape(1, -1, *[1] * (pool.ndim - 2)), jnp.nan, pool)
    return jax.device_put(spoilt, pool.sharding)


def poison(engine):
    """NaN in every block of both pools that nobody holds and that is not cached."""
    state = engine._device._state
    blocks, prefix, swap = state.scheduler.blocks, state.scheduler.prefix, state.scheduler.swap
    free = (np.asarray(blocks.ref_counts) == 0) & (np.asarray(prefix.slot) >= 2**31 - 1)
    host_free = np.asarray(swap.ref_counts) == 0
    pools = {
        name: spoil(getattr(state, name), where)
        for name, where in (
            ("k_pool", free),
            ("v_pool", free),
            ("host_k_pool", host_free),
            ("host_v_pool", host_free),
        )
    }
    engine._device._state = dataclasses.replace(state, **pools)


def run_poisoned(engine, some):
    outputs = {}
    for request_id, prompt, sampling in some:
        engine.add_request(request_id, prompt, sampling)
    while engine.has_work():
        for delta in engine.step():
            if delta.request_id in outputs:
                outputs[delta.request_id].add(delta)
            else:
                outputs[delta.request_id] = delta
        poison(engine)
    return outputs


MODES = {
    "recompute": {"preemption_mode": "recompute", "num_host_blocks": 0},
    "swap": {},
    # A row of more than some six blocks is swapped: its context makes it dear to compute again.
    "auto": {
        "preemption_mode": "auto",
        "preemption_policy": "most_tokens",
    },
}
COSTS = {
    "swap_cost_per_block": 3.0,
    "recompute_cost_per_token": 1.0,
    "recompute_cost_per_context": 0.05,
}


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("recompute", marks=pytest.mark.slow),
        "swap",
        pytest.param("auto", marks=pytest.mark.slow),
    ],
)
def test_a_small_pool_gives_the_tokens_of_each_alone(expected, mode):
    engine = make_engine(**PRESSED | MODES[mode], costs=COSTS if mode == "auto" else {})
    go = run_poisoned if mode == "swap" else run
    outputs = go(engine, requests())
    assert_equal(outputs, expected)
    check_books(
        engine.stats(),
        mode,
        num_requests=64,
        num_outputs=sum(sampling.max_tokens for *_, sampling in requests()),
    )


def test_abort_while_a_request_is_swapped_out():
    engine = make_engine(**PRESSED)
    for request_id, prompt, sampling in requests()[:16]:
        engine.add_request(request_id, prompt, sampling)
    for _ in range(200):
        engine.step()
        if engine.stats().num_free_host_blocks < 40:
            break
    assert engine.stats().num_free_host_blocks < 40
    for i in range(16):
        engine.abort(str(i))
    drain(engine)
    stats = engine.stats()
    assert stats.num_free_host_blocks == 40
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks


def test_nothing_is_compiled_after_warm_up():
    engine = make_engine(**PRESSED)
    engine.warm_up()
    before = engine.num_compiled()
    run(engine, requests()[:16])
    stats = engine.stats()
    assert stats.swaps_in == stats.swaps_out > 0
    assert engine.num_compiled() == before


def test_a_priority_must_be_heeded():
    greedy = SamplingParams(max_tokens=2, priority=3)
    plain, urgent = make_engine(), make_engine(scheduling_policy="priority")
    with pytest.raises(InvalidRequestError, match="priority must be 0 under scheduling_policy f"):
        plain.add_request("a", "x", greedy)
    request = urgent.add_request("a", "x", SamplingParams(max_tokens=2), priority=-4)
    assert int(request.device_params(4).priority) == -4


def test_names_of_policies_and_functions():
    sizes = {"num_blocks": 8, "max_model_len": 64}
    config = EngineConfig(scheduling_policy="priority", **sizes)
    assert scheduler_config(config, platform="cpu").preemption_policy == "lowest_priority"
    mine = EngineConfig(preemption_policy="pagedjax.core.policies:most_tokens", **sizes)
    assert callable(scheduler_config(mine, platform="cpu").preemption_policy)
    missing = EngineConfig(scheduling_policy="pagedjax.core.policies:lifo", **sizes)
    with pytest.raises(ValueError, match=r"scheduling_policy is .*lifo.* cannot be loaded"):
        scheduler_config(missing, platform="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority"),
        ({"preemption_mode": "swap"}, "preemption_mode swap needs swap_space_gib"),
        ({"preemption_mode": "recompute", "swap_space_gib": 1.0}, "recompute never uses"),
        ({"num_host_blocks": 3, "swap_space_gib": 1.0}, "give one"),
        ({"swap_space_gib": -1.0}, "swap_space_gib must be at least 0"),
        ({"swap_gib_per_s": 0.0}, "swap_gib_per_s must be above 0"),
        ({"time_slice_tokens": 0}, "time_slice_tokens must be from 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)
