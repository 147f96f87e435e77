"""Tile sizes: chosen from static shapes only, and carried with the work list."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.paged_attention.mosaic_gpu.target import Target

BLOCK_SIZES = (8, 16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16
MAX_DECODE_QUERIES = 8

WGMMA_ROWS = 64
"""Rows of a warpgroup's product."""

_MAX_COLUMNS = 32
"""Most query columns of a decode tile; more would not fit in registers."""

_MAX_WGMMA_HEAD_DIM = 128
"""Sums of 64 rows of larger heads leave a warpgroup too few of its 168 registers a thread."""

_MAX_PARTIAL_BYTES = 128 * 2**20
"""Most bytes of partial results that a decode call may ask for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTile:
    """A tile of the decode kernel: up to ``queries`` tokens of one row, one KV head.

    The logits are held transposed, context tokens by query columns, since a group of query heads
    fills 8 columns better than the 16 rows of the tensor core's other operand.

    Attributes:
      queries: query tokens of a row.
      columns: queries times heads per KV head, rounded up to what the instruction takes.
      row_warps: warps along the rows of both products, the other factor of 4 along the columns.
      chunk: context tokens of one pipeline stage.
      stages: pipeline stages.
      swizzle: width in bytes of the tiles in which keys and values lie in shared memory.
      split: context tokens of one piece of work, a multiple of ``chunk``.
    """

    queries: int
    columns: int
    row_warps: int
    chunk: int
    stages: int
    swizzle: int
    split: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTile:
    """A tile of a prefill kernel: ``queries`` tokens of one row times the heads of one KV head, in
    ``rows`` rows, 16 per row warp; the rest as for ``DecodeTile``.

    Attributes:
      instruction: ``"mma_sync"`` (``prefill``) or ``"wgmma"`` (``prefill_wgmma``).
    """

    instruction: str = "mma_sync"
    queries: int
    rows: int
    row_warps: int
    chunk: int
    stages: int
    swizzle: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All static choices of one attention call; ``group`` is query heads per KV head."""

    num_kv_heads: int
    group: int
    decode: DecodeTile
    prefill: PrefillTile


def choose_swizzle(head_dim: int, copy_tokens: int, *, tma: bool) -> int:
    """The widest tiles, in bytes of a row of 8, in which ``copy_tokens`` tokens of 16-bit elements
    can be copied to shared memory.

    TMA takes any that divide the row. ``cp.async`` deals whole tiles out to the four warps.

    Raises:
      NotImplementedError: ``cp.async`` cannot deal them out.
    """
    for width in (128, 64, 32):
        columns, rest = divmod(head_dim * 2, width)
        if not rest and (tma or copy_tokens % 32 == 0 or columns % (32 // copy_tokens) == 0):
            return width
    raise NotImplementedError(
        f"paged_attention: implementation 'pallas' does not support block_size {copy_tokens} with "
        f"head_dim {head_dim} on GPUs before Hopper; use larger blocks"
    )


def shared_bytes(tile: DecodeTile | PrefillTile, head_dim: int, itemsize: int = 2) -> int:
    """Shared memory of one thread block, about: pipeline, weights, reductions, barriers."""
    rows = tile.columns if isinstance(tile, DecodeTile) else tile.rows
    pipeline = 2 * tile.stages * tile.chunk * head_dim * itemsize
    queries = rows * head_dim * itemsize
    if isinstance(tile, PrefillTile) and tile.instruction == "wgmma":
        return pipeline + queries + 1024
    if isinstance(tile, DecodeTile) or head_dim <= 128:
        queries = 0
    return pipeline + queries + rows * tile.chunk * itemsize + 4096


def blocks_per_sm(tile: DecodeTile | PrefillTile, head_dim: int, target: Target) -> int:
    """Thread blocks to start per SM: no more than fit on it at a time, by shared memory and by the
    registers that the compiler needs, since the work is dealt out evenly to all of them.
    """
    by_shared = target.shared_bytes // (shared_bytes(tile, head_dim) + 1024)
    by_registers = 2
    if isinstance(tile, PrefillTile) and tile.instruction == "wgmma":
        by_registers = 1
    if isinstance(tile, DecodeTile) and (tile.columns <= 16 or head_dim == 80):
        by_registers = 3
    return max(1, min(by_registers, by_shared))


def choose_config(
    *,
    num_rows: int,
    max_context: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: jax.typing.DTypeLike,
    decode_queries: int,
    target: Target,
) -> Config:
    """The tiles for static shapes.

    Raises:
      NotImplementedError: the kernels do not support the combination; names the option.
    """
    group = num_heads // num_kv_heads
    _check_supported(head_dim, block_size, group, jnp.dtype(dtype), decode_queries, target)
    shape = {
        "batch": num_rows,
        "max_context": max_context,
        "num_kv_heads": num_kv_heads,
        "group": group,
        "head_dim": head_dim,
        "block_size": block_size,
    }
    chip = None if target.interpret else tuning.current_chip()
    decode = _decode_tile(num_rows, max_context, num_kv_heads, group, head_dim, decode_queries)
    swizzle = choose_swizzle(head_dim, min(block_size, decode.chunk), tma=target.tma)
    decode = dataclasses.replace(decode, swizzle=swizzle)
    tuned = tuning.lookup("paged_attention_decode", chip, shape)
    decode = dataclasses.replace(decode, **tuned)
    tuned = tuning.lookup("paged_attention_prefill", chip, shape)
    best = "wgmma" if target.wgmma and head_dim <= _MAX_WGMMA_HEAD_DIM else "mma_sync"
    if tuned.pop("instruction", best) == "wgmma":
        prefill = _wgmma_tile(group, head_dim, target)
    else:
        prefill = _prefill_tile(group, head_dim)
    prefill = dataclasses.replace(prefill, swizzle=swizzle, **tuned)
    return Config(num_kv_heads=num_kv_heads, group=group, decode=decode, prefill=prefill)


def _prefill_tile(group: int, head_dim: int) -> PrefillTile:
    # Sums of 64 rows of the largest heads would take half of all registers.
    row_warps = 4 if head_dim <= 128 else 2
    return PrefillTile(
        queries=16 * row_warps // group,
        rows=16 * row_warps,
        row_warps=row_warps,
        # For larger heads longer chunks would not leave room in registers.
        chunk=64 if head_dim <= 80 else 32,
        stages=3 if head_dim <= 128 else 2,
        swizzle=128,
    )


def _wgmma_tile(group: int, head_dim: int, target: Target) -> PrefillTile:
    """Two warpgroups of rows, one thread block on an SM.

    Raises:
      ValueError: there is no such kernel; only a wrong tuning table asks for it then.
    """
    if head_dim > _MAX_WGMMA_HEAD_DIM or not (target.wgmma or target.interpret):
        raise ValueError(
            "paged_attention_prefill: a tuning table asks for instruction 'wgmma', which is for "
            f"Hopper and head_dim up to {_MAX_WGMMA_HEAD_DIM}, not {head_dim}"
        )
    rows = 2 * WGMMA_ROWS
    return PrefillTile(
        instruction="wgmma",
        queries=rows // group,
        rows=rows,
        row_warps=rows // 16,
        chunk=64,
        stages=4,
        swizzle=128,
    )


def _check_supported(
    head_dim: int,
    block_size: int,
    group: int,
    dtype: jnp.dtype,
    decode_queries: int,
    target: Target,
) -> None:
    def refuse(option: str, value: object, accepted: object) -> None:
        raise NotImplementedError(
            f"paged_attention: implementation 'pallas' does not support {option} {value}; it "
            f"supports {accepted}"
        )

    if head_dim not in HEAD_DIMS:
        refuse("head_dim", head_dim, HEAD_DIMS)
    if block_size not in BLOCK_SIZES:
        refuse("block_size", block_size, BLOCK_SIZES)
    if group > MAX_GROUP:
        refuse("query heads per KV head", group, f"1 to {MAX_GROUP}")
    if not 1 <= decode_queries <= MAX_DECODE_QUERIES:
        refuse("decode_queries", decode_queries, f"1 to {MAX_DECODE_QUERIES}")
    dtypes = [jnp.bfloat16, jnp.float16]
    if target.interpret:
        # Of no use on a GPU, whose tensor cores multiply at most 19 bits, but it lets tests see
        # the algorithm without its rounding.
        dtypes.append(jnp.float32)
    if dtype not in dtypes:
        refuse("pool dtype", dtype, "bfloat16 and float16")


def _decode_tile(
    num_rows: int,
    max_context: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    decode_queries: int,
) -> DecodeTile:
    # Both products have the head dimension or the chunk along the warps' rows, 16 per warp.
    row_warps = {64: 4, 80: 1, 96: 2, 128: 4, 256: 2}[head_dim]
    step = 8 * 4 // row_warps
    columns = -(-max(1, decode_queries) * group // step) * step
    columns = min(columns, max(_MAX_COLUMNS, step))
    chunk = 64 if head_dim <= 128 else 32
    # Three thread blocks per SM on Hopper, two on A100, and the pipelines full.
    stages = {64: 4, 80: 3, 96: 2, 128: 2, 256: 2}[head_dim]
    split = 512
    while split > 128 and num_rows * num_kv_heads * -(-max_context // split) < 1024:
        split //= 2
    row_bytes = num_rows * num_kv_heads * columns * head_dim * 4
    while split < max_context and row_bytes * -(-max_context // split) > _MAX_PARTIAL_BYTES:
        split *= 2
    return DecodeTile(
        queries=min(columns // group, MAX_DECODE_QUERIES),
        columns=columns,
        row_warps=row_warps,
        chunk=chunk,
        stages=stages,
        swizzle=128,
        split=split,
    )
