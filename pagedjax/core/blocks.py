"""The block pool: a stack of free blocks and exact reference counts.

Taking and giving back are O(1) per block. A block that nobody holds is either on the free stack or
still cached (it is in the prefix index and can be hit again); `evict` turns the oldest of those
into free blocks.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.ragged import take
from pagedjax.core.state import NULL, BlockPool, PrefixIndex, SchedulerState

SORTED_POOL = 4096
"""Most blocks of a pool whose keys are sorted to find what to evict. Measured on one CPU core, sort
against three histograms: 2 against 27 us for 128 blocks, 12 against 39 for 1,024, 47 against 81 for
4,096. Under `vmap`, where this is computed in every step, it decides the speed of small pools."""


def evictable_mask(blocks: BlockPool, prefix: PrefixIndex):
    """[N] bool: cached, and held by nobody."""
    return (blocks.ref_counts == 0) & (prefix.slot != NULL)


def num_evictable(blocks: BlockPool, prefix: PrefixIndex):
    """[] int32: blocks that `evict` could free."""
    return evictable_mask(blocks, prefix).sum(dtype=jnp.int32)


def pool_of(state: SchedulerState):
    """The tuple that `blocks.release` works on."""
    blocks = state.blocks
    return (
        blocks.ref_counts,
        blocks.free_stack,
        blocks.num_free,
        blocks.last_use,
        state.counters.num_ref_errors,
    )


def with_pool(state: SchedulerState, pool, **block_fields) -> SchedulerState:
    """The state with `pool_of`'s tuple put back."""
    ref_counts, free_stack, num_free, last_use, errors = pool
    blocks = dataclasses.replace(
        state.blocks,
        ref_counts=ref_counts,
        free_stack=free_stack,
        num_free=num_free,
        last_use=last_use,
        **block_fields,
    )
    counters = dataclasses.replace(state.counters, num_ref_errors=errors)
    return dataclasses.replace(state, blocks=blocks, counters=counters)


def release(pool, slot, step, ids):
    """Drop one reference per entry of `ids`.

    Blocks that reach zero and are not cached go on the free stack; cached ones only become
    evictable. Several entries may name one block: the last of them pushes it.

    Args:
      pool: (ref_counts [N], free_stack [N], num_free [], last_use [N], num_ref_errors []).
      slot: [N] int32, `PrefixIndex.slot`.
      step: [] int32, stamped as the blocks' last use. All blocks of a row are stamped alike, so
        (age, depth) orders a chain's tail before its head.
      ids: int32 block ids of any shape, NULL for none.

    Returns:
      The pool's tuple. A count that would go below zero is counted in num_ref_errors.
    """
    ref_counts, free_stack, num_free, last_use, errors = pool
    ids = ids.ravel()
    n = ref_counts.shape[0]
    entry = jnp.arange(ids.shape[0], dtype=jnp.int32)
    ref_counts = ref_counts.at[ids].add(-1, mode="drop")
    last_use = last_use.at[ids].set(step, mode="drop")
    pusher = jnp.full(n, -1, jnp.int32).at[ids].max(entry, mode="drop")
    left = take(ref_counts, ids, 1)
    last = take(pusher, ids, -1) == entry
    push = (left == 0) & (take(slot, ids, 0) == NULL) & last
    place = jnp.where(push, num_free + jnp.cumsum(push, dtype=jnp.int32) - 1, NULL)
    free_stack = free_stack.at[place].set(ids, mode="drop")
    errors = errors + ((left < 0) & last).sum(dtype=jnp.int32)
    return ref_counts, free_stack, num_free + push.sum(dtype=jnp.int32), last_use, errors


def _radix_select(key, count):
    """[] int32: the `count`-th largest of `key` [N] (negative entries do not count), by three
    histograms of 11 bits each."""
    threshold, want = jnp.int32(0), count
    for shift in (22, 11, 0):
        same = key >= 0
        if shift < 22:
            same &= (key >> (shift + 11)) == (threshold >> (shift + 11))
        digit = jnp.where(same, (key >> shift) & 2047, NULL)
        histogram = jnp.zeros(2048, jnp.int32).at[digit].add(1, mode="drop")
        at_least = jnp.cumsum(histogram[::-1])[::-1]
        chosen = jnp.maximum((at_least >= want).sum(dtype=jnp.int32) - 1, 0)
        want = want - take(at_least, chosen + 1, 0)
        threshold = threshold | (chosen << shift)
    return threshold


def select_victims(config: SchedulerConfig, blocks, prefix, step, count, capacity: int):
    """The `count` evictable blocks with the greatest (age, depth).

    Exact least-recently-used order, tails of a chain before its head. The age saturates, so it
    cannot overflow into the sign and never disturbs the order of parent and child.

    Returns:
      [capacity] int32 block ids, NULL padded.
    """
    able = evictable_mask(blocks, prefix)
    depth_bits = max(1, (config.max_blocks_per_seq - 1).bit_length())
    age = jnp.minimum(step - blocks.last_use, (1 << (31 - depth_bits)) - 1)
    key = jnp.where(able, (age << depth_bits) | prefix.depth, -1)
    if config.num_blocks <= SORTED_POOL:
        threshold = take(jnp.sort(key), config.num_blocks - count, 0)
    else:
        threshold = _radix_select(key, count)
    above = key > threshold
    tie = (key == threshold) & able
    room = count - above.sum(dtype=jnp.int32)
    gone = (above | (tie & (jnp.cumsum(tie, dtype=jnp.int32) <= room))) & (count > 0)
    place = jnp.where(gone, jnp.cumsum(gone, dtype=jnp.int32) - 1, NULL)
    ids = jnp.arange(config.num_blocks, dtype=jnp.int32)
    return jnp.full(capacity, NULL, jnp.int32).at[place].set(ids, mode="drop")


def make_room(config: SchedulerConfig, blocks, prefix, step, num_needed, max_needed: int):
    """Evict until `num_needed` blocks are on the free stack.

    The caller has checked that free and evictable blocks suffice. Only the list of victims comes
    out of the conditional: [N] and index arrays that pass through one are copied.

    Returns:
      (blocks, prefix, number evicted).
    """
    short = jnp.maximum(num_needed - blocks.num_free, 0)
    capacity = min(max(max_needed, config.evict_batch), config.num_blocks)

    def choose(_):
        most = num_evictable(blocks, prefix)
        count = jnp.minimum(jnp.maximum(short, config.evict_batch), most)
        return select_victims(config, blocks, prefix, step, count, capacity)

    nobody = jnp.full(capacity, NULL, jnp.int32)
    if config.use_cond:
        victims = lax.cond(short > 0, choose, lambda _: nobody, None)
    else:
        victims = jnp.where(short > 0, choose(None), nobody)
    is_victim = victims != NULL
    num = is_victim.sum(dtype=jnp.int32)
    place = jnp.where(is_victim, blocks.num_free + jnp.arange(capacity, dtype=jnp.int32), NULL)
    blocks = dataclasses.replace(
        blocks,
        free_stack=blocks.free_stack.at[place].set(victims, mode="drop"),
        num_free=blocks.num_free + num,
    )
    slot = take(prefix.slot, victims, NULL)

    def clear(table, empty):
        return table.ravel().at[slot].set(empty, mode="drop").reshape(table.shape)

    prefix = dataclasses.replace(
        prefix,
        bucket_hashes=clear(prefix.bucket_hashes, 0),
        bucket_blocks=clear(prefix.bucket_blocks, NULL),
        slot=prefix.slot.at[victims].set(NULL, mode="drop"),
    )
    return blocks, prefix, num
