"""Copies of a module with one fault planted in its source, to test what finds it."""

import contextlib
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path

import jax


def planted(module: types.ModuleType, *edits: tuple[str, str]) -> types.ModuleType:
    """``module`` with each (old, new) replaced in its source; every ``old`` must be there."""
    source = inspect.getsource(module)
    for old, new in edits:
        assert old in source, f"{module.__name__} has no {old!r}"
        source = source.replace(old, new)
    copy = types.ModuleType(f"{module.__name__}_planted")
    copy.__file__ = str(Path(module.__file__))
    exec(compile(source, copy.__file__, "exec"), copy.__dict__)
    return copy


@contextlib.contextmanager
def interpreted():
    """Kernels run in Pallas's interpreter, races raise; its state is left clean, whatever happens.

    The interpreter fills memory that was never written with NaN, and raises for reads and writes
    out of bounds.
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    from pallas_kernels.interpret import interpret_mode

    interpret_pallas_call.reset_gpu_interpret_mode_state()
    try:
        with interpret_mode(detect_races=True):
            yield
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()


def hangs(code: str) -> bool:
    """Whether a program, which may import the tests, hangs: it runs in a process of its own, which
    is ended after a while."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths}
    try:
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=90)
    except subprocess.TimeoutExpired:
        return True
    return False


OLD_JAX = jax.__version_info__ < (0, 11)
OLD_JAX_REASON = "jax before 0.11 has neither these kernels' interface nor an interpreter for them"
