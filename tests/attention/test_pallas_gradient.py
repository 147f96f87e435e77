"""The derivative of paged attention in q and in both pools, for every implementation."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LAYER, Shape, make_step

from pallas_kernels import paged_attention
from pallas_kernels.interpret import interpret_mode

SCALE = 0.35
OPTIONS = {"plain": {}, "window and cap": {"sliding_window": 6, "soft_cap": 2.0}}
QUERY_LENS, SEQ_LENS = [1, 40, 0, 1, 5], [38, 41, 0, 1, 23]


def dense_attention(q, k_pool, v_pool, step, *, sliding_window=None, soft_cap=None):
    """Each query over its own copy of the keys and values: differentiable by jax alone."""
    tables, block_size = np.asarray(step.arrays[3]), k_pool.shape[2]
    slots = np.zeros((q.shape[0], max(step.seq_lens), 2), np.int32)
    seen = np.zeros(slots.shape[:2], bool)
    token = 0
    for row, (count, length) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
        for i in range(count):
            last = length - count + i
            first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            # What is not seen is replaced by the newest token, and hidden.
            places = np.full(slots.shape[1], last)
            places[first : last + 1] = np.arange(first, last + 1)
            slots[token] = np.stack([tables[row, places // block_size], places % block_size], -1)
            seen[token, first : last + 1] = True
            token += 1
    group = q.shape[1] // k_pool.shape[3]
    slots, seen = slots[:token], jnp.asarray(seen[:token, None])
    k, v = (
        jnp.repeat(pool[LAYER, slots[..., 0], slots[..., 1]], group, axis=2)
        for pool in (k_pool, v_pool)
    )
    logits = jnp.einsum("thd,tchd->thc", q[:token], k, precision="highest") * SCALE
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    out = jnp.einsum("thc,tchd->thd", weights, v, precision="highest")
    return jnp.pad(out, ((0, q.shape[0] - token), (0, 0), (0, 0)))


def gradients(function, step):
    q, k_pool, v_pool = step.arrays[:3]
    outer = np.random.default_rng(3).standard_normal(q.shape).astype(np.float32)

    def loss(q, k_pool, v_pool):
        return jnp.sum(function(q, k_pool, v_pool) * outer)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k_pool, v_pool)


@pytest.mark.parametrize(
    "implementation", ["xla", "reference", pytest.param("pallas", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_dense(name, implementation):
    options = OPTIONS[name]
    shape = Shape(num_rows=5, max_blocks=12, num_blocks=40, num_tokens=50)
    if implementation == "pallas":
        if jax.__version_info__ < (0, 11):
            pytest.skip("the Mosaic GPU of jax 0.10 has no mma.sync")
        shape = Shape(
            num_rows=5,
            max_blocks=6,
            num_blocks=40,
            num_tokens=50,
            block_size=8,
            head_dim=64,
            num_heads=3,
            num_kv_heads=1,
        )
    step = make_step(shape, QUERY_LENS, SEQ_LENS)
    call = functools.partial(
        paged_attention, layer=LAYER, scale=SCALE, implementation=implementation, **options
    )

    def paged(q, k_pool, v_pool):
        return call(q, k_pool, v_pool, *step.arrays[3:])

    with interpret_mode() if implementation == "pallas" else contextlib.nullcontext():
        got = gradients(paged, step)
    expected = gradients(functools.partial(dense_attention, step=step, **options), step)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
        assert np.isfinite(x).all()
        assert np.abs(x).max() > 0.1


def test_blocks_that_rows_share_collect_from_all_of_them():
    """Two rows with the same table: the pools' gradients are the sum of both."""
    shape = Shape(num_rows=2, max_blocks=4, num_blocks=6, num_tokens=2)
    step = make_step(shape, [1], [14])
    q, k_pool, v_pool, tables, _, _ = step.arrays
    q = jnp.stack([q[0], q[0]])
    tables = jnp.stack([tables[0], tables[0]])

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(k_pool, v_pool, rows):
        starts = jnp.minimum(jnp.arange(3), rows)
        lens = jnp.where(jnp.arange(2) < rows, 14, 0)
        out = paged_attention(q, k_pool, v_pool, tables, starts, lens, layer=LAYER, scale=SCALE)
        return jnp.sum(out[:, :, 0])

    one, two = (gradient(k_pool, v_pool, n) for n in (1, 2))
    for x, y in zip(one, two, strict=True):
        np.testing.assert_allclose(2 * x, y, atol=1e-6)


def test_bits_have_no_derivative_but_queries_have():
    """A bfloat16 pool stored as uint16 is data; the gradient in q is that of the same numbers."""
    shape = Shape(num_rows=5, max_blocks=12, num_blocks=40, num_tokens=50, dtype="bfloat16")
    step = make_step(shape, QUERY_LENS, SEQ_LENS)
    q, *pools = step.arrays[:3]
    wide = [jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32) for x in pools]

    def loss(q, k_pool, v_pool):
        out = paged_attention(q, k_pool, v_pool, *step.arrays[3:], layer=LAYER, scale=SCALE)
        return jnp.sum(out**2)

    gradient = jax.jit(jax.grad(loss))
    got, expected = gradient(q, *pools), gradient(q, *wide)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    with pytest.raises(TypeError, match="uint16"):
        jax.grad(loss, argnums=1)(q, *pools)
