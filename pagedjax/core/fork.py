"""Rows that begin alike: one computes the prompt, the others share its blocks, writers copy.

Rows of one *group* have equal prompts. A member waits until another one has computed the prompt
and is admitted by reference to all of its blocks, the partly filled last one too; nothing is looked
up, so it works without the prefix cache. What two rows hold neither may write: whoever is about to
write into such a block takes a copy of it first (copy-on-write). When all holders write in the same
step, the one of the lowest rank keeps the block.
"""

import jax
import jax.numpy as jnp

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.ragged import cdiv, take, when
from pagedjax.core.state import NULL, SchedulerState, Status


def sources(config: SchedulerConfig, state: SchedulerState, row_ids):
    """Which running row each of these rows can take its prompt from.

    Args:
      row_ids: [A] int32.

    Returns:
      source: [A] int32, a running member of the row's group, or NULL.
      common: [A] int32, tokens it can give: the prompt, but never the row's last token, whose
        logits are wanted. 0 where there is no source.
    """
    rows = state.rows
    group = take(rows.group, row_ids, NULL)
    common = take(rows.num_prompt_tokens, row_ids, 0)
    common = jnp.minimum(common, take(rows.num_tokens, row_ids, 0) - 1)
    able = (rows.status == Status.RUNNING) & (rows.group != NULL)
    able = able & (rows.group == group[:, None]) & (rows.salt == rows.salt[row_ids][:, None])
    able &= rows.num_computed_tokens >= common[:, None]
    source = jnp.argmax(able, 1).astype(jnp.int32)
    # Equal prompts are the caller's promise. It is checked, as every hit of the prefix cache is.
    differs = rows.token_ids[source] != rows.token_ids[row_ids]
    differs &= jnp.arange(config.max_padded_len) < common[:, None]
    found = able.any(1) & ~differs.any(1)
    return jnp.where(found, source, NULL), jnp.where(found, common, 0)


def held_back(config: SchedulerConfig, state: SchedulerState):
    """[S] bool: waiting rows for whose prompt an older member of their group is still at work."""
    rows = state.rows
    waiting, running = rows.status == Status.WAITING, rows.status == Status.RUNNING
    grouped = rows.group != NULL

    def look(_):
        same = (rows.group == rows.group[:, None]) & grouped
        common = jnp.minimum(rows.num_prompt_tokens, rows.num_tokens - 1)
        ready = same & running & (rows.num_computed_tokens >= common[:, None])
        older = same & (waiting | running) & (rows.arrival < rows.arrival[:, None])
        return waiting & older.any(1) & ~ready.any(1)

    nobody = jnp.zeros(config.num_rows, bool)
    return when(config.use_cond, (waiting & grouped).any(), look, nobody)


def written_blocks(config: SchedulerConfig, state: SchedulerState, order, grant):
    """[S] int32, by rank: the block a row holds and writes into in this step, or NULL.

    A row writes from `num_computed_tokens` on. It holds the block of that place already when the
    place is inside a block."""
    computed = state.rows.num_computed_tokens[order]
    column = jnp.where(
        (grant > 0) & (computed % config.block_size > 0), computed // config.block_size, NULL
    )
    return take(state.blocks.block_tables, (order, column), NULL)


def copies_on_write(config: SchedulerConfig, state: SchedulerState, order, grant):
    """Which rows must copy the block they are about to write into, because others hold it too.

    Whether a row copies does not depend on rows of higher rank that write in the same step: what
    holds for running rows before admission holds after it.

    Args (by rank): order, grant: [S] int32.

    Returns:
      [S] int32 by rank: the block to copy, NULL for none.
    """
    n = config.num_blocks
    rank = jnp.arange(config.num_rows, dtype=jnp.int32)

    def look(_):
        block = written_blocks(config, state, order, grant)
        writers = jnp.zeros(n, jnp.int32).at[block].add(1, mode="drop")
        first = jnp.full(n, NULL, jnp.int32).at[block].min(rank, mode="drop")
        holders = take(state.blocks.ref_counts, block, 0)
        keeps = (take(writers, block, 0) == holders) & (take(first, block, NULL) == rank)
        # Cached blocks are for others to find, even if nobody else holds them now.
        keeps &= take(state.prefix.slot, block, NULL) == NULL
        return jnp.where(keeps, NULL, block)

    nothing = jnp.full(config.num_rows, NULL, jnp.int32)
    if not config.enable_forks:
        return nothing
    rows = state.rows
    grouped = ((rows.status == Status.RUNNING) & (rows.group != NULL)).any()
    return when(config.use_cond, grouped, look, nothing)


def writes_shared(config: SchedulerConfig, state: SchedulerState, order, grant):
    """[S] int32, by rank: 1 where a row writes into a block that others hold or may find. At least
    as many as copy, whichever of them take part in the step."""
    if not config.enable_forks:
        return jnp.zeros(config.num_rows, jnp.int32)
    block = written_blocks(config, state, order, grant)
    shared = take(state.blocks.ref_counts, block, 0) > 1
    return (shared | (take(state.prefix.slot, block, NULL) != NULL)).astype(jnp.int32)


def share(config: SchedulerConfig, state: SchedulerState, row_ids, cached):
    """What rows take from a member of their group, where that is more than the prefix cache has.

    Args:
      row_ids, cached: [A] int32; tokens that the prefix cache has.

    Returns:
      (forks [A] bool, common [A], num_shared [A] blocks, shared [A, M] their ids, num_cached [A]:
      how many of those blocks are in the prefix index).
    """
    source, common = sources(config, state, row_ids)
    forks = (source != NULL) & (common >= cached) & (common > 0)
    num_shared = cdiv(common, config.block_size)
    column = jnp.arange(config.max_blocks_per_seq)
    tables = take(state.blocks.block_tables, source, NULL)
    shared = jnp.where(column < num_shared[:, None], tables, NULL)
    known = take(state.rows.num_cached_blocks, source, 0)
    return forks, common, num_shared, shared, jnp.minimum(known, common // config.block_size)


def choose(forks, if_fork: jax.Array, if_not: jax.Array):
    """`if_fork` where a row forks; the arrays may have further axes."""
    return jnp.where(forks.reshape(forks.shape + (1,) * (if_not.ndim - 1)), if_fork, if_not)
