"""`sample` against the numpy definition: filters, ties, extremes, stops, logprobs, bad rows."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.sampling import NULL, Sampled, SamplingInputs, sample
from tests.sampling.reference import filtered, log_softmax, make_inputs, order

VOCAB = 25
DRAWS = 512


@partial(jax.jit, static_argnames=("max_logprobs", "rows_per_block"))
def run(
    logits: jax.Array, inputs: object, max_logprobs: int = 0, rows_per_block: int | None = None
) -> Sampled:
    return sample(logits, inputs, max_logprobs=max_logprobs, rows_per_block=rows_per_block)


def draws(logits: np.ndarray, n: int = DRAWS, **params: object) -> np.ndarray:
    """n tokens of one row of logits, seeds 0 to n - 1."""
    x = jnp.asarray(np.broadcast_to(logits.astype(np.float32), (n, len(logits))))
    out = run(x, make_inputs(n, seed=np.arange(n), **params), rows_per_block=n)
    assert not np.any(out.nan)
    return np.asarray(out.token_ids)


@settings(max_examples=25)
@given(data=st.data())
def test_kept_set_equals_the_reference(data: st.DataObject) -> None:
    # Few distinct values: ties everywhere, also across every boundary.
    levels = data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = (rng.integers(0, levels, VOCAB) * rng.uniform(0.01, 1.0)).astype(np.float32)
    params = {
        "temperature": data.draw(st.floats(0.2, 3)),
        "top_k": data.draw(st.one_of(st.just(0), st.integers(1, VOCAB + 2))),
        "top_p": data.draw(st.one_of(st.just(1.0), st.floats(0.01, 1))),
        "min_p": data.draw(st.one_of(st.just(0.0), st.floats(0.0, 1))),
    }
    expected = filtered(logits, **params)
    if expected.margin < 1e-6:
        return  # float32 may decide a tie of real numbers either way
    got = np.bincount(draws(logits, **params), minlength=VOCAB) > 0
    assert not np.any(got & ~expected.kept)
    certain = (1 - expected.probabilities) ** DRAWS < 1e-9
    assert np.all(got[certain])


def test_top_k_keeps_exactly_k_lowest_ids_among_ties() -> None:
    logits = np.zeros(VOCAB)
    logits[VOCAB - 1] = 0.5
    for k in (1, 2, 5, VOCAB - 1):
        assert set(draws(logits, temperature=1, top_k=k)) == {VOCAB - 1, *range(k - 1)}
    for k in (VOCAB, VOCAB + 1, 10**6, 0, -1):
        assert set(draws(logits, temperature=1, top_k=k)) == set(range(VOCAB))


def test_top_p_keeps_exactly_as_many_ties_as_are_needed() -> None:
    flat = np.full(VOCAB, -100.0)
    flat[:16] = 0
    for p, kept in ((1 / 16, 1), (0.5, 8), (0.50001, 9), (15 / 16, 15), (0.94, 16), (1.0, 16)):
        assert set(draws(flat, temperature=1, top_p=p)) == set(range(kept)), p
    # The share is of what top-k leaves: half of 8 equal tokens.
    assert set(draws(flat, temperature=1, top_p=0.5, top_k=8)) == set(range(4))
    # ... and of what min-p leaves.
    flat[16:] = -3
    flat[8:16] = 0
    assert set(draws(flat, temperature=1, top_p=0.5, min_p=0.1)) == set(range(8))


def test_extremes_keep_the_most_likely_token() -> None:
    logits = np.random.default_rng(3).normal(size=VOCAB).round(1)
    best = {order(logits)[0]}
    for params in (
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1e-38},
        {"temperature": 1e-45},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 50.0, "top_k": 1, "top_p": 0.5, "min_p": 0.3},
        {"temperature": 50.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_p": 1e-30},
        {"temperature": 1.0, "top_p": 0.0},
    ):
        assert set(draws(logits, n=64, **params)) == best, params
    # min_p = 1 keeps every token that is as likely as the most likely one.
    logits[5] = logits[9] = 7.0
    assert set(draws(logits, temperature=1, min_p=1.0)) == {5, 9}
    assert set(draws(logits, temperature=1, min_p=2.0)) == {5, 9}


def test_huge_and_infinite_logits_and_temperatures() -> None:
    logits = np.full(VOCAB, -np.inf)
    logits[[3, 8]] = 3e38
    logits[20] = -3e38
    for temperature in (1e-6, 1.0, 1e6):
        assert set(draws(logits, temperature=temperature)) == {3, 8}
    assert set(draws(logits, temperature=1, top_k=1)) == {3}
    only = np.full(VOCAB, -np.inf)
    only[11] = -1e30
    assert set(draws(only, n=64, temperature=1, top_p=0.9, top_k=5)) == {11}
    # A temperature that flattens everything still never picks what is impossible.
    only[[3, 20]] = 1.0, -4.0
    only[11] = 0.0
    assert set(draws(only, temperature=np.inf)) == {3, 11, 20}


def test_parameters_that_are_no_number_are_off() -> None:
    logits = np.full(VOCAB, -np.inf)
    logits[[2, 7, 9]] = 1.0, 0.0, 0.5
    for params in ({"top_p": np.nan}, {"min_p": np.nan}, {"top_k": 2, "min_p": np.nan}):
        expected = {2, 9} if "top_k" in params else {2, 7, 9}
        assert set(draws(logits, temperature=1, **params)) == expected
    assert set(draws(logits, temperature=np.nan)) == {2}


def test_greedy_takes_the_lowest_id_among_ties_and_zeros_of_either_sign() -> None:
    logits = np.asarray([[-1, -0.0, 0.0, -2], [0.0, 0.0, -0.0, 0.0], [1, 5, 5, 5]], np.float32)
    np.testing.assert_array_equal(run(logits, make_inputs(3)).token_ids, [1, 0, 1])


@pytest.mark.parametrize("vocab", [1, 1000, 1025])
def test_any_vocabulary_size_and_one_row(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=(1, vocab)).astype(np.float32)
    top = min(5, vocab)
    for temperature in (0.0, 1.0):
        inputs = make_inputs(1, temperature=temperature, top_k=3, top_p=0.9, num_logprobs=top)
        out = run(logits, inputs, top)
        assert int(out.token_ids[0]) in order(logits[0])[:3]
        np.testing.assert_array_equal(out.top_token_ids[0], order(logits[0])[:top])


def test_logprobs_are_of_the_raw_distribution() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(6, 1000)) * 4).astype(np.float32)
    logits[4] = np.round(logits[4])
    wanted = np.asarray([-1, 0, 1, 7, 20, 20])
    inputs = make_inputs(
        6,
        temperature=[0, 0.3, 0, 2, 1, 0],
        top_k=2,
        min_p=0.5,
        num_logprobs=wanted,
        forbid_stop=[False] * 5 + [True],
        stop_token_ids=[int(order(logits[5])[0])],
    )
    out = run(logits, inputs, 20)
    expected = log_softmax(logits)
    tokens = np.asarray(out.token_ids)
    assert tokens[5] == order(logits[5])[1]
    for r, n in enumerate(wanted):
        ids = order(logits[r])[: max(n, 0)]
        np.testing.assert_array_equal(out.top_token_ids[r], [*ids, *[NULL] * (20 - len(ids))])
        np.testing.assert_allclose(
            out.top_logprobs[r][: len(ids)], expected[r, ids], atol=2e-6, rtol=1e-6
        )
        assert np.all(np.isneginf(out.top_logprobs[r][len(ids) :]))
        chosen = expected[r, tokens[r]] if n >= 0 else 0
        np.testing.assert_allclose(out.logprob[r], chosen, atol=2e-6, rtol=1e-6)


def test_stop_tokens_can_be_forbidden() -> None:
    logits = np.asarray([[5, 4, 3, 2, 1]] * 4, np.float32)
    stops = {"stop_token_ids": [0, 2], "forbid_stop": [True, False, True, False]}
    np.testing.assert_array_equal(run(logits, make_inputs(4, **stops)).token_ids, [1, 0, 1, 0])
    out = run(logits, make_inputs(4, temperature=1, top_k=1, **stops))
    np.testing.assert_array_equal(out.token_ids, [1, 0, 1, 0])
    few = np.full(VOCAB, -100.0)
    few[:5] = logits[0]
    kept = draws(few, temperature=5, stop_token_ids=[0, 2], forbid_stop=True)
    assert set(kept) == {1, 3, 4}
    # Nothing left to choose is an error of that row only.
    out = run(logits, make_inputs(4, **{**stops, "stop_token_ids": [0, 1, 2, 3, 4]}))
    np.testing.assert_array_equal(out.nan, [True, False, True, False])
    np.testing.assert_array_equal(out.token_ids, [0, 0, 0, 0])


@pytest.mark.parametrize("rows_per_block", [1, 8])
def test_bad_rows_are_reported_and_leave_others_alone(rows_per_block: int) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(8, 300)).astype(np.float32)
    params = {
        "temperature": [1, 0, 1, 1, 0, 1, 1, 0],
        "top_p": 0.9,
        "top_k": 20,
        "seed": np.arange(8),
        "num_logprobs": 3,
        "valid": [True] * 6 + [False, True],
        "forbid_stop": [False, True] * 4,
        "stop_token_ids": [17],
    }
    inputs = make_inputs(8, **params)
    clean = run(logits, inputs, 3, rows_per_block)
    dirty = logits.copy()
    dirty[1, 17] = np.nan  # even where the token could not be chosen
    dirty[2, 299] = np.inf
    dirty[4] = -np.inf
    dirty[5, 0] = -np.nan
    dirty[6, 0] = np.nan  # not valid: nobody's error
    out = run(dirty, inputs, 3, rows_per_block)
    bad = [False, True, True, False, True, True, False, False]
    np.testing.assert_array_equal(out.nan, bad)
    np.testing.assert_array_equal(np.asarray(out.token_ids)[bad], 0)
    assert int(out.token_ids[6]) == 0
    good = ~np.asarray(bad)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a)[good], np.asarray(b)[good]),
        out,
        clean,
    )
    assert not np.any(clean.nan)
    assert not any(np.any(np.isnan(v)) for v in (out.logprob, out.top_logprobs))


def test_values_never_retrace() -> None:
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def traced(logits: jax.Array, inputs: SamplingInputs) -> Sampled:
        return sample(logits, inputs, max_logprobs=3)

    logits = np.zeros((3, 50), np.float32)
    for params in (
        {},
        {"temperature": 1},
        {"temperature": [0, 0.1, 9], "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"num_logprobs": [-1, 0, 3], "seed": 5, "position": 7},
        {"forbid_stop": True, "stop_token_ids": [1, 2], "valid": [True, False, True]},
    ):
        traced(logits, make_inputs(3, **params))


@pytest.mark.parametrize(
    ("logits", "rows", "max_logprobs", "says"),
    [
        (np.zeros((2, 5), np.float16), 2, 0, "float32"),
        (np.zeros(5, np.float32), 2, 0, "R, V"),
        (np.zeros((2, 5), np.float32), 2, 6, r"\[0, 5\], got 6"),
        (np.zeros((2, 5), np.float32), 2, -1, r"\[0, 5\], got -1"),
        (np.zeros((2, 5), np.float32), 3, 0, "temperature must have 2 rows"),
    ],
)
def test_misfits_are_refused(logits: np.ndarray, rows: int, max_logprobs: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sample(jnp.asarray(logits), make_inputs(rows), max_logprobs=max_logprobs)


def test_nothing_of_the_vocabulary_is_sorted() -> None:
    vocab = 4096
    closed = jax.make_jaxpr(partial(sample, max_logprobs=20))(
        jnp.zeros((4, vocab), jnp.float32), make_inputs(4)
    )
    seen = set()

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("sort", "top_k"):
                seen.add((eqn.primitive.name, eqn.invars[0].aval.shape[-1]))
            for sub in jax.tree.leaves(
                list(eqn.params.values()),
                is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"),
            ):
                inner = getattr(sub, "jaxpr", sub)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(closed.jaxpr)
    assert ("top_k", vocab // 128) in seen, seen
    assert max(size for _, size in seen) < vocab, seen
