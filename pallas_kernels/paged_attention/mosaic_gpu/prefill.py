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

from pallas_kernels.paged_attention.mosaic_gpu.config import Config, PrefillTile, blocks_per_sm
from pallas_kernels.paged_attention.mosaic_gpu.pipeline import (
    HIDDEN,
    Stream,
    lane_slices,
    matrix_product,
    scratch_types,
    tiled,
    to_logits,
)
from pallas_kernels.paged_attention.mosaic_gpu.target import Target

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
    num_blocks: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out_dtype: jax.typing.DTypeLike,
    config: Config,
    target: Target,
) -> jax.Array:
    """Attention of each prefill tile.

    Args:
      q: ``[W, K, rows, D]`` queries of each tile, query-major, of the pool's type.
      count, items: ``WorkList.prefill_count`` and ``prefill_items``.
      k_pool, v_pool, block_tables, first_block: as for ``decode.decode``.

    Returns:
      ``[W, K, rows, D]`` of ``out_dtype``; undefined past ``count``.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile, num_kv_heads = config.prefill, config.num_kv_heads
    head_dim, dtype = q.shape[3], k_pool.dtype
    most = items.shape[0] * num_kv_heads
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
    kernel = plgpu.kernel(
        body,
        grid=(num_ctas,),
        grid_names=("cta",),
        kernel_name=NAME,
        out_type=jax.ShapeDtypeStruct(q.shape, out_dtype),
        scratch_types=[
            tiled((tile.rows, head_dim), dtype, tile.swizzle) if head_dim > 128 else (),
            tiled((tile.rows, tile.chunk), dtype, _part(head_dim) * 2),
            *scratch_types(tile, k_pool.shape[1], head_dim, dtype),
        ],
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
    queries: Any,
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
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile, num_kv_heads = config.prefill, config.num_kv_heads
    cta = lax.axis_index("cta")
    first_block = first_block_ref[0]
    work = count_ref[0] * num_kv_heads

    def piece(turn: jax.Array, _: None) -> None:
        index = cta + turn * num_ctas
        item, head = index // num_kv_heads, lax.rem(index, num_kv_heads)
        row, num_queries, position = (item_ref[item, c] for c in range(3))
        # The context of the tile's last query; what lies after it no query sees.
        end = position + num_queries
        oldest = begin = jnp.int32(0)
        if sliding_window is not None:
            oldest = jnp.maximum(position - sliding_window + 1, 0)
            begin = oldest // tile.chunk * tile.chunk
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
            num_chunks=(end - begin + tile.chunk - 1) // tile.chunk,
            first_block=first_block,
            num_blocks=num_blocks,
            head_dim=q_ref.shape[3],
        )
        outs = _attend(
            q_ref.at[item, head],
            stream,
            queries,
            weights,
            position=position,
            oldest=oldest,
            end=end,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            config=config,
        )
        for part, out in zip(_out_slices(q_ref.shape[3], tile), outs, strict=True):
            place = out_ref.at[item, head, :, part]
            plgpu.store(place, out.astype(out_ref.dtype), optimized=False)

    lax.fori_loop(0, (work - cta + num_ctas - 1) // num_ctas, piece, None)


def _out_slices(head_dim: int, tile: PrefillTile) -> list[Any]:
    """The head dimension in slices whose sums are updated one after the other, to save registers
    for the values.
    """
    return lane_slices(head_dim, tile.swizzle, 128)


def _attend(
    q_ref: Any,
    stream: Stream,
    queries_ref: Any,
    weights_ref: Any,
    *,
    position: jax.Array,
    oldest: jax.Array,
    end: jax.Array,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    config: Config,
) -> list[jax.Array]:
    """Normalised attention ``[rows, D]`` float32 of one tile over the stream, in slices of D."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile, dtype, head_dim = config.prefill, stream.k_ref.dtype, stream.head_dim
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
        tokens = iota(logits_shape, 1, acc) + first
        queries = lax.div(iota(logits_shape, 0, acc), jnp.int32(config.group))
        # Rows past the tile's queries show nothing of what lies after its context.
        positions = jnp.minimum(queries + position, end - 1)
        seen = tokens <= positions
        if sliding_window is not None:
            seen &= tokens > positions - sliding_window
        return seen

    def without_unseen(v: jax.Array, first: jax.Array) -> jax.Array:
        # Stale slots may hold NaN, and 0 * NaN is NaN: values that no query sees become 0.
        tokens = iota(v.shape, 0, rhs) + first
        return jnp.where((tokens >= oldest) & (tokens < end), v, jnp.zeros((), dtype))

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
        logits = to_logits(logits, scale, soft_cap)
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

    # Chunks that every query sees whole need no mask: those between the last query's window and
    # the first query.
    chunks = stream.num_chunks
    whole_end = jnp.clip((position + 1 - stream.begin) // tile.chunk, 0, chunks)
    whole_begin = jnp.int32(0)
    if sliding_window is not None:
        newest_oldest = jnp.maximum(end - sliding_window, 0)
        whole_begin = (newest_oldest - stream.begin + tile.chunk - 1) // tile.chunk
        whole_begin = jnp.clip(whole_begin, 0, whole_end)
    hidden, plain = (functools.partial(step, masked=masked) for masked in (True, False))
    carry = (
        tuple(full((tile.rows, part.size), acc) for part in parts),
        full((tile.rows,), per_row, HIDDEN),
        full((tile.rows,), per_row),
    )
    if sliding_window is not None:
        carry = lax.fori_loop(0, whole_begin, hidden, carry)
    carry = lax.fori_loop(whole_begin, whole_end, plain, carry)
    outs, _, total = lax.fori_loop(whole_end, chunks, hidden, carry)
    return [out / spread(total, out.shape) for out in outs]
