"""The GPU kernels that copy, gather and scatter blocks, in Pallas's interpreter: bit for bit what
the reference does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import OLD_JAX, OLD_JAX_REASON, interpreted, planted

from pallas_kernels import NULL, copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.block_copy import mosaic_gpu, reference

needs_mosaic = pytest.mark.skipif(OLD_JAX, reason=OLD_JAX_REASON)
L, N = 2, 9
# A swap, a chain (6 goes to 7 while 7 goes to 8), the first block and the last, dropped pairs of
# every kind among and after them.
SRC = [1, 2, NULL, 5, 6, 7, 3, N, 4, 0, -1]
DST = [2, 1, 5, 0, 7, 8, NULL, 3, -1, 4, N]


@pytest.fixture(autouse=True)
def few_thread_blocks(monkeypatch):
    """So that each takes several items in turn, and copies come in several groups."""
    monkeypatch.setattr(mosaic_gpu, "THREAD_BLOCKS", 3)
    monkeypatch.setattr(mosaic_gpu, "COPIES_IN_FLIGHT", 4)


def pools(*, block_size=8, heads=2, head_dim=64, dtype=jnp.bfloat16, seed=0):
    """Random bits, NaNs of every kind among them: only copied bits can be right."""
    shape = (L, N, block_size, heads, head_dim)
    keys = jax.random.split(jax.random.key(seed), 2)
    kind = jnp.uint32 if jnp.dtype(dtype).itemsize == 4 else jnp.uint16
    bits = (jax.random.bits(key, shape, kind) for key in keys)
    return tuple(x if dtype == jnp.uint16 else jax.lax.bitcast_convert_type(x, dtype) for x in bits)


def ids(values):
    return jnp.asarray(values, jnp.int32)


def run(function, *arguments):
    with interpreted():
        return jax.block_until_ready(jax.jit(function)(*arguments))


def assert_same_bits(got, expected):
    for result, wanted in zip(got, expected, strict=True):
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        kind = f"u{wanted.dtype.itemsize}"
        np.testing.assert_array_equal(np.asarray(result).view(kind), np.asarray(wanted).view(kind))


GRID = [
    dict(block_size=8, heads=1, head_dim=64, dtype=jnp.bfloat16),
    dict(block_size=16, heads=3, head_dim=64, dtype=jnp.bfloat16),
    dict(block_size=8, heads=1, head_dim=256, dtype=jnp.float32),
]
# The interpreter takes milliseconds for each access, so larger blocks take long.
SLOW_GRID = [
    dict(block_size=32, heads=1, head_dim=80, dtype=jnp.float16),
    dict(block_size=64, heads=1, head_dim=96, dtype=jnp.uint16),
    dict(block_size=128, heads=1, head_dim=64, dtype=jnp.float32),
    dict(block_size=16, heads=8, head_dim=128, dtype=jnp.bfloat16),
]


def names(options):
    return "-".join(str(value) for value in options.values())


GRID += [pytest.param(options, marks=pytest.mark.slow) for options in SLOW_GRID]


@needs_mosaic
@pytest.mark.parametrize("options", GRID, ids=names)
def test_copy(options):
    arguments = (*pools(**options), ids(SRC), ids(DST))
    assert_same_bits(run(mosaic_gpu.copy_blocks, *arguments), reference.copy_blocks(*arguments))


@needs_mosaic
@pytest.mark.parametrize("count", [0, 1, 17])
def test_number_of_copies(count):
    if count <= 1:
        src, dst = [4] * count, [5] * count
    else:
        src, dst = [*[NULL] * (count - len(SRC)), *SRC], [*[NULL] * (count - len(DST)), *DST]
    arguments = (*pools(), ids(src), ids(dst))
    assert_same_bits(run(mosaic_gpu.copy_blocks, *arguments), reference.copy_blocks(*arguments))


@needs_mosaic
def test_too_many_copies_for_shared_memory_go_through_a_buffer(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "MAX_STAGING_BYTES", 512)
    assert mosaic_gpu.copy_chunk(1024, 2, len(SRC)) == 0
    arguments = (*pools(), ids(SRC), ids(DST))
    assert_same_bits(run(mosaic_gpu.copy_blocks, *arguments), reference.copy_blocks(*arguments))


@needs_mosaic
def test_copies_of_nothing_change_nothing_and_two_runs_give_the_same_bits():
    k_pool, v_pool = pools()
    nothing = ids([NULL] * 10)
    assert_same_bits(run(mosaic_gpu.copy_blocks, k_pool, v_pool, nothing, nothing), pools())
    arguments = (k_pool, v_pool, ids(SRC), ids(DST))
    assert_same_bits(*(run(mosaic_gpu.copy_blocks, *arguments) for _ in range(2)))


@needs_mosaic
@pytest.mark.parametrize("options", GRID, ids=names)
def test_gather_and_scatter(options):
    k_pool, v_pool = pools(**options)
    blocks = ids([0, 3, NULL, N - 1, 3, -1, N])
    got = run(mosaic_gpu.gather_blocks, k_pool, v_pool, blocks)
    assert_same_bits(got, reference.gather_blocks(k_pool, v_pool, blocks))
    arguments = (*pools(seed=1, **options), *got, ids([4, NULL, 2, 0, N - 1, -1, N]))
    assert_same_bits(
        run(mosaic_gpu.scatter_blocks, *arguments), reference.scatter_blocks(*arguments)
    )


IMPLEMENTATIONS = ["reference", "xla", pytest.param("pallas", marks=needs_mosaic)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_swapping_out_and_in_again(implementation):
    """Through the dispatcher: blocks gathered, the pool overwritten, the blocks put elsewhere."""
    k_pool, v_pool = pools(dtype=jnp.uint16)  # as the CPU stores bfloat16
    old, new = ids([7, NULL, 0, 2]), ids([1, NULL, 8, 3])

    def swap(k_pool, v_pool):
        buffers = gather_blocks(k_pool, v_pool, old, implementation=implementation)
        zeros = jnp.zeros_like(k_pool)
        return *buffers, *scatter_blocks(zeros, zeros, *buffers, new, implementation=implementation)

    got = run(swap, k_pool, v_pool) if implementation == "pallas" else jax.jit(swap)(k_pool, v_pool)
    for pool, buffer, after in zip((k_pool, v_pool), got[:2], got[2:], strict=True):
        pool, buffer, after = (np.asarray(x).view("u2") for x in (pool, buffer, after))
        expected, expected_buffer = np.zeros_like(pool), np.zeros_like(buffer)
        for i, (source, target) in enumerate(zip(old, new, strict=True)):
            if source != NULL:
                expected_buffer[i] = pool[:, source]
                expected[:, target] = pool[:, source]
        np.testing.assert_array_equal(buffer, expected_buffer)
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("implementation", ["xla"])
def test_scatter_is_in_place(implementation):
    k_pool, v_pool = pools()
    buffers = gather_blocks(k_pool, v_pool, ids([1]))
    scatter = jax.jit(scatter_blocks, donate_argnums=(0, 1), static_argnames="implementation")
    lowered = scatter.lower(k_pool, v_pool, *buffers, ids([2]), implementation=implementation)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * k_pool.nbytes
    assert memory.temp_size_in_bytes < k_pool.nbytes


def test_wrong_arguments_are_refused():
    k_pool, v_pool = pools()
    buffers = gather_blocks(k_pool, v_pool, ids([1, 2]))
    with pytest.raises(ValueError, match="must be"):
        scatter_blocks(k_pool, v_pool, *buffers, ids([1]))
    with pytest.raises(ValueError, match="type"):
        scatter_blocks(k_pool, v_pool, *(x.astype(jnp.float32) for x in buffers), ids([1, 2]))
    with pytest.raises(ValueError, match="must be"):
        gather_blocks(k_pool, v_pool, ids([[1]]))


@needs_mosaic
def test_through_the_dispatcher():
    arguments = (*pools(), ids(SRC), ids(DST))
    got = run(lambda *a: copy_blocks(*a, implementation="pallas"), *arguments)
    assert_same_bits(got, reference.copy_blocks(*arguments))


@pytest.mark.skipif(not OLD_JAX, reason="this jax has the kernels")
def test_an_old_jax_is_refused_by_name():
    k_pool, v_pool = pools()
    with pytest.raises(NotImplementedError, match=r"copy_blocks.*jax 0\.11"):
        copy_blocks(k_pool, v_pool, ids(SRC), ids(DST), implementation="pallas")


STAGED = "plgpu.load(staging.at[i], layout=layout, optimized=False)"
# Fault: (function, what is changed in the source). Each must be found by the comparisons above, or
# by the interpreter itself.
FAULTS = {
    "a destination is written before all sources are read": (
        "copy_blocks",
        (
            "            for write in (False, True):\n\n"
            "                @pl.loop(0, groups)\n"
            "                def _(group, write=write):\n"
            "                    copy_group(layer, part, group, write)\n",
            "            @pl.loop(0, groups)\n"
            "            def _(group):\n"
            "                for write in (False, True):\n"
            "                    copy_group(layer, part, group, write)\n",
        ),
    ),
    "sources are not read": ("copy_blocks", ("for write in (False, True)", "for write in (True,)")),
    "dropped pairs are copied": ("copy_blocks", ("@pl.when(real)\n", "@pl.when(i >= 0)\n")),
    "only the destination is checked": (
        "copy_blocks",
        ("_within(source, num_blocks) & ", ""),
    ),
    "only the source is checked": ("copy_blocks", ("& _within(target, num_blocks)", "")),
    "ids are read past their end": ("copy_blocks", ("jnp.minimum(i, num_copies - 1)", "i")),
    "the last group is missing": (
        "copy_blocks",
        ("pl.cdiv(num_copies, COPIES_IN_FLIGHT)\n\n", "num_copies // COPIES_IN_FLIGHT\n\n"),
    ),
    "the first pair's chunk for all": ("copy_blocks", (STAGED, STAGED.replace("at[i]", "at[0]"))),
    "staging too small": ("copy_blocks", ("(groups * COPIES_IN_FLIGHT, chunk)", "(groups, chunk)")),
    "source and destination exchanged": (
        "copy_blocks",
        ("src_ref[at], dst_ref[at]", "dst_ref[at], src_ref[at]"),
    ),
    "keys and values share a staging buffer": (
        "copy_blocks",
        ("(v_ref, v_staging)", "(v_ref, k_staging)"),
    ),
    "a block past the end counts as real": (
        "copy_blocks",
        ("block < num_blocks", "block <= num_blocks"),
    ),
    "negative ids count as real": ("copy_blocks", ("(block >= 0) &", "")),
    "the last block does not count as real": (
        "copy_blocks",
        ("block < num_blocks", "block < num_blocks - 1"),
    ),
    "each thread block takes one item only": (
        "copy_blocks",
        ("@pl.loop(0, pl.cdiv(num_items - first, stride))", "@pl.loop(0, 1)"),
    ),
    "all items are of the first layer": (
        "copy_blocks",
        ("item(lax.div(index, chunks)", "item(0 * index"),
    ),
    "all items are the first chunk": (
        "copy_blocks",
        ("lax.rem(index, chunks) * chunk", "0 * index"),
    ),
    "gather leaves dropped entries as they are": (
        "gather_blocks",
        ("for item in (copy, zero)", "for item in (copy,)"),
    ),
    "gather zeroes real entries": (
        "gather_blocks",
        ("@pl.when(jnp.logical_not(_within(block, num_blocks)))", "@pl.when(block >= 0)"),
    ),
    "gather swaps layers and entries": (
        "gather_blocks",
        ("lax.div(row, num_layers), lax.rem(row, num_layers)\n            return",
         "lax.rem(row, num_layers), lax.div(row, num_layers)\n            return"),
    ),
    "scatter writes dropped entries": (
        "scatter_blocks",
        ("            @pl.when(_within(block, num_blocks))\n            def _():\n"
         "                loaded = [\n                    plgpu.load(ref.at[i",
         "            @pl.when(i >= 0)\n            def _():\n"
         "                loaded = [\n                    plgpu.load(ref.at[i"),
    ),
    "scatter exchanges keys and values": (
        "scatter_blocks",
        ("zip((k_ref, v_ref), loaded", "zip((v_ref, k_ref), loaded"),
    ),
}  # fmt: skip


# Of the same kind as another one: the slow lane plants these, too.
ALIKE = {
    "only the destination is checked",
    "only the source is checked",
    "the first pair's chunk for all",
    "source and destination exchanged",
    "a block past the end counts as real",
    "negative ids count as real",
    "the last block does not count as real",
    "each thread block takes one item only",
    "all items are of the first layer",
    "all items are the first chunk",
    "gather swaps layers and entries",
}
assert set(FAULTS) > ALIKE


def check(module, name):
    function = getattr(module, name)
    k_pool, v_pool = pools(heads=4)
    if name == "copy_blocks":
        arguments = (k_pool, v_pool, ids(SRC), ids(DST))
    elif name == "gather_blocks":
        arguments = (k_pool, v_pool, ids(SRC))
    else:
        arguments = (k_pool, v_pool, *reference.gather_blocks(k_pool, v_pool, ids(SRC)), ids(DST))
    assert_same_bits(run(function, *arguments), getattr(reference, name)(*arguments))


def planted_module(*edits):
    """With few threads' worth of everything, so that every loop turns more than once."""
    module = planted(mosaic_gpu, *edits)
    module.THREAD_BLOCKS, module.COPIES_IN_FLIGHT = 3, 4
    return module


@needs_mosaic
@pytest.mark.parametrize(
    "fault", [pytest.param(x, marks=[pytest.mark.slow] * (x in ALIKE)) for x in FAULTS]
)
def test_a_planted_fault_is_found(fault):
    name, edit = FAULTS[fault]
    module = planted_module(edit)
    with pytest.raises(Exception, match=r".") as found:
        check(module, name)
    assert not isinstance(found.value, NameError | TypeError | AttributeError), found.value


@needs_mosaic
@pytest.mark.parametrize("name", ["copy_blocks", "gather_blocks", "scatter_blocks"])
def test_without_a_fault_the_planted_copy_is_right(name):
    check(planted_module(), name)
