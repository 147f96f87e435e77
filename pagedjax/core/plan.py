"""`make_plan`: lay the granted tokens out flat for the model."""

import jax.numpy as jnp

from pagedjax.core.admit import Admitted
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.ragged import expand, take
from pagedjax.core.state import NULL, Plan, SchedulerState


def make_plan(
    config: SchedulerConfig,
    state: SchedulerState,
    order,
    grant,
    admitted: Admitted,
    copied,
    num_tokens: int,
) -> Plan:
    """The step's plan, from what each rank was granted.

    Args:
      order, grant: [S] int32 by rank. A granted row always holds the blocks it writes.
      copied: [S] int32 by rank: the block that the row's first written one is a copy of, or NULL.
      num_tokens: T.
    """
    rows, tables, b = state.rows, state.blocks.block_tables, config.block_size
    s, r = config.num_rows, config.max_step_rows(num_tokens)
    rank_of_row = jnp.zeros(s, jnp.int32).at[order].set(jnp.arange(s, dtype=jnp.int32))
    row_of_rank, count = order[:r], grant[:r]
    computed = rows.num_computed_tokens[row_of_rank]
    scheduled = count > 0
    end = jnp.cumsum(count, dtype=jnp.int32)

    rank, offset, valid = expand(count, num_tokens)
    row = row_of_rank[rank]
    position = computed[rank] + offset
    block = tables[row, position // b]
    slot = jnp.where(valid & (block != NULL), jnp.where(valid, block, 0) * b + position % b, NULL)

    # The copy lands in the admitted row's first new block, right behind its shared ones.
    copying = admitted.copy_src != NULL
    copy_row = jnp.where(copying, admitted.row_ids, 0)
    column = jnp.where(copying, admitted.num_shared, NULL)
    copy_src, copy_dst = admitted.copy_src, take(tables, (copy_row, column), NULL)
    if config.enable_forks:
        column = jnp.where(copied[:r] != NULL, computed // b, NULL)
        copy_src = jnp.concatenate([copy_src, copied[:r]])
        copy_dst = jnp.concatenate([copy_dst, take(tables, (row_of_rank, column), NULL)])
    return Plan(
        rank=rank_of_row,
        row_ids=jnp.where(scheduled, row_of_rank, NULL),
        num_seqs=scheduled.sum(dtype=jnp.int32),
        num_scheduled_tokens=count,
        query_start_loc=jnp.concatenate([jnp.zeros(1, jnp.int32), end]),
        seq_lens=jnp.where(scheduled, computed + count, 0),
        block_tables=tables[row_of_rank],
        logit_index=jnp.maximum(end - 1, 0),
        needs_sample=scheduled & (computed + count == rows.num_tokens[row_of_rank]),
        token_ids=jnp.where(valid, rows.token_ids[row, position], 0),
        positions=jnp.where(valid, position, 0),
        slot_mapping=slot,
        copy_src=copy_src,
        copy_dst=copy_dst,
    )
