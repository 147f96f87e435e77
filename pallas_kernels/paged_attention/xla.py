"""``paged_attention`` in plain XLA operations: the CPU path.

Rows with one query are sorted by length and handled some at a time; longer chunks are cut into
tiles of queries. Either way one loop iteration takes a batch of query vectors against one chunk
of context, with the running maximum, sum and weighted sum of flash attention (Dao et al., 2022;
the online softmax is Milakov and Gimelshein, 2018). Trip counts come from the data, so the work
follows the real lengths, and nothing larger than one batch by one chunk is ever built.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.work_list import (
    Metadata,
    group_size,
    make_metadata,
    tile_size,
)
from pallas_kernels.pool import to_float32

__all__ = ["Metadata", "make_metadata", "paged_attention"]

_CHUNK = 128
"""Context tokens per iteration. The same everywhere: a row's sums must not depend on its path."""

_WAYS = 2
"""Decode loops that may run at the same time."""

_HIDDEN = -1e30
"""Logit of what may not be seen. Finite, so that a row may begin with chunks it sees nothing of:
what they add has weight exp(_HIDDEN - real) == 0 as soon as a real logit appears."""


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    metadata: Metadata,
) -> jax.Array:
    """See ``api.paged_attention``.

    A row's output is the same to the last bit whichever rows share the step, and whatever lies
    in unseen slots, as long as the shapes (T, R, M) and the row's own query and context lengths
    are the same: its sums run over the same chunks of context in the same order. A token computed
    as decode and as part of a chunk, or under other shapes, agrees to float32 rounding.
    """
    context = _Context(
        k_pool=k_pool,
        v_pool=v_pool,
        layer=layer,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        chunk_blocks=max(1, min(_CHUNK // k_pool.shape[2], block_tables.shape[1])),
    )
    out = jnp.zeros_like(q)
    if q.shape[0] > 1:
        out = _prefill(out, q, context, block_tables, query_start_loc, seq_lens, scale, metadata)
    group = group_size(seq_lens.shape[0])
    decoded = _decode(q, context, scale, metadata, group)
    return out.at[metadata.decode_tokens].set(decoded.astype(q.dtype), mode="drop")


@dataclass(frozen=True, kw_only=True)
class _Context:
    """One layer of the pool and how it is to be seen."""

    k_pool: jax.Array
    v_pool: jax.Array
    layer: int | jax.Array
    sliding_window: int | None
    soft_cap: float | None
    chunk_blocks: int

    @property
    def chunk(self) -> int:
        return self.chunk_blocks * self.k_pool.shape[2]

    def gather(self, pool: jax.Array, blocks: jax.Array) -> jax.Array:
        """Blocks ``[G, chunk_blocks]`` of the layer, as ``[G, chunk, K, D]`` float32."""
        num_blocks = pool.shape[1]
        flat = pool.reshape(-1, *pool.shape[2:])
        index = jnp.clip(blocks, 0, num_blocks - 1) + self.layer * num_blocks
        found = flat.at[index].get(mode="promise_in_bounds")
        return to_float32(found).reshape(blocks.shape[0], self.chunk, *pool.shape[3:])


def _attend(q: jax.Array, tables: jax.Array, positions: jax.Array, context: _Context) -> jax.Array:
    """Attention of a batch of G entries, each some queries of one row.

    Args:
      q: ``[G, K, H // K, Q, D]`` float32, already scaled.
      tables: ``[G, M]`` block tables.
      positions: ``[G, Q]`` each query's position in its row; -1 for a query that is none, whose
        output is finite and means nothing.

    Returns:
      ``[G, K, H // K, Q, D]`` float32.
    """
    size, num_kv_heads, per_kv, num_queries, head_dim = q.shape
    flat = q.reshape(size, num_kv_heads, per_kv * num_queries, head_dim)
    last = jnp.max(positions, axis=1)
    first = jnp.zeros_like(last)
    if context.sliding_window is not None:
        oldest = jnp.min(jnp.where(positions < 0, last[:, None], positions), axis=1)
        first = jnp.maximum(oldest - context.sliding_window + 1, 0)

    def body(c: jax.Array, carry: tuple) -> tuple:
        high, total, acc = carry
        columns = c * context.chunk_blocks + jnp.arange(context.chunk_blocks)
        blocks = tables[:, jnp.minimum(columns, tables.shape[1] - 1)]
        k = context.gather(context.k_pool, blocks)
        v = context.gather(context.v_pool, blocks)
        tokens = c * context.chunk + jnp.arange(context.chunk)
        # Zero times NaN is NaN: what no query sees is removed from V, not only given no weight.
        used = (tokens >= first[:, None]) & (tokens <= last[:, None])
        v = jnp.where(used[:, :, None, None], v, 0.0)
        logits = jnp.einsum("gkqd,gckd->gkqc", flat, k)
        if context.soft_cap is not None:
            logits = context.soft_cap * jnp.tanh(logits / context.soft_cap)
        seen = tokens <= positions[..., None]
        if context.sliding_window is not None:
            seen &= tokens > positions[..., None] - context.sliding_window
        logits = logits.reshape(*q.shape[:4], context.chunk)
        logits = jnp.where(seen[:, None, None], logits, _HIDDEN)
        logits = logits.reshape(*flat.shape[:3], context.chunk)

        new_high = jnp.maximum(high, jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - new_high[..., None])
        shrink = jnp.exp(high - new_high)
        total = total * shrink + jnp.sum(weights, axis=-1)
        acc = acc * shrink[..., None] + jnp.einsum("gkqc,gckd->gkqd", weights, v)
        return new_high, total, acc

    high = jnp.full(flat.shape[:3], _HIDDEN)
    init = (high, jnp.zeros_like(high), jnp.zeros_like(flat))
    begin = jnp.min(first) // context.chunk
    _, total, acc = lax.fori_loop(begin, jnp.max(last) // context.chunk + 1, body, init)
    # No chunk at all only where no query is one.
    return (acc / jnp.maximum(total, 1e-30)[..., None]).reshape(q.shape)


def _decode(q: jax.Array, context: _Context, scale: float, work: Metadata, group: int) -> jax.Array:
    """Output ``[U, H, D]`` float32 of the rows with one query, in the work list's order.

    Two loops take the even and the odd groups. They do not depend on one another, so XLA:CPU may
    run them at the same time; the small operations inside each are mostly not split over cores.
    """
    num_rows = work.decode_tokens.shape[0]
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = context.k_pool.shape[3]
    tokens = jnp.minimum(work.decode_tokens, num_tokens - 1)
    queries = q.at[tokens].get(mode="promise_in_bounds").astype(jnp.float32) * scale
    ways = min(_WAYS, num_rows // group)

    def loop(way: int) -> jax.Array:
        """Groups ``way, way + ways, ...``; the other groups' output is zero."""

        def body(step: jax.Array, out: jax.Array) -> jax.Array:
            i = (way + step * ways) * group
            part = lax.dynamic_slice_in_dim(queries, i, group)
            part = part.reshape(group, num_kv_heads, num_heads // num_kv_heads, 1, head_dim)
            tables = lax.dynamic_slice_in_dim(work.decode_tables, i, group)
            lens = lax.dynamic_slice_in_dim(work.decode_lens, i, group)
            got = _attend(part, tables, lens[:, None] - 1, context)
            got = got.reshape(group, num_heads, head_dim)
            return lax.dynamic_update_slice_in_dim(out, got, i, axis=0)

        steps = (work.num_groups - way + ways - 1) // ways
        return lax.fori_loop(0, steps, body, jnp.zeros_like(queries))

    return sum(loop(way) for way in range(ways))


def _prefill(
    out: jax.Array,
    q: jax.Array,
    context: _Context,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    scale: float,
    work: Metadata,
) -> jax.Array:
    """``out`` with the rows of several queries filled in, tile by tile."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = context.k_pool.shape[3]
    per_kv = num_heads // num_kv_heads
    tile = tile_size(num_tokens)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        row = work.tile_rows[i]
        # A tile that would reach past the end begins earlier; what comes before its own first
        # query belongs to other tiles.
        start = jnp.minimum(work.tile_starts[i], num_tokens - tile)
        tokens = start + jnp.arange(tile)
        stop = query_start_loc[row + 1]
        own = (tokens >= work.tile_starts[i]) & (tokens < stop)
        positions = jnp.where(own, seq_lens[row] - stop + tokens, -1)

        queries = lax.dynamic_slice_in_dim(q, start, tile).astype(jnp.float32) * scale
        queries = queries.reshape(tile, num_kv_heads, per_kv, head_dim).transpose(1, 2, 0, 3)
        table = lax.dynamic_slice_in_dim(block_tables, row, 1)
        got = _attend(queries[None], table, positions[None], context)[0]
        got = got.transpose(2, 0, 1, 3).reshape(tile, num_heads, head_dim).astype(out.dtype)
        old = lax.dynamic_slice_in_dim(out, start, tile)
        got = jnp.where(own[:, None, None], got, old)
        return lax.dynamic_update_slice_in_dim(out, got, start, axis=0)

    return lax.fori_loop(0, work.num_tiles, body, out)
