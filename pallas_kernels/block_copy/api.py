"""Copying whole blocks within the pool (copy-on-write)."""

import jax

from pallas_kernels.block_copy import reference, xla
from pallas_kernels.dispatch import resolve

_IMPLEMENTATIONS = {"reference": reference.copy_blocks, "xla": xla.copy_blocks}


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
      implementation: ``None`` (by platform), ``"xla"`` or ``"reference"``.
    """
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"src {src.shape} and dst {dst.shape} must both be [num_copies]")
    function = resolve("copy_blocks", _IMPLEMENTATIONS, implementation)
    return function(k_pool, v_pool, src, dst)
