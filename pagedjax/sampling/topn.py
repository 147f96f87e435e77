"""Largest entries of long rows, exactly, without a sort: chunk maxima, then a few chunks."""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 128
"""Tokens per chunk."""


def pad_to_multiple(x: jax.Array, multiple: int) -> jax.Array:
    """[b, V] padded with -inf to the next multiple of V; the same array if it is one already."""
    extra = -x.shape[-1] % multiple
    return jnp.pad(x, ((0, 0), (0, extra)), constant_values=-jnp.inf) if extra else x


def max_and_argmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest entry of each row and the lowest index that holds it: [b] float32, [b] int32.

    A row with NaN or +inf anywhere gives +inf, and then the index means nothing.

    On CPU a plain `jnp.argmax` is one scalar loop. Maxima of chunks are vectorised, and only the
    chunk that holds the maximum is searched. They may drop NaN, though (XLA does not promise
    otherwise there), and any operation on the logits first would be written to memory at [b, V]; so
    NaN is looked for by a sum, which is as fast. A sum is NaN for -inf beside huge logits, too:
    then, rarely, every logit is looked at.
    """
    b = x.shape[0]
    chunks = pad_to_multiple(x, CHUNK).reshape(b, -1, CHUNK)
    maxima = jnp.max(chunks, axis=-1)
    largest = jnp.max(maxima, axis=-1)
    chunk = _first(maxima == largest[:, None])
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    index = chunk * CHUNK + _first(inside == largest[:, None])

    suspect = jnp.isnan(jnp.sum(x, axis=-1))
    nan = lax.cond(
        jnp.any(suspect), lambda: jnp.any(jnp.isnan(x), axis=-1), lambda: jnp.zeros_like(suspect)
    )
    return jnp.where(nan, jnp.inf, largest), index


def _first(mask: jax.Array) -> jax.Array:
    n = mask.shape[-1]
    index = jnp.min(jnp.where(mask, jnp.arange(n, dtype=jnp.int32), n), axis=-1)
    return jnp.minimum(index, n - 1)


def top_n(x: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The n largest entries of each row, largest first, lowest index first among equals.

    Args:
      x: [b, V] float32 without NaN.
      n: static, at most V.

    Returns:
      values [b, n] and indices [b, n] int32.

    Every chunk that holds one of the n entries is among the n chunks with the largest maxima,
    lowest chunk first among equals, so n chunks are enough. Zeros are made positive because
    `lax.top_k` on CPU orders -0.0 below 0.0.
    """
    b = x.shape[0]
    chunks = pad_to_multiple(x, CHUNK).reshape(b, -1, CHUNK)
    maxima = _positive_zero(jnp.max(chunks, axis=-1))
    picked = jnp.sort(lax.top_k(maxima, min(n, maxima.shape[-1]))[1], axis=-1)
    candidates = jnp.take_along_axis(chunks, picked[:, :, None], axis=1)
    values, at = lax.top_k(_positive_zero(candidates.reshape(b, -1)), n)
    ids = jnp.take_along_axis(picked, at // CHUNK, axis=-1) * CHUNK + at % CHUNK
    return values, ids


def _positive_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, jnp.float32(0), x)
