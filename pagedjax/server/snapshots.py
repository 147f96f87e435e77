"""The server's snapshots: resumed at its start, saved on request, now and then, and at its end."""

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.engine import AsyncEngine, Engine, EngineDeadError, state_file
from pagedjax.outputs import RequestOutput
from pagedjax.server.results import Results

FILE_NAME = "engine.state"


@dataclass(frozen=True)
class Saved:
    """A snapshot that is on the disk."""

    requests: int
    bytes: int
    seconds: float


class ServerSnapshots:
    """One folder with one snapshot, of one server at a time.

    Args:
      directory: made if it is not there.
      interval_s: save so often, while there is something new; None: not by the clock.
      log: says what has been saved.

    Raises `OSError`: the folder cannot be used, or another server uses it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        interval_s: float | None = None,
        log: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.path = directory / FILE_NAME
        self.results = Results()
        self.error: OSError | EngineDeadError | None = None
        self._interval_s = interval_s
        self._log = log
        self._engine: AsyncEngine | None = None
        self._stopping: asyncio.Task | None = None
        self._last: Any = None
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise OSError(f"{directory} is in use by another server") from error
        for unfinished in directory.glob(f".{FILE_NAME}.*.part"):  # left by a process that died
            unfinished.unlink()

    def close(self) -> None:
        """Let another server use the folder."""
        os.close(self._lock)

    def check(self) -> None:
        """Raise `SnapshotError` if the file is damaged: before an engine is built for it."""
        if self.path.exists():
            state_file.read(self.path)

    def resume(self, engine: Engine) -> int | None:
        """Let an idle engine go on from the snapshot; -> how many HTTP requests, None if there is
        no snapshot.

        Raises:
          SnapshotError: the file is damaged or of another engine. It is left as it is.
        """
        engine.warm_up_snapshots()
        if not self.path.exists():
            return None
        requests, extra = engine.resume(self.path)
        self.results.restore(extra.get("results", {}), [r.request_id for r in requests])
        return self.results.num_unfinished()

    def start(self, engine: AsyncEngine) -> None:
        """Save this one from now on."""
        self._engine = engine

    def record(self, outputs: Sequence[RequestOutput]) -> None:
        """What has come out of the engine; see `AsyncEngine`."""
        self.results.record(outputs)

    async def save(self) -> Saved:
        """Save now, between two steps. Raises `OSError`; the old snapshot is still there then."""
        return await self._wait_for(self._engine.save)

    async def save_and_stop(self) -> None:
        """Save, and stop the engine. Only once, whoever asks for it; `error` tells if it failed."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._save_and_stop())
        await asyncio.shield(self._stopping)

    async def save_at_intervals(self) -> None:
        """Save while there is something new, until cancelled."""
        while self._interval_s is not None:
            await asyncio.sleep(self._interval_s)
            stats = self._engine.stats()
            if not self._engine.is_healthy or self._last == (stats.steps, stats.num_waiting):
                continue
            try:
                await self.save()
            except OSError as error:  # the next one may succeed
                self._log(f"no snapshot could be saved: {error}")
            except EngineDeadError:  # it has just been stopped
                return

    async def _save_and_stop(self) -> None:
        try:
            if self._engine.is_healthy:
                await self._wait_for(self._engine.save_and_stop)
        except (OSError, EngineDeadError) as error:
            self.error = error
            self._log(f"no snapshot could be saved: {error}")
        finally:
            await self._engine.stop()

    async def _wait_for(self, save: Callable[..., Any]) -> Saved:
        started, count = time.monotonic(), 0
        stats = self._engine.stats()

        def extra() -> dict[str, Any]:
            nonlocal count
            count = self.results.num_unfinished()
            return {"results": self.results.saved()}

        await asyncio.wrap_future(save(self.path, extra=extra))
        self._last = (stats.steps, stats.num_waiting)
        saved = Saved(count, self.path.stat().st_size, time.monotonic() - started)
        self._log(
            f"saved {saved.requests} requests in progress, {saved.bytes / 1e6:.1f} MB, "
            f"in {saved.seconds:.2f} s"
        )
        return saved
