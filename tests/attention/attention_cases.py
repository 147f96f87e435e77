"""Random steps for the attention tests, and what they must give, in float64 numpy."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NULL, init_pool
from pallas_kernels.pool import to_storage

NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Static sizes of a step: whatever would mean another compilation."""

    block_size: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    num_rows: int = 11
    max_blocks: int = 80
    num_blocks: int = 220
    num_tokens: int = 150
    dtype: str = "float32"
    options: dict = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step's arrays; ``keys``/``values`` are the rows' contexts ``[length, K, D]``."""

    arrays: tuple
    query_lens: list[int]
    seq_lens: list[int]
    keys: list[np.ndarray]
    values: list[np.ndarray]


def make_step(
    shape: Shape,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    seed: int = 0,
    poison: float = np.nan,
    garbage: bool = False,
    rows: list[int] | None = None,
    spare_ends: bool = False,
) -> Step:
    """A step of the given rows; every slot that no row holds is ``poison``.

    ``rows`` gives the rows' identities: the same identity and lengths give the same numbers
    whatever the step holds beside them. ``garbage`` fills unneeded table entries with arbitrary
    integers instead of ``NULL``. ``spare_ends`` never hands out the first and the last block: that
    is where clamped and wrapped indices land.
    """
    place = np.random.default_rng(seed)
    rows = list(range(len(seq_lens))) if rows is None else rows
    b, k, d = shape.block_size, shape.num_kv_heads, shape.head_dim
    pools = [np.full((shape.num_blocks, b, k, d), poison, np.float32) for _ in range(2)]
    if garbage:
        tables = place.integers(-(2**31), 2**31, (shape.num_rows, shape.max_blocks))
        tables = tables.astype(np.int32)
    else:
        tables = np.full((shape.num_rows, shape.max_blocks), NULL, np.int32)
    free = place.permutation(shape.num_blocks)
    if spare_ends:
        free = free[(free > 0) & (free < shape.num_blocks - 1)]
    q = np.zeros((shape.num_tokens, shape.num_heads, d), np.float32)
    keys, values, used, token = [], [], 0, 0
    for r, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        rng = np.random.default_rng([rows[r], count, length])
        needed = -(-length // b)
        blocks = free[used : used + needed]
        assert len(blocks) == needed, "the pool is too small for this step"
        used += needed
        tables[r, :needed] = blocks
        contexts = rng.standard_normal((2, length, k, d)).astype(np.float32)
        for pool, context in zip(pools, contexts, strict=True):
            for p in range(length):
                pool[blocks[p // b], p % b] = context[p]
        keys.append(contexts[0])
        values.append(contexts[1])
        q[token : token + count] = rng.standard_normal((count, shape.num_heads, d))
        token += count
    q[token:] = poison
    starts = np.full(shape.num_rows + 1, token, np.int32)
    starts[: len(query_lens)] = np.cumsum([0, *query_lens])[:-1]
    lens = np.zeros(shape.num_rows, np.int32)
    lens[: len(seq_lens)] = seq_lens
    empty = init_pool(1, 1, b, k, d, shape.dtype, platform="cpu")[0]
    stored = [to_storage(jnp.asarray(np.stack([np.full_like(p, np.nan), p])), empty) for p in pools]
    arrays = tuple(jnp.asarray(x) for x in (q, *stored, tables, starts, lens))
    return Step(arrays=arrays, query_lens=query_lens, seq_lens=seq_lens, keys=keys, values=values)


def dense(
    shape: Shape,
    step: Step,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """The attention of every query, one by one, in float64; zeros for padding."""
    q = np.asarray(step.arrays[0], np.float64)
    out = np.zeros(q.shape)
    group = shape.num_heads // shape.num_kv_heads
    token = 0
    for r, (count, length) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
        for i in range(count):
            last = length - count + i
            first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            for h in range(shape.num_heads):
                k = step.keys[r][first : last + 1, h // group].astype(np.float64)
                v = step.values[r][first : last + 1, h // group].astype(np.float64)
                logits = k @ q[token, h] * scale
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                weights = np.exp(logits - logits.max())
                out[token, h] = weights @ v / weights.sum()
            token += 1
    return out


def bits(x: jax.Array) -> np.ndarray:
    """The array's bit patterns, so that equality also holds for NaN and -0."""
    return np.asarray(x).view(np.uint32)
