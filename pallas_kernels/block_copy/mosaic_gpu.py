"""Copying, gathering and scattering blocks as Mosaic GPU kernels: one source for all chips.

Work is cut into (layer, chunk of a block) items. A thread block takes items in turn, and a thread
always loads and stores the same elements of a chunk: copies of one item never touch another's
elements, and within an item no thread touches another's. So the order of all thread blocks and
threads is free, and no barrier is needed.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import tuning
from pallas_kernels.mosaic import (
    VECTOR_BYTES,
    WARPGROUP_THREADS,
    copy_params,
    require_mosaic_gpu,
    row_layout,
    store,
)

COPY_NAME, GATHER_NAME, SCATTER_NAME = "copy_blocks", "gather_blocks", "scatter_blocks"

THREAD_BLOCKS = 592
"""Four for each of 148 SMs (B200); enough for the smaller chips too."""

MAX_STAGING_BYTES = 64 * 1024
"""Of shared memory a thread block, for the chunks of all copies: three blocks fit on an SM."""

COPIES_IN_FLIGHT = 8
"""Copies whose chunks are loaded before the first is put into shared memory."""


def chunk_elements(num_elements: int, itemsize: int, limit: int) -> int:
    """Elements of one chunk: a divisor of a block's ``num_elements``, at most ``limit``, that the
    threads share evenly in accesses as wide as they can be; as long as it can be.

    0 when there is none.
    """
    vector = VECTOR_BYTES // itemsize
    while vector:
        unit = WARPGROUP_THREADS * vector
        if num_elements % unit == 0 and unit <= limit:
            units = num_elements // unit
            return unit * next(n for n in range(min(units, limit // unit), 0, -1) if units % n == 0)
        vector //= 2
    return 0


def copy_chunk(num_elements: int, itemsize: int, num_copies: int) -> int:
    """Elements of one staged chunk: one access a thread, and all copies fit in shared memory."""
    one_access = WARPGROUP_THREADS * VECTOR_BYTES // itemsize
    staged = 2 * pl.cdiv(num_copies, COPIES_IN_FLIGHT) * COPIES_IN_FLIGHT  # keys and values
    return chunk_elements(
        num_elements, itemsize, min(one_access, MAX_STAGING_BYTES // (itemsize * staged))
    )


def stream_chunk(num_elements: int, itemsize: int) -> int:
    """Elements of one chunk that goes through registers: up to 4 accesses a thread and pool."""
    found = tuning.lookup(
        GATHER_NAME, tuning.current_chip(), {"num_elements": num_elements, "itemsize": itemsize}
    )
    accesses = found.get("accesses_per_thread") or 4
    limit = accesses * WARPGROUP_THREADS * VECTOR_BYTES // itemsize
    return chunk_elements(num_elements, itemsize, limit)


def copy_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    src: jax.Array,
    dst: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.copy_blocks``. In place, without any memory beside the pools.

    A thread block reads its chunk of every source into shared memory, then writes every
    destination's. Where too many copies are asked for to fit there, the blocks go through a
    gathered buffer in device memory.
    """
    require_mosaic_gpu(COPY_NAME)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_layers, num_blocks, *block_shape = k_pool.shape
    num_elements, num_copies = _size(block_shape), src.shape[0]
    if num_copies == 0:
        return k_pool, v_pool
    chunk = copy_chunk(num_elements, k_pool.dtype.itemsize, num_copies)
    if not chunk:
        valid = (src >= 0) & (src < num_blocks)
        target = jnp.where(valid, dst, num_blocks)
        buffers = gather_blocks(k_pool, v_pool, src)
        return scatter_blocks(k_pool, v_pool, *buffers, target)
    layout = row_layout(chunk, k_pool.dtype)
    groups = pl.cdiv(num_copies, COPIES_IN_FLIGHT)

    def pair(src_ref, dst_ref, i):
        """The i-th pair (past the end the last once more), block ids within the pool."""
        at = jnp.minimum(i, num_copies - 1)
        source, target = src_ref[at], dst_ref[at]
        real = _within(source, num_blocks) & _within(target, num_blocks)
        return jnp.where(real, source, 0), jnp.where(real, target, 0), real

    def body(src_ref, dst_ref, k_ref, v_ref, k_staging, v_staging):
        pools = ((k_ref, k_staging), (v_ref, v_staging))

        def copy_group(layer, part, group, write):
            copies = [group * COPIES_IN_FLIGHT + i for i in range(COPIES_IN_FLIGHT)]
            pairs = [pair(src_ref, dst_ref, i) for i in copies]
            wanted = jnp.bool_(False)
            for _, _, real in pairs:
                wanted |= real

            def read():
                # Every load is under way before the first is used; a dropped pair reads block 0.
                loaded = [
                    plgpu.load(ref.at[layer, source, part], layout=layout, optimized=False)
                    for source, _, _ in pairs
                    for ref, _ in pools
                ]
                for j, i in enumerate(copies):
                    for (_, staging), x in zip(pools, loaded[2 * j : 2 * j + 2], strict=True):
                        store(staging.at[i], x)

            def write_out():
                for i, (_, target, real) in zip(copies, pairs, strict=True):

                    @pl.when(real)
                    def _(i=i, target=target):
                        for ref, staging in pools:
                            x = plgpu.load(staging.at[i], layout=layout, optimized=False)
                            store(ref.at[layer, target, part], x)

            pl.when(wanted)(write_out if write else read)

        def item(layer, part):
            for write in (False, True):

                @pl.loop(0, groups)
                def _(group, write=write):
                    copy_group(layer, part, group, write)

        _for_each_item(item, num_layers, num_elements, chunk)

    staging = plgpu.SMEM((groups * COPIES_IN_FLIGHT, chunk), k_pool.dtype)
    kernel = plgpu.kernel(
        body,
        **_grid(num_layers * num_elements // chunk),
        scratch_types=[staging, staging],
        kernel_name=COPY_NAME,
        compiler_params=copy_params(),
    )
    pools = tuple(x.reshape(num_layers, num_blocks, num_elements) for x in (k_pool, v_pool))
    pools = pl.run_state(lambda refs: kernel(src, dst, *refs))(pools)
    return tuple(x.reshape(k_pool.shape) for x in pools)


def gather_blocks(
    k_pool: jax.Array, v_pool: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See ``api.gather_blocks``."""
    require_mosaic_gpu(GATHER_NAME)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_layers, num_blocks, *block_shape = k_pool.shape
    num_elements, count = _size(block_shape), blocks.shape[0]
    shape = (count, num_layers, *block_shape)
    if count == 0:
        return jnp.zeros(shape, k_pool.dtype), jnp.zeros(shape, v_pool.dtype)
    chunk = _stream_chunk_or_refuse(GATHER_NAME, num_elements, k_pool.dtype.itemsize)
    layout = row_layout(chunk, k_pool.dtype)

    def body(blocks_ref, k_ref, v_ref, *buffers):
        def place(row):
            i, layer = lax.div(row, num_layers), lax.rem(row, num_layers)
            return i, layer, blocks_ref[i]

        def copy(row, part):
            i, layer, block = place(row)

            @pl.when(_within(block, num_blocks))
            def _():
                loaded = [
                    plgpu.load(ref.at[layer, block, part], layout=layout, optimized=False)
                    for ref in (k_ref, v_ref)
                ]
                for buffer, x in zip(buffers, loaded, strict=True):
                    store(buffer.at[i, layer, part], x)

        def zero(row, part):
            i, layer, block = place(row)

            @pl.when(jnp.logical_not(_within(block, num_blocks)))
            def _():
                zeros = plgpu.layout_cast(jnp.zeros((chunk,), k_pool.dtype), layout)
                for buffer in buffers:
                    store(buffer.at[i, layer, part], zeros)

        # Two loops: as two branches of one, the compiler merges their stores into one of a
        # selected value, and makes each 16-byte store eight of 2 bytes.
        for item in (copy, zero):
            _for_each_item(item, count * num_layers, num_elements, chunk)

    flat = jax.ShapeDtypeStruct((count, num_layers, num_elements), k_pool.dtype)
    kernel = plgpu.kernel(
        body,
        **_grid(count * num_layers * num_elements // chunk),
        out_type=(flat, flat),
        kernel_name=GATHER_NAME,
        compiler_params=copy_params(),
    )
    pools = (x.reshape(num_layers, num_blocks, num_elements) for x in (k_pool, v_pool))
    return tuple(x.reshape(shape) for x in kernel(blocks, *pools))


def scatter_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_blocks: jax.Array,
    v_blocks: jax.Array,
    blocks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.scatter_blocks``. In place."""
    require_mosaic_gpu(SCATTER_NAME)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_layers, num_blocks, *block_shape = k_pool.shape
    num_elements, count = _size(block_shape), blocks.shape[0]
    if count == 0:
        return k_pool, v_pool
    chunk = _stream_chunk_or_refuse(SCATTER_NAME, num_elements, k_pool.dtype.itemsize)
    layout = row_layout(chunk, k_pool.dtype)

    def body(blocks_ref, k_blocks_ref, v_blocks_ref, k_ref, v_ref):
        def item(row, part):
            i, layer = lax.div(row, num_layers), lax.rem(row, num_layers)
            block = blocks_ref[i]

            @pl.when(_within(block, num_blocks))
            def _():
                loaded = [
                    plgpu.load(ref.at[i, layer, part], layout=layout, optimized=False)
                    for ref in (k_blocks_ref, v_blocks_ref)
                ]
                for ref, x in zip((k_ref, v_ref), loaded, strict=True):
                    store(ref.at[layer, block, part], x)

        _for_each_item(item, count * num_layers, num_elements, chunk)

    kernel = plgpu.kernel(
        body,
        **_grid(count * num_layers * num_elements // chunk),
        kernel_name=SCATTER_NAME,
        compiler_params=copy_params(),
    )
    buffers = (x.reshape(count, num_layers, num_elements) for x in (k_blocks, v_blocks))
    operands = (blocks, *buffers)
    pools = tuple(x.reshape(num_layers, num_blocks, num_elements) for x in (k_pool, v_pool))
    pools = pl.run_state(lambda refs: kernel(*operands, *refs))(pools)
    return tuple(x.reshape(k_pool.shape) for x in pools)


def _grid(num_items: int) -> dict:
    return dict(grid=(min(num_items, THREAD_BLOCKS),), grid_names=("items",))


def _for_each_item(item, num_rows: int, num_elements: int, chunk: int) -> None:
    """Call ``item(row, part)`` for this thread block's share of all rows and chunks."""
    chunks = num_elements // chunk
    num_items = num_rows * chunks
    stride = min(num_items, THREAD_BLOCKS)
    first = lax.axis_index("items")

    @pl.loop(0, pl.cdiv(num_items - first, stride))
    def _(trip):
        index = first + trip * stride
        item(lax.div(index, chunks), pl.ds(lax.rem(index, chunks) * chunk, chunk))


def _within(block: jax.Array, num_blocks: int) -> jax.Array:
    return (block >= 0) & (block < num_blocks)


def _size(block_shape: list[int]) -> int:
    block_size, num_kv_heads, head_dim = block_shape
    return block_size * num_kv_heads * head_dim


def _stream_chunk_or_refuse(operation: str, num_elements: int, itemsize: int) -> int:
    chunk = stream_chunk(num_elements, itemsize)
    if not chunk:
        raise NotImplementedError(
            f"{operation}: implementation 'pallas' needs blocks (block_size * num_kv_heads * "
            f"head_dim) of a multiple of {WARPGROUP_THREADS} elements, got {num_elements}"
        )
    return chunk
