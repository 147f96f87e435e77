"""Reading and writing checkpoints: ``load_model``, ``read_config``, ``save_hf``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.models.config import ModelConfig
from pagedjax.models.params import default_stacked, resolve_dtype
from pagedjax.models.weights.gguf import GGUFSource
from pagedjax.models.weights.hf import HFSource, read_hf_config, save_hf
from pagedjax.models.weights.layout import assemble

__all__ = ["LoadedModel", "load_model", "read_config", "save_hf"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A checkpoint in memory: its configuration, its parameter pytree and where it came from."""

    config: ModelConfig
    params: dict[str, Any]
    path: Path
    kind: str  # "hf" (a directory) or "gguf" (a file)


def _open(path: Path) -> HFSource | GGUFSource:
    if path.is_dir():
        return HFSource(path)
    if path.suffix == ".gguf":
        return GGUFSource(path)
    raise ValueError(f"{path} is neither a directory with a config.json nor a .gguf file")


def load_model(path: str | Path, *, dtype: Any = None, stacked: bool | None = None) -> LoadedModel:
    """Load a Hugging Face directory or a GGUF file.

    ``dtype``: float32, bfloat16 or None for the platform's choice; quantised tensors are
    dequantised to it. ``stacked``: layout of ``layers`` (see ``modules.model_params``), None for
    the platform's choice. Raises FileNotFoundError, or ValueError naming each tensor that is
    missing, extra, misshapen or of a type that is not supported.
    """
    path = Path(path)
    dtype = resolve_dtype(dtype)
    stacked = default_stacked() if stacked is None else stacked
    with _open(path) as source:
        params = assemble(source, dtype=dtype, stacked=stacked)
        kind = "gguf" if isinstance(source, GGUFSource) else "hf"
        return LoadedModel(config=source.config, params=params, path=path, kind=kind)


def read_config(path: str | Path) -> ModelConfig:
    """The configuration of a checkpoint, without reading its weights."""
    path = Path(path)
    if path.is_dir():
        return read_hf_config(path)
    with _open(path) as source:
        return source.config
