"""Compiling a function for a GPU that isn't there, and keeping what the compiler wrote.

``prepare`` must run before jax is imported, and a process compiles for one chip only: Mosaic GPU
keeps the first chip's architecture.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_gate.chips import Chip, target_config

WHEELS = {
    "jax-cuda12-plugin": "jax_cuda12_plugin",
    "jax-cuda12-pjrt": "jax_plugins.xla_cuda12",
    "nvidia-cuda-nvcc-cu12": "nvidia.cuda_nvcc",
    "nvidia-nvjitlink-cu12": "nvidia.nvjitlink",
    "absl-py": "absl",
}
"""Wheel by the module it brings."""


class MissingWheels(RuntimeError):
    """The compiler cannot run here; the message says what to install."""


def check_wheels() -> None:
    """Raise ``MissingWheels`` unless everything that compiling needs is installed."""
    missing = [wheel for wheel, module in WHEELS.items() if not _found(module)]
    if missing:
        raise MissingWheels(
            f"not installed: {', '.join(missing)}. Compiling for GPUs needs the extra gpu-check "
            "(Python 3.12 or later): pip install 'pagedjax[gpu-check]'"
        )
    jax, plugin = (importlib.metadata.version(x) for x in ("jax", "jax-cuda12-plugin"))
    if jax != plugin:
        raise MissingWheels(f"jax {jax} and jax-cuda12-plugin {plugin} must be of one version")


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def ptxas_path() -> Path:
    """NVIDIA's assembler, from its wheel."""
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    return Path(next(iter(spec.submodule_search_locations))) / "bin" / "ptxas"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dumps:
    """The folder into which Mosaic GPU writes the code of the kernels being compiled.

    It compiles equal kernels once in a process and writes their code that one time: ``seen`` keeps
    what was read, by the kernel's hash.
    """

    folder: Path
    seen: dict[str, Any] = dataclasses.field(default_factory=dict)

    def ptx_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.ptx"))

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


def prepare(folder: Path) -> Dumps:
    """Set the environment of a process that will compile; before jax is imported.

    Args:
      folder: for what is dumped, and for a cache of XLA's own kernels: the steps share most of
        theirs with one another.
    """
    dumps = Dumps(folder=folder / "mosaic")
    dumps.folder.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the CUDA plugin registers its compiler nevertheless
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # A program from jax's own cache would leave no PTX to read.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    # Without a GPU nothing can be timed, but XLA would still compile each fusion once more to
    # choose among its ways: half of a step's compile time.
    cache = folder / "kernels.bin"
    flags = ("--xla_gpu_autotune_level=0", f"--xla_gpu_kernel_cache_file={cache}")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dumps.folder)
    # Mosaic GPU takes ptxas from PATH; one of another CUDA release refuses its PTX.
    os.environ["PATH"] = f"{ptxas_path().parent}{os.pathsep}{os.environ['PATH']}"
    return dumps


def compile_for(
    chip: Chip,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    donate: tuple[int, ...] = (),
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """``function`` compiled for one device of ``chip``.

    Args:
      args: pytrees of ``jax.ShapeDtypeStruct``.
      donate: indices of donated arguments.

    Returns:
      ``jax.stages.Compiled``, which has ``memory_analysis()`` and ``as_text()``.
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(chip), topology="1x1x1"
    )
    mesh = Mesh(topology.devices, ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        # Mosaic GPU takes its architecture from the default device.
        jax.default_device(mesh.devices.flat[0]),
        # What asks which platform it is traced for must hear the one it is compiled for.
        mock.patch.object(jax, "default_backend", return_value="gpu"),
    ):
        traced = jax.jit(function, donate_argnums=donate).trace(*args)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=compiler_options)
