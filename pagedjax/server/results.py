"""What came of requests whose clients may be gone: kept for a while, found by OpenAI's `id`.

A request that is resumed from a snapshot has nobody who waits for it. Its answer is collected here,
and so is everybody's, since nobody knows beforehand when the process will end.
"""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedjax.engine import InvalidRequestError
from pagedjax.outputs import CompletionOutput, RequestOutput, describe_output, restore_output
from pagedjax.server.streams import engine_ids

MAX_RESULTS = 1000
"""Finished answers that are kept; the oldest goes first."""

KEEP_S = 3600.0
"""How long a finished answer is kept, while the server runs."""


@dataclass
class Result:
    """One HTTP request and what came of it so far.

    Attributes:
      kind: "chat.completion" or "text_completion".
      created: seconds since 1970.
      options: its body without the prompt.
      outputs: by the engine's request id, in order; None before the first token.
      finished_s: when the last of them ended; None while one runs.
    """

    kind: str
    created: int
    options: dict[str, Any]
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)
    finished_s: float | None = None

    def whole(self) -> list[RequestOutput]:
        """An output for each prompt, an empty one where there is nothing yet."""
        return [
            output or RequestOutput(request_id=i, prompt=None, prompt_token_ids=[],
                                    outputs=[CompletionOutput()])
            for i, output in self.outputs.items()
        ]  # fmt: skip

    def error(self) -> str | None:
        """What went wrong, if something did."""
        return next((o.error for o in self.outputs.values() if o is not None and o.error), None)


class Results:
    """Answers by id. Thread-safe.

    Args:
      max_count, keep_s: of finished ones.
    """

    def __init__(
        self,
        *,
        max_count: int = MAX_RESULTS,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_count = max_count
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._results: dict[str, Result] = {}
        self._ids: dict[str, str] = {}  # of engine requests that have not ended -> of their result

    @contextlib.contextmanager
    def opening(self, result_id: str, result: Result, request_ids: Sequence[str]) -> Iterator[None]:
        """Keep an answer from its first token on. The body submits the requests; if it fails, there
        is nothing to keep.

        Raises `InvalidRequestError` for an id that is known already.
        """
        with self._lock:
            self._forget_old()
            if result_id in self._results:
                raise InvalidRequestError(
                    f"request_id: there is a request {result_id!r} already; GET "
                    f"/results/{result_id} says what came of it",
                    param="request_id",
                    code="request_id_in_use",
                )
            result.outputs = dict.fromkeys(request_ids)
            self._results[result_id] = result
            self._ids |= dict.fromkeys(request_ids, result_id)
        try:
            yield
        except BaseException:
            self.drop(result_id)
            raise

    def record(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in what has come out of the engine. An aborted request leaves nothing: it was the
        client who left, or somebody who deleted it."""
        with self._lock:
            for delta in outputs:
                result_id = self._ids.get(delta.request_id)
                if result_id is None:
                    continue
                if delta.finished:
                    del self._ids[delta.request_id]
                if any(c.finish_reason == "abort" for c in delta.outputs):
                    self._drop(result_id)
                else:
                    self._add(self._results[result_id], delta)

    def _add(self, result: Result, delta: RequestOutput) -> None:
        whole = result.outputs[delta.request_id]
        if whole is None:
            result.outputs[delta.request_id] = copy.deepcopy(delta)
        else:
            whole.add(delta)
        if all(output is not None and output.finished for output in result.outputs.values()):
            result.finished_s = self._clock()

    def get(self, result_id: str) -> Result | None:
        """A copy; None for an id that is unknown or forgotten."""
        with self._lock:
            self._forget_old()
            return copy.deepcopy(self._results.get(result_id))

    def drop(self, result_id: str) -> list[str]:
        """Forget an answer; -> the engine's ids of its requests that have not ended."""
        with self._lock:
            return self._drop(result_id)

    def num_unfinished(self) -> int:
        """Answers that are not whole yet."""
        with self._lock:
            return sum(result.finished_s is None for result in self._results.values())

    def saved(self) -> dict[str, Any]:
        """All of it, as JSON can say it."""
        with self._lock:
            self._forget_old()
            now = self._clock()
            return {
                result_id: {
                    "kind": result.kind,
                    "created": result.created,
                    "options": result.options,
                    "outputs": [
                        (request_id, output and describe_output(output))
                        for request_id, output in result.outputs.items()
                    ],
                    "age_s": None if result.finished_s is None else now - result.finished_s,
                }
                for result_id, result in self._results.items()
            }

    def restore(self, saved: Mapping[str, Any], request_ids: Sequence[str]) -> None:
        """Become what was saved.

        Args:
          request_ids: the engine's requests that go on. An answer that is not whole and waits for
            another one is dropped: that one was not taken in any more.
        """
        live, now = set(request_ids), self._clock()
        for result_id, described in saved.items():
            outputs = {
                request_id: output and restore_output(output)
                for request_id, output in described["outputs"]
            }
            waits_for = [i for i, output in outputs.items() if not (output and output.finished)]
            if not live.issuperset(waits_for):
                continue
            age_s = described["age_s"]
            result = Result(
                kind=described["kind"],
                created=described["created"],
                options=described["options"],
                outputs=outputs,
                finished_s=None if age_s is None else now - age_s,
            )
            with self._lock:
                self._results[result_id] = result
                self._ids |= dict.fromkeys(waits_for, result_id)

    def _drop(self, result_id: str) -> list[str]:
        result = self._results.pop(result_id, None)
        running = [i for i in (result.outputs if result else ()) if i in self._ids]
        for request_id in running:
            del self._ids[request_id]
        return running

    def _forget_old(self) -> None:
        now = self._clock()
        finished = [(r.finished_s, i) for i, r in self._results.items() if r.finished_s is not None]
        finished.sort()
        excess = len(finished) - self._max_count
        for place, (finished_s, result_id) in enumerate(finished):
            if place < excess or now - finished_s > self._keep_s:
                del self._results[result_id]


def opening(
    results: Results | None, kind: str, result_id: str, created: int, body: Any, count: int
) -> contextlib.AbstractContextManager[None]:
    """`Results.opening` for the HTTP request with this body and so many prompts; without results,
    nothing."""
    if results is None:
        return contextlib.nullcontext()
    options = body.model_dump(exclude_unset=True, exclude={"prompt", "messages"})
    return results.opening(result_id, Result(kind, created, options), engine_ids(result_id, count))
