"""What a GPU kernel tells the compile gate about itself: what to compile, and what must be in it.

Each kernel folder has ``specs.specs(chip)``, which returns the calls that
``scripts/check_gpu_kernels.py`` compiles for that chip without a GPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

CHIPS = ("a100", "h100", "h200", "b200")
"""The chips that the gate compiles for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One call of one kernel.

    Attributes:
      name: unique, lower case with dots: ``kernel.case`` (``kv_write.bf16_d128``). Budgets are
        pinned under it.
      function: takes ``args``; it must choose the Mosaic GPU path by itself
        (``implementation="pallas"``), not by looking for a device.
      args: one pytree of ``jax.ShapeDtypeStruct`` for each positional argument.
      kernels: names of the Mosaic kernels that must turn up in the compiled program (the ``name``
        or the body's name given to ``plgpu.kernel``), the main one first; the gate fails when one
        is missing.
      require: what the main kernel's code must contain. Each string is one requirement,
        alternatives are separated by ``|``: ``"mma_sync|wgmma"``, ``"cp_async16|tma"``. Names are
        those of ``INSTRUCTIONS`` in ``scripts/gpu_gate/ptx.py``.
      donate: indices of donated arguments; all their bytes must come back aliased.
      memory_bound: the kernel streams the pool, so the bytes it holds in flight per SM are compared
        with what the chip's bandwidth asks.
      bytes_in_flight: bytes that one thread block of the main kernel keeps in flight while it
        streams (stages being filled times bytes of a stage); 0 when it isn't a streaming kernel.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kernels: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    donate: tuple[int, ...] = ()
    memory_bound: bool = False
    bytes_in_flight: int = 0
