"""The engine's front door: requests are encoded, checked and queued here, from any thread."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pagedjax.beam_search import BeamSearchParams
from pagedjax.config import EngineConfig
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.state import NULL
from pagedjax.engine.beams import check_search, make_search
from pagedjax.engine.errors import InvalidRequestError, QueueFullError
from pagedjax.engine.request import Request, check_length, check_priority, check_request
from pagedjax.engine.rows import RowBook
from pagedjax.engine.salts import Salts
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizers import Tokenizer


class Intake:
    """The queue before the request table, and every request that has not ended, by its id.

    Args:
      sizes: the scheduler's, which say what can never be served.
      num_free_rows: how many rows of the request table wait for a request.
      clock: seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        sizes: SchedulerConfig,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_free_rows: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._sizes = sizes
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_free_rows = num_free_rows
        self._clock = clock
        longest = max(map(len, tokenizer.vocabulary.token_bytes), default=1)
        self._longest_token = max(longest, 1)
        # Guards the queue and the requests, and nothing that takes long. `abort` must do without:
        # the collector may run a stream's finalizer, which aborts, in any thread at any time.
        self._lock = threading.Lock()
        self._queue: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._aborts: deque[Request] = deque()
        self._salts = Salts()
        self._num_seeds_drawn = 0
        self._num_groups = 0
        self._num_refused = 0

    # -- any thread ------------------------------------------------------------------------------

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        add_special_tokens: bool = True,
        prompt_text: str | None = None,
        priority: int | None = None,
    ) -> Request:
        """Encode and check; nothing is queued. Arguments and errors as `Engine.add_request`."""
        arrival_time_s = self._clock()
        params = SamplingParams() if params is None else params
        if priority is not None:
            if isinstance(params, BeamSearchParams):
                raise InvalidRequestError(
                    f"priority must be left out of a beam search; got {priority}", param="priority"
                )
            params = replace(params, priority=priority)
        text = prompt if isinstance(prompt, str) else prompt_text
        token_ids = self.encode(prompt, add_special_tokens=add_special_tokens)
        total = self.check(token_ids, params)
        with self._lock:
            self._num_groups += 1
            group = self._num_groups % int(NULL)
        known = {
            "max_total_tokens": total,
            "tokenizer": self._tokenizer,
            "eos_token_ids": self._eos_token_ids,
        }
        if isinstance(params, BeamSearchParams):
            known |= {"group": group, "vocab_size": self._vocab_size}
            request = make_search(request_id, text, token_ids, params, **known)
        else:
            seed = self._seed(params)
            request = Request(request_id, text, token_ids, params, seed=seed, **known)
            request.fan_out(group)
        salt = self._salts.number(params.cache_salt)
        for sample in request.samples:
            sample.arrival_time_s, sample.salt = arrival_time_s, salt
        return request

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue prepared requests, all of them or, when one is refused, none. Each only once.

        Raises:
          InvalidRequestError: an id is in use by a request that has not ended.
          QueueFullError: too many requests wait.
        """
        with self._lock:
            new: dict[str, Request] = {}
            for request in requests:
                if request.request_id in self._requests or request.request_id in new:
                    raise InvalidRequestError(
                        f"request_id {request.request_id!r} is already in use by a request that "
                        "has not ended",
                        param="request_id",
                    )
                new[request.request_id] = request
            samples = [sample for request in requests for sample in request.samples]
            self._check_room(len(samples))
            self._requests |= new
            self._queue += samples

    def check_room(self, count: int, *, reserved: int = 0) -> None:
        """Raise `QueueFullError` unless `submit` would take so many outputs to generate now, beside
        some that are to come before them."""
        with self._lock:
            self._check_room(count, reserved)

    def num_free_places(self) -> int:
        """Outputs to generate (of one request or several) that `submit` would take now."""
        with self._lock:
            return self._room()

    def num_queued(self) -> int:
        """Requests before the table."""
        return len(self._queue)

    def queued(self) -> list[Request]:
        """The requests that wait outside the table, oldest first."""
        with self._lock:
            return list(self._queue)

    def num_refused(self) -> int:
        """Requests that found the queue full."""
        return self._num_refused

    def is_in_use(self, request_id: str) -> bool:
        """Whether a request that has not ended has this id."""
        return request_id in self._requests

    def abort(self, request: Request | str) -> None:
        """Note a request that is to end; see `Engine.abort`."""
        # No lock, see above; dictionaries and deques bear it.
        if isinstance(request, str):
            request = self._requests.get(request)
        if request is not None and self._is_live(request):
            self._aborts.append(request)

    def encode(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; `InvalidRequestError` for what is neither text nor token ids, and
        at once, before it has taken time, for what is far too long."""
        limits = self._sizes.max_model_len, self._max_pool_tokens
        check_length(prompt, *limits, longest_token_bytes=self._longest_token)
        if isinstance(prompt, str):
            try:
                return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            except ValueError as error:
                raise InvalidRequestError(str(error), param="prompt") from error
        token_ids = list(prompt)
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                raise InvalidRequestError(
                    f"prompt must be text or integer token ids, got {token_id!r}", param="prompt"
                )
        return [int(token_id) for token_id in token_ids]

    def check(self, token_ids: Sequence[int], params: SamplingParams | BeamSearchParams) -> int:
        """Refuse a request that can never be served; -> prompt and output tokens at most."""
        limits = {
            "eos_token_ids": self._eos_token_ids,
            "vocab_size": self._vocab_size,
            "max_model_len": self._sizes.max_model_len,
            "max_pool_tokens": self._max_pool_tokens,
            "max_logprobs": self._sizes.max_logprobs,
            "max_stop_token_ids": self._sizes.max_stop_token_ids,
            "num_rows": self._sizes.num_rows,
        }
        if isinstance(params, BeamSearchParams):
            return check_search(token_ids, params, sizes=self._sizes, **limits)
        check_priority(params, self._sizes)
        return check_request(token_ids, params, **limits)

    # -- the engine's thread ---------------------------------------------------------------------

    def take(self, rows: RowBook) -> tuple[list[Request], list[tuple[int, Request]]]:
        """What happens before the next step: queued requests go into free rows of the book.

        Returns:
          (samples that were aborted, (row, sample) of those that were placed).
        """
        ended = []
        with self._lock:
            while self._aborts:
                request = self._aborts.popleft()
                if self._is_live(request):
                    del self._requests[request.request_id]
                    ended += [s for s in request.samples if s.finish_reason is None]
            if ended:
                gone = set(map(id, ended))
                self._queue = deque(r for r in self._queue if id(r) not in gone)
            placed = self._place(rows)
        return ended, placed

    def _place(self, book: RowBook) -> list[tuple[int, Request]]:
        """Take rows for the queue's first requests. The beams of a search get theirs together."""
        rows, placed = book.free_rows(len(self._queue)), []
        while self._queue and rows:
            search = self._queue[0].search
            width = 1 if search is None else len(self._queue[0].samples)
            if width > len(rows):
                break
            mine, rows = rows[:width], rows[width:]
            if search is not None:
                search.place(mine)
            placed += [(row, self._queue.popleft()) for row in mine]
        for row, request in placed:
            book.take(row, request)
        return placed

    def forget(self, request: Request) -> None:
        """The request has ended; its id is free."""
        with self._lock:
            self._requests.pop(request.request_id, None)

    def saved(self) -> tuple[list[Request], list[Request], dict[str, Any]]:
        """(requests that have not ended, samples in the queue, numbers), for a snapshot; both in
        the order of their arrival."""
        with self._lock:
            numbers = {
                "num_seeds_drawn": self._num_seeds_drawn,
                "num_groups": self._num_groups,
                "salts": self._salts.saved(),
            }
            return list(self._requests.values()), list(self._queue), numbers

    def restore(
        self, requests: Sequence[Request], queue: Sequence[Request], numbers: Mapping[str, Any]
    ) -> None:
        """Become what was saved."""
        with self._lock:
            self._queue = deque(queue)
            self._requests = {r.request_id: r for r in requests}
            self._num_seeds_drawn = numbers["num_seeds_drawn"]
            self._num_groups = numbers["num_groups"]
        self._salts.restore(**numbers["salts"])

    @property
    def _max_pool_tokens(self) -> int:
        # The last token of a sequence is never computed and needs no slot.
        return self._sizes.num_blocks * self._sizes.block_size + 1

    def _is_live(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _check_room(self, count: int, reserved: int = 0) -> None:
        if self._room() - reserved < count:
            self._num_refused += count
            raise QueueFullError(
                f"{len(self._queue)} requests are waiting; max_queue_size is "
                f"{self._config.max_queue_size}. Try again later."
            )

    def _room(self) -> int:
        waiting = len(self._queue) - self._num_free_rows()
        return self._config.max_queue_size - waiting

    def _seed(self, params: SamplingParams) -> int:
        """The request's own seed, or one drawn from the engine's and a counter (splitmix64)."""
        if params.seed is not None:
            return params.seed_bits
        with self._lock:
            self._num_seeds_drawn += 1
            number = self._num_seeds_drawn
        mask = (1 << 64) - 1
        x = ((self._config.seed << 32) + number) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return (x ^ (x >> 31)) & 0xFFFFFFFF
