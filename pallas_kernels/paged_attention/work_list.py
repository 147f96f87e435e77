"""The work of one step, found once and used by the attention of every layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Metadata:
    """Rows with one query, longest context first, then tiles of the other rows' queries.

    All int32. ``U`` is R rounded up to whole groups, ``W`` the most tiles a step may have.
    Entries past the counts are harmless: context length 0, or never visited.
    """

    decode_tokens: jax.Array
    """``[U]`` the query's place in q; T for none."""
    decode_lens: jax.Array
    """``[U]`` context length, the query included."""
    decode_tables: jax.Array
    """``[U, M]`` block tables in the same order."""
    num_groups: jax.Array
    """Groups of ``group_size`` rows, the last one perhaps not full."""
    tile_rows: jax.Array
    """``[W]`` row of each tile."""
    tile_starts: jax.Array
    """``[W]`` first query of each tile, an index into q."""
    num_tiles: jax.Array


def group_size(num_rows: int) -> int:
    """Decode rows that one loop iteration handles together.

    Eight is the fastest for many rows; fewer where a step has few, since the rows that fill up
    the last group cost as much as real ones.
    """
    return min(num_rows, 8, max(2, num_rows // 4))


def tile_size(num_tokens: int) -> int:
    """Queries per tile for a step of ``num_tokens``. Large tiles pay off only for long chunks."""
    return min(num_tokens, 64 if num_tokens < 512 else 128)


def make_metadata(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    *,
    num_tokens: int,
) -> Metadata:
    """See ``api.make_metadata``."""
    num_rows = seq_lens.shape[0]
    starts = query_start_loc[:-1]
    query_lens = query_start_loc[1:] - starts
    is_decode = query_lens == 1

    # Similar lengths side by side: a group runs as long as its longest row.
    group = group_size(num_rows)
    order = jnp.argsort(jnp.where(is_decode, -seq_lens, 1)).astype(jnp.int32)
    order = jnp.pad(order, (0, -num_rows % group))
    num_decode = jnp.sum(is_decode, dtype=jnp.int32)
    live = jnp.arange(order.shape[0]) < num_decode
    tile = tile_size(num_tokens)
    tiles = jnp.where(is_decode, 0, (query_lens + tile - 1) // tile)
    end = jnp.cumsum(tiles)
    # Each row has at most one tile that is not full, and at least two queries to be in a tile.
    most = num_tokens // tile + min(num_rows, num_tokens // 2) + 1
    index = jnp.arange(most, dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= end, axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    return Metadata(
        decode_tokens=jnp.where(live, starts[order], num_tokens),
        decode_lens=jnp.where(live, seq_lens[order], 0),
        decode_tables=block_tables[order],
        num_groups=(num_decode + group - 1) // group,
        tile_rows=row,
        tile_starts=starts[row] + (index - (end - tiles)[row]) * tile,
        num_tiles=end[-1],
    )
