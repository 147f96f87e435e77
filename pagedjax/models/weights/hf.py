"""Checkpoints in Hugging Face's directory form: ``config.json`` and safetensors, one or sharded."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.models.config import ModelConfig
from pagedjax.models.weights.layout import disassemble

FLOAT_DTYPES = ("F32", "F16", "BF16")
# Rotary tables that early Llama conversions stored: they follow from the configuration.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class HFSource:
    """The tensors of a Hugging Face directory (a ``TensorSource``); a context manager.

    Raises FileNotFoundError naming the file that is not there, and ValueError for a configuration
    that is not supported, an index that contradicts its shards, or a tensor that is not a float.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.origin = str(path)
        self.config = read_hf_config(self.path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> HFSource:
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            shards, index = _shards(self.path)
            for shard in shards:
                file = stack.enter_context(safe_open(shard, framework="np"))
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if not _DERIVED.fullmatch(name):
                        self._add(name, file, shard.name)
            if index is not None:
                listed = {name for name in index if not _DERIVED.fullmatch(name)}
                for name in sorted(listed ^ self.shapes.keys()):
                    where = (
                        "index, not in its shards" if name in listed else "shards, not in the index"
                    )
                    raise ValueError(f"{self.origin}: tensor {name} is in the {where}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._files.clear()
        self._stack.close()

    def _add(self, name: str, file: Any, shard: str) -> None:
        tensor = file.get_slice(name)
        if name in self.shapes:
            raise ValueError(f"{self.origin}: tensor {name} is in two shards, one of them {shard}")
        if tensor.get_dtype() not in FLOAT_DTYPES:
            raise ValueError(
                f"{self.origin}: tensor {name} has dtype {tensor.get_dtype()}; "
                f"supported: {', '.join(FLOAT_DTYPES)}"
            )
        self.shapes[name] = tuple(tensor.get_shape())
        self._files[name] = file

    def read(self, name: str) -> np.ndarray:
        """The tensor in the file's own dtype."""
        return self._files[name].get_tensor(name)


def read_hf_config(path: str | Path) -> ModelConfig:
    """The model configuration of a Hugging Face directory.

    End-of-sequence ids of ``generation_config.json``, where chat models list theirs, come too.
    """
    path = Path(path)
    content = json.loads(_existing(path / "config.json").read_text())
    generation = path / "generation_config.json"
    if generation.exists():
        eos = json.loads(generation.read_text()).get("eos_token_id")
        ids = [content.get("eos_token_id"), eos]
        flat = [i for entry in ids for i in (entry if isinstance(entry, list) else [entry])]
        content["eos_token_id"] = list(dict.fromkeys(i for i in flat if i is not None))
    try:
        return ModelConfig.from_hf_dict(content)
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error


def save_hf(path: str | Path, config: ModelConfig, params: dict[str, Any]) -> None:
    """Write a parameter pytree (either layout) as ``config.json`` and ``model.safetensors``."""
    from safetensors.numpy import save_file

    path = Path(path)
    content = config.to_hf_dict()
    tensors = {name: np.ascontiguousarray(host) for name, host in disassemble(config, params)}
    content["torch_dtype"] = next(iter(tensors.values())).dtype.name
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    return path


def _shards(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        return [_existing(path / name) for name in sorted(set(weight_map.values()))], weight_map
    single = path / "model.safetensors"
    if not single.exists():
        raise FileNotFoundError(
            f"{path} has neither model.safetensors nor model.safetensors.index.json; "
            "weights in other formats are not read"
        )
    return [single], None
