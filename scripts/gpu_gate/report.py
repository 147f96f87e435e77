"""The figures as Markdown, for docs/kernels.md."""

from pathlib import Path

from gpu_gate.budgets import IN_FLIGHT_FACTOR
from gpu_gate.chips import CHIPS
from gpu_gate.measure import Figures

BEGIN = "<!-- figures of scripts/check_gpu_kernels.py: begin (written by --write-docs) -->"
END = "<!-- figures of scripts/check_gpu_kernels.py: end -->"

Results = dict[str, list[Figures]]
"""Chip name to its programs."""


def markdown(results: Results, *, jax_version: str) -> str:
    """All tables."""
    parts = [
        f"Compiled by jax {jax_version} and the CUDA 12 wheels' ptxas, without a GPU. Registers "
        "are of a thread, shared memory and threads of a thread block; *blocks/SM* is how many "
        "thread blocks fit on an SM at once.",
        _kernel_table(results),
        "**Bytes in flight.** To use the whole memory bandwidth, an SM must have *bandwidth x "
        "latency / SMs* bytes under way at any time (Little's law; the latency of a loaded memory "
        "is taken as 700 ns). A kernel has *bytes that a thread block keeps in flight x "
        f"blocks/SM*. The gate asks for {IN_FLIGHT_FACTOR} times the need.",
        _flight_table(results),
    ]
    if any(_is_step(program) for programs in results.values() for program in programs):
        parts += [
            "**Whole steps of the engine** (schedule, copy blocks, model, sample, commit; 64 "
            "sequences, 2,048 tokens in a prefill step, 24,576 blocks of 16 tokens). *In place* is "
            "the part of the pool that the compiled program updates where it lies.",
            _step_table(results),
        ]
    return "\n\n".join(parts)


def write(path: Path, text: str) -> None:
    """Put ``text`` between the markers of a file; a file without them gets them at its end."""
    old = path.read_text() if path.is_file() else "# GPU kernels\n"
    if BEGIN in old and END in old:
        before, _, rest = old.partition(BEGIN)
        after = rest.partition(END)[2]
    else:
        before, after = old.rstrip("\n") + "\n\n", "\n"
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _table(header: list[str], rows: list[list[str]]) -> str:
    align = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, align, *rows])


def _kernel_table(results: Results) -> str:
    header = ["call / kernel", "chip", "registers", "spills", "shared bytes", "threads"]
    rows = []
    for chip, programs in results.items():
        for program in programs:
            if _is_step(program):
                continue
            for kernel in program.kernels:
                rows.append(
                    [
                        _label(program.name, kernel.name),
                        chip,
                        str(kernel.registers),
                        str(kernel.spill_bytes),
                        f"{kernel.shared_bytes:,}",
                        str(kernel.threads),
                        str(kernel.blocks_per_sm),
                        _instructions(kernel.instructions),
                    ]
                )
    rows.sort(key=lambda row: (row[0], list(CHIPS).index(row[1])))
    return _table([*header, "blocks/SM", "instructions"], rows)


def _label(program: str, kernel: str) -> str:
    return program if program.startswith(kernel + ".") else f"{program} / {kernel}"


def _instructions(counts: dict[str, int]) -> str:
    shown = {
        name: count
        for name, count in counts.items()
        if count and name not in ("ld_global_scalar", "local")
    }
    return ", ".join(f"{count} {name}" for name, count in shown.items()) or "-"


def _flight_table(results: Results) -> str:
    header = ["call", *results]
    need = ["*needed on an SM (KiB)*"]
    calls: dict[str, dict[str, str]] = {}
    for chip, programs in results.items():
        need.append(f"*{CHIPS[chip].bytes_in_flight_needed / 1024:.1f}*")
        for program in programs:
            if not program.bytes_in_flight or not program.kernels:
                continue
            main = next(k for k in program.kernels if k.name == program.kernels_wanted[0])
            total = program.bytes_in_flight * main.blocks_per_sm
            ratio = total / CHIPS[chip].bytes_in_flight_needed
            calls.setdefault(program.name, {})[chip] = (
                f"{program.bytes_in_flight / 1024:g} x {main.blocks_per_sm} = "
                f"{total / 1024:g} ({ratio:.1f}x)"
            )
    rows = [[name, *(cells.get(chip, "-") for chip in results)] for name, cells in calls.items()]
    return _table(header, [need, *sorted(rows)])


def _step_table(results: Results) -> str:
    header = ["step", "chip", "pool (GB)", "in place (GB)", "temporary (MB)", "total (GB)"]
    rows = [
        [
            program.name.removeprefix("step."),
            chip,
            f"{program.donated_bytes / 1e9:.2f}",
            f"{min(program.alias_bytes, program.donated_bytes) / 1e9:.2f}",
            f"{program.temp_bytes / 1e6:.0f}",
            f"{program.device_bytes / 1e9:.1f} of {CHIPS[chip].memory_bytes / 1e9:.1f}",
            ", ".join(sorted({k.name for k in program.kernels})) or "none",
        ]
        for chip, programs in results.items()
        for program in programs
        if _is_step(program)
    ]
    rows.sort(key=lambda row: (row[0], list(CHIPS).index(row[1])))
    return _table([*header, "kernels in it"], rows)


def _is_step(program: Figures) -> bool:
    return program.name.startswith("step.")
