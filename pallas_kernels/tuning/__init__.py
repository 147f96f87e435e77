"""Tuned parameters of the GPU kernels: small JSON tables, with each kernel's heuristics behind.

How a kernel uses it, at trace time, where every shape is static:

    found = tuning.lookup("write_kv", tuning.current_chip(), {"num_tokens": 64, "row": 1024})
    tokens = found.get("tokens_per_block") or tokens_per_block(...)   # the kernel's heuristic

A table is ``pallas_kernels/tuning/<kernel>.json``:

    {"h100": [{"shape": {"head_dim": 128, "batch": 64}, "use": {"num_splits": 4, "stages": 3}}]}

An entry fits when the shape asked for has all the keys of the entry's ``shape``. Keys named in
``ROUNDED`` match the nearest tabulated value (in ratio, at most a factor of two away), all others
exactly. The best fit is the one with the smallest distance. What no entry knows is left to the
kernel. Tables hold only parameters that change speed, and the last bits of results at most (they
may decide the order of sums): by chip and static shape, so alike for all that a step may hold.
``scripts/tune_kernels.py`` measures them on a GPU and writes them.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

TABLES = Path(__file__).parent

ROUNDED = frozenset({"batch", "num_tokens", "context", "max_context"})
"""Shape keys that match the nearest tabulated value."""

CHIP_NAMES = (("a100", "A100"), ("h100", "H100"), ("h200", "H200"), ("b200", "B200"))

HOPPER = ("h100", "h200")
"""Chips with `wgmma`."""


def chip_of(device_kind: str) -> str | None:
    """``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``, or None for a chip without tables."""
    for chip, name in CHIP_NAMES:
        if name in device_kind:
            return chip
    return None


def current_chip() -> str | None:
    """The chip that a kernel traced now will be compiled for, None when unknown (or a CPU).

    Looks at the abstract mesh and the default device first, as a compilation ahead of time for a
    chip that isn't there sets both, then at jax's default backend.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None and (chip := chip_of(abstract.device_kind)):
        return chip
    device = jax.config.jax_default_device
    if not hasattr(device, "device_kind"):
        device = jax.devices()[0]
    return chip_of(device.device_kind)


@functools.lru_cache(maxsize=64)
def load_table(kernel: str, folder: Path = TABLES) -> dict[str, list[dict[str, Any]]]:
    """The table of one kernel, by chip; empty when there is none."""
    path = folder / f"{kernel}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def lookup(
    kernel: str, chip: str | None, shape: Mapping[str, Any], *, folder: Path = TABLES
) -> dict[str, Any]:
    """Parameters for ``kernel`` on ``chip`` at ``shape``: those of the best fitting entry, or {}.

    Args:
      kernel: the table's name.
      chip: of ``current_chip``; None finds nothing.
      shape: static sizes, dtype names and so on, by name.
    """
    best, use = math.inf, {}
    for entry in load_table(kernel, folder).get(chip or "", ()):
        distance = _distance(entry["shape"], shape)
        if distance < best:
            best, use = distance, entry["use"]
    return dict(use)


def _distance(tabulated: Mapping[str, Any], shape: Mapping[str, Any]) -> float:
    """Sum of the ratios' logarithms, infinite where an entry doesn't fit."""
    total = 0.0
    for key, value in tabulated.items():
        if key not in shape:
            return math.inf
        if key not in ROUNDED:
            if shape[key] != value:
                return math.inf
            continue
        step = abs(math.log2(shape[key] / value))
        if step > 1:
            return math.inf
        total += step
    return total
