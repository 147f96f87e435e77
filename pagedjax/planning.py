"""Arithmetic of KV-cache memory: what a token, a block, a sequence takes, how much of it fits.

Pure functions of a model's shape, lengths and sizes; nothing here reads a file or a device. Bytes
and tokens are exact integers, means and shares exact fractions. How many bytes a block takes and
what part of a device the pool gets are the engine's own rules, asked of `pagedjax.memory`.

Lengths of sequences, and distributions of them, are those of `pagedjax.lengths`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from pagedjax import memory
from pagedjax.config import EngineConfig
from pagedjax.lengths import Lengths, blocks_for, check_at_least

TABLE_ENTRY_BYTES = 4
"""`block_tables` is an int32 array."""

DEFAULT_XLA_MEMORY_FRACTION = 0.75
"""Share of a GPU's memory that JAX allocates from unless XLA_CLIENT_MEM_FRACTION says
otherwise (https://docs.jax.dev/en/latest/gpu_memory_allocation.html)."""

MAX_ROWS = 1 << 20
"""Most rows that `EngineConfig.num_rows` accepts: a plan is not limited by the request table."""


class Model(memory.ModelShape, Protocol):
    """What planning needs of a model (`pagedjax.models.config.ModelConfig` has it)."""

    @property
    def num_parameters(self) -> int:
        """Parameters in all."""


# Bytes of one thing


def kv_bytes_per_token(model: memory.ModelShape, *, dtype: str) -> int:
    """Bytes of the keys and values of one token, all layers: 2 L K D times the item size."""
    return kv_bytes_per_block(model, block_size=1, dtype=dtype)


def kv_bytes_per_block(model: memory.ModelShape, *, block_size: int, dtype: str) -> int:
    """Bytes of one block of the pool, all layers."""
    check_at_least("block_size", block_size, 1)
    _check_dtype("dtype", dtype)
    return memory.bytes_per_block(model, block_size=block_size, dtype=dtype)


def kv_bytes(model: memory.ModelShape, length: int, *, dtype: str) -> int:
    """Bytes of the keys and values of `length` tokens, without what blocks round up to."""
    check_at_least("length", length, 0)
    return length * kv_bytes_per_token(model, dtype=dtype)


def weight_bytes(model: Model, *, dtype: str) -> int:
    """Bytes of all parameters."""
    _check_dtype("dtype", dtype)
    return model.num_parameters * memory.ITEM_BYTES[dtype]


# What fits


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The KV pool of an engine on a device, and what is left beside it."""

    device_bytes: int
    """Memory of the device; on CPU what is available before the weights are loaded."""
    jax_bytes: int
    """What JAX allocates from: a part of a GPU's memory, all of a CPU's."""
    weight_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def rest_bytes(self) -> int:
        """What JAX has left for activations and the compiler's scratch."""
        return self.jax_bytes - self.weight_bytes - self.pool_bytes


def plan_pool(
    model: Model,
    *,
    device_bytes: int,
    dtype: str,
    weights_dtype: str | None = None,
    weights_bytes: int | None = None,
    block_size: int = 16,
    memory_fraction: float | None = None,
    platform: str = "gpu",
    xla_memory_fraction: float | None = None,
) -> Pool:
    """The pool that the engine would make beside the weights, by the engine's own rule
    (`memory.auto_num_blocks`), with a request table too large to matter.

    Args:
      device_bytes: memory of the GPU, or what a CPU's machine has available without the model.
      dtype: of keys and values.
      weights_dtype: of the weights; None: as `dtype`.
      weights_bytes: of the weights, in place of parameters times the size of weights_dtype.
      memory_fraction: as in `EngineConfig`.
      platform: "gpu" or "cpu".
      xla_memory_fraction: share of a GPU that JAX allocates from; None: 0.75, JAX's default.

    Raises `ValueError`, naming the field and what it accepts, for a value out of range, for weights
    that do not fit, and when no block fits beside them.
    """
    check_at_least("device_bytes", device_bytes, 1)
    _check_dtype("dtype", dtype)
    if weights_bytes is not None and weights_dtype is not None:
        raise ValueError(
            f"weights_bytes and weights_dtype exclude each other (got {weights_bytes} and "
            f"{weights_dtype!r})"
        )
    if weights_bytes is None:
        weights_bytes = weight_bytes(model, dtype=weights_dtype or dtype)
    jax_bytes = int(device_bytes * _jax_share(platform, xla_memory_fraction))
    if not 0 <= weights_bytes < jax_bytes:
        raise ValueError(
            f"weights_bytes must be from 0 to {jax_bytes - 1}, below what JAX allocates from "
            f"(got {weights_bytes})"
        )
    config = EngineConfig(
        kv_cache_dtype=dtype,
        block_size=block_size,
        memory_fraction=memory_fraction,
        num_rows=MAX_ROWS,
    )
    num_blocks = memory.auto_num_blocks(
        config, model, platform=platform, available_bytes=jax_bytes - weights_bytes
    )
    return Pool(
        device_bytes=device_bytes,
        jax_bytes=jax_bytes,
        weight_bytes=weights_bytes,
        block_bytes=kv_bytes_per_block(model, block_size=block_size, dtype=dtype),
        block_size=block_size,
        num_blocks=num_blocks,
    )


def _jax_share(platform: str, given: float | None) -> float:
    if platform not in ("gpu", "cpu"):
        raise ValueError(f"platform must be one of gpu, cpu (got {platform!r})")
    if given is None:
        return DEFAULT_XLA_MEMORY_FRACTION if platform == "gpu" else 1.0
    if platform == "cpu":
        raise ValueError(f"xla_memory_fraction is for platform 'gpu' only (got {given})")
    if not 0 < given <= 1:
        raise ValueError(f"xla_memory_fraction must be above 0 and at most 1 (got {given})")
    return given


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many sequences a pool holds at the same time."""

    prefix_blocks: int
    """Blocks that all sequences share."""
    mean: int
    """Sequences when lengths average out as in the distribution."""
    worst: int
    """Sequences when every one is as long as the longest: so many never preempt one another."""


def capacity(
    num_blocks: int, lengths: Lengths, *, block_size: int, prefix_length: int = 0
) -> Capacity:
    """Sequences that fit into `num_blocks` blocks, the first `prefix_length` tokens of all equal.

    Whole blocks of the prefix are held once. The block in which it ends is each sequence's own
    (copy-on-write), and the last token is always computed, so every length must exceed
    `prefix_length`; `ValueError` otherwise.
    """
    check_at_least("num_blocks", num_blocks, 1)
    check_at_least("block_size", block_size, 1)
    _check_between(
        "prefix_length", prefix_length, 0, lengths.shortest - 1, "the shortest length less one"
    )
    shared = prefix_length // block_size
    room = max(num_blocks - shared, 0)
    own = lengths.blocks(block_size) - shared * lengths.total
    longest = blocks_for(lengths.longest, block_size=block_size) - shared
    return Capacity(prefix_blocks=shared, mean=room * lengths.total // own, worst=room // longest)


# Waste and savings


@dataclass(frozen=True, kw_only=True)
class Preallocation:
    """Memory of sequences that each reserve `max_model_len` tokens in one piece."""

    reserved_bytes: int
    """One sequence reserves."""
    used_bytes: Fraction
    """One sequence uses, in the mean."""

    @property
    def utilisation(self) -> Fraction:
        """Share of the reserved memory that is used."""
        return self.used_bytes / self.reserved_bytes


def preallocation(
    model: memory.ModelShape, lengths: Lengths, *, max_model_len: int, dtype: str
) -> Preallocation:
    """What is reserved and used when memory is reserved for the longest sequence possible.

    Raises `ValueError` when a length exceeds max_model_len.
    """
    check_at_least("max_model_len", max_model_len, lengths.longest)
    one = kv_bytes_per_token(model, dtype=dtype)
    return Preallocation(reserved_bytes=max_model_len * one, used_bytes=lengths.mean * one)


@dataclass(frozen=True, kw_only=True)
class PrefixSaving:
    """Memory of a prefix that several sequences have in common."""

    separate_bytes: int
    """When each holds its own."""
    saved_bytes: int
    copied_tokens: int
    """Tokens behind the last whole block of the prefix, of which each sequence has a copy."""

    @property
    def shared_bytes(self) -> int:
        """When whole blocks are held once."""
        return self.separate_bytes - self.saved_bytes

    @property
    def saving(self) -> Fraction:
        """Share of separate_bytes that is saved."""
        return Fraction(self.saved_bytes, self.separate_bytes)


def prefix_saving(
    model: memory.ModelShape,
    *,
    prefix_length: int,
    num_sequences: int,
    block_size: int = 16,
    dtype: str,
) -> PrefixSaving:
    """What `num_sequences` sequences with `prefix_length` equal leading tokens save by sharing."""
    check_at_least("prefix_length", prefix_length, 1)
    check_at_least("num_sequences", num_sequences, 1)
    block_bytes = kv_bytes_per_block(model, block_size=block_size, dtype=dtype)
    return PrefixSaving(
        separate_bytes=num_sequences * kv_bytes(model, prefix_length, dtype=dtype),
        saved_bytes=(num_sequences - 1) * (prefix_length // block_size) * block_bytes,
        copied_tokens=prefix_length % block_size,
    )


@dataclass(frozen=True, kw_only=True)
class BlockSizeFigures:
    """What one block size costs, for one sequence in the mean."""

    block_size: int
    block_bytes: int
    blocks: Fraction
    """Blocks held."""
    wasted_tokens: Fraction
    """Places of the last block that hold no token."""
    wasted_bytes: Fraction
    waste: Fraction
    """Share of the held blocks' memory that holds no token."""
    table_entries: int
    """Entries of one row of `block_tables`: enough for max_model_len tokens."""

    @property
    def table_bytes(self) -> int:
        """Bytes of one row of `block_tables`."""
        return self.table_entries * TABLE_ENTRY_BYTES


def block_size_study(
    model: memory.ModelShape,
    lengths: Lengths,
    *,
    max_model_len: int,
    dtype: str,
    block_sizes: Sequence[int] = tuple(range(1, 129)),
) -> tuple[BlockSizeFigures, ...]:
    """Internal waste and size of the block table for each block size."""
    check_at_least("max_model_len", max_model_len, lengths.longest)
    one = kv_bytes_per_token(model, dtype=dtype)
    rows = []
    for block_size in block_sizes:
        blocks = lengths.blocks(block_size)
        wasted = Fraction(blocks * block_size - lengths.tokens, lengths.total)
        rows.append(
            BlockSizeFigures(
                block_size=block_size,
                block_bytes=kv_bytes_per_block(model, block_size=block_size, dtype=dtype),
                blocks=Fraction(blocks, lengths.total),
                wasted_tokens=wasted,
                wasted_bytes=wasted * one,
                waste=1 - Fraction(lengths.tokens, blocks * block_size),
                table_entries=blocks_for(max_model_len, block_size=block_size),
            )
        )
    return tuple(rows)


def _check_between(name: str, value: int, low: int, high: int, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, {why} (got {value!r})")


def _check_dtype(name: str, value: str) -> None:
    if value not in memory.ITEM_BYTES:
        raise ValueError(f"{name} must be one of {', '.join(memory.ITEM_BYTES)} (got {value!r})")
