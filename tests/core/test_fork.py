"""Rows of one group share the blocks of their prompt; whoever writes into a shared block copies it.

`Driver.step` checks the invariants and the shadow pool at every half step."""

import dataclasses
from typing import ClassVar

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import initialize, rule

from pagedjax.core.fork import copies_on_write
from pagedjax.core.preempt import preempt
from pagedjax.core.state import NULL, Status
from tests.core.beam_driver import SEARCHES
from tests.core.driver import Driver
from tests.core.machines import DriverMachine, cases

B = 4


def make_driver(**sizes):
    """A driver of 16 blocks; without the prefix cache, of a scheduler that could search as well."""
    sizes = {"enable_forks": True, "hash_mask": 0xFF, **sizes}
    if "num_blocks" not in sizes:
        sizes = {"pool": 16, **sizes}
        if not sizes.get("enable_prefix_caching", True):
            sizes = {**SEARCHES, **sizes}
    return Driver(**sizes)


copies_now = jax.jit(copies_on_write, static_argnums=0)


def num_held(driver):
    """Blocks of the pool that some row holds."""
    return int((np.asarray(driver.state.blocks.ref_counts) > 0).sum())


def held_by(driver, row):
    table = np.asarray(driver.state.blocks.block_tables)[row]
    return table[table != NULL].tolist()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 11])
def test_blocks_right_after_the_fork(num_prompt, caching):
    """Four rows of a prompt of p tokens. The first computes it in one step; in the next one it
    computes its first output, the others the prompt's last token, each in a block of its own."""
    driver = make_driver(enable_prefix_caching=caching)
    prompt = [*range(6), *range(6)][:num_prompt]
    rows = driver.add_group(prompt, num_prompt + 3, 4, group=5, stop=False)
    driver.step()
    assert num_held(driver) == -(-num_prompt // B)
    status = np.asarray(driver.state.rows.status)[rows]
    assert status.tolist() == [Status.RUNNING, *[Status.WAITING] * 3]
    driver.step()
    whole = (num_prompt - 1) // B  # blocks that nobody writes into any more
    expected = whole + 4  # and one block for each row that its next tokens go to
    if num_prompt % B == 0 and not caching:
        expected += 1  # the first row has gone on to a next block
    # With the cache, the copies of a full block are found to be equal and given back.
    if num_prompt % B == 0 and caching:
        expected = whole + 1 + 1
    assert num_held(driver) == expected
    for row in rows[1:]:
        assert held_by(driver, row)[:whole] == held_by(driver, rows[0])[:whole]
    computed = np.asarray(driver.state.rows.num_computed_tokens)[rows]
    assert computed.tolist() == [num_prompt + 1, *[num_prompt] * 3]
    counters = driver.state.counters
    assert int(counters.num_block_copies) == (0 if (num_prompt - 1) % B == 0 else 3)
    assert int(counters.num_prompt_tokens) == num_prompt + (3 * (num_prompt == 1))
    assert int(counters.num_forked_tokens) == 3 * (num_prompt - 1)
    driver.drain()
    assert driver.counts["finished"] == 4


def test_others_pass_a_row_that_is_held_back():
    """The prompt takes two steps; what the second leaves of the budget goes to the next request,
    not to rows that have nothing to share yet."""
    driver = make_driver(num_tokens=24)
    rows = driver.add_group([1] * 30, 34, 3, group=0, stop=False)
    other = driver.add_request([2, 3, 4], 9, stop=False)
    driver.step()
    driver.step()
    status = np.asarray(driver.state.rows.status)
    assert status[[*rows, other]].tolist() == [
        Status.RUNNING,
        Status.WAITING,
        Status.WAITING,
        Status.RUNNING,
    ]
    driver.step()
    assert (np.asarray(driver.state.rows.status)[rows] == Status.RUNNING).all()
    driver.drain()


@pytest.mark.parametrize("caching", [True, False])
def test_first_row_gone_before_the_others_start(caching):
    driver = make_driver(enable_prefix_caching=caching)
    first, *_ = driver.add_group([1, 2, 3, 4, 5, 0, 1], 20, 3, group=1, stop=False)
    driver.abort_row(first)
    driver.drain()
    assert driver.counts["finished"] == 2
    # The next of them computed the prompt, and the last one shared it.
    assert int(driver.state.counters.num_forked_tokens) == 6
    assert int(driver.state.counters.num_prompt_tokens) == 7


def test_first_row_ends_at_once():
    driver = make_driver(enable_prefix_caching=False)
    prompt = [1, 2, 3, 4, 5, 0, 1]
    first = driver.add_request(prompt, 8, group=1, stop=False)
    driver.add_request(prompt, 20, group=1, stop=False, seed=1)
    driver.step()
    assert first not in driver.requests
    driver.drain()
    assert driver.counts["finished"] == 2


def test_groups_and_salts_do_not_mix():
    """Other groups and other salts share nothing without the cache, and a group that was promised
    equal prompts but got different ones shares nothing either."""
    driver = make_driver(enable_prefix_caching=False)
    prompt = [1, 2, 3, 4, 5, 0, 1]
    driver.add_request(prompt, 20, group=1, stop=False)
    driver.add_request(prompt, 20, group=2, stop=False)
    driver.add_request(prompt, 20, group=1, salt=1, stop=False)
    driver.add_request([*prompt[:-2], 5, 5], 20, group=1, stop=False)
    driver.drain()
    assert driver.counts["finished"] == 4
    assert int(driver.state.counters.num_forked_tokens) == 0


def by_hand(driver, tables, computed):
    """The state with these block tables, all rows running and in one group."""
    state, s, m = driver.state, driver.config.num_rows, driver.config.max_blocks_per_seq
    table = np.full((s, m), NULL, np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    refs = np.bincount([b for row in tables for b in row], minlength=driver.config.num_blocks)
    status = np.zeros(s, np.int32)
    status[: len(tables)] = Status.RUNNING
    rows = dataclasses.replace(
        state.rows,
        status=jnp.asarray(status),
        group=jnp.zeros(s, jnp.int32),
        num_computed_tokens=jnp.asarray([*computed, *[0] * (s - len(computed))], jnp.int32),
    )
    blocks = dataclasses.replace(
        state.blocks,
        block_tables=jnp.asarray(table),
        ref_counts=jnp.asarray(refs, jnp.int32),
        num_blocks_held=jnp.asarray([*map(len, tables), *[0] * (s - len(tables))], jnp.int32),
    )
    return dataclasses.replace(state, rows=rows, blocks=blocks)


@pytest.mark.parametrize(
    ("tables", "computed", "grant", "expected"),
    [
        # All holders of block 7 write: the first keeps it.
        ([[1, 7], [1, 7], [1, 7]], [6, 6, 6], [1, 1, 1], [NULL, 7, 7]),
        # One holder does not write: both writers copy.
        ([[1, 7], [1, 7], [1, 7]], [6, 6, 6], [0, 1, 1], [NULL, 7, 7]),
        ([[1, 7], [1, 7], [1, 7]], [6, 6, 6], [1, 1, 0], [7, 7, NULL]),
        # A full block is not written by whoever goes on behind it.
        ([[1, 7], [1, 7], [1, 7]], [8, 7, 8], [1, 1, 1], [NULL, 7, NULL]),
        # Nobody shares.
        ([[1, 7], [1, 8], [1, 9]], [6, 6, 6], [1, 1, 1], [NULL, NULL, NULL]),
        ([[1, 7], [1, 7], [1, 9]], [6, 6, 6], [3, 2, 1], [NULL, 7, NULL]),
    ],
)
@pytest.mark.parametrize("use_cond", [True, False])
def test_who_copies(tables, computed, grant, expected, use_cond):
    driver = make_driver(use_cond=use_cond)
    state = by_hand(driver, tables, computed)
    s = driver.config.num_rows
    grants = jnp.asarray([*grant, *[0] * (s - len(grant))], jnp.int32)
    got = copies_now(driver.config, state, jnp.arange(s), grants)
    assert np.asarray(got)[: len(expected)].tolist() == expected


def test_cached_block_is_copied_even_by_its_only_holder():
    driver = make_driver()
    state = by_hand(driver, [[1, 7]], [6])
    cached = dataclasses.replace(state.prefix, slot=state.prefix.slot.at[7].set(0))
    state = dataclasses.replace(state, prefix=cached)
    s = driver.config.num_rows
    grants = jnp.zeros(s, jnp.int32).at[0].set(1)
    got = copies_now(driver.config, state, jnp.arange(s), grants)
    assert int(got[0]) == 7


def test_who_stays_under_pressure_can_pay_for_its_copy():
    """Three rows share the block they write, none is free, and one row may step back in a step. The
    first would keep the block if all wrote, but the second sits the step out and holds it still: so
    the first must sit it out, too."""
    driver = make_driver(max_preemptions=1)
    config, state = driver.config, by_hand(driver, [[1, 7]] * 3, [6] * 3)
    s = config.num_rows
    order, nobody = jnp.arange(s, dtype=jnp.int32), jnp.zeros(s, jnp.int32)
    grant = nobody.at[:3].set(1)
    copies = (copies_now(config, state, order, grant) != NULL).astype(jnp.int32)
    assert int(copies.sum()) == 2
    state, order, grant, _, pressed, _ = jax.jit(preempt, static_argnums=0)(
        config, state, order, grant, nobody, copies, nobody > 0, jnp.int32(0), jnp.int32(3)
    )
    assert bool(pressed)
    assert int(state.counters.num_preemptions) == 1
    assert (np.asarray(copies_now(config, state, order, grant)) == NULL).all()
    assert int(grant.sum()) == 0


@pytest.mark.slow
def test_without_groups_nothing_differs():
    """The switch alone changes no step."""
    drivers = [Driver(num_blocks=20, enable_forks=on) for on in (False, True)]
    for driver in drivers:
        for i in range(6):
            driver.add_request([1, 2, 3, 4, 5, 0, i], 30, stop=False)
    for _ in range(40):
        for driver in drivers:
            driver.step()
        for one, other in zip(*(jax.tree.leaves(d.state) for d in drivers), strict=True):
            assert (np.asarray(one) == np.asarray(other)).all()


token = st.integers(0, 5)


class ForkMachine(DriverMachine):
    """Groups, single requests, aborts, in a pool that is too small for all of them."""

    sizes: ClassVar = {}

    @initialize()
    def start(self):
        self.driver = make_driver(**self.sizes)
        self.num_groups = 0
        self.history = []

    @rule(
        tail=st.lists(token, min_size=1, max_size=14),
        shared=st.integers(0, 16),
        num=st.integers(1, 4),
        extra=st.integers(1, 12),
        stop=st.booleans(),
    )
    def add_group(self, tail, shared, num, extra, stop):
        base = self.history[-1] if self.history else []
        prompt = (base[:shared] + tail)[:24]
        self.history.append(prompt)
        num = min(num, len(self.driver.empty_rows()))
        self.driver.add_group(prompt, len(prompt) + extra, num, group=self.num_groups, stop=stop)
        self.num_groups += 1

    @rule(tail=st.lists(token, min_size=1, max_size=20), extra=st.integers(1, 16))
    def add_one(self, tail, extra):
        if self.driver.empty_rows():
            self.driver.add_request(tail, len(tail) + extra, stop=False)


class UncachedForkMachine(ForkMachine):
    sizes: ClassVar = {"enable_prefix_caching": False}


class TightForkMachine(ForkMachine):
    """Hashes that collide, a small budget, one admission a step."""

    sizes: ClassVar = {
        "num_blocks": 11,
        "hash_mask": 3,
        "evict_batch": 2,
        "max_admissions": 2,
        "max_preemptions": 2,
    }


class PolicyForkMachine(ForkMachine):
    """Victims from the middle of the order, one a step, so that rows in between sit steps out."""

    sizes: ClassVar = {
        "num_blocks": 12,
        "max_model_len": 40,
        "enable_prefix_caching": False,
        "preemption_policy": "most_tokens",
        "scheduling_policy": "round_robin",
        "time_slice_tokens": 3,
        "max_preemptions": 1,
    }


class SwapForkMachine(ForkMachine):
    """Victims whose blocks others share are swapped out, and come back beside them. (By default
    tests/core/test_beam.py does that, in its `MixedBeamMachine`.)"""

    sizes: ClassVar = {
        "num_blocks": 12,
        "num_host_blocks": 14,
        "preemption_mode": "swap",
        "max_model_len": 40,
        "preemption_policy": "most_tokens",
        "scheduling_policy": "round_robin",
        "time_slice_tokens": 3,
        "max_preemptions": 2,
    }


MACHINES = ForkMachine, UncachedForkMachine, TightForkMachine, PolicyForkMachine, SwapForkMachine
globals().update(cases(MACHINES, long_only=(TightForkMachine, PolicyForkMachine, SwapForkMachine)))
