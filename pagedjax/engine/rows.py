"""Which request sits in which row, and what the host knows of the rows."""

from collections.abc import Sequence

import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.state import Status
from pagedjax.engine import forecast
from pagedjax.engine.prefix_forecast import PrefixForecast
from pagedjax.engine.request import Request


class RowBook:
    """The host's book of the request table.

    Outputs arrive up to a step late, so each row carries the number of the first step that saw its
    present request; older outputs say nothing about it. A row is free again when an output that
    does concern it calls it EMPTY.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        s = config.num_rows
        self._config = config
        self._sizes = forecast.Sizes(
            max_num_seqs=config.max_num_seqs,
            max_admissions=config.max_admissions,
            block_size=config.block_size,
        )
        self._requests: list[Request | None] = [None] * s
        self._taken = np.zeros(s, bool)
        self._live = np.zeros(s, bool)  # has a request that has not ended, as far as is known
        self._first_step = np.zeros(s, np.int64)
        self._arrival = np.zeros(s, np.int64)
        self._running = np.zeros(s, bool)
        self._total = np.zeros(s, np.int64)
        self._computed = np.zeros(s, np.int64)
        self._most = np.zeros(s, np.int64)
        self._num_prompt_blocks = np.zeros(s, np.int64)
        self._num_remembered = np.zeros(s, np.int64)
        self._chains: list[list[int]] = [[] for _ in range(s)]
        self._row_of: dict[int, int] = {}  # id(request) -> row
        self._to_end = np.zeros(s, bool)
        self._num_launched = 0
        self._num_arrived = 0
        self._num_available = config.num_blocks
        self._blocked_available: int | None = None
        self._prefix = None
        if config.enable_prefix_caching:
            self._prefix = PrefixForecast(config.num_blocks, config.block_size)

    @property
    def num_taken(self) -> int:
        """Rows that cannot be given away yet."""
        return int(self._taken.sum())

    @property
    def num_free(self) -> int:
        return len(self._taken) - self.num_taken

    def free_rows(self, most: int) -> list[int]:
        """Up to `most` rows that are EMPTY, lowest first."""
        return np.flatnonzero(~self._taken)[:most].tolist()

    def take(self, row: int, request: Request) -> None:
        """The request goes into the row before the next step."""
        self._requests[row] = request
        self._row_of[id(request)] = row
        self._taken[row] = self._live[row] = True
        self._first_step[row] = self._num_launched + 1
        self._arrival[row] = self._num_arrived
        self._num_arrived += 1
        self._running[row] = False
        self._total[row] = len(request.prompt_token_ids)
        self._computed[row] = 0
        self._most[row] = request.max_total_tokens
        if self._prefix is not None:
            self._chains[row] = self._prefix.chain(request.prompt_token_ids)
            self._num_prompt_blocks[row] = len(self._chains[row])
            self._num_remembered[row] = 0

    def let_go(self, request: Request, *, ended_on_device: bool = False) -> None:
        """The request has ended; unless the device ended it, its row is to be aborted there."""
        row = self._row_of.pop(id(request), None)
        if row is None:
            return
        if self._prefix is not None and self._computed[row]:
            known = request.all_token_ids[: int(self._computed[row])]
            self._prefix.remember(self._prefix.chain(known))
        self._requests[row] = None
        self._live[row] = False
        if not ended_on_device:
            self._to_end[row] = True

    def take_rows_to_end(self) -> np.ndarray | None:
        """[S] bool: rows to abort on the device now, or None."""
        if not self._to_end.any():
            return None
        mask, self._to_end = self._to_end, np.zeros_like(self._to_end)
        return mask

    def launched(self) -> int:
        """A step is launched; -> its number, from 1."""
        self._num_launched += 1
        return self._num_launched

    def forecast(self, in_flight: Sequence[int]) -> tuple[int, int] | None:
        """(decoding rows, prompt tokens) of the next step after those in flight; None: nothing."""
        live = np.flatnonzero(self._live)
        if not len(live):
            return None
        running = self._running[live]
        live = live[np.lexsort((self._arrival[live], ~running))]
        rows = forecast.Rows(
            running=self._running[live],
            total=self._total[live],
            computed=self._expected_computed(live),
            most=self._most[live],
            unseen=np.maximum(
                self._first_step[live] - (self._num_launched - len(in_flight) + 1), 0
            ),
            num_available_blocks=self._num_available,
            admitting=not self._is_blocked(),
        )
        for num_tokens in in_flight:
            rows = forecast.advance(rows, num_tokens, self._sizes)
        return forecast.demand(rows, self._sizes) if len(rows.total) else None

    def _expected_computed(self, live: np.ndarray) -> np.ndarray:
        computed = self._computed[live].copy()
        if self._prefix is None:
            return computed
        for i in np.flatnonzero(~self._running[live])[: self._sizes.max_admissions]:
            row = int(live[i])
            computed[i] = self._prefix.num_cached_tokens(self._chains[row], int(self._total[row]))
        return computed

    def _is_blocked(self) -> bool:
        return self._blocked_available is not None and (
            self._num_available <= self._blocked_available
        )

    def update(self, output, step: int, num_tokens: int) -> list[tuple[int, Request]]:
        """Take in the output of a step; -> the rows it concerns, with their requests."""
        known = self._taken & (self._first_step <= step)
        status = output.status
        was_waiting = known & self._live & ~self._running
        self._running = np.where(known, status == Status.RUNNING, self._running)
        self._total = np.where(known, output.num_tokens, self._total)
        self._computed = np.where(known, output.num_computed_tokens, self._computed)
        self._live &= ~known | (status == Status.RUNNING) | (status == Status.WAITING)
        self._num_available = int(output.num_free_blocks) + int(output.num_evictable_blocks)
        num_admitted = int((was_waiting & (status != Status.WAITING)).sum())
        # As in the core: a head of the queue that did not fit is not tried before there is more.
        did_not_fit = (
            int(output.num_waiting) > 0
            and int(output.num_scheduled_tokens) < num_tokens
            and int(output.num_running) < self._sizes.max_num_seqs
            and num_admitted < self._sizes.max_admissions
        )
        self._blocked_available = self._num_available if did_not_fit else None
        self._free(known & (status == Status.EMPTY))
        self._remember_prompts()
        return [
            (int(row), self._requests[row])
            for row in np.flatnonzero(known)
            if self._requests[row] is not None
        ]

    def settle(self, status: np.ndarray) -> None:
        """Take in the rows' status [S] when nothing is in flight."""
        self._free(self._taken & (status == Status.EMPTY))

    def _free(self, rows: np.ndarray) -> None:
        for row in np.flatnonzero(rows):
            if self._requests[row] is not None:
                raise RuntimeError(f"row {row} is empty though its request has not ended")
        self._taken &= ~rows

    def _remember_prompts(self) -> None:
        """Prompts, as far as they are computed, can be found by others from now on."""
        if self._prefix is None:
            return
        done = np.minimum(self._computed // self._sizes.block_size, self._num_prompt_blocks)
        for row in np.flatnonzero(self._live & self._running & (done > self._num_remembered)):
            self._prefix.remember(self._chains[row][: done[row]])
            self._num_remembered[row] = done[row]
