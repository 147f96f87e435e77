"""Judging figures by pinned budgets (``budgets.json``).

    {"h100": {"kernels": {"<spec>/<kernel>": {"registers", "shared_bytes", "blocks_per_sm"}},
              "programs": {"<spec or step>": {"temp_bytes"}}}}

``blocks_per_sm`` is a floor, the others are ceilings. ``check_gpu_kernels.py --write-budgets`` pins
what it finds, with a little room for registers and temporary memory.
"""

import json
from pathlib import Path
from typing import Any

from gpu_gate.chips import Chip
from gpu_gate.measure import Figures, KernelFigures

BUDGETS = Path(__file__).parent / "budgets.json"

IN_FLIGHT_FACTOR = 2
"""Bytes in flight on an SM, in units of what bandwidth times latency asks."""

REGISTER_STEP = 8
TEMP_STEP = 1 << 20


def load(path: Path = BUDGETS) -> dict[str, Any]:
    """All pinned budgets; empty where the file is not there yet."""
    return json.loads(path.read_text()) if path.is_file() else {}


def judge(chip: Chip, figures: Figures, budgets: dict[str, Any]) -> list[str]:
    """What is wrong with one program; empty when nothing is.

    Args:
      budgets: of this chip.
    """
    if figures.error is not None:
        return [f"does not compile: {figures.error}"]
    problems = _judge_memory(chip, figures, budgets.get("programs", {}))
    by_name: dict[str, list[KernelFigures]] = {}
    for kernel in figures.kernels:
        by_name.setdefault(kernel.name, []).append(kernel)
    for name in figures.kernels_wanted:
        if name not in by_name:
            problems.append(f"no PTX seen of kernel {name}: there is nothing to judge")
    for name, kernels in by_name.items():
        pinned = budgets.get("kernels", {}).get(f"{figures.name}/{name}")
        for kernel in kernels:
            problems += [f"{name}: {x}" for x in _judge_kernel(chip, kernel, pinned)]
    if figures.kernels_wanted and figures.kernels_wanted[0] in by_name:
        main = by_name[figures.kernels_wanted[0]]
        problems += _judge_main(chip, main, figures.require, figures.bytes_in_flight)
    return problems


def _judge_memory(chip: Chip, figures: Figures, pinned: dict[str, Any]) -> list[str]:
    problems = []
    if figures.alias_bytes < figures.donated_bytes:
        problems.append(
            f"{figures.donated_bytes:,} bytes should be updated in place, "
            f"{figures.alias_bytes:,} are"
        )
    problems += [f"copies something as large as the pool: {x}" for x in figures.pool_copies]
    if figures.device_bytes > chip.memory_bytes:
        problems.append(
            f"takes {figures.device_bytes:,} bytes of a card that has {chip.memory_bytes:,}"
        )
    budget = pinned.get(figures.name)
    if budget is None:
        problems.append("has no budget of temporary memory (--write-budgets pins one)")
    elif figures.temp_bytes > budget["temp_bytes"]:
        problems.append(
            f"takes {figures.temp_bytes:,} bytes of temporary memory; the budget is "
            f"{budget['temp_bytes']:,}"
        )
    return problems


def _judge_kernel(chip: Chip, kernel: KernelFigures, pinned: dict | None) -> list[str]:
    problems = []
    if kernel.spill_bytes:
        problems.append(f"spills registers ({kernel.spill_bytes} bytes a thread)")
    if kernel.stack_bytes or kernel.instructions.get("local"):
        problems.append(f"keeps {kernel.stack_bytes} bytes a thread in local memory")
    if kernel.serialized:
        problems.append("its wgmma products wait for one another (ptxas says why)")
    if kernel.shared_bytes > chip.shared_bytes_per_block:
        problems.append(
            f"needs {kernel.shared_bytes:,} bytes of shared memory; a thread block can have "
            f"{chip.shared_bytes_per_block:,}"
        )
    if pinned is None:
        return [*problems, "has no budgets (--write-budgets pins them)"]
    for what in ("registers", "shared_bytes"):
        if getattr(kernel, what) > pinned[what]:
            problems.append(f"{what} {getattr(kernel, what):,}, the budget is {pinned[what]:,}")
    if kernel.blocks_per_sm < pinned["blocks_per_sm"]:
        problems.append(
            f"{kernel.blocks_per_sm} thread blocks fit on an SM, the floor is "
            f"{pinned['blocks_per_sm']}"
        )
    return problems


def _judge_main(
    chip: Chip, kernels: list[KernelFigures], require: tuple[str, ...], bytes_in_flight: int
) -> list[str]:
    problems = []
    for kernel in kernels:
        for wanted in require:
            if not any(kernel.instructions.get(name) for name in wanted.split("|")):
                problems.append(f"{kernel.name}: no {wanted.replace('|', ' or ')} in its code")
        in_flight = bytes_in_flight * kernel.blocks_per_sm
        needed = IN_FLIGHT_FACTOR * chip.bytes_in_flight_needed
        if bytes_in_flight and in_flight < needed:
            problems.append(
                f"{kernel.name}: {in_flight:,} bytes in flight on an SM; {needed:,.0f} are asked "
                f"({IN_FLIGHT_FACTOR} times bandwidth times latency)"
            )
    return problems


def pin(chip: Chip, figures: list[Figures]) -> dict[str, Any]:
    """Budgets of one chip from what was found; what does not compile or spills gets none."""
    kernels: dict[str, dict[str, int]] = {}
    programs = {}
    for program in figures:
        if program.error is not None:
            continue
        # The scheduler's part of a step varies by some kilobytes from version to version.
        room = TEMP_STEP if program.name.startswith("step.") else 0
        programs[program.name] = {"temp_bytes": _up(program.temp_bytes + room, TEMP_STEP)}
        for kernel in program.kernels:
            if kernel.spill_bytes:
                continue
            entry = kernels.setdefault(
                f"{program.name}/{kernel.name}",
                {"registers": 0, "shared_bytes": 0, "blocks_per_sm": kernel.blocks_per_sm},
            )
            # Room for another release of the compiler, but not at the price of a thread block.
            registers = _up(kernel.registers, REGISTER_STEP)
            entry["registers"] = max(entry["registers"], registers)
            entry["shared_bytes"] = max(entry["shared_bytes"], kernel.shared_bytes)
            entry["blocks_per_sm"] = min(entry["blocks_per_sm"], kernel.blocks_per_sm)
    return {"kernels": kernels, "programs": programs}


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """One chip's budgets with ``new`` ones in place of ``old`` ones of the same names."""
    groups = ("kernels", "programs")
    return {group: {**old.get(group, {}), **new.get(group, {})} for group in groups}


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def dump(budgets: dict[str, Any], path: Path = BUDGETS) -> None:
    """Write budgets with one kernel or program a line."""
    lines = ["{"]
    for i, (chip, groups) in enumerate(budgets.items()):
        lines.append(f'  "{chip}": {{')
        for j, (group, entries) in enumerate(groups.items()):
            lines.append(f'    "{group}": {{')
            rows = [f'      "{name}": {json.dumps(x)}' for name, x in sorted(entries.items())]
            lines.append(",\n".join(rows))
            lines.append("    }" + "," * (j + 1 < len(groups)))
        lines.append("  }" + "," * (i + 1 < len(budgets)))
    path.write_text("\n".join([*lines, "}"]) + "\n")
