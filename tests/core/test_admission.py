"""Who is admitted when memory is short: those of whom all fits, as soon as it does."""

import numpy as np

from pagedjax.core.state import Status
from tests.core.driver import Driver


def status(driver, row):
    return int(np.asarray(driver.state.rows.status)[row])


def run_until(driver, condition, limit=200):
    for count in range(limit):
        if condition():
            return count
        driver.step()
    raise AssertionError("it never comes to that")


def test_a_prompt_that_does_not_fit_waits_instead_of_pushing_out_itself():
    """A chunk of it would fit beside the two that decode; all of it does only when one has ended.
    Then it starts at once, and nothing has been computed twice."""
    driver = Driver(pool=16)  # of 4 tokens
    long = driver.add_request([1, 2, 3, 4], 32, stop=False)
    short = driver.add_request([4, 3, 2, 1], 20, stop=False)
    for _ in range(11):  # now they hold four blocks each
        driver.step()
    last = driver.add_request([5, 0] * 18, 37, stop=False)  # 9 blocks
    run_until(driver, lambda: status(driver, last) != Status.WAITING)
    assert short not in driver.requests
    assert long in driver.requests
    run_until(driver, lambda: not driver.requests)
    assert int(driver.state.counters.num_preemptions) == 0


def test_a_waiting_prompt_is_admitted_when_somebody_has_computed_its_beginning():
    """No block becomes free meanwhile: what it needs becomes less."""
    driver = Driver(pool=13)
    prompt = list(np.random.default_rng(0).integers(0, driver.alphabet, 40))
    first = driver.add_request(prompt, 50, stop=False)
    second = driver.add_request(prompt, 41, stop=False)
    driver.step()  # 24 tokens of the first
    driver.step()  # its other 16; six blocks of the second are cached, and four are not to be had
    assert status(driver, second) == Status.WAITING
    assert int(driver.state.blocked_arrival) == int(driver.state.rows.arrival[second])
    driver.step()
    assert status(driver, second) != Status.WAITING
    assert int(np.asarray(driver.state.rows.num_hit_tokens)[second]) == 39
    assert first in driver.requests
    driver.drain()


def with_cached(count, **sizes):
    """(driver, a prompt of 60 tokens whose first `count` are cached and held by nobody)"""
    driver = Driver(**sizes)
    prompt = [1, 2, 3, 4, 5] * 12
    driver.add_request(prompt[:count], count + 1, stop=False)
    driver.drain()
    return driver, prompt


def test_what_was_cached_when_a_prompt_did_not_fit_may_be_gone_when_it_does():
    """It needs 15 of 20 blocks, 10 of which are cached and evictable, when 14 are to be had: two
    others hold 1 and 5. They grow to 5 and 9 and push four of the ten out; then the second ends."""
    driver, prompt = with_cached(40, pool=20)
    long = driver.add_request([6, 0, 6], 60, stop=False)
    short = driver.add_request([0, 6] * 10, 36, stop=False)
    driver.step()
    last = driver.add_request(prompt, 61, stop=False)
    driver.step()
    assert int(driver.state.blocked_arrival) == int(driver.state.rows.arrival[last])
    run_until(driver, lambda: short not in driver.requests)
    assert status(driver, last) == Status.WAITING
    driver.step()
    assert status(driver, last) == Status.RUNNING
    assert long in driver.requests
    driver.drain()


def test_what_waits_is_tried_when_nobody_runs():
    """The head of the queue takes all but one block. While another one runs, five more of its
    blocks are cached than when that one has ended."""
    driver, prompt = with_cached(20, pool=16)
    other = driver.add_request([6, 0, 6], 60, stop=False)
    driver.step()
    last = driver.add_request(prompt, 64, stop=False)
    behind = driver.add_request([3], 4, stop=False)
    run_until(driver, lambda: other not in driver.requests)
    assert {last, behind} <= driver.requests.keys()
    driver.drain(limit=20)
