"""A hypothesis state machine: add, abort, step, evict and preempt in any order."""

from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, rule

from tests.core.driver import COLLIDING, Driver
from tests.core.machines import DriverMachine, long, quick

token = st.integers(0, 5)


class SchedulerMachine(DriverMachine):
    """Invariants and the shadow pool are checked inside `Driver.step`, at every half step."""

    driver_class = Driver
    sizes: ClassVar = {"pool": 16}

    @initialize()
    def start(self):
        self.driver = self.driver_class(**self.sizes)
        self.history = []

    @rule(
        tail=st.lists(token, min_size=1, max_size=20),
        shared=st.integers(0, 24),
        pick=st.integers(0, 7),
        extra=st.integers(1, 20),
        salt=st.sampled_from([0, 0, 0, 1]),
        stop=st.booleans(),
    )
    def add(self, tail, shared, pick, extra, salt, stop):
        if not self.driver.empty_rows():
            return
        base = self.history[pick % len(self.history)] if self.history else []
        prompt = (base[:shared] + tail)[:30]
        self.history = [*self.history[-6:], prompt]
        self.driver.add_request(prompt, len(prompt) + extra, salt=salt, stop=stop)

    @rule(pick=st.integers(0, 7))
    def repeat_whole_prompt(self, pick):
        if self.history and self.driver.empty_rows():
            prompt = self.history[pick % len(self.history)]
            self.driver.add_request(prompt, len(prompt) + 3, stop=False)

    @rule()
    def add_impossible(self):
        if self.driver.empty_rows():
            self.driver.add_request([1, 2, 3], self.driver.config.max_model_len + 1)


class CrowdedMachine(SchedulerMachine):
    """A pool so small that two requests fill it, and hashes that collide all the time; in the form
    without branches."""

    sizes: ClassVar = {"pool": 10, "use_cond": False, **COLLIDING}


QUICK = quick(max_examples=15, stateful_step_count=30)
TestMachine = SchedulerMachine.TestCase
TestMachine.settings = QUICK
TestCrowded = CrowdedMachine.TestCase
TestCrowded.settings = QUICK


@pytest.mark.slow
class TestMachineLong(SchedulerMachine.TestCase):
    settings = long(max_examples=300)


@pytest.mark.slow
class TestCrowdedLong(CrowdedMachine.TestCase):
    settings = long(max_examples=300)
