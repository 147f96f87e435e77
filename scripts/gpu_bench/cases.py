"""Inputs of paged attention: shapes of one step, and arrays on the device for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import NULL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call.

    Attributes:
      query_lens, seq_lens: new tokens and whole context of each row.
      num_heads, num_kv_heads, head_dim, block_size: of the model and the pool.
      dtype: of queries and pool.
      num_layers: layers of the pool; a timed loop goes through them, so that each finds its keys
        and values in device memory, not in the cache.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    num_layers: int = 1

    @property
    def num_tokens(self) -> int:
        """T: query tokens."""
        return sum(self.query_lens)

    @property
    def max_blocks(self) -> int:
        """M: blocks of the longest row."""
        return max(-(-n // self.block_size) for n in self.seq_lens)

    @property
    def num_blocks(self) -> int:
        """N: what the rows take, and one before and one after that nobody is given."""
        return sum(-(-n // self.block_size) for n in self.seq_lens) + 2

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def context_bytes(self) -> int:
        """Keys and values that one call must read."""
        return sum(self.seq_lens) * self.token_bytes

    @property
    def pool_bytes(self) -> int:
        """Both pools."""
        return self.num_layers * self.num_blocks * self.block_size * self.token_bytes

    @property
    def flops(self) -> int:
        """Of both products, counting only what each token may see."""
        pairs = 0
        for queries, length in zip(self.query_lens, self.seq_lens, strict=True):
            first = length - queries + 1
            pairs += queries * (first + length) // 2
        return 4 * pairs * self.num_heads * self.head_dim


def decode_case(batch: int, context: int, **options) -> Case:
    """One new token in each of ``batch`` rows of ``context`` tokens."""
    return Case(query_lens=(1,) * batch, seq_lens=(context,) * batch, **options)


def with_cold_layers(case: Case, *, least_bytes: int, most_bytes: int) -> Case:
    """``case`` with so many layers that one pass over them moves ``least_bytes``, if the pool then
    stays under ``most_bytes``.
    """
    one = dataclasses.replace(case, num_layers=1).pool_bytes
    wanted = -(-least_bytes // max(1, case.context_bytes))
    return dataclasses.replace(case, num_layers=max(1, min(wanted, most_bytes // one, 256)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """The arrays of a case; see ``pallas_kernels.paged_attention``."""

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    block_tables: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array

    def as_tuple(self) -> tuple[jax.Array, ...]:
        """In the order of ``paged_attention``'s arguments."""
        return (
            *(self.q, self.k_pool, self.v_pool),
            *(self.block_tables, self.query_start_loc, self.seq_lens),
        )


def make_arrays(case: Case, *, poison: bool, seed: int = 0) -> Arrays:
    """Random arrays with the blocks scattered over the pool.

    Args:
      poison: NaN wherever nothing may be read: blocks that no row has (the first and the last of
        the pool are among them), and slots past each row's length. Costs a host copy of the pool.
    """
    rng = np.random.default_rng(seed)
    tables = np.full((len(case.seq_lens), case.max_blocks), NULL, np.int32)
    order = rng.permutation(np.arange(1, case.num_blocks - 1)).astype(np.int32)
    used = 0
    for row, length in enumerate(case.seq_lens):
        count = -(-length // case.block_size)
        tables[row, :count] = order[used : used + count]
        used += count
    shape = (
        *(case.num_layers, case.num_blocks, case.block_size),
        *(case.num_kv_heads, case.head_dim),
    )
    keys = jax.random.split(jax.random.key(seed), 3)
    if poison:
        pools = [_poisoned(case, shape, tables, rng) for _ in range(2)]
    else:
        fill = jax.jit(lambda key: jax.random.normal(key, shape, case.dtype))
        pools = [fill(key) for key in keys[:2]]
    q = jax.random.normal(keys[2], (case.num_tokens, case.num_heads, case.head_dim), case.dtype)
    return Arrays(
        q=q,
        k_pool=jnp.asarray(pools[0]),
        v_pool=jnp.asarray(pools[1]),
        block_tables=jnp.asarray(tables),
        query_start_loc=jnp.asarray(np.cumsum((0, *case.query_lens)), jnp.int32),
        seq_lens=jnp.asarray(case.seq_lens, jnp.int32),
    )


def _poisoned(case: Case, shape: tuple[int, ...], tables: np.ndarray, rng) -> jax.Array:
    pool = np.full(shape, np.nan, np.float32)
    for row, length in enumerate(case.seq_lens):
        for i in range(-(-length // case.block_size)):
            filled = min(case.block_size, length - i * case.block_size)
            block = rng.normal(size=(shape[0], filled, *shape[3:]))
            pool[:, tables[row, i], :filled] = block
    return jnp.asarray(pool, case.dtype)
