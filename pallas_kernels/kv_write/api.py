"""Writing the keys and values of one step into the pool."""

import jax

from pallas_kernels.dispatch import call
from pallas_kernels.kv_write import mosaic_gpu, reference, xla
from pallas_kernels.kv_write.gradient import differentiable

_IMPLEMENTATIONS = {
    "reference": reference.write_kv,
    "xla": xla.write_kv,
    "pallas": differentiable(mosaic_gpu.write_kv),
}


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write ``k[t], v[t]`` to slot ``slot_mapping[t]`` of one layer; returns the new pools.

    The pool stays in place when what is written depends on every earlier read of the pool, as it
    does from layer to layer of a model. A write that XLA may move before an earlier read makes it
    copy the pool.

    Differentiable in reverse mode, in k, v and pools of a floating-point type, whatever the
    implementation: the cotangent of a row is that of the slot it went to, and the pool's is zero
    where it was written.

    Args:
      k_pool, v_pool: the pools of ``init_pool``; updated in place under donation.
      k, v: ``[T, K, D]``, any float type; rounded to the pool's type.
      slot_mapping: ``[T]`` int32, ``block * block_size + offset``. An out-of-range slot (``NULL``)
        is dropped. No slot may occur twice.
      layer: which layer, an int or a traced int32 scalar.
      implementation: ``None`` (by platform), ``"xla"``, ``"pallas"`` or ``"reference"``.
    """
    num_tokens = slot_mapping.shape[0]
    expected = (num_tokens, *k_pool.shape[-2:])
    if k.shape != expected or v.shape != expected:
        raise ValueError(
            f"k {k.shape} and v {v.shape} must be [num_tokens, num_kv_heads, head_dim] = {expected}"
        )
    args = (k_pool, v_pool, k, v, slot_mapping)
    return call("write_kv", _IMPLEMENTATIONS, implementation, *args, layer=layer)
