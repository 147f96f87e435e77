"""Running the GPU kernels on the CPU, in Pallas's interpreter.

    with pallas_kernels.interpret.interpret_mode(detect_races=True):
        paged_attention(..., implementation="pallas")

The setting belongs to the thread and is part of jit's cache key: a function compiled outside is
compiled again inside. ``set_interpret_mode`` sets it for the whole process, for programs that
serve from another thread.

The interpreter runs one callback for each load, store, copy and barrier of each thread block,
which takes milliseconds: it is for tests and for small models.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from pallas_kernels.mosaic import require_mosaic_gpu


@contextlib.contextmanager
def interpret_mode(*, detect_races: bool = False) -> Iterator[None]:
    """Kernels traced by this thread inside the context run in the interpreter.

    Args:
      detect_races: raise when a kernel reads memory that an unfinished copy may still write, or
        the other way round. Several times slower.
    """
    plgpu = _import("interpret_mode")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
        yield


def set_interpret_mode(enabled: bool, *, detect_races: bool = False) -> None:
    """As ``interpret_mode``, for all threads of the process and from now on."""
    plgpu = _import("set_interpret_mode")
    params = plgpu.InterpretGPUParams(detect_races=detect_races) if enabled else None
    plgpu.set_gpu_interpret_mode(params)


def is_interpreted() -> bool:
    """Whether a kernel traced now would run in the interpreter."""
    # The public functions only set this; there is none that reads it.
    from jax._src import config

    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def _import(operation: str) -> Any:
    require_mosaic_gpu(operation)
    # The first interpreted kernel imports this, which adds a setting to jit's cache key: what was
    # compiled before it would be compiled again.
    import jax.experimental.pallas.tpu  # noqa: F401
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu
