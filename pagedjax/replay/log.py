"""Reading an event log: its events, step by step, and what is wrong with the file."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.eventlog.format import Damage, Kind, LogError, read_records, unpack


@dataclass(frozen=True)
class Event:
    """Something that happened between two steps.

    Attributes:
      kind: STATE, ADD or END.
      arrays, values: as the recorder has written them.
    """

    kind: Kind
    arrays: dict[str, np.ndarray]
    values: dict[str, Any]


@dataclass
class Step:
    """A step, and what happened between it and the one before.

    Attributes:
      num_tokens: the bucket; 0 for what came after the last step.
      result: arrays "rows", "token_ids" and, where there are any, "beam_parents" and "cum_logprobs"
        of those rows, "nan", "sums", "kv_sums"; None where the log ends before the step's output.
    """

    events: list[Event] = field(default_factory=list)
    num_tokens: int = 0
    result: dict[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Log:
    """What could be read of a log.

    Attributes:
      header: see `pagedjax.engine.event_log`.
      steps: step n is `steps[n - 1]`.
      after: what happened after the last step.
      problem: why it ends where it ends, if the file is damaged or truncated.
    """

    path: Path
    header: dict[str, Any]
    steps: list[Step]
    after: list[Event]
    problem: str | None

    @property
    def has_text(self) -> bool:
        """Whether its tokens are the tokens, and not other names for them."""
        return self.header["text"]

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """Of the engine that wrote it."""
        try:
            return SchedulerConfig(**self.header["fingerprint"]["scheduler"])
        except TypeError as error:
            raise LogError(
                f"{self.path} was written by another version of this program: {error}"
            ) from error

    @property
    def num_steps(self) -> int:
        """Leading steps whose output is known: those that can be played without the model."""
        return next(
            (i for i, step in enumerate(self.steps) if step.result is None), len(self.steps)
        )


def read_log(path: str | Path) -> Log:
    """Read a log, as far as it is whole.

    Raises:
      LogError: it is no event log, or nothing of it can be read.
      OSError: it could not be read.
    """
    path = Path(path)
    header: dict[str, Any] | None = None
    steps: list[Step] = []
    current, problem = Step(), None
    records = _records(path)
    try:
        for place, kind, arrays, values in records:
            if header is None:
                if kind != Kind.HEADER:
                    raise LogError(f"{path} does not begin with a header")
                header = values
            elif kind in (Kind.STATE, Kind.ADD, Kind.END):
                current.events.append(Event(kind, arrays, values))
            elif kind == Kind.STEP:
                current.num_tokens = values["num_tokens"]
                steps.append(current)
                current = Step()
            elif kind == Kind.RESULT and 1 <= values["step"] <= len(steps):
                steps[values["step"] - 1].result = arrays
            else:
                raise Damage(f"the record at byte {place} does not belong there")
    except Damage as damage:
        if header is None:
            raise LogError(f"{path}: {damage}") from damage
        known = next((i for i, s in enumerate(steps) if s.result is None), len(steps))
        problem = f"{damage} (after step {known}, in what belongs to step {known + 1})"
    if header is None:
        raise LogError(f"{path} has no header")
    return Log(path, header, steps, current.events, problem)


def _records(path: Path) -> Iterable[tuple[int, Kind, dict[str, np.ndarray], dict[str, Any]]]:
    for place, kind, payload in read_records(path):
        try:
            arrays, values = unpack(payload)
        except Damage as damage:
            raise Damage(f"the record at byte {place} is damaged: {damage}") from damage
        yield place, kind, arrays, values
