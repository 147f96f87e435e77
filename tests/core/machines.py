"""What the schedulers' state machines have in common: aborts, steps, the end; how they are run."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

# A failure is told at once: shrinking it would go on for five minutes, which looks like a hang.
# Add Phase.shrink to have a small example.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def quick(max_examples, stateful_step_count):
    """Settings for the default run."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=stateful_step_count,
        deadline=None,
        phases=PHASES,
        report_multiple_bugs=False,
    )


def long(max_examples):
    """Settings for the slow one."""
    return settings(max_examples=max_examples, stateful_step_count=60, deadline=None)


class DriverMachine(RuleBasedStateMachine):
    """A machine whose `driver` is made by an initialize rule of its own."""

    @rule(pick=st.integers(0, 7))
    def abort(self, pick):
        if self.driver.requests:
            rows = sorted(self.driver.requests)
            self.driver.abort_row(rows[pick % len(rows)])

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()


def cases(machines, *, long_only):
    """Name -> test case: a short one of each machine for the default run, but for those in
    `long_only` (fewer compilations), and a long one, both marked as they should be."""
    found = {}
    for machine in machines:
        name = f"Test{machine.__name__}"
        short = type(name, (machine.TestCase,), {"settings": quick(8, 25)})
        whole = type(f"{name}Long", (machine.TestCase,), {"settings": long(80)})
        found[name] = pytest.mark.slow(short) if machine in long_only else short
        found[whole.__name__] = pytest.mark.slow(whole)
    return found
