"""Who starts next and who steps back, under each policy, and that nobody starves."""

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import config as settings
from pagedjax.core import config as core_config
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.policies import longest_prefix
from pagedjax.core.prefix import lookup
from pagedjax.core.state import NULL, Status
from tests.core.driver import random_traffic
from tests.core.policy_driver import LONGEST_PREFIX, OWN_POLICY, URGENCY, PolicyDriver


def order_of_start(driver, rows):
    """The order in which rows first leave the queue, each looked at once a step."""
    order = []
    for _ in range(500):
        driver.step()
        status = np.asarray(driver.output.status)
        order += [r for r in rows if status[r] != Status.WAITING and r not in order]
        if len(order) == len(rows):
            return order
    raise AssertionError("somebody never starts")


def test_names_are_the_same_in_the_settings_and_in_the_core():
    assert settings.SCHEDULING_POLICIES == core_config.SCHEDULING_POLICIES
    assert settings.PREEMPTION_POLICIES == core_config.PREEMPTION_POLICIES


def test_priority_starts_the_most_urgent_first_and_equal_ones_in_order():
    driver = PolicyDriver(**URGENCY, pool=1)  # room for one of them
    priorities = [5, 0, -3, 0, 7]
    rows = [driver.add_request([i, 1], 5, stop=False, priority=p) for i, p in enumerate(priorities)]
    assert order_of_start(driver, rows) == [rows[i] for i in (2, 1, 3, 0, 4)]


def test_a_policy_of_ones_own():
    driver = PolicyDriver(**OWN_POLICY, pool=1)
    rows = [driver.add_request([i, 1], n, stop=False) for i, n in enumerate((5, 3, 4))]
    assert order_of_start(driver, rows) == [rows[i] for i in (1, 2, 0)]


def test_a_policy_must_give_keys_of_the_table():
    driver = PolicyDriver(scheduling_policy=lambda state, config: jnp.zeros(3))
    with pytest.raises(ValueError, match=r"\[num_rows\] = \[8\] int32"):
        driver.step()
    with pytest.raises(ValueError, match="scheduling_policy must be one of fcfs, priority"):
        SchedulerConfig(
            num_rows=1,
            max_num_seqs=1,
            num_blocks=1,
            max_model_len=8,
            max_num_batched_tokens=8,
            scheduling_policy="lifo",
        )


def test_longest_prefix_starts_what_is_cached_first():
    driver = PolicyDriver(**LONGEST_PREFIX)
    base = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 5]  # three blocks
    driver.add_request(base, 14, stop=False)
    driver.drain()
    for i in range(3):  # have three of the four places from now on
        driver.add_request([5, i], 40, stop=False)
    driver.step()
    prompts = [[9, 9, 9, 9, 1], [*base[:4], 9], [*base, 9], [*base[:8], 9]]
    rows = [driver.add_request(p, len(p) + 2, stop=False) for p in prompts]
    assert order_of_start(driver, rows) == [rows[i] for i in (2, 3, 1, 0)]


def count_cached(driver, row):
    """Full blocks at the beginning of a row's tokens that the index knows, one after the other."""
    state, config = driver.state, driver.config
    found = np.asarray(lookup(config, state.prefix, state.rows.block_hashes[row])) != NULL
    num_full = int(state.rows.num_tokens[row]) // config.block_size
    return next((i for i in range(num_full) if not found[i]), num_full)


def test_longest_prefix_counts_by_search_what_a_walk_counts():
    driver = PolicyDriver(**LONGEST_PREFIX)
    rng = np.random.default_rng(3)
    base = rng.integers(0, 6, 40)
    driver.add_request(base, 42, stop=False)
    driver.drain()
    for n in (0, 3, 4, 11, 25, 39, 40):
        driver.add_request([*base[:n], 6], 50, stop=False)
    key = np.asarray(longest_prefix(driver.state, driver.config))
    walk = [count_cached(driver, row) for row in range(7)]
    assert (-key[:7]).tolist() == walk == [0, 0, 1, 2, 6, 9, 10]


def test_round_robin_takes_turns():
    """Two places, five requests of 24 tokens, slices of 4: the oldest keeps its place, the others
    share the other one in turns. Then the next oldest keeps its place, and so on."""
    driver = PolicyDriver(scheduling_policy="round_robin", time_slice_tokens=4, max_num_seqs=2)
    rows = [driver.add_request([i, i], 26, stop=False) for i in range(5)]
    turns, tokens = [], dict.fromkeys(rows, 2)
    while rows[0] in driver.requests:
        driver.step()
        now = np.asarray(driver.output.num_tokens)
        for row in rows[1:]:
            new = int(now[row]) - tokens[row]
            tokens[row] += new
            if new and turns and turns[-1][0] == row:
                turns[-1][1] += new
            elif new:
                turns.append([row, new])
    assert [row for row, _ in turns] == [rows[i] for i in (1, 2, 3, 4, 1)]
    assert [count for _, count in turns[:4]] == [4, 4, 4, 4]
    driver.drain()
    counters = driver.state.counters
    assert int(counters.num_yields) == int(counters.num_preemptions) > 5
    # nothing has to be computed again but the tail of a block that was not full
    assert int(counters.num_recomputed_tokens) <= 3 * int(counters.num_yields)


def starts_within(driver, steps):
    """Whether a lazy request starts within so many steps of a stream of others, which are urgent
    and short."""
    driver.add_request([1, 2, 3], 4, stop=False, priority=0)
    driver.step()
    lazy = driver.add_request([3, 2, 1], 5, stop=False, priority=9)
    for i in range(steps):
        while len(driver.requests) < 4:
            driver.add_request([i % 6, 5], 4, stop=False)
        driver.step()
        if int(np.asarray(driver.output.status)[lazy]) != Status.WAITING:
            return True
    return False


@pytest.mark.parametrize("policy", [OWN_POLICY, URGENCY], ids=["no bound", "a bound of 5"])
def test_a_row_that_always_loses_goes_first_in_the_end(policy):
    driver = PolicyDriver(**policy, pool=1)
    assert starts_within(driver, 60) == (policy["max_passed_over"] > 0)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        OWN_POLICY,
        URGENCY,
        *(
            pytest.param({"preemption_policy": name}, marks=pytest.mark.slow)
            for name in ("most_tokens", "lowest_priority")
        ),
    ],
    ids=lambda policy: policy.get("preemption_policy", "newest"),
)
def test_victims_are_the_policys(policy):
    """The choice is checked in every step by `PolicyDriver`."""
    driver = PolicyDriver(**policy, pool=18)
    rng = np.random.default_rng(0)
    for _ in range(40):
        for row in driver.empty_rows():
            prompt = rng.integers(0, 6, int(rng.integers(1, 12))).tolist()
            driver.add_request(
                prompt, len(prompt) + 20, stop=False, row=row, priority=int(rng.integers(4))
            )
        driver.step()
    counters = driver.state.counters
    assert int(counters.num_preemptions) > 5
    assert int(counters.num_recomputed_tokens) > 0
    driver.drain()


@pytest.mark.slow
@pytest.mark.parametrize("preemption", core_config.PREEMPTION_POLICIES)
@pytest.mark.parametrize("scheduling", core_config.SCHEDULING_POLICIES)
def test_all_policies_under_pressure(scheduling, preemption):
    driver = PolicyDriver(
        scheduling_policy=scheduling,
        preemption_policy=preemption,
        num_blocks=18,
        num_tokens=16,
        max_preemptions=3,
        time_slice_tokens=3,
        max_passed_over=8,
    )
    random_traffic(driver, steps=800, seed=5)
    assert driver.counts["finished"] > 100
    assert int(driver.state.counters.num_preemptions) > 20
