"""Ragged attention over a paged KV pool: the contract and the dispatcher."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import reference, work_list, xla
from pallas_kernels.paged_attention.gradient import Attention, differentiable
from pallas_kernels.paged_attention.mosaic_gpu import entry as mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu.work import WorkList

_IMPLEMENTATIONS = {
    "reference": reference.paged_attention,
    "xla": xla.paged_attention,
    "pallas": mosaic_gpu.paged_attention,
}
_METADATA = {"reference": reference.make_metadata, "xla": xla.make_metadata}


def make_metadata(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    sliding_window: int | None = None,
    num_heads: int | None = None,
    k_pool: jax.Array | None = None,
    decode_queries: int = 1,
    implementation: str | None = None,
) -> Any:
    """The work list of one step, to be computed once and given to every layer's attention.

    Args:
      query_start_loc, seq_lens, block_tables: as for ``paged_attention``.
      num_tokens: T, the static number of query tokens.
      block_size: tokens of a block of the pool.
      sliding_window: as for ``paged_attention``.
      num_heads, k_pool: H, and the pool (only its shape and type count). The GPU kernels' work
        list depends on them. Without them there is no work list for ``"pallas"``: the result is
        None and each call of ``paged_attention`` makes its own.
      decode_queries: rows of up to that many queries, at most 8, are to have their context split
        over thread blocks, as rows of one query always have (speculative decoding). A hint for
        ``"pallas"``; the results agree to rounding.
      implementation: the one that will be given to ``paged_attention``.

    Returns:
      A pytree that only the same implementation understands.

    Raises:
      NotImplementedError: ``"pallas"`` does not support the shapes or the platform.
    """
    if implementation == "pallas" or (implementation is None and dispatch.is_on_gpu()):
        if num_heads is None or k_pool is None:
            return None
        try:
            return mosaic_gpu.make_metadata(
                query_start_loc,
                seq_lens,
                block_tables,
                num_tokens=num_tokens,
                num_heads=num_heads,
                k_pool=k_pool,
                sliding_window=sliding_window,
                decode_queries=decode_queries,
            )
        except NotImplementedError:
            if implementation is not None:
                raise
    function = dispatch.resolve("make_metadata", _METADATA, implementation)
    return function(
        query_start_loc,
        seq_lens,
        block_tables,
        num_tokens=num_tokens,
        block_size=block_size,
        sliding_window=sliding_window,
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
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
    metadata: Any = None,
) -> jax.Array:
    """Causal attention of each row's newest tokens over the row's whole context.

    Row ``r`` has the queries ``q[query_start_loc[r] : query_start_loc[r + 1]]``. They are the last
    tokens of its ``seq_lens[r]`` tokens of context, whose keys and values already lie in the pool,
    token ``p`` in block ``block_tables[r, p // block_size]`` at ``p % block_size``.

    Args:
      q: ``[T, H, D]``, any float type; query head ``h`` uses KV head ``h // (H // K)``.
      k_pool, v_pool: the pools of ``init_pool``.
      block_tables: ``[R, M]`` int32. Entries past the needed ones may hold anything.
      query_start_loc: ``[R + 1]`` int32, starting at 0 and never decreasing.
      seq_lens: ``[R]`` int32; 0 for a row with no queries.
      layer: which layer of the pool, an int or a traced int32 scalar.
      scale: factor on the logits, usually ``head_dim ** -0.5``.
      sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it.
      soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
      implementation: ``"pallas"`` (Mosaic GPU kernels; on a CPU only under
        ``pallas_kernels.interpret.interpret_mode``), ``"xla"``, ``"reference"``, or ``None``:
        ``"pallas"`` on a GPU where it supports the call, otherwise ``"xla"``.
      metadata: from ``make_metadata`` with the same arrays; made here if ``None``.

    Returns:
      ``[T, H, D]`` of q's type, accumulated in float32. Tokens at or after
      ``query_start_loc[R]`` are padding; their output is zero. Whatever lies in slots that a
      token may not see, NaN included, never reaches its output. ``"pallas"`` rounds queries and
      softmax weights to the pool's type before its products.

    Differentiable once, in reverse mode, in q and in pools of a floating-point type, whatever the
    implementation; the backward pass is XLA's.

    Raises:
      NotImplementedError: ``"pallas"`` does not support an option, which the message names, or
        the platform.
      ValueError: shapes that do not fit together.
    """
    _check(q, k_pool, v_pool, block_tables, query_start_loc, seq_lens, sliding_window, soft_cap)
    if implementation is None and isinstance(metadata, WorkList):
        implementation = "pallas"
    elif implementation is None and isinstance(metadata, work_list.Metadata):
        implementation = "xla"
    if metadata is None:
        metadata = make_metadata(
            query_start_loc,
            seq_lens,
            block_tables,
            num_tokens=q.shape[0],
            block_size=k_pool.shape[2],
            sliding_window=sliding_window,
            num_heads=q.shape[1],
            k_pool=k_pool,
            implementation=implementation,
        )
        if isinstance(metadata, WorkList):
            implementation = "pallas"
    attention = Attention(
        function=dispatch.resolve("paged_attention", _IMPLEMENTATIONS, implementation),
        scale=float(scale),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    layer = jnp.asarray(layer, jnp.int32)
    arrays = (block_tables, query_start_loc, seq_lens, layer, metadata)
    return differentiable(attention, q, k_pool, v_pool, *arrays)


def _check(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    if q.ndim != 3:
        raise ValueError(f"q {q.shape} must be [num_tokens, num_heads, head_dim]")
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype or k_pool.ndim != 5:
        raise ValueError(
            f"k_pool {k_pool.shape} {k_pool.dtype} and v_pool {v_pool.shape} {v_pool.dtype} must "
            "be the two pools of init_pool"
        )
    num_kv_heads, head_dim = k_pool.shape[-2:]
    if q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q {q.shape} does not fit a pool of {num_kv_heads} KV heads of dimension {head_dim}: "
            "the number of query heads must be a multiple of the number of KV heads"
        )
    num_rows = seq_lens.shape[0]
    if block_tables.shape[:1] != (num_rows,) or query_start_loc.shape != (num_rows + 1,):
        raise ValueError(
            f"seq_lens [{num_rows}] needs block_tables [{num_rows}, M], not {block_tables.shape}, "
            f"and query_start_loc [{num_rows + 1}], not {query_start_loc.shape}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be None or at least 1")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be None or above 0")
