"""`schedule`: one pure function from a state to a state and the plan of one step.

One rule serves prefill and decode: each running row's `num_computed_tokens` catches up with its
`num_tokens` within the step's budget. Everything is prefix sums, gathers and scatters over all
rows at once, in rank order: running rows before waiting ones, older before newer, or waiting ones
as the scheduling policy orders them. There is no loop over requests, and the only sort is one of S
keys.
"""

import dataclasses

import jax.numpy as jnp

from pagedjax.core import beam, static_batch
from pagedjax.core.admit import admit
from pagedjax.core.blocks import make_room, num_evictable, pool_of, release, with_pool
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.fork import copies_on_write, held_back
from pagedjax.core.plan import make_plan
from pagedjax.core.policies import rank_rows
from pagedjax.core.preempt import preempt
from pagedjax.core.ragged import cdiv, expand, take, when
from pagedjax.core.state import (
    NULL,
    ErrorCode,
    FinishReason,
    Plan,
    SchedulerState,
    Status,
)
from pagedjax.core.swap import drop_swapped, note_stuck, retire_host, swap_in, swaps_of


def schedule(
    state: SchedulerState, *, config: SchedulerConfig, num_tokens: int
) -> tuple[SchedulerState, Plan]:
    """Release what has ended, admit, match prefixes, hand out the budget, allocate, preempt.

    Args:
      state: consumed; donate it in the caller's jit.
      num_tokens: T, the static bucket, which is also the step's token budget.

    Returns:
      (state, plan). Rows that cannot be served in this step are simply not in the plan; rows that
      can never be served are FINISHED with `ErrorCode.IMPOSSIBLE`.
    """
    if num_tokens > config.max_num_batched_tokens:
        raise ValueError(
            f"num_tokens must be at most max_num_batched_tokens "
            f"({config.max_num_batched_tokens}), got {num_tokens}"
        )
    state = retire(config, state)
    state = _reject_impossible(config, state)
    state = drop_swapped(config, state)
    num_preemptions = state.counters.num_preemptions
    held = held_back(config, state) if config.enable_forks else jnp.zeros(config.num_rows, bool)
    order = rank_rows(config, state, held)
    state, order, grant, num_new, num_copies, num_running, pressed, out = _grant(
        config, state, order, held, num_tokens
    )
    state, grant, num_new, admitted = admit(
        config, state, order, grant, num_new, num_copies, num_running, pressed, held, num_tokens
    )
    if config.max_beam_width:
        order, grant, num_new = beam.compact(config, state.rows, order, grant, num_new)
    copied = copies_on_write(config, state, order, grant)
    state = _allocate(config, state, order, num_new, copied, num_tokens)
    if out is not None:
        state, *back = swap_in(config, state, admitted.swapped)
    plan = make_plan(config, state, order, grant, admitted, copied, num_tokens)
    if out is not None:
        state = note_stuck(config, state, grant, num_preemptions)
        plan = dataclasses.replace(plan, swaps=swaps_of(out, back))
    return state, plan


def retire(config: SchedulerConfig, state: SchedulerState) -> SchedulerState:
    """FINISHED rows give their blocks back and become EMPTY, at most `max_retirements` a step.

    The entries of their tables stay, unheld, until the next `schedule` clears them.
    """
    rows, blocks = state.rows, state.blocks
    done = rows.status == Status.FINISHED
    if config.batching == "static":
        state, batch_ends = static_batch.end(config, state)
        done &= batch_ends | (blocks.num_blocks_held == 0)  # the latter never started
    column = jnp.arange(config.max_blocks_per_seq)[None]
    if config.max_retirements >= config.num_rows or config.batching == "static":
        out = done
        held = jnp.where(done, blocks.num_blocks_held, 0)
        ids = jnp.where(column < held[:, None], blocks.block_tables, NULL)
    else:
        which = jnp.nonzero(done, size=config.max_retirements, fill_value=NULL)[0]
        out = jnp.zeros(config.num_rows, bool).at[which].set(True, mode="drop")
        held = take(blocks.num_blocks_held, which, 0)
        ids = jnp.where(column < held[:, None], take(blocks.block_tables, which, NULL), NULL)
    pool = pool_of(state)
    pool = when(
        config.use_cond, out.any(), lambda p: release(p, state.prefix.slot, state.step, ids), pool
    )
    rows = dataclasses.replace(rows, status=jnp.where(out, Status.EMPTY, rows.status))
    state = dataclasses.replace(retire_host(config, state, out), rows=rows)
    held = jnp.where(out, 0, blocks.num_blocks_held)
    return with_pool(state, pool, num_blocks_held=held)


def _reject_impossible(config: SchedulerConfig, state: SchedulerState) -> SchedulerState:
    """Requests that could never finish end at once, as an error of their own.

    The last token of a sequence is never computed, so it needs no block.
    """
    rows = state.rows
    most = rows.max_total_tokens
    bad = (cdiv(most - 1, config.block_size) > config.num_blocks) | (most > config.max_model_len)
    bad |= (rows.num_tokens >= most) | (rows.num_prompt_tokens < 1)
    bad &= rows.status == Status.WAITING
    if config.max_beam_width:
        bad = beam.reject(config, rows, bad)
    rows = dataclasses.replace(
        rows,
        status=jnp.where(bad, Status.FINISHED, rows.status),
        finish_reason=jnp.where(bad, FinishReason.ERROR, rows.finish_reason),
        error=jnp.where(bad, ErrorCode.IMPOSSIBLE, rows.error),
    )
    return dataclasses.replace(state, rows=rows)


def _grant(config: SchedulerConfig, state: SchedulerState, order, held_back, num_tokens: int):
    """Hand the budget to running rows, oldest first; preempt some if blocks run out. `held_back`
    [S] bool: rows that wait for a member of their group, not for a place.

    Returns:
      (state, order [S], grant [S], num_new_blocks [S], num_copies [], num_running [], pressed [],
      out), all by rank; of the running rows those in the step come first. num_copies: blocks needed
      besides, since rows share what they are about to write; fewer if somebody is preempted.
      pressed: rows had to step back or aside, so nobody is admitted in this step; `out` which rows
      are swapped out, or None.
    """
    rows, blocks = state.rows, state.blocks
    running = rows.status[order] == Status.RUNNING
    computed, held = rows.num_computed_tokens[order], blocks.num_blocks_held[order]
    want = jnp.where(running, rows.num_tokens[order] - computed, 0)
    if config.max_beam_width:
        want = beam.wanted(config, rows)[order]
    grant = jnp.clip(num_tokens - (jnp.cumsum(want) - want), 0, want)
    if config.max_beam_width:
        grant = beam.all_or_nothing(config, rows, order, grant)
    need = jnp.where(grant > 0, cdiv(computed + grant, config.block_size) - held, 0)
    if config.kv_cache != "paged":
        need = jnp.maximum(need, 0)  # rows hold more than what they have computed needs
    copies = (copies_on_write(config, state, order, grant) != NULL).astype(jnp.int32)
    available = blocks.num_free + num_evictable(blocks, state.prefix)
    num_running = running.sum(dtype=jnp.int32)
    state, order, grant, need, pressed, out = preempt(
        config, state, order, grant, need, copies, held_back, available, num_running
    )
    return state, order, grant, need, copies.sum(dtype=jnp.int32), num_running, pressed, out


def _allocate(
    config: SchedulerConfig, state: SchedulerState, order, num_new, copied, num_tokens: int
):
    """Take `num_new` [S] (by rank) blocks from the stack, all or nothing per row, and append them
    to the rows' tables. `_grant` and `admit` have made sure that there are enough.

    A row that copies a block (`copied` [S], by rank; NULL: none) gets one more, in that block's
    place at the end of its table, and gives up its reference to it."""
    copies = (copied != NULL).astype(jnp.int32)
    num_new = num_new + copies
    total = num_new.sum(dtype=jnp.int32)
    most = config.max_new_blocks(num_tokens)
    blocks, prefix, num_evicted = make_room(
        config, state.blocks, state.prefix, state.step, total, most
    )
    rank, offset, valid = expand(num_new, most)
    row = order[rank]
    entry = jnp.arange(most, dtype=jnp.int32)
    top = jnp.where(valid, blocks.num_free - 1 - entry, NULL)
    ids = take(blocks.free_stack, top, NULL)
    column = blocks.num_blocks_held[row] - copies[rank] + offset
    column = jnp.where(valid, column, NULL)
    blocks = dataclasses.replace(
        blocks,
        ref_counts=blocks.ref_counts.at[ids].set(1, mode="drop"),
        num_free=blocks.num_free - total,
        block_tables=blocks.block_tables.at[row, column].set(ids, mode="drop"),
        num_blocks_held=blocks.num_blocks_held.at[order].add(num_new - copies),
    )
    counters = dataclasses.replace(
        state.counters,
        num_evictions=state.counters.num_evictions + num_evicted,
        num_block_copies=state.counters.num_block_copies + copies.sum(dtype=jnp.int32),
    )
    state = dataclasses.replace(state, blocks=blocks, prefix=prefix, counters=counters)
    if not config.enable_forks:
        return state
    pool = when(
        config.use_cond,
        copies.any(),
        lambda p: release(p, prefix.slot, state.step, copied),
        pool_of(state),
    )
    return with_pool(state, pool)
