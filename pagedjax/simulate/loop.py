"""The steps of a simulation: arrivals enter the table, the scheduler runs, the book is kept."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.core.commit import commit
from pagedjax.core.policies import is_waiting
from pagedjax.core.prefix import mix
from pagedjax.core.pytree import pytree
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
from pagedjax.simulate.result import NOT_YET, Refusal, Requests, Result, Steps
from pagedjax.simulate.trace import (
    NEVER,
    Limits,
    SimulationConfig,
    Trace,
    checked,
    with_policies,
)


@pytree
class Arrivals:
    """A trace made ready for the request table; see `prepare`."""

    arrival_step: jax.Array  #: [Q] int32
    rows: SequenceTable  #: fields [Q, ...]: the row that each request will be
    num_rows: jax.Array  #: [] int32: rows that may be used


@pytree
class Simulation:
    """All of a running simulation. Its step number is `scheduler.step`."""

    scheduler: SchedulerState
    num_entered: jax.Array  #: [] int32: requests that have come into the table
    request_ids: jax.Array  #: [S] int32: each row's request
    admission_step: jax.Array  #: [S] int32: as in `Requests`, of the rows in use
    first_token_step: jax.Array  #: [S] int32
    num_preemptions: jax.Array  #: [S] int32
    book: jax.Array  #: [Q, 6] int32: the fields of `Requests`, in order


def prompt_tokens(trace: Trace, index, *, config: SimulationConfig) -> jax.Array:
    """The prompt of request `index`, [M * B] int32, padded with more of the same.

    Tokens are a hash of position and group in the shared prefix, of position and request after it.
    """
    position = jnp.arange(config.scheduler.max_padded_len, dtype=jnp.int32)
    shared = position < trace.num_prefix_tokens[index]
    stream = jnp.where(shared, 2 * trace.prefix_group[index] + 1, 2 * index)
    return (mix(stream, position) % jnp.uint32(config.vocab_size)).astype(jnp.int32)


def prepare(trace: Trace, limits: Limits, *, config: SimulationConfig) -> Arrivals:
    """Every request of the trace as the row that `add_request` makes of it.

    Takes Q * M * B * 4 bytes, the prompts. A request that needs more blocks than
    `limits.num_blocks` is made one that the scheduler refuses (longer than `max_model_len`), as
    it would with a pool of that size; and so is every request if a limit is out of range.
    """
    valid, limits = checked(config, limits)
    sizes = dataclasses.replace(config.scheduler, num_rows=1, max_num_seqs=1)

    def row(index):
        prompt = trace.num_prompt_tokens[index]
        total = prompt + trace.num_output_tokens[index]
        impossible = ~valid | (cdiv(total - 1, sizes.block_size) > limits.num_blocks)
        params = RequestParams(
            max_total_tokens=jnp.where(impossible, sizes.max_model_len + 1, total),
            min_output_tokens=0,
            stop_token_ids=jnp.full(sizes.max_stop_token_ids, NULL, jnp.int32),
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            num_logprobs=-1,
            salt=0,
            priority=trace.priority[index],
        )
        tokens = prompt_tokens(trace, index, config=config)
        state = add_request(init_scheduler(sizes), 0, tokens, prompt, params, config=sizes)
        return jax.tree.map(lambda field: field[0], state.rows)

    rows = jax.vmap(row)(jnp.arange(trace.arrival_step.shape[0], dtype=jnp.int32))
    return Arrivals(arrival_step=trace.arrival_step, rows=rows, num_rows=limits.num_rows)


def init_simulation(trace: Trace, limits: Limits, *, config: SimulationConfig) -> Simulation:
    """An idle scheduler whose free stack has the first `limits.num_blocks` blocks only.

    The others are on no stack, in no table and not cached, so nothing can ever reach them; see
    `with_withheld_blocks`. If a limit is out of range, none is withheld: see `prepare`.
    """
    _, limits = checked(config, limits)
    sizes = config.scheduler
    state = init_scheduler(sizes)
    blocks = withhold(state.blocks, limits.num_blocks)
    zeros = jnp.zeros(sizes.num_rows, jnp.int32)
    empty = jnp.array([NOT_YET, NOT_YET, NOT_YET, NOT_YET, 0, 0], jnp.int32)
    return Simulation(
        scheduler=dataclasses.replace(state, blocks=blocks),
        num_entered=jnp.int32(0),
        request_ids=zeros,
        admission_step=zeros,
        first_token_step=zeros,
        num_preemptions=zeros,
        book=jnp.broadcast_to(empty, (trace.arrival_step.shape[0], 6)),
    )


def with_withheld_blocks(state: SchedulerState, limits: Limits) -> SchedulerState:
    """The state with the blocks that the limits withhold put back on the free stack.

    `check_invariants` must hold of this one, over all N blocks. It also reports a withheld block
    that has come into use.
    """
    return dataclasses.replace(state, blocks=give_back(state.blocks, limits.num_blocks))


def withhold(pool, num_blocks):
    """A pool, all of it free, whose free stack has its first `num_blocks` [] int32 blocks only.

    Args: pool: `BlockPool` or `SwapMap`.
    """
    place = jnp.arange(pool.free_stack.shape[0], dtype=jnp.int32)
    stack = jnp.where(place < num_blocks, num_blocks - 1 - place, place)
    return dataclasses.replace(pool, free_stack=stack, num_free=jnp.asarray(num_blocks, jnp.int32))


def give_back(pool, num_blocks):
    """The pool, in any state, with the blocks that `withhold` left out on its free stack."""
    n = pool.free_stack.shape[0]
    place, top = jnp.arange(n, dtype=jnp.int32), pool.num_free + n - num_blocks
    withheld = num_blocks + place - pool.num_free
    stack = jnp.where((place >= pool.num_free) & (place < top), withheld, pool.free_stack)
    return dataclasses.replace(pool, free_stack=stack, num_free=top)


def enter(sim: Simulation, arrivals: Arrivals, *, config: SimulationConfig) -> Simulation:
    """Requests that are there go into EMPTY rows, oldest first, lowest row first, at most E.

    Does what `add_request` for one after the other does, but in one gather or scatter a field.
    """
    rows, s = sim.scheduler.rows, config.scheduler.num_rows
    most = min(config.max_entries, s)
    row = jnp.arange(s, dtype=jnp.int32)
    free = (rows.status == Status.EMPTY) & (row < arrivals.num_rows)
    place = jnp.cumsum(free, dtype=jnp.int32) - 1
    request = sim.num_entered + place
    there = take(arrivals.arrival_step, request, NEVER) <= sim.scheduler.step
    enters = free & there & (place < most)
    source = jnp.where(enters, request, 0)
    entry_row = jnp.full(most, NULL, jnp.int32)
    entry_row = entry_row.at[jnp.where(enters, place, NULL)].set(row, mode="drop")
    entry = sim.num_entered + jnp.arange(most, dtype=jnp.int32)

    def put(field, prepared):
        if field.ndim == 1:
            return jnp.where(enters, prepared[source], field)
        return field.at[entry_row].set(take(prepared, entry, 0), mode="drop")

    count = enters.sum(dtype=jnp.int32)
    new_rows = jax.tree.map(put, rows, arrivals.rows)
    arrival = jnp.where(enters, sim.scheduler.next_arrival + place, rows.arrival)
    return dataclasses.replace(
        sim,
        scheduler=dataclasses.replace(
            sim.scheduler,
            rows=dataclasses.replace(new_rows, arrival=arrival),
            next_arrival=sim.scheduler.next_arrival + count,
        ),
        num_entered=sim.num_entered + count,
        request_ids=jnp.where(enters, request, sim.request_ids),
        admission_step=jnp.where(enters, NOT_YET, sim.admission_step),
        first_token_step=jnp.where(enters, NOT_YET, sim.first_token_step),
        num_preemptions=jnp.where(enters, 0, sim.num_preemptions),
    )


def null_model(state: SchedulerState, plan: Plan, *, config: SimulationConfig) -> Sampled:
    """Each rank's next token: a hash of all the row's tokens, as greedy decoding's is a function
    of them."""
    row = jnp.where(plan.row_ids == NULL, 0, plan.row_ids)
    token = mix(state.rows.running_hash[row], state.rows.num_tokens[row])
    r, p = row.shape[0], config.scheduler.max_logprobs
    return Sampled(
        token_ids=(token % jnp.uint32(config.vocab_size)).astype(jnp.int32),
        logprob=jnp.zeros(r),
        top_token_ids=jnp.zeros((r, p), jnp.int32),
        top_logprobs=jnp.zeros((r, p)),
        nan=jnp.zeros(r, bool),
    )


def simulation_step(
    sim: Simulation, arrivals: Arrivals, *, config: SimulationConfig
) -> tuple[Simulation, StepOutput]:
    """One step: arrivals enter the table, `schedule`, the null model, `commit`, the book."""
    sizes = config.scheduler
    sim = enter(sim, arrivals, config=config)
    before, step = sim.scheduler.rows.status, sim.scheduler.step
    state, plan = schedule(sim.scheduler, config=sizes, num_tokens=config.num_tokens)
    state, output = commit(state, plan, null_model(state, plan, config=config), config=sizes)
    sim = dataclasses.replace(sim, scheduler=state)
    return _keep_book(sim, before, output, step), output


def _keep_book(sim: Simulation, before, output: StepOutput, step) -> Simulation:
    """Note what the step did to each row's request. `before`: [S], status when it began."""
    after = output.status
    refused = output.error == ErrorCode.IMPOSSIBLE
    waited, waits = is_waiting(before), is_waiting(after)
    ends = (after == Status.FINISHED) & (before != Status.FINISHED)
    starts = waited & ~waits & ~refused & (sim.admission_step == NOT_YET)
    admission = jnp.where(starts, step, sim.admission_step)
    speaks = (output.token_ids != NO_TOKEN) & (sim.first_token_step == NOT_YET)
    first_token = jnp.where(speaks, step, sim.first_token_step)
    steps_back = (before == Status.RUNNING) & waits
    preemptions = sim.num_preemptions + steps_back.astype(jnp.int32)
    finish = jnp.where(ends, step, NOT_YET)
    cached = jnp.where(admission == NOT_YET, NOT_YET, output.num_hit_tokens)
    refused = jnp.where(refused, Refusal.NEVER_FITS, Refusal.NONE)
    entry = [admission, first_token, finish, cached, preemptions, refused.astype(jnp.int32)]
    # Rows in use write their request's entry anew in every step, so none is left to add at the end.
    in_use = waits | (after == Status.RUNNING) | ends
    where = jnp.where(in_use, sim.request_ids, NULL)
    return dataclasses.replace(
        sim,
        admission_step=admission,
        first_token_step=first_token,
        num_preemptions=preemptions,
        book=sim.book.at[where].set(jnp.stack(entry, 1), mode="drop"),
    )


def simulate(trace: Trace, limits: Limits, *, config: SimulationConfig) -> Result:
    """Run the scheduler over a trace, `config.num_steps` steps in one `lax.scan`.

    Every value of `trace` and `limits` is an array: `jax.vmap` over any of them, both or one field.
    What is static fixes shapes; the block size is, so loop over block sizes outside. Policies are
    chosen by the limits if the configuration has several.

    Returns:
      `Result`: an array for each field of `Requests` ([Q]) and of `Steps` ([num_steps]). With a
      limit out of range nothing runs; every request is refused as `Refusal.INVALID_LIMITS`.
    """
    trace, limits = jax.tree.map(jnp.asarray, (trace, limits))
    arrivals = prepare(trace, limits, config=config)
    valid, limits = checked(config, limits)
    config = with_policies(config, limits)

    def body(sim, _):
        preempted = sim.scheduler.counters.num_preemptions
        sim, output = simulation_step(sim, arrivals, config=config)
        return sim, Steps(
            num_running=output.num_running,
            num_waiting=output.num_waiting,
            num_outside=sim.num_entered,  # becomes the difference below
            num_scheduled_tokens=output.num_scheduled_tokens,
            num_free_blocks=output.num_free_blocks,
            num_evictable_blocks=output.num_evictable_blocks,
            num_preemptions=output.counters.num_preemptions - preempted,
        )

    start = init_simulation(trace, limits, config=config)
    end, steps = lax.scan(body, start, None, length=config.num_steps)
    come_at = jnp.maximum(trace.arrival_step, 0)
    come = jnp.zeros(config.num_steps, jnp.int32).at[come_at].add(1, mode="drop")
    come = jnp.cumsum(come, dtype=jnp.int32)
    names = [field.name for field in dataclasses.fields(Requests)]
    requests = Requests(**dict(zip(names, end.book.T, strict=True)))
    refused = jnp.where(valid, requests.refused, Refusal.INVALID_LIMITS)
    return Result(
        requests=dataclasses.replace(requests, refused=refused),
        steps=dataclasses.replace(steps, num_outside=come - steps.num_outside),
    )
