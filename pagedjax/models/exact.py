"""The forward pass of the bit-exact mode: the same arithmetic for a token, whoever is with it.

A product of 3 rows and one of 300 are different kernels of the compiler's library and round
differently, and so do attention over one query and over a tile of them. Here tokens go through the
whole model `TILE` at a time, each as a row of its own with one query: one loop body of fixed
shapes, run as often as there are tokens. So what a token gives depends on the tokens before it in
its sequence and on nothing else: not on the step's size, nor on how a prompt is cut into chunks,
nor on where in the step the token lies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.models.config import ModelConfig
from pagedjax.models.forward import Batch, forward
from pallas_kernels import NULL

TILE = 16
"""Tokens of one pass. A step of few tokens takes as long as one of so many; a prompt reads the
weights once for each so many of its tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Tile:
    """A `Batch` of up to TILE rows with one query each."""

    token_ids: jax.Array
    positions: jax.Array
    slot_mapping: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    block_tables: jax.Array


def forward_exact(
    params: dict[str, Any],
    k_pool: jax.Array,
    v_pool: jax.Array,
    batch: Batch,
    *,
    config: ModelConfig,
    attention: str | None = None,
    output_indices: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``forward.forward``, to the last bit the same for a token in every batch.

    Tokens of a row must lie in the batch in order, since those of an earlier tile write what the
    next one reads. Padding after the last row is not computed; its output is zero.
    """
    num_tokens = batch.token_ids.shape[0]
    padding = -num_tokens % TILE
    total = batch.query_start_loc[-1]
    token = jnp.arange(num_tokens + padding, dtype=jnp.int32)
    rows = jnp.sum(token[:, None] >= batch.query_start_loc[1:], axis=1, dtype=jnp.int32)
    rows = jnp.minimum(rows, batch.seq_lens.shape[0] - 1)
    token_ids, positions = (jnp.pad(x, (0, padding)) for x in (batch.token_ids, batch.positions))
    slots = jnp.pad(batch.slot_mapping, (0, padding), constant_values=NULL)
    lens = jnp.where(token < total, positions + 1, 0)
    wanted = token[:num_tokens] if output_indices is None else output_indices

    def body(i: jax.Array, carry: tuple) -> tuple:
        k_pool, v_pool, outputs = carry

        def part(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, i * TILE, TILE)

        tile = _Tile(
            token_ids=part(token_ids),
            positions=part(positions),
            slot_mapping=part(slots),
            query_start_loc=jnp.minimum(jnp.arange(TILE + 1, dtype=jnp.int32), total - i * TILE),
            seq_lens=part(lens),
            block_tables=batch.block_tables[part(rows)],
        )
        k_pool, v_pool, hidden = forward(
            params, k_pool, v_pool, tile, config=config, attention=attention
        )
        hidden = lax.optimization_barrier(hidden)
        place = wanted - i * TILE
        inside = (place >= 0) & (place < TILE)
        found = hidden[jnp.clip(place, 0, TILE - 1)]
        return k_pool, v_pool, jnp.where(inside[:, None], found, outputs)

    size = params["trunk"]["embed_tokens"]["weight"].shape[1]
    outputs = jnp.zeros((wanted.shape[0], size), jnp.float32)
    num_tiles = (total + TILE - 1) // TILE
    return lax.fori_loop(0, num_tiles, body, (k_pool, v_pool, outputs))
