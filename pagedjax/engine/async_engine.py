"""The engine behind asyncio: one thread steps it, any number of coroutines wait for outputs.

What takes long happens in threads: the steps in one, encoding prompts in a few more. The event loop
only passes on what has come out.
"""

import asyncio
import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.beam_search import BeamSearchParams
from pagedjax.engine.engine import Engine
from pagedjax.engine.errors import EngineDeadError, EngineSavedError, InvalidRequestError
from pagedjax.engine.request import Request
from pagedjax.engine.stats import EngineStats
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams

NUM_PREPARING_THREADS = 4
"""More would only take the interpreter from the engine's thread more often."""


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

    def __init__(self, engine: "AsyncEngine", request: Request, queue: asyncio.Queue) -> None:
        self.request_id = request.request_id
        self._engine = engine
        self._request = request
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
        """Abort the request unless it has ended. From any thread; takes no lock."""
        if self._open:
            self._open = False
            # Never by its id: another request may have that by now.
            self._engine.abort_request(self._request)

    async def aclose(self) -> None:
        """The same, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncEngine:
    """Runs an `Engine` in a thread of its own, from `start` (or the first request) to `shutdown`.

    If a step fails, every request that waits gets `EngineDeadError`, and so does every later one:
    nothing hangs.

    Args:
      on_outputs: called in the engine's thread with all that comes out, before anybody gets it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_outputs: Callable[[Sequence[RequestOutput]], None] = lambda _outputs: None,
    ) -> None:
        self.engine = engine
        self._on_outputs = on_outputs
        # Guards what follows; never waited for while the engine's own lock is held.
        self._condition = threading.Condition()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._num_preparing = 0
        self._workers = ThreadPoolExecutor(NUM_PREPARING_THREADS, "pagedjax-prepare")
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._keeping = False  # requests are about to be saved: those who leave do not end them
        self._jobs: list[tuple[Callable[[], None], Future]] = []
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

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> OutputStream:
        """Queue a request; its deltas come from the stream.

        Args:
          options: as for `Engine.add_request`.

        Raises:
          InvalidRequestError, QueueFullError: as `Engine.add_request`.
          EngineDeadError: the engine failed or is shutting down.
        """
        request_id = self.new_id() if request_id is None else request_id
        (stream,) = await self.generate_many(
            lambda: [self.engine.prepare(request_id, prompt, params, **options)],
            count=1 if params is None else params.num_samples,
        )
        return stream

    def new_id(self) -> str:
        """An id for a request that brings none."""
        while self.engine.is_in_use(request_id := f"request-{next(self._counter)}"):
            pass  # a resumed one
        return request_id

    async def generate_many(
        self, prepare: Callable[[], Sequence[Request]], *, count: int
    ) -> list[OutputStream]:
        """Queue requests, all of them or none; -> their streams. Raises what `generate` does.

        Args:
          prepare: makes the requests (`Engine.prepare`), in a thread where it holds up nobody.
            Whatever it raises comes out here. It is not called when the queue has no room.
          count: how many outputs they will have, all together.
        """
        self.start()
        loop = asyncio.get_running_loop()
        with self._condition:
            self._refuse_if_dead()
            # Those being prepared count, so that they cannot pile up either.
            self.engine.check_room(count, reserved=self._num_preparing)
            self._num_preparing += count
            preparing = loop.run_in_executor(self._workers, prepare)
        try:
            requests = await preparing
        finally:
            with self._condition:
                self._num_preparing -= count
        return self._submit(requests, loop)

    def _submit(
        self, requests: Sequence[Request], loop: asyncio.AbstractEventLoop
    ) -> list[OutputStream]:
        mailboxes = {r.request_id: _Mailbox(loop, asyncio.Queue()) for r in requests}
        # The engine's thread looks for mailboxes, and dies, with the condition held.
        with self._condition:
            self._refuse_if_dead()
            for request_id in mailboxes:
                if request_id in self._mailboxes:  # its last output is on the way
                    raise InvalidRequestError(
                        f"request_id {request_id!r} is already in use by a request that has not "
                        "ended",
                        param="request_id",
                    )
            self.engine.submit(requests)
            self._mailboxes |= mailboxes
            self._condition.notify()
        return [OutputStream(self, r, mailboxes[r.request_id].queue) for r in requests]

    def abort(self, request_id: str) -> None:
        """End the request that has this id now; whoever waits for it gets the reason "abort". From
        any thread."""
        # Nobody to wake: as long as there is a request, the engine's thread is stepping.
        self.engine.abort(request_id)

    def abort_request(self, request: Request) -> None:
        """The same for this very request. Takes no lock."""
        if not self._keeping:
            self.engine.abort(request)

    def abort_all(self) -> None:
        """End every request."""
        with self._condition:
            request_ids = list(self._mailboxes)
        for request_id in request_ids:
            self.abort(request_id)

    def save(self, path: Path, *, extra: Callable[[], Mapping[str, Any]] = dict) -> "Future[None]":
        """`Engine.save` between two steps; the future tells when the file is there, or raises.

        Args:
          extra: called in the engine's thread, when all that has come out has been passed on.
        """
        self.start()
        with self._condition:
            self._refuse_if_dead()
            return self._add_job(lambda: self._save(path, extra))

    def save_and_stop(
        self, path: Path, *, extra: Callable[[], Mapping[str, Any]] = dict
    ) -> "Future[None]":
        """The same, and no step after it. From now on no request is taken, and nobody who leaves
        ends his request. Those who wait get `EngineSavedError` when all is saved."""
        self.start()
        with self._condition:
            self._refuse_if_dead()
            self._keeping = self._stopping = True
            self._workers.shutdown(wait=False)
            future = self._add_job(lambda: self._save(path, extra))

        def tell(done: "Future[None]") -> None:
            if done.exception() is None:
                self._fail_all("the engine was shut down; the request was saved", EngineSavedError)

        future.add_done_callback(tell)
        return future

    def _add_job(self, job: Callable[[], None]) -> "Future[None]":
        future: Future[None] = Future()
        self._jobs.append((job, future))
        self._condition.notify()
        return future

    def _save(self, path: Path, extra: Callable[[], Mapping[str, Any]]) -> None:
        self._deliver(self.engine.settle())
        self._deliver(self.engine.save(path, extra=extra()))

    async def stop(self, timeout_s: float | None = 30.0) -> None:
        """`shutdown` without holding up the event loop."""
        await asyncio.to_thread(self.shutdown, timeout_s)

    def shutdown(self, timeout_s: float | None = 30.0) -> None:
        """Stop the thread after the step it is in, and wait for that. Requests still running get
        `EngineDeadError`."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
            thread = self._thread
            self._workers.shutdown(wait=False)
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
                self._run_jobs()
                if self.engine.has_work() and not self._stopping:
                    self._deliver(self.engine.step())
        except BaseException as error:
            with self._condition:
                self._error = error
                jobs, self._jobs = self._jobs, []
            message = f"the engine has failed: {_describe(error)}"
            for _, future in jobs:
                future.set_exception(EngineDeadError(message))
            self._fail_all(message)

    def _wait_for_work(self) -> bool:
        with self._condition:
            while not (self._stopping or self._jobs or self.engine.has_work()):
                self._condition.wait()
            return bool(self._jobs) or not self._stopping

    def _run_jobs(self) -> None:
        while self._jobs:
            with self._condition:
                job, future = self._jobs.pop(0)
            try:
                job()
            except OSError as error:  # a full disk; the engine is well
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise
            else:
                future.set_result(None)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Wake each event loop once for all that is new."""
        self._on_outputs(outputs)
        batches = defaultdict(list)
        with self._condition:
            for output in outputs:
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is not None:
                    batches[mailbox.loop].append((mailbox.queue, output))
                if output.finished:
                    self._mailboxes.pop(output.request_id, None)
        for loop, batch in batches.items():
            _post(loop, batch)

    def _fail_all(self, message: str, kind: type[EngineDeadError] = EngineDeadError) -> None:
        with self._condition:  # taken out at once: each is told by one caller only
            mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            _post(mailbox.loop, [(mailbox.queue, kind(message))])


def _post(loop: asyncio.AbstractEventLoop, batch: list[tuple[asyncio.Queue, Any]]) -> None:
    def put() -> None:
        for queue, item in batch:
            queue.put_nowait(item)

    with contextlib.suppress(RuntimeError):  # a loop that has been closed waits for nothing
        loop.call_soon_threadsafe(put)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
