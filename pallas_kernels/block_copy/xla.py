"""``copy_blocks`` as two loops whose trip counts are the number of real copies."""

import jax
import jax.numpy as jnp
from jax import lax


def copy_blocks(
    k_pool: jax.Array, v_pool: jax.Array, src: jax.Array, dst: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See ``api.copy_blocks``.

    The first loop reads every source into a staging buffer, the second writes it out: a block may
    be the destination of one copy and the source of another. A loop of zero trips costs nothing,
    where a conditional around the pool would copy the pool.
    """
    num_blocks = k_pool.shape[1]
    valid = (src >= 0) & (src < num_blocks) & (dst >= 0) & (dst < num_blocks)
    # Real pairs first, in their order, so the trip count is their number.
    position = jnp.where(valid, jnp.cumsum(valid) - 1, src.shape[0])
    source = jnp.zeros_like(src).at[position].set(src, mode="drop")
    target = jnp.zeros_like(dst).at[position].set(dst, mode="drop")
    count = jnp.sum(valid, dtype=jnp.int32)
    return _copy(k_pool, source, target, count), _copy(v_pool, source, target, count)


def _copy(pool: jax.Array, source: jax.Array, target: jax.Array, count: jax.Array) -> jax.Array:
    num_layers = pool.shape[0]
    staging = jnp.empty((source.shape[0], num_layers, 1, *pool.shape[2:]), pool.dtype)

    def read(i: jax.Array, staging: jax.Array) -> jax.Array:
        block = lax.dynamic_slice_in_dim(pool, source[i], 1, axis=1)
        return lax.dynamic_update_index_in_dim(staging, block, i, axis=0)

    def write(i: jax.Array, pool: jax.Array) -> jax.Array:
        block = lax.dynamic_index_in_dim(staging, i, axis=0, keepdims=False)
        return lax.dynamic_update_slice_in_dim(pool, block, target[i], axis=1)

    staging = lax.fori_loop(0, count, read, staging)
    return lax.fori_loop(0, count, write, pool)
