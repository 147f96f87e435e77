"""What the chip can do: copy bandwidth and matrix product, measured."""

import dataclasses

import jax
import jax.numpy as jnp

from gpu_bench.timing import seconds_per_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Measured on the device that the kernels run on.

    Attributes:
      copy_bytes_per_s: bytes read and written by a plain copy of a large array, a second.
      product_flops_per_s: of a large square matrix product in bfloat16.
    """

    copy_bytes_per_s: float
    product_flops_per_s: float


def measure(*, copy_bytes: int = 1 << 30, size: int = 8192, quick: bool = False) -> Limits:
    """Copy ``copy_bytes``, and multiply square matrices of ``size``."""
    x = jnp.zeros((copy_bytes // 4,), jnp.int32)
    # Adding the loop's index keeps XLA from seeing through the loop.
    copy_s = seconds_per_call(lambda x, i: x + i, x, num_layers=1 << 20, target_s=0.2, quick=quick)
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)

    def product(x, _, a):
        y = jnp.dot(x, a, preferred_element_type=jnp.float32)
        return y * (1 / size)

    product_s = seconds_per_call(product, a, a, num_layers=1, target_s=0.2, quick=quick)
    return Limits(
        copy_bytes_per_s=2 * x.nbytes / copy_s, product_flops_per_s=2 * size**3 / product_s
    )
