"""Small vector tools: ragged expansion, ceiling division, gathers with a fill value, branches."""

import jax
import jax.numpy as jnp
from jax import lax


def cdiv(a, b):
    """Ceiling of a / b for integers."""
    return (a + b - 1) // b


def take(x, index, fill):
    """`x[index]`, `fill` where the index is out of range."""
    return x.at[index].get(mode="fill", fill_value=fill)


def expand(counts, total: int):
    """Lay ragged counts out flat: entry e belongs to one owner.

    Args:
      counts: [n] int32, entries of each owner; their sum is at most `total`.
      total: static number of entries to lay out.

    Returns:
      owner [total] int32, offset within the owner [total] int32, valid [total] bool.
    """
    end = jnp.cumsum(counts)
    start = end - counts
    n = counts.shape[0]
    first = jnp.where(counts > 0, start, total)
    owner = jnp.zeros(total, jnp.int32).at[first].max(jnp.arange(n, dtype=jnp.int32), mode="drop")
    owner = lax.cummax(owner)
    entry = jnp.arange(total, dtype=jnp.int32)
    return owner, entry - start[owner], entry < end[-1]


def when(use_cond: bool, pred, branch, operand):
    """`branch(operand)` if `pred`, else `operand` unchanged.

    With `use_cond` the branch is skipped when not needed. Whatever passes through a conditional is
    copied even when it is skipped, so pass [N] arrays at most, never a table or the KV pool.
    """
    if use_cond:
        return lax.cond(pred, branch, lambda x: x, operand)
    return jax.tree.map(lambda new, old: jnp.where(pred, new, old), branch(operand), operand)


def inverse(index, size: int):
    """index [a] of distinct places -> (found [size] bool, which [size] int32 in [0, a)).

    Turns one scatter per field into one scatter and cheap gathers. Out-of-range places drop.
    """
    a = index.shape[0]
    which = jnp.full(size, a, jnp.int32).at[index].set(jnp.arange(a, dtype=jnp.int32), mode="drop")
    return which < a, jnp.minimum(which, a - 1)
