"""The derivative of a ``write_kv`` that has none of its own: plain XLA."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_write import xla


def differentiable(function: Callable[..., tuple]) -> Callable[..., tuple]:
    """``function``, a ``write_kv``, with a derivative in both pools, k and v, in reverse mode.

    Writing replaces: the cotangent of ``k[t]`` is that of the slot it went to (zero if it was
    dropped), and that of the pool is zero in the slots that were written. A pool of bfloat16 stored
    as ``uint16`` has no derivative, and nor has what is written to it.
    """

    @functools.wraps(function)
    def write_kv(k_pool, v_pool, k, v, slot_mapping, *, layer):
        if jnp.issubdtype(k_pool.dtype, jnp.floating):
            # Rounded here, where jax knows the derivative of it.
            k, v = k.astype(k_pool.dtype), v.astype(v_pool.dtype)
        return _write(function, k_pool, v_pool, k, v, slot_mapping, jnp.asarray(layer, jnp.int32))

    return write_kv


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _write(function, k_pool, v_pool, k, v, slot_mapping, layer):
    return function(k_pool, v_pool, k, v, slot_mapping, layer=layer)


def _forward(function: Any, *arguments: jax.Array) -> tuple[tuple, tuple]:
    return _write(function, *arguments), arguments[-2:]


def _backward(function: Any, saved: tuple, cotangents: tuple) -> tuple:
    del function
    slot_mapping, layer = saved
    if cotangents[0].dtype == jax.dtypes.float0:
        return (None,) * 6
    rows = [_read(pool, slot_mapping, layer) for pool in cotangents]
    nothing = [jnp.zeros_like(x) for x in rows]
    pools = xla.write_kv(*cotangents, *nothing, slot_mapping, layer=layer)
    return *pools, *rows, None, None


def _read(pool: jax.Array, slot_mapping: jax.Array, layer: jax.Array) -> jax.Array:
    """``[T, K, D]``: what lies in the slots of a layer, zeros for what is out of range."""
    return lax.gather(
        pool,
        xla.slot_index(pool, slot_mapping, layer),
        lax.GatherDimensionNumbers(
            offset_dims=(1, 2), collapsed_slice_dims=(0, 1, 2), start_index_map=(0, 1, 2)
        ),
        slice_sizes=(1, 1, 1, *pool.shape[3:]),
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=0,
    )


_write.defvjp(_forward, _backward)
