"""Decides what the configuration leaves open, above all the pool's size from free memory.

The rules (`fill_dtypes`, `fill_sizes`, `bytes_per_block`) are pure; `available_bytes` reads the
machine and is called by the shell only.
"""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from pagedjax.config import MAX_SLOTS, EngineConfig

GIB = 1 << 30
# Share of the memory left after the weights: a GPU has nothing else to do, a CPU's is everyone's.
ACCELERATOR_FRACTION = 0.9
CPU_FRACTION = 0.5
CPU_MAX_POOL_BYTES = 4 * GIB
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelShape(Protocol):
    """What sizing needs of a model (`pagedjax.models.config.ModelConfig` has it)."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


def fill_dtypes(config: EngineConfig, *, default_dtype: str) -> EngineConfig:
    """Replaces dtype="auto" by the machine's (`pagedjax.models.params.default_dtype`), and
    kv_cache_dtype="auto" by dtype."""
    dtype = default_dtype if config.dtype == "auto" else config.dtype
    kv_cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return dataclasses.replace(config, dtype=dtype, kv_cache_dtype=kv_cache_dtype)


def bytes_per_block(model: ModelShape, *, block_size: int, dtype: str) -> int:
    """Bytes that one block of the pool takes: K and V of block_size tokens in every layer."""
    values_per_token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    return values_per_token * block_size * ITEM_BYTES[dtype]


def auto_num_blocks(
    config: EngineConfig, model: ModelShape, *, platform: str, available_bytes: int
) -> int:
    """Blocks that the pool gets when num_blocks is not given (the rule is in EngineConfig's docs).

    available_bytes is what is left after the weights were loaded. kv_cache_dtype must be decided.
    Raises `ValueError` when not even one block fits.
    """
    budget = int(available_bytes * (config.memory_fraction or _default_fraction(platform)))
    if config.memory_fraction is None and platform == "cpu":
        budget = min(budget, CPU_MAX_POOL_BYTES)
    one = bytes_per_block(model, block_size=config.block_size, dtype=config.kv_cache_dtype)
    longest = config.max_model_len or model.max_position_embeddings
    useful = config.table_rows * -(-longest // config.block_size)
    num_blocks = min(budget // one, useful, MAX_SLOTS // config.block_size)
    if num_blocks < 1:
        raise ValueError(
            f"no block of the KV pool fits: one takes {one} bytes, and of the {available_bytes} "
            f"bytes available the pool may take {budget}; give num_blocks or a larger "
            f"memory_fraction"
        )
    return num_blocks


def num_blocks_of_swap_space(config: EngineConfig, model: ModelShape) -> int | None:
    """Blocks of the host pool. Raises `ValueError` when swap_space_gib does not hold one."""
    if not config.swap_space_gib:
        return config.num_host_blocks
    one = bytes_per_block(model, block_size=config.block_size, dtype=config.kv_cache_dtype)
    count = int(config.swap_space_gib * GIB) // one
    most = MAX_SLOTS // config.block_size
    if not 1 <= count <= most:
        raise ValueError(
            f"swap_space_gib must hold from 1 to {most} blocks of {one} bytes "
            f"(got {config.swap_space_gib}, which holds {count})"
        )
    return count


def fill_sizes(
    config: EngineConfig, model: ModelShape, *, platform: str, available_bytes: int
) -> EngineConfig:
    """Replaces num_blocks, num_rows, max_model_len and token_buckets where they are None, and
    swap_space_gib by num_host_blocks.

    Raises `ValueError` when max_model_len is more than the model was trained for.
    """
    trained = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ValueError(
            f"max_model_len must be at most {trained}, the model's max_position_embeddings "
            f"(got {config.max_model_len})"
        )
    num_host_blocks = num_blocks_of_swap_space(config, model)
    num_blocks = config.num_blocks
    if platform == "cpu" and num_host_blocks:  # its pool lies in the same memory
        available_bytes -= num_host_blocks * bytes_per_block(
            model, block_size=config.block_size, dtype=config.kv_cache_dtype
        )
    if num_blocks is None:
        num_blocks = auto_num_blocks(
            config, model, platform=platform, available_bytes=available_bytes
        )
    max_model_len = config.max_model_len or min(trained, num_blocks * config.block_size)
    return dataclasses.replace(
        config,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        swap_space_gib=0.0,
        num_rows=config.table_rows,
        max_model_len=max_model_len,
        token_buckets=config.buckets,
    )


def available_bytes(device: Any) -> int:
    """Bytes of memory that `device` (a jax.Device) can still give.

    An accelerator's allocator says. On CPU it is the least of what the kernel calls available and
    what each control group still allows.
    """
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return host_available_bytes(Path("/proc"), Path("/sys/fs/cgroup"))


def host_available_bytes(proc: Path, cgroup: Path) -> int:
    """Available host memory in bytes, from a /proc and a /sys/fs/cgroup tree (version 1 or 2)."""
    room = [_mem_available_bytes(proc / "meminfo")]
    for folder in _cgroup_folders(proc / "self" / "cgroup", cgroup):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
            if limit is not None and usage is not None:
                # The page cache counts as usage but is given up on demand.
                usage -= _inactive_file_bytes(folder / "memory.stat")
                room.append(max(limit - max(usage, 0), 0))
    return min(room)


def _default_fraction(platform: str) -> float:
    return CPU_FRACTION if platform == "cpu" else ACCELERATOR_FRACTION


def _mem_available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} has no line MemAvailable; give num_blocks")


def _cgroup_folders(membership: Path, root: Path) -> list[Path]:
    """This process's control groups and all their parents, as far as they are visible."""
    folders = [root, root / "memory"]
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root
        parts = [part for part in path.split("/") if part and part != ".."]
        folders += [base.joinpath(*parts[: i + 1]) for i in range(len(parts))]
    return folders


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or the word "max"
        return None


def _inactive_file_bytes(path: Path) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))
