"""Counts and clocks of a running engine."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot. Totals count from the start.

    Attributes:
      num_running, num_waiting: requests now; waiting ones in the table and in the queue before it.
      num_free_blocks, num_evictable_blocks: of `num_blocks`; evictable ones are cached and unused.
      prompt_tokens, cached_tokens: of started requests; cached ones were found in the prefix cache.
      num_host_blocks, num_free_host_blocks: of the pool in host memory; 0 without swapping.
      output_tokens, steps, preemptions: totals.
      early_preemptions: of them, of resumed requests that had got no token yet (thrashing).
      recomputed_tokens: computed again after a preemption.
      swaps_out, swaps_in, blocks_swapped_out, blocks_swapped_in: requests and blocks moved to host
        memory and back.
      computed_tokens, padded_tokens: tokens of all steps, and the size of all buckets.
      finished: outputs by `finish_reason`; a request may be for several.
      refused: requests that found the queue full.
      time_to_first_token, time_per_token, request_time: histograms, seconds.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    block_size: int
    num_free_blocks: int
    num_evictable_blocks: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    preemptions: int
    early_preemptions: int
    recomputed_tokens: int
    num_host_blocks: int
    num_free_host_blocks: int
    swaps_out: int
    swaps_in: int
    blocks_swapped_out: int
    blocks_swapped_in: int
    computed_tokens: int
    padded_tokens: int
    finished: dict[str, int]
    refused: int
    time_to_first_token: "Histogram"
    time_per_token: "Histogram"
    request_time: "Histogram"


@dataclass
class Histogram:
    """How often a value was at most each bound; `total` is the sum of values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        place = next((i for i, b in enumerate(self.bounds) if value <= b), len(self.bounds))
        self.counts[place] += 1
        self.total += value

    def copy(self) -> "Histogram":
        """An independent copy."""
        return Histogram(self.bounds, list(self.counts), self.total)


_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


_COUNTERS = {
    "num_preemptions": "preemptions",
    "num_early_preemptions": "early_preemptions",
    "num_recomputed_tokens": "recomputed_tokens",
    "num_swaps_out": "swaps_out",
    "num_swaps_in": "swaps_in",
    "num_blocks_swapped_out": "blocks_swapped_out",
    "num_blocks_swapped_in": "blocks_swapped_in",
}
"""The core's totals, and what they are called here."""


class StatsKeeper:
    """Collects what `EngineStats` shows. Written by the engine's thread."""

    def __init__(self, *, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self._num_blocks = num_blocks
        self._num_host_blocks = self._num_free_host = num_host_blocks
        self._block_size = block_size
        self.num_free_blocks = num_blocks
        self._num_evictable = 0
        self._running = self._waiting = 0
        self._prompt = self._cached = self._output = self._steps = 0
        self._totals = dict.fromkeys(_COUNTERS.values(), 0)
        self._computed = self._padded = 0
        self._finished: Counter[str] = Counter()
        self._first, self._next = Histogram(_FIRST), Histogram(_NEXT)
        self._whole = Histogram(_WHOLE)

    def token(self, request, now: float) -> None:
        """A request got a token."""
        self._output += 1
        if request.first_token_time_s is None:
            request.first_token_time_s = now
            self._first.add(now - request.arrival_time_s)
            if request.index == 0:  # the others share its prompt
                self._prompt += len(request.prompt_token_ids)
                self._cached += request.num_cached_tokens or 0
        else:
            self._next.add(now - request.last_token_time_s)
        request.last_token_time_s = now

    def finished(self, reason: str, request, now: float) -> None:
        """A request ended."""
        self._finished[reason] += 1
        self._whole.add(now - request.arrival_time_s)

    def stepped(self, output, num_tokens: int) -> None:
        """The output of a step of this bucket was read."""
        self._steps += 1
        self._computed += int(output.num_scheduled_tokens)
        self._padded += num_tokens
        self._running, self._waiting = int(output.num_running), int(output.num_waiting)
        self.num_free_blocks = int(output.num_free_blocks)
        self._num_evictable = int(output.num_evictable_blocks)
        self._num_free_host = int(output.num_free_host_blocks)
        for counter, total in _COUNTERS.items():
            self._totals[total] = int(getattr(output.counters, counter))

    def idle(self, ended) -> None:
        """Nothing runs any more, and blocks are given back. Rows that have ended may still hold
        some: they leave the table a few at a time."""
        self._running = self._waiting = 0
        self.num_free_blocks = int(ended.num_free_blocks)
        self._num_evictable = int(ended.num_evictable_blocks)
        self._num_free_host = int(ended.num_free_host_blocks)

    def snapshot(self, *, num_queued: int, num_refused: int = 0) -> EngineStats:
        """The present state, with the requests before the table counted as waiting."""
        return EngineStats(
            num_running=self._running,
            num_waiting=self._waiting + num_queued,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            num_free_blocks=self.num_free_blocks,
            num_evictable_blocks=self._num_evictable,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            output_tokens=self._output,
            steps=self._steps,
            num_host_blocks=self._num_host_blocks,
            num_free_host_blocks=self._num_free_host,
            **self._totals,
            computed_tokens=self._computed,
            padded_tokens=self._padded,
            finished=dict(self._finished),
            refused=num_refused,
            time_to_first_token=self._first.copy(),
            time_per_token=self._next.copy(),
            request_time=self._whole.copy(),
        )
