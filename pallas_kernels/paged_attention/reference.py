"""``paged_attention`` written to be obviously right: gathers everything, float32, no blocking."""

import jax
import jax.numpy as jnp

from pallas_kernels.pool import to_float32


def make_metadata(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    sliding_window: int | None,
) -> tuple[()]:
    """Nothing: the reference has no work list."""
    return ()


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
    metadata: tuple[()],
) -> jax.Array:
    """See ``api.paged_attention``. Takes ``[T, M * B]`` memory several times over."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, _, num_kv_heads = k_pool.shape[1:4]
    token = jnp.arange(num_tokens)
    row = jnp.searchsorted(query_start_loc[1:], token, side="right")
    real = token < query_start_loc[-1]
    row = jnp.minimum(row, seq_lens.shape[0] - 1)
    position = seq_lens[row] - query_start_loc[row + 1] + token

    # Each token's own copy of its row's context: [T, C, K, D].
    tables = jnp.clip(block_tables, 0, num_blocks - 1)[row]
    k = to_float32(k_pool[layer][tables]).reshape(num_tokens, -1, num_kv_heads, head_dim)
    v = to_float32(v_pool[layer][tables]).reshape(num_tokens, -1, num_kv_heads, head_dim)
    context = jnp.arange(k.shape[1])
    mask = (context <= position[:, None]) & real[:, None]
    if sliding_window is not None:
        mask &= context > position[:, None] - sliding_window

    # What may not be seen is replaced before any arithmetic, since 0 * NaN is NaN.
    k = jnp.where(mask[:, :, None, None], k, 0.0)
    v = jnp.where(mask[:, :, None, None], v, 0.0)
    group = num_heads // num_kv_heads
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("thd,tchd->thc", q.astype(jnp.float32), k, precision=highest) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(mask[:, None, :], logits, -jnp.inf)
    weights = jax.nn.softmax(jnp.where(real[:, None, None], logits, 0.0), axis=-1)
    out = jnp.einsum("thc,tchd->thd", weights, v, precision=highest)
    return out.astype(q.dtype)
