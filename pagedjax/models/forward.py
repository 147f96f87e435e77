"""Forward passes as pure functions of a parameter pytree: paged, for the engine, and dense, for
training and tests.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.models.config import ModelConfig
from pagedjax.models.modules import Llama, bind_trunk, model_params, run_layers
from pagedjax.models.rope import rope_tables
from pallas_kernels import NULL, make_metadata, paged_attention, write_kv


class Batch(Protocol):
    """One step's ragged batch: T tokens of R rows, M blocks a row. All int32."""

    token_ids: jax.Array  # [T]
    positions: jax.Array  # [T]
    slot_mapping: jax.Array  # [T]; out of range: not written
    query_start_loc: jax.Array  # [R + 1]
    seq_lens: jax.Array  # [R]
    block_tables: jax.Array  # [R, M]


def forward(
    params: dict[str, Any],
    k_pool: jax.Array,
    v_pool: jax.Array,
    batch: Batch,
    *,
    config: ModelConfig,
    attention: str | None = None,
    output_indices: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step: writes the keys and values of T tokens to the pool and attends to each row's
    context.

    Returns the pools and the last layer's output (before the final norm, which
    :func:`compute_logits` applies), float32 [T, E], or [len(output_indices), E] for the tokens at
    ``output_indices`` only: then the last layer's feed-forward network runs for those alone.
    ``attention`` is the implementation that ``paged_attention`` takes.
    """
    x = _forward(params, k_pool, v_pool, batch, config, attention, output_indices, None)
    return x[:3]


def forward_recorded(
    params: dict[str, Any],
    k_pool: jax.Array,
    v_pool: jax.Array,
    batch: Batch,
    *,
    config: ModelConfig,
    attention: str | None = None,
    output_indices: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``forward`` that also returns what attention gave in each layer, [L, T, H, D] in the
    activations' type: for comparing implementations.
    """
    shape = (
        config.num_hidden_layers,
        batch.token_ids.shape[0] + _is_padded(params, batch.token_ids),
        config.num_attention_heads,
        config.head_dim,
    )
    recorded = jnp.zeros(shape, params["trunk"]["embed_tokens"]["weight"].dtype)
    k_pool, v_pool, x, recorded = _forward(
        params, k_pool, v_pool, batch, config, attention, output_indices, recorded
    )
    return k_pool, v_pool, x, recorded[:, : batch.token_ids.shape[0]]


def _forward(
    params: dict[str, Any],
    k_pool: jax.Array,
    v_pool: jax.Array,
    batch: Batch,
    config: ModelConfig,
    attention: str | None,
    output_indices: jax.Array | None,
    recorded: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """``recorded`` passes through the layers and is filled; None is a pytree without leaves."""
    token_ids, positions, slots = batch.token_ids, batch.positions, batch.slot_mapping
    num_outputs = (token_ids if output_indices is None else output_indices).shape[0]
    if _is_bfloat16(params):
        # Never one row: see _is_bfloat16. The second row is padding and is cut off at the end.
        if _is_padded(params, token_ids):
            token_ids, positions = jnp.pad(token_ids, (0, 1)), jnp.pad(positions, (0, 1))
            slots = jnp.pad(slots, (0, 1), constant_values=NULL)
        if output_indices is not None and num_outputs == 1:
            output_indices = jnp.pad(output_indices, (0, 1))
    metadata = make_metadata(
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables,
        num_tokens=token_ids.shape[0],
        block_size=k_pool.shape[2],
        sliding_window=config.sliding_window,
        num_heads=config.num_attention_heads,
        k_pool=k_pool,
        implementation=attention,
    )

    def attend(layer):
        def attend_paged(q, k, v, cache):
            *pools, recorded = cache
            pools = write_kv(*pools, k, v, slots, layer=layer, implementation=attention)
            attended = paged_attention(
                q,
                *pools,
                batch.block_tables,
                batch.query_start_loc,
                batch.seq_lens,
                layer=layer,
                scale=config.head_dim**-0.5,
                sliding_window=config.sliding_window,
                implementation=attention,
                metadata=metadata,
            )
            if recorded is not None:
                recorded = recorded.at[layer].set(attended)
            return attended, (*pools, recorded)

        return attend_paged

    def select(x):
        return x[output_indices]

    narrow = output_indices is not None and output_indices.shape[0] < token_ids.shape[0]
    x, (k_pool, v_pool, recorded) = run_layers(
        config,
        params["layers"],
        bind_trunk(config, params).embed_tokens(token_ids),
        rope_tables(positions, config),
        attend,
        (k_pool, v_pool, recorded),
        select if narrow else None,
    )
    if output_indices is not None and not narrow:
        x = select(x)
    return k_pool, v_pool, x[:num_outputs], recorded


def _is_padded(params: dict[str, Any], token_ids: jax.Array) -> bool:
    """Whether a batch of one token gets a second one: see _is_bfloat16."""
    return token_ids.shape[0] == 1 and _is_bfloat16(params)


def _is_bfloat16(params: dict[str, Any]) -> bool:
    """Whether products run in bfloat16: then they must have two rows or more.

    XLA:CPU converts the whole weight to float32 for a product with one row, which is 4 to 12 times
    slower than two rows.
    """
    return params["trunk"]["embed_tokens"]["weight"].dtype == jnp.bfloat16


def compute_logits(params: dict[str, Any], hidden: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Logits of ``forward``'s hidden states: [R, E] -> [R, V] float32 (final norm, then head)."""
    trunk = bind_trunk(config, params)
    if hidden.shape[0] == 1 and _is_bfloat16(params):
        return trunk.logits(jnp.pad(hidden, ((0, 1), (0, 0))))[:1]
    return trunk.logits(hidden)


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, sliding_window: int | None
) -> jax.Array:
    """Causal attention over whole sequences, float32 inside: q [Bt, Tq, H, D], k and v [Bt, Tq, K,
    D].
    """
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)
    scores = jnp.einsum(
        "bqkgd,bskd->bkgqs",
        grouped,
        k,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    allowed = distance >= 0
    if sliding_window is not None:
        allowed &= distance < sliding_window
    weights = jax.nn.softmax(jnp.where(allowed, scores * head_dim**-0.5, -jnp.inf), axis=-1)
    attended = jnp.einsum(
        "bkgqs,bskd->bqkgd",
        weights,
        v.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return attended.reshape(batch, length, heads, head_dim).astype(q.dtype)


def forward_dense(
    params: dict[str, Any] | Llama, token_ids: jax.Array, config: ModelConfig
) -> jax.Array:
    """Logits of whole sequences, with no cache: token_ids [Bt, Tq] int32 -> [Bt, Tq, V] float32.

    Differentiable in the parameters; ``params`` is the pytree or the NNX module itself. Used to
    train, and as the reference that the paged forward is compared with. Its attention holds [Bt, H,
    Tq, Tq] scores.
    """
    if isinstance(params, nnx.Module):
        params = model_params(params)
    batch, length = token_ids.shape
    trunk = bind_trunk(config, params)

    def attend(_layer):
        def attend_dense(q, k, v, cache):
            q, k, v = (a.reshape(batch, length, *a.shape[1:]) for a in (q, k, v))
            attended = dense_attention(q, k, v, sliding_window=config.sliding_window)
            return attended.reshape(-1, *attended.shape[2:]), cache

        return attend_dense

    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    x = trunk.embed_tokens(token_ids.reshape(-1))
    rope = rope_tables(positions, config)
    x, _ = run_layers(config, params["layers"], x, rope, attend, (), unroll=True)
    return trunk.logits(x).reshape(batch, length, -1)
