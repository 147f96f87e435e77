"""The whole step on a tiny model with rows that share blocks: poison, dense results, memory."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.state import NULL, Status
from pagedjax.core.step import init_state
from pagedjax.models.params import init_params
from tests.core.forms import compile_form
from tests.core.test_step import DENSE, MODEL, Runner, make_config, params  # noqa: F401 (a fixture)

SIZES = {"enable_forks": True, "max_beam_width": 3, "max_logprobs": 6, "num_blocks": 24}
# A pool and tables that would be seen to be copied.
LARGE = SIZES | {"num_blocks": 4096, "num_rows": 50, "max_model_len": 404}
PROMPT = [5, 9, 17, 33, 2, 60, 41, 7, 23, 11]
OFF = {"group": np.int32(NULL), "beam_leader": np.int32(NULL), "beam_index": np.int32(0)}


@cache
def compile_large(num_tokens):
    """The step, compiled ahead, and its state's shapes."""
    config = make_config(**LARGE)
    state = jax.eval_shape(lambda: init_state(config, kv_dtype=jnp.float32))
    weights = partial(init_params, MODEL.config, dtype=jnp.float32, stacked=False)
    shapes = jax.eval_shape(weights, jax.random.key(0)), state
    return compile_form("step", *shapes, config=config, num_tokens=num_tokens), state


def sampled(runner, seeds, group, **changes):
    for row, seed in enumerate(seeds):
        given = OFF | {
            "group": np.int32(group),
            "seed": np.uint32(seed),
            "temperature": np.float32(1),
            "num_logprobs": np.int32(0),
        }
        runner.add(row, PROMPT, 30, **given | changes)
    return runner.finish(poison=True)


@pytest.mark.slow  # tests/shell/test_samples.py shows it through the engine
def test_forks_compute_what_single_rows_do(params):  # noqa: F811
    """Whatever is free holds NaN, so a row that read a block that is not its own would show."""
    shared = sampled(Runner(params, **SIZES), (3, 4, 5), 1)
    for seed, outputs in zip((3, 4, 5), shared.values(), strict=True):
        alone = sampled(Runner(params, **SIZES), (seed,), NULL)[0]
        assert [token for token, _ in outputs] == [token for token, _ in alone]
        np.testing.assert_allclose(
            [logprob for _, logprob in outputs], [logprob for _, logprob in alone], atol=1e-4
        )
    assert len({tuple(token for token, _ in outputs) for outputs in shared.values()}) == 3


def dense_beams(weights, width, max_total):
    """A plain search over the dense model, no stop tokens."""
    beams = [(tuple(PROMPT), 0.0)]
    for length in range(len(PROMPT), max_total):
        padded = np.zeros((len(beams), 48), np.int32)
        for i, (tokens, _) in enumerate(beams):
            padded[i, :length] = tokens
        logits = np.asarray(DENSE(weights, padded))[:, length - 1].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))[:, None]
        logprobs -= logits.max(1, keepdims=True)
        candidates = [
            ((*tokens, token), total + logprobs[i, token])
            for i, (tokens, total) in enumerate(beams)
            for token in np.argsort(-logprobs[i])[: 2 * width].tolist()
        ]
        beams = sorted(candidates, key=lambda c: -c[1])[:width]
    return dict(beams)


def test_beams_equal_a_dense_search(params):  # noqa: F811
    runner = Runner(params, num_tokens=4, **LARGE)
    runner.step_fn, _ = compile_large(4)
    for row in range(3):
        runner.add(
            row,
            PROMPT,
            24,
            group=np.int32(7),
            beam_leader=np.int32(0),
            beam_index=np.int32(row),
            num_logprobs=np.int32(6),
        )
    for _ in range(40):
        output = runner.step()
        runner.poison_free_blocks()
        if (np.asarray(output.status)[:3] == Status.FINISHED).all():
            break
    rows = runner.state.scheduler.rows
    found = {
        tuple(np.asarray(rows.token_ids)[row, :24].tolist()): float(rows.cum_logprob[row])
        for row in range(3)
    }
    expected = dense_beams(params, 3, 24)
    assert found.keys() == expected.keys()
    for tokens, total in expected.items():
        assert found[tokens] == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("num_tokens", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_pool_and_tables_are_not_copied(num_tokens):
    """Neither the pool nor the large tables of the scheduler, though beams move between rows."""
    compiled, state = compile_large(num_tokens)
    memory = compiled.memory_analysis()
    pool_bytes = state.k_pool.size * 4
    assert memory.alias_size_in_bytes >= 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 2
    rows = state.scheduler.rows
    for array in (state.k_pool, rows.token_ids, state.scheduler.blocks.block_tables):
        shape = ",".join(map(str, array.shape))
        assert not re.findall(rf"\[{shape}\]\S* copy\(", compiled.as_text())
