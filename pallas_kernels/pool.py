"""How the KV pool lies in memory: shapes, storage type, and reading blocks of one layer.

The pool is one array for the keys and one for the values of all layers, ``[L, N, B, K, D]``
(layers, blocks, tokens of a block, KV heads, head dimension). Nothing outside ``pallas_kernels``
depends on that order.

bfloat16 pools are stored as ``uint16`` bits on the CPU: XLA:CPU of jax 0.10 turns a scatter into a
bfloat16 array into a conversion of the whole array to float32 and back. The functions here take a
``uint16`` pool to mean bfloat16.
"""

import jax
import jax.numpy as jnp
from jax import lax

NULL = 2**31 - 1
"""The only sentinel for block ids and slots: out of range in every pool. Never -1, which wraps."""

DTYPES = ("float32", "bfloat16", "float16")
"""Number types of a pool. float16 has 3 bits more than bfloat16, and ends at 65,504: what is larger
is written as infinity."""


def pool_shape(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Shape of the key pool, and of the value pool."""
    return (num_layers, num_blocks, block_size, num_kv_heads, head_dim)


def block_bytes(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> int:
    """Bytes that one block takes in all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize


def storage_dtype(dtype: jax.typing.DTypeLike, platform: str | None = None) -> jnp.dtype:
    """The array type that holds a pool of ``dtype`` (one of ``DTYPES``) on ``platform``."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype of a KV pool is {dtype}; it must be one of {', '.join(DTYPES)}")
    if dtype == jnp.bfloat16 and (platform or jax.default_backend()) == "cpu":
        return jnp.dtype(jnp.uint16)
    return dtype


def init_pool(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Two zeroed pools (keys, values); ``dtype`` is one of ``DTYPES``.

    ``platform`` is the platform that will use them (default: jax's default backend). On the CPU
    a bfloat16 pool comes back as ``uint16`` bits.
    """
    shape = pool_shape(num_layers, num_blocks, block_size, num_kv_heads, head_dim)
    dtype = storage_dtype(dtype, platform)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def to_storage(x: jax.Array, pool: jax.Array) -> jax.Array:
    """``x`` rounded to the pool's number type, in the pool's storage type."""
    if pool.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(pool.dtype)


def to_float32(x: jax.Array) -> jax.Array:
    """Elements read from a pool, as float32."""
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(jnp.float32)
