"""Exact unsigned arithmetic beyond 32 bits, without 64-bit types (which JAX disables by default).

A `Wide` is a pair (high, low) of uint32 arrays that stands for `high * 2**16 + low` with `low <
2**16`, so it holds up to 48 bits. Integer sums do not depend on the order of their terms: that is
what makes a row's token the same whatever the shape, the batch or the device it was computed with.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Wide = tuple[jax.Array, jax.Array]

_LOW = 0xFFFF


def normalize(high: jax.Array, low: jax.Array) -> Wide:
    """The pair whose low part may exceed 16 bits, in canonical form."""
    return high + (low >> 16), low & _LOW


def widen(values: jax.Array) -> Wide:
    """A uint32 array as a `Wide` of the same shape."""
    return values >> 16, values & _LOW


def wide_sum(values: jax.Array, axis: int = -1) -> Wide:
    """Sum of a uint32 array over one axis of at most 65,536 entries."""
    high = jnp.sum(values >> 16, axis=axis, dtype=jnp.uint32)
    return normalize(high, jnp.sum(values & _LOW, axis=axis, dtype=jnp.uint32))


def wide_total(values: Wide) -> Wide:
    """Sum over the last axis, of at most 65,536 entries, that stays below 2**48."""
    high, low = (jnp.sum(v, axis=-1, dtype=jnp.uint32) for v in values)
    return normalize(high, low)


def locate(parts: Wide, target: Wide) -> tuple[jax.Array, Wide]:
    """The inverse of a running sum: which part each target falls in, and how far into it.

    Args:
      parts: [b, n], at most a few hundred parts.
      target: [b], below the sum of the parts. (Anything else gives some index below n.)

    Returns:
      index [b] int32, never of a part that is zero, and the rest of the target [b].
    """
    n = parts[0].shape[-1]
    # A masked n x n sum is one vectorised loop; `jnp.cumsum` compiles to a slow scan on CPU.
    earlier = jnp.arange(n)[:, None] > jnp.arange(n)[None, :]
    high, low = (jnp.sum(jnp.where(earlier, p[:, None, :], 0), -1, dtype=jnp.uint32) for p in parts)
    start = normalize(high, low)
    begun = ~less((target[0][:, None], target[1][:, None]), start)
    index = jnp.sum(begun, axis=-1, dtype=jnp.int32) - 1
    high, low = (jnp.take_along_axis(v, index[:, None], axis=1)[:, 0] for v in start)
    return index, subtract(target, (high, low))


def add(a: Wide, b: Wide) -> Wide:
    """a + b."""
    return normalize(a[0] + b[0], a[1] + b[1])


def subtract(a: Wide, b: Wide) -> Wide:
    """a - b, for b <= a."""
    borrow = (a[1] < b[1]).astype(jnp.uint32)
    return a[0] - b[0] - borrow, (a[1] + (borrow << 16)) - b[1]


def less(a: Wide, b: Wide) -> jax.Array:
    """a < b, elementwise."""
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def to_float(a: Wide) -> jax.Array:
    """As float32."""
    return a[0].astype(jnp.float32) * 2.0**16 + a[1].astype(jnp.float32)


def select(mask: jax.Array, a: Wide, b: Wide) -> Wide:
    """a where the mask is set, else b."""
    return jnp.where(mask, a[0], b[0]), jnp.where(mask, a[1], b[1])


def scale_by_fraction(value: Wide, fraction: Sequence[jax.Array], *, ceil: bool = False) -> Wide:
    """floor (or ceil) of `value * f`, where f = 0.d1 d2 ... in base 2**16.

    Args:
      value: the number to scale.
      fraction: d1, d2, ...: uint32 arrays below 2**16, that broadcast to the value's shape.
      ceil: round up instead of down.
    """
    # Schoolbook multiplication in base 2**16; digits are least significant first from here on.
    a = list(reversed(fraction))
    b = [value[1], value[0] & _LOW, value[0] >> 16]
    columns = [jnp.zeros_like(value[0]) for _ in range(len(a) + len(b))]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product = x * y
            columns[i + j] += product & _LOW
            columns[i + j + 1] += product >> 16
    for i in range(len(columns) - 1):
        columns[i + 1] += columns[i] >> 16
        columns[i] &= _LOW
    rest = columns[: len(a)]
    t0, t1, t2 = columns[len(a) :]
    result = ((t2 << 16) + t1, t0)
    if ceil:
        inexact = jnp.zeros(rest[0].shape, bool)
        for digit in rest:
            inexact |= digit != 0
        result = add(result, (jnp.zeros_like(t0), inexact.astype(jnp.uint32)))
    return result
