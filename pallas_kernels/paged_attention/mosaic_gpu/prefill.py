"""Rows with many queries: tiles of a row's chunk, causal from where its cached context ends.

FlashAttention-2 (Dao, 2023) with warp-level products: a warp holds 16 of the tile's rows, each one
query token and one of the heads that share the KV head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import store
from pallas_kernels.paged_attention.mosaic_gpu.config import PrefillTile
from pallas_kernels.paged_attention.mosaic_gpu.launch import Call, Inputs, launch
from pallas_kernels.paged_attention.mosaic_gpu.piece import Piece, open_piece
from pallas_kernels.paged_attention.mosaic_gpu.pipeline import (
    HIDDEN,
    lane_slices,
    matrix_product,
    scratch_types,
    tiled,
    to_logits,
)

NAME = "paged_attention_prefill"


def _part(head_dim: int) -> int:
    """Context tokens whose values are in registers at a time."""
    return 32 if head_dim <= 128 else 16


def prefill(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    count: jax.Array,
    items: jax.Array,
    first_block: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike,
    call: Call,
) -> jax.Array:
    """Attention of each prefill tile.

    Args:
      q: ``[W, K, rows, D]`` queries of each tile, query-major, of the pool's type.
      count, items: ``WorkList.prefill_count`` and ``prefill_items``.
      k_pool, v_pool, block_tables, first_block: as for ``decode.decode``.

    Returns:
      ``[W, K, rows, D]`` of ``out_dtype``; undefined past ``count``.
    """

    tile, head_dim, dtype = call.config.prefill, q.shape[3], k_pool.dtype
    return launch(
        _body,
        *(q, k_pool, v_pool, block_tables, count, items, first_block),
        name=NAME,
        call=call,
        tile=tile,
        out_type=jax.ShapeDtypeStruct(q.shape, out_dtype),
        scratch_types=[
            tiled((tile.rows, head_dim), dtype, tile.swizzle) if head_dim > 128 else (),
            tiled((tile.rows, tile.chunk), dtype, _part(head_dim) * 2),
            *scratch_types(tile, k_pool.shape[1], head_dim, dtype),
        ],
    )


def _body(
    inputs: Inputs,
    out_ref: Any,
    queries: Any,
    weights: Any,
    *stages: Any,
    call: Call,
    num_ctas: int,
) -> None:
    tile, head_dim = call.config.prefill, inputs.q.shape[3]

    def attend(item: jax.Array, head: jax.Array, _: None) -> None:
        piece = open_piece(inputs, stages, call, item, head)
        outs = _attend(inputs.q.at[item, head], piece, queries, weights, call=call)
        for part, out in zip(_out_slices(head_dim, tile), outs, strict=True):
            place = out_ref.at[item, head, :, part]
            store(place, out.astype(out_ref.dtype))

    inputs.for_each_piece(call, num_ctas, attend)


def _out_slices(head_dim: int, tile: PrefillTile) -> list[Any]:
    """The head dimension in slices whose sums are updated one after the other, to save registers
    for the values.
    """
    return lane_slices(head_dim, tile.swizzle, 128)


def _attend(
    q_ref: Any,
    piece: Piece,
    queries_ref: Any,
    weights_ref: Any,
    *,
    call: Call,
) -> list[jax.Array]:
    """Normalised attention ``[rows, D]`` float32 of one piece, in slices of D."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    stream, tile = piece.stream, call.config.prefill
    dtype, head_dim = stream.k_ref.dtype, stream.head_dim
    lhs = plgpu.Layout.MMA_LHS(dtype, m_warps=tile.row_warps)
    rhs = plgpu.Layout.MMA_RHS(dtype, m_warps=tile.row_warps)
    acc = plgpu.Layout.MMA_ACC(dtype, m_warps=tile.row_warps)
    per_row = acc.reduce(1)
    product = matrix_product(stream.target)
    logits_shape, parts = (tile.rows, tile.chunk), _out_slices(head_dim, tile)

    def full(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), acc)

    def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    stream.start()
    size = _part(head_dim)
    lanes = lane_slices(head_dim, tile.swizzle, 64)
    q = [plgpu.load(q_ref.at[:, part], layout=lhs, optimized=False) for part in lanes]
    in_shared = head_dim > 128
    if in_shared:
        # Beside 128 registers of sums there is no room for as many of queries.
        for part, value in zip(lanes, q, strict=True):
            queries_ref[:, part] = value

    def visible(first: jax.Array) -> jax.Array:
        queries = lax.div(iota(logits_shape, 0, acc), jnp.int32(call.config.group))
        return piece.visible(iota(logits_shape, 1, acc) + first, queries, call)

    def without_unseen(v: jax.Array, first: jax.Array) -> jax.Array:
        # Stale slots may hold NaN, and 0 * NaN is NaN: values that no query sees become 0.
        tokens = iota(v.shape, 0, rhs) + first
        return jnp.where(piece.seen(tokens), v, jnp.zeros((), dtype))

    def step(i: jax.Array, carry: tuple, *, masked: bool) -> tuple:
        outs, high, total = carry
        slot = lax.rem(i, jnp.int32(tile.stages))
        first = stream.begin + i * tile.chunk
        upcoming = stream.upcoming(i)

        stream.wait_keys(i)
        logits = full(logits_shape, acc)
        for part, a in zip(lanes, q, strict=True):
            if in_shared:
                a = plgpu.load(queries_ref.at[:, part], layout=lhs, optimized=False)
            k = plgpu.load(stream.k_stages.at[slot, :, part].T, layout=rhs, optimized=False)
            logits = product(logits, a, k)
        logits = to_logits(logits, call.scale, call.soft_cap)
        if masked:
            logits = jnp.where(visible(first), logits, HIDDEN)
        new_high = jnp.maximum(high, jnp.max(logits, axis=1))
        shrink = jnp.exp2(high - new_high)
        weight = jnp.exp2(logits - spread(new_high, logits_shape))
        total = total * shrink + jnp.sum(weight, axis=1)
        outs = [out * spread(shrink, out.shape) for out in outs]
        weights_ref[...] = weight.astype(dtype)

        stream.wait_values(i)
        for start in range(0, tile.chunk, size):
            tokens = pl.ds(start, size)
            weight = plgpu.load(weights_ref.at[:, tokens], layout=lhs, optimized=False)
            for n, part in enumerate(parts):
                v = plgpu.load(stream.v_stages.at[slot, tokens, part], layout=rhs, optimized=False)
                if masked:
                    v = without_unseen(v, first + start)
                outs[n] = product(outs[n], weight, v)
        stream.advance(i, upcoming)
        return tuple(outs), new_high, total

    whole_begin, whole_end = piece.whole_chunks(call)
    hidden, plain = (functools.partial(step, masked=masked) for masked in (True, False))
    carry = (
        tuple(full((tile.rows, part.size), acc) for part in parts),
        full((tile.rows,), per_row, HIDDEN),
        full((tile.rows,), per_row),
    )
    if call.sliding_window is not None:
        carry = lax.fori_loop(0, whole_begin, hidden, carry)
    carry = lax.fori_loop(whole_begin, whole_end, plain, carry)
    outs, _, total = lax.fori_loop(whole_end, stream.num_chunks, hidden, carry)
    return [out / spread(total, out.shape) for out in outs]
