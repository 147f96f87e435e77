"""When blocks run out: the fewest newest rows step back, exactly, and nobody starves."""

import itertools

import jax.numpy as jnp
import numpy as np

from pagedjax.core.preempt import blocks_back
from pagedjax.core.state import NULL, Status
from tests.core.driver import Driver


def test_blocks_back_against_brute_force():
    """Random tables with heavy sharing, some rows older than all candidates: what comes back when
    candidates k and above let go."""
    rng = np.random.default_rng(0)
    n, s, m, older = 12, 6, 5, 2
    for _ in range(50):
        tables = np.full((s, m), NULL, np.int32)
        for row in range(s):
            held = rng.integers(0, m + 1)
            tables[row, :held] = rng.permutation(n)[:held]
        ref_counts = np.bincount(tables[tables != NULL], minlength=n).astype(np.int32)
        got = np.asarray(blocks_back(jnp.asarray(tables[older:]), jnp.asarray(ref_counts)))
        for k in range(s - older + 1):
            kept = {b for row in tables[: older + k] for b in row if b != NULL}
            gone = {b for row in tables[older + k :] for b in row if b != NULL}
            assert got[k] == len(gone - kept)


def test_running_rows_that_share_most_blocks():
    """Six rows share a long prefix. A victim gives back only what nobody else holds, so counting
    its shared blocks as freed would hand out blocks that do not exist."""
    driver = Driver(pool=16)
    prefix = [1, 2, 3, 4] * 6
    driver.add_request(prefix, len(prefix) + 2, stop=False)
    driver.drain()
    for i in range(6):
        driver.add_request([*prefix, i % 6, 5], 48, stop=False)
    driver.drain()
    assert int(driver.state.counters.num_preemptions) > 0
    assert driver.counts["finished"] == 7


def test_oldest_row_is_never_preempted():
    driver = Driver(pool=14)
    first = driver.add_request([1] * 6, 48, stop=False)
    for i in range(5):
        driver.add_request([2, i, 3, 4], 44, stop=False)
    last = 0
    while first in driver.requests:
        driver.step()
        assert int(np.asarray(driver.state.rows.status)[first]) in (
            Status.RUNNING,
            Status.FINISHED,
        )
        length = int(np.asarray(driver.output.num_tokens)[first])
        assert length > last, "the oldest row gets a token in every step"
        last = length
    assert int(driver.state.counters.num_preemptions) > 0
    driver.drain()


def test_preempted_rows_keep_their_turn():
    """A preempted row comes back before requests that arrived after it."""
    driver = Driver(pool=12)
    rows = [driver.add_request([i, 1, 2, 3, 4, 5], 40, stop=False) for i in range(6)]
    started, order = set(), []
    while driver.requests:
        driver.step()
        status = np.asarray(driver.output.status)
        for row in rows:
            if status[row] != Status.WAITING and row not in started:
                started.add(row)
                order.append(row)
        waiting = [r for r in rows if status[r] == Status.WAITING]
        running = [r for r in rows if status[r] == Status.RUNNING]
        for a, b in itertools.product(waiting, running):
            assert a > b, "an older row waits while a newer one runs"
    assert order == rows


def test_budget_larger_than_pool_still_all_or_nothing():
    """A prompt that needs the whole pool gets it, alone, and the next one waits."""
    driver = Driver(pool=5)  # room for 20 tokens, of 24 that a step may compute
    driver.add_request(list(range(6)) * 3, 20, stop=False)
    driver.add_request([1, 2, 3], 20, stop=False)
    driver.step()
    assert np.asarray(driver.output.status)[:2].tolist() == [Status.RUNNING, Status.WAITING]
    driver.drain()
    assert driver.counts["finished"] == 2
