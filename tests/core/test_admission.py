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
