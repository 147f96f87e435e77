"""The state on the device and the few compiled functions that advance it."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.blocks import num_evictable
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.execute import StepConfig
from pagedjax.core.invariants import check_invariants
from pagedjax.core.pytree import pytree
from pagedjax.core.requests import RequestParams, abort, add_request
from pagedjax.core.schedule import retire
from pagedjax.core.state import NULL, EngineState, SchedulerState, StepOutput
from pagedjax.core.step import (
    init_state,
    read_blocks,
    read_host_blocks,
    step,
    write_blocks,
    write_host_blocks,
)
from pagedjax.eventlog.recorder import KVBlocks, Recorder

MAX_COMPILE_THREADS = 4
"""Of the default. Each holds one step's program in memory while it compiles."""

Progress = Callable[[Iterable[Any], int], Iterable[Any]]
"""Wraps an iterable of so many items, to show how far it is."""


@pytree
class Ended:
    """What the host learns when rows are ended outside a step."""

    status: jax.Array  #: [S] int32
    num_free_blocks: jax.Array  #: [] int32
    num_evictable_blocks: jax.Array  #: [] int32
    num_free_host_blocks: jax.Array  #: [] int32


def end_rows(
    state: SchedulerState, rows: jax.Array, *, config: SchedulerConfig
) -> tuple[SchedulerState, Ended]:
    """Abort rows and release what has ended, between two steps.

    Args:
      rows: [S] bool; rows that are not waiting or running are left alone.
    """
    state = retire(config, abort(state, rows))
    # A step would clear what the released rows' tables name; here none follows at once.
    blocks = state.blocks
    held = jnp.arange(config.max_blocks_per_seq) < blocks.num_blocks_held[:, None]
    tables = jnp.where(held, blocks.block_tables, NULL)
    state = dataclasses.replace(state, blocks=dataclasses.replace(blocks, block_tables=tables))
    return state, Ended(
        status=state.rows.status,
        num_free_blocks=state.blocks.num_free,
        num_evictable_blocks=num_evictable(state.blocks, state.prefix),
        num_free_host_blocks=state.swap.num_free,
    )


class Device:
    """Holds the only reference to the engine's state; every call replaces it (it is donated).

    Nothing here waits for the device except `read` and `check`.
    """

    def __init__(
        self, params: Any, config: StepConfig, *, kv_dtype: Any, buckets: Sequence[int]
    ) -> None:
        self._config = config
        self._kv_dtype = kv_dtype
        # Everything is committed to one device from the start: a state that is uncommitted in the
        # first step and committed in the second would be compiled for twice.
        self._device = next(iter(jax.tree.leaves(params)[0].devices()))
        self._params = jax.device_put(params, self._device)
        self._state = self._fresh_state()
        self._steps = {size: _step_function(config, size) for size in buckets}
        self._add, self._end, self._check = _scheduler_functions(config.scheduler)
        self._recorder: Recorder | None = None
        by = {"implementation": config.model.attention}
        self._gather = jax.jit(functools.partial(read_blocks, **by))
        self._scatter = jax.jit(functools.partial(write_blocks, **by), donate_argnums=0)
        self._gather_host = jax.jit(read_host_blocks)
        self._scatter_host = jax.jit(write_host_blocks, donate_argnums=0)

    def _fresh_state(self) -> EngineState:
        host_memory = jax.sharding.SingleDeviceSharding(
            self._device, memory_kind=None if self._device.platform == "cpu" else "pinned_host"
        )
        state = init_state(self._config, kv_dtype=self._kv_dtype, host_memory=host_memory)
        host_pools = state.host_k_pool, state.host_v_pool
        state = dataclasses.replace(state, host_k_pool=None, host_v_pool=None)
        state = jax.device_put(state, self._device)
        return dataclasses.replace(state, host_k_pool=host_pools[0], host_v_pool=host_pools[1])

    @property
    def name(self) -> str:
        """What it runs on, for people."""
        kind = self._device.device_kind
        return f"{kind} ({os.cpu_count()} cores)" if self._device.platform == "cpu" else kind

    @property
    def params(self) -> Any:
        """The model's weights."""
        return self._params

    @property
    def model(self) -> Any:
        """The model's functions."""
        return self._config.model

    @property
    def state(self) -> EngineState:
        """The state as it will be when everything launched has run. The next call consumes it."""
        return self._state

    def record(self, recorder: Recorder) -> None:
        """Tell this one of all that happens from now on."""
        self._recorder = recorder

    def warm_up(self, progress: Progress, *, threads: int | None = None) -> None:
        """Compile everything, run it once, then start again from an idle state.

        Args:
          threads: sizes to compile at the same time; None: one for each core, few at most.
        """
        sizes = sorted(self._steps, reverse=True)
        if threads is None:
            threads = min(os.cpu_count() or 1, MAX_COMPILE_THREADS)
        pool = ThreadPoolExecutor(min(threads, len(sizes)))
        try:
            futures = [pool.submit(self._compile, size) for size in sizes]
            for future in progress(as_completed(futures), len(futures)):
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        recorder, self._recorder = self._recorder, None
        self.add(0, [0], _a_request(self._config.scheduler))
        self.read(self.end(np.ones(self._config.scheduler.num_rows, bool)))
        for size in sizes:
            self.read(self.launch(size))
        self._recorder = recorder
        if recorder is not None:
            recorder.warm_up(self._state)
        self._state = None  # two pools at once may not fit
        self._state = self._fresh_state()

    def _compile(self, size: int) -> None:
        """Compile a step ahead of its first call, which then finds it in the jit's cache."""
        self._steps[size].lower(self._params, self._state).compile()

    def num_compiled(self) -> int:
        """Compiled programs so far; constant after `warm_up`."""
        functions = [*self._steps.values(), self._add, self._end]
        recording = 0 if self._recorder is None else self._recorder.num_compiled()
        return sum(function._cache_size() for function in functions) + recording

    def add(self, row: int, token_ids: Sequence[int], request: RequestParams) -> None:
        """Put a request into an EMPTY row."""
        if self._recorder is not None:
            self._recorder.add(row, token_ids, request)
        # A new array each time: the device may read it in place, later.
        padded = np.zeros(self._config.scheduler.max_padded_len, np.int32)
        padded[: len(token_ids)] = token_ids
        scheduler = self._add(
            self._state.scheduler, np.int32(row), padded, np.int32(len(token_ids)), request
        )
        self._state = dataclasses.replace(self._state, scheduler=scheduler)

    def end(self, rows: np.ndarray) -> Ended:
        """Abort rows [S] bool, release what has ended."""
        if self._recorder is not None:
            self._recorder.end(rows)
        scheduler, ended = self._end(self._state.scheduler, rows)
        self._state = dataclasses.replace(self._state, scheduler=scheduler)
        return ended

    def launch(self, num_tokens: int) -> StepOutput:
        """Start a step of this bucket; the output is a promise."""
        self._state, output = self._steps[num_tokens](self._params, self._state)
        if self._recorder is not None:
            self._recorder.launch(num_tokens, self._state)
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()
        return output

    def read(self, output: Any) -> Any:
        """Wait for what `launch` or `end` returned; numpy arrays. Steps in their order."""
        output = jax.device_get(output)
        if self._recorder is not None and isinstance(output, StepOutput):
            self._recorder.result(output)
        return output

    def gather(self, blocks: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Keys and values of some blocks of the pool."""
        return self._gather(self._state, blocks)

    def gather_host(self, blocks: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """The same of the host pool; NULL comes last among the ids."""
        return self._gather_host(_host_pools(self._state), blocks)

    def restore(
        self, scheduler: SchedulerState, blocks: KVBlocks, host_blocks: KVBlocks = ()
    ) -> None:
        """Replace the state: a scheduler's, and (ids, keys, values) of blocks of the pool and of
        the host pool."""
        if self._recorder is not None:
            blocks, host_blocks = list(blocks), list(host_blocks)
            self._recorder.restored(scheduler, blocks, host_blocks)
        self._state = None  # two pools at once may not fit
        state = self._fresh_state()
        for ids, keys, values in blocks:
            state = self._scatter(state, ids, keys, values)
        for ids, keys, values in host_blocks:
            pools = self._scatter_host(_host_pools(state), ids, keys, values)
            state = dataclasses.replace(state, host_k_pool=pools[0], host_v_pool=pools[1])
        scheduler = jax.device_put(scheduler, self._device)
        self._state = dataclasses.replace(state, scheduler=scheduler)

    def check(self, scheduler: SchedulerState | None = None) -> None:
        """Raise `AssertionError` naming the invariants that the state (or another scheduler's)
        breaks. Waits; slow."""
        scheduler = self._state.scheduler if scheduler is None else scheduler
        counts = dataclasses.asdict(jax.device_get(self._check(scheduler)))
        broken = {name: int(count) for name, count in counts.items() if count}
        if broken:
            raise AssertionError(f"the engine's state is corrupt: {broken}")


def _host_pools(state: EngineState) -> tuple[jax.Array, jax.Array]:
    return state.host_k_pool, state.host_v_pool


def _a_request(sizes: SchedulerConfig) -> RequestParams:
    return RequestParams(
        max_total_tokens=np.int32(2),
        min_output_tokens=np.int32(0),
        stop_token_ids=np.full(sizes.max_stop_token_ids, NULL, np.int32),
        temperature=np.float32(0),
        top_k=np.int32(0),
        top_p=np.float32(1),
        min_p=np.float32(0),
        seed=np.uint32(0),
        num_logprobs=np.int32(-1),
        salt=np.uint32(0),
        priority=np.int32(0),
        group=NULL,
        beam_leader=NULL,
        beam_index=np.int32(0),
    )


# Engines of equal configuration share their compiled programs.


@functools.lru_cache(maxsize=256)
def _step_function(config: StepConfig, num_tokens: int) -> Any:
    return _jit(step, donate=1, config=config, num_tokens=num_tokens)


@functools.lru_cache(maxsize=64)
def _scheduler_functions(config: SchedulerConfig) -> tuple[Any, Any, Any]:
    add = _jit(add_request, donate=0, config=config)
    end = _jit(end_rows, donate=0, config=config)
    return add, end, jax.jit(functools.partial(check_invariants, config=config))


def _jit(function: Callable, *, donate: int, **static: Any) -> Any:
    @functools.wraps(function)
    def call(*args):
        return function(*args, **static)

    return jax.jit(call, donate_argnums=donate)
