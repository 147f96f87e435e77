"""Tests of the test: each invariant is seen to break when the state is made to break it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pagedjax.core.invariants import assert_invariants
from pagedjax.core.state import NULL, Status
from tests.core.driver import Driver


@pytest.fixture(scope="module")
def busy():
    """A driver in mid-traffic, its state, and the plan of the next half step."""
    driver = Driver(pool=24)
    for i in range(5):
        driver.add_request([1, 2, 3, 4, 5, 0, i], 40, stop=False)
    for _ in range(4):
        driver.step()
    between, plan = driver.jit.schedule(jax.tree.map(jnp.copy, driver.state))
    return driver, driver.state, between, plan


def edit(state, part, **fields):
    piece = getattr(state, part)
    changed = {name: change(getattr(piece, name)) for name, change in fields.items()}
    return dataclasses.replace(state, **{part: dataclasses.replace(piece, **changed)})


BLOCK = 0  # filled in by `faults`: a block that row 0 holds


def faults(state):
    held = int(state.blocks.block_tables[0, 0])
    own = int(state.blocks.block_tables[0, int(state.blocks.num_blocks_held[0]) - 1])
    return {
        "ref_counts": edit(state, "blocks", ref_counts=lambda x: x.at[held].add(1)),
        "free_stack": edit(
            state,
            "blocks",
            free_stack=lambda x: x.at[0].set(held),
        ),
        "coverage": edit(state, "blocks", num_free=lambda x: x - 1),
        "duplicates": edit(state, "blocks", block_tables=lambda x: x.at[0, 1].set(x[0, 0])),
        "sentinels": edit(state, "blocks", block_tables=lambda x: x.at[0, -1].set(held)),
        "holdings": edit(state, "rows", num_computed_tokens=lambda x: x.at[0].add(-5)),
        "lengths": edit(state, "rows", num_tokens=lambda x: x.at[0].set(1)),
        "idle_rows": edit(state, "rows", status=lambda x: x.at[0].set(Status.WAITING)),
        "concurrency": edit(state, "rows", status=lambda x: x.at[:].set(Status.RUNNING)),
        "index": edit(state, "prefix", bucket_blocks=lambda x: jnp.full_like(x, NULL)),
        "parents": edit(state, "prefix", depth=lambda x: x + 1),
        "cached_tokens": edit(state, "prefix", tokens=lambda x: x.at[held, 2].add(1)),
        "ref_errors": edit(state, "counters", num_ref_errors=lambda x: x + 1),
    }, own


@pytest.mark.parametrize(
    "name",
    "ref_counts free_stack coverage duplicates sentinels holdings lengths idle_rows concurrency "
    "index parents cached_tokens ref_errors".split(),
)
def test_each_invariant_can_fail(busy, name):
    driver, state, _, _ = busy
    assert_invariants(driver.check(state))
    broken = faults(state)[0][name]
    violations = driver.check(broken)
    assert int(getattr(violations, name)) > 0
    with pytest.raises(AssertionError, match=name):
        assert_invariants(violations)


def test_plan_invariants_can_fail(busy):
    driver, _, between, plan = busy
    check = driver.check
    assert_invariants(check(between, plan))
    twice = dataclasses.replace(
        plan, slot_mapping=plan.slot_mapping.at[1].set(plan.slot_mapping[0])
    )
    assert int(check(between, twice).written) > 0
    own = plan.slot_mapping[0] // driver.config.block_size
    shared = edit(between, "blocks", ref_counts=lambda x: x.at[own].set(2))
    assert int(check(shared, plan).written) > 0
    cached = edit(between, "prefix", slot=lambda x: x.at[own].set(0))
    assert int(check(cached, plan).written) > 0
    over = dataclasses.replace(plan, query_start_loc=plan.query_start_loc.at[-1].set(99))
    assert int(check(between, over).budget) > 0
    less = edit(between, "blocks", num_blocks_held=lambda x: x.at[plan.row_ids[0]].add(-1))
    assert int(check(less, plan).plan) > 0
