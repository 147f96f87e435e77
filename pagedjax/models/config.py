"""The hyper-parameters of a Llama-family model, under Hugging Face's names.

A :class:`ModelConfig` is frozen and hashable, so it can be a static argument of a jitted function.
It is read from a Hugging Face ``config.json`` (``from_hf_dict``), from a readable TOML file
(``from_toml``) or from GGUF metadata (``pagedjax.models.weights.gguf``). A setting that this model
does not implement is refused by name: nothing is accepted and then ignored.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "factors")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies are scaled for contexts longer than the model was trained on.

    ``rope_type``: ``default`` (no change), ``linear`` (every frequency divided by ``factor``),
    ``llama3`` (low frequencies divided by ``factor``, high ones kept, a smooth ramp between),
    ``factors`` (frequency ``i`` divided by ``factors[i]``; what a GGUF file's ``rope_freqs`` tensor
    holds when it is none of the above).
    """

    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type is {self.rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
        if not self.factor > 0:
            raise ValueError(f"rope_scaling factor is {self.factor}; it must be above 0")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}; accepted: 0 < low_freq_factor < high_freq_factor"
            )
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                "original_max_position_embeddings is "
                f"{self.original_max_position_embeddings}; it must be at least 1"
            )
        if (self.rope_type == "factors") != bool(self.factors) or min(self.factors, default=1) <= 0:
            raise ValueError(
                "factors must be positive numbers, given with rope_type 'factors' only"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Hyper-parameters of one Llama-family model. Sizes are counts of elements.

    Raises ValueError, naming the field, for values that no model can have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of "
                f"num_key_value_heads, {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        for name in ("rms_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be at least 1")
        if self.rope_scaling is not None and self.rope_scaling.factors:
            count = len(self.rope_scaling.factors)
            if count != self.head_dim // 2:
                raise ValueError(f"rope_scaling has {count} factors; needed: {self.head_dim // 2}")
        for token_id in (
            *self.eos_token_ids,
            *([] if self.bos_token_id is None else [self.bos_token_id]),
        ):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"bos_token_id or eos_token_ids holds {token_id}; "
                    f"accepted: 0 to {self.vocab_size - 1}"
                )

    @property
    def num_parameters(self) -> int:
        """Parameters in all (a tied head counted once)."""
        heads = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size + 2)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size

    @classmethod
    def from_hf_dict(cls, config: dict[str, Any]) -> ModelConfig:
        """Read the content of a Hugging Face ``config.json``.

        Raises ValueError, naming the setting, for an architecture or a setting that is not
        supported.
        """
        _refuse_unsupported(config)
        required = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        missing = [name for name in required if config.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        heads = config["num_attention_heads"]
        rope_theta, rope_scaling = _read_rope(config)
        eos = config.get("eos_token_id")
        return cls(
            **{name: config[name] for name in required},
            num_key_value_heads=_or(config.get("num_key_value_heads"), heads),
            head_dim=_or(config.get("head_dim"), config["hidden_size"] // heads),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            # Llama has no window; Mistral's config always has the key, null when there is none.
            sliding_window=config.get("sliding_window")
            if config.get("model_type") == "mistral"
            else None,
        )

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of a Hugging Face ``config.json``; ``from_hf_dict`` reads it back to an equal
        config.

        Raises ValueError for rotary ``factors``, which Hugging Face's Llama cannot express.
        """
        model_type = "mistral" if self.sliding_window is not None else "llama"
        eos = self.eos_token_ids
        config = {
            "architectures": [ARCHITECTURES[model_type]],
            "model_type": model_type,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            **{
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(self)
                if field.name not in ("rope_scaling", "eos_token_ids", "sliding_window")
            },
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "rope_scaling": None,
        }
        if model_type == "mistral":
            config["sliding_window"] = self.sliding_window
        scaling = self.rope_scaling
        if scaling is not None and scaling.rope_type != "default":
            if scaling.rope_type == "factors":
                raise ValueError("rope_scaling has free factors, which config.json cannot express")
            keys = ["rope_type", "factor"]
            if scaling.rope_type == "llama3":
                keys += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
            config["rope_scaling"] = {key: getattr(scaling, key) for key in keys}
        return config

    @classmethod
    def from_toml(cls, path: str | Path) -> ModelConfig:
        """Read the ``[model]`` table of a TOML file such as those in ``configs/models``.

        Raises ValueError naming the file and the key for a key that does not exist, or one that is
        missing.
        """
        with open(path, "rb") as file:
            content = tomllib.load(file)
        if "model" not in content:
            raise ValueError(f"{path}: no [model] table")
        table = dict(content["model"])
        _check_keys(table, cls, f"{path} [model]")
        if "rope_scaling" in table:
            scaling = table["rope_scaling"]
            _check_keys(scaling, RopeScaling, f"{path} [model.rope_scaling]")
            table["rope_scaling"] = RopeScaling(**scaling)
        if "eos_token_ids" in table:
            table["eos_token_ids"] = tuple(table["eos_token_ids"])
        return cls(**table)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_keys(table: dict[str, Any], cls: type, where: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            raise ValueError(f"{where}: unknown key {key!r}; known: {', '.join(fields)}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise ValueError(f"{where}: missing key {name!r}")


def _refuse_unsupported(config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(f"model_type is {model_type!r}; supported: {', '.join(ARCHITECTURES)}")
    for architecture in config.get("architectures") or ():
        if architecture not in ARCHITECTURES.values():
            supported = ", ".join(ARCHITECTURES.values())
            raise ValueError(f"architecture is {architecture!r}; supported: {supported}")
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(name):
            raise ValueError(
                f"{name} is {config[name]!r}; not supported: only weights without it are"
            )
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {config['hidden_act']!r}; supported: 'silu'")
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(
            f"partial_rotary_factor is {config['partial_rotary_factor']}; supported: 1.0"
        )


def _read_rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling: transformers 5 writes both in ``rope_parameters``, older ones
    apart.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None)
    theta = _or(_or(theta, config.get("rope_theta")), 10000.0)
    rope_type = parameters.pop("rope_type", None)
    rope_type = _or(_or(rope_type, parameters.pop("type", None)), "default")
    parameters.pop("type", None)
    if rope_type not in ROPE_TYPES or rope_type == "factors":
        raise ValueError(f"rope_type is {rope_type!r}; supported: default, linear, llama3")
    if rope_type == "default":
        return theta, None
    needed = {"factor"}
    if rope_type == "llama3":
        needed |= {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    for name in sorted(needed - parameters.keys()):
        raise ValueError(f"rope_scaling of type {rope_type!r} lacks {name}")
    # Some checkpoints repeat settings that their rotary type does not use; unknown ones are
    # refused.
    known = {field.name for field in dataclasses.fields(RopeScaling)} - {"factors"}
    for name in parameters.keys() - known:
        raise ValueError(f"rope_scaling has {name}, which is not supported")
    return theta, RopeScaling(rope_type=rope_type, **{name: parameters[name] for name in needed})
