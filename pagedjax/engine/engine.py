"""The engine: the one mutable object. It feeds the pure step and reads what comes of it."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.beam_search import BeamSearchParams
from pagedjax.config import EngineConfig
from pagedjax.core.execute import StepConfig
from pagedjax.core.state import StepOutput
from pagedjax.engine.buckets import choose_bucket
from pagedjax.engine.device import Device, Progress
from pagedjax.engine.event_log import open_event_log
from pagedjax.engine.intake import Intake
from pagedjax.engine.reader import Reader
from pagedjax.engine.request import Request
from pagedjax.engine.rows import RequestState, RowBook
from pagedjax.engine.samples import Gatherer
from pagedjax.engine.snapshot import Snapshots
from pagedjax.engine.stats import EngineStats, StatsKeeper
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizers import Tokenizer


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
        self._unread: list[RequestOutput] = []
        self._rows = RowBook(sizes)
        self._gatherer = Gatherer()
        self._intake = Intake(
            config,
            sizes,
            tokenizer,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            num_free_rows=lambda: self._rows.num_free,
            clock=clock,
        )
        self._snapshots = Snapshots(self._device, sizes, tokenizer, self.eos_token_ids)
        if config.event_log is not None:
            self._device.record(open_event_log(config, self._device, self._snapshots.fingerprint))
        self._stats = StatsKeeper(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            num_host_blocks=sizes.num_host_blocks,
        )
        self._reader = Reader(self._intake, self._stats, tokenizer)

    # -- any thread ------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        add_special_tokens: bool = True,
        prompt_text: str | None = None,
        priority: int | None = None,
    ) -> Request:
        """Queue a request; its outputs come from `step`.

        Args:
          request_id: free to be used again when the request has ended.
          prompt: text, or token ids.
          params: with `BeamSearchParams`, all comes in one output, at the end.
          add_special_tokens: whether encoding text adds what the checkpoint says belongs there.
          prompt_text: text to report for a prompt that is given as token ids.
          priority: in place of the one in `params`; lower is more urgent.

        Returns:
          What `abort` takes.

        Raises:
          InvalidRequestError: (a ValueError) it can never be served, and the message names the
            limit; or its id is that of a request that has not ended.
          QueueFullError: too many requests wait.
        """
        request = self._intake.prepare(
            request_id,
            prompt,
            params,
            add_special_tokens=add_special_tokens,
            prompt_text=prompt_text,
            priority=priority,
        )
        self._intake.submit([request])
        return request

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        **options: Any,
    ) -> Request:
        """The part of `add_request` that takes time: encode and check; nothing is queued."""
        return self._intake.prepare(request_id, prompt, params, **options)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue prepared requests, all of them or, when one is refused, none. Each only once.

        Raises what `add_request` does."""
        self._intake.submit(requests)

    def check_room(self, count: int, *, reserved: int = 0) -> None:
        """Raise `QueueFullError` unless `submit` would take so many outputs to generate now, beside
        some that are to come before them."""
        self._intake.check_room(count, reserved=reserved)

    def abort(self, request: Request | str) -> None:
        """End a request: one last output, with reason "abort". Unknown and ended ones are left
        alone. Takes no lock.

        Args:
          request: as `add_request` returned it; or an id, which means the request that has it now.
        """
        self._intake.abort(request)

    def encode(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; `InvalidRequestError` for what is neither text nor token ids, and
        at once, before it has taken time, for what is far too long."""
        return self._intake.encode(prompt, add_special_tokens=add_special_tokens)

    def check(self, token_ids: Sequence[int], params: SamplingParams | BeamSearchParams) -> int:
        """Refuse a request that can never be served; -> prompt and output tokens at most."""
        return self._intake.check(token_ids, params)

    def is_in_use(self, request_id: str) -> bool:
        """Whether a request that has not ended has this id."""
        return self._intake.is_in_use(request_id)

    def num_free_places(self) -> int:
        """Outputs to generate (of one request or several) that `add_request` would take now."""
        return self._intake.num_free_places()

    def has_work(self) -> bool:
        """Whether `step` has anything to do; False when idle with every block given back."""
        # A request to abort is in the queue or in a row.
        waits = self._intake.num_queued() or self._in_flight or self._unread
        return bool(waits) or self._rows.num_taken > 0

    def stats(self) -> EngineStats:
        """A snapshot of load and totals."""
        return self._stats.snapshot(
            num_queued=self._intake.num_queued(), num_refused=self._intake.num_refused()
        )

    def request_states(self) -> dict[str, RequestState]:
        """What each request that has not ended is doing, by id, as of the last step that was read;
        of one for several outputs, what one of them is. To be called by the thread that calls
        `step`."""
        return self._rows.states() | {
            request.request_id: RequestState(
                status="queued", num_tokens=len(request.prompt_token_ids), num_computed_tokens=0
            )
            for request in self._intake.queued()
        }

    @property
    def device(self) -> Device:
        """The state and what advances it. For those who play logs: the engine must not be used."""
        return self._device

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What another engine must have in common with this one to go on from its state."""
        return self._snapshots.fingerprint

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
        aborted = self._take_unread() + self._feed()
        launched = self._launch()
        if len(self._in_flight) > (1 if launched else 0):
            return aborted + self._read()
        if not launched and self._rows.num_taken:
            self._give_back()
        return aborted

    def settle(self) -> list[RequestOutput]:
        """Wait for the steps in flight; -> what came out of them, as from `step`."""
        outputs = self._take_unread()
        while self._in_flight:
            outputs += self._read()
        return outputs + self._feed()

    def _take_unread(self) -> list[RequestOutput]:
        outputs, self._unread = self._unread, []
        return outputs

    def save(
        self, path: str | Path, *, extra: Mapping[str, Any] | None = None
    ) -> list[RequestOutput]:
        """Write everything that is going on to a file, from which `load` resumes it; this engine
        goes on, too. Waits for the steps in flight.

        Args:
          extra: what else to keep in the file, as JSON can say it; `resume` returns it.

        Returns:
          What came out of the steps in flight, as from `step`.

        Raises:
          OSError: it could not be written; a file that was there is unharmed. What came out of the
            steps comes from the next `step` then.
        """
        self._unread = self.settle()
        requests, queue, numbers = self._intake.saved()
        self._snapshots.save(
            Path(path),
            rows=self._rows,
            requests=requests,
            queue=queue,
            held=self._gatherer.held,
            numbers=numbers,
            now=self._clock(),
            extra=extra or {},
        )
        return self._take_unread()

    def load(self, path: str | Path) -> list[Request]:
        """`resume`, without what else the file holds."""
        return self.resume(path)[0]

    def resume(self, path: str | Path) -> tuple[list[Request], dict[str, Any]]:
        """Resume what `save` has written, in an engine that is idle: the same model, tokenizer and
        sizes. Its prefix cache is replaced.

        Returns:
          The requests that go on, in the order of their arrival; their outputs come from `step`.
          And the `extra` that `save` was given.

        Raises:
          SnapshotError: (a ValueError) the file is no snapshot, is damaged, or was made by an
            engine that differs; the message says how. This engine is as it was.
          RuntimeError: the engine is not idle.
          OSError: the file could not be read.
        """
        if self.has_work():
            raise RuntimeError("resuming needs an idle engine: requests are running or waiting")
        loaded = self._snapshots.load(Path(path), now=self._clock())
        self._rows = loaded.rows
        self._intake.restore(loaded.requests, loaded.queue, loaded.numbers)
        self._gatherer.restore(loaded.held)
        return loaded.requests, loaded.extra

    def warm_up_snapshots(self) -> None:
        """Compile what `save` needs, so that the first one does not."""
        self._snapshots.warm_up()

    def _feed(self) -> list[RequestOutput]:
        """Hand aborts and queued requests to the device."""
        outputs = []
        ended, placed = self._intake.take(self._rows)
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
        concerned = self._rows.update(output, launched.step, launched.num_tokens)
        deltas = self._reader.read(self._rows, concerned, output, self._clock())
        self._stats.stepped(output, launched.num_tokens)
        return self._gatherer.gather(deltas)

    def _give_back(self) -> None:
        """Idle: release the rows of requests that have ended, without a step."""
        ended = self._device.read(self._device.end(np.zeros(self._sizes.num_rows, bool)))
        self._rows.settle(ended.status)
        self._stats.idle(ended)
