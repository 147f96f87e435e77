"""Swapping inside the compiled step: nothing is copied, and it transforms like the rest."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.schedule import schedule
from pagedjax.core.step import init_state
from pagedjax.models.params import init_params
from tests.core.driver import Driver
from tests.core.forms import compile_form
from tests.core.test_step import MODEL, make_config
from tests.core.test_transforms import assert_same, copies, one_step

SIZES = {"num_blocks": 16, "num_host_blocks": 24, "preemption_mode": "swap", "max_model_len": 48}


@pytest.mark.parametrize(
    ("form", "num_tokens"),
    [
        # By default with everything else on, in tests/core/test_fork_step.py.
        pytest.param("step", 16, marks=pytest.mark.slow),
        pytest.param("run", 2, marks=pytest.mark.slow),
        pytest.param("scan", 2, marks=pytest.mark.slow),
    ],
)
def test_no_pool_is_copied(form, num_tokens):
    """From the compiled program: all four pools are aliased to the outputs, temporary memory is far
    below one of them, and no copy instruction has their shape."""
    config = make_config(num_blocks=4096, num_host_blocks=3072)
    params = jax.eval_shape(
        partial(init_params, MODEL.config, dtype=jnp.float32, stacked=False), jax.random.key(0)
    )
    state = jax.eval_shape(lambda: init_state(config, kv_dtype=jnp.float32))
    compiled = compile_form(form, params, state, config=config, num_tokens=num_tokens)
    pool_bytes, host_bytes = state.k_pool.size * 4, state.host_k_pool.size * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * (pool_bytes + host_bytes)
    assert memory.temp_size_in_bytes < host_bytes // 2
    for pool in (state.k_pool, state.host_k_pool):
        shape = ",".join(map(str, pool.shape))
        assert not re.findall(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())


def crowded(seed, steps, **changes):
    """A driver in the middle of its work, with rows swapped out."""
    driver = Driver(**SIZES, **changes)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for row in driver.empty_rows():
            prompt = rng.integers(0, 6, int(rng.integers(1, 12))).tolist()
            driver.add_request(prompt, len(prompt) + 24, stop=False, row=row)
        driver.step()
    return driver


@pytest.mark.slow
def test_vmap_equals_each_alone():
    drivers = [crowded(seed, 12 + seed) for seed in range(3)]
    states = [copies(driver.state) for driver in drivers]
    assert any((np.asarray(state.swap.ref_counts) > 0).any() for state in states)
    batch = jax.tree.map(lambda *x: jnp.stack(x), *states)
    function = partial(schedule, config=drivers[0].config, num_tokens=24)
    together = jax.jit(jax.vmap(function))(batch)
    alone = jax.jit(function)
    for i, state in enumerate(states):
        assert_same(jax.tree.map(lambda x, i=i: x[i], together), alone(state))


@pytest.mark.slow
def test_scan_equals_a_loop():
    driver = crowded(0, 12)
    config = driver.config
    end, outputs = jax.jit(
        lambda s: jax.lax.scan(lambda c, _: one_step(c, config, 24), s, None, length=100)
    )(copies(driver.state))
    state, function = copies(driver.state), jax.jit(partial(one_step, config=config, num_tokens=24))
    for i in range(100):
        state, output = function(state)
        assert_same(output, jax.tree.map(lambda x, i=i: x[i], outputs))
    assert_same(state, end)
    assert int(end.counters.num_swaps_in) > 0


@pytest.mark.slow
def test_no_cond_equals_cond():
    one, two = crowded(3, 60), crowded(3, 60, use_cond=False)
    assert_same(one.state, two.state)
    assert int(one.state.counters.num_swaps_out) > 3
