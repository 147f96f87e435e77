"""Swapping: a victim's blocks move to a pool in host memory, and come back when it is resumed.

A row that is swapped out keeps its tokens, its place in the queue and every block it held:

- blocks that others hold too stay where they are. The row keeps its entry in `block_tables` and the
  reference that goes with it, so they can be neither freed nor evicted;
- the others, whose last holders are victims of this step, move: the entry becomes NULL, and
  `SwapMap.host_tables` says where the copy lies. On the device such a block is free; or, if it is
  in the prefix index, cached and evictable, so that others can hit it until it is evicted.

So of the first `num_blocks_held` columns each has an entry in exactly one of the two tables. A
block that two victims of one step share and nobody else moves twice: each has its own copy then.

To be resumed, a row gets new blocks for the columns that moved and the copies go back, all of it
in one step. Bits are not changed on the way, so it goes on with the tokens it would have produced.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.core.beam import leaders
from pagedjax.core.blocks import make_room, pool_of, release, with_pool
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.pytree import pytree
from pagedjax.core.ragged import inverse, take, when
from pagedjax.core.state import NULL, SchedulerState, Status, SwapMap, Swaps


def _release_host(pool, ids):
    """`blocks.release` for the host pool: ids of any shape, NULL for none."""
    ref_counts, free_stack, num_free, errors = pool
    pool = (ref_counts, free_stack, num_free, jnp.zeros_like(ref_counts), errors)
    pool = release(pool, jnp.full_like(ref_counts, NULL), jnp.int32(0), ids)
    ref_counts, free_stack, num_free, _, errors = pool
    return ref_counts, free_stack, num_free, errors


def _host_pool(swap: SwapMap):
    """The tuple that `_release_host` works on."""
    return swap.ref_counts, swap.free_stack, swap.num_free, swap.num_ref_errors


def _with_host_pool(swap: SwapMap, pool, rows) -> SwapMap:
    """The map with `_host_pool`'s tuple put back, and the tables of rows [A] (NULL: none) empty."""
    ref_counts, free_stack, num_free, errors = pool
    return dataclasses.replace(
        swap,
        ref_counts=ref_counts,
        free_stack=free_stack,
        num_free=num_free,
        num_ref_errors=errors,
        host_tables=swap.host_tables.at[rows].set(NULL, mode="drop"),
    )


@pytree
class SwapOut:
    """Which victims are swapped out, and what moves. K candidates; L = K * M entries."""

    row_ids: jax.Array  #: [K] int32, NULL for those that are not
    tables: jax.Array  #: [K, M] int32: what is left of their block tables
    host_tables: jax.Array  #: [K, M] int32
    src: jax.Array  #: [L] int32: device blocks to copy, the first `count`
    dst: jax.Array  #: [L] int32: host blocks to copy them to
    count: jax.Array  #: [] int32


def no_swap_out(config: SchedulerConfig) -> SwapOut | None:
    """Nobody; None when there is no host pool."""
    if not config.num_host_blocks:
        return None
    k, m = min(config.max_preemptions, config.num_rows), config.max_blocks_per_seq
    null = jnp.full((k, m), NULL, jnp.int32)
    return SwapOut(
        row_ids=null[:, 0],
        tables=null,
        host_tables=null,
        src=null.ravel(),
        dst=null.ravel(),
        count=jnp.int32(0),
    )


def plan_swap_out(config: SchedulerConfig, state: SchedulerState, row, goes, tables):
    """Decide which victims are swapped out, and where to.

    Args (candidates in victim order): row: [K] int32; goes: [K] bool; tables: [K, M] int32, NULL
    where nothing is held.

    Returns:
      (SwapOut, ids [K, M] of the blocks that the victims give back).
    """
    swap = state.swap
    goes &= row != NULL
    going = jnp.where(goes[:, None], tables, NULL)
    named = jnp.zeros(config.num_blocks, jnp.int32).at[going].add(1, mode="drop")
    last = (going != NULL) & (take(named, going, 0) == take(state.blocks.ref_counts, going, -1))
    computed = jnp.where(goes, take(state.rows.num_computed_tokens, row, 0), 0)
    count = last.sum(1, dtype=jnp.int32)
    wants = goes & (computed > 0) & _swap_is_better(config, last, computed)
    if config.max_beam_width:  # beams wait for one another, and are computed again
        wants &= take(leaders(state.rows), row, NULL) == NULL
    # Host room goes to the first victims, which are the last in the order.
    need = jnp.where(wants, count, 0)
    wants &= jnp.cumsum(need[::-1])[::-1] <= swap.num_free
    moves = last & wants[:, None]
    flat = moves.ravel()
    place = jnp.cumsum(flat, dtype=jnp.int32) - 1
    host = take(swap.free_stack, jnp.where(flat, swap.num_free - 1 - place, NULL), NULL)
    at = jnp.where(flat, place, NULL)
    empty = jnp.full(flat.shape, NULL, jnp.int32)
    stays = jnp.where(moves, NULL, going)
    out = SwapOut(
        row_ids=jnp.where(wants, row, NULL),
        tables=jnp.where(wants[:, None], stays, NULL),
        host_tables=host.reshape(moves.shape),
        src=empty.at[at].set(going.ravel(), mode="drop"),
        dst=empty.at[at].set(host, mode="drop"),
        count=flat.sum(dtype=jnp.int32),
    )
    return out, jnp.where(wants[:, None] & ~moves, NULL, going)


def _swap_is_better(config: SchedulerConfig, last, computed):
    """[K] bool: moving the blocks out and in again costs less than computing them again.

    A token's recomputation costs `recompute_cost_per_token`, and `recompute_cost_per_context` more
    for each token before it (attention). Blocks that others hold need neither.
    """
    if config.preemption_mode != "auto":
        return jnp.full(computed.shape, config.preemption_mode == "swap")
    b = config.block_size
    start = jnp.arange(config.max_blocks_per_seq, dtype=jnp.int32)[None] * b
    tokens = jnp.where(last, jnp.clip(computed[:, None] - start, 0, b), 0).astype(jnp.float32)
    context = tokens * (start + 0.5 * tokens)
    recompute = config.recompute_cost_per_token * tokens.sum(1)
    recompute += config.recompute_cost_per_context * context.sum(1)
    return last.sum(1) * jnp.float32(2 * config.swap_cost_per_block) < recompute


def swap_out(config: SchedulerConfig, state: SchedulerState, out: SwapOut, num_computed):
    """Put the decision into the state, after the victims have been cleared as for recomputation.

    Args:
      num_computed: [S] int32, what the rows had computed.
    """
    rows, blocks, swap, counters = state.rows, state.blocks, state.swap, state.counters
    found, which = inverse(out.row_ids, config.num_rows)
    held = ((out.tables != NULL) | (out.host_tables != NULL)).sum(1, dtype=jnp.int32)
    rows = dataclasses.replace(
        rows,
        status=jnp.where(found, Status.SWAPPED, rows.status),
        num_computed_tokens=jnp.where(found, num_computed, rows.num_computed_tokens),
        num_tokens_dropped=jnp.where(found, 0, rows.num_tokens_dropped),
    )
    blocks = dataclasses.replace(
        blocks,
        block_tables=blocks.block_tables.at[out.row_ids].set(out.tables, mode="drop"),
        num_blocks_held=jnp.where(found, held[which], blocks.num_blocks_held),
    )
    swap = dataclasses.replace(
        swap,
        ref_counts=swap.ref_counts.at[out.dst].set(1, mode="drop"),
        num_free=swap.num_free - out.count,
        host_tables=swap.host_tables.at[out.row_ids].set(out.host_tables, mode="drop"),
    )
    counters = dataclasses.replace(
        counters,
        num_swaps_out=counters.num_swaps_out + found.sum(dtype=jnp.int32),
        num_blocks_swapped_out=counters.num_blocks_swapped_out + out.count,
    )
    return dataclasses.replace(state, rows=rows, blocks=blocks, swap=swap, counters=counters)


def num_moved(config: SchedulerConfig, state: SchedulerState, row_ids):
    """[A] int32: blocks of each row that lie in the host pool."""
    if not config.num_host_blocks:
        return jnp.zeros(row_ids.shape, jnp.int32)
    return (state.swap.host_tables[row_ids] != NULL).sum(1, dtype=jnp.int32)


def swap_in(config: SchedulerConfig, state: SchedulerState, row_ids):
    """Give admitted rows that were swapped out blocks for what moved, and plan the copies.

    `admit` has made sure that there are enough blocks, and that no more than
    `max_swap_in_blocks` come back.

    Args:
      row_ids: [A] int32, NULL where there is none.

    Returns:
      (state, src [C], dst [C], count): host and device blocks of the copies, the first `count`.
    """
    most = config.swap_in_capacity
    null = jnp.full(most, NULL, jnp.int32)
    nothing = (null, null, null, jnp.int32(0), jnp.zeros(row_ids.shape, jnp.int32))

    def gather(_):
        host = take(state.swap.host_tables, row_ids, NULL)
        flat = (host != NULL).ravel()
        place = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, NULL)
        column = jnp.broadcast_to(jnp.arange(host.shape[1], dtype=jnp.int32), host.shape)
        row = jnp.broadcast_to(row_ids[:, None], host.shape)
        src, row, column = (null.at[place].set(x.ravel(), mode="drop") for x in (host, row, column))
        # What stayed behind is a run from the beginning, as far as it is cached.
        whole = jnp.cumprod(host == NULL, 1).sum(1, dtype=jnp.int32)
        return src, row, column, flat.sum(dtype=jnp.int32), whole

    any_row = (row_ids != NULL).any()
    src, row, column, count, whole = when(config.use_cond, any_row, gather, nothing)
    blocks, prefix, num_evicted = make_room(
        config, state.blocks, state.prefix, state.step, count, most
    )
    entry = jnp.arange(most, dtype=jnp.int32)
    dst = take(blocks.free_stack, jnp.where(entry < count, blocks.num_free - 1 - entry, NULL), NULL)
    blocks = dataclasses.replace(
        blocks,
        ref_counts=blocks.ref_counts.at[dst].set(1, mode="drop"),
        num_free=blocks.num_free - count,
        block_tables=blocks.block_tables.at[row, column].set(dst, mode="drop"),
    )
    cached = state.rows.num_cached_blocks.at[row_ids].min(whole, mode="drop")
    counters = dataclasses.replace(
        state.counters,
        num_evictions=state.counters.num_evictions + num_evicted,
        num_swaps_in=state.counters.num_swaps_in + (row_ids != NULL).sum(dtype=jnp.int32),
        num_blocks_swapped_in=state.counters.num_blocks_swapped_in + count,
    )
    state = dataclasses.replace(
        state,
        rows=dataclasses.replace(state.rows, num_cached_blocks=cached),
        blocks=blocks,
        prefix=prefix,
        swap=_with_host_pool(state.swap, _release_host(_host_pool(state.swap), src), row_ids),
        counters=counters,
    )
    return state, src, dst, count


def retire_host(config: SchedulerConfig, state: SchedulerState, out) -> SchedulerState:
    """Rows [S] bool that leave the table give their host blocks back."""
    if not config.num_host_blocks:
        return state
    k = min(config.max_retirements, config.num_rows)
    swap, which = state.swap, jnp.nonzero(out, size=k, fill_value=NULL)[0].astype(jnp.int32)
    pool = when(
        config.use_cond,
        out.any() & (swap.num_free < config.num_host_blocks),
        lambda pool: _release_host(pool, take(swap.host_tables, which, NULL)),
        _host_pool(swap),
    )
    # A table that is cleared must have been read by then, or it is copied.
    which = jnp.where(pool[2] >= swap.num_free, which, NULL)
    return dataclasses.replace(state, swap=_with_host_pool(swap, pool, which))


def drop_swapped(config: SchedulerConfig, state: SchedulerState) -> SchedulerState:
    """When nothing at all could be scheduled, because of blocks that rows swapped out still hold
    on the device: the newest such rows give up everything and wait to be recomputed, at most
    `max_preemptions` a step."""
    if not config.num_host_blocks:
        return state
    k = min(config.max_preemptions, config.num_rows)
    swapped = state.rows.status == Status.SWAPPED

    def choose(operand):
        pool, host_pool, _ = operand
        key = jnp.where(swapped, state.rows.arrival, -1)
        value, which = jax.lax.top_k(key, k)
        which = jnp.where(value >= 0, which, NULL).astype(jnp.int32)
        column = jnp.arange(config.max_blocks_per_seq)[None]
        held = take(state.blocks.num_blocks_held, which, 0)[:, None]
        ids = jnp.where(column < held, take(state.blocks.block_tables, which, NULL), NULL)
        pool = release(pool, state.prefix.slot, state.step, ids)
        return pool, _release_host(host_pool, take(state.swap.host_tables, which, NULL)), which

    operand = (pool_of(state), _host_pool(state.swap), jnp.full(k, NULL, jnp.int32))
    needed = state.swap.stuck & swapped.any()
    pool, host_pool, which = when(config.use_cond, needed, choose, operand)
    swap = _with_host_pool(state.swap, host_pool, which)
    out = jnp.zeros(config.num_rows, bool).at[which].set(True, mode="drop")
    rows = state.rows
    dropped = jnp.where(out, rows.num_computed_tokens, rows.num_tokens_dropped)
    rows = dataclasses.replace(
        rows,
        status=jnp.where(out, Status.WAITING, rows.status),
        num_tokens_dropped=dropped,
        num_computed_tokens=jnp.where(out, 0, rows.num_computed_tokens),
        num_cached_blocks=jnp.where(out, 0, rows.num_cached_blocks),
    )
    blocked = jnp.where(needed, NULL, state.blocked_arrival)  # to be tried anew
    state = with_pool(
        dataclasses.replace(state, rows=rows, swap=swap, blocked_arrival=blocked),
        pool,
        num_blocks_held=jnp.where(out, 0, state.blocks.num_blocks_held),
    )
    dropped = state.counters.num_swaps_dropped + out.sum(dtype=jnp.int32)
    counters = dataclasses.replace(state.counters, num_swaps_dropped=dropped)
    return dataclasses.replace(state, counters=counters)


def note_stuck(config: SchedulerConfig, state: SchedulerState, grant, num_preemptions):
    """Remember whether this step could do nothing though nobody gave anything back; see
    `drop_swapped`. `num_preemptions` [] int32: before the step."""
    if not config.num_host_blocks:
        return state
    status = state.rows.status
    stuck = (grant.sum(dtype=jnp.int32) == 0) & (status == Status.SWAPPED).any()
    stuck &= state.counters.num_preemptions == num_preemptions
    stuck &= ~(status == Status.FINISHED).any()  # those give blocks back in the next steps
    return dataclasses.replace(state, swap=dataclasses.replace(state.swap, stuck=stuck))


def swaps_of(out: SwapOut, back) -> Swaps:
    """What the plan says of `plan_swap_out`'s decision and of `swap_in`'s (src, dst, count)."""
    in_src, in_dst, num_in = back
    return Swaps(
        out_src=out.src,
        out_dst=out.dst,
        num_out=out.count,
        in_src=in_src,
        in_dst=in_dst,
        num_in=num_in,
    )
