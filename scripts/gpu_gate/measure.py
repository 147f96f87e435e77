"""Compiling one program for one chip and taking its figures."""

import dataclasses
import re
import time
from typing import Any

from gpu_gate import aot, ptx
from gpu_gate.chips import Chip, blocks_per_sm


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """One kernel of a program, as far as the gate judges it."""

    name: str
    registers: int
    threads: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    instructions: dict[str, int]
    serialized: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """One compiled program.

    Attributes:
      name: of the spec.
      error: why it did not compile; None when it did, and all below is meaningful only then.
      kernels: Mosaic GPU's; XLA's own are its own business.
      donated_bytes: of the arguments that should be updated in place.
      argument_bytes, output_bytes, alias_bytes, temp_bytes: XLA's memory plan.
      pool_copies: instructions of the program that copy something as large as a pool.
      require, kernels_wanted: of the spec.
      bytes_in_flight: of a thread block, 0 where it doesn't matter.
    """

    name: str
    error: str | None = None
    kernels: list[KernelFigures] = dataclasses.field(default_factory=list)
    donated_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    pool_copies: list[str] = dataclasses.field(default_factory=list)
    require: tuple[str, ...] = ()
    kernels_wanted: tuple[str, ...] = ()
    bytes_in_flight: int = 0
    seconds: float = 0.0

    @property
    def device_bytes(self) -> int:
        """Memory that the program takes while it runs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def measure_kernel(chip: Chip, spec: Any, dumps: aot.Dumps) -> Figures:
    """The figures of one ``KernelSpec``."""
    donated = [spec.args[i] for i in spec.donate]
    return _measure(
        chip,
        spec.name,
        spec.function,
        spec.args,
        spec.donate,
        dumps,
        donated_bytes=_tree_bytes(donated),
        pool_elements=min((_size(x.shape) for x in donated), default=0),
        require=spec.require,
        kernels_wanted=spec.kernels,
        bytes_in_flight=spec.bytes_in_flight if spec.memory_bound else 0,
    )


def measure_step(chip: Chip, spec: Any, dumps: aot.Dumps, kernels: tuple[str, ...]) -> Figures:
    """The figures of one ``StepSpec``; ``kernels`` must be in it."""
    return _measure(
        chip,
        spec.name,
        spec.function,
        spec.args,
        (1,),
        dumps,
        donated_bytes=spec.pool_bytes,
        pool_elements=_size(spec.pool_shape),
        kernels_wanted=kernels,
    )


def _measure(
    chip: Chip,
    name: str,
    function: Any,
    args: tuple,
    donate: tuple[int, ...],
    dumps: aot.Dumps,
    *,
    pool_elements: int,
    **facts: Any,
) -> Figures:
    dumps.clear()
    started = time.perf_counter()
    try:
        compiled = aot.compile_for(chip, function, args, donate=donate)
        hlo = compiled.as_text()
        kernels = kernels_of(hlo, ptx.read_dumps(dumps.ptx_files(), aot.ptxas_path()), dumps.seen)
    except Exception as error:  # whatever stops a compiler is the finding
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return Figures(name=name, error=message[:500], **facts)
    memory = compiled.memory_analysis()
    return Figures(
        name=name,
        kernels=[_figures(chip, k) for k in kernels],
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        pool_copies=find_copies(hlo, pool_elements) if pool_elements else [],
        seconds=time.perf_counter() - started,
        **facts,
    )


_MOSAIC_CALL = re.compile(
    r'custom_call_target="mosaic_gpu[^\n]*?op_name="(?:[^"\n]*/)?([^"/\n]+)/[^"/\n]+"'
    r'[^\n]*?kernel_hash = "((?:[^"\\\n]|\\.)*)"'
)


def kernels_of(hlo: str, dumped: list[ptx.Kernel], seen: dict[str, ptx.Kernel]) -> list[ptx.Kernel]:
    """The Mosaic kernels of a program: those just dumped, and those compiled for one before.

    Args:
      hlo: the compiled program; its calls carry each kernel's name and hash.
      seen: kernels by hash; those just dumped are added.
    """
    calls = dict.fromkeys((hash_, name) for name, hash_ in _MOSAIC_CALL.findall(hlo))
    rest = list(dumped)
    for hash_, name in calls:
        if hash_ not in seen:
            found = next((kernel for kernel in rest if kernel.name == name), None)
            if found is not None:
                rest.remove(found)
                seen[hash_] = found
    return [seen[hash_] for hash_, _ in calls if hash_ in seen] + rest


def _figures(chip: Chip, kernel: ptx.Kernel) -> KernelFigures:
    facts = dataclasses.asdict(kernel)
    del facts["target"], facts["mosaic"]
    return KernelFigures(
        blocks_per_sm=blocks_per_sm(
            chip,
            registers=kernel.registers,
            shared_bytes=kernel.shared_bytes,
            threads=kernel.threads,
        ),
        **facts,
    )


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%?[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(", re.M)
_SHAPE = re.compile(r"\[([\d,]*)\]")
_COPIES = {"copy", "copy-start", "transpose", "convert", "concatenate", "broadcast", "pad", "slice"}


def find_copies(hlo: str, elements: int) -> list[str]:
    """Instructions of compiled HLO that make something of ``elements`` elements or more anew.

    Fused ones count by the operation that gave the fusion its name.
    """
    found = []
    for match in _INSTRUCTION.finditer(hlo):
        name, result, operation = match.groups()
        shapes = [[int(d) for d in dims.split(",") if d] for dims in _SHAPE.findall(result)]
        copies = operation in _COPIES or (operation == "fusion" and "copy" in name)
        if copies and max(map(_size, shapes), default=0) >= elements:
            found.append(f"{name} = {result} {operation}")
    return found


def _size(shape: Any) -> int:
    result = 1
    for dim in shape:
        result *= dim
    return result


def _tree_bytes(tree: Any) -> int:
    import jax

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
