"""``paged_attention`` in plain XLA operations: the CPU path.

Rows with one query are handled in batches of chunks (`xla_decode`); longer chunks of prompts are
cut into tiles of queries (`xla_prefill`). Either way one loop iteration takes a batch of query
vectors against chunks of context, with the running maximum, sum and weighted sum of flash
attention (Dao et al., 2022; the online softmax is Milakov and Gimelshein, 2018). Trip counts come
from the data, so the work follows the real lengths, and nothing larger than one batch is ever
built.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.work_list import Metadata, chunk_blocks, make_metadata
from pallas_kernels.paged_attention.xla_context import Context
from pallas_kernels.paged_attention.xla_decode import decode
from pallas_kernels.paged_attention.xla_prefill import prefill

__all__ = ["Metadata", "make_metadata", "paged_attention"]


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
    metadata: Metadata,
) -> jax.Array:
    """See ``api.paged_attention``.

    A row's output is the same to the last bit whichever rows share the step, and whatever lies
    in unseen slots, as long as the shapes (T, R, M) and the row's own query and context lengths
    are the same: its sums run over the same chunks of context in the same order. A token computed
    as decode and as part of a chunk, or under other shapes, agrees to float32 rounding. Rows that
    read shared blocks together keep their bits as long as XLA sums a product of one row and of
    many in the same order: jax 0.11 and later on AVX2 do (a test compares them), jax 0.10 does not.

    Raises:
      ValueError: metadata made for another block size or sliding window.
    """
    made_for = (metadata.block_size, metadata.sliding_window)
    if made_for != (k_pool.shape[2], sliding_window):
        raise ValueError(
            f"metadata was made for (block_size, sliding_window) = {made_for}, not for "
            f"{(k_pool.shape[2], sliding_window)}"
        )
    context = Context(
        k_pool=k_pool,
        v_pool=v_pool,
        layer=layer,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        chunk_blocks=chunk_blocks(k_pool.shape[2], block_tables.shape[1]),
    )
    out = jnp.zeros_like(q)
    if q.shape[0] > 1:
        out = prefill(out, q, context, block_tables, query_start_loc, seq_lens, scale, metadata)
    decoded = decode(q, context, scale, metadata.decode)
    return out.at[metadata.decode.tokens].set(decoded.astype(q.dtype), mode="drop")
