"""How large a static batch gets, who joins it, and who comes back."""

import numpy as np
import pytest

from pagedjax.core import static_batch
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.state import Status
from tests.core.driver import random_traffic
from tests.core.static_driver import StaticDriver


def add(driver, prompt, outputs, **options):
    """A request of so many tokens; prompts have nothing in common."""
    first = int(driver.state.next_arrival) % 6
    return driver.add_request([first] * prompt, prompt + outputs, stop=False, **options)


def num_running(driver, most=1000):
    """Step until all have ended; -> rows that run after each step."""
    running = []
    while driver.requests and len(running) < most:
        driver.step()
        running.append(int((np.asarray(driver.output.status) == Status.RUNNING).sum()))
    return running


ROOMY = {"num_blocks": 128, "enable_prefix_caching": False}
TIGHT = {
    "num_blocks": 22,
    "enable_prefix_caching": False,
    "scheduling_policy": "priority",
    "preemption_policy": "lowest_priority",
}
"""Six places, 24 tokens and four admissions a step, blocks of 4."""


def test_prompts_longer_than_a_step_fill_one_batch():
    """Four prompts of 40 tokens, 15 outputs.

    A 24 | A 16 B 8 | A 1 B 23 | A 1 B 9 C 14 | A 1 B 1 C 22 | A 1 B 1 C 4 D 18 | A B C 1 D 21 |
    A B C 1 D 1, which is D's last prompt token. A, with its first output from the second step,
    ends in the 16th, B (from the fourth) in the 18th, C (sixth) in the 20th and D (eighth) in the
    22nd. E comes when the batch is closed; it takes two steps for its prompt and 14 more.
    """
    driver = StaticDriver(**ROOMY)
    for _ in range(4):
        add(driver, 40, 15)
    filling = num_running(driver, 8)
    add(driver, 40, 15)
    assert filling == [1, 2, 2, 3, 3, 4, 4, 4]
    assert num_running(driver) == [*[4] * 7, 3, 3, 2, 2, 1, 1, 0, *[1] * 15, 0]
    assert driver.batches == [[0, 1, 2, 3], [4]]
    driver.drain()


def test_a_batch_is_as_large_as_memory_allows():
    """Prompts of 24 tokens, 4 outputs: 7 blocks of 4 each. Three take 21 of the 22."""
    driver = StaticDriver(**TIGHT)
    for _ in range(7):
        add(driver, 24, 4)
    driver.drain()
    assert driver.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert int(driver.state.counters.num_preemptions) == 0


def test_contiguous_batches_are_as_large_as_reservations_allow():
    """48 blocks are room for three sequences of 64 tokens, however short they are."""
    driver = StaticDriver(num_blocks=48, kv_cache="contiguous", enable_prefix_caching=False)
    for _ in range(7):
        add(driver, 30, 8)
    driver.drain()
    assert driver.batches == [[0, 1, 2], [3, 4, 5], [6]]


def test_more_requests_than_a_step_admits_are_one_batch():
    driver = StaticDriver(**ROOMY)
    for _ in range(7):
        add(driver, 1, 9)
    driver.drain()
    assert driver.batches == [[0, 1, 2, 3, 4, 5], [6]]


def test_a_place_is_not_given_away_twice():
    """A ends with the first step, while the prompt of B is read: the seventh is not to have its
    place, though there are tokens left for it: 4 + 20 | 24 | 16 + 1 + 1 + 1 + 1, which makes six.
    """
    driver = StaticDriver(**ROOMY)
    for prompt, outputs in [(4, 1), (60, 3), *[(1, 2)] * 5]:
        add(driver, prompt, outputs)
    assert num_running(driver) == [1, 1, 5, 1, 0, 1, 0]
    assert driver.batches == [[0, 1, 2, 3, 4, 5], [6]]


def test_a_batch_is_closed_when_nothing_waits():
    driver = StaticDriver(**ROOMY)
    add(driver, 4, 6)
    driver.step()
    add(driver, 4, 6)
    driver.drain()
    assert driver.batches == [[0], [1]]


def test_a_request_that_comes_while_the_batch_is_filled_joins():
    driver = StaticDriver(**ROOMY)
    add(driver, 40, 6)
    add(driver, 40, 6)
    driver.step()  # 24 tokens of the first one; the second one waits
    add(driver, 4, 6)
    driver.drain()
    assert driver.batches == [[0, 1, 2]]


def test_members_that_have_ended_give_memory_up_before_anybody_is_preempted():
    """A and B have seven blocks each when they end, with two outputs. C begins with 4 tokens and
    grows to 60, of which 59 are computed, 15 blocks. D could have the memory but may not join."""
    driver = StaticDriver(**TIGHT)
    for prompt, outputs in [(24, 2), (24, 2), (4, 56), (62, 2)]:
        add(driver, prompt, outputs)
    driver.drain()
    assert driver.batches == [[0, 1, 2], [3]]
    assert driver.gave_up == 1
    assert int(driver.state.counters.num_preemptions) == 0


def test_who_was_preempted_comes_back_before_the_urgent():
    """A and B have 40 prompt tokens, 10 blocks each, and need 12 each at the 45th token. B steps
    back, and C, which is more urgent and would fit, waits until B has ended."""
    driver = StaticDriver(**TIGHT)
    for _ in "AB":
        add(driver, 40, 10, priority=1)
    for _ in range(4):
        driver.step()
    add(driver, 4, 2, priority=0)
    driver.drain()
    assert driver.batches == [[0, 1], [2]]
    assert int(driver.state.counters.num_preemptions) == 1


def test_who_ends_without_having_started_leaves_the_table_at_once():
    """Aborted or refused while a batch runs: their rows are there for others that wait."""
    driver = StaticDriver(**ROOMY)
    add(driver, 4, 30)
    driver.step()
    for i in range(7):  # all other rows
        row = add(driver, 4, 200 if i % 2 else 4)
        if not i % 2:
            driver.abort_row(row)
    driver.step()
    driver.step()
    assert len(driver.empty_rows()) == 7
    for _ in range(6):
        add(driver, 4, 2)
    driver.drain()
    assert [len(batch) for batch in driver.batches] == [1, 6]


PRESSURE = {
    "priority": TIGHT,
    "longest prefix": {"scheduling_policy": "longest_prefix", "enable_prefix_caching": True},
    "swap": {"num_host_blocks": 12, "preemption_mode": "swap", "max_model_len": 48},
}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (PRESSURE["priority"], 150),
        *[
            pytest.param(options, 1500, marks=pytest.mark.slow)
            for options in [
                *PRESSURE.values(),
                {"kv_cache": "contiguous", "num_blocks": 64, "max_admissions": 1},
                {"kv_cache": "none"},
                {"use_cond": False, "num_tokens": 5},
            ]
        ],
    ],
)
def test_random_traffic(options, steps):
    """Every step as the shadow says, under pressure, with aborts."""
    defaults = {"num_blocks": 20, "enable_prefix_caching": False}
    driver = StaticDriver(**(defaults | options))
    random_traffic(driver, steps, seed=1)
    assert driver.counts["finished"] > steps // 15
    assert max(map(len, driver.batches)) > 2
    if options.get("kv_cache") != "contiguous":
        assert driver.gave_up > 0


def test_the_rule_that_closed_a_batch_with_its_first_token_is_caught(monkeypatch):
    def first_token(config, state, *_):
        rows = state.rows
        produced = (rows.status == Status.RUNNING) & (rows.num_tokens > rows.num_prompt_tokens)
        return ~(produced | (rows.status == Status.FINISHED)).any()

    monkeypatch.setattr(static_batch, "stays_open", first_token)
    driver = StaticDriver(**ROOMY, max_passed_over=63)  # compiled with the fault in it
    for _ in range(5):
        add(driver, 40, 15)
    with pytest.raises(AssertionError):
        driver.drain()


def test_time_slices_are_refused():
    with pytest.raises(ValueError, match="scheduling_policy must be another than 'round_robin'"):
        SchedulerConfig(
            num_rows=4,
            max_num_seqs=4,
            num_blocks=16,
            max_model_len=64,
            max_num_batched_tokens=16,
            batching="static",
            scheduling_policy="round_robin",
        )
