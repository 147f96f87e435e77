"""Kernels of a paged KV cache: attention, writing keys and values, copying blocks.

Imports only jax, so the folder can be used on its own. Each operation is one folder with an
``api`` (the contract and the dispatcher), a ``reference`` (short, float32, for tests) and ``xla``
(the CPU path and the fallback elsewhere). ``pool`` is the only module that knows how the pool
lies in memory.
"""

from pallas_kernels.block_copy.api import (
    copy_blocks,
    gather_blocks,
    move_blocks,
    scatter_blocks,
)
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.paged_attention.api import make_metadata, paged_attention
from pallas_kernels.pool import NULL, block_bytes, init_pool, pool_shape

__all__ = [
    "NULL",
    "block_bytes",
    "copy_blocks",
    "gather_blocks",
    "init_pool",
    "make_metadata",
    "move_blocks",
    "paged_attention",
    "pool_shape",
    "scatter_blocks",
    "write_kv",
]
