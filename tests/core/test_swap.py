"""Swapping in the scheduler: what moves, what stays, what comes back, and what happens when it does
not fit. The shadow pool of the driver checks every token of every context."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from pagedjax.core.config import PREEMPTION_POLICIES, SCHEDULING_POLICIES, SchedulerConfig
from pagedjax.core.state import NULL, Status
from pagedjax.core.swap import plan_swap_out
from tests.core.driver import random_traffic
from tests.core.policy_driver import PolicyDriver
from tests.core.test_machine import QUICK, SchedulerMachine

SIZES = {
    "num_host_blocks": 40,
    "preemption_mode": "swap",
    "hash_mask": 0xFF,
    "max_preemptions": 3,
}


plan = jax.jit(plan_swap_out, static_argnums=0)


def make(**sizes):
    sizes = {"pool": 16, **SIZES, **sizes}
    return PolicyDriver(**{"host_pool": min(24, sizes["num_host_blocks"]), **sizes})


def pressure(driver, steps=60, seed=0, longest=12):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for row in driver.empty_rows():
            prompt = rng.integers(0, 6, int(rng.integers(1, longest))).tolist()
            driver.add_request(prompt, len(prompt) + 24, stop=False, row=row)
        driver.step()


def counters(driver):
    return {k: int(v) for k, v in vars(driver.state.counters).items()}


def test_swapped_rows_come_back_and_nothing_is_computed_twice():
    driver = make()
    pressure(driver)
    driver.drain()
    c = counters(driver)
    assert c["num_swaps_out"] == c["num_preemptions"] > 5
    assert c["num_swaps_in"] == c["num_swaps_out"]
    assert c["num_blocks_swapped_in"] == c["num_blocks_swapped_out"] > c["num_swaps_out"]
    assert c["num_recomputed_tokens"] == c["num_swaps_dropped"] == 0


def test_what_has_no_room_on_the_host_is_computed_again():
    driver = PolicyDriver(**SwapMachine.sizes)
    pressure(driver)
    driver.drain()
    c = counters(driver)
    assert 0 < c["num_swaps_out"] < c["num_preemptions"]
    assert c["num_recomputed_tokens"] > 0


def test_shared_blocks_stay_with_their_reference():
    """Four rows behind one cached prefix of six blocks: a victim keeps its entries of it."""
    driver = make()
    prefix = [1, 2, 3, 4, 5, 0] * 4
    driver.add_request(prefix, len(prefix) + 1, stop=False)
    driver.drain()
    for i in range(4):
        driver.add_request([*prefix, i], 48, stop=False)
    for _ in range(100):
        driver.step()
        swapped = np.flatnonzero(np.asarray(driver.state.rows.status) == Status.SWAPPED)
        if len(swapped):
            break
    row = swapped[0]
    table = np.asarray(driver.state.blocks.block_tables)[row]
    host = np.asarray(driver.state.swap.host_tables)[row]
    held = int(driver.state.blocks.num_blocks_held[row])
    assert held > 6
    assert (table != NULL).tolist() == [True] * 6 + [False] * 10
    assert (host != NULL).tolist() == [False] * 6 + [True] * (held - 6) + [False] * (16 - held)
    references = np.asarray(driver.state.blocks.ref_counts)[table[:6]]
    assert (references >= 2).all(), "the victim and those that run"
    driver.drain()


def test_a_block_that_only_victims_share_moves_with_each_of_them():
    driver = make(
        num_blocks=8,
        num_host_blocks=8,
        pool=8,
        max_model_len=48,
        max_preemptions=2,
        num_rows=4,
        max_num_seqs=4,
    )
    state = driver.state
    tables = jnp.array([[0, 1], [0, 2]], jnp.int32)
    tables = jnp.pad(tables, ((0, 0), (0, 10)), constant_values=NULL)
    state.blocks.__dict__["ref_counts"] = jnp.array([2, 1, 2, 0, 0, 0, 0, 0], jnp.int32)
    state.rows.__dict__["num_computed_tokens"] = jnp.full(4, 8, jnp.int32)
    row, goes = jnp.array([1, 2], jnp.int32), jnp.array([True, True])
    out, ids = plan(driver.config, state, row, goes, tables)
    assert np.asarray(out.src)[:3].tolist() == [0, 1, 0]
    assert int(out.count) == 3
    assert np.asarray(out.tables)[:, :2].tolist() == [[NULL, NULL], [NULL, 2]]
    assert np.asarray(ids)[:, :2].tolist() == [[0, 1], [0, NULL]]
    # The second one alone: the first still holds block 0.
    out, ids = plan(driver.config, state, row, jnp.array([False, True]), tables)
    assert int(out.count) == 0
    assert np.asarray(out.row_ids).tolist() == [NULL, 2]
    assert (np.asarray(ids) == NULL).all()


def test_an_aborted_row_gives_both_pools_back():
    driver = make()
    for seed in range(3):
        swapped = []
        while not len(swapped):
            pressure(driver, steps=1, seed=seed)
            swapped = np.flatnonzero(np.asarray(driver.state.rows.status) == Status.SWAPPED)
        for row in swapped:
            held = np.asarray(driver.state.swap.host_tables)[row]
            assert (held != NULL).any()
            driver.abort_row(int(row))
        driver.step()
        status = np.asarray(driver.state.rows.status)
        for row in swapped:
            assert status[row] == Status.EMPTY
            assert (np.asarray(driver.state.swap.host_tables)[row] == NULL).all()
    driver.drain()  # checks that both pools are whole


def test_rows_that_hold_on_to_shared_blocks_cannot_stop_the_others():
    """Two rows, swapped out, still hold the long prefix that they share. The oldest needs the whole
    pool: they give up what they hold and are computed again."""
    driver = make(pool=12, host_pool=40)
    first = driver.add_request([3], 48, stop=False)
    prefix = [1, 2, 3, 4] * 5
    for i in range(2):
        driver.add_request([*prefix, 5, i], 48, stop=False)
    while first in driver.requests:
        driver.step()
    c = counters(driver)
    assert c["num_swaps_dropped"] > 0
    driver.drain()
    assert driver.counts["finished"] == 3


def test_auto_goes_by_cost():
    """Moving a block there and back costs 8. A row of 8 tokens costs 8 to compute again, one of 32
    with their context 32 + 32 * 31 / 2 / 16, about: 64."""
    driver = make(
        preemption_mode="auto",
        swap_cost_per_block=4.0,
        recompute_cost_per_token=1.0,
        recompute_cost_per_context=1 / 16,
        num_blocks=16,
        max_model_len=48,
    )
    state = driver.state
    tables = jnp.full((driver.config.num_rows, 12), NULL, jnp.int32)
    tables = tables.at[0, :2].set(jnp.arange(2)).at[1, :8].set(jnp.arange(2, 10))
    state.blocks.__dict__["ref_counts"] = jnp.ones(16, jnp.int32)
    state.rows.__dict__["num_computed_tokens"] = jnp.array([8, 32] + [0] * 6, jnp.int32)
    row = jnp.array([0, 1] + [NULL] * 6, jnp.int32)
    recompute_cost = [8 + (8 * 4) / 16, 32 + (32 * 16) / 16]
    assert recompute_cost[0] < 2 * 2 * 4
    assert recompute_cost[1] == 2 * 8 * 4
    out, _ = plan(driver.config, state, row, row != NULL, tables)
    assert np.asarray(out.row_ids).tolist() == [NULL] * 8, "equal cost: nothing is moved"
    state.rows.__dict__["num_computed_tokens"] = jnp.array([8, 33] + [0] * 6, jnp.int32)
    tables = tables.at[1, 8].set(10)
    cheaper = make(
        preemption_mode="auto",
        swap_cost_per_block=3.5,
        recompute_cost_per_token=1.0,
        recompute_cost_per_context=1 / 16,
        num_blocks=16,
        max_model_len=48,
    )
    out, _ = plan(cheaper.config, state, row, row != NULL, tables)
    assert np.asarray(out.row_ids).tolist() == [NULL, 1] + [NULL] * 6


def test_every_fault_of_the_host_pool_is_reported():
    driver = make()
    state, check = driver.state, driver.check
    swap = state.swap

    def reported(**changes):
        bad = dataclasses.replace(state, swap=dataclasses.replace(swap, **changes))
        counts = vars(check(bad))
        return {name for name, count in counts.items() if int(count)}

    assert reported() == set()
    assert reported(num_free=swap.num_free - 1) == {"host_pool"}, "a block is leaked"
    assert reported(ref_counts=swap.ref_counts.at[0].set(1)) == {"host_pool"}
    assert reported(free_stack=swap.free_stack.at[0].set(0)) == {"host_pool"}, "twice free"
    assert reported(num_ref_errors=jnp.int32(1)) == {"host_pool"}
    # A row that is not swapped out names a block of the host, which is free besides.
    named = reported(host_tables=swap.host_tables.at[0, 0].set(5))
    assert named == {"host_pool", "host_tables", "idle_rows"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preemption_mode": "swap"}, "'swap' needs num_host_blocks"),
        ({"preemption_mode": "recompute", "num_host_blocks": 4}, "num_host_blocks must be 0"),
        ({"preemption_mode": "lazy"}, "must be one of auto, recompute, swap"),
        ({"num_host_blocks": -1}, "num_host_blocks must be at least 0"),
        ({"num_host_blocks": 9, "max_swap_in_blocks": 7}, "must be 0 or at least 8"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    sizes = {
        "num_rows": 1,
        "max_num_seqs": 1,
        "num_blocks": 8,
        "block_size": 4,
        "max_model_len": 32,
        "max_num_batched_tokens": 8,
    }
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**sizes, **changes)


class SwapMachine(SchedulerMachine):
    """Requests, aborts and steps in any order, with a host pool that is sometimes too small."""

    driver_class = PolicyDriver
    sizes: ClassVar = {"pool": 14, "host_pool": 8, **SIZES}


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = QUICK


@pytest.mark.slow
class TestSwapMachineLong(SwapMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


MODES = ("recompute", "swap", "auto")
# Every scheduling policy, preemption policy and mode; the pairs meet over the list.
COMBINATIONS = [
    (scheduling, PREEMPTION_POLICIES[(i + j) % 3], mode)
    for i, scheduling in enumerate(SCHEDULING_POLICIES)
    for j, mode in enumerate(MODES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheduling", "preemption", "mode"), COMBINATIONS)
def test_all_policies_and_modes(scheduling, preemption, mode):
    """850 steps each, more than 10,000 together."""
    driver = make(
        scheduling_policy=scheduling,
        preemption_policy=preemption,
        preemption_mode=mode,
        num_host_blocks=0 if mode == "recompute" else 14,
        swap_cost_per_block=1.5,
        recompute_cost_per_context=0.01,
        max_preemptions=3,
        time_slice_tokens=5,
        max_passed_over=8,
        num_blocks=18,
        pool=18,
        num_tokens=16,
        use_cond=scheduling != "priority",
    )
    random_traffic(driver, steps=850, seed=len(scheduling) + len(mode))
    c = counters(driver)
    assert driver.counts["finished"] > 100
    assert c["num_preemptions"] > 20
    if mode == "swap":
        assert c["num_swaps_out"] > 10
