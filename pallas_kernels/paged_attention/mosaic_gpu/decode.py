"""Rows with few queries: the context is split over thread blocks.

Flash decoding (Dao et al., 2023). A thread block takes one split of one row's context for one KV
head and leaves unnormalised sums, the largest logit and the total weight, all float32; ``combine``
joins a row's splits. Where a split begins depends on static shapes only, so a row's result does
not depend on the rows beside it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.mosaic_gpu.config import Config, blocks_per_sm
from pallas_kernels.paged_attention.mosaic_gpu.pipeline import (
    HIDDEN,
    Stream,
    lane_slices,
    matrix_product,
    scratch_types,
    to_logits,
)
from pallas_kernels.paged_attention.mosaic_gpu.target import Target

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
    num_blocks: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    config: Config,
    target: Target,
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

    tile, num_kv_heads = config.decode, config.num_kv_heads
    head_dim, dtype = q.shape[3], k_pool.dtype
    num_items = items.shape[0]
    most = num_items * num_kv_heads
    num_ctas = min(most, target.num_sms * blocks_per_sm(tile, head_dim, target))
    body = functools.partial(
        _body,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        num_blocks=num_blocks,
        num_ctas=num_ctas,
        config=config,
        target=target,
    )
    weights = plgpu.SMEM((tile.chunk, tile.columns), dtype)
    columns = (num_items, num_kv_heads, tile.columns)
    kernel = plgpu.kernel(
        body,
        grid=(num_ctas,),
        grid_names=("cta",),
        kernel_name=NAME,
        out_type=[
            jax.ShapeDtypeStruct((num_items, num_kv_heads, head_dim, tile.columns), jnp.float32),
            jax.ShapeDtypeStruct(columns, jnp.float32),
            jax.ShapeDtypeStruct(columns, jnp.float32),
        ],
        scratch_types=[weights, *scratch_types(tile, k_pool.shape[1], head_dim, dtype)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return kernel(q, k_pool, v_pool, block_tables, count, items, first_block)


def _body(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    count_ref: Any,
    item_ref: Any,
    first_block_ref: Any,
    out_ref: Any,
    high_ref: Any,
    total_ref: Any,
    weights: Any,
    k_stages: Any,
    v_stages: Any,
    k_barriers: Any,
    v_barriers: Any,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    num_blocks: int,
    num_ctas: int,
    config: Config,
    target: Target,
) -> None:
    tile, num_kv_heads = config.decode, config.num_kv_heads
    cta = lax.axis_index("cta")
    first_block = first_block_ref[0]
    work = count_ref[0] * num_kv_heads

    def piece(turn: jax.Array, _: None) -> None:
        index = cta + turn * num_ctas
        # Heads of one block lie side by side in memory, and run side by side.
        item, head = index // num_kv_heads, lax.rem(index, num_kv_heads)
        row, begin, position, context = (item_ref[item, c] for c in range(4))
        end = jnp.minimum(begin + tile.split, context)
        oldest = jnp.int32(0)
        if sliding_window is not None:
            oldest = jnp.maximum(position - sliding_window + 1, 0)
            begin = jnp.maximum(begin, oldest // tile.chunk * tile.chunk)
        stream = Stream(
            k_ref=k_ref,
            v_ref=v_ref,
            table_ref=table_ref,
            k_stages=k_stages,
            v_stages=v_stages,
            k_barriers=k_barriers,
            v_barriers=v_barriers,
            tile=tile,
            target=target,
            row=row,
            head=head,
            begin=begin,
            num_chunks=(jnp.maximum(end - begin, 0) + tile.chunk - 1) // tile.chunk,
            first_block=first_block,
            num_blocks=num_blocks,
            head_dim=q_ref.shape[3],
        )
        out, high, total = _attend(
            q_ref.at[row, head],
            stream,
            weights,
            position=position,
            oldest=oldest,
            end=end,
            context=context,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            config=config,
        )
        _store(out_ref.at[item, head], out)
        _store(high_ref.at[item, head], high)
        _store(total_ref.at[item, head], total)

    lax.fori_loop(0, (work - cta + num_ctas - 1) // num_ctas, piece, None)


def _store(ref: Any, value: jax.Array) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu.store(ref, value, optimized=False)


def _attend(
    q_ref: Any,
    stream: Stream,
    weights_ref: Any,
    *,
    position: jax.Array,
    oldest: jax.Array,
    end: jax.Array,
    context: jax.Array,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    config: Config,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one tile over the stream: sums ``[D, columns]``, and per column the largest
    logit and the total weight.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile, dtype, head_dim = config.decode, stream.k_ref.dtype, stream.head_dim
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
            queries = lax.div(iota(logits_shape, 1, acc), jnp.int32(config.group))
            positions = jnp.minimum(queries + position, context - 1)
        seen = tokens <= positions
        if sliding_window is not None:
            seen &= tokens > positions - sliding_window
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
        logits = to_logits(logits, scale, soft_cap)
        logits = jnp.where(visible(first), logits, HIDDEN)
        new_high = jnp.maximum(high, jnp.max(logits, axis=0))
        shrink = jnp.exp2(high - new_high)
        weight = jnp.exp2(logits - spread(new_high, logits_shape))
        total = total * spread(shrink, logits_shape) + weight
        out = out * spread(shrink, out_shape)
        plgpu.store(weights_ref, weight.astype(dtype), optimized=False)

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
