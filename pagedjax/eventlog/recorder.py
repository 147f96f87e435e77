"""Writes an engine's event log while it runs."""

import dataclasses
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.requests import RequestParams
from pagedjax.core.state import (
    NULL,
    EngineState,
    ErrorCode,
    FinishReason,
    SchedulerState,
    StepOutput,
)
from pagedjax.eventlog import checksum
from pagedjax.eventlog.format import Kind, LogWriter, pack
from pagedjax.eventlog.names import STOP, PrefixNames
from pagedjax.eventlog.rename import renamed_state

KVBlocks = Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]


class Recorder:
    """Appends every event to a file, in the order in which the device sees them.

    Should the file not take any more (a full disk), recording ends with a line in the program's
    log, and the engine goes on.

    Args:
      path: a log that is there already is kept under another name (`.1`, `.2`, ...).
      header: what the engine is, as JSON can say it.
      config: of its scheduler.
      text: write token ids as they are. False: under other names, see `PrefixNames`.
      checksum_every: a checksum of the scheduler's state after every so many steps.
      kv: and one of the KV blocks in use.

    Raises `OSError`: the file could not be made.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        *,
        config: SchedulerConfig,
        text: bool,
        checksum_every: int = 1,
        kv: bool = False,
    ) -> None:
        self.path = path
        self.error: OSError | None = None
        self._config = config
        self._every = checksum_every
        self._names = None if text else PrefixNames()
        self._num_steps = 0
        self._pending: deque[tuple[int, Any, Any]] = deque()  # steps whose output is not known
        self._checksums, kv_checksum = checksum.compiled()
        self._kv_checksum = kv_checksum if kv else None
        _keep_old(path)
        self._writer = LogWriter(path)
        self._append(Kind.HEADER, pack({}, **header, text=text, checksum_every=checksum_every))

    def warm_up(self, state: EngineState) -> None:
        """Compile what later steps need."""
        jax.block_until_ready(self._sums(state))

    def num_compiled(self) -> int:
        """Compiled programs; constant after `warm_up`."""
        functions = [f for f in (self._checksums, self._kv_checksum) if f is not None]
        return sum(function._cache_size() for function in functions)

    def add(self, row: int, token_ids: Any, params: RequestParams) -> None:
        """A request goes into a row."""
        arrays = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
        if self._names is None:
            tokens = np.asarray(token_ids, np.int32)
        else:
            tokens = self._names.start(row, token_ids)
            stops = np.full_like(np.asarray(params.stop_token_ids), NULL)
            stops[0] = STOP
            arrays["stop_token_ids"] = stops
        self._append(Kind.ADD, pack({"token_ids": tokens, **arrays}, row=int(row)))

    def end(self, rows: np.ndarray) -> None:
        """Rows [S] bool are aborted, and what has ended is released."""
        self._append(Kind.END, pack({"rows": np.flatnonzero(rows).astype(np.int32)}))

    def launch(self, num_tokens: int, state: EngineState) -> None:
        """A step was launched; `state` is what it will leave."""
        self._num_steps += 1
        sums = self._sums(state) if self._num_steps % self._every == 0 else (None, None)
        self._pending.append((self._num_steps, *sums))
        self._append(Kind.STEP, pack({}, step=self._num_steps, num_tokens=num_tokens))

    def result(self, output: StepOutput) -> None:
        """What came out of the oldest step of which nothing is known yet."""
        step, sums, kv_sums = self._pending.popleft()
        rows = np.flatnonzero(output.token_ids >= 0)
        tokens = output.token_ids[rows].astype(np.int32)
        parents = output.beam_parent[rows]
        beams = parents != NULL
        if self._names is not None:
            self._names.branch(rows.tolist(), np.where(beams, parents, rows).tolist())
            stopped = output.finish_reason[rows] == FinishReason.STOP
            names = [
                self._names.extend(*pair)
                for pair in zip(rows.tolist(), tokens.tolist(), strict=True)
            ]
            tokens = np.where(stopped, STOP, np.asarray(names, np.int32)).astype(np.int32)
        arrays = {"rows": rows.astype(np.int32), "token_ids": tokens}
        if beams.any():
            arrays["beam_parents"] = parents.astype(np.int32)
            if self._names is None:
                arrays["cum_logprobs"] = output.cum_logprob[rows]
        nan = np.flatnonzero(output.error == ErrorCode.NAN_LOGITS)
        if len(nan):
            arrays["nan"] = nan.astype(np.int32)
        if sums is not None:
            arrays["sums"] = np.asarray(sums)
        if kv_sums is not None:
            arrays["kv_sums"] = np.asarray(kv_sums)
        self._append(Kind.RESULT, pack(arrays, step=step))

    def restored(
        self, scheduler: SchedulerState, blocks: KVBlocks, host_blocks: KVBlocks = ()
    ) -> None:
        """The state was replaced: a scheduler's, and (ids, keys, values) of blocks of the pool and
        of the host pool."""
        if self._names is not None:
            scheduler = renamed_state(scheduler, self._names, config=self._config)
            blocks = host_blocks = ()
        arrays = {name: np.asarray(leaf) for name, leaf in checksum.leaves(scheduler).items()}
        for pool, batches in (("", blocks), ("host_", host_blocks)):
            for number, parts in enumerate(batches):
                names = (f"{pool}{name}{number}" for name in ("ids", "keys", "values"))
                arrays |= dict(zip(names, parts, strict=True))
        self._append(Kind.STATE, pack(arrays))

    def close(self) -> None:
        """End the log."""
        self._writer.close()

    def _sums(self, state: EngineState) -> tuple[Any, Any]:
        kv = None if self._kv_checksum is None else self._kv_checksum(state)
        return self._checksums(state.scheduler, exact=self._names is None), kv

    def _append(self, kind: Kind, payload: bytes) -> None:
        if self.error is not None:
            return
        try:
            self._writer.append(kind, payload)
        except OSError as error:
            self.error = error
            logging.getLogger("pagedjax").error("the event log %s ends here: %s", self.path, error)


def _keep_old(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(other)
