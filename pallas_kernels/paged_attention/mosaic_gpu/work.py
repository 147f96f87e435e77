"""The work list: which piece of which row each thread block takes, found once per step."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.mosaic_gpu.config import Config


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkList:
    """All int32. R rows, T tokens; I is the most pieces of decode work, W the most prefill tiles
    that a step may have. Entries past the counts are never visited.

    A piece of decode work is one split of one row's context; the thread blocks take it once per
    KV head. Every number depends on the piece's own row only, but for its place in the list.
    """

    decode_count: jax.Array
    """``[1]`` pieces of decode work."""
    decode_items: jax.Array
    """``[I, 4]``: row, first context token of the split, position of the row's first query in its
    row, context length."""
    first_items: jax.Array
    """``[R]`` where the row's pieces begin; they follow one another in context order."""
    num_items: jax.Array
    """``[R]`` pieces of the row, 0 for a row that is not decoded."""
    prefill_count: jax.Array
    """``[1]`` prefill tiles."""
    prefill_items: jax.Array
    """``[W, 4]``: row, queries of the tile, position of its first query in the row, that query's
    index in q."""
    starts: jax.Array
    """``[R]`` index of each row's first query in q."""
    token_rows: jax.Array
    """``[T]`` row of each token."""
    token_tiles: jax.Array
    """``[T]`` prefill tile of each token, -1 for one that is decoded, -2 for padding."""
    config: Config = dataclasses.field(metadata=dict(static=True))


def make_work_list(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    num_tokens: int,
    max_context: int,
    sliding_window: int | None,
    config: Config,
) -> WorkList:
    """The work list of a step. ``max_context`` is the tokens that a row's block table can name."""
    num_rows = seq_lens.shape[0]
    starts = query_start_loc[:-1].astype(jnp.int32)
    query_lens = query_start_loc[1:].astype(jnp.int32) - starts
    seq_lens = jnp.clip(seq_lens.astype(jnp.int32), 0, max_context)
    first_positions = seq_lens - query_lens
    real = (query_lens > 0) & (first_positions >= 0)
    is_decode = real & (query_lens <= config.decode.queries)

    split = config.decode.split
    num_splits = -(-max_context // split)
    # Splits that the row's first query no longer sees are left out.
    oldest = jnp.zeros_like(seq_lens)
    if sliding_window is not None:
        oldest = jnp.maximum(first_positions - sliding_window + 1, 0)
    first_splits = oldest // split
    num_items = jnp.where(is_decode, -(-seq_lens // split) - first_splits, 0)
    rows, first_items, within = _unroll(num_items, num_rows * num_splits)
    begins = (first_splits[rows] + within) * split
    decode_items = jnp.stack([rows, begins, first_positions[rows], seq_lens[rows]], axis=1)

    tile = config.prefill.queries
    most = num_tokens // tile + min(num_rows, num_tokens // (config.decode.queries + 1))
    num_tiles = jnp.where(real & ~is_decode, -(-query_lens // tile), 0)
    tile_rows, first_tiles, tile_within = _unroll(num_tiles, most)
    offset = tile_within * tile
    prefill_items = jnp.stack(
        [
            tile_rows,
            jnp.clip(query_lens[tile_rows] - offset, 0, tile),
            first_positions[tile_rows] + offset,
            starts[tile_rows] + offset,
        ],
        axis=1,
    )

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    token_rows = jnp.sum(token[:, None] >= query_start_loc[None, 1:], axis=1, dtype=jnp.int32)
    padding = token_rows == num_rows
    token_rows = jnp.minimum(token_rows, num_rows - 1)
    tiles = first_tiles[token_rows] + (token - starts[token_rows]) // tile
    tiles = jnp.where(is_decode[token_rows], -1, tiles)
    return WorkList(
        decode_count=jnp.sum(num_items, keepdims=True),
        decode_items=decode_items,
        first_items=first_items,
        num_items=num_items,
        prefill_count=jnp.sum(num_tiles, keepdims=True),
        prefill_items=prefill_items,
        starts=starts,
        token_rows=token_rows,
        token_tiles=jnp.where(padding | ~real[token_rows], -2, tiles),
        config=config,
    )


def _unroll(counts: jax.Array, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists each row ``counts[row]`` times, in order.

    Returns:
      ``[length]`` rows, ``[R]`` where each row's entries begin, ``[length]`` each entry's number
      within its row. Past the counts' sum the entries are of the last row and mean nothing.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    begins = ends - counts
    marks = jnp.zeros(length + 1, jnp.int32).at[jnp.minimum(ends, length)].add(1)
    rows = jnp.minimum(jnp.cumsum(marks[:length], dtype=jnp.int32), counts.shape[0] - 1)
    return rows, begins, jnp.arange(length, dtype=jnp.int32) - begins[rows]
