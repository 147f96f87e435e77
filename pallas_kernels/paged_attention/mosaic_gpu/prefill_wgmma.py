"""Rows with many queries on Hopper: the tile of ``prefill``, with products of whole warpgroups.

FlashAttention-3 (Shah et al., 2024) without its schedule between warpgroups. One warpgroup copies
queries, keys and values; the others take 64 of the tile's rows each and share what it copied. A
warpgroup's softmax of one chunk runs beside its product with the values of the chunk before, and
beside the other warpgroup's products. Queries, keys and values are read from shared memory by the
tensor cores, the softmax's weights from registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import store
from pallas_kernels.paged_attention.mosaic_gpu.config import WGMMA_ROWS
from pallas_kernels.paged_attention.mosaic_gpu.launch import Call, Inputs, launch
from pallas_kernels.paged_attention.mosaic_gpu.piece import Piece, open_piece
from pallas_kernels.paged_attention.mosaic_gpu.pipeline import (
    HIDDEN,
    lane_slices,
    scratch_types,
    tiled,
    to_logits,
)
from pallas_kernels.paged_attention.mosaic_gpu.tensor_core import run_products

NAME = "paged_attention_prefill_wgmma"


def prefill_wgmma(
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
    """Attention of each prefill tile: arguments and result as for ``prefill.prefill``."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile, dtype, head_dim = call.config.prefill, k_pool.dtype, q.shape[3]
    groups = tile.rows // WGMMA_ROWS
    per_stage = plgpu.Barrier(num_arrivals=groups, num_barriers=tile.stages)
    return launch(
        _body,
        *(q, k_pool, v_pool, block_tables, count, items, first_block),
        name=NAME,
        call=call,
        tile=tile,
        out_type=jax.ShapeDtypeStruct(q.shape, out_dtype),
        scratch_types=[
            tiled((tile.rows, head_dim), dtype, tile.swizzle),
            *scratch_types(tile, k_pool.shape[1], head_dim, dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=groups),
            per_stage,
            per_stage,
            plgpu.Barrier(num_arrivals=groups),
        ],
        num_threads=groups + 1,
        thread_name="warpgroup",
    )


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory of a thread block. Barriers ``*_free`` say that what was copied is used."""

    queries: Any
    k_stages: Any
    v_stages: Any
    k_barriers: Any
    v_barriers: Any
    q_barrier: Any
    q_free: Any
    k_free: Any
    v_free: Any
    cleaned: Any

    @property
    def stages(self) -> tuple[Any, Any, Any, Any]:
        return self.k_stages, self.v_stages, self.k_barriers, self.v_barriers


def _body(inputs: Inputs, out_ref: Any, *shared: Any, call: Call, num_ctas: int) -> None:
    shared = _Shared(*shared)
    groups = call.config.prefill.rows // WGMMA_ROWS
    group = lax.axis_index("warpgroup")

    open_ = functools.partial(open_piece, inputs, shared.stages, call)

    def copy(item: jax.Array, head: jax.Array, filled: jax.Array) -> jax.Array:
        piece = open_(item, head, filled)
        _copy(inputs.q.at[item, head], piece, _Order.of(piece, call), shared)
        return filled + piece.stream.num_chunks

    def attend(item: jax.Array, head: jax.Array, filled: jax.Array) -> jax.Array:
        piece = open_(item, head, filled)
        out = _attend(piece, shared, group, call)
        place = out_ref.at[item, head, pl.ds(group * WGMMA_ROWS, WGMMA_ROWS)]
        store(place, out.astype(out_ref.dtype))
        return filled + piece.stream.num_chunks

    @pl.when(group < groups)
    def _():
        inputs.for_each_piece(call, num_ctas, attend, jnp.int32(0))

    @pl.when(group == groups)
    def _():
        inputs.for_each_piece(call, num_ctas, copy, jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class _Order:
    """The order in which a piece's chunks are taken: first those in need of a mask, those of the
    queries themselves and then those at the windows' edges; what masks need is not in registers
    while the others follow.
    """

    start: jax.Array
    num_masked: jax.Array
    num_chunks: jax.Array

    @classmethod
    def of(cls, piece: Piece, call: Call) -> "_Order":
        begin, end = piece.whole_chunks(call)
        num_chunks = piece.stream.num_chunks
        return cls(end, num_chunks - end + begin, num_chunks)

    def chunk(self, i: jax.Array) -> jax.Array:
        """The chunk that is the ``i``-th to be taken."""
        chunk = self.start + i
        return jnp.where(chunk >= self.num_chunks, chunk - self.num_chunks, chunk)


def _copy(q_ref: Any, piece: Piece, order: _Order, shared: _Shared) -> None:
    """Copies a piece's queries, and its keys and values as their stages become free."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    stream = piece.stream

    @pl.when(stream.filled > 0)
    def _():
        plgpu.barrier_wait(shared.q_free)

    plgpu.copy_gmem_to_smem(q_ref, shared.queries, shared.q_barrier)

    def fill(i: jax.Array, _: None) -> None:
        chunk, slot = order.chunk(i), stream.slot(i)
        blocks = stream.blocks(chunk)
        used_before = stream.filled + i >= stream.tile.stages

        @pl.when(used_before)
        def _():
            plgpu.barrier_wait(shared.k_free.at[slot])

        stream.copy_keys(chunk, blocks, slot)

        @pl.when(used_before)
        def _():
            plgpu.barrier_wait(shared.v_free.at[slot])

        stream.copy_values(chunk, blocks, slot)

    lax.fori_loop(0, stream.num_chunks, fill, None)


def _attend(piece: Piece, shared: _Shared, group: jax.Array, call: Call) -> jax.Array:
    """Normalised attention ``[64, D]`` float32 of one warpgroup's rows."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    stream, tile, order = piece.stream, call.config.prefill, _Order.of(piece, call)
    chunks, head_dim, dtype = stream.num_chunks, stream.head_dim, stream.k_ref.dtype
    logits_shape, out_shape = (WGMMA_ROWS, tile.chunk), (WGMMA_ROWS, head_dim)
    acc = plgpu.Layout.WGMMA
    per_row = acc.reduce(1)
    queries = shared.queries.at[pl.ds(group * WGMMA_ROWS, WGMMA_ROWS)]

    def full(shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
        layout = acc if len(shape) == 2 else per_row
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), acc)

    def keys(i: jax.Array) -> Any:
        return shared.k_stages.at[stream.slot(i)].T

    def keys_used(i: jax.Array) -> None:
        plgpu.barrier_arrive(shared.k_free.at[stream.slot(i)])

        @pl.when(i == chunks - 1)
        def _():
            plgpu.barrier_arrive(shared.q_free)

    def visible(i: jax.Array) -> jax.Array:
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, logits_shape, layout=acc)
        tokens = iota(1) + (stream.begin + order.chunk(i) * tile.chunk)
        rows = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=per_row)
        queries = lax.div(rows + group * WGMMA_ROWS, jnp.int32(call.config.group))
        to_logits_shape = functools.partial(spread, shape=logits_shape)
        return piece.visible(tokens, queries, call, to_logits_shape)

    def softmax(i: jax.Array, product: jax.Array, high: jax.Array, masked: bool) -> tuple:
        """Weights of chunk ``i``, the largest logits, and by how much what was before shrinks."""
        logits = to_logits(product, call.scale, call.soft_cap)
        if masked:
            logits = jnp.where(visible(i), logits, HIDDEN)
        new_high = jnp.maximum(high, jnp.max(logits, axis=1))
        weight = jnp.exp2(logits - spread(new_high, logits_shape))
        return weight, new_high, jnp.exp2(high - new_high)

    def take_values(i: jax.Array, masked: bool) -> None:
        stream.wait_values(i)
        if masked:
            _clean(piece, shared, order.chunk(i), stream.slot(i), group)

    def first() -> tuple:
        def score(accs: list) -> tuple:
            accs[0].add(queries, keys(jnp.int32(0)))
            return ()

        stream.wait_keys(jnp.int32(0))
        (product,), _ = run_products(score, [full(logits_shape)], (), call.target)
        keys_used(jnp.int32(0))
        weight, high, _ = softmax(jnp.int32(0), product, full((WGMMA_ROWS,), HIDDEN), True)
        take_values(jnp.int32(0), True)
        return full(out_shape), weight.astype(dtype), high, jnp.sum(weight, axis=1)

    def step(i: jax.Array, carry: tuple, *, masked: bool) -> tuple:
        out, weight, high, total = carry

        def products(accs: list, _: jax.Array, high: jax.Array, total: jax.Array, __: Any) -> tuple:
            logits, out = accs
            logits.add(queries, keys(i))
            out.add(weight, shared.v_stages.at[stream.slot(i - 1)])
            # Where the mask needs registers too, the weights before must be done with theirs.
            product = logits.read(in_flight=0 if masked else 1)
            keys_used(i)
            new, high, shrink = softmax(i, product, high, masked)
            return new, high, total * shrink + jnp.sum(new, axis=1), shrink

        stream.wait_keys(i)
        blank = full(logits_shape)
        sums, state = [blank, out], (blank, high, total, total)
        (_, out), (new, high, total, shrink) = run_products(products, sums, state, call.target)
        # Not rounded before the product with the weights before is done: the rounded ones would get
        # the registers that it reads.
        new = lax.optimization_barrier(new).astype(dtype)
        plgpu.barrier_arrive(shared.v_free.at[stream.slot(i - 1)])
        take_values(i, masked)
        return out * spread(shrink, out_shape), new, high, total

    def last(out: jax.Array, weight: jax.Array) -> jax.Array:
        def weigh(accs: list) -> tuple:
            accs[0].add(weight, shared.v_stages.at[stream.slot(chunks - 1)])
            return ()

        (out,), _ = run_products(weigh, [out], (), call.target)
        plgpu.barrier_arrive(shared.v_free.at[stream.slot(chunks - 1)])
        return out

    plgpu.barrier_wait(shared.q_barrier)
    hidden, plain = (functools.partial(step, masked=masked) for masked in (True, False))
    num_masked = jnp.maximum(order.num_masked, 1)
    carry = lax.fori_loop(1, num_masked, hidden, first())
    out, weight, _, total = lax.fori_loop(num_masked, chunks, plain, carry)
    return last(out, weight) / spread(total, out_shape)


def _clean(
    piece: Piece, shared: _Shared, chunk: jax.Array, slot: jax.Array, group: jax.Array
) -> None:
    """Makes the chunk's values that no query sees 0 in shared memory, each warpgroup a part: stale
    slots may hold NaN, and 0 * NaN is NaN.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    stream = piece.stream
    tile = stream.tile
    groups = tile.rows // WGMMA_ROWS
    first = stream.begin + chunk * tile.chunk
    values = shared.v_stages.at[slot]
    lanes = lane_slices(stream.head_dim, tile.swizzle, 64)
    parts = [(start, part) for start in range(0, tile.chunk, 64) for part in lanes]

    def clean(start: int, part: Any) -> None:
        place = values.at[pl.ds(start, 64), part]
        v = plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
        tokens = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
        seen = piece.seen(tokens + (first + start))
        store(place, jnp.where(seen, v, jnp.zeros((), v.dtype)))

    @pl.when((first < piece.oldest) | (first + tile.chunk > piece.end))
    def _():
        for n, (start, part) in enumerate(parts):
            pl.when(group == n % groups)(functools.partial(clean, start, part))
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.cleaned)
        plgpu.barrier_wait(shared.cleaned)
