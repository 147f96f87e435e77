"""``write_kv`` as one scatter per pool."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool import to_storage


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.write_kv``. In place under donation and in a loop's carry."""
    index = slot_index(k_pool, slot_mapping, layer)
    return _scatter(k_pool, index, k), _scatter(v_pool, index, v)


def slot_index(pool: jax.Array, slot_mapping: jax.Array, layer: int | jax.Array) -> jax.Array:
    """``[T, 3]`` int32: layer, block, offset of each slot."""
    block_size = pool.shape[2]
    # NULL is out of range as a block too, and the scatter drops it; so is what is negative, since
    # a scatter (unlike indexing) does not wrap.
    block = slot_mapping // block_size
    layer = jnp.full_like(block, layer)
    return jnp.stack([layer, block, slot_mapping % block_size], axis=-1)


def _scatter(pool: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scatter(
        pool,
        index,
        to_storage(x, pool),
        lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2),
            inserted_window_dims=(0, 1, 2),
            scatter_dims_to_operand_dims=(0, 1, 2),
        ),
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
