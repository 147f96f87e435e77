"""What decode and prefill have in common: reading a chunk of context, and softmax in parts."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.pool import to_float32

HIDDEN = -1e30
"""Logit of what may not be seen. Finite, so that a row may begin with chunks it sees nothing of:
what they add has weight exp(HIDDEN - real) == 0 as soon as a real logit appears."""

Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Largest logit [...], sum of weights [...], weighted sum of values [..., X], all float32."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One layer of the pool and how it is to be seen."""

    k_pool: jax.Array
    v_pool: jax.Array
    layer: int | jax.Array
    sliding_window: int | None
    soft_cap: float | None
    chunk_blocks: int

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.chunk_blocks * self.k_pool.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.k_pool.shape[3]

    def chunk_blocks_of(self, tables: jax.Array, chunks: jax.Array) -> jax.Array:
        """Block ids ``[G, chunk_blocks]`` of a chunk of each row; ``[G, M]`` and ``[G]``."""
        columns = chunks[:, None] * self.chunk_blocks + jnp.arange(self.chunk_blocks)
        columns = jnp.minimum(columns, tables.shape[1] - 1)
        return jnp.take_along_axis(tables, columns, axis=1, mode="promise_in_bounds")

    def tokens(self, c: jax.Array) -> jax.Array:
        """Positions ``[chunk]`` of the tokens of chunk ``c``."""
        return c * self.chunk + jnp.arange(self.chunk)

    def gather(self, pool: jax.Array, blocks: jax.Array, *, flat: bool = False) -> jax.Array:
        """Blocks ``[G, chunk_blocks]`` of the layer, as ``[G, chunk, K, D]`` float32.

        With ``flat`` as ``[G, chunk, K * D]``: XLA then copies whole blocks, which is twice as
        fast as taking them apart by head.
        """
        num_blocks = pool.shape[1]
        index = jnp.clip(blocks, 0, num_blocks - 1) + self.layer * num_blocks
        tail = (pool.shape[2] * pool.shape[3] * pool.shape[4],) if flat else pool.shape[2:]
        found = pool.reshape(-1, *tail).at[index].get(mode="promise_in_bounds")
        tail = (pool.shape[3] * pool.shape[4],) if flat else pool.shape[3:]
        return to_float32(found).reshape(blocks.shape[0], self.chunk, *tail)

    def cap(self, logits: jax.Array) -> jax.Array:
        """Logits under the soft cap, if there is one."""
        if self.soft_cap is None:
            return logits
        return self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def first_seen(self, oldest_query: jax.Array) -> jax.Array:
        """First position that the query at this position may see."""
        if self.sliding_window is None:
            return jnp.zeros_like(oldest_query)
        return jnp.maximum(oldest_query - self.sliding_window + 1, 0)

    def seen(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """``[..., chunk]`` which tokens the queries at ``positions`` ``[...]`` may see."""
        seen = tokens <= positions[..., None]
        if self.sliding_window is not None:
            seen &= tokens > positions[..., None] - self.sliding_window
        return seen


def start(shape: tuple[int, ...], width: int) -> Softmax:
    """The softmax of nothing."""
    high = jnp.full(shape, HIDDEN)
    return high, jnp.zeros_like(high), jnp.zeros((*shape, width))


def finish(state: Softmax) -> jax.Array:
    """The mean of values. A total of 0 belongs to what is no query; its output is 0."""
    _, total, acc = state
    return acc / jnp.maximum(total, 1e-30)[..., None]
