"""The sampler's parts against plain numpy and Python integers: wide arithmetic, maxima, top-n."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.sampling import draw, topn, wide
from tests.sampling.reference import order


def _wide(*values: int) -> wide.Wide:
    return (
        jnp.asarray([v >> 16 for v in values], jnp.uint32),
        jnp.asarray([v & 0xFFFF for v in values], jnp.uint32),
    )


def _ints(value: wide.Wide) -> list[int]:
    high, low = (np.asarray(v).astype(object) for v in value)
    assert all(part < 2**16 for part in low.ravel())
    return list(high * 2**16 + low)


def _numbers(n: int, bits: int, seed: int) -> list[int]:
    """Integers of every length up to so many bits, the largest one and zero among them."""
    rng = random.Random(seed)
    return [0, 2**bits - 1, *(rng.getrandbits(rng.randint(1, bits)) for _ in range(n - 2))]


def test_wide_add_subtract_compare() -> None:
    a, b = _numbers(500, 47, seed=0), _numbers(500, 47, seed=1)[::-1]
    small, large = ([f(x, y) for x, y in zip(a, b, strict=True)] for f in (min, max))
    assert _ints(wide.add(_wide(*a), _wide(*b))) == [x + y for x, y in zip(a, b, strict=True)]
    difference = [x - y for x, y in zip(large, small, strict=True)]
    assert _ints(wide.subtract(_wide(*large), _wide(*small))) == difference
    less = wide.less(_wide(*a), _wide(*b))
    assert less.tolist() == [x < y for x, y in zip(a, b, strict=True)]
    assert _ints(wide.select(less, _wide(*a), _wide(*b))) == small
    np.testing.assert_allclose(wide.to_float(_wide(*a)), np.asarray(a, np.float64), rtol=1e-6)


def test_wide_scale_by_fraction() -> None:
    values, fractions = _numbers(500, 48, seed=2), _numbers(500, 48, seed=3)
    digits = [jnp.asarray([f >> s & 0xFFFF for f in fractions], jnp.uint32) for s in (32, 16, 0)]
    products = [v * f for v, f in zip(values, fractions, strict=True)]
    assert _ints(wide.scale_by_fraction(_wide(*values), digits)) == [p >> 48 for p in products]
    up = wide.scale_by_fraction(_wide(*values), digits, ceil=True)
    assert _ints(up) == [-(-p >> 48) for p in products]


def test_wide_sums_do_not_overflow() -> None:
    values = np.full((2, 4096), 2**31, np.uint32)
    assert _ints(wide.wide_sum(jnp.asarray(values))) == [4096 * 2**31] * 2
    total = wide.wide_total(wide.widen(jnp.asarray(values)))
    assert _ints(total) == [4096 * 2**31] * 2


def test_locate_inverts_the_running_sum() -> None:
    rng = random.Random(4)
    parts = [[rng.choice([0, rng.getrandbits(31), 2**31]) for _ in range(7)] for _ in range(200)]
    parts = [p for p in parts if sum(p)]
    starts = [np.concatenate([[0], np.cumsum(np.asarray(p, object))]) for p in parts]
    targets = [rng.choice([0, s[-1] - 1, s[3] % s[-1], rng.randrange(s[-1])]) for s in starts]
    index, rest = wide.locate(wide.widen(jnp.asarray(parts, jnp.uint32)), _wide(*targets))
    for i, left, start, target in zip(index, _ints(rest), starts, targets, strict=True):
        assert start[i] <= target < start[i + 1]
        assert left == target - start[i]


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


def test_huge_logits_beside_masked_ones_are_not_taken_for_nan() -> None:
    x = np.full((3, 400), 3e38, np.float32)  # their sum is +inf, and NaN with a -inf
    x[:, 50] = 3.1e38
    x[0, 399] = -np.inf
    x[1, ::2] = -np.inf
    x[2, 100] = np.nan
    largest, index = jax.jit(topn.max_and_argmax)(x)
    np.testing.assert_array_equal(largest, np.asarray([3.1e38, 3e38, np.inf], np.float32))
    np.testing.assert_array_equal(index[:2], [50, 1])
