"""Playing a log: every state of the scheduler, forwards and backwards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pagedjax.core.state import SchedulerState
from pagedjax.eventlog import LogError, checksum
from pagedjax.replay.log import Log
from pagedjax.replay.scheduler import Copies, Transitions

CHECKPOINT_EVERY = 64
"""Steps between states that are kept, at the least."""

MAX_CHECKPOINTS = 64
"""Kept at most: in a longer log, they lie further apart."""

MAX_RECENT = 64
"""Of the states before the one asked for last, so many are kept, so that going back is quick."""


@dataclass(frozen=True)
class Mismatch:
    """A step after which a state was not the one that the log was written with.

    Attributes:
      arrays: those whose checksums differ.
    """

    step: int
    arrays: list[str]

    def __str__(self) -> str:
        return f"step {self.step}: the state differs in {', '.join(self.arrays)}"


class Player:
    """The scheduler's states, by the number of steps before them.

    State 0 is that of an idle engine; state n that right after step n, before anything else
    happened. Nothing but the log is needed: tokens are the ones recorded.

    Raises `LogError`: the log cannot be played by this program.
    """

    def __init__(self, log: Log, *, checkpoint_every: int = CHECKPOINT_EVERY) -> None:
        self.log = log
        self.config = log.scheduler_config
        self.num_steps = log.num_steps
        self._every = max(checkpoint_every, -(-self.num_steps // MAX_CHECKPOINTS))
        self._transitions = Transitions(self.config)
        initial = self._transitions.initial()
        names = list(checksum.leaves(initial))
        self.checked = checksum.covered(names, exact=log.has_text)
        self._sums, _ = checksum.compiled()
        self._kept: dict[int, SchedulerState] = {0: initial}
        self._recent: dict[int, SchedulerState] = {}

    def state(self, number: int) -> SchedulerState:
        """State `number`. Raises `IndexError` if the log does not have it."""
        if not 0 <= number <= self.num_steps:
            raise IndexError(f"step must be from 0 to {self.num_steps} (got {number})")
        if number in self._recent:
            return self._recent[number]
        start, state = max(
            (item for kept in (self._kept, self._recent) for item in kept.items()
             if item[0] <= number),
            key=lambda item: item[0],
        )  # fmt: skip
        if start not in self._recent:
            self._recent = {}
        for step in range(start + 1, number + 1):
            state, _ = self.advance(state, step)
            if step % self._every == 0:
                self._kept.setdefault(step, state)
            self._recent[step] = state
            if len(self._recent) > MAX_RECENT:
                del self._recent[next(iter(self._recent))]  # the earliest: they are in order
        return state

    def advance(self, state: SchedulerState, number: int) -> tuple[SchedulerState, Copies]:
        """State `number` from the one before it, and the blocks copied on the way."""
        step = self.log.steps[number - 1]
        for event in step.events:
            state = self._transitions.apply(state, event)
        return self._transitions.step(state, step.result, step.num_tokens)

    def before(self, state: SchedulerState, number: int) -> SchedulerState:
        """State `number - 1` with what happened before step `number` was launched."""
        for event in self.log.steps[number - 1].events:
            state = self._transitions.apply(state, event)
        return state

    def walk(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, SchedulerState]]:
        """(number, state) one after the other."""
        for number in range(first, (self.num_steps if last is None else last) + 1):
            yield number, self.state(number)

    def compare(self, number: int) -> Mismatch | None:
        """Whether state `number` is the recorded one; None also where nothing was recorded."""
        if number == 0 or (sums := self.log.steps[number - 1].result.get("sums")) is None:
            return None
        own = self._sums(self.state(number), exact=self.log.has_text)
        differing = differing_arrays(sums, own, self.checked)
        return Mismatch(number, differing) if differing else None

    def verify(self) -> Iterator[Mismatch | None]:
        """`compare` for every step, in order."""
        for number in range(1, self.num_steps + 1):
            yield self.compare(number)


def differing_arrays(recorded: np.ndarray, own: jax.Array, names: Sequence[str]) -> list[str]:
    """Names of the arrays whose checksums differ. Raises `LogError` if they are not comparable."""
    own = np.asarray(own)
    if recorded.shape != own.shape:
        raise LogError(
            f"the log has checksums of {len(recorded)} arrays, and the state {len(own)}: it was "
            "written by another version of this program"
        )
    return [names[i].lstrip(".") for i in np.flatnonzero(recorded != own)]
