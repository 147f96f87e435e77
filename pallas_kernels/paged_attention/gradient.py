"""The derivative of paged attention, the same for every implementation: plain XLA, float32.

The attention of a tile of queries is computed again and differentiated by hand, as in
FlashAttention-2's backward pass but with a row's whole context at once: about
``tile * num_heads * max_context`` floats of temporary memory, several times over.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.paged_attention.work_list import Tiles, make_tiles
from pallas_kernels.pool import to_float32

_TILE = 32
"""Queries of one row that the backward pass handles together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """An implementation and its static options, hashable as custom derivatives need it."""

    function: Callable[..., jax.Array]
    scale: float
    sliding_window: int | None
    soft_cap: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(
    attention: Attention,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    layer: jax.Array,
    metadata: Any,
) -> jax.Array:
    """``attention.function`` of the arrays, with a derivative in q and in both pools.

    A pool of bfloat16 stored as ``uint16`` has no derivative, q still has.
    """
    return attention.function(
        q,
        k_pool,
        v_pool,
        block_tables,
        query_start_loc,
        seq_lens,
        layer=layer,
        scale=attention.scale,
        sliding_window=attention.sliding_window,
        soft_cap=attention.soft_cap,
        metadata=metadata,
    )


def _forward(attention: Attention, *arguments: Any) -> tuple[jax.Array, tuple]:
    # What is not differentiated may be numpy's, which traced numbers cannot index.
    values = jax.tree.map(
        lambda x: jnp.asarray(x.value), arguments, is_leaf=lambda x: hasattr(x, "perturbed")
    )
    q, k_pool, v_pool, block_tables, query_start_loc, seq_lens, layer, _ = values
    wanted = any(pool.perturbed for pool in arguments[1:3])
    # A pytree without leaves, so that the choice is static in the backward pass.
    pools_wanted = () if wanted else None
    saved = (q, k_pool, v_pool, block_tables, query_start_loc, seq_lens, layer, pools_wanted)
    return differentiable(attention, *values), saved


def _backward(attention: Attention, saved: tuple, cotangent: Any) -> tuple:
    q, k_pool, v_pool, block_tables, query_start_loc, seq_lens, layer, pools_wanted = saved
    if isinstance(cotangent, SymbolicZero):
        return (None,) * 8
    tiles = _tiles(query_start_loc, q.shape[0])
    num_blocks, block_size, num_kv_heads = k_pool.shape[1:4]
    group = q.shape[1] // num_kv_heads
    max_context = block_tables.shape[1] * block_size
    context = jnp.arange(max_context, dtype=jnp.int32)
    pools = jnp.zeros((2, *k_pool.shape[1:]), jnp.float32) if pools_wanted == () else None

    def body(i: jax.Array, carry: tuple) -> tuple:
        dq, dpools = carry
        row, start = tiles.rows[i], tiles.starts[i]
        stop = query_start_loc[row + 1]
        tokens = start + jnp.arange(_TILE, dtype=jnp.int32)
        place = jnp.minimum(tokens, q.shape[0] - 1)
        positions = seq_lens[row] - stop + tokens
        seen = (context <= positions[:, None]) & (tokens < stop)[:, None]
        if attention.sliding_window is not None:
            seen &= context > positions[:, None] - attention.sliding_window
        used = jnp.any(seen, axis=0)
        blocks = jnp.clip(block_tables[row], 0, num_blocks - 1)
        k, v = (
            jnp.where(
                used[:, None, None],
                to_float32(pool[layer, blocks]).reshape(max_context, *pool.shape[3:]),
                0.0,
            )
            for pool in (k_pool, v_pool)
        )
        shape = (_TILE, num_kv_heads, group, q.shape[2])
        # Padding may hold anything, and what is not seen multiplies it by zero.
        queries, outer = (
            jnp.where((tokens < stop)[:, None, None], x[place].astype(jnp.float32), 0.0)
            for x in (q, cotangent)
        )
        grads = _tile_gradient(attention, queries.reshape(shape), k, v, seen, outer.reshape(shape))
        dq = dq.at[jnp.where(tokens < stop, tokens, q.shape[0])].add(
            grads[0].reshape(_TILE, *q.shape[1:]), mode="drop"
        )
        if dpools is not None:
            needed = used.reshape(-1, block_size).any(axis=1)
            where = jnp.where(needed, blocks, num_blocks)
            parts = jnp.stack(grads[1:]).reshape(2, -1, *k_pool.shape[2:])
            dpools = dpools.at[:, where].add(parts, mode="drop")
        return dq, dpools

    dq = jnp.zeros(q.shape, jnp.float32)
    dq, dpools = lax.fori_loop(0, tiles.count, body, (dq, pools))
    dk_pool = dv_pool = None
    if dpools is not None:
        dk_pool, dv_pool = (
            jnp.zeros(k_pool.shape, k_pool.dtype).at[layer].set(d.astype(k_pool.dtype))
            for d in dpools
        )
    return dq.astype(q.dtype), dk_pool, dv_pool, None, None, None, None, None


def _tile_gradient(
    attention: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    outer: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Derivatives of one tile, float32.

    Args:
      q, outer: ``[tile, K, G, D]`` queries and the output's cotangent.
      k, v: ``[C, K, D]``, zero where no query sees them.
      seen: ``[tile, C]``.

    Returns:
      The cotangents of q, k and v.
    """
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    logits = einsum("tkgd,ckd->tkgc", q, k) * attention.scale
    slope = jnp.float32(attention.scale)
    if attention.soft_cap is not None:
        bent = jnp.tanh(logits / attention.soft_cap)
        logits, slope = attention.soft_cap * bent, (1 - bent * bent) * slope
    mask = seen[:, None, None, :]
    high = jnp.max(jnp.where(mask, logits, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(logits - jnp.where(jnp.isfinite(high), high, 0.0)), 0.0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    dv = einsum("tkgc,tkgd->ckd", weights, outer)
    dweights = einsum("tkgd,ckd->tkgc", outer, v)
    dlogits = weights * (dweights - jnp.sum(weights * dweights, axis=-1, keepdims=True)) * slope
    dq = einsum("tkgc,ckd->tkgd", dlogits, k)
    dk = einsum("tkgc,tkgd->ckd", dlogits, q)
    return dq, dk, dv


def _tiles(query_start_loc: jax.Array, num_tokens: int) -> Tiles:
    starts = query_start_loc[:-1]
    num_tiles = (query_start_loc[1:] - starts + _TILE - 1) // _TILE
    most = num_tokens // _TILE + min(starts.shape[0], num_tokens)
    return make_tiles(num_tiles, starts, _TILE, most)


differentiable.defvjp(_forward, _backward, symbolic_zeros=True)
