"""Attention of rows with several queries, tile by tile."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.work_list import Metadata, Tiles, tile_sizes
from pallas_kernels.paged_attention.xla_context import HIDDEN, Context, Softmax, finish, start


def prefill(
    out: jax.Array,
    q: jax.Array,
    context: Context,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    scale: float,
    work: Metadata,
) -> jax.Array:
    """``out`` ``[T, H, D]`` with the rows of several queries filled in."""
    num_tokens, num_heads, head_dim = q.shape
    per_kv = num_heads // context.num_kv_heads

    def fill(out: jax.Array, tiles: Tiles, size: int) -> jax.Array:
        def body(i: jax.Array, out: jax.Array) -> jax.Array:
            row = tiles.rows[i]
            # A tile that would reach past the end begins earlier; what comes before its own first
            # query belongs to other tiles.
            begin = jnp.minimum(tiles.starts[i], num_tokens - size)
            tokens = begin + jnp.arange(size)
            stop = query_start_loc[row + 1]
            own = (tokens >= tiles.starts[i]) & (tokens < stop)
            positions = jnp.where(own, seq_lens[row] - stop + tokens, -1)

            queries = lax.dynamic_slice_in_dim(q, begin, size).astype(jnp.float32) * scale
            queries = queries.reshape(size, context.num_kv_heads, per_kv, head_dim)
            table = lax.dynamic_slice_in_dim(block_tables, row, 1)
            got = _attend(queries.transpose(1, 2, 0, 3), table, positions, context)
            got = got.transpose(2, 0, 1, 3).reshape(size, num_heads, head_dim).astype(out.dtype)
            old = lax.dynamic_slice_in_dim(out, begin, size)
            got = jnp.where(own[:, None, None], got, old)
            return lax.dynamic_update_slice_in_dim(out, got, begin, axis=0)

        return lax.fori_loop(0, tiles.count, body, out)

    large, small = tile_sizes(num_tokens)
    return fill(fill(out, work.large, large), work.small, small)


def _attend(q: jax.Array, table: jax.Array, positions: jax.Array, context: Context) -> jax.Array:
    """Attention of some queries of one row.

    Args:
      q: ``[K, H // K, Q, D]`` float32, already scaled.
      table: ``[1, M]`` block table.
      positions: ``[Q]`` each query's position in its row; -1 for a query that is none, whose
        output is finite and means nothing.

    Returns:
      ``[K, H // K, Q, D]`` float32.
    """
    num_kv_heads, per_kv, num_queries, head_dim = q.shape
    flat = q.reshape(num_kv_heads, per_kv * num_queries, head_dim)
    last = jnp.max(positions)
    first = context.first_seen(jnp.min(jnp.where(positions < 0, last, positions)))

    def body(c: jax.Array, state: Softmax) -> Softmax:
        blocks = context.chunk_blocks_of(table, c[None])
        k = context.gather(context.k_pool, blocks)[0]
        v = context.gather(context.v_pool, blocks)[0]
        tokens = context.tokens(c)
        # Zero times NaN is NaN: what no query sees is removed from V, not only given no weight.
        v = jnp.where(((tokens >= first) & (tokens <= last))[:, None, None], v, 0.0)
        logits = context.cap(jnp.einsum("kqd,ckd->kqc", flat, k))
        logits = logits.reshape(*q.shape[:3], context.chunk)
        logits = jnp.where(context.seen(tokens, positions), logits, HIDDEN)
        logits = logits.reshape(*flat.shape[:2], context.chunk)
        high, total, acc = state
        new_high = jnp.maximum(high, jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - new_high[..., None])
        shrink = jnp.exp(high - new_high)
        total = total * shrink + jnp.sum(weights, axis=-1)
        return new_high, total, acc * shrink[..., None] + jnp.einsum("kqc,ckd->kqd", weights, v)

    begin, end = first // context.chunk, last // context.chunk + 1
    state = lax.fori_loop(begin, end, body, start(flat.shape[:2], head_dim))
    return finish(state).reshape(q.shape)
