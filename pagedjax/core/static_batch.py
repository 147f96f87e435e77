"""Static batching, a baseline to compare with: a batch is filled, then nobody joins before all of
it have ended.

A batch takes waiting requests in the policy's order until the next one finds no place or no memory,
or nothing waits; then it is closed. What a step has no tokens or no admissions left for joins in a
later step: how large a batch gets does not depend on how many tokens a step reads. Of a batch,
those that have ended keep place and memory till all have. Only if the others run out of memory do
they give theirs up, before anybody is preempted; the batch is closed then. Who was preempted
belongs to the batch and comes back before anybody else.
"""

import dataclasses

import jax.numpy as jnp

from pagedjax.core.blocks import num_evictable
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.policies import is_waiting, was_preempted
from pagedjax.core.ragged import cdiv, take
from pagedjax.core.state import SchedulerState, Status


def is_open(state: SchedulerState):
    """[] bool: requests may join. If nobody is left of the last batch, the next one begins."""
    rows = state.rows
    members = (rows.status == Status.RUNNING) | was_preempted(rows)
    return state.batch_is_open | ~members.any()


def end(config: SchedulerConfig, state: SchedulerState):
    """(state, [] bool: rows that have ended give their blocks back now)"""
    rows, blocks = state.rows, state.blocks
    running = rows.status == Status.RUNNING
    need = jnp.maximum(cdiv(rows.num_tokens, config.block_size) - blocks.num_blocks_held, 0)
    available = blocks.num_free + num_evictable(blocks, state.prefix)
    short = jnp.where(running, need, 0).sum(dtype=jnp.int32) > available
    short |= was_preempted(rows).any()
    state = dataclasses.replace(state, batch_is_open=is_open(state) & ~short)
    return state, short | ~running.any()


def may_join(config: SchedulerConfig, state: SchedulerState, row_ids, rank, valid):
    """[A] bool: of the `valid` candidates, those that the batch takes or that belong to it.

    Args: row_ids, rank: [A] int32, candidates in their order and their ranks among all rows.
    """
    place = rank + _num_ended(state) < config.max_num_seqs
    valid &= (is_open(state) & place) | was_preempted(state.rows)[row_ids]
    return jnp.cumsum(~valid) == 0  # nobody overtakes


def stays_open(
    config: SchedulerConfig, state: SchedulerState, order, num_running, num_admitted, budget
):
    """[] bool: the next request in the queue has a place, and the step was too short for it.

    Args: state: before anybody was admitted. order: [S] int32, rank -> row. num_running,
      num_admitted: [] int32. budget: [] int32, tokens that are left.
    """
    rank = num_running + num_admitted
    waits = is_waiting(take(state.rows.status, take(order, rank, config.num_rows), Status.EMPTY))
    place = rank + _num_ended(state) < config.max_num_seqs
    too_short = (budget <= 0) | (num_admitted == config.max_admissions)
    return is_open(state) & waits & place & too_short


def _num_ended(state: SchedulerState):
    """[] int32: members that have ended. Others that have, had no block when they did, and leave
    the table at once."""
    ended = (state.rows.status == Status.FINISHED) & (state.blocks.num_blocks_held > 0)
    return ended.sum(dtype=jnp.int32)
