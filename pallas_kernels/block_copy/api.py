"""Whole blocks: copied within the pool (copy-on-write), gathered out of it and scattered back
(snapshots), moved to and from a second pool in host memory (swapping).
"""

import jax
import jax.numpy as jnp

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
# No kernel: between a GPU's memory and the host's, its copy engines are what moves a block, and XLA
# starts them.
_MOVE = {"reference": reference.move_blocks, "xla": xla.move_blocks}


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


def move_blocks(
    source: jax.Array,
    target: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    count: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copy blocks from one pool to another; returns the target and how many were copied.

    That number is ``count``, but known only afterwards. Let what writes into the source later
    depend on it: if XLA may do both at once, it copies the source. The pools may lie in different
    memories, one on a GPU and one in ``pinned_host``.

    Args:
      source, target: pools of ``init_pool``, ``[L, N, B, K, D]`` and ``[L, N', B, K, D]`` of one
        type; the target is updated in place under donation.
      src, dst: ``[A]`` int32 block ids; the first ``count`` entries are read, all within range. No
        destination may occur twice.
      count: ``[]`` int32, at most A.
      implementation: ``None`` or ``"xla"``, on every platform; ``"reference"`` for pools in one
        memory.

    Raises:
      NotImplementedError: ``"pallas"``. Between memories, a GPU's copy engines move blocks while
        its processors do something else; a kernel would take these away from the model.
      ValueError: pools or ids that do not fit together.
    """
    if src.shape != dst.shape or src.ndim != 1 or jnp.ndim(count):
        raise ValueError(
            f"src {src.shape} and dst {dst.shape} must both be [num_blocks], and count "
            f"{jnp.shape(count)} a scalar"
        )
    shapes = [(pool.shape[:1], *pool.shape[2:], pool.dtype) for pool in (source, target)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"source {source.shape} {source.dtype} and target {target.shape} {target.dtype} may "
            "differ in their number of blocks only"
        )
    args = (source, target, src, dst, count)
    return call("move_blocks", _MOVE, implementation, *args)
