"""How fast schedulers are simulated: `scripts/simulate.py --bench`.

256 small schedulers (16 rows, 128 blocks), each with its own trace, in three ways:

- together: `vmap` of `simulate`, one program for all;
- each alone: `simulate` of one trace after the other, each one a `lax.scan` on the device;
- step by step: one trace after the other, one jitted call for each step, as a host would.

All in one process, in turns; a figure is the median over the turns.
"""

import dataclasses
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.simulate import (
    SimulationConfig,
    init_simulation,
    make_limits,
    make_trace,
    prepare,
    simulate,
    simulation_step,
)

SCHEDULERS = 256
ALONE = 8  # traces that are run one after the other in a turn
TURNS = 5


def small_config(num_steps: int) -> SimulationConfig:
    """16 rows, 128 blocks of 8 tokens."""
    return SimulationConfig(
        scheduler=SchedulerConfig(
            num_rows=16,
            max_num_seqs=16,
            num_blocks=128,
            block_size=8,
            max_model_len=64,
            max_num_batched_tokens=32,
            max_logprobs=0,
            max_stop_token_ids=1,
            max_admissions=2,
            max_retirements=2,
            max_preemptions=2,
            index_ways=8,
        ),
        num_tokens=32,
        num_steps=num_steps,
        max_entries=2,
    )


def small_trace(seed: int, num_steps: int):
    """A request a step on average, about what 16 rows can serve: prompts of 1 to 38 tokens with a
    shared prefix of up to 23, 4 to 23 output tokens."""
    rng = np.random.default_rng(seed)
    count = num_steps
    prefix = rng.integers(0, 24, count)
    return make_trace(
        np.floor(np.cumsum(rng.exponential(1, count))),
        prefix + rng.integers(1, 16, count),
        rng.integers(4, 24, count),
        rng.integers(0, 4, count),
        prefix,
    )


def three_ways(num_steps: int) -> dict:
    """name -> (schedulers in one call, the call)."""
    config = small_config(num_steps)
    straight = dataclasses.replace(
        config, scheduler=dataclasses.replace(config.scheduler, use_cond=False)
    )
    traces = [small_trace(seed, num_steps) for seed in range(SCHEDULERS)]
    limits = make_limits(config.scheduler)
    batch = jax.tree.map(lambda *x: jnp.stack(x), *traces)
    together = jax.jit(jax.vmap(partial(simulate, config=straight), (0, None)))
    alone = jax.jit(partial(simulate, config=config))
    step = jax.jit(partial(simulation_step, config=config), donate_argnums=0)
    start = jax.jit(partial(init_simulation, config=config))
    arrivals = jax.jit(partial(prepare, config=config))(traces[0], limits)

    def step_by_step():
        sim = start(traces[0], limits)
        for _ in range(num_steps):
            sim, _ = step(sim, arrivals)
        return sim

    return {
        f"together, vmap of {SCHEDULERS}": (SCHEDULERS, lambda: together(batch, limits)),
        "one by one, a scan each": (ALONE, lambda: [alone(t, limits) for t in traces[:ALONE]]),
        "one by one, a call for each step": (1, step_by_step),
    }


def check_equal(together, alone) -> None:
    """Every element of the `vmap` that was also run alone is the same to the last bit."""
    for i, result in enumerate(alone):
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_array_equal(np.asarray(x)[i], np.asarray(y)),
            together,
            result,
        )


def bench(num_steps: int) -> dict:
    """Measure, print, and return the figures."""
    # Otherwise each call is handed to another thread, which costs more than the step itself.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    ways = three_ways(num_steps)
    together, alone, _ = [jax.block_until_ready(run()) for _, run in ways.values()]
    check_equal(together, alone)
    us: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, (count, run) in ways.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            us[name].append((time.perf_counter() - begin) / count / num_steps * 1e6)
    median = {name: statistics.median(values) for name, values in us.items()}
    vmapped = next(iter(median.values()))
    print(
        f"{SCHEDULERS} schedulers of 16 rows and 128 blocks, {num_steps} steps, one core; "
        f"{float(together.steps.num_running.mean()):.1f} rows running on average\n"
        f"{'':<33} {'us a step':>10} {'steps a second':>15} {'vmap is faster':>15}"
    )
    for name, value in median.items():
        print(f"{name:<33} {value:>10.1f} {1e6 / value:>15,.0f} {value / vmapped:>14.2f}x")
    return {"us_a_step": median, "num_steps": num_steps, "schedulers": SCHEDULERS}
