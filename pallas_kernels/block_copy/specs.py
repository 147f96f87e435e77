"""The calls of the block kernels that the compile gate checks."""

import jax
import jax.numpy as jnp

from pallas_kernels.block_copy import mosaic_gpu
from pallas_kernels.pool import pool_shape
from pallas_kernels.specs import KernelSpec

_WIDE = ("ld_global_16", "st_global_16")


def _shapes(num_ids: int, block_size: int, num_kv_heads: int, head_dim: int, dtype):
    pool = jax.ShapeDtypeStruct(pool_shape(4, 1024, block_size, num_kv_heads, head_dim), dtype)
    buffer = jax.ShapeDtypeStruct((num_ids, 4, block_size, num_kv_heads, head_dim), dtype)
    return pool, buffer, jax.ShapeDtypeStruct((num_ids,), jnp.int32)


def _copy(case: str, num_copies: int, *block, dtype=jnp.bfloat16) -> KernelSpec:
    pool, _, ids = _shapes(num_copies, *block, dtype)
    itemsize, num_elements = pool.dtype.itemsize, block[0] * block[1] * block[2]
    chunk = mosaic_gpu.copy_chunk(num_elements, itemsize, num_copies)
    staged = (mosaic_gpu.COPY_NAME,)
    return KernelSpec(
        name=f"copy_blocks.{case}",
        function=mosaic_gpu.copy_blocks,
        args=(pool, pool, ids, ids),
        kernels=staged if chunk else (mosaic_gpu.GATHER_NAME, mosaic_gpu.SCATTER_NAME),
        require=_WIDE,
        donate=(0, 1),
        memory_bound=True,
        bytes_in_flight=2 * mosaic_gpu.COPIES_IN_FLIGHT * chunk * itemsize
        or _stream_bytes(num_elements, itemsize),
    )


def _stream_bytes(num_elements: int, itemsize: int) -> int:
    return 2 * mosaic_gpu.stream_chunk(num_elements, itemsize) * itemsize


def _gather(case: str, num_ids: int, *block, dtype=jnp.bfloat16) -> KernelSpec:
    pool, _, ids = _shapes(num_ids, *block, dtype)
    return KernelSpec(
        name=f"gather_blocks.{case}",
        function=mosaic_gpu.gather_blocks,
        args=(pool, pool, ids),
        kernels=(mosaic_gpu.GATHER_NAME,),
        require=_WIDE,
        memory_bound=True,
        bytes_in_flight=_stream_bytes(block[0] * block[1] * block[2], pool.dtype.itemsize),
    )


def _scatter(case: str, num_ids: int, *block, dtype=jnp.bfloat16) -> KernelSpec:
    pool, buffer, ids = _shapes(num_ids, *block, dtype)
    return KernelSpec(
        name=f"scatter_blocks.{case}",
        function=mosaic_gpu.scatter_blocks,
        args=(pool, pool, buffer, buffer, ids),
        kernels=(mosaic_gpu.SCATTER_NAME,),
        require=_WIDE,
        donate=(0, 1),
        memory_bound=True,
        bytes_in_flight=_stream_bytes(block[0] * block[1] * block[2], pool.dtype.itemsize),
    )


def specs(chip: str) -> list[KernelSpec]:
    """Llama-3-8B and SmolLM2 shapes, both ways of copying, and the odd ones out."""
    del chip  # one source for all
    llama, smollm2 = (16, 8, 128), (16, 3, 64)
    return [
        _copy("llama", 16, *llama),
        _copy("llama_many", 512, *llama),
        _copy("smollm2", 16, *smollm2),
        _copy("f32_d256_b128", 16, 128, 4, 256, dtype=jnp.float32),
        _gather("llama", 64, *llama),
        _gather("smollm2", 64, *smollm2),
        _gather("f16_d80_b32", 64, 32, 4, 80, dtype=jnp.float16),
        _scatter("llama", 64, *llama),
        _scatter("smollm2", 64, *smollm2),
    ]
