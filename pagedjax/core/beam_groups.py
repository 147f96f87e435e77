"""Which rows of the table are the beams of one search."""

import jax.numpy as jnp

from pagedjax.core.ragged import take
from pagedjax.core.state import NULL, Status


def leaders(rows):
    """[S] int32: the row that leads each row's beam group, NULL for rows that are no beams.

    Rows of a group that has ended may still name a leader whose row has another request by now: the
    group's number tells."""
    leader = jnp.where(rows.status == Status.EMPTY, NULL, rows.beam_leader)
    return jnp.where(take(rows.group, leader, NULL) == rows.group, leader, NULL)


def present(rows):
    """[] bool: whether there are beams at all. Without any, nothing below costs anything."""
    return (leaders(rows) != NULL).any()


def of_group(rows, values, combine: str):
    """[S]: per-row values combined over each row's beam group ("add" or "max"); 0 elsewhere."""
    leader = leaders(rows)
    into = jnp.zeros(values.shape[0], jnp.int32).at[leader]
    return take(getattr(into, combine)(values.astype(jnp.int32), mode="drop"), leader, 0)


def is_active(rows):
    """[S] bool: rows that carry a beam."""
    live = (rows.status == Status.RUNNING) | (rows.status == Status.WAITING)
    return live & (leaders(rows) != NULL)


def group_bounds(rows, order, running):
    """First rank of each rank's group and the rank after its last: [S + 1] int32 each. Rows of a
    group have arrived one after the other. Rows that are no beams are groups of one."""
    s = order.shape[0]
    rank = jnp.arange(s, dtype=jnp.int32)
    leader = jnp.where(running, leaders(rows)[order], NULL)
    first = jnp.full(s, NULL, jnp.int32).at[leader].min(rank, mode="drop")
    last = jnp.full(s, -1, jnp.int32).at[leader].max(rank, mode="drop")
    start = jnp.where(leader != NULL, take(first, leader, 0), rank)
    end = jnp.where(leader != NULL, take(last, leader, 0), rank) + 1
    past = jnp.full(1, s, jnp.int32)
    return jnp.concatenate([start, past]), jnp.concatenate([end, past])


def whole_groups(rows, mask):
    """[S] bool: the mask, with every row of a group of which a row is in it."""
    return mask | (of_group(rows, mask, "max") > 0)
