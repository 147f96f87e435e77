"""``write_kv`` as a Mosaic GPU kernel: one source for A100, H100, H200 and B200.

A thread block takes a few tokens: it reads their slots, loads their rows of keys and values into
registers, 16 bytes a thread and access, and stores each row whose slot is real. Nothing passes
through shared memory, so there is nothing to wait for and many blocks fit on an SM.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import tuning
from pallas_kernels.mosaic import copy_params, require_mosaic_gpu, row_layout, store
from pallas_kernels.pool import to_storage

NAME = "write_kv"


def tokens_per_block(num_tokens: int, row_bytes: int) -> int:
    """Tokens that one thread block writes: enough to keep 8 KiB of rows in flight, but one where
    there are too few tokens to fill the chip.
    """
    if num_tokens <= 512:
        return 1
    return max(1, min(8, 8192 // (2 * row_bytes)))


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.write_kv``. The pools are updated in place (the kernel's outputs alias them).

    Raises:
      NotImplementedError: jax before 0.11, or ``num_kv_heads * head_dim`` no multiple of 16.
    """
    require_mosaic_gpu(NAME)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_layers, num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    num_tokens, row = slot_mapping.shape[0], num_kv_heads * head_dim
    num_slots = num_blocks * block_size
    if num_tokens == 0:
        return k_pool, v_pool
    layout = row_layout(row, k_pool.dtype)
    row_bytes = row * k_pool.dtype.itemsize
    found = tuning.lookup(NAME, tuning.current_chip(), {"num_tokens": num_tokens, "row": row})
    tokens = found.get("tokens_per_block") or tokens_per_block(num_tokens, row_bytes)

    def body(k_ref, v_ref, slot_ref, layer_ref, k_pool_ref, v_pool_ref):
        first = lax.axis_index("tokens") * tokens
        layer = layer_ref[0]
        layer_exists = (layer >= 0) & (layer < num_layers)
        loaded = []
        for i in range(tokens):
            # Past the end the last token stands in, and is not stored.
            t = jnp.minimum(first + i, num_tokens - 1)
            slot = slot_ref[t]
            real = (first + i < num_tokens) & (slot >= 0) & (slot < num_slots) & layer_exists
            rows = [plgpu.load(x.at[t], layout=layout, optimized=False) for x in (k_ref, v_ref)]
            loaded.append((real, slot, *rows))
        for real, slot, k_row, v_row in loaded:

            @pl.when(real)
            def _(slot=slot, k_row=k_row, v_row=v_row):
                store(k_pool_ref.at[layer, slot], k_row)
                store(v_pool_ref.at[layer, slot], v_row)

    kernel = plgpu.kernel(
        body,
        grid=(pl.cdiv(num_tokens, tokens),),
        grid_names=("tokens",),
        kernel_name=NAME,
        compiler_params=copy_params(),
    )
    rows = (to_storage(x, k_pool).reshape(num_tokens, row) for x in (k, v))
    operands = (*rows, slot_mapping, jnp.asarray(layer, jnp.int32).reshape(1))
    # [L, N * B, K * D]: a reshape that moves nothing.
    pools = tuple(x.reshape(num_layers, num_slots, row) for x in (k_pool, v_pool))
    pools = pl.run_state(lambda refs: kernel(*operands, *refs))(pools)
    return tuple(x.reshape(k_pool.shape) for x in pools)
