"""Rows with few queries: the context is split over thread blocks.

Flash decoding (Dao et al., 2023). A thread block takes one split of one row's context for one KV
head and leaves unnormalised sums, the largest logit and the total weight, all float32; ``combine``
joins a row's splits. Where a split begins depends on static shapes only, so a row's result does
not depend on the rows beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import store
from pallas_kernels.paged_attention.mosaic_gpu.launch import Call, Inputs, launch
from pallas_kernels.paged_attention.mosaic_gpu.pipeline import (
    HIDDEN,
    Stream,
    lane_slices,
    matrix_product,
    scratch_types,
    to_logits,
)

NAME = "paged_attention_decode"


def decode(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    count: jax.Array,
    items: jax.Array,
    first_block: jax.Array,
    *,
    call: Call,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Partial attention of each piece of decode work.

    Args:
      q: ``[R, K, columns, D]`` queries of each row, query-major, of the pool's type.
      k_pool, v_pool: ``[L * N, B, K * D]``.
      block_tables: ``[R, M]``.
      count, items: ``WorkList.decode_count`` and ``decode_items``.
      first_block: ``[1]`` where the layer begins in the pools.

    Returns:
      ``[I, K, D, columns]`` sums of weighted values, ``[I, K, columns]`` largest logits (times
      log2 e) and ``[I, K, columns]`` total weights, float32; undefined past ``count``.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile, num_kv_heads = call.config.decode, call.config.num_kv_heads
    num_items, head_dim, dtype = items.shape[0], q.shape[3], k_pool.dtype
    columns = (num_items, num_kv_heads, tile.columns)
    return launch(
        _body,
        *(q, k_pool, v_pool, block_tables, count, items, first_block),
        name=NAME,
        call=call,
        tile=tile,
        out_type=[
            jax.ShapeDtypeStruct((num_items, num_kv_heads, head_dim, tile.columns), jnp.float32),
            jax.ShapeDtypeStruct(columns, jnp.float32),
            jax.ShapeDtypeStruct(columns, jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((tile.chunk, tile.columns), dtype),
            *scratch_types(tile, k_pool.shape[1], head_dim, dtype),
        ],
    )


def _body(
    inputs: Inputs,
    out_ref: Any,
    high_ref: Any,
    total_ref: Any,
    weights: Any,
    *stages: Any,
    call: Call,
    num_ctas: int,
) -> None:
    tile = call.config.decode

    def piece(item: jax.Array, head: jax.Array, _: None) -> None:
        row, begin, position, context = (inputs.items[item, c] for c in range(4))
        end = jnp.minimum(begin + tile.split, context)
        oldest = jnp.int32(0)
        if call.sliding_window is not None:
            oldest = jnp.maximum(position - call.sliding_window + 1, 0)
            begin = jnp.maximum(begin, oldest // tile.chunk * tile.chunk)
        out, high, total = _attend(
            inputs.q.at[row, head],
            inputs.stream(stages, call, tile, row=row, head=head, begin=begin, end=end),
            weights,
            position=position,
            oldest=oldest,
            end=end,
            context=context,
            call=call,
        )
        _store(out_ref.at[item, head], out)
        _store(high_ref.at[item, head], high)
        _store(total_ref.at[item, head], total)

    inputs.for_each_piece(call, num_ctas, piece)


def _store(ref: Any, value: jax.Array) -> None:

    store(ref, value)


def _attend(
    q_ref: Any,
    stream: Stream,
    weights_ref: Any,
    *,
    position: jax.Array,
    oldest: jax.Array,
    end: jax.Array,
    context: jax.Array,
    call: Call,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one tile over the stream: sums ``[D, columns]``, and per column the largest
    logit and the total weight.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile, dtype, head_dim = call.config.decode, stream.k_ref.dtype, stream.head_dim
    lhs = plgpu.Layout.MMA_LHS(dtype, m_warps=tile.row_warps)
    rhs = plgpu.Layout.MMA_RHS(dtype, m_warps=tile.row_warps)
    acc = plgpu.Layout.MMA_ACC(dtype, m_warps=tile.row_warps)
    column = acc.reduce(0)
    product = matrix_product(stream.target)
    logits_shape, out_shape = (tile.chunk, tile.columns), (head_dim, tile.columns)

    def full(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [1]), acc)

    def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    stream.start()
    lanes = lane_slices(head_dim, tile.swizzle, 64)

    def queries(part: Any) -> jax.Array:
        return plgpu.load(q_ref.at[:, part].T, layout=rhs, optimized=False)

    # Of the largest heads there is no room for the queries in registers, if three thread blocks are
    # to fit on an SM: they are read again for each chunk, from the L1 cache.
    q = [queries(part) for part in lanes] if head_dim <= 128 else [None] * len(lanes)

    def visible(first: jax.Array) -> jax.Array:
        tokens = iota(logits_shape, 0, acc) + first
        positions = position
        if tile.queries > 1:
            # Columns past the row's queries show nothing of what lies after its context.
            queries = lax.div(iota(logits_shape, 1, acc), jnp.int32(call.config.group))
            positions = jnp.minimum(queries + position, context - 1)
        seen = tokens <= positions
        if call.sliding_window is not None:
            seen &= tokens > positions - call.sliding_window
        return seen

    def step(i: jax.Array, carry: tuple) -> tuple:
        out, high, total = carry
        slot = lax.rem(i, jnp.int32(tile.stages))
        first = stream.begin + i * tile.chunk
        upcoming = stream.upcoming(i)

        stream.wait_keys(i)
        logits = full(logits_shape, acc)
        for part, b in zip(lanes, q, strict=True):
            k = plgpu.load(stream.k_stages.at[slot, :, part], layout=lhs, optimized=False)
            logits = product(logits, k, queries(part) if b is None else b)
        logits = to_logits(logits, call.scale, call.soft_cap)
        logits = jnp.where(visible(first), logits, HIDDEN)
        new_high = jnp.maximum(high, jnp.max(logits, axis=0))
        shrink = jnp.exp2(high - new_high)
        weight = jnp.exp2(logits - spread(new_high, logits_shape))
        total = total * spread(shrink, logits_shape) + weight
        out = out * spread(shrink, out_shape)
        store(weights_ref, weight.astype(dtype))

        stream.wait_values(i)
        v = plgpu.load(stream.v_stages.at[slot].T, layout=lhs, optimized=False)
        # Stale slots may hold NaN, and 0 * NaN is NaN: values that no query sees become 0.
        tokens = iota((head_dim, tile.chunk), 1, lhs) + first
        v = jnp.where((tokens >= oldest) & (tokens < end), v, jnp.zeros((), dtype))
        weight = plgpu.load(weights_ref, layout=rhs, optimized=False)
        out = product(out, v, weight)
        stream.advance(i, upcoming)
        return out, new_high, total

    carry = (full(out_shape, acc), full((tile.columns,), column, HIDDEN), full(logits_shape, acc))
    out, high, total = lax.fori_loop(0, stream.num_chunks, step, carry)
    return out, high, jnp.sum(total, axis=0)
