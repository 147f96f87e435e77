"""Preemption: when running rows need more blocks than there are, the newest ones step back.

Victims drop their blocks and wait to be computed again, from the prefix cache where their blocks
survive there. They keep their place in the order of arrival, so they come back first.

A policy decides two things here and nowhere else: in which order rows are victims (a suffix of
the rank order: the newest) and what becomes of their blocks (recomputation: `release`).
"""

import dataclasses

import jax.numpy as jnp

from pagedjax.core.blocks import release
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.ragged import when
from pagedjax.core.state import NULL, SchedulerState, Status


def blocks_back(num_blocks: int, tables, rank):
    """[S + 1] int32: entry k is how many blocks come back if ranks k and above give theirs up.

    Exact with sharing: a block comes back when its oldest holder goes, since holders that are
    newer are gone by then. Rows that still hold blocks but do not run have rank -1 and keep them.

    Args:
      tables: [S, M] int32, NULL where nothing is held. rank: [S] int32 by row.
    """
    s = rank.shape[0]
    holder = jnp.broadcast_to(rank[:, None], tables.shape)
    oldest = jnp.full(num_blocks, NULL, jnp.int32).at[tables].min(holder, mode="drop")
    place = jnp.where(oldest < 0, NULL, oldest)
    per_rank = jnp.zeros(s, jnp.int32).at[place].add(1, mode="drop")
    return jnp.concatenate([jnp.cumsum(per_rank[::-1])[::-1], jnp.zeros(1, jnp.int32)])


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

    Args (by rank): order, running, need: [S]; available, num_running: [] int32; pressed: [] bool.

    Returns:
      (state, keep): keep [] int32, ranks below it are scheduled. The oldest row is never
      preempted. keep is 0 when even it must wait a step for ended rows to give blocks back.
    """
    blocks, s = state.blocks, config.num_rows
    rank = jnp.arange(s, dtype=jnp.int32)

    def choose(operand):
        ref_counts, free_stack, num_free, last_use, errors, _ = operand
        tables = jnp.where((blocks.num_blocks_held > 0)[:, None], blocks.block_tables, NULL)
        rank_of_row = jnp.full(s, -1, jnp.int32).at[order].set(jnp.where(running, rank, -1))
        back = blocks_back(config.num_blocks, tables, rank_of_row)
        demand = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(need)])
        # Demand grows and what comes back shrinks with k: those that fit are 0 .. keep.
        fits = (demand <= available + back) & (jnp.arange(s + 1) <= num_running)
        keep = fits.sum(dtype=jnp.int32) - 1
        victim = rank_of_row >= jnp.maximum(keep, 1)
        ids = jnp.where(victim[:, None], tables, NULL)
        pool = (ref_counts, free_stack, num_free, last_use, errors)
        return (*release(pool, state.prefix.slot, state.step, ids), keep)

    counters = state.counters
    operand = (
        blocks.ref_counts,
        blocks.free_stack,
        blocks.num_free,
        blocks.last_use,
        counters.num_ref_errors,
        num_running,
    )
    *pool, keep = when(config.use_cond, pressed, choose, operand)
    victim = running & (rank >= jnp.maximum(keep, 1))
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
