"""The scheduler alone, without a model, over a trace of arrivals, on the device.

`simulate` is a pure function of arrays: jit it, `jax.vmap` it over traces and limits, and a thousand
schedulers run at once. It takes the very steps that an engine takes: `add_request`'s rows,
`schedule` and `commit`, with a function of the row's tokens in the model's place.

    run = jax.jit(simulate, static_argnames=("config", "num_tokens", "num_steps"))
    result = run(trace, limits, config=config, num_tokens=64, num_steps=1000)
    metrics = measure(trace, limits, result)

Letters: Q requests of the trace, S rows of the request table, N blocks of the pool, T tokens of a
step, E requests that enter the table in one step.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.core.commit import commit
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.prefix import mix
from pagedjax.core.ragged import cdiv, take
from pagedjax.core.requests import RequestParams, add_request
from pagedjax.core.schedule import schedule
from pagedjax.core.state import (
    NO_TOKEN,
    NULL,
    ErrorCode,
    Plan,
    SchedulerState,
    SequenceTable,
    Status,
    StepOutput,
    init_scheduler,
)
from pagedjax.sampling import Sampled

NEVER = NULL
"""Arrival step of a request that does not come: padding, so that traces have one length."""
NOT_YET = np.int32(-1)
"""Step of something that did not happen."""


def _pytree(cls):
    return jax.tree_util.register_dataclass(
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    )


@_pytree
class Trace:
    """What comes in, oldest first. All [Q] int32."""

    arrival_step: jax.Array  #: step from which the request is there; never falling. Or `NEVER`
    num_prompt_tokens: jax.Array
    num_output_tokens: jax.Array  #: how many it produces, at least 1
    prefix_group: jax.Array  #: requests of one group begin with the same tokens
    num_prefix_tokens: jax.Array  #: how many; 0 shares with nobody


@_pytree
class Limits:
    """What the scheduler may use of what `SchedulerConfig` reserves. All [] int32."""

    num_blocks: jax.Array  #: blocks of the pool, at most `config.num_blocks`
    num_rows: jax.Array  #: rows of the request table, at most `config.num_rows`


@_pytree
class Simulation:
    """All of a running simulation."""

    scheduler: SchedulerState
    num_entered: jax.Array  #: [] int32: requests that have come into the table
    request_ids: jax.Array  #: [S] int32: each row's request
    progress: jax.Array  #: [S, 3] int32: the first three columns of `requests`, of rows in use
    requests: jax.Array  #: [Q, 6] int32: the fields of `Requests` in order


@_pytree
class Requests:
    """What became of each request. All [Q] int32; steps count from 0, -1 is "did not happen"."""

    admission_step: jax.Array  #: began to run
    first_token_step: jax.Array  #: the step that produced its first token
    num_preemptions: jax.Array
    finish_step: jax.Array  #: the step that produced its last token, or refused it
    num_cached_tokens: jax.Array  #: prompt tokens found in the prefix cache at admission, else -1
    refused: jax.Array  #: 1 if it can never fit the limits


@_pytree
class Steps:
    """What each step did. All [num_steps] int32, after the step."""

    num_running: jax.Array  #: rows
    num_waiting: jax.Array  #: rows of the table that wait, new or preempted
    num_outside: jax.Array  #: requests that are there but have no row yet
    num_scheduled_tokens: jax.Array
    num_free_blocks: jax.Array  #: blocks that are empty
    num_evictable_blocks: jax.Array  #: blocks that are cached and held by nobody
    num_preemptions: jax.Array  #: in this step


@_pytree
class Result:
    """What `simulate` returns."""

    requests: Requests
    steps: Steps


@_pytree
class Metrics:
    """Figures of one simulation. -1 (or NaN) where there is nothing to measure."""

    time_to_first_token: jax.Array  #: [Q] int32: steps from arrival to the first token, at least 1
    queueing: jax.Array  #: [Q] int32: steps from arrival to admission
    preemption_rate: jax.Array  #: [] float32: preemptions for each admitted request
    hit_rate: jax.Array  #: [] float32: share of admitted prompt tokens that were cached
    pool_utilisation: jax.Array  #: [] float32: share of the blocks held, mean of the busy steps
    num_finished: jax.Array  #: [] int32: requests served to the end


def make_limits(
    config: SchedulerConfig, *, num_blocks: int | None = None, num_rows: int | None = None
) -> Limits:
    """Limits from numbers; what is left out is what `config` has.

    Raises `ValueError` naming the field, the value given and the values accepted.
    """
    values = {}
    for name, value in (("num_blocks", num_blocks), ("num_rows", num_rows)):
        most = getattr(config, name)
        value = most if value is None else value
        if not 1 <= value <= most:
            raise ValueError(f"{name} must be from 1 to {most}, config.{name} (got {value})")
        values[name] = jnp.asarray(value, jnp.int32)
    return Limits(**values)


def prompt_tokens(trace: Trace, index, *, config: SchedulerConfig, vocab_size: int):
    """A request's prompt, [M * B] int32, padded with more of the same.

    Tokens are a hash of group (or request) and position, below `vocab_size`.
    """
    position = jnp.arange(config.max_padded_len, dtype=jnp.int32)
    shared = position < trace.num_prefix_tokens[index]
    own, group = 2 * index, 2 * trace.prefix_group[index] + 1
    token = mix(jnp.where(shared, group, own), position) % jnp.uint32(vocab_size)
    return token.astype(jnp.int32)


def output_tokens(state: SchedulerState, plan: Plan, *, config: SchedulerConfig, vocab_size: int):
    """The null model: a row's next token is a hash of all its tokens, as greedy decoding's is a
    function of them. -> `Sampled` of R ranks."""
    rows = state.rows
    row = jnp.where(plan.row_ids == NULL, 0, plan.row_ids)
    token = mix(rows.running_hash[row], rows.num_tokens[row]) % jnp.uint32(vocab_size)
    r, p = row.shape[0], config.max_logprobs
    return Sampled(
        token_ids=token.astype(jnp.int32),
        logprob=jnp.zeros(r),
        top_token_ids=jnp.zeros((r, p), jnp.int32),
        top_logprobs=jnp.zeros((r, p)),
        nan=jnp.zeros(r, bool),
    )


def prepare_rows(
    trace: Trace, limits: Limits, *, config: SchedulerConfig, vocab_size: int
) -> SequenceTable:
    """Every request of the trace as the row that `add_request` makes of it: fields [Q, ...].

    Takes Q * M * B * 4 bytes, the prompts. A request that needs more blocks than
    `limits.num_blocks` is made one that the scheduler refuses (longer than `max_model_len`), as
    it would with a pool of that size.
    """
    single = dataclasses.replace(config, num_rows=1, max_num_seqs=1)

    def row(index):
        prompt, output = trace.num_prompt_tokens[index], trace.num_output_tokens[index]
        total = prompt + output
        impossible = cdiv(total - 1, config.block_size) > limits.num_blocks
        params = RequestParams(
            max_total_tokens=jnp.where(impossible, config.max_model_len + 1, total),
            min_output_tokens=0,
            stop_token_ids=jnp.full(config.max_stop_token_ids, NULL, jnp.int32),
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=jnp.uint32(0),
            num_logprobs=-1,
            salt=jnp.uint32(0),
        )
        tokens = prompt_tokens(trace, index, config=config, vocab_size=vocab_size)
        state = add_request(init_scheduler(single), 0, tokens, prompt, params, config=single)
        return jax.tree.map(lambda field: field[0], state.rows)

    return jax.vmap(row)(jnp.arange(trace.arrival_step.shape[0], dtype=jnp.int32))


def init_simulation(trace: Trace, limits: Limits, *, config: SchedulerConfig) -> Simulation:
    """An idle scheduler whose free stack has the first `limits.num_blocks` blocks only.

    The others are on no stack, in no table and not cached, so nothing can ever reach them; see
    `with_withheld_blocks`.
    """
    state = init_scheduler(config)
    place = jnp.arange(config.num_blocks, dtype=jnp.int32)
    stack = jnp.where(place < limits.num_blocks, limits.num_blocks - 1 - place, place)
    blocks = dataclasses.replace(state.blocks, free_stack=stack, num_free=limits.num_blocks)
    s, q = config.num_rows, trace.arrival_step.shape[0]
    # Under vmap over traces alone, what the limits do not reach must not be taken for constant.
    untouched = jnp.array([NOT_YET, NOT_YET, 0, NOT_YET, NOT_YET, 0])
    return Simulation(
        scheduler=dataclasses.replace(state, blocks=blocks),
        num_entered=jnp.int32(0),
        request_ids=jnp.full(s, NULL, jnp.int32),
        progress=jnp.zeros((s, 3), jnp.int32),
        requests=jnp.broadcast_to(untouched, (q, 6)).astype(jnp.int32),
    )


def with_withheld_blocks(
    state: SchedulerState, limits: Limits, *, config: SchedulerConfig
) -> SchedulerState:
    """The state with the blocks that the limits withhold put back on the free stack.

    `check_invariants` holds of this one, of all N blocks: it would also report a withheld block
    that had come into use.
    """
    blocks, n = state.blocks, config.num_blocks
    place = jnp.arange(n, dtype=jnp.int32)
    withheld = place + limits.num_blocks - blocks.num_free
    top = blocks.num_free + n - limits.num_blocks
    stack = jnp.where((place >= blocks.num_free) & (place < top), withheld, blocks.free_stack)
    blocks = dataclasses.replace(blocks, free_stack=stack, num_free=top)
    return dataclasses.replace(state, blocks=blocks)


def enter(
    sim: Simulation,
    prepared: SequenceTable,
    trace: Trace,
    limits: Limits,
    step,
    *,
    config: SchedulerConfig,
    max_entries: int,
) -> Simulation:
    """Requests that are there go into EMPTY rows, lowest row first, at most `max_entries` (E).

    The same as `add_request` for one after the other, in one gather and one scatter a field.
    """
    rows, s = sim.scheduler.rows, config.num_rows
    row = jnp.arange(s, dtype=jnp.int32)
    free = (rows.status == Status.EMPTY) & (row < limits.num_rows)
    place = jnp.cumsum(free, dtype=jnp.int32) - 1
    there = take(trace.arrival_step, sim.num_entered + place, NEVER) <= step
    enters = free & there & (place < max_entries)
    source = jnp.where(enters, sim.num_entered + place, 0)
    entry_row = jnp.full(max_entries, NULL, jnp.int32)
    entry_row = entry_row.at[jnp.where(enters, place, NULL)].set(row, mode="drop")
    entry = sim.num_entered + jnp.arange(max_entries, dtype=jnp.int32)

    def put(field, prepared_field):
        if field.ndim == 1:
            return jnp.where(enters, prepared_field[source], field)
        return field.at[entry_row].set(take(prepared_field, entry, 0), mode="drop")

    count = enters.sum(dtype=jnp.int32)
    rows = jax.tree.map(put, rows, prepared)
    arrival = jnp.where(enters, sim.scheduler.next_arrival + place, rows.arrival)
    nothing = jnp.array([NOT_YET, NOT_YET, 0])
    return dataclasses.replace(
        sim,
        scheduler=dataclasses.replace(
            sim.scheduler,
            rows=dataclasses.replace(rows, arrival=arrival),
            next_arrival=sim.scheduler.next_arrival + count,
        ),
        num_entered=sim.num_entered + count,
        request_ids=jnp.where(enters, sim.num_entered + place, sim.request_ids),
        progress=jnp.where(enters[:, None], nothing, sim.progress),
    )


def simulation_step(
    sim: Simulation,
    prepared: SequenceTable,
    trace: Trace,
    limits: Limits,
    step,
    *,
    config: SchedulerConfig,
    num_tokens: int,
    max_entries: int,
    vocab_size: int,
) -> tuple[Simulation, StepOutput]:
    """One step: arrivals, `schedule`, the null model, `commit`, the book of the requests.

    Args:
      prepared: of `prepare_rows`.
      step: [] int32, from 0.
    """
    sim = enter(
        sim, prepared, trace, limits, step, config=config, max_entries=max_entries
    )
    before = sim.scheduler.rows.status
    state, plan = schedule(sim.scheduler, config=config, num_tokens=num_tokens)
    sampled = output_tokens(state, plan, config=config, vocab_size=vocab_size)
    state, output = commit(state, plan, sampled, config=config)
    return _keep_book(sim, state, before, output, step), output


def _keep_book(sim: Simulation, state: SchedulerState, before, output: StepOutput, step):
    after, q = output.status, sim.requests.shape[0]
    refused = output.error == ErrorCode.IMPOSSIBLE
    ended = (after == Status.FINISHED) & (before != Status.FINISHED)
    was_running, is_waiting = before == Status.RUNNING, after == Status.WAITING
    starts = (before == Status.WAITING) & ~is_waiting & ~refused
    admission, first_token, preemptions = sim.progress.T
    admission = jnp.where(starts & (admission == NOT_YET), step, admission)
    new_first = (output.token_ids != NO_TOKEN) & (first_token == NOT_YET)
    first_token = jnp.where(new_first, step, first_token)
    preemptions = preemptions + (was_running & is_waiting)
    progress = jnp.stack([admission, first_token, preemptions], 1)
    hits = jnp.where(admission == NOT_YET, NOT_YET, output.num_hit_tokens)
    finish = jnp.where(ended, step, NOT_YET)
    record = jnp.concatenate(
        [progress, jnp.stack([finish, hits, (ended & refused).astype(jnp.int32)], 1)], 1
    )
    # Rows in use write their request's record anew in every step, so there is no last one to add.
    live = ended | (after == Status.RUNNING) | is_waiting
    where = jnp.where(live, sim.request_ids, q)
    requests = sim.requests.at[where].set(record, mode="drop")
    return dataclasses.replace(sim, scheduler=state, progress=progress, requests=requests)


def simulate(
    trace: Trace,
    limits: Limits,
    *,
    config: SchedulerConfig,
    num_tokens: int,
    num_steps: int,
    max_entries: int = 8,
    vocab_size: int = 1 << 20,
) -> Result:
    """Run the scheduler over a trace for `num_steps` steps, in one `lax.scan`.

    Every value of `trace` and `limits` is an array: `jax.vmap` over any of them. What is static
    fixes shapes; block size is, so loop over block sizes outside. Give `use_cond=False` under
    `vmap`, where both branches of a conditional are computed anyway.

    Args:
      config: sizes of the scheduler.
      num_tokens: T, the budget of every step. (An engine's shell picks a size for each step.)
      max_entries: E, most requests that enter the table in one step; the rest wait outside.
      vocab_size: tokens are below it.

    Returns:
      `Result`: an array for each field of `Requests` ([Q]) and of `Steps` ([num_steps]).
    """
    prepared = prepare_rows(trace, limits, config=config, vocab_size=vocab_size)
    start = init_simulation(trace, limits, config=config)

    def body(sim, step):
        preempted = sim.scheduler.counters.num_preemptions
        sim, output = simulation_step(
            sim,
            prepared,
            trace,
            limits,
            step,
            config=config,
            num_tokens=num_tokens,
            max_entries=min(max_entries, config.num_rows),
            vocab_size=vocab_size,
        )
        return sim, (
            output.num_running,
            output.num_waiting,
            sim.num_entered,
            output.num_scheduled_tokens,
            output.num_free_blocks,
            output.num_evictable_blocks,
            output.counters.num_preemptions - preempted,
        )

    steps = jnp.arange(num_steps, dtype=jnp.int32)
    end, (running, waiting, entered, scheduled, free, evictable, preempted) = lax.scan(
        body, start, steps
    )
    come = jnp.zeros(num_steps, jnp.int32)
    come = come.at[jnp.maximum(trace.arrival_step, 0)].add(1, mode="drop").cumsum()
    admission, first_token, preemptions, finish, cached, refused = end.requests.T
    return Result(
        requests=Requests(
            admission_step=admission,
            first_token_step=first_token,
            num_preemptions=preemptions,
            finish_step=finish,
            num_cached_tokens=cached,
            refused=refused,
        ),
        steps=Steps(
            num_running=running,
            num_waiting=waiting,
            num_outside=come - entered,
            num_scheduled_tokens=scheduled,
            num_free_blocks=free,
            num_evictable_blocks=evictable,
            num_preemptions=preempted,
        ),
    )


def measure(trace: Trace, limits: Limits, result: Result) -> Metrics:
    """What a simulation shows. Pure, for one simulation: `vmap` it as `simulate` was."""
    requests, steps = result.requests, result.steps
    arrival = jnp.maximum(trace.arrival_step, 0)

    def since_arrival(step):
        return jnp.where(step == NOT_YET, NOT_YET, step - arrival)

    admitted = requests.admission_step != NOT_YET
    prompt = jnp.where(admitted, trace.num_prompt_tokens, 0).sum()
    cached = jnp.where(admitted, requests.num_cached_tokens, 0).sum()
    held = limits.num_blocks - steps.num_free_blocks - steps.num_evictable_blocks
    busy = steps.num_scheduled_tokens > 0
    served = (requests.finish_step != NOT_YET) & (requests.refused == 0)
    return Metrics(
        time_to_first_token=since_arrival(
            jnp.where(requests.first_token_step == NOT_YET, NOT_YET, requests.first_token_step + 1)
        ),
        queueing=since_arrival(requests.admission_step),
        preemption_rate=requests.num_preemptions.sum() / admitted.sum(),
        hit_rate=cached / prompt,
        pool_utilisation=jnp.where(busy, held, 0).sum() / (busy.sum() * limits.num_blocks),
        num_finished=served.sum(dtype=jnp.int32),
    )
