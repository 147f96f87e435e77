"""``write_kv`` written to be obviously right."""

import jax

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
    """One token after another; see ``api.write_kv``."""
    num_blocks, block_size = k_pool.shape[1:3]
    for t in range(slot_mapping.shape[0]):
        slot = slot_mapping[t]
        valid = (slot >= 0) & (slot < num_blocks * block_size)
        block = jax.numpy.where(valid, slot // block_size, num_blocks)
        at = (layer, block, slot % block_size)
        k_pool = k_pool.at[at].set(to_storage(k[t], k_pool), mode="drop")
        v_pool = v_pool.at[at].set(to_storage(v[t], v_pool), mode="drop")
    return k_pool, v_pool
