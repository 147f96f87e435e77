"""Beam search inside the step: rows of one group are beams, and every step picks their successors.

A group is as many rows as beams are wanted. Its first row, the leader, computes the prompt like any
other; the others are SPARE and hold nothing. When all beams of a group have caught up they sample
together, and `commit` joins their best continuations and puts the best of them on the group's rows.
A beam that is continued stays in its row. Further continuations of it take rows of beams that ended
or spare ones, by reference to all of its blocks, the partly filled last one too: the first of them
to write copies it (`core/fork.py`). Blocks of a beam that nobody continues go back at once.

A group runs as a whole. Its beams sample in the same step or wait; it is preempted as a whole, and
then the beams come back one by one and wait for one another.

Continuations by a stop token are not put on rows: they are complete, and the host finds them in the
step's `top_token_ids`. The method is that of vLLM and Hugging Face: of each beam as many
continuations are looked at as it asked log-probabilities of, twice the width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.core.blocks import pool_of, release, with_pool
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.pytree import pytree
from pagedjax.core.ragged import cdiv, take, when
from pagedjax.core.state import NULL, FinishReason, Plan, SchedulerState, Status


def leaders(rows):
    """[S] int32: the row that leads each row's beam group, NULL for rows that are no beams.

    Rows of a group that has ended may still name a leader whose row has another request by now: the
    group's number tells."""
    leader = jnp.where(rows.status == Status.EMPTY, NULL, rows.beam_leader)
    return jnp.where(take(rows.group, leader, NULL) == rows.group, leader, NULL)


def present(rows):
    """[] bool: whether there are beams at all. Without any, nothing below costs anything."""
    return (leaders(rows) != NULL).any()


def _of_group(rows, values, combine: str):
    """[S]: per-row values combined over each row's beam group ("add" or "max"); 0 elsewhere."""
    leader = leaders(rows)
    into = jnp.zeros(values.shape[0], jnp.int32).at[leader]
    return take(getattr(into, combine)(values.astype(jnp.int32), mode="drop"), leader, 0)


def _is_active(rows):
    """[S] bool: rows that carry a beam."""
    live = (rows.status == Status.RUNNING) | (rows.status == Status.WAITING)
    return live & (leaders(rows) != NULL)


# -- schedule --------------------------------------------------------------------------------------


def reject(config: SchedulerConfig, rows, bad):
    """[S] bool: `bad` rows, with every group of which a row is bad, or that can never be run.

    Beams may have nothing in common but the whole blocks of the prompt's all but last token."""

    def look(bad):
        beams = leaders(rows) != NULL
        width = _of_group(rows, beams, "add")
        common = jnp.maximum(rows.num_prompt_tokens - 1, 0) // config.block_size
        most = common + width * (cdiv(rows.max_total_tokens - 1, config.block_size) - common)
        limit = config.num_blocks - jnp.where(width > 1, config.watermark_blocks, 0)
        widest = min(config.max_beam_width, config.max_num_seqs, config.max_num_batched_tokens)
        waits = (rows.status == Status.WAITING) | (rows.status == Status.SPARE)
        bad |= beams & waits & ((most > limit) | (width > widest))
        return bad | (waits & (_of_group(rows, bad, "max") > 0))

    return when(config.use_cond, present(rows), look, bad)


def known_tokens(config: SchedulerConfig, rows):
    """[S] int32: tokens of each row to compute while its group is incomplete: of a beam among
    several all but the last one, of others all."""

    def look(num_tokens):
        active = _is_active(rows)
        return num_tokens - (active & (_of_group(rows, active, "add") > 1)).astype(jnp.int32)

    return when(config.use_cond, present(rows), look, rows.num_tokens)


def wanted(config: SchedulerConfig, rows):
    """[S] int32: tokens that each running row wants to compute. Beams that wait for others of their
    group may want none."""
    known = known_tokens(config, rows)
    running = rows.status == Status.RUNNING

    def look(num_tokens):
        late = _is_active(rows) & ~(running & (rows.num_computed_tokens == known))
        late &= known < num_tokens
        return jnp.where(_of_group(rows, late, "max") == 0, num_tokens, known)

    limit = when(config.use_cond, present(rows), look, rows.num_tokens)
    return jnp.where(running, limit - rows.num_computed_tokens, 0)


def all_or_nothing(config: SchedulerConfig, rows, order, grant):
    """The grants [S], by rank, without those of groups that would sample in part."""

    def look(grant):
        mine = jnp.zeros_like(grant).at[order].set(grant)
        samples = rows.num_computed_tokens + mine == rows.num_tokens
        active = _is_active(rows)
        several = _of_group(rows, active, "add") > 1
        short = _of_group(rows, active & ~samples, "max") > 0
        cut = active & samples & several & short
        return jnp.where(cut[order], 0, grant)

    return when(config.use_cond, present(rows), look, grant)


def group_bounds(rows, order, running):
    """First rank of each rank's group and the rank after its last: [S + 1] int32 each. Rows of a
    group have arrived one after the other. Rows that are no beams are groups of one."""
    s = order.shape[0]
    rank = jnp.arange(s, dtype=jnp.int32)
    leader = jnp.where(running, leaders(rows)[order], NULL)
    first = jnp.full(s, NULL, jnp.int32).at[leader].min(rank, mode="drop")
    last = jnp.full(s, -1, jnp.int32).at[leader].max(rank, mode="drop")
    start = jnp.where(leader != NULL, take(first, leader, 0), rank)
    end = jnp.where(leader != NULL, take(last, leader, 0), rank) + 1
    past = jnp.full(1, s, jnp.int32)
    return jnp.concatenate([start, past]), jnp.concatenate([end, past])


def may_start(config: SchedulerConfig, rows, row_ids, held, num_running):
    """[A] bool: candidates of admission, in their order, that beams do not keep out.

    A group takes as many places among the running rows as it has rows, from its start to its end.
    And nobody overtakes a beam that waits for another one of its group: two groups in part could
    wait for each other.
    """

    def look(_):
        leader = leaders(rows)
        spare = rows.status == Status.SPARE
        runs = _of_group(rows, rows.status == Status.RUNNING, "max") > 0
        reserved = (spare & runs).sum(dtype=jnp.int32)
        brings = jnp.where(runs, 0, _of_group(rows, spare, "add"))[row_ids]
        mine = leader[row_ids]
        a = jnp.arange(row_ids.shape[0])
        again = ((mine[None] == mine[:, None]) & (a[None] < a[:, None])).any(1)
        slots = jnp.cumsum(1 + jnp.where(again, 0, brings), dtype=jnp.int32) + reserved
        barrier = jnp.where(held & (leader != NULL), rows.arrival, NULL).min()
        fits = num_running + slots <= config.max_num_seqs
        return fits & (rows.arrival[row_ids] < barrier)

    everybody = jnp.ones(row_ids.shape[0], bool)
    return when(config.use_cond, present(rows), look, everybody)


def compact(config: SchedulerConfig, rows, *arrays):
    """The [S] arrays by rank, order, grant and others, with granted ranks first: beams that wait
    leave no gaps in the step."""

    def look(arrays):
        granted = arrays[1] > 0
        behind = granted.sum(dtype=jnp.int32) + jnp.cumsum(~granted, dtype=jnp.int32) - 1
        place = jnp.where(granted, jnp.cumsum(granted, dtype=jnp.int32) - 1, behind)
        return tuple(jnp.zeros_like(x).at[place].set(x) for x in arrays)

    return when(config.use_cond, present(rows), look, arrays)


# -- commit ----------------------------------------------------------------------------------------


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
    spoiled = _of_group(rows, nan, "max") > 0
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
        config.use_cond, picks.moving.any(), lambda x: _of_group(rows, x, "max") > 0, took
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
        stuck = picks.moving & (_of_group(rows, picks.parent != NULL, "max") == 0)
        why = jnp.where(ended, reason, jnp.where(stuck, FinishReason.STOP, 0))
        why = _of_group(rows, why, "max")
        what = _of_group(rows, jnp.where(ended, error, 0), "max")
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


def whole_groups(rows, mask):
    """[S] bool: the mask, with every row of a group of which a row is in it."""
    return mask | (_of_group(rows, mask, "max") > 0)
