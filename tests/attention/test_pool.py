"""Writing to the pool and copying blocks; nothing may ever copy the pool itself."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import bits

from pallas_kernels import (
    NULL,
    block_bytes,
    copy_blocks,
    init_pool,
    make_metadata,
    move_blocks,
    paged_attention,
    write_kv,
)

L, N, B, K, D = 3, 512, 16, 2, 16
T, R, M = 24, 4, 8


def random_pools(dtype, num_blocks=12):
    pools = init_pool(L, num_blocks, B, K, D, dtype)
    keys = jax.random.split(jax.random.key(0), 2)
    return [
        jax.random.bits(key, pool.shape, jnp.uint16).astype(pool.dtype)
        for key, pool in zip(keys, pools, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_write_kv(implementation, dtype):
    pools = random_pools(dtype)
    k, v = jax.random.normal(jax.random.key(1), (2, 7, K, D))
    slots = np.array([5, NULL, 12 * B - 1, 12 * B, 0, -1, 33], np.int32)
    write = jax.jit(functools.partial(write_kv, implementation=implementation))
    got = write(*pools, k, v, jnp.asarray(slots), layer=1)
    for before, after, new in zip(pools, got, (k, v), strict=True):
        expected = np.array(before)
        number = np.asarray(new.astype(dtype))
        for t in (0, 2, 4, 6):
            value = number[t].view(np.uint16) if dtype == "bfloat16" else number[t]
            expected[1, slots[t] // B, slots[t] % B] = value
        np.testing.assert_array_equal(expected, after)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_copy_blocks(implementation, dtype):
    copy = jax.jit(functools.partial(copy_blocks, implementation=implementation))
    # A swap, a chain (6 goes to 7 while 7 goes to 8), dropped pairs, and pairs after them.
    src = np.array([1, 2, NULL, 6, 7, 3, 12, 4, 0], np.int32)
    dst = np.array([2, 1, 5, 7, 8, NULL, 9, -1, 11], np.int32)
    pools = random_pools(dtype)
    for before, after in zip(pools, copy(*pools, src, dst), strict=True):
        before = np.asarray(before)
        expected = before.copy()
        for s, d in ((1, 2), (2, 1), (6, 7), (7, 8), (0, 11)):
            expected[:, d] = before[:, s]
        np.testing.assert_array_equal(expected, after)
    nothing = np.full(9, NULL, np.int32)
    for before, after in zip(pools, copy(*pools, nothing, nothing), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_move_blocks(implementation, dtype):
    """The first three of five, into a pool of another size; the rest of it stays."""
    move = jax.jit(functools.partial(move_blocks, implementation=implementation))
    source, target = random_pools(dtype)[0], random_pools(dtype, num_blocks=5)[1]
    src, dst = np.array([7, 11, 0, 3, NULL], np.int32), np.array([4, 0, 2, 1, NULL], np.int32)
    for count in (0, 3):
        got, moved = move(source, target, src, dst, np.int32(count))
        expected = np.array(target)
        expected[:, dst[:count]] = np.asarray(source)[:, src[:count]]
        np.testing.assert_array_equal(got, expected)
        assert moved == count


def test_move_blocks_refuses_what_it_has_not():
    source, target = random_pools("float32")[0], random_pools("float32", num_blocks=5)[0]
    ids, count = np.zeros(2, np.int32), np.int32(0)
    with pytest.raises(NotImplementedError, match=r"move_blocks: .* implementation 'pallas'"):
        move_blocks(source, target, ids, ids, count, implementation="pallas")
    with pytest.raises(ValueError, match="'triton'"):
        move_blocks(source, target, ids, ids, count, implementation="triton")
    with pytest.raises(ValueError, match="number of blocks only"):
        move_blocks(source, target[:1], ids, ids, count)
    with pytest.raises(ValueError, match="number of blocks only"):
        move_blocks(source, target.astype(jnp.bfloat16), ids, ids, count)
    with pytest.raises(ValueError, match="src"):
        move_blocks(source, target, ids, ids[:1], count)


def test_block_bytes():
    k_pool, v_pool = init_pool(L, N, B, K, D, jnp.bfloat16)
    assert block_bytes(L, B, K, D, jnp.bfloat16) * N == k_pool.nbytes + v_pool.nbytes


def forward(k_pool, v_pool, q, kv, slots, tables, starts, lens, src, dst):
    """What a step does to the pool: copies, then each layer writes and attends.

    As in a model, what a layer writes depends on what the layer before it read.
    """
    k_pool, v_pool = copy_blocks(k_pool, v_pool, src, dst)
    metadata = make_metadata(starts, lens, tables, num_tokens=T, block_size=k_pool.shape[2])
    for layer in range(L):
        k_pool, v_pool = write_kv(k_pool, v_pool, kv + q[:, :K], kv * q[:, :K], slots, layer=layer)
        q = paged_attention(
            q, k_pool, v_pool, tables, starts, lens, layer=layer, scale=0.3, metadata=metadata
        )
    return k_pool, v_pool, q


def scanned(k_pool, v_pool, q, kv, slots, tables, starts, lens, src, dst):
    """The same with the layers in a scan, the pool in its carry."""
    k_pool, v_pool = copy_blocks(k_pool, v_pool, src, dst)
    metadata = make_metadata(starts, lens, tables, num_tokens=T, block_size=k_pool.shape[2])

    def body(carry, layer):
        k_pool, v_pool, q = carry
        k_pool, v_pool = write_kv(k_pool, v_pool, kv + q[:, :K], kv * q[:, :K], slots, layer=layer)
        q = paged_attention(
            q, k_pool, v_pool, tables, starts, lens, layer=layer, scale=0.3, metadata=metadata
        )
        return (k_pool, v_pool, q), None

    return jax.lax.scan(body, (k_pool, v_pool, q), jnp.arange(L))[0]


def repeated(*args):
    """Several steps in one while loop, as `run` has them."""
    k_pool, v_pool, q, *rest = args
    pools_and_q = (k_pool, v_pool, q)
    return jax.lax.fori_loop(0, rest[4][0], lambda _, c: forward(*c, *rest), pools_and_q)


def chain_arguments(dtype):
    k_pool, v_pool = init_pool(L, N, B, K, D, dtype)
    q = jax.random.normal(jax.random.key(0), (T, 2 * K, D))
    kv = jax.random.normal(jax.random.key(1), (T, K, D))
    # Row 0 has 20 queries after 10 tokens, row 1 one query after 17, the rest is padding.
    tables = np.full((R, M), NULL, np.int32)
    tables[0, :2], tables[1, :2] = (7, 3), (100, 4)
    slots = [tables[0, p // B] * B + p % B for p in range(10, 30)] + [4 * B + 1] + [NULL] * 3
    starts = np.array([0, 20, 21, 21, 21], np.int32)
    lens = np.array([30, 18, 0, 0], np.int32)
    src, dst = np.array([9, NULL], np.int32), np.array([11, 12], np.int32)
    arrays = (np.array(slots, np.int32), tables, starts, lens, src, dst)
    return (k_pool, v_pool, q, kv, *map(jnp.asarray, arrays))


# Each form by default, and the types that a CPU might want to convert. (That a pool in float32 is
# not copied is seen of whole steps, in tests/core/test_step.py.)
QUICK = {(repeated, "bfloat16"), (forward, "float16"), (scanned, "float16")}


@pytest.mark.parametrize(
    ("chain", "dtype"),
    [
        pytest.param(chain, dtype, marks=[pytest.mark.slow] * ((chain, dtype) not in QUICK))
        for chain in (forward, scanned, repeated)
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_chain_does_not_copy_the_pool(chain, dtype):
    arguments = chain_arguments(dtype)
    pool = arguments[0]
    executable = jax.jit(chain, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 2
    # Nor is the pool converted or copied into another buffer: what has its shape is passed on or
    # updated in place.
    kind = {"float32": "f32", "bfloat16": "u16", "float16": "f16"}[dtype]
    for shape in (f"{L},{N},{B},{K},{D}", f"{L * N},{B},{K},{D}", f"{L * N * B},{K},{D}"):
        text = executable.as_text()
        assert not re.search(rf"= {kind}\[{shape}\]\S* (copy|transpose|convert)\(", text)


def test_unrolled_and_scanned_agree():
    outputs = []
    for chain in (forward, scanned):
        outputs.append(jax.jit(chain, donate_argnums=(0, 1))(*chain_arguments("float16")))
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
