"""The derivative of ``write_kv`` in both pools and in what is written, for every implementation."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LAYER, Shape, make_step
from pallas_cases import needs_mosaic_gpu
from test_pallas_gradient import OPTIONS, SCALE, dense_attention

from pallas_kernels import NULL, init_pool, paged_attention, write_kv
from pallas_kernels.interpret import interpret_mode

L, N, B, K, D = 3, 4, 8, 1, 64
# The first and last of the pool, what is dropped (twice: no slot occurs twice otherwise), others.
SLOTS = np.array([0, NULL, N * B - 1, N * B, -1, 9, NULL, 17], np.int32)
KEPT = np.array([0, 2, 5, 7])
IMPLEMENTATIONS = ["xla", "reference", pytest.param("pallas", marks=needs_mosaic_gpu)]


def interpreted(implementation):
    return interpret_mode() if implementation == "pallas" else contextlib.nullcontext()


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_get_their_slots_cotangent_and_written_slots_give_theirs_away(implementation):
    outer = random(0, 2, L, N, B, K, D)

    def loss(k_pool, v_pool, k, v, layer):
        call = functools.partial(write_kv, layer=layer, implementation=implementation)
        return sum(map(jnp.vdot, call(k_pool, v_pool, k, v, jnp.asarray(SLOTS)), outer))

    pools, rows = random(1, 2, L, N, B, K, D), random(2, 2, len(SLOTS), K, D)
    with interpreted(implementation):
        got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*pools, *rows, jnp.int32(1))
    for i in range(2):
        left, taken = outer[i].copy(), np.zeros((len(SLOTS), K, D), np.float32)
        taken[KEPT] = left[1].reshape(N * B, K, D)[SLOTS[KEPT]]
        left[1].reshape(N * B, K, D)[SLOTS[KEPT]] = 0
        np.testing.assert_array_equal(got[i], left)
        np.testing.assert_array_equal(got[2 + i], taken)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint16])
def test_of_rounded_rows_and_of_bits(implementation, dtype):
    """Rounding counts as if it were none; bits have no derivative."""
    outer = jnp.asarray(random(0, L, N, B, K, D)).astype(jnp.bfloat16)
    pools = [jnp.zeros((L, N, B, K, D), dtype)] * 2

    def loss(k, v):
        written = write_kv(
            *pools, k, v, jnp.asarray(SLOTS), layer=1, implementation=implementation
        )[0]
        if dtype == jnp.uint16:
            written = jax.lax.bitcast_convert_type(written, jnp.bfloat16)
        return jnp.sum((written * outer).astype(jnp.float32))

    with interpreted(implementation):
        got, other = jax.grad(loss, argnums=(0, 1))(*random(2, 2, len(SLOTS), K, D))
    expected = np.zeros(got.shape, np.float32)
    if dtype == jnp.bfloat16:
        expected[KEPT] = outer[1].reshape(N * B, K, D)[SLOTS[KEPT]].astype(jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(other, 0)


@pytest.mark.parametrize(
    "implementation", ["xla", "reference", pytest.param("pallas", marks=pytest.mark.slow)]
)
def test_written_then_attended_to_equals_dense(implementation):
    """A model's layer: the newest keys and values are written, then all are attended to. The layer
    below feeds both, so that the pool's cotangent passes through two writes."""
    if implementation == "pallas" and jax.__version_info__ < (0, 11):
        pytest.skip("the Mosaic GPU of jax 0.10 has no mma.sync")
    shape = Shape(
        num_rows=3,
        max_blocks=3,
        num_blocks=12,
        num_tokens=16,
        block_size=8,
        head_dim=64,
        num_heads=3,
        num_kv_heads=1,
    )
    query_lens, seq_lens = [1, 9, 4], [17, 9, 21]
    step = make_step(shape, query_lens, seq_lens)
    q, k_pool, v_pool, tables, starts, lens = step.arrays
    # Numbers everywhere: zero times a padding of NaN would be one.
    q, (k_pool, v_pool) = random(7, *q.shape), random(6, 2, *k_pool.shape)
    slots, tables_np = np.full(16, NULL, np.int32), np.asarray(tables)
    places = [
        (row, p)
        for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for p in range(length - count, length)
    ]
    for t, (row, p) in enumerate(places):
        slots[t] = tables_np[row, p // 8] * 8 + p % 8
    rows, outer = random(4, 2, 16, 1, 64), random(5, *q.shape)

    def model(write, attend, k_pool, v_pool, k, v):
        x = q
        for layer in (LAYER - 1, LAYER):
            k_pool, v_pool = write(k_pool, v_pool, k + x[:, :1], v * x[:, 1:2], layer)
            x = jnp.tanh(attend(x, k_pool, v_pool, layer))
        return jnp.vdot(x, outer) + jnp.sum(k_pool[LAYER - 1] ** 2)

    def write(k_pool, v_pool, k, v, layer):
        arguments = (k_pool, v_pool, k, v, jnp.asarray(slots))
        return write_kv(*arguments, layer=layer, implementation=implementation)

    def attend(x, k_pool, v_pool, layer):
        return paged_attention(
            *(x, k_pool, v_pool, tables, starts, lens),
            layer=layer,
            scale=SCALE,
            implementation=implementation,
        )

    def write_dense(k_pool, v_pool, k, v, layer):
        at = (layer, slots[: len(places)] // 8, slots[: len(places)] % 8)
        k_pool = k_pool.at[at].set(k[: len(places)])
        return k_pool, v_pool.at[at].set(v[: len(places)])

    def attend_dense(x, k_pool, v_pool, layer):
        both = (jnp.roll(pool, LAYER - layer, axis=0) for pool in (k_pool, v_pool))
        return dense_attention(x, *both, step, **OPTIONS["plain"])

    def gradients(write, attend):
        loss = functools.partial(model, write, attend)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(k_pool, v_pool, *rows)

    with interpreted(implementation):
        got = gradients(write, attend)
    for x, y in zip(got, gradients(write_dense, attend_dense), strict=True):
        np.testing.assert_allclose(x, y, atol=5e-5)
        assert np.abs(x).max() > 0.1


def test_an_unsupported_call_is_refused_as_without_a_derivative():
    pools, rows = init_pool(1, 2, 8, 1, 72), random(0, 2, 3, 1, 72)
    with pytest.raises(NotImplementedError, match=r"multiple of 16|jax 0\.11"):
        write_kv(*pools, *rows, jnp.arange(3), layer=0, implementation="pallas")
