"""The work of one step, found once and used by the attention of every layer."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

CHUNK = 128
"""Context tokens that are handled at once. The same everywhere: a row's sums run over the same
chunks whatever path it takes."""

WAVE = 8
"""Chunks of a row whose partial results are kept before they are added up."""

SHARING_ROWS = 16
"""Most rows that read a chunk together."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Tiles:
    """Queries of rows with more than one, cut into tiles of one size. All int32.

    ``W`` is the most tiles of this size that a step may have; entries past ``count`` are never
    visited.
    """

    rows: jax.Array
    """``[W]`` row of each tile."""
    starts: jax.Array
    """``[W]`` first query of each tile, an index into q."""
    count: jax.Array
    """``[]`` tiles of this step."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Decode:
    """Rows with one query, and the chunks of context to read for them. All int32.

    ``U`` is R rounded up to whole groups of ``sharing_rows``. Rows that begin with the same block
    lie side by side; the places of no row have length 0. A wave is ``WAVE`` consecutive chunks of
    every row; wave 0 begins at chunk 0. The chunks that a row does not share are work items,
    ordered by wave, row and chunk, ``batch_size`` of them to a batch; a wave begins a batch.
    """

    tokens: jax.Array
    """``[U]`` the query's place in q; T for none."""
    lens: jax.Array
    """``[U]`` context length, the query included."""
    tables: jax.Array
    """``[U, M]`` block tables in the same order."""
    shared_chunks: jax.Array
    """``[U // sharing_rows]`` leading chunks that all rows of a group share and see whole."""
    num_groups: jax.Array
    """``[]`` groups to visit for what they share; 0 if none shares."""
    item_rows: jax.Array
    """``[J, batch]`` place of the item's row, 0 to U - 1; U for none."""
    item_chunks: jax.Array
    """``[J, batch]`` which chunk of the row it is."""
    wave_starts: jax.Array
    """``[waves + 1]`` first batch of each wave."""
    begin_wave: jax.Array
    end_wave: jax.Array
    """``[]`` waves of this step, from begin to before end."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Metadata:
    """Rows with one query, and tiles of the other rows' queries."""

    decode: Decode
    large: Tiles
    small: Tiles
    block_size: int = field(metadata={"static": True})
    sliding_window: int | None = field(metadata={"static": True})


def chunk_blocks(block_size: int, num_columns: int) -> int:
    """Blocks of a chunk, for block tables of this many columns."""
    return max(1, min(CHUNK // block_size, num_columns))


def batch_size(num_rows: int) -> int:
    """Chunks of decoding rows that one loop iteration handles together.

    A batch costs about 0.1 ms apart from its chunks, and a whole batch however few are real.
    """
    return min(16, 2 * num_rows)


def sharing_rows(num_rows: int) -> int:
    """Rows of a group that may read a chunk together."""
    return min(num_rows, SHARING_ROWS)


def tile_sizes(num_tokens: int) -> tuple[int, int]:
    """Queries per (large, small) tile for a step of ``num_tokens``.

    A tile costs the same however many of its queries are real. Large ones read the context less
    often; small ones waste less on short chunks and on the ends of long ones.
    """
    large = min(num_tokens, 64 if num_tokens < 512 else 128)
    return large, min(32, large)


def make_metadata(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    sliding_window: int | None,
) -> Metadata:
    """See ``api.make_metadata``."""
    num_rows = seq_lens.shape[0]
    starts = query_start_loc[:-1]
    query_lens = query_start_loc[1:] - starts
    is_decode = query_lens == 1

    large, small = tile_sizes(num_tokens)
    queries = jnp.where(is_decode, 0, query_lens)
    full, rest = queries // large, queries % large
    # A rest of more than half a tile gets a large one, a smaller rest small ones.
    full += rest > large // 2
    rest = jnp.where(rest > large // 2, 0, rest)
    # Large tiles are more than half full; of the small ones each row has one that is not full.
    most_large = num_tokens // (large // 2 + 1) + 1
    most_small = num_tokens // small + min(num_rows, num_tokens // 2) + 1
    return Metadata(
        decode=_decode(
            is_decode, starts, seq_lens, block_tables, num_tokens, block_size, sliding_window
        ),
        large=make_tiles(full, starts, large, most_large),
        small=make_tiles((rest + small - 1) // small, starts + queries - rest, small, most_small),
        block_size=block_size,
        sliding_window=sliding_window,
    )


def make_tiles(num_tiles: jax.Array, first: jax.Array, size: int, most: int) -> Tiles:
    """``num_tiles`` ``[R]`` tiles of every row, its first one beginning at ``first`` ``[R]``."""
    end = jnp.cumsum(num_tiles)
    index = jnp.arange(most, dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= end, axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_tiles.shape[0] - 1)
    return Tiles(
        rows=row, starts=first[row] + (index - (end - num_tiles)[row]) * size, count=end[-1]
    )


def _decode(
    is_decode: jax.Array,
    starts: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    num_tokens: int,
    block_size: int,
    sliding_window: int | None,
) -> Decode:
    num_rows, num_columns = block_tables.shape
    group = sharing_rows(num_rows)
    order = jnp.pad(_sharing_order(is_decode, block_tables[:, 0]), (0, -num_rows % group))
    num_decode = jnp.sum(is_decode, dtype=jnp.int32)
    live = jnp.arange(order.shape[0]) < num_decode
    lens = jnp.where(live, seq_lens[order], 0)
    tables = block_tables[order]

    blocks = chunk_blocks(block_size, num_columns)
    chunk = blocks * block_size
    firsts = jnp.zeros_like(lens)
    shared = jnp.zeros(order.shape[0] // group, jnp.int32)
    if sliding_window is None:
        shared = _shared_chunks(tables, lens, group, blocks, chunk)
    else:
        firsts = jnp.maximum(lens - sliding_window, 0) // chunk
    ends = (lens + chunk - 1) // chunk
    most = -(-num_columns // blocks)
    own = jnp.maximum(firsts, jnp.repeat(shared, group))
    rows, chunks, wave_starts = _items(own, ends, most, batch_size(num_rows))
    return Decode(
        tokens=jnp.where(live, starts[order], num_tokens),
        lens=lens,
        tables=tables,
        shared_chunks=shared,
        num_groups=jnp.where(jnp.any(shared > 0), (num_decode + group - 1) // group, 0),
        item_rows=rows,
        item_chunks=chunks,
        wave_starts=wave_starts,
        begin_wave=jnp.min(jnp.where(live, firsts, most)) // WAVE,
        end_wave=(jnp.max(ends) + WAVE - 1) // WAVE,
    )


def _sharing_order(is_decode: jax.Array, first_blocks: jax.Array) -> jax.Array:
    """``[R]`` rows, those that decode first, and of them those with the same first block side by
    side."""
    num_rows = first_blocks.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    same = (first_blocks[:, None] == first_blocks) & is_decode[:, None] & is_decode
    leader = jnp.min(jnp.where(same, rows, num_rows), axis=1)
    alone = jnp.sum(same, axis=1) < 2
    cluster = jnp.where(is_decode, jnp.where(alone, num_rows, leader), num_rows + 1)
    return jnp.argsort(cluster, stable=True).astype(jnp.int32)


def _shared_chunks(
    tables: jax.Array, lens: jax.Array, group: int, blocks: int, chunk: int
) -> jax.Array:
    """Leading chunks that the rows of each group share. None for a group of one row."""
    tables = tables.reshape(-1, group, tables.shape[1])
    lens = lens.reshape(-1, group)
    live = lens > 0
    equal = jnp.all((tables == tables[:, :1]) | ~live[:, :, None], axis=1)
    common = jnp.sum(jnp.cumprod(equal.astype(jnp.int32), axis=1), axis=1)
    shortest = jnp.min(jnp.where(live, lens, jnp.max(lens)), axis=1)
    shared = jnp.minimum(common // blocks, shortest // chunk)
    return jnp.where(jnp.sum(live, axis=1) > 1, shared, 0).astype(jnp.int32)


def _items(
    first: jax.Array, end: jax.Array, most: int, batch: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``item_rows``, ``item_chunks`` and ``wave_starts`` of chunks ``first`` to before ``end``.

    Args:
      first, end: ``[U]`` range of chunks of each row; ``end`` is at most ``most``.
    """
    num_rows = first.shape[0]
    num_waves = -(-most // WAVE)
    wave_begin = jnp.arange(num_waves, dtype=jnp.int32)[:, None] * WAVE
    # [waves, U]: the part of each row's range that falls into each wave.
    begin = jnp.maximum(first, wave_begin)
    counts = jnp.maximum(jnp.minimum(end, wave_begin + WAVE) - begin, 0)
    batches = (jnp.sum(counts, axis=1) + batch - 1) // batch
    wave_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(batches)])
    places = wave_starts[:-1, None] * batch + jnp.cumsum(counts, axis=1) - counts

    size = num_waves * -(-(num_rows * WAVE) // batch) * batch
    slot = jnp.arange(WAVE, dtype=jnp.int32)
    target = jnp.where(slot < counts[..., None], places[..., None] + slot, size).reshape(-1)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]

    def place(values: jax.Array, fill: int) -> jax.Array:
        values = jnp.broadcast_to(values, (num_waves, num_rows, WAVE)).reshape(-1)
        return jnp.full(size, fill, jnp.int32).at[target].set(values, mode="drop")

    items = place(rows, num_rows), place(begin[..., None] + slot, 0)
    return *(x.reshape(-1, batch) for x in items), wave_starts.astype(jnp.int32)
