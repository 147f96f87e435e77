"""Attention of rows with one query.

Chunks of context that several rows share are read once for all of them. Every other chunk is a
work item, and items are taken a batch at a time whichever rows they belong to, so that short rows
do not wait for long ones. Either way a chunk's partial softmax goes to its row's place in the
wave, and the wave's parts are added up row by row, always in the same order and shape.

Splitting a row's context like that is flash decoding (Dao et al., 2023); reading a shared prefix
once is known as cascade attention (Ye et al., 2024).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.work_list import WAVE, Decode
from pallas_kernels.paged_attention.xla_context import HIDDEN, Context, Softmax, finish, start

_MOST_FLAT_HEADS = 4
"""KV heads up to which keys and values are used as they lie, all heads of a token in a row.

A product then multiplies every query head with every KV head's part and throws all but one away.
For few heads that is cheaper than taking the blocks apart by head, which reads memory in pieces.
"""

_SHARED_CHUNKS = 4
"""Chunks that a group reads at once; a divisor of WAVE."""


def decode(q: jax.Array, context: Context, scale: float, work: Decode) -> jax.Array:
    """Output ``[U, H, D]`` float32 of the rows with one query, in the work list's order."""
    num_tokens, num_heads, head_dim = q.shape
    tokens = jnp.minimum(work.tokens, num_tokens - 1)
    queries = q.at[tokens].get(mode="promise_in_bounds").astype(jnp.float32) * scale
    num_rows = queries.shape[0]
    ends = (work.lens + context.chunk - 1) // context.chunk
    items = _items(queries, work, context)

    def wave(w: jax.Array, carry: tuple[Softmax, Softmax]) -> tuple[Softmax, Softmax]:
        parts, state = carry
        if context.sliding_window is None:
            parts = _shared(queries, work, context, w, parts)
        parts = lax.fori_loop(work.wave_starts[w], work.wave_starts[w + 1], items, parts)
        # Places of chunks before the first hold nothing, those after the last an earlier wave's.
        valid = w * WAVE + jnp.arange(WAVE) < ends[:, None]
        return parts, _add(state, parts, valid[:, :, None])

    parts = start((num_rows, WAVE, num_heads), head_dim)
    state = start((num_rows, num_heads), head_dim)
    _, state = lax.fori_loop(work.begin_wave, work.end_wave, wave, (parts, state))
    return finish(state)


def _add(state: Softmax, parts: Softmax, valid: jax.Array) -> Softmax:
    """``state`` ``[U, H]`` and the wave's ``parts`` ``[U, WAVE, H]`` that are valid."""
    high, total, acc = state
    part_high, part_total, part_acc = parts
    new_high = jnp.maximum(high, jnp.max(jnp.where(valid, part_high, HIDDEN), axis=1))
    weights = jnp.where(valid, jnp.exp(part_high - new_high[:, None]), 0.0)
    shrink = jnp.exp(high - new_high)
    total = total * shrink + jnp.sum(weights * part_total, axis=1)
    acc = acc * shrink[..., None] + jnp.sum(weights[..., None] * part_acc, axis=1)
    return new_high, total, acc


def _softmax(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Largest logit, sum of weights, and the weights of logits ``[..., chunk]``."""
    high = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - high[..., None])
    return high, jnp.sum(weights, axis=-1), weights


def _shared(q: jax.Array, work: Decode, context: Context, w: jax.Array, parts: Softmax) -> Softmax:
    """Parts of the wave's chunks that a group shares. All see them whole, so there is no mask."""
    num_rows, num_heads, _ = q.shape
    size = num_rows // work.shared_chunks.shape[0]
    num_kv_heads = context.num_kv_heads
    per_kv = num_heads // num_kv_heads

    def by_kv_head(x: jax.Array) -> jax.Array:
        """``[..., G, H, X]`` to ``[..., K, G * H // K, X]``."""
        *lead, _, _, width = x.shape
        x = jnp.moveaxis(x.reshape(*lead, size, num_kv_heads, per_kv, width), -3, -4)
        return x.reshape(*lead, num_kv_heads, size * per_kv, width)

    def by_row(x: jax.Array) -> jax.Array:
        """``[C, K, G * H // K, X]`` to ``[G, C, H, X]``."""
        x = x.reshape(_SHARED_CHUNKS, num_kv_heads, size, per_kv, x.shape[-1])
        return x.transpose(2, 0, 1, 3, 4).reshape(size, _SHARED_CHUNKS, num_heads, -1)

    def group(g: jax.Array, parts: Softmax) -> Softmax:
        queries = by_kv_head(lax.dynamic_slice_in_dim(q, g * size, size))
        table = lax.dynamic_slice_in_dim(work.tables, g * size, 1)
        last = work.shared_chunks[g] - 1

        def body(i: jax.Array, parts: Softmax) -> Softmax:
            slot = i * _SHARED_CHUNKS
            # Past the last one it comes again: what the other places get is never used, but must
            # be finite.
            chunks = jnp.minimum(w * WAVE + slot + jnp.arange(_SHARED_CHUNKS), last)
            blocks = context.chunk_blocks_of(jnp.repeat(table, _SHARED_CHUNKS, axis=0), chunks)
            k = context.gather(context.k_pool, blocks)
            v = context.gather(context.v_pool, blocks)
            logits = context.cap(by_row(jnp.einsum("kqd,nckd->nkqc", queries, k)))
            high, total, weights = _softmax(logits)
            weights = by_kv_head(weights.swapaxes(0, 1))
            acc = by_row(jnp.einsum("nkqc,nckd->nkqd", weights, v))
            return jax.tree.map(
                lambda x, new: lax.dynamic_update_slice(
                    x, new, (g * size, slot, *[0] * (x.ndim - 2))
                ),
                parts,
                (high, total, acc),
            )

        in_wave = jnp.clip(last + 1 - w * WAVE, 0, WAVE)
        return lax.fori_loop(0, -(-in_wave // _SHARED_CHUNKS), body, parts)

    return lax.fori_loop(0, work.num_groups, group, parts)


def _items(q: jax.Array, work: Decode, context: Context):
    """The loop body that computes the parts of one batch of items."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = context.num_kv_heads
    size = work.item_rows.shape[1]
    split = (num_kv_heads, num_heads // num_kv_heads)
    flat = num_kv_heads <= _MOST_FLAT_HEADS
    if flat:
        # [U, H, K * D]: each head at its KV head's place, zero elsewhere.
        own_head = jnp.eye(num_kv_heads, dtype=bool)[:, None, :, None]
        q = jnp.where(own_head, q.reshape(num_rows, *split, 1, head_dim), 0.0)
        q = q.reshape(num_rows, num_heads, -1)

    def body(i: jax.Array, parts: Softmax) -> Softmax:
        rows, chunks = work.item_rows[i], work.item_chunks[i]
        known = jnp.minimum(rows, num_rows - 1)
        queries = q.at[known].get(mode="promise_in_bounds")
        blocks = context.chunk_blocks_of(work.tables[known], chunks)
        k = context.gather(context.k_pool, blocks, flat=flat)
        v = context.gather(context.v_pool, blocks, flat=flat)
        tokens = chunks[:, None] * context.chunk + jnp.arange(context.chunk)
        seen = context.seen(tokens, work.lens[known] - 1)
        # Zero times NaN is NaN: what is not seen is removed from V, not only given no weight.
        v = jnp.where(seen.reshape(*seen.shape, *[1] * (v.ndim - 2)), v, 0.0)
        if flat:
            logits = jnp.einsum("ghx,gcx->ghc", queries, k)
        else:
            logits = jnp.einsum("gkpd,gckd->gkpc", queries.reshape(size, *split, head_dim), k)
            logits = logits.reshape(size, num_heads, context.chunk)
        logits = jnp.where(seen[:, None], context.cap(logits), HIDDEN)
        high, total, weights = _softmax(logits)
        if flat:
            acc = jnp.einsum("ghc,gcx->ghx", weights, v)
            acc = acc.reshape(size, *split, num_kv_heads, head_dim)
            acc = jnp.stack([acc[:, k, :, k] for k in range(num_kv_heads)], axis=1)
        else:
            acc = jnp.einsum("gkpc,gckd->gkpd", weights.reshape(size, *split, context.chunk), v)
        acc = acc.reshape(size, num_heads, head_dim)
        slots = chunks % WAVE
        return jax.tree.map(
            lambda x, new: x.at[rows, slots].set(new, mode="drop"),
            parts,
            (high, total, acc),
        )

    return body
