"""Finding blocks by content: hashes, lookup, and matching a request's prompt.

The hash of block j covers every token of the sequence up to the end of block j, so equal hashes
propose equal prefixes. It is a prefix sum of mixed (token, position) terms rather than a chain:
one cumulative sum gives the hashes of a whole prompt, and a sampled token adds one term. It needs
no cryptographic strength, since a hit is confirmed by comparing tokens, salt and parent.
"""

import jax.numpy as jnp

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.ragged import take
from pagedjax.core.state import NULL, ROOT, PrefixIndex, SchedulerState


def mix(token, position):
    """One term of the prefix sum, uint32: MurmurHash3's finaliser over token and position."""
    x = token.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x = x ^ (position.astype(jnp.uint32) * jnp.uint32(0x85EBCA77) + jnp.uint32(0x165667B1))
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def finish_hash(config: SchedulerConfig, running, salt):
    """Block hash from the prefix sum: salted, masked, never 0 (0 marks an empty slot)."""
    salt = jnp.asarray(salt, jnp.uint32)
    hashed = mix(running ^ salt, salt) & jnp.uint32(config.hash_mask)
    return jnp.maximum(hashed, jnp.uint32(1))


def lookup(config: SchedulerConfig, prefix: PrefixIndex, hashes):
    """hashes [...] uint32 -> proposed block ids [...] int32, NULL where there is none."""
    bucket = (hashes & jnp.uint32(config.num_index_buckets - 1)).astype(jnp.int32)
    equal = prefix.bucket_hashes[bucket] == hashes[..., None]
    block = prefix.bucket_blocks[bucket, jnp.argmax(equal, -1)]
    return jnp.where(equal.any(-1), block, NULL)


def confirm(prefix: PrefixIndex, blocks, parents, salts, tokens):
    """[...] bool: each block really holds these tokens, behind this parent, under this salt.

    Args:
      blocks, parents: [...] int32. salts: [...] uint32. tokens: [..., B] int32.

    Comparing the parent's identity makes the comparison of the whole prefix inductive. It is sound
    because a parent never leaves the index before its children (see `blocks.release`).
    """
    good = (blocks != NULL) & (take(prefix.slot, blocks, NULL) != NULL)
    good &= take(prefix.parent, blocks, NULL) == parents
    good &= take(prefix.salt, blocks, 0) == salts
    return good & (take(prefix.tokens, blocks, NO_MATCH) == tokens).all(-1)


NO_MATCH = -2  # fills gathers of tokens; no token id is negative
MAX_SIBLINGS = 8  # children of a block that are looked at for a partial match, newest first


def _at(table, column):
    """table [A, M], column [A] -> [A], clipped (the caller masks what is out of range)."""
    column = jnp.clip(column, 0, table.shape[1] - 1)
    return jnp.take_along_axis(table, column[:, None], 1)[:, 0]


def match(config: SchedulerConfig, state: SchedulerState, row_ids):
    """The longest cached prefix of each row, in whole blocks and then in tokens.

    Args:
      row_ids: [A] int32.

    Returns:
      num_blocks: [A] int32, whole blocks that can be shared. The last token of a row is always
        left to compute, since its logits are wanted.
      blocks: [A, M] int32, their ids, NULL past num_blocks.
      num_tokens: [A] int32, further tokens that match inside the next block.
      source: [A] int32, the block those tokens can be copied from, or NULL.
    """
    rows, prefix = state.rows, state.prefix
    m, b = config.max_blocks_per_seq, config.block_size
    length, salts = rows.num_tokens[row_ids], rows.salt[row_ids]
    tokens = rows.token_ids[row_ids].reshape(-1, m, b)
    j = jnp.arange(m)[None]
    found = lookup(config, prefix, rows.block_hashes[row_ids])
    found = jnp.where(j < (length // b)[:, None], found, NULL)
    first = jnp.full((row_ids.shape[0], 1), ROOT, jnp.int32)
    parents = jnp.concatenate([first, found[:, :-1]], 1)
    good = confirm(prefix, found, parents, salts[:, None], tokens)
    stop = jnp.zeros((row_ids.shape[0], 1), bool)
    run = jnp.argmin(jnp.concatenate([good, stop], 1), 1).astype(jnp.int32)
    num_blocks = jnp.minimum(run, (length - 1) // b)

    blocks = jnp.where(j < num_blocks[:, None], found, NULL)
    # The next block itself may be cached: then the whole prompt is, and only its last token is
    # wanted. Otherwise a child of the last hit may begin alike.
    last_hit = jnp.where(num_blocks > 0, _at(found, num_blocks - 1), NULL)
    itself = jnp.where(run > num_blocks, _at(found, num_blocks), NULL)
    child = jnp.where(itself != NULL, itself, take(prefix.last_child, last_hit, NULL))
    here = jnp.clip(num_blocks, 0, m - 1)
    next_tokens = jnp.take_along_axis(tokens, here[:, None, None], 1)[:, 0]
    room = length - 1 - num_blocks * b
    num_tokens, source = _best_child(
        prefix, child, _at(parents, num_blocks), salts, next_tokens, room
    )
    return num_blocks, blocks, num_tokens, source


def _best_child(prefix: PrefixIndex, child, parent, salts, tokens, room):
    """The cached block behind `parent` that shares most leading tokens, among the newest few.

    Args (all [A] but tokens [A, B]): child is where the walk along older siblings begins; the
    links are hints that may be stale, so parent, salt and tokens of each are compared; room is
    how many tokens may match at most.

    Returns:
      (num_tokens [A], source [A] or NULL).
    """
    best, source = jnp.zeros_like(room), jnp.full_like(child, NULL)
    for _ in range(MAX_SIBLINGS):
        usable = (take(prefix.slot, child, NULL) != NULL) & (take(prefix.salt, child, 0) == salts)
        usable &= take(prefix.parent, child, NULL) == parent
        equal = take(prefix.tokens, child, NO_MATCH) == tokens
        count = jnp.cumprod(equal.astype(jnp.int32), 1).sum(1, dtype=jnp.int32)
        count = jnp.where(usable, jnp.minimum(count, room), 0)
        source = jnp.where(count > best, child, source)
        best = jnp.maximum(best, count)
        child = take(prefix.older_sibling, child, NULL)
    return best, source
