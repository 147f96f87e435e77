"""Joins the partial results of a row's splits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import store
from pallas_kernels.paged_attention.mosaic_gpu.config import Config
from pallas_kernels.paged_attention.mosaic_gpu.pipeline import HIDDEN

NAME = "paged_attention_combine"


def _together(head_dim: int, columns: int) -> int:
    """Splits whose loads are under way at the same time: 64 registers' worth, 4 at most."""
    return max(1, min(4, 64 * 128 // (head_dim * columns)))


def combine(
    out: jax.Array,
    high: jax.Array,
    total: jax.Array,
    first_items: jax.Array,
    num_items: jax.Array,
    *,
    config: Config,
) -> jax.Array:
    """Attention of each row from the partial results of its splits.

    Args:
      out, high, total: from ``decode.decode``.
      first_items, num_items: of the ``WorkList``.

    Returns:
      ``[R, K, D, columns]`` float32; undefined for rows with no pieces of work.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_rows, (_, num_kv_heads, head_dim, columns) = num_items.shape[0], out.shape
    kernel = plgpu.kernel(
        functools.partial(_body, config=config),
        grid=(num_rows, num_kv_heads),
        grid_names=("row", "head"),
        kernel_name=NAME,
        out_type=jax.ShapeDtypeStruct((num_rows, num_kv_heads, head_dim, columns), jnp.float32),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Nothing is read that was written here.
            unsafe_no_auto_barriers=True,
        ),
    )
    return kernel(out, high, total, first_items, num_items)


def _body(
    out_ref: Any,
    high_ref: Any,
    total_ref: Any,
    first_ref: Any,
    num_ref: Any,
    result_ref: Any,
    *,
    config: Config,
) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row, head = lax.axis_index("row"), lax.axis_index("head")
    first, count = first_ref[row], num_ref[row]
    shape = out_ref.shape[2:]
    together = _together(*shape)
    matrix = plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=config.decode.row_warps)
    column = matrix.reduce(0)

    def full(shape: tuple[int, ...], layout: Any, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def spread(x: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [1]), matrix)

    def load(ref: Any, item: jax.Array, layout: Any) -> jax.Array:
        return plgpu.load(ref.at[item, head], layout=layout, optimized=False)

    def group(i: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Items of one turn, and whether each is one; the last one stands in for the missing."""
        numbers = [i * together + j for j in range(together)]
        return [(first + jnp.minimum(n, count - 1), n < count) for n in numbers]

    def highest(i: jax.Array, high: jax.Array) -> jax.Array:
        for item, _ in group(i):
            high = jnp.maximum(high, load(high_ref, item, column))
        return high

    def add(i: jax.Array, carry: tuple, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        acc, total = carry
        loaded = [
            (
                real,
                load(high_ref, item, column),
                load(total_ref, item, column),
                load(out_ref, item, matrix),
            )
            for item, real in group(i)
        ]
        for real, part_high, part_total, part in loaded:
            weight = jnp.exp2(part_high - high) * real.astype(jnp.float32)
            total = total + part_total * weight
            acc = acc + part * spread(weight)
        return acc, total

    @pl.when(count > 0)
    def _():
        turns = (count + together - 1) // together
        high = lax.fori_loop(0, turns, highest, full(shape[1:], column, HIDDEN))
        start = full(shape, matrix, 0.0), full(shape[1:], column, 0.0)
        acc, total = lax.fori_loop(0, turns, functools.partial(add, high=high), start)
        store(result_ref.at[row, head], acc / spread(total))
