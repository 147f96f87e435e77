"""Whole blocks: copied within the pool (copy-on-write), gathered out of it and scattered back
(swapping).
"""

import jax

from pallas_kernels.block_copy import mosaic_gpu, reference, xla
from pallas_kernels.dispatch import call

_COPY = {
    "reference": reference.copy_blocks,
    "xla": xla.copy_blocks,
    "pallas": mosaic_gpu.copy_blocks,
}
_GATHER = {
    "reference": reference.gather_blocks,
    "xla": xla.gather_blocks,
    "pallas": mosaic_gpu.gather_blocks,
}
_SCATTER = {
    "reference": reference.scatter_blocks,
    "xla": xla.scatter_blocks,
    "pallas": mosaic_gpu.scatter_blocks,
}


def copy_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copy block ``src[i]`` to block ``dst[i]`` in every layer; returns the new pools.

    All sources are read before any destination is written. A pair in which either id is out of
    range (``NULL``) is dropped; when all are, nothing but the ids is touched.

    Args:
      k_pool, v_pool: the pools of ``init_pool``; updated in place under donation.
      src, dst: ``[A]`` int32 block ids; no destination may occur twice.
      implementation: ``None`` (by platform), ``"xla"``, ``"pallas"`` or ``"reference"``.
    """
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"src {src.shape} and dst {dst.shape} must both be [num_copies]")
    return call("copy_blocks", _COPY, implementation, k_pool, v_pool, src, dst)


def gather_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    blocks: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Blocks out of the pool, all layers of a block together; returns (keys, values).

    Both are ``[A, L, B, K, D]`` in the pool's storage type, so the first ``n`` blocks lie in one
    piece and can be sent to the host as one. A block id out of range (``NULL``) gives zeros.

    Args:
      k_pool, v_pool: the pools of ``init_pool``; only read.
      blocks: ``[A]`` int32 block ids; one may occur more than once.
      implementation: ``None`` (by platform), ``"xla"``, ``"pallas"`` or ``"reference"``.
    """
    if blocks.ndim != 1:
        raise ValueError(f"blocks {blocks.shape} must be [num_blocks]")
    return call("gather_blocks", _GATHER, implementation, k_pool, v_pool, blocks)


def scatter_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_blocks: jax.Array,
    v_blocks: jax.Array,
    blocks: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The inverse of ``gather_blocks``: put block ``i`` of the buffers at ``blocks[i]``.

    Args:
      k_pool, v_pool: the pools of ``init_pool``; updated in place under donation.
      k_blocks, v_blocks: ``[A, L, B, K, D]`` in the pool's storage type.
      blocks: ``[A]`` int32 block ids; out of range (``NULL``) is dropped. None may occur twice.
      implementation: ``None`` (by platform), ``"xla"``, ``"pallas"`` or ``"reference"``.
    """
    expected = (*blocks.shape, k_pool.shape[0], *k_pool.shape[2:])
    if blocks.ndim != 1 or k_blocks.shape != expected or v_blocks.shape != expected:
        raise ValueError(
            f"k_blocks {k_blocks.shape} and v_blocks {v_blocks.shape} must be [num_blocks, "
            f"num_layers, block_size, num_kv_heads, head_dim] = {expected}"
        )
    if k_blocks.dtype != k_pool.dtype or v_blocks.dtype != v_pool.dtype:
        raise ValueError(
            f"k_blocks ({k_blocks.dtype}) and v_blocks ({v_blocks.dtype}) must have the pools' "
            f"type ({k_pool.dtype})"
        )
    args = (k_pool, v_pool, k_blocks, v_blocks, blocks)
    return call("scatter_blocks", _SCATTER, implementation, *args)
