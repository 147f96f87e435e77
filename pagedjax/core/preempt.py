"""Preemption: when running rows need more blocks than there are, the newest ones step back.

Victims drop their blocks and wait to be computed again, from the prefix cache where their blocks
survive there. They keep their place in the order of arrival, so they come back first.

A policy decides two things here and nowhere else: in which order rows are victims (a suffix of
the rank order: the newest) and what becomes of their blocks (recomputation: `release`).
"""

import dataclasses

import jax.numpy as jnp

from pagedjax.core.beam import group_bounds
from pagedjax.core.blocks import release
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.ragged import take, when
from pagedjax.core.state import NULL, SchedulerState, Status


def blocks_back(tables, ref_counts):
    """How many blocks come back if the newest candidates give theirs up.

    Exact with sharing: a block comes back when candidates are all its holders, and then as soon
    as the oldest of them goes, since the newer ones are gone by then.

    Args:
      tables: [K, M] int32, candidates from old to new, NULL where nothing is held.
      ref_counts: [N] int32.

    Returns:
      [K + 1] int32: entry i is what candidates i and above give back together.
    """
    k, n = tables.shape[0], ref_counts.shape[0]
    candidate = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32)[:, None], tables.shape)
    named = jnp.zeros(n, jnp.int32).at[tables].add(1, mode="drop")
    oldest = jnp.full(n, NULL, jnp.int32).at[tables].min(candidate, mode="drop")
    alone = (named > 0) & (named == ref_counts)
    count = jnp.zeros(k, jnp.int32).at[jnp.where(alone, oldest, NULL)].add(1, mode="drop")
    return jnp.concatenate([jnp.cumsum(count[::-1])[::-1], jnp.zeros(1, jnp.int32)])


def preempt(
    config: SchedulerConfig,
    state: SchedulerState,
    order,
    running,
    need,
    available,
    num_running,
    pressed,
):
    """Preempt the fewest newest rows so that the others' new blocks fit.

    At most `max_preemptions` rows go in one step: their blocks are then a small table. Should
    even that not suffice, the rows in between are not scheduled and more go in the next step.

    Args (by rank): order, running, need: [S]; available, num_running: [] int32; pressed: [] bool.

    Returns:
      (state, keep): keep [] int32, ranks below it are scheduled. The oldest row is never
      preempted. keep is 0 when even it must wait a step for others to give blocks back.
    """
    blocks, s = state.blocks, config.num_rows
    k = min(config.max_preemptions, s)
    rank = jnp.arange(s, dtype=jnp.int32)
    first = jnp.maximum(num_running - k, 0)

    def choose(operand):
        *pool, _, _ = operand
        candidate = first + jnp.arange(k, dtype=jnp.int32)
        row = jnp.where(candidate < num_running, take(order, candidate, NULL), NULL)
        column = jnp.arange(config.max_blocks_per_seq)[None]
        tables = take(blocks.block_tables, row, NULL)
        held = take(blocks.num_blocks_held, row, 0)
        tables = jnp.where(column < held[:, None], tables, NULL)
        back = blocks_back(tables, blocks.ref_counts)
        back = back[jnp.clip(jnp.arange(s + 1) - first, 0, k)]
        demand = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(need)])
        # Demand grows and what comes back shrinks with the rank: those that fit are 0 .. keep.
        fits = (demand <= available + back) & (jnp.arange(s + 1) <= num_running)
        keep = fits.sum(dtype=jnp.int32) - 1
        cut = jnp.maximum(keep, 1)
        if config.max_beam_width:  # beams of one group go together, or stay
            start, end = group_bounds(state.rows, order, running)
            keep = jnp.where(keep < num_running, start[keep], keep)
            whole_first = jnp.where(start[first] == first, first, end[first])
            cut = jnp.maximum(jnp.maximum(keep, end[0]), whole_first)
        goes = candidate >= cut
        ids = jnp.where(goes[:, None], tables, NULL)
        return (*release(tuple(pool), state.prefix.slot, state.step, ids), keep, cut)

    counters = state.counters
    operand = (
        blocks.ref_counts,
        blocks.free_stack,
        blocks.num_free,
        blocks.last_use,
        counters.num_ref_errors,
        num_running,
        num_running,
    )
    *pool, keep, cut = when(config.use_cond, pressed, choose, operand)
    victim = running & (rank >= jnp.maximum(jnp.maximum(cut, 1), first))
    victim = jnp.zeros(s, bool).at[order].set(victim)

    def cleared(field):
        return jnp.where(victim, 0, field)

    empty = (blocks.num_blocks_held == 0) | victim
    ref_counts, free_stack, num_free, last_use, errors = pool
    blocks = dataclasses.replace(
        blocks,
        ref_counts=ref_counts,
        free_stack=free_stack,
        num_free=num_free,
        last_use=last_use,
        block_tables=jnp.where(empty[:, None], NULL, blocks.block_tables),
        num_blocks_held=cleared(blocks.num_blocks_held),
    )
    rows = state.rows
    rows = dataclasses.replace(
        rows,
        status=jnp.where(victim, Status.WAITING, rows.status),
        num_computed_tokens=cleared(rows.num_computed_tokens),
        num_cached_blocks=cleared(rows.num_cached_blocks),
    )
    counters = dataclasses.replace(
        counters,
        num_preemptions=counters.num_preemptions + victim.sum(dtype=jnp.int32),
        num_ref_errors=errors,
    )
    return dataclasses.replace(state, rows=rows, blocks=blocks, counters=counters), keep
