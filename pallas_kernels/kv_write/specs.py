"""The calls of the ``write_kv`` kernel that the compile gate checks."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import mosaic_gpu
from pallas_kernels.pool import pool_shape
from pallas_kernels.specs import KernelSpec


def _call(k_pool, v_pool, k, v, slot_mapping, layer):
    return mosaic_gpu.write_kv(k_pool, v_pool, k, v, slot_mapping, layer=layer)


def _spec(
    case: str,
    *,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    block_size: int = 16,
    wide: bool = True,
) -> KernelSpec:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    pool = shape(pool_shape(4, 1024, block_size, num_kv_heads, head_dim))
    rows = shape((num_tokens, num_kv_heads, head_dim))
    row_bytes = num_kv_heads * head_dim * pool.dtype.itemsize
    tokens = mosaic_gpu.tokens_per_block(num_tokens, row_bytes)
    slots, layer = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((num_tokens,), ()))
    return KernelSpec(
        name=f"write_kv.{case}",
        function=_call,
        args=(pool, pool, rows, rows, slots, layer),
        kernels=(mosaic_gpu.NAME,),
        require=("ld_global_16", "st_global_16") if wide else (),
        donate=(0, 1),
        memory_bound=num_tokens > 512 and wide,
        bytes_in_flight=2 * tokens * row_bytes,
    )


def specs(chip: str) -> list[KernelSpec]:
    """Decode and prefill of Llama-3-8B and SmolLM2 shapes, and the odd ones out."""
    del chip  # one source for all
    return [
        _spec("llama_decode", num_tokens=64, num_kv_heads=8, head_dim=128),
        _spec("llama_prefill", num_tokens=8192, num_kv_heads=8, head_dim=128),
        _spec("smollm2_decode", num_tokens=64, num_kv_heads=3, head_dim=64, wide=False),
        _spec("smollm2_prefill", num_tokens=2048, num_kv_heads=3, head_dim=64, wide=False),
        _spec("f32_d256", num_tokens=64, num_kv_heads=8, head_dim=256, dtype=jnp.float32),
        _spec(
            "f16_d80_b128",
            num_tokens=64,
            num_kv_heads=32,
            head_dim=80,
            dtype=jnp.float16,
            block_size=128,
            wide=False,
        ),
        _spec("d96_b8", num_tokens=64, num_kv_heads=1, head_dim=96, block_size=8, wide=False),
    ]
