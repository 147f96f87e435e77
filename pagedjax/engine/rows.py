"""Which request sits in which row, and what the host knows of the rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.state import NULL, Status
from pagedjax.engine.forecast import (
    Rows,
    Sizes,
    advance,
    demand,
    num_spare_blocks,
    share_prompts,
)
from pagedjax.engine.prefix_forecast import PrefixForecast
from pagedjax.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class RequestState:
    """What a request is doing.

    Attributes:
      status: "queued" before the request table, "waiting" in it (new, or preempted), "running".
      num_tokens: prompt and output so far.
      num_computed_tokens: of them, those whose keys and values are in the pool.
    """

    status: Literal["queued", "waiting", "running"]
    num_tokens: int
    num_computed_tokens: int


_SAVED = (
    "taken",
    "live",
    "arrival",
    "running",
    "total",
    "computed",
    "most",
    "num_prompt",
    "num_remembered",
    "priority",
    "turn",
    "swapped",
    "group",
    "is_beam",
)
"""Arrays of the book that cannot be made from its requests: of rows that are taken, some have none
any more."""


class RowBook:
    """The host's book of the request table.

    Outputs arrive up to a step late, so each row carries the number of the first step that saw its
    present request; older outputs say nothing about it. A row is free again when an output that
    does concern it calls it EMPTY.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        s = config.num_rows
        self._config = config
        self._sizes = Sizes(
            max_num_seqs=config.max_num_seqs,
            max_admissions=config.max_admissions,
            block_size=config.block_size,
            watermark_blocks=config.watermark_blocks,
            max_blocks_per_seq=config.max_blocks_per_seq,
            batching=config.batching,
            kv_cache=config.kv_cache,
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
        self._num_prompt = np.zeros(s, np.int64)
        self._swapped = np.zeros(s, bool)
        self._priority = np.zeros(s, np.int64)
        self._turn = np.zeros(s, np.int64)  # when it last stepped back; as in the core
        self._group = np.full(s, -1, np.int64)
        self._is_beam = np.zeros(s, bool)
        self._num_prompt_blocks = np.zeros(s, np.int64)
        self._num_remembered = np.zeros(s, np.int64)
        self._chains: list[list[int]] = [[] for _ in range(s)]
        self._row_of: dict[int, int] = {}  # id(request) -> row
        self._to_end = np.zeros(s, bool)
        self._num_launched = 0
        self._num_arrived = 0
        self._num_available = config.num_blocks
        self._num_preemptions = 0
        self._batch_is_open = True  # of static batching
        self._blocked: tuple[int, int, int] | None = None  # a head that did not fit: `_head`
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
        self._total[row] = self._num_prompt[row] = len(request.prompt_token_ids)
        self._computed[row] = 0
        self._most[row] = request.max_total_tokens
        self._priority[row] = request.params.priority
        self._turn[row] = 0
        self._group[row] = -1 if request.group == NULL else request.group
        self._swapped[row] = False
        self._is_beam[row] = request.search is not None
        if request.search is not None and request.index > 0:
            self._live[row] = False  # spare at first
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
        live = self._live_in_order()
        if not len(live):
            return None
        rows = self._as_rows(live, in_flight)
        for num_tokens in in_flight:
            rows = advance(rows, num_tokens, self._sizes)
        return demand(rows, self._sizes) if len(rows.total) else None

    def _live_in_order(self) -> np.ndarray:
        """Live rows as the scheduler ranks them: running ones first, older before newer."""
        live = np.flatnonzero(self._live)
        place = 2 * ~self._running[live] - self._preempted(live)
        key = self._queue_key(live) * (place == 2)
        return live[np.lexsort((self._arrival[live], key, place))]

    def _preempted(self, live: np.ndarray) -> np.ndarray:
        """[n] bool: waiting rows of a static batch, which come back before all others."""
        static = self._config.batching == "static"
        return static & ~self._running[live] & (self._turn[live] > 0)

    def _queue_key(self, live: np.ndarray) -> np.ndarray:
        """[n] int: the scheduling policy's order of waiting rows, as far as the host can follow it;
        rows passed over too often, and policies of the user's own, it cannot."""
        policy = self._config.scheduling_policy
        if policy == "priority":
            return self._priority[live]
        if policy == "round_robin":
            return np.maximum(self._arrival[live], self._turn[live])
        if policy == "longest_prefix":
            return -self._expected_computed(live)
        return np.zeros(len(live), np.int64)

    def _as_rows(self, live: np.ndarray, in_flight: Sequence[int] = ()) -> Rows:
        """What the last output said of them."""
        rows = Rows(
            running=self._running[live],
            total=self._total[live],
            computed=self._expected_computed(live),
            most=self._most[live],
            swapped=self._swapped[live],
            unseen=np.maximum(
                self._first_step[live] - (self._num_launched - len(in_flight) + 1), 0
            ),
            num_available_blocks=self._num_available,
            admitting=True,
            prompt=self._num_prompt[live],
            group=self._group[live],
            followers=self._followers(live),
        )
        rows, _ = share_prompts(rows)
        blocked = self._is_blocked(self._head(live, rows))
        if self._config.batching != "static":
            return replace(rows, admitting=not blocked)
        ended = self._taken & ~self._live & ~self._to_end
        return replace(
            rows,
            admitting=self._batch_is_open and not blocked,
            num_ended=int(ended.sum()),
            preempted=self._preempted(live) & (not blocked),
        )

    def _head(self, live: np.ndarray, rows: Rows) -> tuple[int, int, int] | None:
        """(arrival, blocks to spare, blocks of its prompt that are cached) of the oldest waiting
        row. As in the core, a head that did not fit waits until it has more of them. The core adds
        up those to spare and those cached that somebody holds; who holds them is not known here, so
        more of either counts."""
        waiting = np.flatnonzero(~rows.running & ~share_prompts(rows)[1])
        if not len(waiting):
            return None
        cached = int(rows.computed[waiting[0]]) // self._sizes.block_size
        return int(self._arrival[live[waiting[0]]]), num_spare_blocks(rows, self._sizes), cached

    def _followers(self, live: np.ndarray) -> np.ndarray | None:
        """For each live row the spare rows of its beam search; counted once for each search."""
        if not self._is_beam[live].any():
            return None
        followers = np.zeros(len(live), np.int64)
        seen = set()
        for i in np.flatnonzero(self._is_beam[live]):
            request = self._requests[live[i]]
            if request is not None and request.group not in seen:
                seen.add(request.group)
                followers[i] = int((~self._live[request.search.rows]).sum())
        return followers

    def _num_held(self) -> int:
        """Rows that wait for another row's prompt, as far as is known."""
        if not (self._live & (self._group >= 0)).any():
            return 0
        return int(share_prompts(self._as_rows(self._live_in_order()))[1].sum())

    def _is_blocked(self, head: tuple[int, int, int] | None) -> bool:
        if head is None or self._blocked is None:
            return False
        arrival, spare, cached = self._blocked
        return head[0] == arrival and head[1] <= spare and head[2] <= cached

    def _expected_computed(self, live: np.ndarray) -> np.ndarray:
        computed = self._computed[live].copy()
        if self._prefix is None:
            return computed
        for i in np.flatnonzero(~self._running[live])[: self._sizes.max_admissions]:
            row = int(live[i])
            if self._swapped[row]:
                continue  # it keeps what it has
            computed[i] = self._prefix.num_cached_tokens(self._chains[row], int(self._total[row]))
        return computed

    def update(self, output, step: int, num_tokens: int) -> list[tuple[int, Request]]:
        """Take in the output of a step; -> the rows it concerns, with their requests."""
        known = self._taken & (self._first_step <= step)
        status = output.status
        num_held = self._num_held()
        was_waiting = known & self._live & ~self._running
        waiting = (status == Status.WAITING) | (status == Status.SWAPPED)
        steps_back = known & self._running & waiting
        self._turn[steps_back] = self._num_arrived
        self._running = np.where(known, status == Status.RUNNING, self._running)
        self._total = np.where(known, output.num_tokens, self._total)
        self._computed = np.where(known, output.num_computed_tokens, self._computed)
        self._swapped = np.where(known, status == Status.SWAPPED, self._swapped)
        works = (status == Status.RUNNING) | waiting
        self._live &= ~known | works
        for row in np.flatnonzero(known & works & self._is_beam & ~self._live):
            self._live[row] = self._requests[row] is not None  # no longer spare
        self._num_available = int(output.num_free_blocks) + int(output.num_evictable_blocks)
        if output.batch_is_open is not None:
            self._batch_is_open = bool(output.batch_is_open)
        num_admitted = int((was_waiting & ~waiting).sum())
        preempted = int(output.counters.num_preemptions) != self._num_preemptions
        self._num_preemptions = int(output.counters.num_preemptions)
        did_not_fit = (
            int(output.num_waiting) > num_held  # those that were held back were not tried
            and int(output.num_scheduled_tokens) < num_tokens
            and int(output.num_running) < self._sizes.max_num_seqs
            and num_admitted < self._sizes.max_admissions
            and not preempted  # nobody was tried
        )
        self._free(known & (status == Status.EMPTY))
        if num_admitted:
            self._blocked = None
        if did_not_fit:  # before what this step has computed can be found
            live = self._live_in_order()
            self._blocked = self._head(live, self._as_rows(live))
        self._remember_prompts()
        return [
            (int(row), self._requests[row])
            for row in np.flatnonzero(known)
            if self._requests[row] is not None
        ]

    def requests(self) -> list[tuple[int, Request]]:
        """Rows whose request has not ended."""
        return [(row, r) for row, r in enumerate(self._requests) if r is not None]

    def states(self) -> dict[str, RequestState]:
        """What the last output said of each request that has not ended, by id."""
        return {
            request.request_id: RequestState(
                status="running" if self._running[row] else "waiting",
                num_tokens=int(self._total[row]),
                num_computed_tokens=int(self._computed[row]),
            )
            for row, request in self.requests()
        }

    def arrival(self, row: int) -> int:
        """Place of the row's request in the order in which they came into the table."""
        return int(self._arrival[row])

    def saved(self) -> tuple[dict, dict[str, np.ndarray]]:
        """What `restore` needs beside the requests: numbers, and arrays [S] or longer. Nothing may
        be in flight, and no row be left to abort."""
        known = [] if self._prefix is None else self._prefix.known()
        numbers = {
            "num_arrived": self._num_arrived,
            "num_available": self._num_available,
            "num_preemptions": self._num_preemptions,
            "blocked": self._blocked,
        }
        if self._config.batching == "static":
            numbers["batch_is_open"] = self._batch_is_open
        arrays = {name: getattr(self, f"_{name}") for name in _SAVED}
        return numbers, arrays | {"prefix_known": np.asarray(known, np.int64)}

    def restore(
        self,
        requests: Sequence[tuple[int, Request]],
        numbers: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        """Make a new book what it was."""
        for row, request in requests:
            self.take(row, request)
        for name in _SAVED:
            getattr(self, f"_{name}")[:] = arrays[name]
        self._first_step[:] = 1
        self._num_arrived = numbers["num_arrived"]
        self._num_available = numbers["num_available"]
        self._num_preemptions = numbers["num_preemptions"]
        if self._config.batching == "static":
            self._batch_is_open = numbers["batch_is_open"]
        self._blocked = None if numbers["blocked"] is None else tuple(numbers["blocked"])
        if self._prefix is not None:
            self._prefix.remember(arrays["prefix_known"].tolist()[::-1])

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
