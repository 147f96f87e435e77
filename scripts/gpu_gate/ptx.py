"""Reading PTX: which instructions a kernel has, and what ptxas says of its registers."""

import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INSTRUCTIONS = {
    "mma_sync": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05_mma": r"\btcgen05\.mma",
    # Copies, not their commits, waits and prefetches.
    "tma": r"\bcp\.async\.bulk\.(?:tensor|shared|global)",
    "cp_async16": r"\bcp\.async\.cg\.shared\.global\b[^;]*, 16",
    "ldmatrix": r"\bldmatrix\b",
    # 16 bytes a thread, to or from device memory; vectors of 64-bit halves count too.
    "ld_global_16": r"\bld\.global\S*\.(?:v4\.[bufs]32|v2\.[bufs]64|b128)",
    "st_global_16": r"\bst\.global\S*\.(?:v4\.[bufs]32|v2\.[bufs]64|b128)",
    "ld_global_scalar": r"\bld\.global(?:\.nc)?\.[bufs](?:8|16|32|64)\s",
    "local": r"\b(?:ld|st)\.local\b",
}
"""What is looked for in a kernel's code."""

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")
_TARGET = re.compile(r"^\.target\s+(\w+)", re.M)
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")
_USED = re.compile(
    r"Compiling entry function '([^']+)' for '(\w+)'(.*?)Used (\d+) registers([^\n]*)", re.S
)
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# As ptxas says of a kernel whose accumulators are touched while a product is under way.
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized[^\n]*'(\w+)'")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_SCRATCH_SHARED = re.compile(r"smem_scratch_bytes=(\d+)")
_MOSAIC_NAME = re.compile(r"^(.*)_mosaic_gpu_kernel$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel as the assembler sees it.

    Attributes:
      name: the entry's name; a Mosaic kernel's without its ending.
      mosaic: whether Mosaic GPU made it (otherwise XLA did).
      target: architecture it was assembled for.
      registers: of a thread. threads: of a thread block.
      stack_bytes, spill_bytes: of a thread; spills are stores and loads together.
      shared_bytes: of a thread block, static and dynamic.
      serialized: the assembler made each ``wgmma`` wait for the one before.
      instructions: how often each of ``INSTRUCTIONS`` occurs.
    """

    name: str
    mosaic: bool
    target: str
    registers: int
    threads: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool
    instructions: dict[str, int]


class AssemblerError(RuntimeError):
    """ptxas refused the code."""


def count_instructions(code: str) -> dict[str, int]:
    """How often each of ``INSTRUCTIONS`` occurs in PTX text."""
    return {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}


def split_entries(ptx: str) -> dict[str, str]:
    """The text of each kernel in a PTX module, by the entry's name."""
    starts = list(_ENTRY.finditer(ptx))
    bounds = [m.start() for m in starts] + [len(ptx)]
    return {m.group(1): ptx[bounds[i] : bounds[i + 1]] for i, m in enumerate(starts)}


def parse_ptxas(output: str) -> dict[str, dict[str, Any]]:
    """What ``ptxas -v`` printed, by entry: registers; stack, spill and static shared bytes; whether
    it made ``wgmma`` wait.
    """
    found = {}
    serialized = set(_SERIALIZED.findall(output))
    for match in _USED.finditer(output):
        name, _, middle, registers, rest = match.groups()
        spill = _SPILL.search(middle)
        stack, stores, loads = map(int, spill.groups()) if spill else (0, 0, 0)
        shared = _STATIC_SHARED.search(rest)
        found[name] = dict(
            registers=int(registers),
            stack_bytes=stack,
            spill_bytes=stores + loads,
            shared_bytes=int(shared.group(1)) if shared else 0,
            serialized=name in serialized,
        )
    return found


def assemble(ptx: str, ptxas: Path) -> dict[str, dict[str, Any]]:
    """Run ``ptxas -v`` on a module; see ``parse_ptxas``."""
    target = _TARGET.search(ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [str(ptxas), "-v", f"-arch={target}", file.name, "-o", os.devnull],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise AssemblerError(done.stderr.strip()[-2000:])
    return parse_ptxas(done.stderr)


def read_module(
    ptx: str, ptxas: Path, *, dynamic_shared: int = 0, ptxas_output: str = ""
) -> list[Kernel]:
    """Every kernel of one PTX module.

    Args:
      dynamic_shared: bytes of shared memory that the kernel is launched with.
      ptxas_output: what ``ptxas -v`` said of the module; without it, it is asked.
    """
    ptx = ptx.replace("\0", "")  # Mosaic's dumps end in one
    entries = split_entries(ptx)
    if not entries:
        return []
    target = _TARGET.search(ptx).group(1)
    used = parse_ptxas(ptxas_output) or assemble(ptx, ptxas)
    kernels = []
    for entry, text in entries.items():
        mosaic = _MOSAIC_NAME.match(entry)
        threads = _THREADS.search(text)
        facts = dict(used[entry])
        facts["shared_bytes"] += dynamic_shared
        kernels.append(
            Kernel(
                name=mosaic.group(1) if mosaic else entry,
                mosaic=mosaic is not None,
                target=target,
                threads=_product(threads.groups()) if threads else 128,
                instructions=count_instructions(text),
                **facts,
            )
        )
    return kernels


def read_dumps(paths: Iterable[Path], ptxas: Path) -> list[Kernel]:
    """Every kernel of the PTX files that Mosaic GPU wrote.

    Raises:
      AssemblerError: nothing says how much shared memory a kernel is launched with.
    """
    kernels = []
    for path in paths:
        said = path.with_suffix(".ptxas")
        kernels += read_module(
            path.read_text(errors="replace"),
            ptxas,
            dynamic_shared=_scratch_bytes(path),
            ptxas_output=said.read_text(errors="replace") if said.is_file() else "",
        )
    return kernels


def _scratch_bytes(path: Path) -> int:
    """Of the kernel of that PTX file, from ``<name>_<number>.resources.txt``.

    The numbers of the two kinds of files go apart when a kernel is lowered but not compiled, so the
    most that any kernel of this name asks for counts.
    """
    name = path.stem.rpartition("_")[0]
    found = [
        int(scratch.group(1))
        for other in path.parent.glob("*.resources.txt")
        if re.fullmatch(re.escape(name) + r"_\d+\.resources\.txt", other.name)
        and (scratch := _SCRATCH_SHARED.search(other.read_text()))
    ]
    if not found:
        raise AssemblerError(f"no resources file of {path.name}: its shared memory is not known")
    return max(found)


def _product(groups: tuple[str | None, ...]) -> int:
    result = 1
    for group in groups:
        result *= int(group or 1)
    return result
