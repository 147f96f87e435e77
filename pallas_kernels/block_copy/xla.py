"""Copying, gathering, scattering and moving blocks as loops that run once for each real block."""

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
    (source, target), count = _real_first(
        _within(src, num_blocks) & _within(dst, num_blocks), src, dst
    )
    return _copy(k_pool, source, target, count), _copy(v_pool, source, target, count)


def gather_blocks(
    k_pool: jax.Array, v_pool: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See ``api.gather_blocks``."""
    places = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    (blocks, places), count = _real_first(_within(blocks, k_pool.shape[1]), blocks, places)

    def gather(pool: jax.Array) -> jax.Array:
        def read(i: jax.Array, buffer: jax.Array) -> jax.Array:
            block = lax.dynamic_slice_in_dim(pool, blocks[i], 1, axis=1)
            return lax.dynamic_update_slice_in_dim(buffer, block.swapaxes(0, 1), places[i], axis=0)

        shape = (blocks.shape[0], pool.shape[0], *pool.shape[2:])
        return lax.fori_loop(0, count, read, jnp.zeros(shape, pool.dtype))

    return gather(k_pool), gather(v_pool)


def scatter_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_blocks: jax.Array,
    v_blocks: jax.Array,
    blocks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.scatter_blocks``."""
    places = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    (blocks, places), count = _real_first(_within(blocks, k_pool.shape[1]), blocks, places)

    def scatter(pool: jax.Array, buffer: jax.Array) -> jax.Array:
        def write(i: jax.Array, pool: jax.Array) -> jax.Array:
            block = lax.dynamic_slice_in_dim(buffer, places[i], 1, axis=0)
            return lax.dynamic_update_slice_in_dim(pool, block.swapaxes(0, 1), blocks[i], axis=1)

        return lax.fori_loop(0, count, write, pool)

    return scatter(k_pool, k_blocks), scatter(v_pool, v_blocks)


def move_blocks(
    source: jax.Array, target: jax.Array, src: jax.Array, dst: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See ``api.move_blocks``.

    A loop that runs once for each block: none costs nothing, and no buffer is needed. Where the
    pools lie in different memories of a GPU, XLA makes one asynchronous copy of each block.
    """
    space = jax.typeof(target).memory_space
    elsewhere = jax.typeof(source).memory_space != space

    def move(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        target, i = carry
        block = lax.dynamic_slice_in_dim(source, src[i], 1, axis=1)
        if elsewhere:
            block = jax.device_put(block, space)
        return lax.dynamic_update_slice_in_dim(target, block, dst[i], axis=1), i + 1

    start = target, jnp.zeros_like(count)
    return lax.while_loop(lambda carry: carry[1] < count, move, start)


def _within(blocks: jax.Array, num_blocks: int) -> jax.Array:
    return (blocks >= 0) & (blocks < num_blocks)


def _real_first(real: jax.Array, *lists: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The real entries of each list first, in their order, and how many they are."""
    position = jnp.where(real, jnp.cumsum(real) - 1, real.shape[0])
    packed = tuple(jnp.zeros_like(x).at[position].set(x, mode="drop") for x in lists)
    return packed, jnp.sum(real, dtype=jnp.int32)


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
