"""The scheduler under JAX's transformations: vmap, scan, eval_shape, with and without cond."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.commit import commit
from pagedjax.core.schedule import retire, schedule
from pagedjax.core.state import Status
from tests.core.driver import COLLIDING, Driver, null_samples


def copies(tree):
    return jax.tree.map(jnp.copy, tree)


def traffic_state(driver, seed, steps=5):
    rng = np.random.default_rng(seed)
    for _ in range(6):
        prompt = rng.integers(0, 6, int(rng.integers(2, 30))).tolist()
        driver.add_request(prompt, len(prompt) + 20, stop=False)
    for _ in range(steps):
        driver.step()
    return copies(driver.state)


def hashed_samples(config, plan, num_tokens):
    token = (plan.token_ids[plan.logit_index] * 5 + plan.positions[plan.logit_index]) % 6
    return null_samples(config, num_tokens, token)


def one_step(state, config, num_tokens):
    state, plan = schedule(state, config=config, num_tokens=num_tokens)
    return commit(state, plan, hashed_samples(config, plan, num_tokens), config=config)


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_vmap_of_schedule_equals_each_alone():
    driver = Driver()
    states = [traffic_state(Driver(pool=20), seed) for seed in range(3)]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *states)
    f = partial(schedule, config=driver.config, num_tokens=24)
    together = jax.jit(jax.vmap(f))(batch)
    for i, state in enumerate(states):
        assert_same(jax.tree.map(lambda x, i=i: x[i], together), driver.jit.schedule(state))


@pytest.mark.slow  # by default tests/core/test_simulate.py scans them, and compares with an engine
def test_scan_over_100_steps_equals_a_loop():
    driver = Driver(pool=20)
    config = driver.config
    start = traffic_state(driver, 0, steps=0)
    end, outputs = jax.jit(
        lambda s: jax.lax.scan(lambda c, _: one_step(c, config, 24), s, None, length=100)
    )(start)
    state, f = copies(start), jax.jit(partial(one_step, config=config, num_tokens=24))
    for i in range(100):
        state, output = f(state)
        assert_same(output, jax.tree.map(lambda x, i=i: x[i], outputs))
    assert_same(state, end)
    assert (np.asarray(end.rows.status) == Status.EMPTY).all()


def test_state_in_and_out_have_the_same_shapes_and_types():
    driver = Driver()
    state = driver.state

    def signature(tree):
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]

    after, _plan = jax.eval_shape(partial(schedule, config=driver.config, num_tokens=24), state)
    assert signature(after) == signature(state)
    after, _ = jax.eval_shape(partial(one_step, config=driver.config, num_tokens=24), state)
    assert signature(after) == signature(state)


def test_no_cond_equals_cond():
    """One source, two forms: skipped branches on CPU, a straight line on GPU."""
    one, two = Driver(pool=18, **COLLIDING), Driver(pool=18, use_cond=False, **COLLIDING)
    rng = np.random.default_rng(5)
    for _ in range(40):
        for row in one.empty_rows():
            if rng.random() < 0.5:
                prompt = rng.integers(0, 3, int(rng.integers(1, 20))).tolist()
                for d in (one, two):
                    d.add_request(prompt, len(prompt) + 12, stop=False, row=row)
        one.step()
        two.step()
        assert_same(one.state, two.state)
    assert int(one.state.counters.num_preemptions) > 0


def test_jit_equals_no_jit():
    """The functions are the same without a compiler: op by op, concrete values."""
    driver = Driver(pool=6)
    for i in range(2):
        driver.add_request([i, 1, 2, 3, 4], 8, stop=False)
    a, b = copies(driver.state), copies(driver.state)
    for _ in range(3):
        a, plan = driver.jit.schedule(a)
        a, out_a = driver.jit.commit(a, plan, hashed_samples(driver.config, plan, 24))
        b, out_b = one_step(b, driver.config, 24)
        assert_same(out_a, out_b)
    assert_same(a, b)


def test_rows_ended_between_steps_give_blocks_back_once():
    """Abort and retire without a step, a new request in the row, and the same again: what the
    table still names from before is not released a second time."""
    driver = Driver()
    retire_now = jax.jit(partial(retire, config=driver.config))
    everything = np.ones(driver.config.num_rows, bool)
    driver.add_request([1, 2, 3, 4, 5], 20, stop=False)
    driver.step()
    for _ in range(2):
        driver.state = driver.jit.abort(driver.state, everything)
        driver.state = retire_now(state=driver.state)
        driver.requests.clear()
        assert (np.asarray(driver.state.blocks.ref_counts) == 0).all()
        driver.add_request([5, 4, 3], 20, stop=False)
    driver.drain()


def test_failure_is_data():
    """An impossible request and one with NaN logits end alone; nothing raises, others go on."""
    driver = Driver()
    bad = driver.add_request([1, 2], driver.config.max_model_len + 1)
    nan_row = driver.add_request([1, 2, 3], 20, stop=False)
    good = driver.add_request([3, 2, 1], 20, stop=False)
    state, plan = driver.jit.schedule(driver.state)
    samples = hashed_samples(driver.config, plan, 24)
    rank = int(plan.rank[nan_row])
    samples = dataclasses.replace(samples, nan=samples.nan.at[rank].set(True))
    state, output = driver.jit.commit(state, plan, samples)
    status, error = np.asarray(output.status), np.asarray(output.error)
    assert status[[bad, nan_row, good]].tolist() == [
        Status.FINISHED,
        Status.FINISHED,
        Status.RUNNING,
    ]
    assert error[[bad, nan_row, good]].tolist() == [1, 2, 0]
    assert np.asarray(output.token_ids)[[bad, nan_row]].tolist() == [-1, -1]
    assert int(output.num_tokens[good]) == 4
