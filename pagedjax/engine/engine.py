"""The engine: the one mutable object. It feeds the pure step and reads what comes of it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.beam_search import BeamSearchParams
from pagedjax.config import EngineConfig
from pagedjax.core.execute import StepConfig
from pagedjax.core.state import NULL, ErrorCode, FinishReason, Status, StepOutput
from pagedjax.engine import snapshot
from pagedjax.engine.beams import Beam, check_search, make_search
from pagedjax.engine.buckets import choose_bucket
from pagedjax.engine.device import Device, Progress
from pagedjax.engine.errors import InvalidRequestError, QueueFullError
from pagedjax.engine.request import Request, check_length, check_request
from pagedjax.engine.rows import RowBook
from pagedjax.engine.samples import Gatherer
from pagedjax.engine.stats import EngineStats, StatsKeeper
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizers import Tokenizer

ERRORS = {
    ErrorCode.IMPOSSIBLE: "the request can never fit the KV pool or the request table",
    ErrorCode.NAN_LOGITS: "the model gave NaN or infinite logits for this request",
}


@dataclass(frozen=True)
class _Launched:
    """A step that runs on the device."""

    step: int
    num_tokens: int
    output: StepOutput


class Engine:
    """Continuous batching over a pure step.

    `add_request` and `abort` may be called from any thread. `step` belongs to one thread; it
    launches the next step before it reads the last one, so the device never waits for the host.

    Args:
      params: the model's pytree, on the device to use.
      step_config: static sizes and the model's functions.
      tokenizer: see `pagedjax.tokenizers`.
      config: with `token_buckets` decided (`pagedjax.memory.fill_sizes`).
      kv_dtype: of the KV pool.
      model_name: how the model is called towards users.
      eos_token_ids: tokens that end a request unless it ignores them.
      clock: seconds, for statistics only.
    """

    def __init__(
        self,
        params: Any,
        step_config: StepConfig,
        tokenizer: Tokenizer,
        *,
        config: EngineConfig,
        kv_dtype: Any,
        model_name: str = "model",
        eos_token_ids: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.eos_token_ids = tuple(
            tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids
        )
        sizes = step_config.scheduler
        self.vocab_size = step_config.model.vocab_size
        self.max_model_len = sizes.max_model_len
        self.num_blocks = sizes.num_blocks
        self.block_size = sizes.block_size
        self._sizes = sizes
        self._buckets = tuple(config.buckets)
        self._device = Device(params, step_config, kv_dtype=kv_dtype, buckets=self._buckets)
        self._clock = clock
        self._check_each_step = config.check_invariants
        self._in_flight: deque[_Launched] = deque()
        self._rows = RowBook(sizes)
        # Guards the queue and the requests, and nothing that takes long. `abort` must do without:
        # the collector may run a stream's finalizer, which aborts, in any thread at any time.
        self._lock = threading.Lock()
        self._queue: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._aborts: deque[Request] = deque()
        self._num_seeds_drawn = 0
        self._num_groups = 0
        self._gatherer = Gatherer()
        self._own_fingerprint: dict[str, Any] | None = None
        longest = max(map(len, tokenizer.vocabulary.token_bytes), default=1)
        self._longest_token = max(longest, 1)
        self._stats = StatsKeeper(num_blocks=sizes.num_blocks, block_size=sizes.block_size)

    # -- any thread ------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        add_special_tokens: bool = True,
        prompt_text: str | None = None,
    ) -> Request:
        """Queue a request; its outputs come from `step`.

        Args:
          request_id: free to be used again when the request has ended.
          prompt: text, or token ids.
          params: with `BeamSearchParams`, all comes in one output, at the end.
          add_special_tokens: whether encoding text adds what the checkpoint says belongs there.
          prompt_text: text to report for a prompt that is given as token ids.

        Returns:
          What `abort` takes.

        Raises:
          InvalidRequestError: (a ValueError) it can never be served, and the message names the
            limit; or its id is that of a request that has not ended.
          QueueFullError: too many requests wait.
        """
        request = self.prepare(
            request_id,
            prompt,
            params,
            add_special_tokens=add_special_tokens,
            prompt_text=prompt_text,
        )
        self.submit([request])
        return request

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        add_special_tokens: bool = True,
        prompt_text: str | None = None,
    ) -> Request:
        """The part of `add_request` that takes time: encode and check; nothing is queued."""
        arrival_time_s = self._clock()
        params = SamplingParams() if params is None else params
        text = prompt if isinstance(prompt, str) else prompt_text
        token_ids = self.encode(prompt, add_special_tokens=add_special_tokens)
        total = self.check(token_ids, params)
        with self._lock:
            self._num_groups += 1
            group = self._num_groups % NULL
        known = {
            "max_total_tokens": total,
            "tokenizer": self.tokenizer,
            "eos_token_ids": self.eos_token_ids,
        }
        if isinstance(params, BeamSearchParams):
            known |= {"group": group, "vocab_size": self.vocab_size}
            request = make_search(request_id, text, token_ids, params, **known)
        else:
            seed = self._seed(params)
            request = Request(request_id, text, token_ids, params, seed=seed, **known)
            request.fan_out(group)
        for sample in request.samples:
            sample.arrival_time_s = arrival_time_s
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

    def abort(self, request: Request | str) -> None:
        """End a request: one last output, with reason "abort". Unknown and ended ones are left
        alone.

        Args:
          request: as `add_request` returned it; or an id, which means the request that has it now.
        """
        # No lock, see above; dictionaries and deques bear it.
        if isinstance(request, str):
            request = self._requests.get(request)
        if request is not None and self._is_live(request):
            self._aborts.append(request)

    def encode(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; `InvalidRequestError` for what is neither text nor token ids, and
        at once, before it has taken time, for what is far too long."""
        limits = self.max_model_len, self._max_pool_tokens
        check_length(prompt, *limits, longest_token_bytes=self._longest_token)
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
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
            "eos_token_ids": self.eos_token_ids,
            "vocab_size": self.vocab_size,
            "max_model_len": self.max_model_len,
            "max_pool_tokens": self._max_pool_tokens,
            "max_logprobs": self._sizes.max_logprobs,
            "max_stop_token_ids": self._sizes.max_stop_token_ids,
            "num_rows": self._sizes.num_rows,
        }
        if isinstance(params, BeamSearchParams):
            return check_search(token_ids, params, sizes=self._sizes, **limits)
        return check_request(token_ids, params, **limits)

    @property
    def _max_pool_tokens(self) -> int:
        # The last token of a sequence is never computed and needs no slot.
        return self.num_blocks * self.block_size + 1

    def _check_room(self, count: int, reserved: int = 0) -> None:
        if self._room() - reserved < count:
            self._stats.refused += count
            raise QueueFullError(
                f"{len(self._queue)} requests are waiting; max_queue_size is "
                f"{self.config.max_queue_size}. Try again later."
            )

    def _is_live(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def num_free_places(self) -> int:
        """Outputs to generate (of one request or several) that `add_request` would take now."""
        with self._lock:
            return self._room()

    def has_work(self) -> bool:
        """Whether `step` has anything to do; False when idle with every block given back."""
        # A request to abort is in the queue or in a row.
        return bool(self._queue or self._in_flight) or self._rows.num_taken > 0

    def stats(self) -> EngineStats:
        """A snapshot of load and totals."""
        with self._lock:
            return self._stats.snapshot(num_queued=len(self._queue))

    @property
    def device_name(self) -> str:
        """The device it runs on, in words."""
        return self._device.name

    def num_compiled(self) -> int:
        """Compiled programs; constant after `warm_up`."""
        return self._device.num_compiled()

    # -- the engine's thread ---------------------------------------------------------------------

    def warm_up(self, progress: Progress = lambda items, _count: items) -> None:
        """Compile every bucket; afterwards nothing is compiled again. Call it before requests."""
        if self.has_work():
            raise RuntimeError("warm_up must come before the first request")
        self._device.warm_up(progress, threads=self.config.compile_threads)

    def step(self) -> list[RequestOutput]:
        """Launch the next step, read the one before; -> what is new, one delta per request.

        Does not wait when there is nothing to read yet. Raises whatever the device raises: the
        engine is unusable then.
        """
        aborted = self._feed()
        launched = self._launch()
        if len(self._in_flight) > (1 if launched else 0):
            return aborted + self._read()
        if not launched and self._rows.num_taken:
            self._give_back()
        return aborted

    def save(self, path: str | Path) -> list[RequestOutput]:
        """Write everything that is going on to a file, from which `load` resumes it; this engine
        goes on, too. Waits for the steps in flight.

        Returns:
          What came out of them, as from `step`.

        Raises:
          OSError: it could not be written; a file that was there is unharmed.
          RuntimeError: a request for several outputs, or a beam search, is going on; those cannot
            be saved yet.
        """
        outputs = []
        while self._in_flight:
            outputs += self._read()
        outputs += self._feed()
        with self._lock:
            queue = list(self._queue)
            for request in self._requests.values():
                if request.search is not None or len(request.samples) > 1:
                    raise RuntimeError(
                        f"request {request.request_id!r} is for several outputs (n > 1) or a beam "
                        "search, which save cannot write yet"
                    )
        snapshot.save(
            Path(path),
            device=self._device,
            rows=self._rows,
            queue=queue,
            num_seeds_drawn=self._num_seeds_drawn,
            fingerprint=self._fingerprint(),
            now=self._clock(),
        )
        return outputs

    def load(self, path: str | Path) -> list[Request]:
        """Resume what `save` has written, in an engine that is idle: the same model, tokenizer and
        sizes. Its prefix cache is replaced.

        Returns:
          The requests that go on, in the order of their arrival; their outputs come from `step`.

        Raises:
          SnapshotError: (a ValueError) the file is no snapshot, is damaged, or was made by an
            engine that differs; the message says how. This engine is as it was.
          RuntimeError: the engine is not idle.
          OSError: the file could not be read.
        """
        if self.has_work():
            raise RuntimeError("load needs an idle engine: requests are running or waiting")
        loaded = snapshot.load(
            Path(path),
            device=self._device,
            sizes=self._sizes,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            fingerprint=self._fingerprint(),
            now=self._clock(),
        )
        requests = loaded.placed + loaded.queued
        with self._lock:
            self._rows = loaded.rows
            self._queue = deque(loaded.queued)
            self._requests = {request.request_id: request for request in requests}
            self._num_seeds_drawn = loaded.num_seeds_drawn
        return requests

    def _fingerprint(self) -> dict[str, Any]:
        if self._own_fingerprint is None:
            self._own_fingerprint = snapshot.fingerprint(
                self._device.params,
                self._sizes,
                self._device.model,
                self.tokenizer,
                self._device.state.k_pool.dtype,
            )
        return self._own_fingerprint

    def _feed(self) -> list[RequestOutput]:
        """Hand aborts and queued requests to the device."""
        outputs, ended = [], []
        with self._lock:
            while self._aborts:
                request = self._aborts.popleft()
                if self._is_live(request):
                    del self._requests[request.request_id]
                    ended += [s for s in request.samples if s.finish_reason is None]
            if ended:
                gone = set(map(id, ended))
                self._queue = deque(r for r in self._queue if id(r) not in gone)
            placed = self._place()
        for request in ended:
            self._rows.let_go(request)
            try:
                delta = request.end("abort")
            except Exception as error:  # held text that does not decode harms nobody else
                delta = request.fail(f"{type(error).__name__}: {error}")
            outputs.append((request, delta))
            self._stats.finished(request.finish_reason, request, self._clock())
        mask = self._rows.take_rows_to_end()
        if mask is not None:
            self._device.end(mask)
        for row, request in placed:
            self._device.add(
                row,
                request.prompt_token_ids,
                request.device_params(self._sizes.max_stop_token_ids),
            )
        return self._gatherer.gather(outputs)

    def _place(self) -> list[tuple[int, Request]]:
        """Take rows for the queue's first requests. The beams of a search get theirs together."""
        rows, placed = self._rows.free_rows(len(self._queue)), []
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
            self._rows.take(row, request)
        return placed

    def _launch(self) -> bool:
        """Start the next step if, as far as the host can tell, it has something to compute."""
        work = self._rows.forecast([launched.num_tokens for launched in self._in_flight])
        if work is None:
            return False
        size = choose_bucket(*work, self._buckets)
        output = self._device.launch(size)
        self._in_flight.append(_Launched(self._rows.launched(), size, output))
        if self._check_each_step:
            self._device.check()
        return True

    def _read(self) -> list[RequestOutput]:
        launched = self._in_flight.popleft()
        output = self._device.read(launched.output)
        now = self._clock()
        deltas = []
        for row, request in self._rows.update(output, launched.step, launched.num_tokens):
            if request.search is None:
                delta = self._advance(request, row, output, now)
            else:
                delta = self._advance_search(request, output, now)
            if delta is not None:
                deltas.append((request, delta))
        self._stats.stepped(output, launched.num_tokens)
        return self._gatherer.gather(deltas)

    def _advance(self, request: Request, row: int, output, now: float) -> RequestOutput | None:
        """What one row's part of an output means for its request (one sample of it)."""
        if request.num_cached_tokens is None and output.status[row] != Status.WAITING:
            request.num_cached_tokens = int(output.num_hit_tokens[row])
        finished = output.status[row] == Status.FINISHED
        reason = output.finish_reason[row]
        try:
            if finished and reason == FinishReason.ERROR:
                code = int(output.error[row])
                delta = request.end("error", ERRORS.get(code, f"error {code}"))
            elif output.token_ids[row] >= 0:
                delta = self._push(request, row, output, finished)
                self._stats.token(request, now)
            else:
                return None
        except Exception as error:  # the host's part of one request must not harm the others
            delta = request.fail(f"{type(error).__name__}: {error}")
        if request.finish_reason is not None:
            self._rows.let_go(request, ended_on_device=bool(finished))
            if request.finished:
                with self._lock:
                    self._requests.pop(request.request_id, None)
            self._stats.finished(request.finish_reason, request, now)
        return delta

    def _advance_search(self, leader: Beam, output, now: float) -> RequestOutput | None:
        """What an output means for a beam search; asked for each of its rows, told for the first.

        The rows end together, so whatever ends one of them ends the search."""
        if leader.index > 0:
            return None
        search, row = leader.search, leader.search.rows[0]
        if leader.num_cached_tokens is None and output.status[row] != Status.WAITING:
            leader.num_cached_tokens = int(output.num_hit_tokens[row])
        finished = output.status[row] == Status.FINISHED
        delta = None
        try:
            if finished and output.finish_reason[row] == FinishReason.ERROR:
                code = int(output.error[row])
                delta = search.end("error", ERRORS.get(code, f"error {code}"))
            else:
                for place in search.advance(output):
                    self._stats.token(leader.samples[place], now)
                delta = search.result(self.tokenizer) if finished else None
        except Exception as error:  # the host's part of one request must not harm the others
            delta = search.end("error", f"{type(error).__name__}: {error}")
        if delta is not None:
            for beam in leader.samples:
                self._rows.let_go(beam, ended_on_device=bool(finished))
            with self._lock:
                self._requests.pop(leader.request_id, None)
            for completion in delta.outputs:
                self._stats.finished(completion.finish_reason, leader, now)
        return delta

    def _push(self, request: Request, row: int, output, finished: bool) -> RequestOutput:
        rank = output.rank[row]
        wants_top = bool(request.params.logprobs)
        return request.push(
            int(output.token_ids[row]),
            stopped=bool(finished and output.finish_reason[row] == FinishReason.STOP),
            last=bool(finished),
            logprob=float(output.logprob[row]),
            top_token_ids=output.top_token_ids[rank] if wants_top else _NO_IDS,
            top_logprobs=output.top_logprobs[rank] if wants_top else _NO_LOGPROBS,
        )

    def _give_back(self) -> None:
        """Idle: release the rows of requests that have ended, without a step."""
        ended = self._device.read(self._device.end(np.zeros(self._sizes.num_rows, bool)))
        self._rows.settle(ended.status)
        self._stats.idle(ended)

    def _room(self) -> int:
        waiting = len(self._queue) - self._rows.num_free
        return self.config.max_queue_size - waiting

    def _seed(self, params: SamplingParams) -> int:
        """The request's own seed, or one drawn from the engine's and a counter (splitmix64)."""
        if params.seed is not None:
            return params.seed_bits
        with self._lock:
            self._num_seeds_drawn += 1
            number = self._num_seeds_drawn
        mask = (1 << 64) - 1
        x = ((self.config.seed << 32) + number) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return (x ^ (x >> 31)) & 0xFFFFFFFF


_NO_IDS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)
