"""Two implementations, step by step from the same state; or each on its own way."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.commit import commit
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.execute import StepConfig, execute, sampling_inputs
from pagedjax.core.requests import add_request
from pagedjax.core.schedule import schedule
from pagedjax.core.state import NO_TOKEN, NULL, EngineState, Plan, Status, StepOutput
from pagedjax.core.step import init_state
from pagedjax.engine.buckets import choose_bucket
from pagedjax.models.forward import forward_recorded
from pagedjax.models.llama import LlamaModel
from pallas_kernels.pool import to_float32
from trace_compare.metrics import (
    Difference,
    TokenDifference,
    attention_work,
    difference,
    token_differences,
)
from trace_compare.workload import Request, request_params


class Recorder:
    """A model for ``execute`` that keeps the traced values which a step does not return.

    One for each trace: it is read before the jitted function that made it returns.
    """

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self.attention = model.attention
        self.attended: Any = None  # [L, T, H, D]
        self.logits: Any = None  # [R, V]

    def forward(self, params, k_pool, v_pool, batch, output_indices):
        """The model's, recorded."""
        k_pool, v_pool, hidden, self.attended = forward_recorded(
            params,
            k_pool,
            v_pool,
            batch,
            config=self.model.config,
            attention=self.attention,
            output_indices=output_indices,
        )
        return k_pool, v_pool, hidden

    def compute_logits(self, params, hidden):
        """The model's, recorded."""
        self.logits = self.model.compute_logits(params, hidden)
        return self.logits


def execute_recorded(params, k_pool, v_pool, plan: Plan, inputs, *, config: StepConfig):
    """``execute``, and what it computed on the way.

    Returns (k_pool, v_pool, sampled, attended [L, T, H, D], logits [R, V]).
    """
    recorder = Recorder(config.model)
    k_pool, v_pool, sampled = execute(
        params, k_pool, v_pool, plan, inputs, config=config.scheduler, model=recorder
    )
    return k_pool, v_pool, sampled, recorder.attended, recorder.logits


def jit_execute(config: StepConfig) -> Callable:
    """``execute_recorded``, to be compiled once for each bucket."""
    return jax.jit(functools.partial(execute_recorded, config=config))


def pool_difference(first: tuple, second: tuple) -> tuple[jax.Array, jax.Array]:
    """(largest absolute difference, largest absolute value of the first) of (k_pool, v_pool)."""
    pairs = [(to_float32(a), to_float32(b)) for a, b in zip(first, second, strict=True)]
    apart = jnp.stack([jnp.abs(a - b).max() for a, b in pairs]).max()
    return apart, jnp.stack([jnp.abs(a).max() for a, _ in pairs]).max()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step was, and how far the two implementations were apart in it.

    Attributes:
      step: from 0. bucket: T. num_rows: scheduled rows.
      decode_tokens, prefill_tokens: of rows with one query that sample, and of all others.
      num_copies: blocks copied. num_preemptions, num_hit_tokens: in this step.
      attention: of each layer's output over the step's tokens.
      logits: of the scheduled rows. pool: of keys and values in the whole pool.
      padding: largest absolute attention output of a padding token in either; must be 0.
      num_samples: rows that got a token. tokens: those that got two.
      work: ``metrics.attention_work``.
    """

    step: int
    bucket: int
    num_rows: int
    decode_tokens: int
    prefill_tokens: int
    num_copies: int
    num_preemptions: int
    num_hit_tokens: int
    attention: list[Difference]
    logits: Difference
    pool: Difference
    padding: float
    num_samples: int
    tokens: list[TokenDifference]
    work: dict[str, int]


class Core:
    """The jitted functions around a state; ``params`` and ``config`` fixed."""

    def __init__(self, params: Any, configs: dict[str, StepConfig], *, buckets: tuple[int, ...]):
        self.params, self.configs, self.buckets = params, configs, buckets
        self.sizes: SchedulerConfig = next(iter(configs.values())).scheduler
        self._schedule = jax.jit(
            functools.partial(_schedule_step, config=self.sizes), static_argnames="num_tokens"
        )
        self._commit = jax.jit(functools.partial(commit, config=self.sizes))
        self._add = jax.jit(functools.partial(add_request, config=self.sizes))
        self._execute = {name: jit_execute(config) for name, config in configs.items()}
        self._pool_difference = jax.jit(pool_difference)

    def start(self, kv_dtype: Any) -> EngineState:
        """An idle state."""
        state = init_state(next(iter(self.configs.values())), kv_dtype=kv_dtype)
        return jax.device_put(state, jax.devices()[0])

    def add(self, state: EngineState, row: int, request: Request) -> EngineState:
        """The state with a request in a row."""
        padded = np.zeros(self.sizes.max_padded_len, np.int32)
        padded[: len(request.token_ids)] = request.token_ids
        count = np.int32(len(request.token_ids))
        scheduler = self._add(
            state.scheduler, np.int32(row), padded, count, request_params(request)
        )
        return dataclasses.replace(state, scheduler=scheduler)

    def bucket(self, state: EngineState) -> int:
        """The step size that the engine would choose."""
        rows = jax.device_get(
            {
                "status": state.scheduler.rows.status,
                "behind": state.scheduler.rows.num_tokens
                - state.scheduler.rows.num_computed_tokens,
            }
        )
        live = (rows["status"] == Status.RUNNING) | (rows["status"] == Status.WAITING)
        behind = np.where(live, rows["behind"], 0)
        decode = (rows["status"] == Status.RUNNING) & (behind == 1)
        return choose_bucket(
            int(decode.sum()), int(behind.sum() - decode.sum()), tuple(self.buckets)
        )

    def plan(self, state: EngineState, bucket: int):
        """(scheduler, plan, sampling inputs) of one step."""
        return self._schedule(state.scheduler, num_tokens=bucket)

    def execute(self, name: str, state: EngineState, plan: Plan, inputs):
        """``execute_recorded`` with an implementation; the state is kept."""
        return self._execute[name](self.params, state.k_pool, state.v_pool, plan, inputs)

    def commit(self, scheduler, plan: Plan, executed) -> tuple[EngineState, StepOutput]:
        """The state after the step."""
        k_pool, v_pool, sampled, *_ = executed
        scheduler, output = self._commit(scheduler, plan, sampled)
        return EngineState(scheduler=scheduler, k_pool=k_pool, v_pool=v_pool), output

    def pool_difference(self, first, second) -> Difference:
        """Of what two executions left in the pool."""
        apart, scale = self._pool_difference(first[:2], second[:2])
        apart = float(apart)
        return Difference(max_abs=apart if np.isfinite(apart) else float("inf"), scale=float(scale))


def _schedule_step(scheduler, *, config: SchedulerConfig, num_tokens: int):
    scheduler, plan = schedule(scheduler, config=config, num_tokens=num_tokens)
    return scheduler, plan, sampling_inputs(scheduler, plan)


def lockstep(
    core: Core, requests: list[Request], *, kv_dtype: Any, max_steps: int
) -> Iterator[tuple[StepRecord, EngineState]]:
    """Both implementations from each state, which then goes on with the first one's results.

    Yields the record and the state *before* the step. Ends when every request has ended, or after
    ``max_steps``. ``core.configs`` names the two, the first being the reference.
    """
    first, second = core.configs
    state = core.start(kv_dtype)
    counters = jax.device_get(state.scheduler.counters)
    for step in range(max_steps):
        for row, request in enumerate(requests):
            if request.arrival == step:
                state = core.add(state, row, request)
        before, bucket = state, core.bucket(state)
        scheduler, plan, inputs = core.plan(state, bucket)
        executed = {name: core.execute(name, state, plan, inputs) for name in core.configs}
        state, output = core.commit(scheduler, plan, executed[first])
        host_plan, host_inputs = jax.device_get((plan, inputs))
        after = jax.device_get(output.counters)
        record = compare_step(
            core,
            step,
            host_plan,
            host_inputs,
            executed[first],
            executed[second],
            num_preemptions=int(after.num_preemptions - counters.num_preemptions),
            num_hit_tokens=int(after.num_hit_tokens - counters.num_hit_tokens),
        )
        counters = after
        yield record, before
        if _is_done(output, requests, step):
            return


def _is_done(output: StepOutput, requests: list[Request], step: int) -> bool:
    status = np.asarray(output.status)
    live = (status == Status.RUNNING) | (status == Status.WAITING)
    return not live.any() and all(request.arrival <= step for request in requests)


def compare_step(
    core: Core, step: int, plan: Plan, inputs, first, second, **counts: int
) -> StepRecord:
    """The record of one step from both executions."""
    num_rows = int(plan.num_seqs)
    num_tokens = int(plan.query_start_loc[-1])
    queries = plan.num_scheduled_tokens[:num_rows]
    decode = (queries == 1) & plan.needs_sample[:num_rows]
    attended = [np.asarray(x[3].astype(jnp.float32)) for x in (first, second)]
    logits = [np.asarray(x[4])[:num_rows] for x in (first, second)]
    sampled = [jax.device_get(x[2]) for x in (first, second)]
    valid = plan.needs_sample[:num_rows]
    tokens = tuple(np.where(valid, s.token_ids[:num_rows], 0) for s in sampled)
    config = core.configs[next(iter(core.configs))].model.config
    return StepRecord(
        step=step,
        bucket=plan.token_ids.shape[0],
        num_rows=num_rows,
        decode_tokens=int(decode.sum()),
        prefill_tokens=num_tokens - int(decode.sum()),
        num_copies=int((plan.copy_dst != NULL).sum()),
        attention=[
            difference(a[:num_tokens], b[:num_tokens]) for a, b in zip(*attended, strict=True)
        ],
        logits=difference(*logits),
        pool=core.pool_difference(first, second),
        padding=float(max(np.abs(a[:, num_tokens:]).max(initial=0) for a in attended)),
        num_samples=int(valid.sum()),
        tokens=token_differences(
            plan.row_ids[:num_rows], tokens, logits, inputs.temperature[:num_rows] > 0
        ),
        work=attention_work(
            queries.tolist(),
            plan.seq_lens[:num_rows].tolist(),
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=str(first[3].dtype),
        ),
        **counts,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeRun:
    """Two runs that each went their own way.

    Attributes:
      steps: of both. outputs: tokens of each request, of both.
      first_step, first_row: where the tokens of a step differed first; None: never.
    """

    steps: tuple[int, int]
    num_equal: int
    num_requests: int
    first_step: int | None
    first_row: int | None


def free_run(core: Core, requests: list[Request], *, kv_dtype: Any, max_steps: int) -> FreeRun:
    """Each implementation from the start to the end with its own tokens."""
    logs = {name: _run_alone(core, name, requests, kv_dtype, max_steps) for name in core.configs}
    first, second = logs.values()
    apart = next(
        (
            (step, int(np.flatnonzero(a != b)[0]))
            for step, (a, b) in enumerate(zip(first, second, strict=False))
            if (a != b).any()
        ),
        (None, None),
    )
    outputs = [
        [[int(t) for step in log if (t := step[row]) != NO_TOKEN] for row in range(len(requests))]
        for log in (first, second)
    ]
    return FreeRun(
        steps=(len(first), len(second)),
        num_equal=sum(a == b for a, b in zip(*outputs, strict=True)),
        num_requests=len(requests),
        first_step=apart[0],
        first_row=apart[1],
    )


def _run_alone(
    core: Core, name: str, requests: list[Request], kv_dtype: Any, max_steps: int
) -> list[np.ndarray]:
    """Each step's new tokens by row, [S]."""
    state, log = core.start(kv_dtype), []
    for step in range(max_steps):
        for row, request in enumerate(requests):
            if request.arrival == step:
                state = core.add(state, row, request)
        scheduler, plan, inputs = core.plan(state, core.bucket(state))
        state, output = core.commit(scheduler, plan, core.execute(name, state, plan, inputs))
        log.append(np.asarray(output.token_ids))
        if _is_done(output, requests, step):
            break
    return log
