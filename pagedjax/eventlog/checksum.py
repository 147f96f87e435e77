"""A checksum of each array of a state: pure functions, to be jitted beside the step."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.core.prefix import mix
from pagedjax.core.state import NULL, EngineState, SchedulerState

OF_TOKENS = {
    *(".rows.token_ids", ".rows.stop_token_ids", ".rows.running_hash", ".rows.block_hashes"),
    *(".prefix.bucket_hashes", ".prefix.bucket_blocks", ".prefix.tokens", ".rows.cum_logprob"),
}
"""Arrays whose content depends on what the tokens are, not only on which of them are equal. The
log-probabilities of beams would let somebody who has the model test a guess of the text."""

SLOT = ".prefix.slot"
"""Depends on tokens, too; but whether a block has one (is cached) does not."""


def leaves(state: SchedulerState) -> dict[str, jax.Array]:
    """The state's arrays by their paths, such as ".rows.status"."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def covered(names: list[str], *, exact: bool) -> list[str]:
    """The arrays that `checksums` covers, in its order."""
    return [name for name in names if exact or name not in OF_TOKENS]


def checksums(state: SchedulerState, *, exact: bool) -> jax.Array:
    """[number of arrays covered] uint32. Any change of one element changes its array's checksum.

    Args:
      exact: cover everything. False: leave out what depends on the tokens themselves, so that the
        checksums are those of the same state with other names for its tokens.
    """
    arrays = leaves(state)
    if not exact:
        arrays[SLOT] = arrays[SLOT] != NULL
    return jnp.stack([_checksum(arrays[name]) for name in covered(list(arrays), exact=exact)])


@functools.cache
def compiled() -> tuple[Callable, Callable]:
    """`checksums`, with `exact` static, and `kv_checksum`."""
    return jax.jit(checksums, static_argnames="exact"), jax.jit(kv_checksum)


def kv_checksum(state: EngineState) -> jax.Array:
    """[2] uint32: of keys and of values in all blocks that are held or cached."""
    scheduler = state.scheduler
    used = (scheduler.blocks.ref_counts > 0) | (scheduler.prefix.slot != NULL)

    def one(pool):
        mask = used.reshape(1, -1, *([1] * (pool.ndim - 2)))
        return _checksum(jnp.where(mask, _bits(pool), 0))

    return jnp.stack([one(state.k_pool), one(state.v_pool)])


def _checksum(array):
    bits = _bits(array).ravel()
    # For one position, `mix` maps different values to different terms.
    return mix(bits, jnp.arange(bits.size, dtype=jnp.uint32)).sum(dtype=jnp.uint32)


def _bits(array):
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    return array.astype(jnp.uint32)
