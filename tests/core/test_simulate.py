"""The simulator: the engine's own steps, invariants under limits, vmap, the book of requests."""

import dataclasses
import itertools
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.execute import StepConfig
from pagedjax.core.invariants import assert_invariants, check_invariants
from pagedjax.core.policies import newest
from pagedjax.core.requests import add_request
from pagedjax.core.state import Status
from pagedjax.core.step import init_state, step
from pagedjax.models.config import ModelConfig
from pagedjax.models.llama import LlamaModel
from pagedjax.models.params import init_params
from pagedjax.simulate import (
    NEVER,
    Requests,
    Result,
    SimulationConfig,
    Steps,
    init_simulation,
    make_limits,
    make_trace,
    measure,
    prepare,
    prompt_tokens,
    simulate,
    simulation_step,
    with_withheld_blocks,
)
from tests.core.driver import make_params

VOCAB = 512
NUM_REQUESTS = 24
# These programs run for a few hundred steps: compiling is most of the cost.
QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}}


def make_config(num_steps=90, num_tokens=16, max_entries=3, **sizes):
    defaults = {
        "num_rows": 8,
        "max_num_seqs": 6,
        "num_blocks": 40,
        "block_size": 4,
        "max_model_len": 48,
        "max_num_batched_tokens": 16,
        "max_logprobs": 0,
        "max_stop_token_ids": 1,
        "max_admissions": 3,
        "max_retirements": 2,
        "max_preemptions": 3,
        "index_ways": 8,
    }
    return SimulationConfig(
        scheduler=SchedulerConfig(**{**defaults, **sizes}),
        num_tokens=num_tokens,
        num_steps=num_steps,
        max_entries=max_entries,
        vocab_size=VOCAB,
    )


CONFIG = make_config()
# What `simulated` can choose from; its traces run under the first of each, as CONFIG's do.
SCHEDULING, PREEMPTION = ("fcfs", "priority", "longest_prefix"), (newest, "most_tokens")


def random_trace(seed, *, rate=0.5, count=NUM_REQUESTS, size=NUM_REQUESTS, longest=47):
    """Requests of a few groups; prompts go on after the shared prefix, so no two are equal."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 16, count)
    prompt = prefix + rng.integers(1, 12, count)
    output = np.minimum(rng.integers(1, 20, count), longest - prompt)
    arrival = np.floor(np.cumsum(rng.exponential(1 / rate, count)))
    return make_trace(arrival, prompt, output, rng.integers(0, 3, count), prefix, size=size)


@lru_cache(maxsize=1)
def watched():
    """(trace, limits) -> every step's (Simulation, StepOutput, Violations), of CONFIG."""

    def run(trace, limits):
        arrivals = prepare(trace, limits, config=CONFIG)

        def body(sim, _):
            sim, output = simulation_step(sim, arrivals, config=CONFIG)
            whole = with_withheld_blocks(sim.scheduler, limits)
            return sim, (sim, output, check_invariants(whole, config=CONFIG.scheduler))

        start = init_simulation(trace, limits, config=CONFIG)
        return jax.lax.scan(body, start, None, length=CONFIG.num_steps)[1]

    return jax.jit(run, **QUICK)


@lru_cache(maxsize=1)
def vmapped():
    config = dataclasses.replace(
        without_cond(CONFIG), scheduling_policies=SCHEDULING, preemption_policies=PREEMPTION
    )
    return jax.jit(jax.vmap(partial(simulate, config=config)), **QUICK)


def at(tree, i):
    return jax.tree.map(lambda x: np.asarray(x)[i], tree)


def simulated(traces, limits):
    """`simulate` of up to six traces at once: a list of results. (One program for all tests.)"""
    count = len(traces)
    results = vmapped()(
        stack(traces + traces[:1] * (6 - count)), stack(limits + limits[:1] * (6 - count))
    )
    return [at(results, i) for i in range(count)]


def alone(trace, limits):
    """The result of one scheduler, put together from `watched`."""
    sims, outputs, violations = watched()(trace, limits)
    assert_invariants(violations)
    names = [field.name for field in dataclasses.fields(Requests)]
    arrival, preemptions = np.asarray(trace.arrival_step), outputs.counters.num_preemptions
    come = [(arrival <= i).sum() for i in range(CONFIG.num_steps)]
    return Result(
        requests=Requests(**dict(zip(names, np.asarray(sims.book)[-1].T, strict=True))),
        steps=Steps(
            num_running=outputs.num_running,
            num_waiting=outputs.num_waiting,
            num_outside=come - np.asarray(sims.num_entered),
            num_scheduled_tokens=outputs.num_scheduled_tokens,
            num_free_blocks=outputs.num_free_blocks,
            num_evictable_blocks=outputs.num_evictable_blocks,
            num_preemptions=np.diff(np.asarray(preemptions), prepend=0),
        ),
    )


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def without_cond(config):
    return dataclasses.replace(
        config, scheduler=dataclasses.replace(config.scheduler, use_cond=False)
    )


# ---- the real engine ---------------------------------------------------------------------------
MODEL = LlamaModel(
    config=ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        eos_token_ids=(),
    )
)


def engine_steps(trace, num_steps, **sizes):
    """Run the real engine over the trace: after every step, its (scheduler state, output)."""
    sizes = dataclasses.replace(CONFIG.scheduler, **sizes)
    config = StepConfig(scheduler=sizes, model=MODEL)
    params = init_params(MODEL.config, jax.random.key(0), dtype=jnp.float32, stacked=False)
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)
    step_fn = jax.jit(partial(step, config=config, num_tokens=CONFIG.num_tokens), **QUICK)
    add_fn = jax.jit(partial(add_request, config=sizes), **QUICK)
    prompt_fn = jax.jit(partial(prompt_tokens, config=CONFIG), **QUICK)
    state, waiting = init_state(config, kv_dtype=jnp.float32), list(range(NUM_REQUESTS))
    for i in range(num_steps):
        empty = np.flatnonzero(np.asarray(state.scheduler.rows.status) == Status.EMPTY)
        for row in empty[: CONFIG.max_entries]:
            if not waiting or trace.arrival_step[waiting[0]] > i:
                break
            index = waiting.pop(0)
            prompt = trace.num_prompt_tokens[index]
            request = make_params(sizes, prompt + trace.num_output_tokens[index], stop=False)
            scheduler = add_fn(state.scheduler, row, prompt_fn(trace, index), prompt, request)
            state = dataclasses.replace(state, scheduler=scheduler)
        state, output = step_fn(params, state)
        yield jax.tree.map(np.asarray, (state.scheduler, output))


def test_every_step_equals_the_engine_on_a_real_model():
    """An engine *built* with 11 blocks and 6 rows; a simulator of 40 and 8 that is *told* so."""
    limits = make_limits(CONFIG.scheduler, num_blocks=11, num_rows=6)
    trace = random_trace(3)
    trace = dataclasses.replace(  # one request that can never fit 11 blocks, but would fit 40
        trace,
        num_prompt_tokens=trace.num_prompt_tokens.at[5].set(30),
        num_output_tokens=trace.num_output_tokens.at[5].set(17),
    )
    sims, outputs, violations = watched()(trace, limits)
    assert_invariants(violations)
    engine = engine_steps(trace, CONFIG.num_steps, num_blocks=11, num_rows=6)
    for i, (real, real_output) in enumerate(engine):
        ours, output = at(sims, i).scheduler, at(outputs, i)
        for name in ("status", "arrival", "error", "num_tokens", "num_computed_tokens"):
            got, want = getattr(ours.rows, name), getattr(real.rows, name)
            np.testing.assert_array_equal(got[:6], want, err_msg=f"{name}, step {i}")
        assert (ours.rows.status[6:] == Status.EMPTY).all()
        np.testing.assert_array_equal(ours.blocks.block_tables[:6], real.blocks.block_tables)
        np.testing.assert_array_equal(ours.blocks.num_blocks_held[:6], real.blocks.num_blocks_held)
        np.testing.assert_array_equal(ours.blocks.ref_counts[:11], real.blocks.ref_counts)
        free = int(real.blocks.num_free)
        np.testing.assert_array_equal(ours.blocks.free_stack[:free], real.blocks.free_stack[:free])
        for name in (
            "num_running num_waiting num_scheduled_tokens num_free_blocks num_evictable_blocks"
        ).split():
            assert getattr(output, name) == getattr(real_output, name), (name, i)
        jax.tree.map(np.testing.assert_array_equal, ours.counters, real.counters)
    counters = at(sims, -1).scheduler.counters
    assert min(counters.num_preemptions, counters.num_evictions, counters.num_hit_tokens) > 0
    assert counters.num_block_copies > 0
    assert np.flatnonzero(at(sims, -1).book[:, 5]).tolist() == [5], "refused"
    assert (np.asarray(outputs.num_running) + np.asarray(outputs.num_waiting)).max() == 6


# ---- properties --------------------------------------------------------------------------------
REQUEST = st.tuples(
    st.integers(0, 6),  # steps after the one before
    st.integers(1, 30),  # prompt
    st.integers(1, 17),  # output
    st.integers(0, 2),  # group
    st.integers(0, 30),  # prefix
)


@settings(max_examples=25)
@given(st.lists(REQUEST, min_size=1, max_size=NUM_REQUESTS), st.integers(1, 40), st.integers(1, 8))
def test_invariants_and_book(requests, num_blocks, num_rows):
    """Any trace, any limits: every invariant after every step, and a book that adds up."""
    gaps, prompt, output, group, prefix = zip(*requests, strict=True)
    arrival = list(itertools.accumulate(gaps))
    trace = make_trace(arrival, prompt, output, group, prefix, size=NUM_REQUESTS)
    limits = make_limits(CONFIG.scheduler, num_blocks=num_blocks, num_rows=num_rows)
    check_book(trace, limits, alone(trace, limits))


def check_book(trace, limits, result):
    trace, limits, requests, steps = jax.tree.map(
        np.asarray, (trace, limits, result.requests, result.steps)
    )
    admission, first, finish = (
        requests.admission_step,
        requests.first_token_step,
        requests.finish_step,
    )
    total = trace.num_prompt_tokens + trace.num_output_tokens
    impossible = -(-(total - 1) // CONFIG.scheduler.block_size) > limits.num_blocks
    impossible |= total > CONFIG.scheduler.max_model_len
    refused = requests.refused == 1
    assert (impossible | ~refused).all()
    assert (refused | ~(impossible & (finish >= 0))).all()
    ran, spoke, ended = admission >= 0, first >= 0, (finish >= 0) & ~refused
    assert (ran[spoke]).all()
    assert (spoke[ended]).all()
    assert not ran[refused].any()
    assert (admission >= trace.arrival_step)[ran].all()
    assert (first >= admission)[spoke].all()
    # A token a step at most, and all of them if nothing came between.
    assert (finish - first >= trace.num_output_tokens - 1)[ended].all()
    cached = requests.num_cached_tokens
    assert ((cached >= 0) == ran).all()
    assert (cached < trace.num_prompt_tokens)[ran].all()
    assert requests.num_preemptions.sum() == steps.num_preemptions.sum()
    # Every request that has come is in exactly one place after each step.
    for i in range(CONFIG.num_steps):
        come = (trace.arrival_step <= i).sum()
        gone = ((finish >= 0) & (finish <= i)).sum()
        inside = steps.num_running[i] + steps.num_waiting[i]
        assert come == gone + inside + steps.num_outside[i]
    if ended.all() and steps.num_preemptions.sum() == 0:
        computed = (total - 1 - cached).sum()
        assert steps.num_scheduled_tokens.sum() == computed
    assert (steps.num_free_blocks + steps.num_evictable_blocks <= limits.num_blocks).all()


def test_figures_worked_out_by_hand():
    """T = 16, block size 4. Request 0: prompt 20, 3 tokens. Request 1: the same first 18, then its
    own. Request 2 would need 12 blocks. Request 3 never comes."""
    trace = make_trace(
        [2, 5, 5], [20, 22, 46], [3, 1, 2], [1, 1, 2], [18, 18, 0], size=NUM_REQUESTS
    )
    limits = make_limits(CONFIG.scheduler, num_blocks=11)
    (result,) = simulated([trace], [limits])
    requests = at(result.requests, slice(0, 4))
    # Request 0 computes 16 tokens in step 2, the last 4 and its first token in step 3, ends in 5.
    assert requests.admission_step.tolist() == [2, 5, -1, -1]
    assert requests.first_token_step.tolist() == [3, 5, -1, -1]
    assert requests.finish_step.tolist() == [5, 5, 5, -1]
    # Four whole blocks, and two tokens of the fifth, which is copied.
    assert requests.num_cached_tokens.tolist() == [0, 18, -1, -1]
    assert requests.refused.tolist() == [0, 0, 1, 0]
    steps = at(result.steps, slice(0, 7))
    assert steps.num_scheduled_tokens.tolist() == [0, 0, 16, 4, 1, 5, 0]
    assert steps.num_running.tolist() == [0, 0, 1, 1, 1, 0, 0]
    metrics = measure(trace, limits, result)
    assert np.asarray(metrics.time_to_first_token)[:4].tolist() == [2, 1, -1, -1]
    assert np.asarray(metrics.queueing)[:4].tolist() == [0, 0, -1, -1]
    assert float(metrics.hit_rate) == pytest.approx(18 / 42)
    assert float(metrics.preemption_rate) == 0
    assert int(metrics.num_finished) == 2
    # Blocks held after steps 2 to 5: 4, 5, 6, then those of both: 6 and 6, of which 4 are shared.
    assert float(metrics.pool_utilisation) == pytest.approx((4 + 5 + 6 + 8) / 4 / 11)


def pairs_of_policies(limits):
    """The same limits under each of the six pairs of policies."""
    return [
        dataclasses.replace(limits, scheduling_policy=i, preemption_policy=j)
        for i in range(len(SCHEDULING))
        for j in range(len(PREEMPTION))
    ]


def test_the_urgent_start_first_where_the_policy_goes_by_it():
    """Three that arrive together, each one token of prompt and two of output, in one block."""
    trace = make_trace([0] * 3, [1] * 3, [2] * 3, priority=[5, -7, 0], size=NUM_REQUESTS)
    limits = pairs_of_policies(make_limits(CONFIG.scheduler, num_blocks=1))
    starts = [r.requests.admission_step[:3].tolist() for r in simulated([trace] * 6, limits)]
    assert starts[:2] == [[0, 2, 4]] * 2, "fcfs"
    assert starts[2:4] == [[4, 0, 2]] * 2, "priority"


# First come first served, newest first: test_vmap_over_traces_and_limits_equals_each_alone.
@pytest.mark.parametrize("which", [pytest.param(i, marks=pytest.mark.slow) for i in range(5)] + [5])
def test_vmap_over_policies_equals_each_alone(which):
    """Six pairs of policies at once, beside one of them as the scheduler's own."""
    trace = random_trace(4, rate=2.0)
    urgency = jnp.arange(NUM_REQUESTS, dtype=jnp.int32) * 5 % 7
    trace = dataclasses.replace(trace, priority=urgency)
    limits = make_limits(CONFIG.scheduler, num_blocks=14)
    results = simulated([trace] * 6, pairs_of_policies(limits))
    scheduler = dataclasses.replace(
        CONFIG.scheduler,
        scheduling_policy=SCHEDULING[which // len(PREEMPTION)],
        preemption_policy=PREEMPTION[which % len(PREEMPTION)],
    )
    config = dataclasses.replace(CONFIG, scheduler=scheduler)
    jax.tree.map(
        np.testing.assert_array_equal,
        results[which],
        jax.jit(partial(simulate, config=config), **QUICK)(trace, limits),
    )
    finished = [result.requests.finish_step for result in results]
    assert len({tuple(x.tolist()) for x in finished}) == 6, "no two policies do the same"


def test_arrivals_beyond_the_rows_wait_outside():
    """Ten at once, three may enter in a step, into four rows."""
    trace = make_trace([0] * 10, [4] * 10, [8] * 10, size=NUM_REQUESTS)
    limits = make_limits(CONFIG.scheduler, num_rows=4)
    (result,) = simulated([trace], [limits])
    assert np.asarray(result.steps.num_outside)[:3].tolist() == [7, 6, 6]
    assert np.asarray(result.steps.num_running).max() == 4
    admission = np.asarray(result.requests.admission_step)[:10]
    assert (np.diff(admission) >= 0).all()
    assert np.asarray(result.requests.finish_step)[:10].min() > 0


# ---- vmap --------------------------------------------------------------------------------------
def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_vmap_over_traces_and_limits_equals_each_alone():
    traces = [random_trace(seed, rate=0.2 + 0.1 * seed) for seed in range(6)]
    limits = [
        make_limits(CONFIG.scheduler, num_blocks=n, num_rows=s)
        for n, s in [(40, 8), (12, 8), (20, 3), (33, 1), (16, 6), (1, 2)]
    ]
    results = simulated(traces, limits)
    for result, trace, limit in zip(results, traces, limits, strict=True):
        assert_same(result, alone(trace, limit))
        check_book(trace, limit, result)
    assert sum(result.steps.num_preemptions.sum() > 0 for result in results) >= 2


def test_a_smaller_pool_preempts_more_and_takes_longer():
    trace = random_trace(1, rate=1.0)
    limits = [make_limits(CONFIG.scheduler, num_blocks=n) for n in (40, 24, 16, 12)]
    metrics = [
        measure(trace, limit, result)
        for limit, result in zip(limits, simulated([trace] * 4, limits), strict=True)
    ]
    assert metrics[0].preemption_rate < metrics[2].preemption_rate
    assert metrics[0].time_to_first_token.mean() < metrics[3].time_to_first_token.mean()
    assert metrics[0].pool_utilisation < metrics[2].pool_utilisation


@pytest.mark.slow
def test_vmap_of_256_over_1000_steps_equals_each_alone():
    config = make_config(
        num_steps=1000,
        num_tokens=32,
        num_rows=16,
        max_num_seqs=16,
        num_blocks=128,
        max_num_batched_tokens=32,
    )
    traces = [
        random_trace(seed, rate=0.05 + 0.002 * seed, count=380, size=400) for seed in range(256)
    ]
    limits = [make_limits(config.scheduler, num_blocks=128 - seed // 3) for seed in range(256)]
    together = jax.jit(jax.vmap(partial(simulate, config=without_cond(config))))
    one = jax.jit(partial(simulate, config=config))
    results = together(stack(traces), stack(limits))
    for i, (trace, limit) in enumerate(zip(traces, limits, strict=True)):
        assert_same(at(results, i), one(trace, limit))
    assert int(results.steps.num_preemptions.sum()) > 0


# ---- limits and arguments ----------------------------------------------------------------------
def test_a_withheld_block_that_comes_into_use_is_reported():
    trace, limits = random_trace(0), make_limits(CONFIG.scheduler, num_blocks=20)
    sims, _, _ = watched()(trace, limits)
    state = jax.tree.map(jnp.asarray, at(sims, 20).scheduler)
    check = jax.jit(partial(check_invariants, config=CONFIG.scheduler), **QUICK)
    assert_invariants(check(with_withheld_blocks(state, limits)))
    row = int(np.argmax(np.asarray(state.rows.status) == Status.RUNNING))
    was = state.blocks.block_tables[row, 0]
    blocks = dataclasses.replace(
        state.blocks,
        block_tables=state.blocks.block_tables.at[row, 0].set(30),
        ref_counts=state.blocks.ref_counts.at[was].add(-1).at[30].add(1),
    )
    bad = with_withheld_blocks(dataclasses.replace(state, blocks=blocks), limits)
    assert int(check(bad).free_stack) > 0


def test_padding_never_arrives():
    trace = make_trace([0], [3], [2], size=5)
    assert np.asarray(trace.arrival_step).tolist() == [0] + [NEVER] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dataclasses.replace(CONFIG, scheduling_policies=("round_robin",)),
            "scheduling_policies must hold functions or names of fcfs, priority, longest_prefix",
        ),
        (lambda: make_trace([0, 1], [1], [1, 1]), r"num_prompt_tokens must have shape \(2,\)"),
        (lambda: make_trace([3, 1], [1, 1], [1, 1]), "arrival_step must never fall"),
        (lambda: make_trace([0], [0], [1]), r"num_prompt_tokens must be from 1 .*got 0"),
        (lambda: make_trace([0], [1], [0]), "num_output_tokens must be from 1"),
        (lambda: make_trace([0, 0], [1, 1], [1, 1], size=1), "size must be at least 2"),
        (lambda: make_limits(CONFIG.scheduler, num_blocks=41), "num_blocks must be from 1 to 40"),
        (lambda: make_limits(CONFIG.scheduler, num_rows=0), "num_rows must be from 1 to 8"),
        (lambda: make_config(num_tokens=17), "num_tokens must be at most .*16"),
        (lambda: make_config(max_entries=0), "max_entries must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
