"""Paged attention against a dense float64 computation, and the promises of its contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LAYER, Shape, bits, dense, make_step

from pallas_kernels import init_pool, make_metadata, paged_attention

SCALE = 0.35
BASE = Shape()


@functools.cache
def compiled(shape: Shape, implementation: str, options: tuple = ()):
    return jax.jit(
        functools.partial(
            paged_attention,
            layer=LAYER,
            scale=SCALE,
            implementation=implementation,
            **dict(options),
        )
    )


# Query and context lengths per row. 0 and 1, both sides of every edge of a block (4 or 16), of a
# group of rows (2), of a tile (64) and of a chunk of context (128).
STEPS = {
    "one token": ([1], [1]),
    "decode": ([1] * 11, [1, 2, 3, 4, 5, 8, 9, 127, 128, 129, 17]),
    "decode, whole groups": ([1] * 8, [16, 15, 17, 1, 130, 33, 20, 31]),
    "decode, three left over": ([1] * 11, [40, 7, 64, 1, 2, 65, 63, 31, 3, 12, 16]),
    "decode among empty rows": ([0, 1, 0, 0, 1, 0], [0, 129, 0, 0, 256, 0]),
    "prompt": ([129], [129]),
    "prompt fills the step": ([150], [150]),
    "chunk of a longer prompt": ([65], [256]),
    "mixed": ([1, 64, 1, 7, 63, 1, 2, 1], [130, 64, 1, 57, 191, 128, 2, 20]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", STEPS)
def test_equals_dense(name, implementation):
    step = make_step(BASE, *STEPS[name], garbage=True)
    got = compiled(BASE, implementation)(*step.arrays)
    np.testing.assert_allclose(got, dense(BASE, step, scale=SCALE), atol=3e-6)


GRID = {
    "window 1": (BASE, {"sliding_window": 1}),
    "window 5": (BASE, {"sliding_window": 5}),
    "window 130": (BASE, {"sliding_window": 130}),
    "soft cap": (BASE, {"soft_cap": 1.5}),
    "window and cap, one KV head": (
        Shape(num_kv_heads=1, block_size=16, max_blocks=20, num_blocks=60),
        {"sliding_window": 20, "soft_cap": 3.0},
    ),
    "as many KV heads": (Shape(num_kv_heads=4, block_size=1, max_blocks=300, num_blocks=800), {}),
    "block of 3": (Shape(block_size=3, num_blocks=280, max_blocks=90), {}),
    "block of 256": (Shape(block_size=256, num_blocks=16, max_blocks=2), {}),
}


# The others between them take every path that these do.
SLOW = {"window 1", "soft cap", "block of 256"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in GRID]
)
def test_options(name):
    shape, options = GRID[name]
    for key in ("mixed", "decode"):
        step = make_step(shape, *STEPS[key])
        got = compiled(shape, "xla", tuple(options.items()))(*step.arrays)
        expected = dense(shape, step, scale=SCALE, **options)
        np.testing.assert_allclose(got, expected, atol=3e-6)


def test_reference_options():
    options = {"sliding_window": 20, "soft_cap": 3.0}
    step = make_step(BASE, *STEPS["mixed"])
    got = compiled(BASE, "reference", tuple(options.items()))(*step.arrays)
    np.testing.assert_allclose(got, dense(BASE, step, scale=SCALE, **options), atol=3e-6)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 1e-2), ("float16", 1e-3)])
def test_pool_of_16_bits(dtype, most):
    shape = Shape(dtype=dtype)
    step = make_step(shape, *STEPS["mixed"])
    got = np.asarray(compiled(shape, "xla")(*step.arrays))
    exact = dense(shape, step, scale=SCALE)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < most
    # All of that is the rounding of the pool; the arithmetic is float32.
    reference = compiled(shape, "reference")(*step.arrays)
    np.testing.assert_allclose(got, reference, atol=3e-6)


def test_what_is_not_seen_does_not_matter():
    """Free blocks, stale slots, padding queries and unneeded table entries: not one bit."""
    outputs = [
        compiled(BASE, "xla")(*make_step(BASE, *STEPS["mixed"], **kw).arrays)
        for kw in (
            {"poison": np.nan},
            {"poison": 0.0, "garbage": True},
            {"poison": np.inf, "seed": 5},
        )
    ]
    for other in outputs[1:]:
        np.testing.assert_array_equal(bits(outputs[0]), bits(other))
    padding = sum(STEPS["mixed"][0])
    assert padding < BASE.num_tokens
    np.testing.assert_array_equal(outputs[0][padding:], 0.0)


def test_window_leaves_no_trace_of_what_it_passed():
    """Values that slid out of the window may have been overwritten: NaN there stays there."""
    options = (("sliding_window", 5),)
    step = make_step(BASE, *STEPS["decode"])
    q, k_pool, v_pool, tables, starts, lens = step.arrays
    before = compiled(BASE, "xla", options)(*step.arrays)
    gone = np.asarray(tables)[7, : (127 - 5) // 4]
    k_pool = k_pool.at[:, gone].set(jnp.nan)
    v_pool = v_pool.at[:, gone].set(jnp.nan)
    after = compiled(BASE, "xla", options)(q, k_pool, v_pool, tables, starts, lens)
    np.testing.assert_array_equal(bits(before), bits(after))


@pytest.mark.parametrize("name", ["decode", "decode, three left over", "mixed"])
def test_row_is_the_same_alone(name):
    """A row's output does not depend on the rows beside it, to the last bit."""
    query_lens, seq_lens = STEPS[name]
    together = bits(compiled(BASE, "xla")(*make_step(BASE, query_lens, seq_lens).arrays))
    token = 0
    for r, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        step = make_step(BASE, [count], [length], seed=r, rows=[r])
        alone = bits(compiled(BASE, "xla")(*step.arrays))
        np.testing.assert_array_equal(alone[:count], together[token : token + count])
        token += count


LONG = Shape(block_size=16, max_blocks=90, num_blocks=400)
# Leaders and the rows that share their first so many blocks of 16; chunks are 8 blocks, waves 64.
SHARED = {
    "all share": ([1] * 5, [520, 600, 519, 523, 512], {0: ([1, 2, 3, 4], 32)}),
    "not whole chunks": ([1] * 5, [300, 200, 190, 160, 170], {0: ([1, 2, 3, 4], 10)}),
    "to the last token": ([1] * 3, [256, 256, 256], {0: ([1, 2], 16)}),
    "past a wave": ([1] * 4, [1300, 1290, 1200, 1285], {0: ([1, 2, 3], 74)}),
    "two kinds and strangers": (
        [1] * 9,
        [300, 280, 140, 500, 290, 285, 1, 150, 270],
        {0: ([1, 4], 16), 2: ([7], 8), 5: ([8], 16)},
    ),
    "beside chunks of prompts": ([1, 70, 1, 40, 1], [300, 320, 310, 300, 270], {0: ([2, 4], 16)}),
}


def shared_step(query_lens, seq_lens, sharing, *, physically):
    """A step whose rows begin alike: in the same blocks, or in blocks with the same numbers."""
    step = make_step(LONG, query_lens, seq_lens)
    q, k_pool, v_pool, tables, starts, lens = map(np.array, step.arrays)
    for leader, (rows, blocks) in sharing.items():
        for row in rows:
            for context in (step.keys, step.values):
                context[row][: blocks * 16] = context[leader][: blocks * 16]
            if physically:
                tables[row, :blocks] = tables[leader, :blocks]
            else:
                for pool in (k_pool, v_pool):
                    pool[:, tables[row, :blocks]] = pool[:, tables[leader, :blocks]]
    return step, tuple(map(jnp.asarray, (q, k_pool, v_pool, tables, starts, lens)))


@pytest.mark.parametrize("name", SHARED)
def test_rows_that_share_blocks(name):
    """Reading shared blocks once gives what reading each row's own copy gives, bit for bit."""
    step, together = shared_step(*SHARED[name], physically=True)
    _, apart = shared_step(*SHARED[name], physically=False)
    got = compiled(LONG, "xla")(*together)
    np.testing.assert_allclose(got, dense(LONG, step, scale=SCALE), atol=3e-6)
    alone = compiled(LONG, "xla")(*apart)
    if jax.__version_info__ >= (0, 11):
        np.testing.assert_array_equal(bits(got), bits(alone))
    else:  # its products of one row and of many sum in different orders
        np.testing.assert_allclose(got, alone, atol=1e-6)


make_long = functools.partial(
    jax.jit(make_metadata, static_argnames=("num_tokens", "block_size", "sliding_window")),
    num_tokens=LONG.num_tokens,
    block_size=16,
)


def test_which_chunks_are_shared():
    _, (*_, tables, starts, lens) = shared_step(*SHARED["all share"], physically=True)
    make = functools.partial(make_long, starts, lens, tables)
    work = make().decode
    assert work.shared_chunks.tolist() == [4]
    # What is left of 520, 600, 519, 523 and 512 tokens after 4 chunks of 128.
    assert int((work.item_rows < len(work.lens)).sum()) == 4
    assert make(sliding_window=64).decode.shared_chunks.tolist() == [0]


def test_only_what_comes_first_is_shared():
    _, (*_, tables, starts, lens) = shared_step(*SHARED["all share"], physically=True)

    def shared(tables, starts, lens):
        return make_long(starts, lens, tables).decode.shared_chunks.tolist()

    assert shared(tables.at[2, 9].set(3), starts, lens) == [1]
    assert shared(tables.at[2, 0].set(3), starts, lens) == [0]
    alone = jnp.minimum(starts, 1), lens.at[1:].set(0)
    assert shared(tables, *alone) == [0]


def test_metadata_for_another_window_is_refused():
    q, k_pool, v_pool, tables, starts, lens = make_step(BASE, [1], [9]).arrays
    metadata = make_metadata(starts, lens, tables, num_tokens=q.shape[0], block_size=4)
    with pytest.raises(ValueError, match="sliding_window"):
        paged_attention(
            q, k_pool, v_pool, tables, starts, lens,
            layer=0, scale=1.0, sliding_window=5, metadata=metadata,
        )  # fmt: skip


def test_metadata_made_once_gives_the_same():
    step = make_step(BASE, *STEPS["mixed"])

    @jax.jit
    def two_layers(q, k_pool, v_pool, tables, starts, lens):
        metadata = make_metadata(
            starts, lens, tables, num_tokens=q.shape[0], block_size=k_pool.shape[2]
        )
        step = functools.partial(paged_attention, scale=SCALE, metadata=metadata)
        args = (q, k_pool, v_pool, tables, starts, lens)
        return step(*args, layer=0), step(*args, layer=1)

    _, got = two_layers(*step.arrays)
    np.testing.assert_array_equal(bits(got), bits(compiled(BASE, "xla")(*step.arrays)))


def test_vmap():
    """Two engines side by side, as `jax.vmap(step)` would have them."""
    steps = [make_step(BASE, *STEPS[name]) for name in ("mixed", "decode")]
    batched = [jnp.stack(pair) for pair in zip(*(s.arrays for s in steps), strict=True)]
    got = jax.jit(jax.vmap(functools.partial(paged_attention, layer=LAYER, scale=SCALE)))(*batched)
    for out, step in zip(got, steps, strict=True):
        np.testing.assert_allclose(out, dense(BASE, step, scale=SCALE), atol=3e-6)


def test_query_type_is_kept():
    step = make_step(BASE, *STEPS["mixed"])
    q = step.arrays[0].astype(jnp.bfloat16)
    got = jax.eval_shape(compiled(BASE, "xla"), q, *step.arrays[1:])
    assert got.dtype == jnp.bfloat16
    assert got.shape == q.shape


def test_refusals():
    arrays = make_step(BASE, [1], [1]).arrays
    call = functools.partial(paged_attention, *arrays, layer=0, scale=1.0)
    with pytest.raises(NotImplementedError, match=r"NVIDIA GPU|jax 0\.11"):
        call(implementation="pallas")
    with pytest.raises(ValueError, match="'triton'"):
        call(implementation="triton")
    with pytest.raises(ValueError, match="sliding_window is 0"):
        call(sliding_window=0)
    with pytest.raises(ValueError, match=r"soft_cap is -1\.0"):
        call(soft_cap=-1.0)
    with pytest.raises(ValueError, match="multiple of the number of KV heads"):
        paged_attention(arrays[0][:, :3], *arrays[1:], layer=0, scale=1.0)
    with pytest.raises(ValueError, match="float64; it must be one of float32, bfloat16, float16"):
        init_pool(1, 1, 1, 1, 1, np.float64)
