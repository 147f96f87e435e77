"""A driver that also checks, in every step, what must hold whatever the policy."""

import numpy as np

from pagedjax.core.state import Status
from tests.core.driver import Driver


def shortest_first(state, config):
    return state.rows.max_total_tokens


# Settings that several tests share, each of which compiles once.
URGENCY = {
    "scheduling_policy": "priority",
    "preemption_policy": "lowest_priority",
    "max_passed_over": 5,
}
LONGEST_PREFIX = {
    "scheduling_policy": "longest_prefix",
    "num_tokens": 8,
    "max_num_seqs": 4,
    "max_admissions": 4,
}
OWN_POLICY = {
    "scheduling_policy": shortest_first,
    "preemption_policy": "most_tokens",
    "max_passed_over": 0,
    "max_preemptions": 1,
}


class PolicyDriver(Driver):
    """Checks: the oldest running row stays; a resumed row that has no new token yet steps back only
    when none but such rows, and the oldest, are left."""

    def rows(self, name):
        return np.asarray(getattr(self.state.rows, name))

    def step(self):
        before = {
            name: self.rows(name).copy()
            for name in "status arrival num_tokens num_tokens_started num_preemptions".split()
        }
        early_before = int(self.state.counters.num_early_preemptions)
        super().step()
        running = before["status"] == Status.RUNNING
        # rows that were empty when the step began hold another request, which cannot be preempted
        victims = running & (self.rows("num_preemptions") > before["num_preemptions"])
        if not victims.any():
            return
        early = (before["num_preemptions"] > 0) & (
            before["num_tokens"] == before["num_tokens_started"]
        )
        oldest = running & (before["arrival"] == before["arrival"][running].min())
        assert not (victims & oldest).any(), "the oldest running row was preempted"
        if (victims & early).any():
            assert not (running & ~victims & ~oldest & ~early).any(), "another could have gone"
        counted = int(self.state.counters.num_early_preemptions) - early_before
        assert counted == (victims & early).sum()
        self.check_victims(before, running & ~oldest, victims, early)

    def check_victims(self, before, running, victims, early):
        """The policy's choice among rows of equal standing."""
        policy = self.config.preemption_policy
        if not isinstance(policy, str) or self.config.scheduling_policy == "round_robin":
            return
        key = {
            "newest": np.zeros_like(before["arrival"]),
            "most_tokens": before["num_tokens"] - self.rows("num_prompt_tokens"),
            "lowest_priority": self.rows("priority"),
        }[policy]
        for group in (early, ~early):
            gone = [(key[r], before["arrival"][r]) for r in np.flatnonzero(victims & group)]
            kept = [
                (key[r], before["arrival"][r]) for r in np.flatnonzero(running & ~victims & group)
            ]
            assert not gone or not kept or min(gone) > max(kept), (policy, gone, kept)
