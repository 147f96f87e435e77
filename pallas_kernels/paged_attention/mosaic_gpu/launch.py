"""What the launches of the attention kernels have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.mosaic_gpu.config import (
    Config,
    DecodeTile,
    PrefillTile,
    blocks_per_sm,
)
from pallas_kernels.paged_attention.mosaic_gpu.pipeline import Stream
from pallas_kernels.paged_attention.mosaic_gpu.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What is static in one attention call.

    Attributes:
      num_blocks: of a layer of the pool.
      scale, sliding_window, soft_cap: as for ``api.paged_attention``.
      config: the tiles.
      target: what the kernels will run on.
    """

    num_blocks: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    config: Config
    target: Target


def launch(
    body: Callable[..., None],
    *arrays: jax.Array,
    name: str,
    call: Call,
    tile: DecodeTile | PrefillTile,
    out_type: Any,
    scratch_types: list[Any],
    **threads: Any,
) -> Any:
    """Runs ``body(Inputs, outputs and scratch..., call=call, num_ctas=...)`` in as many thread
    blocks as fit on the chip at a time, or as there may be work for.

    Args:
      arrays: queries ``[_, K, _, D]``, key pool, value pool ``[L * N, B, K * D]``, block tables
        ``[R, M]``, ``[1]`` count and ``[I, 4]`` items of the work list, ``[1]`` first block of
        the layer.
      threads: ``num_threads`` and ``thread_name`` of a kernel with several warpgroups.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    most = arrays[5].shape[0] * call.config.num_kv_heads
    fit = call.target.num_sms * blocks_per_sm(tile, arrays[0].shape[3], call.target)
    num_ctas = min(most, fit)

    def run(*refs: Any) -> None:
        inputs = Inputs(*refs[: len(arrays)])
        body(inputs, *refs[len(arrays) :], call=call, num_ctas=num_ctas)

    kernel = plgpu.kernel(
        run,
        grid=(num_ctas,),
        grid_names=("cta",),
        kernel_name=name,
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **threads,
    )
    return kernel(*arrays)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """References to a kernel's inputs; see ``launch``."""

    q: Any
    k_pool: Any
    v_pool: Any
    tables: Any
    count: Any
    items: Any
    first_block: Any

    def stream(
        self,
        stages: tuple[Any, Any, Any, Any],
        call: Call,
        tile: DecodeTile | PrefillTile,
        *,
        row: jax.Array,
        head: jax.Array,
        begin: jax.Array,
        end: jax.Array,
        filled: jax.Array | int = 0,
    ) -> Stream:
        """Keys and values of tokens ``begin`` to ``end`` through ``pipeline.scratch_types``."""
        k_stages, v_stages, k_barriers, v_barriers = stages
        return Stream(
            k_ref=self.k_pool,
            v_ref=self.v_pool,
            table_ref=self.tables,
            k_stages=k_stages,
            v_stages=v_stages,
            k_barriers=k_barriers,
            v_barriers=v_barriers,
            tile=tile,
            target=call.target,
            row=row,
            head=head,
            begin=begin,
            num_chunks=(jnp.maximum(end - begin, 0) + tile.chunk - 1) // tile.chunk,
            first_block=self.first_block[0],
            num_blocks=call.num_blocks,
            head_dim=self.q.shape[3],
            filled=filled,
        )

    def for_each_piece(
        self,
        call: Call,
        num_ctas: int,
        take: Callable[[jax.Array, jax.Array, Any], Any],
        carry: Any = None,
    ) -> Any:
        """``carry = take(item, head, carry)`` for this thread block's share of the work.

        Heads of one item lie side by side in memory, and run side by side.
        """
        num_kv_heads = call.config.num_kv_heads
        cta = lax.axis_index("cta")
        work = self.count[0] * num_kv_heads

        def piece(turn: jax.Array, carry: Any) -> Any:
            index = cta + turn * num_ctas
            return take(index // num_kv_heads, lax.rem(index, num_kv_heads), carry)

        return lax.fori_loop(0, (work - cta + num_ctas - 1) // num_ctas, piece, carry)
