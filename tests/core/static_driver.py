"""A driver that follows static batching in Python and compares after every step."""

import numpy as np

from pagedjax.core.state import Status
from tests.core.driver import Driver

LIVE = (Status.WAITING, Status.RUNNING, Status.SWAPPED)


class StaticDriver(Driver):
    """Checks who may join: `batches` lists the members, by arrival, of every batch so far."""

    def __init__(self, **sizes):
        super().__init__(batching="static", **sizes)
        self.batches: list[list[int]] = []
        self.is_open = False
        self.gave_up = 0
        """Steps in which members that had ended gave their memory to the others."""

    def step(self):
        state = self.state
        before = {name: np.asarray(getattr(state.rows, name)).copy() for name in FIELDS}
        before["held"] = np.asarray(state.blocks.num_blocks_held).copy()
        before["available"] = int((np.asarray(state.blocks.ref_counts) == 0).sum())
        taken = before["status"] != Status.EMPTY
        status = dict(zip(before["arrival"][taken], before["status"][taken], strict=True))
        preemptions = int(self.state.counters.num_preemptions)
        super().step()
        members = self.batches[-1] if self.batches else []
        alive = any(status.get(arrival) in LIVE for arrival in members)
        if not alive:
            members, self.is_open = [], True
        elif self._is_short(before):
            self.gave_up += self._gives_up(before, members)
            self.is_open = False
        else:
            assert not self._gives_up(before, members), "memory came back before the batch ended"
        rows = self.plan.row_ids[: int(self.plan.num_seqs)]
        scheduled = np.asarray(self.state.rows.arrival)[np.asarray(rows)].tolist()
        joined = [arrival for arrival in scheduled if arrival not in members]
        assert self.is_open or not joined, f"{joined} joined a batch that was closed"
        if joined and not members:
            self.batches.append(members)
        members.extend(joined)
        assert len(members) <= self.config.max_num_seqs, "a place was given away twice"
        if members:
            self._close(members, status, scheduled, preemptions)

    def _gives_up(self, before, members):
        """Whether rows of the batch became EMPTY though it goes on; they held memory."""
        ended = (before["status"] == Status.FINISHED) & np.isin(before["arrival"], members)
        ended &= before["held"] > 0
        return (ended & (np.asarray(self.state.rows.status) == Status.EMPTY)).any()

    def _is_short(self, before):
        """Whether those that go on need more blocks than there are."""
        b = self.config.block_size
        waits = np.isin(before["status"], (Status.WAITING, Status.SWAPPED))
        if (waits & (before["num_preemptions"] > 0)).any():
            return True
        running = before["status"] == Status.RUNNING
        need = np.maximum(-(-before["num_tokens"] // b) - before["held"], 0)[running].sum()
        return need > before["available"]

    def _close(self, members, status, scheduled, preemptions):
        admitted = [a for a in scheduled if status.get(a) in (Status.WAITING, Status.SWAPPED)]
        rows = self.state.rows
        waits = np.asarray(rows.status) == Status.WAITING
        waiting = set(np.asarray(rows.arrival)[waits].tolist()) - set(members)
        step_was_full = (
            int(self.output.num_scheduled_tokens) == self.num_tokens
            or len(admitted) == self.config.max_admissions
        )
        preempted = int(self.state.counters.num_preemptions) > preemptions
        full = len(members) == self.config.max_num_seqs
        if not waiting or full or not step_was_full or preempted:
            self.is_open = False
        assert bool(self.output.batch_is_open) == self.is_open


FIELDS = ("status", "arrival", "num_tokens", "num_preemptions")
