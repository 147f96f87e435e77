"""Streaming a row's keys and values, block by block, into shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.mosaic_gpu.config import DecodeTile, PrefillTile
from pallas_kernels.paged_attention.mosaic_gpu.target import Target

LOG2E = 1.4426950408889634
HIDDEN = -1e30
"""Logit of what a query may not see. Finite, so that a query may begin with chunks it sees nothing
of: what they add has weight exp2(HIDDEN - real) == 0 as soon as a real logit appears."""


def tiled(shape: tuple[int, ...], dtype: Any, row_bytes: int):
    """Shared memory for rows that the tensor cores read, swizzled against bank conflicts."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    width = row_bytes // 2
    if jnp.dtype(dtype).itemsize != 2:  # Only the interpreter goes there; any tile will do.
        return plgpu.SMEM(shape, dtype)
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(row_bytes))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def scratch_types(tile: DecodeTile | PrefillTile, block_size: int, head_dim: int, dtype: Any):
    """The stages of keys and of values, and a barrier for each stage of both."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = (tile.stages, tile.chunk, head_dim)
    stages = tiled(shape, dtype, tile.swizzle)
    arrivals = copies_per_chunk(tile.chunk, block_size)
    barrier = plgpu.Barrier(num_arrivals=arrivals, num_barriers=tile.stages)
    return [stages, stages, barrier, barrier]


def lane_slices(head_dim: int, swizzle: int, most: int) -> list[Any]:
    """The head dimension in slices of whole tiles, ``most`` elements at most: as much of the keys
    as is in registers at a time.
    """
    tile = swizzle // 2
    step = most // tile * tile
    return [pl.ds(i, min(step, head_dim - i)) for i in range(0, head_dim, step)]


def copies_per_chunk(chunk: int, block_size: int) -> int:
    """Copies that fill a chunk of the keys, or of the values."""
    return max(1, chunk // block_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """Keys and values of one KV head of one row, from token ``begin`` on, in chunks.

    ``filled`` counts the chunks that went through the stages before these; 0 where every stream
    begins at the first stage.

    With TMA a stage's barrier tells when its copies have landed, and a stage is filled again as
    soon as its chunk has been used. With ``cp.async`` the copies are waited for in order, and the
    stage of the chunk before is filled after that wait, since only then every warp is done with it.
    """

    k_ref: Any
    v_ref: Any
    table_ref: Any
    k_stages: Any
    v_stages: Any
    k_barriers: Any
    v_barriers: Any
    tile: DecodeTile | PrefillTile
    target: Target
    row: jax.Array
    head: jax.Array
    begin: jax.Array
    num_chunks: jax.Array
    first_block: jax.Array
    num_blocks: int
    head_dim: int
    filled: jax.Array | int = 0

    def slot(self, i: jax.Array | int) -> jax.Array:
        """The stage of chunk ``i``."""
        return lax.rem(jnp.int32(i) + self.filled, jnp.int32(self.tile.stages))

    def blocks(self, i: jax.Array | int) -> list[jax.Array]:
        """The pool's blocks that chunk ``i`` lies in. Entries past the needed ones may hold
        anything: they are kept within the table and the pool, and what they bring is masked.
        """
        block_size, max_blocks = self.k_ref.shape[1], self.table_ref.shape[1]
        found = []
        for j in range(copies_per_chunk(self.tile.chunk, block_size)):
            token = self.begin + i * self.tile.chunk + j * block_size
            column = jnp.minimum(token // block_size, max_blocks - 1)
            block = jnp.clip(self.table_ref[self.row, column], 0, self.num_blocks - 1)
            found.append(block + self.first_block)
        return found

    def copy(self, i: jax.Array | int, blocks: list[jax.Array]) -> None:
        """Starts the copies of chunk ``i``, which lies in ``blocks``."""
        self.copy_keys(i, blocks, self.slot(i))
        self.copy_values(i, blocks, self.slot(i))

    def copy_keys(self, i: jax.Array | int, blocks: list[jax.Array], slot: jax.Array) -> None:
        self._copy(self.k_ref, self.k_stages, self.k_barriers, i, blocks, slot)

    def copy_values(self, i: jax.Array | int, blocks: list[jax.Array], slot: jax.Array) -> None:
        self._copy(self.v_ref, self.v_stages, self.v_barriers, i, blocks, slot)

    def _copy(
        self,
        source: Any,
        stages: Any,
        barriers: Any,
        i: jax.Array | int,
        blocks: list[jax.Array],
        slot: jax.Array,
    ) -> None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        block_size, chunk = self.k_ref.shape[1], self.tile.chunk
        size = min(block_size, chunk)
        offset = 0 if block_size <= chunk else lax.rem(self.begin + i * chunk, block_size)
        lanes = pl.ds(self.head * self.head_dim, self.head_dim)
        for j, block in enumerate(blocks):
            plgpu.copy_gmem_to_smem(
                source.at[block, pl.ds(offset, size), lanes],
                stages.at[slot, pl.ds(j * size, size)],
                barriers.at[slot] if self.target.tma else None,
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def start(self) -> None:
        """Fills the pipeline."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self.target.tma:
            # The stages were last read by this thread block's own threads, for the piece before:
            # those reads come before the copies.
            plgpu.commit_smem()
        ahead = self.tile.stages if self.target.tma else self.tile.stages - 1
        for i in range(ahead):

            @pl.when(i < self.num_chunks)
            def _(i=i):
                self.copy(i, self.blocks(i))

    def wait_keys(self, i: jax.Array) -> None:
        """Waits for the keys of chunk ``i``; with ``cp.async`` for its values too."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        stages = self.tile.stages
        if self.target.tma:
            plgpu.barrier_wait(self.k_barriers.at[self.slot(i)])
            return
        # Each copy is a group of its own; at most the chunks after i may still be on their way.
        per_chunk = 2 * copies_per_chunk(self.tile.chunk, self.k_ref.shape[1])
        full = i + stages - 1 <= self.num_chunks

        @pl.when(full)
        def _():
            plgpu.wait_gmem_to_smem((stages - 2) * per_chunk)

        @pl.when(jnp.logical_not(full))
        def _():
            plgpu.wait_gmem_to_smem(0)

        ahead = i + stages - 1

        @pl.when(ahead < self.num_chunks)
        def _():
            self.copy(ahead, self.blocks(ahead))

    def wait_values(self, i: jax.Array) -> None:
        """Waits for the values of chunk ``i``."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self.target.tma:
            plgpu.barrier_wait(self.v_barriers.at[self.slot(i)])

    def upcoming(self, i: jax.Array) -> list[jax.Array] | None:
        """Table entries of the chunk that takes chunk ``i``'s stage, read before ``i`` is worked
        on so that the reads' latency is hidden behind that work.
        """
        return self.blocks(i + self.tile.stages) if self.target.tma else None

    def advance(self, i: jax.Array, upcoming: list[jax.Array] | None) -> None:
        """Chunk ``i`` has been used: its stage is filled again."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if upcoming is None:
            return
        later = i + self.tile.stages

        @pl.when(later < self.num_chunks)
        def _():
            plgpu.commit_smem()
            self.copy(later, upcoming)


def matrix_product(target: Target) -> Callable:
    """``plgpu.mma``, or what it computes where the interpreter runs, which has no rule for it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not target.interpret:
        return plgpu.mma

    def product(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + lax.dot(
            a, b, precision=lax.Precision.HIGHEST, preferred_element_type=acc.dtype
        )

    return product


def to_logits(product: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Logits times log2(e), so that weights are exp2 of them."""
    if soft_cap is None:
        return product * (scale * LOG2E)
    # tanh x = 1 - 2 / (1 + exp 2x). The hardware's own tanh has only 11 bits.
    grown = jnp.exp2(product * (scale / soft_cap * 2 * LOG2E))
    return soft_cap * LOG2E - (2 * soft_cap * LOG2E) / (grown + 1.0)
