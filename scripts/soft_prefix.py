"""A soft prefix in shared blocks of the KV pool: its loss, its gradient, generation with it.

What scripts/tune_soft_prefix.py tunes. All sequences name the prefix's blocks first in their block
tables, so it is in the pool once and its gradient collects from all of them.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pagedjax.models.config import ModelConfig
from pagedjax.models.forward import compute_logits, forward
from pagedjax.models.params import default_dtype
from pallas_kernels import NULL, gather_blocks, init_pool, write_kv


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Prefix:
    """Keys and values of P tokens, [L, P, K, D] float32 each; keys as the cache holds them, turned
    by their position.
    """

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One ragged step (``pagedjax.models.forward.Batch``)."""

    token_ids: jax.Array
    positions: jax.Array
    slot_mapping: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    block_tables: jax.Array


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where sequences lie in the pool: the prefix in the first blocks, then each in its own.

    Attributes:
      prefix_tokens: P, a multiple of ``block_size``; 0: no prefix.
      max_tokens: most tokens of each sequence, without the prefix.
      attention: implementation of attention and of writes to the pool, as `paged_attention` takes
        it.
    """

    block_size: int
    prefix_tokens: int
    max_tokens: tuple[int, ...]
    attention: str | None = None

    @property
    def num_prefix_blocks(self) -> int:
        """Blocks that all sequences share."""
        return self.prefix_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        """N: of the whole pool."""
        return self.num_prefix_blocks + sum(-(-n // self.block_size) for n in self.max_tokens)

    def block_tables(self) -> np.ndarray:
        """[R, M] int32: the shared blocks, then the sequence's own, then NULL."""
        shared, own = self.num_prefix_blocks, [-(-n // self.block_size) for n in self.max_tokens]
        tables = np.full((len(own), shared + max(own)), NULL, np.int32)
        tables[:, :shared] = np.arange(shared)
        first = shared
        for row, count in enumerate(own):
            tables[row, shared : shared + count] = np.arange(first, first + count)
            first += count
        return tables

    def batch(self, tokens: list[list[int]], done: list[int]) -> Batch:
        """A step over new tokens of each sequence, of which ``done`` are in the pool already."""
        tables, counts = self.block_tables(), np.array([len(t) for t in tokens], np.int32)
        starts = self.prefix_tokens + np.array(done, np.int32)
        rows = np.repeat(np.arange(len(tokens)), counts)
        positions = np.concatenate(
            [s + np.arange(c, dtype=np.int32) for s, c in zip(starts, counts, strict=True)]
        )
        blocks = tables[rows, positions // self.block_size]
        return Batch(
            token_ids=jnp.asarray(np.concatenate(tokens), jnp.int32),
            positions=jnp.asarray(positions),
            slot_mapping=jnp.asarray(blocks * self.block_size + positions % self.block_size),
            query_start_loc=jnp.asarray(np.append(0, np.cumsum(counts)), jnp.int32),
            seq_lens=jnp.asarray(starts + counts),
            block_tables=jnp.asarray(tables),
        )


def make_pool(
    config: ModelConfig,
    layout: Layout,
    prefix: Prefix | None,
    dtype: Any,
) -> tuple:
    """(k_pool, v_pool) with the prefix in its blocks. Differentiable in the prefix."""
    pools = init_pool(
        num_layers=config.num_hidden_layers,
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    if prefix is not None:
        slots = jnp.arange(layout.prefix_tokens, dtype=jnp.int32)
        for layer in range(config.num_hidden_layers):
            kv = prefix.k[layer], prefix.v[layer]
            pools = write_kv(*pools, *kv, slots, layer=layer, implementation=layout.attention)
    return pools


def prefix_of_text(
    params: Any,
    config: ModelConfig,
    token_ids: list[int],
    block_size: int,
    attention: str | None = None,
) -> Prefix:
    """The keys and values that a text leaves in the pool, as a prefix to begin with."""
    layout = Layout(
        block_size=block_size,
        prefix_tokens=0,
        max_tokens=(len(token_ids),),
        attention=attention,
    )
    pools = make_pool(config, layout, None, pool_dtype())
    batch = layout.batch([token_ids], [0])
    pools = forward(params, *pools, batch, config=config, attention=attention)[:2]
    ids = jnp.arange(layout.num_blocks, dtype=jnp.int32)
    blocks = gather_blocks(*pools, ids, implementation=attention)
    # [A, L, B, K, D] -> [L, P, K, D]
    k, v = (
        x.swapaxes(0, 1)
        .reshape(x.shape[1], -1, *x.shape[3:])[:, : len(token_ids)]
        .astype(jnp.float32)
        for x in blocks
    )
    return Prefix(k=k, v=v)


def pool_dtype() -> Any:
    """float32 on a CPU, whose bfloat16 pool is bits and has no derivative."""
    return jnp.float32 if jax.default_backend() == "cpu" else default_dtype()


def prefix_loss(
    prefix: Prefix,
    params: Any,
    batch: Batch,
    labels: jax.Array,
    weights: jax.Array,
    *,
    config: ModelConfig,
    layout: Layout,
) -> jax.Array:
    """Mean cross-entropy (nats a token) of the batch's tokens after the prefix.

    Args:
      labels: [T] int32, the token after each. weights: [T], 1 for those that count, else 0.
    """
    pools = make_pool(config, layout, prefix, pool_dtype())
    _, _, hidden = forward(params, *pools, batch, config=config, attention=layout.attention)
    logits = compute_logits(params, hidden, config=config)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * weights).sum() / weights.sum()


def generate(
    params: Any,
    config: ModelConfig,
    prompts: list[list[int]],
    count: int,
    *,
    prefix: Prefix | None,
    block_size: int,
    attention: str | None = None,
) -> list[list[int]]:
    """``count`` greedy tokens after each prompt, all prompts in one batch over one pool.

    With a prefix every block table begins with its blocks; without, with the prompt's own.
    """
    layout = Layout(
        block_size=block_size,
        prefix_tokens=0 if prefix is None else prefix.k.shape[1],
        max_tokens=tuple(len(prompt) + count for prompt in prompts),
        attention=attention,
    )

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(params: Any, k_pool: jax.Array, v_pool: jax.Array, batch: Batch) -> tuple:
        last = batch.query_start_loc[1:] - 1
        *pools, hidden = forward(
            *(params, k_pool, v_pool, batch),
            config=config,
            attention=attention,
            output_indices=last,
        )
        return *pools, compute_logits(params, hidden, config=config).argmax(-1)

    pools = make_pool(config, layout, prefix, pool_dtype())
    new, done = prompts, [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        *pools, chosen = step(params, *pools, layout.batch(new, done))
        done = [before + len(tokens) for before, tokens in zip(done, new, strict=True)]
        new = [[token] for token in chosen.tolist()]
        for output, token in zip(outputs, new, strict=True):
            output += token
    return outputs
