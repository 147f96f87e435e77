"""Entering newly full blocks into the prefix index."""

import dataclasses

import jax.numpy as jnp

from pagedjax.core.blocks import release
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.prefix import confirm, lookup
from pagedjax.core.ragged import expand, take
from pagedjax.core.state import NULL, ROOT, SchedulerState, Status


def _prefix_and(ok, offset):
    """Segmented "and": true while every entry of the same owner so far is true. [R'] bool."""
    bad = jnp.cumsum(~ok, dtype=jnp.int32)
    start = jnp.arange(ok.shape[0]) - offset
    before = jnp.where(start > 0, bad[jnp.maximum(start - 1, 0)], 0)
    return bad == before


def _places(config: SchedulerConfig, prefix, hashes, fresh):
    """Where fresh entries go: (flat slot, fits, twin).

    An entry's rank among the fresh entries of its bucket picks the rank-th empty way, so no two
    claim one slot. `fits` is False when the bucket is full (the block stays uncached for now).
    `twin`: an earlier fresh entry has the same hash.
    """
    entry = jnp.arange(hashes.shape[0])
    bucket = (hashes & jnp.uint32(config.num_index_buckets - 1)).astype(jnp.int32)
    earlier = (entry[None] < entry[:, None]) & fresh[None]
    twin = (earlier & (hashes[None] == hashes[:, None])).any(1)
    rank = (earlier & (bucket[None] == bucket[:, None])).sum(1, dtype=jnp.int32)
    empty = jnp.cumsum(prefix.bucket_blocks[bucket] == NULL, 1, dtype=jnp.int32)
    way = jnp.argmax(empty == (rank + 1)[:, None], 1).astype(jnp.int32)
    return bucket * config.index_ways + way, empty[:, -1] > rank, twin


def register(config: SchedulerConfig, state: SchedulerState, num_tokens: int) -> SchedulerState:
    """Enter full blocks that are not in the index yet, each row's in order.

    Per block, one of:
    - an equal block is cached already: the row takes that one and gives its own back, so that the
      registered prefix of a row always consists of the index's own blocks (parents by identity);
    - not found: it enters;
    - same hash as an earlier entry of this very call: it waits a step and is an ordinary hit then;
    - found but not equal, a hash collision: the row stops caching;
    - no room in the bucket, or more blocks than `max_registrations`: it waits.
    """
    rows, blocks, prefix = state.rows, state.blocks, state.prefix
    s, m, b = config.num_rows, config.max_blocks_per_seq, config.block_size
    live = (rows.status == Status.RUNNING) | (rows.status == Status.FINISHED)
    full = jnp.minimum(rows.num_computed_tokens // b, blocks.num_blocks_held)
    pending = jnp.where(live & ~rows.chain_broken, full - rows.num_cached_blocks, 0)
    pending = jnp.maximum(pending, 0)
    row, offset, valid = expand(pending, config.max_registrations(num_tokens))
    j = jnp.where(valid, rows.num_cached_blocks[row] + offset, 0)
    own = jnp.where(valid, blocks.block_tables[row, j], NULL)
    hashes, salts = rows.block_hashes[row, j], rows.salt[row]
    tokens = rows.token_ids.reshape(s, m, b)[row, j]
    found = jnp.where(valid, lookup(config, prefix, hashes), NULL)

    before = jnp.where(j == 0, ROOT, blocks.block_tables[row, jnp.maximum(j - 1, 0)])
    parent_if_hit = jnp.where(offset == 0, before, jnp.roll(found, 1))
    hit = valid & confirm(prefix, found, parent_if_hit, salts, tokens)
    hit = _prefix_and(hit | ~valid, offset) & valid
    fresh = valid & (found == NULL)
    slot, fits, twin = _places(config, prefix, hashes, fresh)
    ok = _prefix_and(hit | (fresh & ~twin & fits), offset) & valid
    new = ok & ~hit
    parent = jnp.where((offset > 0) & jnp.roll(hit, 1), jnp.roll(found, 1), before)
    first_failure = valid & ~ok & jnp.where(offset == 0, True, jnp.roll(ok, 1))
    collided = first_failure & (found != NULL)

    prefix = _enter(prefix, jnp.where(new, own, NULL), slot, parent, j, salts, tokens, hashes)
    taken = jnp.where(hit, found, NULL)
    pool = (
        blocks.ref_counts.at[taken].add(1, mode="drop"),
        blocks.free_stack,
        blocks.num_free,
        blocks.last_use,
        state.counters.num_ref_errors,
    )
    given_back = jnp.where(hit, own, NULL)
    *pool, errors = release(pool, state.prefix.slot, state.step, given_back)
    # The column depends on `own`, a read of the table: that lets XLA write the table in place.
    column = jnp.where(hit & (own >= 0), j, NULL)
    blocks = dataclasses.replace(
        blocks,
        **dict(zip(("ref_counts", "free_stack", "num_free", "last_use"), pool, strict=True)),
        block_tables=blocks.block_tables.at[row, column].set(taken, mode="drop"),
    )
    broken_row = jnp.where(collided, row, NULL)
    rows = dataclasses.replace(
        rows,
        num_cached_blocks=rows.num_cached_blocks.at[row].add(ok.astype(jnp.int32)),
        chain_broken=rows.chain_broken.at[broken_row].set(True, mode="drop"),
    )
    counters = dataclasses.replace(state.counters, num_ref_errors=errors)
    return dataclasses.replace(state, rows=rows, blocks=blocks, prefix=prefix, counters=counters)


def _enter(prefix, ids, slot, parent, depth, salts, tokens, hashes):
    """Write the entries of blocks `ids` (NULL: none) at `slot` of the flattened table."""
    slot = jnp.where(ids != NULL, slot, NULL)

    def put(field, value):
        return field.at[ids].set(value, mode="drop")

    def put_flat(table, value):
        return table.ravel().at[slot].set(value, mode="drop").reshape(table.shape)

    behind = jnp.where((ids != NULL) & (parent != ROOT), parent, NULL)
    older, newest = _siblings(prefix, ids, behind)
    return dataclasses.replace(
        prefix,
        bucket_hashes=put_flat(prefix.bucket_hashes, hashes),
        bucket_blocks=put_flat(prefix.bucket_blocks, ids),
        slot=put(prefix.slot, slot),
        parent=put(prefix.parent, parent),
        depth=put(prefix.depth, depth),
        salt=put(prefix.salt, salts),
        tokens=put(prefix.tokens, tokens),
        last_child=prefix.last_child.at[newest].set(ids, mode="drop"),
        older_sibling=put(prefix.older_sibling, older),
    )


def _siblings(prefix, ids, behind):
    """Link new blocks into their parents' lists of children.

    Returns:
      older [R'] int32: the child registered before this one, in this call or earlier, or NULL.
      newest [R'] int32: the parent, for its last new child in this call; NULL for the others, so
        that exactly one entry writes `last_child`.
    """
    entry = jnp.arange(ids.shape[0])
    same = (behind[None] == behind[:, None]) & (behind != NULL)[None]
    earlier = jnp.where(same & (entry[None] < entry[:, None]), entry[None], -1).max(1)
    later = (same & (entry[None] > entry[:, None])).any(1)
    older = jnp.where(earlier >= 0, ids[earlier], take(prefix.last_child, behind, NULL))
    return older, jnp.where(later, NULL, behind)
