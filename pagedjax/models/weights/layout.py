"""Where each tensor of a checkpoint lies in the parameter pytree, and the checks on the way.

A checkpoint, of whatever format, is a :class:`TensorSource`: tensors under Hugging Face's names and
shapes. :func:`assemble` reads them one at a time into the leaves they belong to, so that besides
the model itself no more than one leaf's worth of memory is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from pagedjax.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"

# Leaf of a layer's pytree -> the tensors that it holds, one below the other.
LAYER_PARTS: dict[str, tuple[str, ...]] = {
    "input_layernorm": ("input_layernorm",),
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


class TensorSource(Protocol):
    """A checkpoint: tensors under Hugging Face's names, in the order of rotary pairs it uses."""

    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    origin: str  # for error messages

    def read(self, name: str) -> np.ndarray:
        """The tensor, in the checkpoint's own float dtype or float32."""
        ...


def layer_tensor(layer: int, part: str) -> str:
    """Hugging Face's name of one tensor of a layer."""
    return f"model.layers.{layer}.{part}.weight"


def part_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a layer."""
    size, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    return {
        "input_layernorm": (size,),
        "self_attn.q_proj": (q_size, size),
        "self_attn.k_proj": (kv_size, size),
        "self_attn.v_proj": (kv_size, size),
        "self_attn.o_proj": (size, q_size),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model must hold."""
    shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        for part, shape in part_shapes(config).items():
            shapes[layer_tensor(layer, part)] = shape
    return shapes


def check_shapes(source: TensorSource) -> None:
    """Raise ValueError naming the first missing, misshapen or extra tensors of the checkpoint.

    A tied model may carry a head of its own if it equals the embedding, as some files do.
    """
    expected = expected_shapes(source.config)
    problems = [f"missing tensor {name}" for name in expected if name not in source.shapes]
    for name, shape in source.shapes.items():
        if name not in expected:
            if name == HEAD and np.array_equal(source.read(HEAD), source.read(EMBEDDING)):
                continue
            problems.append(f"extra tensor {name} of shape {shape}")
        elif shape != expected[name]:
            problems.append(f"tensor {name} has shape {shape}, expected {expected[name]}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{source.origin}: " + "; ".join(problems[:5]) + more)


def assemble(source: TensorSource, *, dtype: Any, stacked: bool) -> dict[str, Any]:
    """Read a checked checkpoint into the parameter pytree (see ``modules.model_params``)."""
    check_shapes(source)
    count = source.config.num_hidden_layers

    def leaf(names: list[list[str]], lead: tuple[int, ...]) -> dict[str, Any]:
        rows = sum(source.shapes[name][0] for name in names[0])
        host = np.empty((*lead, rows, *source.shapes[names[0][0]][1:]), dtype)
        for target, parts in zip(host if lead else [host], names, strict=True):
            start = 0
            for name in parts:
                stop = start + source.shapes[name][0]
                target[start:stop] = source.read(name)
                start = stop
        return {"weight": jnp.asarray(host)}

    def layer_leaf(leaf_name: str, layers: range, lead: tuple[int, ...]) -> dict[str, Any]:
        parts = LAYER_PARTS[leaf_name]
        return leaf([[layer_tensor(layer, part) for part in parts] for layer in layers], lead)

    trunk = {"embed_tokens": leaf([[EMBEDDING]], ()), "norm": leaf([[NORM]], ())}
    if not source.config.tie_word_embeddings:
        trunk["lm_head"] = leaf([[HEAD]], ())
    if stacked:
        layers: Any = {name: layer_leaf(name, range(count), (count,)) for name in LAYER_PARTS}
    else:
        layers = tuple(
            {name: layer_leaf(name, range(layer, layer + 1), ()) for name in LAYER_PARTS}
            for layer in range(count)
        )
    return {"trunk": trunk, "layers": layers}


def disassemble(config: ModelConfig, params: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a parameter pytree under Hugging Face's names: :func:`assemble` undone."""
    trunk, layers = params["trunk"], params["layers"]
    yield EMBEDDING, np.asarray(trunk["embed_tokens"]["weight"])
    yield NORM, np.asarray(trunk["norm"]["weight"])
    if not config.tie_word_embeddings:
        yield HEAD, np.asarray(trunk["lm_head"]["weight"])
    shapes = part_shapes(config)
    for layer in range(config.num_hidden_layers):
        for leaf_name, parts in LAYER_PARTS.items():
            if isinstance(layers, tuple):
                host = np.asarray(layers[layer][leaf_name]["weight"])
            else:
                host = np.asarray(layers[leaf_name]["weight"][layer])
            start = 0
            for part in parts:
                stop = start + shapes[part][0]
                yield layer_tensor(layer, part), host[start:stop]
                start = stop
