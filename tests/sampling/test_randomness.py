"""Draws follow the distribution, depend on (seed, position) only, and on nothing around the row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pagedjax.sampling import Sampled, SamplingInputs, sample
from tests.sampling.reference import filtered, make_inputs

VOCAB = 1000
ROWS = 2048


@partial(jax.jit, static_argnames="rows_per_block")
def run(logits: jax.Array, inputs: SamplingInputs, rows_per_block: int | None = None) -> Sampled:
    return sample(logits, inputs, max_logprobs=5, rows_per_block=rows_per_block)


def _logits() -> np.ndarray:
    return (np.random.default_rng(7).normal(size=VOCAB) * 2).astype(np.float32)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        pytest.param({"temperature": 0.5}, marks=pytest.mark.slow),
        {"temperature": 3.0},
        pytest.param({"temperature": 1.0, "top_k": 40}, marks=pytest.mark.slow),
        {"temperature": 2.0, "top_k": 500},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 1.5, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.1},
        pytest.param({"temperature": 1.2, "top_k": 50, "top_p": 0.6}, marks=pytest.mark.slow),
        {"temperature": 2.0, "top_k": 300, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, float]) -> None:
    row = _logits()
    by = "position" if "top_k" in params else "seed"
    expected = filtered(row, **params)
    logits = jnp.asarray(np.broadcast_to(row, (ROWS, VOCAB)))
    counts = np.zeros(VOCAB)
    for start in range(0, 2 * ROWS, ROWS):
        numbers = {by: np.arange(start, start + ROWS)}
        out = run(logits, make_inputs(ROWS, **params, **numbers), rows_per_block=ROWS)
        counts += np.bincount(out.token_ids, minlength=VOCAB)
    assert not np.any(counts[~expected.kept])
    # Rare tokens share a bin, so that every bin expects at least 8 draws.
    mean = expected.probabilities * counts.sum()
    common = mean >= 8
    observed, wanted = counts[common], mean[common]
    if mean[~common].sum() >= 8:
        observed = np.append(observed, counts[~common].sum())
        wanted = np.append(wanted, mean[~common].sum())
    else:
        wanted = wanted * observed.sum() / wanted.sum()
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


def _mixed(rows: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(11)
    logits = (rng.normal(size=(rows, VOCAB)) * rng.uniform(0.2, 4, (rows, 1))).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    params = {
        "temperature": rng.choice([0, 0.3, 1.0, 2.0], rows),
        "top_k": rng.choice([0, 1, 20, 400], rows),
        "top_p": rng.choice([1.0, 0.9, 0.4], rows),
        "min_p": rng.choice([0.0, 0.01], rows),
        "seed": rng.integers(0, 2**32, rows),
        "position": rng.integers(0, 1000, rows),
        "num_logprobs": rng.choice([-1, 0, 5], rows),
        "forbid_stop": rng.choice([False, True], rows),
    }
    return logits, params


def _inputs(params: dict[str, np.ndarray], rows: np.ndarray) -> SamplingInputs:
    return make_inputs(len(rows), stop_token_ids=[3], **{k: v[rows] for k, v in params.items()})


def _assert_rows_equal(out: Sampled, rows: np.ndarray, whole: Sampled) -> None:
    for name in vars(whole):
        expected = np.asarray(getattr(whole, name))[rows]
        np.testing.assert_array_equal(np.asarray(getattr(out, name)), expected, err_msg=name)


def test_a_row_is_bit_identical_whatever_is_around_it() -> None:
    logits, params = _mixed(24)
    everyone = np.arange(24)
    whole = run(logits, _inputs(params, everyone))
    assert len(set(np.asarray(whole.token_ids))) > 15
    _assert_rows_equal(run(logits, _inputs(params, everyone), 7), everyone, whole)
    for row in everyone:
        alone = np.asarray([row])
        _assert_rows_equal(run(logits[alone], _inputs(params, alone)), alone, whole)
    rng = np.random.default_rng(0)
    for _ in range(3):
        shuffled = rng.permutation(everyone)
        _assert_rows_equal(run(logits[shuffled], _inputs(params, shuffled)), shuffled, whole)
    # A row that does not sample changes nothing for the others either.
    inputs = make_inputs(24, stop_token_ids=[3], valid=everyone % 2 == 0, **params)
    half = jax.tree.map(lambda a: a[::2], run(logits, inputs))
    _assert_rows_equal(half, everyone[::2], whole)


@pytest.mark.parametrize("rows_per_block", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_vmap_gives_the_same_rows(rows_per_block: int) -> None:
    logits, params = _mixed(12)
    everyone = np.arange(12)
    whole = run(logits, _inputs(params, everyone))
    batched = jax.tree.map(lambda a: a.reshape(3, 4, *a.shape[1:]), _inputs(params, everyone))
    one = partial(sample, max_logprobs=5, rows_per_block=rows_per_block)
    out = jax.jit(jax.vmap(one))(logits.reshape(3, 4, VOCAB), batched)
    out = jax.tree.map(lambda a: a.reshape(12, *a.shape[2:]), out)
    _assert_rows_equal(out, everyone, whole)


def test_random_numbers_are_keyed_by_seed_and_position() -> None:
    logits = jnp.zeros((ROWS, VOCAB), jnp.float32)
    same = run(logits, make_inputs(ROWS, temperature=1, seed=5, position=9), ROWS).token_ids
    assert len(set(np.asarray(same))) == 1
    grid = {"seed": np.arange(ROWS) // 32, "position": np.arange(ROWS) % 32}
    by_grid = np.asarray(run(logits, make_inputs(ROWS, temperature=1, **grid), ROWS).token_ids)
    swapped = {"seed": grid["position"], "position": grid["seed"]}
    by_swap = np.asarray(run(logits, make_inputs(ROWS, temperature=1, **swapped), ROWS).token_ids)
    assert np.mean(by_grid == by_swap) < 0.05
    # Neighbouring seeds and positions do not move together.
    table = by_grid.reshape(64, 32).astype(float)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.1


def test_draws_are_the_same_in_every_version() -> None:
    """A stored request replays: these tokens may only change with a note in the changelog."""
    logits = jnp.asarray(np.broadcast_to(_logits(), (8, VOCAB)))
    inputs = make_inputs(8, temperature=0.8, top_k=200, top_p=0.9, seed=np.arange(8), position=4)
    assert run(logits, inputs).token_ids.tolist() == GOLDEN


GOLDEN = [58, 416, 791, 503, 44, 416, 79, 103]
