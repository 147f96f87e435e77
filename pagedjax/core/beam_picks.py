"""`commit` of a beam search: the best continuations of each group's beams get the group's rows.

See `pagedjax.core.beam`. Blocks are shared by reference and given up here; what is written into a
shared one is copied by the next `schedule` (`pagedjax.core.fork`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.core.beam_groups import leaders, of_group, present
from pagedjax.core.blocks import pool_of, release, with_pool
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.pytree import pytree
from pagedjax.core.ragged import take, when
from pagedjax.core.state import NULL, FinishReason, Plan, SchedulerState, Status


@pytree
class Picks:
    """What a step's samples mean for the beams. All [S]."""

    moving: jax.Array  #: bool: beams that have sampled
    parent: jax.Array  #: int32: row whose beam this row carries on, NULL for none
    token: jax.Array  #: int32: the token it is carried on by
    logprob: jax.Array  #: float32: of that token
    cum_logprob: jax.Array  #: float32: of the output with it


def sampling(rows, plan: Plan):
    """[S] bool: beams that sample in this step."""
    moving = take(plan.needs_sample, plan.rank, False) & (rows.status == Status.RUNNING)
    return moving & (leaders(rows) != NULL)


def pick(config: SchedulerConfig, state: SchedulerState, plan: Plan, sampled) -> Picks:
    """Join the continuations of each group's beams and give the best ones rows."""
    rows, s = state.rows, config.num_rows
    moving = sampling(rows, plan)
    nan = moving & take(sampled.nan, plan.rank, False)
    nobody = Picks(
        moving=moving,
        parent=jnp.full(s, NULL, jnp.int32),
        token=jnp.zeros(s, jnp.int32),
        logprob=jnp.zeros(s, jnp.float32),
        cum_logprob=rows.cum_logprob,
    )
    spoiled = of_group(rows, nan, "max") > 0
    return when(
        config.use_cond,
        (moving & ~spoiled).any(),
        lambda none: _pick(config, rows, plan, sampled, moving & ~spoiled, none),
        nobody,
    )


def _pick(config: SchedulerConfig, rows, plan: Plan, sampled, moving, nobody: Picks) -> Picks:
    s, k = config.num_rows, config.max_beam_width
    g, p = plan.row_ids.shape[0], sampled.top_logprobs.shape[1]
    row = jnp.arange(s, dtype=jnp.int32)
    # The step's groups, numbered, and their rows by place in the group.
    leader = leaders(rows)
    here = jnp.zeros(s, jnp.int32).at[jnp.where(moving, leader, NULL)].set(1, mode="drop")
    number = take(jnp.where(here > 0, jnp.cumsum(here) - 1, NULL), leader, NULL)
    seat_row = jnp.full((g, k), NULL, jnp.int32)
    seat_row = seat_row.at[number, rows.beam_index].set(row, mode="drop")
    beam_row = jnp.where(take(moving, seat_row, False), seat_row, NULL)
    rank = take(plan.rank, beam_row, NULL)

    token = take(sampled.top_token_ids, rank, NULL)  # [g, k, p]
    logprob = take(sampled.top_logprobs, rank, -jnp.inf)
    total = take(rows.cum_logprob, beam_row, -jnp.inf)[..., None] + logprob
    stops = take(rows.stop_token_ids, beam_row, NULL)
    final = (token[..., None] == stops[:, :, None]).any(-1) | (token == NULL)
    score, best = lax.top_k(jnp.where(final, -jnp.inf, total).reshape(g, k * p), min(k, k * p))
    parent_seat = (best // p).astype(jnp.int32)
    width = (seat_row != NULL).sum(1)
    chosen = (score > -jnp.inf) & (jnp.arange(k) < width[:, None])
    seat = _seats(parent_seat, chosen, seat_row != NULL)

    def of_best(x):
        return jnp.take_along_axis(x.reshape(g, k * p), best, 1)

    to = jnp.where(chosen, jnp.take_along_axis(seat_row, seat, 1), NULL)
    parent = jnp.take_along_axis(beam_row, parent_seat, 1)
    put = {
        "parent": parent,
        "token": of_best(token),
        "logprob": of_best(logprob),
        "cum_logprob": score,
    }
    fields = {n: getattr(nobody, n).at[to].set(value, mode="drop") for n, value in put.items()}
    return dataclasses.replace(nobody, **fields)


def _seats(parent, chosen, exists):
    """Which place of its group each chosen continuation takes: [g, k] int32.

    The best continuation of a beam stays where the beam is; the others take the places, from low
    to high, of which no beam is continued.

    Args: parent [g, k] int32 places; chosen, exists [g, k] bool: of continuations, of places.
    """
    k = parent.shape[1]
    index = jnp.arange(k)
    same = (parent[:, None] == parent[:, :, None]) & chosen[:, None]  # [g, child, other child]
    stays = chosen & ~(same & (index[None, None] < index[None, :, None])).any(2)
    taken = ((parent[:, :, None] == index) & stays[..., None]).any(1)
    free = exists & ~taken
    nth = jnp.cumsum(chosen & ~stays, 1)
    fits = (jnp.cumsum(free, 1)[:, None] == nth[:, :, None]) & free[:, None]
    return jnp.where(stays, parent, jnp.argmax(fits, 2)).astype(jnp.int32)


def move(config: SchedulerConfig, state: SchedulerState, picks: Picks, num_rows: int):
    """Put the picked beams on their rows: share blocks, give up those of beams that ended.

    Rows whose beam ends and that get no other become SPARE. num_rows: most rows of the step.
    """
    rows, blocks = state.rows, state.blocks
    row = jnp.arange(config.num_rows, dtype=jnp.int32)
    took = picks.parent != NULL
    moved = took & (picks.parent != row)
    goes_on = when(
        config.use_cond, picks.moving.any(), lambda x: of_group(rows, x, "max") > 0, took
    )
    ended = picks.moving & goes_on & (picks.parent != row)  # its own blocks are given up
    spare = ended & ~took

    def places(nowhere):
        masks = (moved, ended, spare)
        found = (jnp.nonzero(x, size=num_rows, fill_value=NULL)[0] for x in masks)
        return tuple(x.astype(jnp.int32) for x in found)

    nowhere = (jnp.full(num_rows, NULL, jnp.int32),) * 3
    destination, loser, emptied = when(config.use_cond, (moved | ended).any(), places, nowhere)
    source = take(picks.parent, destination, NULL)
    state = _share_blocks(config, state, source, loser)
    block_tables, token_ids, block_hashes = _copy_rows(
        config,
        (state.blocks.block_tables, rows.token_ids, rows.block_hashes),
        source,
        destination,
        # The pool depends on a read of the tables: that lets XLA write them in place.
        moved.sum(dtype=jnp.int32) + jnp.minimum(state.blocks.num_free, 0),
    )
    block_tables = _clear_rows(config, block_tables, emptied, spare.sum(dtype=jnp.int32))
    origin = jnp.where(moved, picks.parent, row)

    def follow(field):
        return jnp.where(spare, 0, field[origin])

    status = jnp.where(took, Status.RUNNING, rows.status)
    rows = dataclasses.replace(
        rows,
        status=jnp.where(spare, Status.SPARE, status),
        num_tokens=rows.num_tokens[origin],
        num_computed_tokens=follow(rows.num_computed_tokens),
        num_hit_tokens=rows.num_hit_tokens[origin],
        num_cached_blocks=follow(rows.num_cached_blocks),
        chain_broken=rows.chain_broken[origin],
        running_hash=rows.running_hash[origin],
        token_ids=token_ids,
        block_hashes=block_hashes,
        cum_logprob=picks.cum_logprob,
    )
    blocks = dataclasses.replace(
        state.blocks,
        block_tables=block_tables,
        num_blocks_held=follow(blocks.num_blocks_held),
    )
    return dataclasses.replace(state, rows=rows, blocks=blocks)


def _share_blocks(config: SchedulerConfig, state: SchedulerState, source, loser):
    """One reference more to the blocks of each row in `source`, one less to those of each in
    `loser` ([R], NULL padded). A row that others carry on goes on itself, so no source is a loser
    and its blocks are never free in between."""
    blocks = state.blocks
    column = jnp.arange(config.max_blocks_per_seq)[None]

    def held(which):
        count = take(blocks.num_blocks_held, which, 0)
        return jnp.where(column < count[:, None], take(blocks.block_tables, which, NULL), NULL)

    def change(pool):
        ref_counts, *rest = pool
        ref_counts = ref_counts.at[held(source)].add(1, mode="drop")
        return release((ref_counts, *rest), state.prefix.slot, state.step, held(loser))

    any_change = ((source != NULL) | (loser != NULL)).any()
    return with_pool(state, when(config.use_cond, any_change, change, pool_of(state)))


def _copy_rows(config: SchedulerConfig, tables, source, destination, count):
    """Copy rows of large tables in place; no destination is a source.

    A loop of zero trips costs nothing, where a conditional around the tables would copy them. On an
    accelerator, a few rows written for nothing are cheaper than a loop."""
    if not config.use_cond:
        return tuple(x.at[destination].set(take(x, source, 0), mode="drop") for x in tables)

    def one(i, tables):
        return tuple(
            lax.dynamic_update_index_in_dim(
                x, lax.dynamic_index_in_dim(x, source[i], keepdims=False), destination[i], 0
            )
            for x in tables
        )

    return lax.fori_loop(0, count, one, tables)


def _clear_rows(config: SchedulerConfig, table, which, count):
    """NULL in whole rows of a table, in place."""
    if not config.use_cond:
        return table.at[which].set(NULL, mode="drop")
    empty = jnp.full(table.shape[1], NULL, table.dtype)

    def one(i, table):
        return lax.dynamic_update_index_in_dim(table, empty, which[i], 0)

    return lax.fori_loop(0, count, one, table)


def end_together(config: SchedulerConfig, rows, picks: Picks):
    """Groups end as a whole: when they reach their length, when a row of them fails, or when every
    continuation was by a stop token."""

    def spread(fields):
        status, reason, error, broken = fields
        beam = leaders(rows) != NULL
        ended = beam & (status == Status.FINISHED)
        stuck = picks.moving & (of_group(rows, picks.parent != NULL, "max") == 0)
        why = jnp.where(ended, reason, jnp.where(stuck, FinishReason.STOP, 0))
        why = of_group(rows, why, "max")
        what = of_group(rows, jnp.where(ended, error, 0), "max")
        over = beam & (why > 0)
        return (
            jnp.where(over, Status.FINISHED, status),
            jnp.where(over, why, reason),
            jnp.where(over, what, error),
            broken | (over & (what > 0)),  # whichever of them it was, nobody finds their blocks
        )

    names = ("status", "finish_reason", "error", "chain_broken")
    fields = tuple(getattr(rows, name) for name in names)
    fields = when(config.use_cond, present(rows), spread, fields)
    return dataclasses.replace(rows, **dict(zip(names, fields, strict=True)))
