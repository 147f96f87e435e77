"""The engine behind asyncio: one thread steps it, any number of coroutines wait for outputs."""

import asyncio
import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedjax.engine.engine import Engine
from pagedjax.engine.errors import EngineDeadError, InvalidRequestError
from pagedjax.engine.stats import EngineStats
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams


@dataclass(frozen=True)
class _Mailbox:
    """Where the outputs of one request go: a queue, and the event loop that it belongs to."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue


class OutputStream:
    """Deltas of one request, as they come: an asynchronous iterator for one consumer.

    Closing it, cancelling whoever waits for it, or dropping it aborts the request and frees its
    blocks.
    """

    def __init__(self, engine: "AsyncEngine", request_id: str, queue: asyncio.Queue) -> None:
        self.request_id = request_id
        self._engine = engine
        self._queue = queue
        self._open = True

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._open:
            raise StopAsyncIteration
        try:
            output = await self._queue.get()
        except BaseException:
            self.close()
            raise
        if isinstance(output, EngineDeadError):
            self._open = False
            raise output
        self._open = not output.finished
        return output

    def close(self) -> None:
        """Abort the request unless it has ended. From any thread."""
        if self._open:
            self._open = False
            self._engine.abort(self.request_id)

    async def aclose(self) -> None:
        """The same, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncEngine:
    """Runs an `Engine` in a thread of its own, from `start` (or the first request) to `shutdown`.

    If a step fails, every request that waits gets `EngineDeadError`, and so does every later one:
    nothing hangs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._condition = threading.Condition()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self._counter = itertools.count()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served."""
        return self._error is None and not self._stopping

    @property
    def error(self) -> BaseException | None:
        """What ended the engine, if something did."""
        return self._error

    def stats(self) -> EngineStats:
        """A snapshot of load and totals."""
        return self.engine.stats()

    def start(self) -> None:
        """Start the thread; does nothing when it runs already."""
        with self._condition:
            self._refuse_if_dead()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="pagedjax-engine", daemon=True
                )
                self._thread.start()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> OutputStream:
        """Queue a request at once; its deltas come from the stream. Call it in a running loop.

        Args:
          options: as for `Engine.add_request`.

        Raises:
          InvalidRequestError, QueueFullError: as `Engine.add_request`.
          EngineDeadError: the engine failed or is shutting down.
        """
        self.start()
        request_id = request_id or f"request-{next(self._counter)}"
        mailbox = _Mailbox(asyncio.get_running_loop(), asyncio.Queue())
        # Put there first: the engine's thread may answer before this function returns.
        if self._mailboxes.setdefault(request_id, mailbox) is not mailbox:
            raise InvalidRequestError(
                f"request_id {request_id!r} is already in use", param="request_id"
            )
        try:
            self.engine.add_request(request_id, prompt, params, **options)
            with self._condition:
                # A thread that died meanwhile has not told this mailbox.
                self._refuse_if_dead()
                self._condition.notify()
        except BaseException:
            self._mailboxes.pop(request_id, None)
            raise
        return OutputStream(self, request_id, mailbox.queue)

    def abort(self, request_id: str) -> None:
        """End a request from any thread; whoever waits for it gets the reason "abort"."""
        self.engine.abort(request_id)
        with self._condition:
            self._condition.notify()

    def abort_all(self) -> None:
        """End every request."""
        for request_id in list(self._mailboxes):
            self.abort(request_id)

    def shutdown(self, timeout_s: float | None = 30.0) -> None:
        """Stop the thread after the step it is in. Requests still running get `EngineDeadError`."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        self._fail_all("the engine was shut down")

    def _refuse_if_dead(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"the engine has failed: {_describe(self._error)}")
        if self._stopping:
            raise EngineDeadError("the engine is shutting down")

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._deliver(self.engine.step())
        except BaseException as error:
            with self._condition:
                self._error = error
            self._fail_all(f"the engine has failed: {_describe(error)}")

    def _wait_for_work(self) -> bool:
        with self._condition:
            while not self._stopping and not self.engine.has_work():
                self._condition.wait()
            return not self._stopping

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Wake each event loop once for all that is new."""
        batches = defaultdict(list)
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                batches[mailbox.loop].append((mailbox.queue, output))
            if output.finished:
                self._mailboxes.pop(output.request_id, None)
        for loop, batch in batches.items():
            _post(loop, batch)

    def _fail_all(self, message: str) -> None:
        while self._mailboxes:
            _, mailbox = self._mailboxes.popitem()
            _post(mailbox.loop, [(mailbox.queue, EngineDeadError(message))])


def _post(loop: asyncio.AbstractEventLoop, batch: list[tuple[asyncio.Queue, Any]]) -> None:
    def put() -> None:
        for queue, item in batch:
            queue.put_nowait(item)

    with contextlib.suppress(RuntimeError):  # a loop that has been closed waits for nothing
        loop.call_soon_threadsafe(put)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
