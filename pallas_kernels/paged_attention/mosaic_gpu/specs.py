"""The calls of the attention kernels that the compile gate checks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.paged_attention.mosaic_gpu import decode, entry, prefill, prefill_wgmma
from pallas_kernels.paged_attention.mosaic_gpu.config import DecodeTile, PrefillTile, choose_config
from pallas_kernels.paged_attention.mosaic_gpu.launch import Call
from pallas_kernels.paged_attention.mosaic_gpu.target import Target
from pallas_kernels.pool import pool_shape
from pallas_kernels.specs import KernelSpec

_NUM_LAYERS, _NUM_BLOCKS = 2, 1024


def _call(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    layer: jax.Array,
    *,
    only: str | None,
    decode_queries: int,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """The whole attention, or only its decode or prefill kernels."""
    arrays = (block_tables, query_start_loc, seq_lens)
    work = entry.make_metadata(
        query_start_loc,
        seq_lens,
        block_tables,
        num_tokens=q.shape[0],
        num_heads=q.shape[1],
        k_pool=k_pool,
        decode_queries=decode_queries,
    )
    options = dict(scale=q.shape[2] ** -0.5, sliding_window=sliding_window, soft_cap=soft_cap)
    if only is None:
        return entry.paged_attention(
            q, k_pool, v_pool, *arrays, layer=layer, metadata=work, **options
        )
    num_layers, num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    pools = [
        pool.reshape(num_layers * num_blocks, block_size, num_kv_heads * head_dim)
        for pool in (k_pool, v_pool)
    ]
    call = Call(num_blocks=num_blocks, config=work.config, target=entry.find_target(), **options)
    where = (block_tables, layer.reshape(1) * num_blocks, work)
    if only == "decode":
        return entry.decode_rows(q, *pools, *where, call=call)
    return entry.prefill_tiles(q, *pools, *where, out_dtype=q.dtype, call=call)


def _spec(
    case: str,
    chip: str,
    only: str | None,
    *,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    rows: int = 64,
    tokens: int | None = None,
    max_context: int = 4096,
    decode_queries: int = 1,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> KernelSpec:
    tokens = tokens or (rows if only == "decode" else 512)
    num_heads, num_kv_heads = heads
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    pool = shape(pool_shape(_NUM_LAYERS, _NUM_BLOCKS, block_size, num_kv_heads, head_dim))
    integers = ((rows, max_context // block_size), (rows + 1,), (rows,), ())
    config = choose_config(
        num_rows=rows,
        max_context=max_context,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        decode_queries=decode_queries,
        target=Target(tma=chip != "a100", wgmma=chip in tuning.HOPPER),
    )
    on_warpgroups = config.prefill.instruction == "wgmma"
    prefill_name = prefill_wgmma.NAME if on_warpgroups else prefill.NAME
    names = {"decode": (decode.NAME,), "prefill": (prefill_name,)}
    copies = "cp_async16" if chip == "a100" else "tma"
    wgmma = on_warpgroups and only == "prefill"
    return KernelSpec(
        name=f"paged_attention.{case}",
        function=functools.partial(
            _call,
            only=only,
            decode_queries=decode_queries,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        ),
        args=(
            shape((tokens, num_heads, head_dim)),
            pool,
            pool,
            *(jax.ShapeDtypeStruct(x, jnp.int32) for x in integers),
        ),
        kernels=names.get(only, (decode.NAME, prefill_name)),
        require=("wgmma", copies) if wgmma else ("mma_sync", "ldmatrix", copies),
        memory_bound=only == "decode",
        bytes_in_flight=_bytes_in_flight(getattr(config, only or "decode"), head_dim),
    )


def _bytes_in_flight(tile: DecodeTile | PrefillTile, head_dim: int) -> int:
    """While a chunk is worked on, the other stages are being filled with keys and values."""
    return (tile.stages - 1) * 2 * tile.chunk * head_dim * 2


def specs(chip: str) -> list[KernelSpec]:
    """Llama-3-8B and SmolLM2 shapes, every head dimension, and the options."""
    spec: Any = functools.partial(_spec, chip=chip)
    llama, smollm2 = dict(heads=(32, 8), head_dim=128), dict(heads=(9, 3), head_dim=64)
    # Before Hopper small blocks of the odd head dimensions cannot be copied asynchronously.
    odd = 64 if chip == "a100" else 16
    return [
        spec("llama_decode", only="decode", **llama),
        spec("llama_prefill", only="prefill", **llama),
        spec("smollm2_decode", only="decode", **smollm2),
        spec("smollm2_prefill", only="prefill", **smollm2),
        spec("decode_d80", only="decode", heads=(32, 32), head_dim=80, block_size=odd),
        spec("prefill_d80", only="prefill", heads=(32, 32), head_dim=80, block_size=odd),
        spec("decode_d96", only="decode", heads=(32, 32), head_dim=96, block_size=odd),
        spec("prefill_d96", only="prefill", heads=(32, 32), head_dim=96, block_size=odd),
        spec("decode_d256_b8", only="decode", heads=(16, 8), head_dim=256, block_size=8),
        spec("prefill_d256_b8", only="prefill", heads=(16, 8), head_dim=256, block_size=8),
        spec(
            "mixed_f16_group16_b128",
            only=None,
            heads=(16, 1),
            head_dim=128,
            block_size=128,
            dtype=jnp.float16,
        ),
        spec(
            "mixed_window_cap_q8",
            only=None,
            heads=(32, 8),
            head_dim=128,
            block_size=32,
            decode_queries=8,
            sliding_window=1024,
            soft_cap=50.0,
        ),
    ]
