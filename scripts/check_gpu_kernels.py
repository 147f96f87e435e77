"""The gate of the GPU kernels: compile for A100, H100, H200 and B200 without a GPU, and judge.

    pip install 'pagedjax[gpu-check]'                 # Python 3.12 or later
    python scripts/check_gpu_kernels.py               # all chips, all kernels, whole steps
    python scripts/check_gpu_kernels.py --chips h100 --only write_kv --no-steps
    python scripts/check_gpu_kernels.py --write-budgets --write-docs

Every kernel's own calls (``specs`` of the kernel folders) and whole decode and prefill steps of the
engine, with a Llama-3-8B and a SmolLM2-135M, are compiled to machine code. A program fails when it
does not compile, spills a register, goes over its pinned budgets of registers, shared or temporary
memory (scripts/gpu_gate/budgets.json), fits fewer times on an SM than pinned, lacks an instruction
that it must have, has too few bytes in flight, copies the KV pool, does not fit on the card, or
when no PTX of it was seen. So does what is pinned but was not compiled. Exit status: 0 all well, 1
something failed, 2 it could not run.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
sys.path[:0] = [str(SCRIPTS), str(ROOT)]

from gpu_gate import aot, budgets, report  # noqa: E402
from gpu_gate.chips import CHIPS  # noqa: E402
from gpu_gate.measure import Figures, KernelFigures  # noqa: E402

TIMEOUT_S = 1800
"""Of one architecture's process."""


def parse_line(line: str) -> tuple[str, Figures]:
    """A worker's line: chip and program."""
    found = json.loads(line)
    fields = found["program"]
    fields["kernels"] = [KernelFigures(**kernel) for kernel in fields["kernels"]]
    for name in ("require", "kernels_wanted"):
        fields[name] = tuple(fields[name])
    return found["chip"], Figures(**fields)


def compile_chips(
    chips: list[str], folder: Path, options: list[str]
) -> tuple[report.Results, str | None]:
    """Run the worker of one architecture; its programs, and why it ended early if it did.

    A compiler that aborts takes its process with it: the programs before are kept.
    """
    command = [sys.executable, "-m", "gpu_gate.worker", str(folder), *chips, *options]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(SCRIPTS), str(ROOT)]))
    results: report.Results = {chip: [] for chip in chips}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return results, f"took more than {TIMEOUT_S} s"
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            chip, program = parse_line(line)
            results[chip].append(program)
    if done.returncode == 0:
        return results, None
    lines = [x for x in done.stderr.splitlines() if x.strip() and "nvdisasm" not in x]
    return results, f"the compiler ended with status {done.returncode}: " + "\n".join(lines[-5:])


def compile_all(
    chips: list[str], options: list[str], jobs: int
) -> tuple[report.Results, dict[str, str]]:
    """All chips, one process an architecture, ``jobs`` at a time; and what ended early."""
    groups: dict[tuple[int, int], list[str]] = {}
    for chip in chips:
        groups.setdefault(CHIPS[chip].compute_capability, []).append(chip)
    # The longest first.
    ordered = sorted(groups.values(), key=len, reverse=True)

    def run(group: list[str]) -> tuple[list[str], report.Results, str | None]:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="gpu_gate_") as folder:
            found, why = compile_chips(group, Path(folder), options)
        seconds = time.perf_counter() - started
        count = sum(map(len, found.values()))
        print(f"{', '.join(group)}: {count} programs in {seconds:.0f} s", file=sys.stderr)
        return group, found, why

    results: report.Results = {}
    broken: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for group, found, why in pool.map(run, ordered):
            results |= found
            if why:
                broken[" and ".join(group)] = why
    return {chip: results[chip] for chip in chips}, broken


def print_failures(
    results: report.Results, broken: dict[str, str], pinned: dict, *, everything: bool
) -> int:
    """Say what is wrong; returns how much.

    Args:
      everything: all programs were to be compiled, so all pinned ones must have been.
    """
    wanted = {chip: set(x["programs"]) for chip, x in pinned.items()} if everything else {}
    count = len(broken)
    for chip, why in broken.items():
        print(f"FAIL {chip}: {why}")
    for chip, programs in results.items():
        if not programs and not broken:
            count += 1
            print(f"FAIL {chip}: nothing was compiled")
        absent = wanted.get(chip, set()) - {program.name for program in programs}
        count += len(absent)
        for name in sorted(absent):
            print(f"FAIL {chip} {name}: has pinned budgets, but was not compiled")
        for program in programs:
            problems = budgets.judge(CHIPS[chip], program, pinned.get(chip, {}))
            count += len(problems)
            for problem in problems:
                print(f"FAIL {chip} {program.name}: {problem}")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--only", default="", help="part of the names of what is compiled")
    parser.add_argument("--no-steps", action="store_true", help="only the kernels' own calls")
    parser.add_argument(
        "--attention",
        default="pallas",
        choices=("pallas", "xla"),
        help="implementation in the whole steps (default: pallas)",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--write-budgets", action="store_true", help="pin what is compiled")
    parser.add_argument("--write-docs", action="store_true", help="write docs/kernels.md's tables")
    args = parser.parse_args()
    everything = not (args.only or args.no_steps)
    if args.write_docs and not (everything and set(args.chips) == set(CHIPS)):
        parser.error("--write-docs needs all programs and chips")
    try:
        aot.check_wheels()
    except aot.MissingWheels as error:
        print(error, file=sys.stderr)
        return 2
    options = ["--only", args.only, "--attention", args.attention]
    options += ["--no-steps"] if args.no_steps else []
    started = time.perf_counter()
    results, broken = compile_all(args.chips, options, max(1, args.jobs))
    pinned = budgets.load()
    if args.write_budgets:
        for chip, programs in results.items():
            found = budgets.pin(CHIPS[chip], programs)
            pinned[chip] = found if everything else budgets.merge(pinned.get(chip, {}), found)
        pinned = {chip: pinned[chip] for chip in CHIPS if chip in pinned}
        budgets.dump(pinned)
    if args.json:
        plain = {chip: [vars_of(p) for p in programs] for chip, programs in results.items()}
        args.json.write_text(json.dumps(plain, indent=1) + "\n")
    count = print_failures(results, broken, pinned, everything=everything)
    if args.write_docs and not broken:
        text = report.markdown(results, jax_version=importlib.metadata.version("jax"))
        report.write(ROOT / "docs" / "kernels.md", text)
    total = sum(len(programs) for programs in results.values())
    seconds = time.perf_counter() - started
    print(f"{total} programs on {len(results)} chips in {seconds:.0f} s: {count} problems")
    return 1 if count else 0


def vars_of(figures: Figures) -> dict:
    """The figures as plain data."""
    return dict(vars(figures), kernels=[vars(kernel) for kernel in figures.kernels])


if __name__ == "__main__":
    sys.exit(main())
