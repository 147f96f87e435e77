"""Moving whole blocks between the KV pool and a second pool in host memory (swapping)."""

import jax
from jax import lax


def move_blocks(
    source: jax.Array, target: jax.Array, src: jax.Array, dst: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Copy blocks from one pool to another; returns the target and how many were copied.

    That number is `count`, but known only afterwards. Let what writes into the source later depend
    on it: if XLA may do both at once, it copies the source.

    A loop that runs once for each block: none costs nothing, and no buffer is needed. Where the
    pools lie in different memories of a GPU, XLA makes one asynchronous copy of each block.

    Args:
      source, target: pools of ``init_pool``, ``[L, N, B, K, D]`` and ``[L, N', B, K, D]`` of one
        type; the target is updated in place under donation.
      src, dst: ``[A]`` int32 block ids; the first ``count`` entries are read, all within range.
      count: ``[]`` int32.
    """

    space = jax.typeof(target).memory_space
    elsewhere = jax.typeof(source).memory_space != space

    def move(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        target, i = carry
        block = lax.dynamic_slice_in_dim(source, src[i], 1, axis=1)
        if elsewhere:
            block = jax.device_put(block, space)
        return lax.dynamic_update_slice_in_dim(target, block, dst[i], axis=1), i + 1

    start = target, jax.numpy.zeros_like(count)
    return lax.while_loop(lambda carry: carry[1] < count, move, start)
