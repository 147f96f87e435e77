"""The whole step on a tiny model: memory, padding, poison, chunks, neighbours, `run`."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.execute import StepConfig
from pagedjax.core.invariants import assert_invariants, check_invariants
from pagedjax.core.requests import add_request
from pagedjax.core.state import EngineState, Status
from pagedjax.core.step import init_state, step
from pagedjax.models.config import ModelConfig
from pagedjax.models.forward import forward_dense
from pagedjax.models.llama import LlamaModel
from pagedjax.models.params import init_params
from tests.core.driver import make_params
from tests.core.forms import compile_form

MODEL = LlamaModel(
    config=ModelConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        eos_token_ids=(),
    )
)


# A pool that would be seen to be copied. Compiled ahead, for all that looks at it or runs it.
LARGE = {"num_blocks": 4096}


@cache
def compile_large(form, num_tokens):
    config = make_config(**LARGE)
    weights = partial(init_params, MODEL.config, dtype=jnp.float32, stacked=False)
    state = jax.eval_shape(lambda: init_state(config, kv_dtype=jnp.float32))
    shapes = jax.eval_shape(weights, jax.random.key(0)), state
    return compile_form(form, *shapes, config=config, num_tokens=num_tokens), state


# Chunks of prompts, blocks of one token, and not enough of them.
CHUNKS = {"num_tokens": 4, "block_size": 1, "num_blocks": 48}

DENSE = jax.jit(partial(forward_dense, config=MODEL.config))


@pytest.fixture(scope="module")
def params():
    weights = init_params(MODEL.config, jax.random.key(0), dtype=jnp.float32, stacked=False)
    return jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, weights)


def make_config(**sizes):
    defaults = {
        "num_rows": 6,
        "max_num_seqs": 4,
        "num_blocks": 32,
        "block_size": 4,
        "max_model_len": 48,
        "max_num_batched_tokens": 16,
        "max_logprobs": 2,
        "max_stop_token_ids": 2,
        "max_admissions": 4,
    }
    return StepConfig(scheduler=SchedulerConfig(**{**defaults, **sizes}), model=MODEL)


class Runner:
    """A state and its jitted step; one bucket."""

    functions: dict = {}  # noqa: RUF012  compiled once a configuration, for all tests

    def __init__(self, params, num_tokens=16, **sizes):
        self.params, self.num_tokens, self.config = params, num_tokens, make_config(**sizes)
        key = (self.config, num_tokens)
        if key not in self.functions:
            self.functions[key] = (
                jax.jit(partial(step, config=self.config, num_tokens=num_tokens), donate_argnums=1),
                jax.jit(partial(add_request, config=self.config.scheduler)),
                jax.jit(partial(check_invariants, config=self.config.scheduler)),
            )
        self.step_fn, self.add_fn, self.check_fn = self.functions[key]
        self.state = init_state(self.config, kv_dtype=jnp.float32)
        self.outputs: dict[int, list] = {}

    def add(self, row, prompt, max_total, **changes):
        sizes = self.config.scheduler
        padded = np.zeros(sizes.max_padded_len, np.int32)
        padded[: len(prompt)] = prompt
        request = make_params(sizes, max_total, stop=False, **changes)
        scheduler = self.add_fn(
            self.state.scheduler, np.int32(row), padded, np.int32(len(prompt)), request
        )
        self.state = dataclasses.replace(self.state, scheduler=scheduler)
        self.outputs[row] = []

    def step(self):
        self.state, output = self.step_fn(self.params, self.state)
        assert_invariants(self.check_fn(self.state.scheduler))
        tokens, logprobs = np.asarray(output.token_ids), np.asarray(output.logprob)
        for row in self.outputs:
            if tokens[row] >= 0:
                self.outputs[row].append((int(tokens[row]), float(logprobs[row])))
        return output

    def finish(self, poison=False):
        """Step until all is done; -> row -> [(token, logprob)]."""
        for _ in range(300):
            output = self.step()
            if poison:
                self.poison_free_blocks()
            if (np.asarray(output.status) == Status.EMPTY).all():
                return self.outputs
        raise AssertionError("starves")

    def poison_free_blocks(self):
        """NaN in every block that no row holds, and that is not cached."""
        blocks, slot = self.state.scheduler.blocks, self.state.scheduler.prefix.slot
        free = (np.asarray(blocks.ref_counts) == 0) & (np.asarray(slot) >= 2**31 - 1)

        def poison(pool):
            return jnp.where(free.reshape(1, -1, *[1] * (pool.ndim - 2)), jnp.nan, pool)

        self.state = dataclasses.replace(
            self.state, k_pool=poison(self.state.k_pool), v_pool=poison(self.state.v_pool)
        )


def prompts(seed=0, count=5):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, int(n)).tolist() for n in rng.integers(1, 30, count)]


def dense_greedy(params, prompt, max_total):
    """Greedy tokens by a dense forward pass without any cache."""
    tokens = list(prompt)
    out = []
    while len(tokens) < max_total:
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(DENSE(params, padded))[0, len(tokens) - 1]
        token = int(logits.argmax())
        logprob = float(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        out.append((token, logprob))
        tokens.append(token)
    return out


def add_all(runner, some):
    for row, prompt in enumerate(some):
        runner.add(row, prompt, len(prompt) + 10, num_logprobs=np.int32(0))


def assert_same_tokens(got, want, tolerance=1e-5):
    for row in want:
        assert [t for t, _ in got[row]] == [t for t, _ in want[row]], f"row {row}"
        np.testing.assert_allclose(
            [p for _, p in got[row]], [p for _, p in want[row]], atol=tolerance
        )


def test_paged_engine_equals_dense_model(params):
    runner = Runner(params)
    some = prompts()
    add_all(runner, some)
    want = {r: dense_greedy(params, p, len(p) + 10) for r, p in enumerate(some)}
    assert_same_tokens(runner.finish(), want)
    # Again: now every prompt is wholly in the cache.
    add_all(runner, some)
    assert_same_tokens(runner.finish(), want)
    assert int(runner.state.scheduler.counters.num_hit_tokens) > 20


@pytest.mark.parametrize(
    "sizes",
    [
        CHUNKS,
        # By default schedulers like these are seen under random traffic.
        pytest.param({"num_tokens": 4, "num_blocks": 12}, marks=pytest.mark.slow),
        pytest.param({"num_tokens": 4, "enable_prefix_caching": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_chunks_pressure_and_block_size_change_nothing(params, sizes):
    some = prompts()
    runner = Runner(params, **sizes)
    add_all(runner, some)
    got = runner.finish()
    want = {r: dense_greedy(params, p, len(p) + 10) for r, p in enumerate(some)}
    assert_same_tokens(got, want)
    if "num_blocks" in sizes:
        assert int(runner.state.scheduler.counters.num_preemptions) > 0


def test_nan_in_free_blocks_changes_no_bit(params):
    clean, poisoned = Runner(params), Runner(params)
    for runner in (clean, poisoned):
        add_all(runner, prompts(1))
    poisoned.poison_free_blocks()
    assert poisoned.finish(poison=True) == clean.finish()


def test_padding_writes_nothing(params):
    """Sentinel values in every block but those of one row; a step with 15 rows of padding."""
    runner = Runner(params)
    runner.add(0, [5], 3)
    sevens = [jnp.full_like(runner.state.k_pool, 7.0) for _ in range(2)]
    runner.state = dataclasses.replace(runner.state, k_pool=sevens[0], v_pool=sevens[1])
    runner.step()
    tables = runner.state.scheduler.blocks.block_tables
    changed = np.asarray(runner.state.k_pool != 7.0).any(axis=0)
    slots = np.argwhere(changed.reshape(changed.shape[0] * changed.shape[1], -1).any(-1))
    assert slots.ravel().tolist() == [int(tables[0, 0]) * 4], "one token, one slot"


def test_neighbours_do_not_matter(params):
    some = prompts(2)
    together = Runner(params)
    add_all(together, some)
    got = together.finish()
    for row, prompt in enumerate(some):
        alone = Runner(params)
        alone.add(0, prompt, len(prompt) + 10, num_logprobs=np.int32(0))
        assert_same_tokens({row: alone.finish()[0]}, {row: got[row]})


def test_seeded_sampling_is_independent_of_everything(params):
    """Same seed, same tokens: alone, in a crowd, in another row, chunked, preempted."""
    sampled = {"temperature": np.float32(1.0), "seed": np.uint32(1234)}
    prompt = prompts(3)[0]
    alone = Runner(params)
    alone.add(0, prompt, len(prompt) + 12, **sampled)
    want = alone.finish()[0]
    crowd = Runner(params, **CHUNKS)
    for row, other in enumerate(prompts(4, count=4)):
        crowd.add(row, other, min(48, len(other) + 15), temperature=np.float32(1.3))
    crowd.add(5, prompt, len(prompt) + 12, **sampled)
    got = crowd.finish()[5]
    assert [t for t, _ in got] == [t for t, _ in want]
    assert len({t for t, _ in want}) > 3


def test_run_equals_steps_and_stops_when_the_host_is_needed(params):
    one, many = Runner(params), Runner(params, **LARGE)
    for runner in (one, many):
        runner.add(0, [1, 2, 3], 9)
        runner.add(1, [4, 5], 20)
    run_fn, _ = compile_large("run", 16)
    state, output = run_fn(params, many.state)
    count = int(output.num_steps)
    assert count == 6, "row 0 needs six tokens; then the host is told"
    tokens = np.asarray(output.steps.token_ids)
    for i in range(count):
        assert tokens[i].tolist() == np.asarray(one.step().token_ids).tolist()
    assert np.asarray(output.steps.status)[count - 1, 0] == Status.FINISHED
    assert (tokens[count:] == 0).all()
    assert_invariants(many.check_fn(state.scheduler))
    ours, theirs = state.scheduler, one.state.scheduler  # of pools of different sizes
    for name in ("rows", "counters", "step"):
        jax.tree.map(np.testing.assert_array_equal, getattr(ours, name), getattr(theirs, name))
    for name in ("block_tables", "num_blocks_held"):
        np.testing.assert_array_equal(getattr(ours.blocks, name), getattr(theirs.blocks, name))


# By default `run` shows a loop over the whole step, and tests/core/test_simulate.py a scan over the
# scheduler that equals the engine's steps.
@pytest.mark.slow
def test_scan_over_the_whole_step(params):
    runner, loop = Runner(params), Runner(params)
    for r in (runner, loop):
        add_all(r, prompts(5))
    config = runner.config

    @jax.jit
    def hundred(params, state):
        return jax.lax.scan(
            lambda s, _: step(params, s, config=config, num_tokens=16), state, None, length=100
        )

    state, outputs = jax.device_get(hundred(params, runner.state))
    for i in range(100):
        one = jax.tree.map(lambda x, i=i: x[i], outputs)
        jax.tree.map(np.testing.assert_array_equal, one, loop.step())
    jax.tree.map(np.testing.assert_array_equal, state, loop.state)
    assert (state.scheduler.rows.status == Status.EMPTY).all()


@pytest.mark.parametrize(
    ("form", "num_tokens"),
    [
        pytest.param("step", 1, marks=pytest.mark.slow),
        ("run", 16),
        # By default with everything on, in tests/core/test_fork_step.py.
        pytest.param("step", 16, marks=pytest.mark.slow),
        pytest.param("run", 2, marks=pytest.mark.slow),
        pytest.param("scan", 2, marks=pytest.mark.slow),
    ],
)
def test_a_donated_pool_is_never_copied(form, num_tokens):
    """From the compiled program: the pools are aliased to the outputs, temporary memory is far
    below one pool, and no copy instruction has the pool's shape."""
    compiled, state = compile_large(form, num_tokens)
    pool_bytes = state.k_pool.size * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 2
    shape = ",".join(map(str, state.k_pool.shape))
    copies = re.findall(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())
    assert not copies


@pytest.mark.slow
def test_undonated_use_would_be_seen(params):
    """The test above can fail: without donation nothing is aliased."""
    config = make_config(num_blocks=4096)
    state = jax.eval_shape(lambda: init_state(config, kv_dtype=jnp.float32))
    compiled = jax.jit(partial(step, config=config, num_tokens=2)).lower(params, state).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 0


def test_state_signature_is_a_fixed_point(params):
    config = make_config()
    state = jax.eval_shape(lambda: init_state(config, kv_dtype=jnp.float32))
    after, _ = jax.eval_shape(partial(step, config=config, num_tokens=16), params, state)
    assert isinstance(after, EngineState)
    before_leaves, before_tree = jax.tree.flatten(state)
    after_leaves, after_tree = jax.tree.flatten(after)
    assert before_tree == after_tree
    for a, b in zip(before_leaves, after_leaves, strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
