"""The sampler's parts against plain numpy and Python integers: wide arithmetic, maxima, top-n."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.sampling import draw, topn, wide
from tests.sampling.reference import order

U48 = st.integers(0, 2**48 - 1)


def _wide(*values: int) -> wide.Wide:
    return (
        jnp.asarray([v >> 16 for v in values], jnp.uint32),
        jnp.asarray([v & 0xFFFF for v in values], jnp.uint32),
    )


def _ints(value: wide.Wide) -> list[int]:
    high, low = (np.asarray(v).astype(object) for v in value)
    assert all(part < 2**16 for part in low.ravel())
    return list(high * 2**16 + low)


@settings(max_examples=20)
@given(a=U48, b=U48)
def test_wide_add_subtract_compare(a: int, b: int) -> None:
    a, b = a // 2, b // 2
    small, large = sorted((a, b))
    assert _ints(wide.add(_wide(a), _wide(b))) == [a + b]
    assert _ints(wide.subtract(_wide(large), _wide(small))) == [large - small]
    assert bool(wide.less(_wide(a), _wide(b))[0]) == (a < b)
    chosen = wide.select(wide.less(_wide(a), _wide(b)), _wide(a), _wide(b))
    assert _ints(chosen) == [small]
    assert float(wide.to_float(_wide(a))[0]) == pytest.approx(a, rel=1e-6)


@settings(max_examples=20)
@given(value=U48, fraction=U48)
def test_wide_scale_by_fraction(value: int, fraction: int) -> None:
    digits = [jnp.asarray([fraction >> s & 0xFFFF], jnp.uint32) for s in (32, 16, 0)]
    product = value * fraction
    assert _ints(wide.scale_by_fraction(_wide(value), digits)) == [product >> 48]
    assert _ints(wide.scale_by_fraction(_wide(value), digits, ceil=True)) == [-(-product >> 48)]


def test_wide_sums_do_not_overflow() -> None:
    values = np.full((2, 4096), 2**31, np.uint32)
    assert _ints(wide.wide_sum(jnp.asarray(values))) == [4096 * 2**31] * 2
    total = wide.wide_total(wide.widen(jnp.asarray(values)))
    assert _ints(total) == [4096 * 2**31] * 2


@settings(max_examples=20)
@given(parts=st.lists(st.integers(0, 2**31), min_size=7, max_size=7), at=st.floats(0, 1))
def test_locate_inverts_the_running_sum(parts: list[int], at: float) -> None:
    total = sum(parts)
    if total == 0:
        return
    target = min(int(total * at), total - 1)
    starts = np.concatenate([[0], np.cumsum(np.asarray(parts, object))])
    index, rest = wide.locate(wide.widen(jnp.asarray([parts], jnp.uint32)), _wide(target))
    i = int(index[0])
    assert starts[i] <= target < starts[i + 1]
    assert _ints(rest) == [target - starts[i]]


@pytest.mark.parametrize("vocab", [1, 129, 1000])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "infinite"])
def test_max_and_top_n_equal_a_stable_sort(vocab: int, kind: str) -> None:
    rng = np.random.default_rng(vocab)
    x = rng.normal(size=(6, vocab)).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    elif kind == "zeros":  # equal as numbers, not as bits
        x = np.where(rng.random(x.shape) < 0.5, np.float32(0.0), np.float32(-0.0))
    elif kind == "infinite":
        x[rng.random(x.shape) < 0.95] = -np.inf
    largest, index = jax.jit(topn.max_and_argmax)(x)
    np.testing.assert_array_equal(largest, x.max(-1))
    np.testing.assert_array_equal(index, [order(row)[0] for row in x])
    n = min(20, vocab)
    values, ids = jax.jit(topn.top_n, static_argnums=1)(x, n)
    expected = np.stack([order(row)[:n] for row in x])
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("vocab", [5, 128, 1000])
def test_max_reports_nan_and_infinity_wherever_they_are(bad: float, vocab: int) -> None:
    x = np.random.default_rng(0).normal(size=(vocab, vocab)).astype(np.float32)
    np.fill_diagonal(x, bad)
    largest, _ = jax.jit(topn.max_and_argmax)(x)
    assert np.all(np.isposinf(largest))


@pytest.mark.parametrize(
    ("before", "total", "p", "inside"),
    [(3, 7, 0.5, True), (4, 7, 0.5, False), (4, 8, 0.5, False), (0, 7, 0.0, True), (6, 7, 1, True)],
)
def test_a_token_is_in_top_p_until_the_share_is_reached(
    before: int, total: int, p: float, inside: bool
) -> None:
    bounds = tuple(part[:, None] for part in _wide(total, total))
    got = draw._in_top_p(_wide(before), bounds, jnp.asarray([p], jnp.float32))
    assert got.tolist() == [[inside], [inside]]
