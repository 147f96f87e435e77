"""``make_metadata`` and ``paged_attention`` on Mosaic GPU."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.mosaic_gpu.combine import combine
from pallas_kernels.paged_attention.mosaic_gpu.config import (
    Config,
    DecodeTile,
    PrefillTile,
    choose_config,
)
from pallas_kernels.paged_attention.mosaic_gpu.decode import decode
from pallas_kernels.paged_attention.mosaic_gpu.launch import Call
from pallas_kernels.paged_attention.mosaic_gpu.prefill import prefill
from pallas_kernels.paged_attention.mosaic_gpu.prefill_wgmma import prefill_wgmma
from pallas_kernels.paged_attention.mosaic_gpu.target import find_target
from pallas_kernels.paged_attention.mosaic_gpu.work import WorkList, make_work_list


def make_metadata(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    *,
    num_tokens: int,
    num_heads: int,
    k_pool: jax.Array,
    sliding_window: int | None = None,
    decode_queries: int = 1,
) -> WorkList:
    """See ``api.make_metadata``.

    Raises:
      NotImplementedError: the kernels do not support the shapes, or the platform.
    """
    _, _, block_size, num_kv_heads, head_dim = k_pool.shape
    max_context = block_tables.shape[1] * block_size
    config = choose_config(
        num_rows=seq_lens.shape[0],
        max_context=max_context,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=jnp.bfloat16 if k_pool.dtype == jnp.uint16 else k_pool.dtype,
        decode_queries=decode_queries,
        target=find_target(),
    )
    return make_work_list(
        query_start_loc,
        seq_lens,
        num_tokens=num_tokens,
        max_context=max_context,
        sliding_window=sliding_window,
        config=config,
    )


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
    metadata: WorkList,
) -> jax.Array:
    """See ``api.paged_attention``. Queries are rounded to the pool's type.

    A row's output is the same to the last bit whichever rows share the step, as long as the
    shapes (T, R, M) and the row's own query and context lengths are the same.

    Raises:
      NotImplementedError: the kernels do not support the platform.
      ValueError: ``metadata`` was made for other shapes.
    """
    target, config = find_target(), metadata.config
    num_layers, num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    if config.num_kv_heads != num_kv_heads or config.group * num_kv_heads != q.shape[1]:
        raise ValueError(
            f"metadata was made for {config.num_kv_heads} KV heads and {config.group} query heads "
            f"each, but q is {q.shape} and the pool {k_pool.shape}"
        )
    # [L * N, B, K * D]: a reshape that moves nothing.
    pools = [
        _numbers(pool).reshape(num_layers * num_blocks, block_size, num_kv_heads * head_dim)
        for pool in (k_pool, v_pool)
    ]
    first_block = jnp.asarray(layer, jnp.int32).reshape(1) * num_blocks
    tables = block_tables.astype(jnp.int32)
    call = Call(
        num_blocks=num_blocks,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        config=config,
        target=target,
    )
    queries = q.astype(pools[0].dtype)
    arrays = (*pools, tables, first_block, metadata)
    decoded = decode_rows(queries, *arrays, call=call)
    filled = None
    if metadata.prefill_items.shape[0]:
        filled = prefill_tiles(queries, *arrays, out_dtype=q.dtype, call=call)
    return _gather(q, decoded, filled, metadata)


def decode_rows(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    first_block: jax.Array,
    work: WorkList,
    *,
    call: Call,
) -> jax.Array:
    """``[R, K, D, columns]`` float32: output of the rows with few queries."""
    queries = _tiles(q, work.starts, work.config.decode, work.config)
    counted = (work.decode_count, work.decode_items, first_block)
    partial = decode(queries, k_pool, v_pool, block_tables, *counted, call=call)
    return combine(*partial, work.first_items, work.num_items, config=work.config)


def prefill_tiles(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    first_block: jax.Array,
    work: WorkList,
    *,
    out_dtype: jax.typing.DTypeLike,
    call: Call,
) -> jax.Array:
    """``[W, K, rows, D]`` of ``out_dtype``: output of the other rows' tiles."""
    queries = _tiles(q, work.prefill_items[:, 3], work.config.prefill, work.config)
    counted = (work.prefill_count, work.prefill_items, first_block)
    kernel = prefill_wgmma if work.config.prefill.instruction == "wgmma" else prefill
    arrays = (queries, k_pool, v_pool, block_tables, *counted)
    return kernel(*arrays, out_dtype=out_dtype, call=call)


def _numbers(pool: jax.Array) -> jax.Array:
    """The pool as floating-point numbers; a copy where the CPU stores bfloat16 as bits."""
    return lax.bitcast_convert_type(pool, jnp.bfloat16) if pool.dtype == jnp.uint16 else pool


def _tiles(
    q: jax.Array, starts: jax.Array, tile: DecodeTile | PrefillTile, config: Config
) -> jax.Array:
    """``[len(starts), K, size, D]``: from each start on, the tile's queries times the heads of a KV
    head, query-major, then zeros up to the tile's columns or rows.
    """
    size = tile.columns if isinstance(tile, DecodeTile) else tile.rows
    head_dim, num_kv_heads, used = q.shape[2], config.num_kv_heads, tile.queries * config.group
    tokens = starts[:, None] + jnp.arange(tile.queries, dtype=jnp.int32)
    found = q.at[jnp.minimum(tokens, q.shape[0] - 1)].get(mode="promise_in_bounds")
    found = found.reshape(-1, tile.queries, num_kv_heads, config.group, head_dim)
    found = found.transpose(0, 2, 1, 3, 4).reshape(-1, num_kv_heads, used, head_dim)
    return jnp.pad(found, ((0, 0), (0, 0), (0, size - used), (0, 0)))


def _gather(
    q: jax.Array, decoded: jax.Array, filled: jax.Array | None, work: WorkList
) -> jax.Array:
    """``[T, H, D]``: each token's output from its row's or its tile's; zeros for padding."""
    config: Config = work.config
    heads = jnp.arange(q.shape[1], dtype=jnp.int32)
    kv_head, within = heads // config.group, heads % config.group
    index = jnp.arange(q.shape[0], dtype=jnp.int32) - work.starts[work.token_rows]
    place = jnp.minimum(index, config.decode.queries - 1)[:, None] * config.group + within
    rows = work.token_rows[:, None]
    out = decoded.at[rows, kv_head, :, place].get(mode="promise_in_bounds").astype(q.dtype)
    if filled is not None:
        place = (index % config.prefill.queries)[:, None] * config.group + within
        tiles = jnp.maximum(work.token_tiles, 0)[:, None]
        found = filled.at[tiles, kv_head, place].get(mode="promise_in_bounds")
        out = jnp.where(work.token_tiles[:, None, None] >= 0, found, out)
    return jnp.where(work.token_tiles[:, None, None] == -2, jnp.zeros((), q.dtype), out)
