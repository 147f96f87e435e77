#!/usr/bin/env python
"""Plan the memory of the KV cache: what a token takes, how many sequences fit, what blocks waste.

python scripts/plan_memory.py --model llama-2-13b --device a100 --lengths 50,200,1000
python scripts/plan_memory.py --model llama-3.1-8b --memory-gib 24 --lengths 128:4096
python scripts/plan_memory.py --prompt-lengths 32:256 --output-lengths 16:256 --plot study
python scripts/plan_memory.py --article

Lengths are tokens held in the KV cache: one number, numbers with commas, low:high for every length
between them equally often, or a text file of numbers. docs/memory.md explains the tables.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
from gpu_gate.chips import CHIPS
from plan_report import plan_report

from pagedjax import memory, planning
from pagedjax.config import EngineConfig
from pagedjax.models.config import ModelConfig
from pagedjax.models.presets import list_presets, preset_config
from pagedjax.planning import Lengths

Dtype = Literal["float32", "bfloat16"]
CacheDtype = Literal["float32", "bfloat16", "float16"]
FIXED_LENGTHS = (64, 256, 1024, 4096, 16384, 65536)
DEFAULT_DEVICE = "a100"
DEFAULT_LENGTHS = "1:1024"
DEFAULT_NUM_SEQUENCES = 10


@dataclass(frozen=True, kw_only=True)
class Args:
    """Command line of plan_memory.py."""

    model: str = "llama-2-13b"
    """A preset's name, a TOML file such as those in configs/models, a Hugging Face directory (its
    config.json is enough) or a GGUF file."""

    device: Literal["a100", "h100", "h200", "b200"] | None = None
    """A GPU by name. None: the A100 with 80 GB, unless memory_gib is given."""

    memory_gib: float | None = None
    """Memory of another device in GiB; for a CPU, what is available before the model is loaded."""

    platform: Literal["gpu", "cpu"] = "gpu"
    """Whose rule sizes the pool: 0.9 of what a GPU has left, 0.5 (at most 4 GiB) of a CPU's."""

    xla_memory_fraction: float | None = None
    """Share of a GPU's memory that JAX allocates from, what XLA_CLIENT_MEM_FRACTION will
    say. None: 0.75, JAX's default."""

    memory_fraction: float | None = None
    """As the engine's setting: share of what the weights leave that the pool takes."""

    dtype: CacheDtype = "bfloat16"
    """Type of the keys and values."""

    weights_dtype: Dtype | None = None
    """Type of the weights. None: as dtype (bfloat16 for float16)."""

    weights_bytes: int | None = None
    """Bytes of the weights, where they are not parameters times the size of their type."""

    block_size: int = 16
    """Tokens in one block."""

    lengths: str | None = None
    """Tokens that a sequence holds: 512, or 50,200,1000, or 32:512, or a file. None: 1:1024, unless
    prompt_lengths and output_lengths are given."""

    prompt_lengths: str | None = None
    """Prompts, in the same form. With output_lengths: sequences are counted at every step of their
    life, so long outputs weigh by the time they stay."""

    output_lengths: str | None = None
    """Outputs, see prompt_lengths."""

    max_model_len: int | None = None
    """Longest sequence: what pre-allocation reserves and a block table has room for. None: what the
    model was trained for, or what fits into the pool if that is less."""

    prefix_length: int = 0
    """Leading tokens that all sequences have in common."""

    num_sequences: int | None = None
    """Sequences that share the prefix. None: 10."""

    plot: Path | None = None
    """Draw the block-size study to this path, as .png and as .svg."""

    json: bool = False
    """Print one JSON object instead of tables."""

    article: bool = False
    """Check the figures of an article on PagedAttention instead; goes with --json only."""


# Input


def read_model(name: str) -> ModelConfig:
    """The configuration of a preset, a TOML file, a Hugging Face directory or a GGUF file."""
    if name in list_presets():
        return preset_config(name)
    path = Path(name).expanduser()
    if path.suffix == ".toml":
        return ModelConfig.from_toml(path)
    if path.exists():
        from pagedjax.models.weights import read_config

        return read_config(path)
    raise ValueError(
        f"model must be a TOML file, a directory or a GGUF file that exists, or one of "
        f"{', '.join(list_presets())} (got {name!r})"
    )


def parse_lengths(name: str, text: str) -> Lengths:
    """Lengths as the command line gives them. Raises `ValueError` naming the option."""
    path = Path(text).expanduser()
    try:
        if path.is_file():
            words = path.read_text(encoding="utf-8").replace(",", " ").split()
            return Lengths.of([int(word) for word in words])
        if ":" in text:
            low, high = text.split(":")
            return Lengths.uniform(int(low), int(high))
        return Lengths.of([int(word) for word in text.split(",")])
    except ValueError as error:
        raise ValueError(
            f"{name} must be a number of at least 1, numbers with commas, low:high or a file of "
            f"numbers (got {text!r}: {error})"
        ) from None


def read_lengths(args: Args) -> Lengths:
    """The distribution that the options describe."""
    if (args.prompt_lengths is None) != (args.output_lengths is None):
        raise ValueError("prompt_lengths and output_lengths must be given together (got one)")
    if args.prompt_lengths is None:
        return parse_lengths("lengths", args.lengths or DEFAULT_LENGTHS)
    if args.lengths is not None:
        raise ValueError(
            f"lengths must be left out with prompt_lengths and output_lengths (got {args.lengths})"
        )
    return Lengths.in_service(
        parse_lengths("prompt_lengths", args.prompt_lengths),
        parse_lengths("output_lengths", args.output_lengths),
    )


def read_device(args: Args) -> tuple[str, int]:
    """The device's name and its bytes of memory."""
    if args.memory_gib is None:
        if args.platform == "cpu":
            raise ValueError("memory_gib must be given with platform cpu (got none)")
        chip = CHIPS[args.device or DEFAULT_DEVICE]
        return chip.name, chip.memory_bytes
    if args.device is not None:
        raise ValueError(f"memory_gib must be left out with device (got {args.memory_gib})")
    if not 0 < args.memory_gib < 1 << 20:
        raise ValueError(f"memory_gib must be above 0 and below {1 << 20} (got {args.memory_gib})")
    return f"{args.platform} with {args.memory_gib:g} GiB", int(args.memory_gib * memory.GIB)


# Figures


def make_plan(args: Args) -> dict[str, Any]:
    """All figures, as plain data (what --json prints)."""
    model, lengths = read_model(args.model), read_lengths(args)
    device_name, device_bytes = read_device(args)
    pool = planning.plan_pool(
        model,
        device_bytes=device_bytes,
        dtype=args.dtype,
        weights_dtype=args.weights_dtype,
        weights_bytes=args.weights_bytes,
        block_size=args.block_size,
        memory_fraction=args.memory_fraction,
        platform=args.platform,
        xla_memory_fraction=args.xla_memory_fraction,
    )
    max_model_len = longest_sequence(args, model, pool, lengths)
    fits = planning.capacity(
        pool.num_blocks, lengths, block_size=args.block_size, prefix_length=args.prefix_length
    )
    reserved = planning.preallocation(model, lengths, max_model_len=max_model_len, dtype=args.dtype)
    study = planning.block_size_study(model, lengths, max_model_len=max_model_len, dtype=args.dtype)
    plan = {
        "model": args.model,
        "dtype": args.dtype,
        "kv_bytes_per_token": planning.kv_bytes_per_token(model, dtype=args.dtype),
        "max_model_len": max_model_len,
        "device": device_name,
        "pool": {
            **dataclasses.asdict(pool),
            "pool_bytes": pool.pool_bytes,
            "num_tokens": pool.num_tokens,
            "rest_bytes": pool.rest_bytes,
        },
        "lengths": {
            "shortest": lengths.shortest,
            "mean": float(lengths.mean),
            "longest": lengths.longest,
            "longest_bytes": planning.kv_bytes(model, lengths.longest, dtype=args.dtype),
        },
        "capacity": {
            **dataclasses.asdict(fits),
            "preallocated": pool.pool_bytes // reserved.reserved_bytes,
            "fixed_lengths": fixed_lengths(pool, max_model_len),
        },
        "preallocation": {
            "reserved_bytes": reserved.reserved_bytes,
            "used_bytes": float(reserved.used_bytes),
            "utilisation": float(reserved.utilisation),
        },
        "block_sizes": [
            _plain(dataclasses.asdict(row)) | {"table_bytes": row.table_bytes} for row in study
        ],
    }
    if args.prefix_length:
        plan["prefix"] = prefix_figures(args, model)
    elif args.num_sequences is not None:
        raise ValueError(
            f"num_sequences must be left out without prefix_length (got {args.num_sequences})"
        )
    return plan


def longest_sequence(args: Args, model: ModelConfig, pool: planning.Pool, lengths: Lengths) -> int:
    """The engine's max_model_len for these options, by its own rule."""
    engine = EngineConfig(
        block_size=pool.block_size, num_blocks=pool.num_blocks, max_model_len=args.max_model_len
    )
    engine = memory.fill_sizes(engine, model, platform=args.platform, available_bytes=0)
    assert engine.max_model_len is not None
    if lengths.longest > engine.max_model_len:
        raise ValueError(
            f"lengths must be at most {engine.max_model_len}, max_model_len (got {lengths.longest})"
        )
    return engine.max_model_len


def fixed_lengths(pool: planning.Pool, max_model_len: int) -> list[dict[str, int]]:
    """Sequences that fit when all have one length, for lengths from 64 to max_model_len."""
    lengths = [length for length in FIXED_LENGTHS if length < max_model_len] + [max_model_len]
    fits = [
        planning.capacity(pool.num_blocks, Lengths.fixed(length), block_size=pool.block_size).worst
        for length in lengths
    ]
    return [{"length": n, "sequences": fit} for n, fit in zip(lengths, fits, strict=True)]


def prefix_figures(args: Args, model: ModelConfig) -> dict[str, Any]:
    """What num_sequences sequences save by sharing their prefix."""
    num_sequences = DEFAULT_NUM_SEQUENCES if args.num_sequences is None else args.num_sequences
    saving = planning.prefix_saving(
        model,
        prefix_length=args.prefix_length,
        num_sequences=num_sequences,
        block_size=args.block_size,
        dtype=args.dtype,
    )
    return {
        "prefix_length": args.prefix_length,
        "num_sequences": num_sequences,
        **dataclasses.asdict(saving),
        "shared_bytes": saving.shared_bytes,
        "saving": float(saving.saving),
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: float(v) if isinstance(v, Fraction) else v for k, v in values.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = tyro.cli(Args, args=argv, description=(__doc__ or "").split("\n")[0])
    try:
        if args.article:
            return _article(args)
        plan = make_plan(args)
        if args.plot is not None:
            from plan_plot import plot_study

            written = plot_study(plan, args.plot)
            print("wrote " + ", ".join(map(str, written)), file=sys.stderr)
    except ModuleNotFoundError as error:  # only drawing needs a package that may be missing
        print(f"error: --plot needs {error.name}: pip install matplotlib", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(plan, indent=1) if args.json else plan_report(plan))
    return 0


def _article(args: Args) -> int:
    from plan_article import article_figures, article_report

    if dataclasses.replace(args, article=False, json=False) != Args():
        raise ValueError("article must be given alone or with json (got other options)")
    figures = article_figures()
    if args.json:
        print(json.dumps([dataclasses.asdict(figure) for figure in figures], indent=1))
    else:
        print(article_report(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
