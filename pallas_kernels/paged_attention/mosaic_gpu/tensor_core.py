"""Products of a whole warpgroup (``wgmma``), which run while the warpgroup goes on.

On a chip an accumulator is the instruction's own. The interpreter of jax 0.12 has no rule for an
operand in registers nor for an accumulator that outlives a product, and looks for no races in what
a product reads, so there ``_Modelled`` stands in: it reads the operands when the product is issued
and again when it is waited for, the latest that a chip may read them, and refuses sums that
nobody waited for.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.mosaic_gpu.target import Target


def run_products(
    body: Callable[..., tuple], sums: list[jax.Array], state: tuple, target: Target
) -> tuple[list[jax.Array], tuple]:
    """``body(accumulators, *state) -> state``, which adds products to ``sums``; all of them are
    done when this returns.

    Args:
      sums: ``[64, N]`` float32 in the layout ``WGMMA``, an accumulator for each.

    Returns:
      The sums and the state after ``body``.
    """
    if target.interpret:
        flight: list[_Product] = []
        modelled = [_Modelled(value, flight) for value in sums]
        state = body(modelled, *state)
        _land(flight, 0)
        return [acc.value for acc in modelled], state
    import jax.experimental.pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def run(refs: tuple) -> None:
        acc_refs, state_refs = refs
        new = body([_Accumulator(ref) for ref in acc_refs], *(ref[...] for ref in state_refs))
        for ref, value in zip(state_refs, new, strict=True):
            ref[...] = value

    accumulators = [plgpu.ACC.init(value) for value in sums]
    return pl.run_state(run)((accumulators, state))


@dataclasses.dataclass(frozen=True)
class _Accumulator:
    """An accumulator on a chip."""

    ref: Any

    def add(self, a: Any, b: Any) -> None:
        """Starts ``self += a @ b``; ``a`` in registers or shared memory, ``b`` in shared memory."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.wgmma(self.ref, a, b)

    def read(self, in_flight: int) -> jax.Array:
        """The sums, once no more than ``in_flight`` products, the newest, are under way."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.wgmma_accumulator_load(self.ref, wait_n=in_flight)


@dataclasses.dataclass
class _Product:
    acc: "_Modelled"
    a: Any
    b: Any


@dataclasses.dataclass
class _Modelled:
    """What the interpreter takes for an accumulator; ``flight`` is the warpgroup's queue."""

    value: jax.Array
    flight: list[_Product]

    def add(self, a: Any, b: Any) -> None:
        for operand in (a, b):
            _operand(operand)
        self.flight.append(_Product(self, a, b))

    def read(self, in_flight: int) -> jax.Array:
        _land(self.flight, in_flight)
        if any(product.acc is self for product in self.flight):
            raise RuntimeError("an accumulator is read while a product is under way to it")
        return self.value


def _land(flight: list[_Product], in_flight: int) -> None:
    """Ends all products but the newest ``in_flight``."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    while len(flight) > in_flight:
        product = flight.pop(0)
        product.acc.value += lax.dot(
            _operand(product.a),
            _operand(product.b),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        # A product reads by the same path as the copies write, so no fence is between them.
        plgpu.commit_smem()


def _operand(x: Any) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return x if isinstance(x, jax.Array) else plgpu.load(x, optimized=False)
