"""What the Mosaic GPU kernels share: which jax they need, and register layouts for copying rows.

``jax.experimental.pallas.mosaic_gpu`` is imported inside functions: importing it takes a while,
and on jax 0.10 it is another interface.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

WARPGROUP_THREADS = 128
"""Threads of a thread block in these kernels: one warpgroup."""

VECTOR_BYTES = 16
"""The widest load or store of one thread."""


def require_mosaic_gpu(operation: str) -> None:
    """Raise ``NotImplementedError`` where the installed jax is too old for these kernels."""
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(
            f"{operation}: implementation 'pallas' needs jax 0.11 or later (and so Python 3.12 or "
            f"later), got jax {jax.__version__}"
        )


def vector_elements(num_elements: int, dtype: jax.typing.DTypeLike, threads: int) -> int:
    """Elements of one access when ``threads`` threads share a contiguous row evenly; 0 if they
    cannot.
    """
    if num_elements % threads:
        return 0
    widest = VECTOR_BYTES // jnp.dtype(dtype).itemsize
    return math.gcd(num_elements // threads, widest)


def row_layout(num_elements: int, dtype: jax.typing.DTypeLike):
    """Register layout of a contiguous row ``[num_elements]``, a multiple of 16 elements.

    A multiple of 128 is spread over the whole warpgroup in accesses of up to 16 bytes. Other rows
    (3 heads of 64) are spread over one warp or half of one, and the other warps repeat its
    accesses: the same bytes to the same places, which the caches merge.

    Raises:
      NotImplementedError: for any other number of elements.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if vector := vector_elements(num_elements, dtype, WARPGROUP_THREADS):
        return plgpu.Layout.WG_STRIDED((num_elements,), vec_size=vector)
    for lanes in (32, 16):
        if vector := vector_elements(num_elements, dtype, lanes):
            spread = (-2,) if lanes == 32 else (-2, plgpu.Replicated(2))
            return plgpu.Layout.TILED(
                tiling=plgpu.Tiling(((lanes * vector,), (vector,))),
                warp_dims=(plgpu.Replicated(4),),
                lane_dims=spread,
                vector_dim=-1,
            )
    raise NotImplementedError(
        f"rows of num_kv_heads * head_dim = {num_elements} elements; the GPU kernels need a "
        "multiple of 16"
    )


def store(ref: Any, value: jax.Array) -> None:
    """Store an array to a reference, in whatever accesses its layout gives."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11
        ref[...] = value


def copy_params():
    """Compiler parameters of kernels in which each thread stores only what it loaded itself.

    Such a kernel needs no barrier: with one register layout for every load and store, an element
    is always the same thread's. By default Pallas puts barriers around every store.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
    )
