"""Checkpoints in llama.cpp's GGUF form, quantised or not, read through the ``gguf`` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.models.config import ModelConfig, RopeScaling
from pagedjax.models.rope import llama3_factors
from pagedjax.models.weights.layout import EMBEDDING, HEAD, NORM, layer_tensor

ARCHITECTURE = "llama"
ROPE_FACTORS = "rope_freqs.weight"
_TRUNK_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": NORM,
    "output.weight": HEAD,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource:
    """The tensors of a GGUF file under Hugging Face's names (a ``TensorSource``); a context
    manager.

    The file is memory-mapped; a tensor is dequantised when it is read. Raises FileNotFoundError, or
    ValueError naming the setting or tensor for a file that is no Llama this engine can run.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no GGUF file {path}")
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
        self.origin = str(path)
        reader = _open_reader(path)
        self._tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
        factors = self._tensors.pop(ROPE_FACTORS, None)
        metadata = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("tokenizer.") or key.endswith("_token_id")
        }
        shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        try:
            self.config = config_from_metadata(
                metadata,
                tied=HEAD not in shapes,
                vocab_size=shapes.get(EMBEDDING, (0,))[0],
                rope_factors=None if factors is None else np.asarray(factors.data, np.float64),
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.shapes = shapes

    def __enter__(self) -> GGUFSource:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._tensors = {}  # lets go of the memory map

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, rows of q and k in Hugging Face's rotary order."""
        from gguf import quants

        tensor = self._tensors[name]
        try:
            host = quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.origin}: tensor {tensor.name} has type {tensor.tensor_type.name}, "
                "which the gguf library cannot dequantise"
            ) from error
        if name.endswith("self_attn.q_proj.weight"):
            return unpermute(host, self.config.num_attention_heads)
        if name.endswith("self_attn.k_proj.weight"):
            return unpermute(host, self.config.num_key_value_heads)
        return host


def _open_reader(path: str | Path) -> Any:
    """gguf's reader, without the cost of numpy's memmap class on each of its many small reads.

    The reader slices the map some ten times for each string of the vocabulary; plain array views
    of the same memory make that twice as fast.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(self, *args: Any, **kwargs: Any) -> Any:
            self.data = np.asarray(self.data)
            return super()._get(*args, **kwargs)

    return Reader(path)


def hf_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor; a name that is none of Llama's stays as it is."""
    if name in _TRUNK_NAMES:
        return _TRUNK_NAMES[name]
    parts = name.split(".")
    known = len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[3] == "weight"
    if known and parts[2] in _LAYER_NAMES:
        return layer_tensor(int(parts[1]), _LAYER_NAMES[parts[2]])
    return name


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k [heads * D, E] from llama.cpp's rotary order to Hugging Face's.

    llama.cpp rotates neighbours (2i, 2i + 1), Hugging Face rotates halves (i, i + D/2); llama.cpp's
    converter interleaves the halves of each head, which this undoes.
    """
    rows, size = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, size)
    return pairs.swapaxes(1, 2).reshape(rows, size)


def config_from_metadata(
    metadata: dict[str, Any],
    *,
    tied: bool,
    vocab_size: int,
    rope_factors: np.ndarray | None = None,
) -> ModelConfig:
    """The model configuration that a GGUF file's metadata describes.

    ``tied``: the file has no output tensor. ``vocab_size``: the embedding's rows, checked against
    the metadata. ``rope_factors``: the ``rope_freqs`` tensor [D/2]. Raises ValueError naming the
    key.
    """
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(f"general.architecture is {architecture!r}; supported: {ARCHITECTURE!r}")
    heads = _integer(metadata, "attention.head_count")
    size = _integer(metadata, "embedding_length")
    head_dim = _integer(metadata, "attention.key_length", size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(metadata, key, head_dim) != head_dim:
            raise ValueError(f"llama.{key} differs from the head size {head_dim}: not supported")
    if _integer(metadata, "expert_count", 0):
        raise ValueError("llama.expert_count is not 0: mixtures of experts are not supported")
    rope_theta = float(metadata.get("llama.rope.freq_base", 10000.0))
    if rope_factors is not None:
        rope_scaling = _scaling_from_factors(rope_factors, rope_theta, head_dim)
    else:
        rope_scaling = _scaling_from_metadata(metadata)
    ends = ("eos", "eot", "eom")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ends]
    return ModelConfig(
        vocab_size=_integer(metadata, "vocab_size", vocab_size),
        hidden_size=size,
        intermediate_size=_integer(metadata, "feed_forward_length"),
        num_hidden_layers=_integer(metadata, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_integer(metadata, "attention.head_count_kv", heads),
        head_dim=head_dim,
        # Stored as a 32-bit float: the decimal that was meant is the shortest that rounds to it.
        rms_norm_eps=float(str(np.float32(_need(metadata, "attention.layer_norm_rms_epsilon")))),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=_integer(metadata, "context_length"),
        tie_word_embeddings=tied,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        sliding_window=metadata.get("llama.attention.sliding_window"),
    )


def _need(metadata: dict[str, Any], key: str) -> Any:
    if f"llama.{key}" not in metadata:
        raise ValueError(f"the metadata lacks llama.{key}")
    return metadata[f"llama.{key}"]


def _integer(metadata: dict[str, Any], key: str, default: int | None = None) -> int:
    if default is not None and f"llama.{key}" not in metadata:
        return default
    value = _need(metadata, key)
    if not isinstance(value, int):
        raise ValueError(f"llama.{key} is {value!r}; supported: one integer for all layers")
    return value


def _scaling_from_metadata(metadata: dict[str, Any]) -> RopeScaling | None:
    kind = metadata.get("llama.rope.scaling.type")
    factor = metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear"))
    if kind is None and factor is not None:
        kind = "linear"  # files from before the type was written
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise ValueError(f"llama.rope.scaling.type is {kind!r}; supported: 'none', 'linear'")
    if factor is None:
        raise ValueError("the metadata lacks llama.rope.scaling.factor")
    return None if factor in (0.0, 1.0) else RopeScaling(rope_type="linear", factor=float(factor))


def _scaling_from_factors(factors: np.ndarray, theta: float, head_dim: int) -> RopeScaling:
    """Llama 3's scaling if the factors are what it gives at its published settings."""
    inv_freq = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    guess = RopeScaling(rope_type="llama3", factor=float(factors.max()))
    if factors.shape == inv_freq.shape and np.allclose(
        llama3_factors(inv_freq, guess), factors, rtol=1e-5
    ):
        return guess
    return RopeScaling(rope_type="factors", factors=tuple(float(factor) for factor in factors))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts the fastest axis first
