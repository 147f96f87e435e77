"""The scheduler alone, without a model, over a trace of arrivals, on the device.

`simulate` is a pure function of arrays: jit it, `jax.vmap` it over traces and limits, and a
thousand schedulers run at once. It takes the very steps that an engine takes, `schedule` and
`commit` on the rows that `add_request` makes, with a function of each row's tokens in the model's
place.

    config = SimulationConfig(scheduler=SchedulerConfig(...), num_tokens=64, num_steps=1000)
    run = jax.jit(partial(simulate, config=config))
    result = run(trace, limits)
    metrics = measure(trace, limits, result)

Letters: Q requests of the trace, S rows of the request table, N blocks of the pool, M blocks of a
row, B tokens of a block, T tokens of a step, E requests that enter the table in one step.
"""

from pagedjax.simulate.loop import (
    Arrivals,
    Simulation,
    enter,
    init_simulation,
    null_model,
    prepare,
    prompt_tokens,
    simulate,
    simulation_step,
    with_withheld_blocks,
)
from pagedjax.simulate.result import NOT_YET, Metrics, Refusal, Requests, Result, Steps, measure
from pagedjax.simulate.trace import (
    NEVER,
    Limits,
    SimulationConfig,
    Trace,
    make_limits,
    make_trace,
)

__all__ = [
    "NEVER",
    "NOT_YET",
    "Arrivals",
    "Limits",
    "Metrics",
    "Refusal",
    "Requests",
    "Result",
    "Simulation",
    "SimulationConfig",
    "Steps",
    "Trace",
    "enter",
    "init_simulation",
    "make_limits",
    "make_trace",
    "measure",
    "null_model",
    "prepare",
    "prompt_tokens",
    "simulate",
    "simulation_step",
    "with_withheld_blocks",
]
