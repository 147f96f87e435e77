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
# Pools and tables that would be seen to be copied.
LARGE = SIZES | {"num_blocks": 4096, "num_rows": 50, "max_model_len": 404}
EVERYTHING = LARGE | {"num_host_blocks": 3072, "preemption_mode": "swap"}
PROMPT = [5, 9, 17, 33, 2, 60, 41, 7, 23, 11]
OFF = {"group": np.int32(NULL), "beam_leader": np.int32(NULL), "beam_index": np.int32(0)}


@cache
def compile_everything():
    """The step with everything on, compiled ahead, and its state's shapes."""
    return compile_step(4, EVERYTHING)


def compile_step(num_tokens, sizes):
    config = make_config(**sizes)
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
    runner = Runner(params, num_tokens=4, **EVERYTHING)
    runner.step_fn, _ = compile_everything()
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


def assert_not_copied(compiled, state, arrays):
    """All pools are aliased to the outputs, temporary memory is far below the smallest of them, and
    no copy instruction has the shape of these arrays."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pools = [x for x in (state.k_pool, state.host_k_pool) if x is not None and x.size]
    assert memory.alias_size_in_bytes >= sum(2 * x.size * 4 for x in pools)
    assert memory.temp_size_in_bytes < min(x.size * 4 for x in pools) // 2
    for array in (*pools, *arrays):
        assert not copies_of(array, text)


def copies_of(array, text):
    shape = ",".join(map(str, array.shape))
    return re.findall(rf"\[{shape}\]\S* copy\(", text)


def test_pools_and_tables_are_not_copied():
    """Neither the four pools nor the large tables of the scheduler, though beams move between rows
    and rows to the host."""
    compiled, state = compile_everything()
    assert_not_copied(compiled, state, [state.scheduler.rows.token_ids])
    # The tables of the host's blocks are copied as they come and go; they have the same shape.
    tables = state.scheduler.blocks.block_tables
    assert tables.shape == state.scheduler.swap.host_tables.shape
    assert len(copies_of(tables, compiled.as_text())) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [4, 16])
def test_without_a_host_pool_no_table_is_copied(num_tokens):
    compiled, state = compile_step(num_tokens, LARGE)
    tables = state.scheduler.rows.token_ids, state.scheduler.blocks.block_tables
    assert_not_copied(compiled, state, tables)
