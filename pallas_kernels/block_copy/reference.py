"""Copying, gathering, scattering and moving blocks, written to be obviously right."""

import jax
import jax.numpy as jnp


def copy_blocks(
    k_pool: jax.Array, v_pool: jax.Array, src: jax.Array, dst: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gather all sources, then scatter; see ``api.copy_blocks``."""
    num_blocks = k_pool.shape[1]
    valid = (src >= 0) & (src < num_blocks) & (dst >= 0) & (dst < num_blocks)
    source = jnp.where(valid, src, 0)
    target = jnp.where(valid, dst, num_blocks)
    k_pool = k_pool.at[:, target].set(k_pool[:, source], mode="drop")
    v_pool = v_pool.at[:, target].set(v_pool[:, source], mode="drop")
    return k_pool, v_pool


def gather_blocks(
    k_pool: jax.Array, v_pool: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One block after another; see ``api.gather_blocks``."""

    def gather(pool):
        valid = (blocks >= 0) & (blocks < pool.shape[1])
        found = pool.swapaxes(0, 1)[jnp.where(valid, blocks, 0)]
        return jnp.where(valid[:, None, None, None, None], found, jnp.zeros_like(found))

    return gather(k_pool), gather(v_pool)


def scatter_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_blocks: jax.Array,
    v_blocks: jax.Array,
    blocks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.scatter_blocks``."""
    num_blocks = k_pool.shape[1]
    target = jnp.where((blocks >= 0) & (blocks < num_blocks), blocks, num_blocks)
    k_pool = k_pool.at[:, target].set(k_blocks.swapaxes(0, 1), mode="drop")
    v_pool = v_pool.at[:, target].set(v_blocks.swapaxes(0, 1), mode="drop")
    return k_pool, v_pool


def move_blocks(
    source: jax.Array, target: jax.Array, src: jax.Array, dst: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gather, then scatter; see ``api.move_blocks``."""
    if jax.typeof(source).memory_space != jax.typeof(target).memory_space:
        raise NotImplementedError(
            "move_blocks: implementation 'reference' does not support pools in different memories"
        )
    moved = jnp.arange(src.shape[0]) < count
    to = jnp.where(moved, dst, target.shape[1])
    return target.at[:, to].set(source[:, jnp.where(moved, src, 0)], mode="drop"), count
