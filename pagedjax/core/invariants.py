"""What must hold of every state, as a pure function: jit it, vmap it, run it after every step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.pytree import pytree
from pagedjax.core.ragged import cdiv, take
from pagedjax.core.state import NULL, ROOT, Plan, SchedulerState, Status


@pytree
class Violations:
    """How many times each invariant is broken; all [] int32, all zero in a sound state."""

    ref_counts: jax.Array  #: blocks whose count is not the number of table entries naming them
    free_stack: jax.Array  #: blocks twice on the stack, or on it while held or cached
    coverage: jax.Array  #: blocks neither free, nor held, nor cached: leaked
    duplicates: jax.Array  #: table entries that name a block their row already names
    sentinels: jax.Array  #: NULL within, or not NULL past, `num_blocks_held`
    holdings: jax.Array  #: rows that hold more or fewer blocks than their tokens need
    lengths: jax.Array  #: rows without computed <= num_tokens <= max_model_len
    idle_rows: jax.Array  #: EMPTY or WAITING rows that hold blocks, on the device or the host
    host_pool: jax.Array  #: host blocks with a wrong count, twice free, free and held, or leaked
    host_tables: jax.Array  #: columns of a row on the host and the device, or out of range
    concurrency: jax.Array  #: running rows beyond `max_num_seqs`
    index: jax.Array  #: index entries that do not point at their block and back, or twin hashes
    parents: jax.Array  #: cached blocks whose parent is not cached, or is held less than they are
    cached_tokens: jax.Array  #: registered blocks of a row that differ from the row's tokens
    ref_errors: jax.Array  #: releases that would have gone below zero, since the start
    # Between `schedule` and `commit` only:
    budget: jax.Array  #: scheduled tokens beyond the step's budget
    written: jax.Array  #: slots written twice, or in a block that is shared or cached
    plan: jax.Array  #: scheduled rows that do not hold exactly the blocks their step needs


def _count(mask):
    return jnp.sum(mask, dtype=jnp.int32)


def check_invariants(
    state: SchedulerState, *, config: SchedulerConfig, plan: Plan | None = None
) -> Violations:
    """Count the violations of each invariant.

    Args:
      state: after `commit`, or after `schedule` together with the `plan` it returned.
    """
    held = jnp.arange(config.max_blocks_per_seq)[None] < state.blocks.num_blocks_held[:, None]
    return Violations(
        **_check_pool(config, state, held),
        **_check_rows(config, state, held, between=plan is not None),
        **_check_host(config, state, held),
        **_check_index(config, state, held),
        **_check_plan(config, state, plan),
    )


def _check_pool(config, state, held):
    blocks, n = state.blocks, config.num_blocks
    tables = jnp.where(held, blocks.block_tables, NULL)
    named = jnp.zeros(n, jnp.int32).at[tables].add(1, mode="drop")
    on_stack = jnp.arange(n) < blocks.num_free
    stack = jnp.where(on_stack, blocks.free_stack, NULL)
    times_free = jnp.zeros(n, jnp.int32).at[stack].add(1, mode="drop")
    cached = state.prefix.slot != NULL
    taken = (blocks.ref_counts > 0) | cached
    bad_entry = on_stack & ((blocks.free_stack < 0) | (blocks.free_stack >= n))
    sorted_tables = jnp.sort(tables, axis=1)
    same = (sorted_tables[:, 1:] == sorted_tables[:, :-1]) & (sorted_tables[:, 1:] != NULL)
    inside = (blocks.block_tables >= 0) & (blocks.block_tables < n)
    return {
        "ref_counts": _count(named != blocks.ref_counts),
        "free_stack": _count((times_free > 1) | ((times_free > 0) & taken)) + _count(bad_entry),
        "coverage": _count((times_free == 0) & ~taken),
        "duplicates": _count(same),
        "sentinels": _count(
            jnp.where(held & ~_on_host(config, state), ~inside, blocks.block_tables != NULL)
        ),
        "ref_errors": state.counters.num_ref_errors,
    }


def _check_rows(config, state, held, between):
    rows, blocks = state.rows, state.blocks
    running, finished = rows.status == Status.RUNNING, rows.status == Status.FINISHED
    swapped = rows.status == Status.SWAPPED
    live = running | finished | swapped | (rows.status == Status.WAITING)
    num_held = blocks.num_blocks_held
    needed = cdiv(rows.num_computed_tokens, config.block_size)
    exact = num_held == needed
    if config.kv_cache == "contiguous":
        exact = num_held == config.max_blocks_per_seq
    elif config.kv_cache == "none":
        exact = (num_held >= needed) & (num_held <= cdiv(rows.num_tokens, config.block_size))
    bad_length = (rows.num_computed_tokens > rows.num_tokens) | (rows.num_computed_tokens < 0)
    bad_length |= (rows.num_tokens > config.max_model_len) & (rows.error == 0)
    excess = jnp.maximum(_count(running) - config.max_num_seqs, 0)
    # Between schedule and commit a row also holds the blocks its scheduled tokens need.
    wrong = (num_held > 0) & ~exact & ~jnp.asarray(between)
    return {
        "holdings": _count((running | finished | swapped) & wrong)
        + _count(swapped & (rows.num_computed_tokens < 1)),
        "lengths": _count(live & bad_length),
        "idle_rows": _count(~running & ~finished & ~swapped & (num_held > 0))
        + _count(~finished & ~swapped & _on_host(config, state).any(1)),
        "concurrency": excess,
    }


def _on_host(config, state):
    """[S, M] bool: the column's block lies in the host pool."""
    if not config.num_host_blocks:
        return jnp.zeros(state.blocks.block_tables.shape, bool)
    return state.swap.host_tables != NULL


def _check_host(config, state, held):
    n, swap = config.num_host_blocks, state.swap
    if not n:
        zero = jnp.int32(0)
        return {"host_pool": zero, "host_tables": zero}
    named = jnp.zeros(n, jnp.int32).at[swap.host_tables].add(1, mode="drop")
    stack = jnp.where(jnp.arange(n) < swap.num_free, swap.free_stack, NULL)
    times_free = jnp.zeros(n, jnp.int32).at[stack].add(1, mode="drop")
    bad_entry = (stack != NULL) & ((stack < 0) | (stack >= n))
    bad = (named != swap.ref_counts) | (named > 1) | (times_free + named != 1)
    there = _on_host(config, state)
    inside = (swap.host_tables >= 0) & (swap.host_tables < n)
    wrong = there & (~inside | ~held | (state.blocks.block_tables != NULL))
    return {
        "host_pool": _count(bad) + _count(bad_entry) + swap.num_ref_errors,
        "host_tables": _count(wrong),
    }


def _check_index(config, state, held):
    rows, prefix, blocks = state.rows, state.prefix, state.blocks
    n = config.num_blocks
    cached = prefix.slot != NULL
    flat_hash, flat_block = prefix.bucket_hashes.ravel(), prefix.bucket_blocks.ravel()
    there = take(flat_block, prefix.slot, NULL) == jnp.arange(n)
    filled = flat_block != NULL
    hashes = jnp.where(prefix.bucket_blocks != NULL, prefix.bucket_hashes, 0)
    ordered = jnp.sort(hashes, axis=1)
    twins = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != 0)
    index = _count(cached & ~there) + jnp.abs(_count(filled) - _count(cached))
    index += _count(filled != (flat_hash != 0)) + _count(twins)

    parent = prefix.parent
    inner = cached & (parent != ROOT)
    parent_ok = (take(prefix.slot, parent, NULL) != NULL) & (
        take(prefix.depth, parent, -1) + 1 == prefix.depth
    )
    parent_ok &= take(blocks.ref_counts, parent, 0) >= (blocks.ref_counts > 0)
    bad_root = cached & (parent == ROOT) & (prefix.depth != 0)

    s, m, b = config.num_rows, config.max_blocks_per_seq, config.block_size
    registered = jnp.arange(m)[None] < rows.num_cached_blocks[:, None]
    registered &= held
    tokens = take(prefix.tokens, blocks.block_tables, -2)
    equal = (tokens == rows.token_ids.reshape(s, m, b)).all(-1)
    equal &= take(prefix.slot, blocks.block_tables, NULL) != NULL
    equal &= take(prefix.salt, blocks.block_tables, 0) == rows.salt[:, None]
    before = jnp.concatenate([jnp.full((s, 1), ROOT), blocks.block_tables[:, :-1]], 1)
    equal &= take(prefix.parent, blocks.block_tables, NULL) == before
    running = rows.status == Status.RUNNING
    full = rows.num_computed_tokens // b
    too_many = running & (rows.num_cached_blocks > full)
    return {
        "index": index,
        "parents": _count(inner & ~parent_ok) + _count(bad_root),
        "cached_tokens": _count(registered & running[:, None] & ~equal) + _count(too_many),
    }


def _check_plan(config, state, plan):
    if plan is None:
        zero = jnp.int32(0)
        return {"budget": zero, "written": zero, "plan": zero}
    rows, blocks, b = state.rows, state.blocks, config.block_size
    t = plan.token_ids.shape[0]
    slots = plan.slot_mapping
    real = slots != NULL
    ordered = jnp.sort(slots)
    twice = _count((ordered[1:] == ordered[:-1]) & (ordered[1:] != NULL))
    block = jnp.where(real, slots // b, NULL)
    shared = real & (take(blocks.ref_counts, block, 0) != 1)
    cached = real & (take(state.prefix.slot, block, NULL) != NULL)
    total = plan.query_start_loc[-1]
    scheduled = plan.row_ids != NULL
    row = jnp.where(scheduled, plan.row_ids, 0)
    after = rows.num_computed_tokens[row] + plan.num_scheduled_tokens
    held, needed = blocks.num_blocks_held[row], cdiv(after, b)
    wrong = held != needed if config.kv_cache == "paged" else held < needed
    wrong |= rows.status[row] != Status.RUNNING
    wrong |= (after > rows.num_tokens[row]) | (plan.num_scheduled_tokens < 1)
    if plan.swaps is not None:
        back = jnp.arange(plan.swaps.in_dst.shape[0]) < plan.swaps.num_in
        dst = jnp.where(back, plan.swaps.in_dst, NULL)
        shared = jnp.concatenate([shared, back & (take(blocks.ref_counts, dst, 0) != 1)])
        cached = jnp.concatenate([cached, back & (take(state.prefix.slot, dst, 0) != NULL)])
    return {
        "budget": jnp.maximum(total - t, 0),
        "written": twice + _count(shared) + _count(cached) + jnp.abs(_count(real) - total),
        "plan": _count(scheduled & wrong),
    }


def assert_invariants(violations: Violations) -> None:
    """Raise AssertionError naming every broken invariant and how often. Host side only."""
    counts = {
        f.name: np.asarray(getattr(violations, f.name)) for f in dataclasses.fields(violations)
    }
    broken = {name: int(c.sum()) for name, c in counts.items() if (c != 0).any()}
    if broken:
        raise AssertionError(f"broken invariants: {broken}")
