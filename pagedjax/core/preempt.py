"""Preemption: when running rows need more blocks than there are, some of them step back.

Victims drop their blocks and wait to be computed again, from the prefix cache where their blocks
survive there; or their blocks move to host memory and come back (`pagedjax.core.swap`). They keep
their place in the order of arrival.

Which rows: `pagedjax.core.policies.victim_order` puts the running rows in an order, and the fewest
at its end go. By default that is the order of arrival, so the newest step back.
"""

import dataclasses

import jax.numpy as jnp

from pagedjax.core.beam import group_bounds
from pagedjax.core.blocks import pool_of, release, with_pool
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.fork import writes_shared
from pagedjax.core.policies import victim_order, yielding
from pagedjax.core.ragged import take, when
from pagedjax.core.state import NULL, SchedulerState, Status
from pagedjax.core.swap import no_swap_out, plan_swap_out, swap_out


def blocks_back(tables, ref_counts):
    """How many blocks come back if the last candidates give theirs up.

    Exact with sharing: a block comes back when candidates are all its holders, and then as soon
    as the first of them goes, since the later ones are gone by then.

    Args:
      tables: [K, M] int32, candidates in victim order, NULL where nothing is held.
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
    grant,
    need,
    copies,
    held_back,
    available,
    num_running,
):
    """Preempt the fewest rows at the end of the victim order so that the others' new blocks fit,
    and those whose time slice is over.

    At most `max_preemptions` rows go in one step: their blocks are then a small table. Should
    even that not suffice, the rows in between are not scheduled and more go in the next step.

    Args (by rank): order: [S] int32, rank -> row; grant, need, copies: [S] int32, tokens, new
    blocks, and blocks to copy what is shared before it is written; available, num_running: []
    int32. By row: held_back: [S] bool, waits for a member of its group.

    Returns:
      (state, order, grant, need, pressed, out): ranks that stay in the step come first, in their
      order, and the others get nothing. The oldest row is never preempted; not even it is scheduled
      when it must wait a step for others to give blocks back. `pressed` [] bool: rows had to step
      back or aside, so nobody is to be admitted. `out`: which of them are swapped out, or None.
    """
    blocks, s = state.blocks, config.num_rows
    k = min(config.max_preemptions, s)
    rank = jnp.arange(s, dtype=jnp.int32)
    first = jnp.maximum(num_running - k, 0)
    yields = yielding(config, state, order, held_back, num_running)
    pressed = (need + copies).sum(dtype=jnp.int32) > available
    if yields is not None:
        pressed |= yields.any()

    def choose(operand):
        pool, order, grant, need, *_ = operand
        place = victim_order(config, state, order, num_running, yields)
        candidate = first + jnp.arange(k, dtype=jnp.int32)
        row = jnp.where(
            candidate < num_running, take(order, take(place, candidate, NULL), NULL), NULL
        )
        column = jnp.arange(config.max_blocks_per_seq)[None]
        tables = take(blocks.block_tables, row, NULL)
        held = take(blocks.num_blocks_held, row, 0)
        tables = jnp.where(column < held[:, None], tables, NULL)
        back = blocks_back(tables, blocks.ref_counts)
        back = back[jnp.clip(jnp.arange(s + 1) - first, 0, k)]
        # Who keeps a shared block depends on who is left, so nobody is counted as keeping one.
        demand = need + writes_shared(config, state, order, grant)
        demand = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(demand[place])])
        # Demand grows and what comes back shrinks along the order: those that fit are 0 .. keep.
        fits = (demand <= available + back) & (jnp.arange(s + 1) <= num_running)
        keep = fits.sum(dtype=jnp.int32) - 1
        if yields is not None:
            keep = jnp.minimum(keep, num_running - yields.sum(dtype=jnp.int32))
        cut = jnp.maximum(keep, 1)
        if config.max_beam_width:  # beams of one group go together, or stay
            start, end = group_bounds(state.rows, order[place], rank < num_running)
            keep = jnp.where(keep < num_running, start[keep], keep)
            whole_first = jnp.where(start[first] == first, first, end[first])
            cut = jnp.maximum(jnp.maximum(keep, end[0]), whole_first)
        goes = candidate >= cut
        ids = jnp.where(goes[:, None], tables, NULL)
        out = None
        if config.num_host_blocks:
            out, ids = plan_swap_out(config, state, row, goes, tables)
        pool = release(pool, state.prefix.slot, state.step, ids)
        victim = jnp.zeros(s, bool).at[jnp.where(goes, row, NULL)].set(True, mode="drop")
        stays = jnp.zeros(s, bool).at[place].set(rank < keep)
        # Those that stay come first, all others after them, both in their order.
        before = jnp.where(stays, jnp.cumsum(stays), keep + jnp.cumsum(~stays)) - 1
        moved = jnp.zeros(s, jnp.int32).at[before].set(rank)
        stays = stays[moved]
        grant, need = jnp.where(stays, grant[moved], 0), jnp.where(stays, need[moved], 0)
        return pool, order[moved], grant, need, victim, out

    operand = (pool_of(state), order, grant, need, jnp.zeros(s, bool), no_swap_out(config))
    yields_by_row = None if yields is None else jnp.zeros(s, bool).at[order].set(yields)
    pool, order, grant, need, victim, out = when(config.use_cond, pressed, choose, operand)
    num_computed = state.rows.num_computed_tokens
    state = _step_back(config, with_pool(state, pool), victim, yields_by_row)
    if out is not None:
        state = swap_out(config, state, out, num_computed)
    return state, order, grant, need, pressed, out


def _step_back(config: SchedulerConfig, state: SchedulerState, victim, yields):
    """Victims [S] bool lose their blocks and wait; those that yield ([S] bool, or None) go to the
    end of the queue. Clears what the tables name past the blocks that are held."""
    rows, blocks, counters = state.rows, state.blocks, state.counters

    def cleared(field):
        return jnp.where(victim, 0, field)

    early = victim & (rows.num_preemptions > 0) & (rows.num_tokens == rows.num_tokens_started)
    counters = dataclasses.replace(
        counters,
        num_preemptions=counters.num_preemptions + victim.sum(dtype=jnp.int32),
        num_early_preemptions=counters.num_early_preemptions + early.sum(dtype=jnp.int32),
    )
    turn = rows.turn
    if yields is not None:
        yields &= victim
        turn = jnp.where(yields, state.next_arrival, turn)
        num_yields = counters.num_yields + yields.sum(dtype=jnp.int32)
        counters = dataclasses.replace(counters, num_yields=num_yields)
    dropped = jnp.maximum(rows.num_tokens_dropped, rows.num_computed_tokens)
    rows = dataclasses.replace(
        rows,
        status=jnp.where(victim, Status.WAITING, rows.status),
        turn=turn,
        num_preemptions=rows.num_preemptions + victim.astype(jnp.int32),
        num_tokens_dropped=jnp.where(victim, dropped, rows.num_tokens_dropped),
        num_computed_tokens=cleared(rows.num_computed_tokens),
        num_cached_blocks=cleared(rows.num_cached_blocks),
    )
    empty = (blocks.num_blocks_held == 0) | victim
    blocks = dataclasses.replace(
        blocks,
        block_tables=jnp.where(empty[:, None], NULL, blocks.block_tables),
        num_blocks_held=cleared(blocks.num_blocks_held),
    )
    return dataclasses.replace(state, rows=rows, blocks=blocks, counters=counters)
