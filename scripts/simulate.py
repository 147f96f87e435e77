#!/usr/bin/env python
"""What pool size, block size, prefix sharing and policies do to a scheduler, without a model.

    python scripts/simulate.py                      # curves, to simulation.png and simulation.svg
    python scripts/simulate.py --rate 0.3 --num-rows 64
    python scripts/simulate.py --bench              # how fast it simulates, on one core

All pool sizes, policies and traces of a set of curves are one `jax.vmap` and one compilation.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro
from figure_files import save

POLICIES = {
    "first come, newest steps back": ("fcfs", "newest"),
    "first come, longest output steps back": ("fcfs", "most_tokens"),
    "longest cached prefix first": ("longest_prefix", "newest"),
    "most urgent third first": ("priority", "lowest_priority"),
}
"""Scheduling and preemption policy, by what a curve is called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args:
    """Command line of simulate.py. Lengths are in tokens, drawn evenly from LEAST MOST."""

    rate: float = 0.12
    """Requests that arrive in a step, on average (a Poisson process)."""

    num_steps: int = 800
    """Steps to simulate."""

    traces: int = 3
    """Traces drawn at random for each point; a point is their mean."""

    pool_tokens: tuple[int, ...] = (1024, 1280, 1536, 2048, 2560, 3072, 4096, 6144)
    """Pool sizes, in tokens."""

    block_sizes: tuple[int, ...] = (4, 16, 64)
    """Block sizes to compare. Sharing is compared at --block-size."""

    block_size: int = 16
    """Block size of the comparisons of prefix sharing and of policies."""

    num_rows: int = 32
    """Rows of the request table, and most sequences at once."""

    num_tokens: int = 128
    """Token budget of a step."""

    prompt: tuple[int, int] = (16, 96)
    """Prompt, without the shared prefix."""

    output: tuple[int, int] = (32, 160)
    """Output."""

    prefix: int = 160
    """Tokens of the shared prefix that each request of a group begins with."""

    groups: int = 4
    """Prefixes that there are; each request has one of them."""

    seed: int = 0
    """Seed of the traces."""

    out: Path = Path("simulation.png")
    """Picture to write; an SVG is written beside it."""

    save: Path | None = None
    """File for the figures, as JSON."""

    bench: bool = False
    """Measure speed instead: 256 schedulers of 16 rows and 128 blocks, at once and one by one."""

    bench_steps: int = 200
    """Steps of --bench."""


def random_trace(rng, *, rate, num_steps, prompt, output, prefix, groups, size):
    """A `Trace` of Poisson arrivals over `num_steps`, padded to `size` requests."""
    from pagedjax.simulate import make_trace

    arrival = np.cumsum(rng.exponential(1 / rate, size))
    count = int((arrival < num_steps).sum())
    own = rng.integers(prompt[0], prompt[1] + 1, count)
    return make_trace(
        np.floor(arrival[:count]),
        own + prefix,
        rng.integers(output[0], output[1] + 1, count),
        rng.integers(0, groups, count),
        np.full(count, prefix),
        rng.integers(0, 3, count),
        size=size,
    )


def draw_traces(args: Args):
    """`args.traces` traces, stacked."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(args.seed)
    mean = args.rate * args.num_steps
    size = int(mean + 5 * np.sqrt(mean) + 8)
    traces = [
        random_trace(
            rng,
            rate=args.rate,
            num_steps=args.num_steps,
            prompt=args.prompt,
            output=args.output,
            prefix=args.prefix,
            groups=args.groups,
            size=size,
        )
        for _ in range(args.traces)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *traces)


def simulated(
    args: Args, traces, *, block_size: int, sharing: bool, policies=(("fcfs", "newest"),)
) -> list[dict[str, list[float]]]:
    """For each pair of policies, each figure at each pool size. Policies, pools and traces are
    three axes of one `vmap`."""
    import jax
    import jax.numpy as jnp

    from pagedjax.core.config import SchedulerConfig
    from pagedjax.simulate import SimulationConfig, make_limits, measure, simulate

    config = SimulationConfig(
        scheduler=SchedulerConfig(
            num_rows=args.num_rows,
            max_num_seqs=args.num_rows,
            num_blocks=max(args.pool_tokens) // block_size,
            block_size=block_size,
            max_model_len=args.prefix + args.prompt[1] + args.output[1],
            max_num_batched_tokens=args.num_tokens,
            max_logprobs=0,
            max_stop_token_ids=1,
            max_admissions=4,
            max_retirements=4,
            max_preemptions=4,
            enable_prefix_caching=sharing,
            use_cond=False,
        ),
        num_tokens=args.num_tokens,
        num_steps=args.num_steps,
        scheduling_policies=tuple(scheduling for scheduling, _ in policies),
        preemption_policies=tuple(preemption for _, preemption in policies),
    )
    pools = [make_limits(config, num_blocks=tokens // block_size) for tokens in args.pool_tokens]
    pools = jax.tree.map(lambda *x: jnp.stack(x), *pools)

    def point(trace, limits, which):
        limits = dataclasses.replace(limits, scheduling_policy=which, preemption_policy=which)
        return measure(trace, limits, simulate(trace, limits, config=config))

    every = jax.vmap(point, (0, None, None))
    every = jax.vmap(jax.vmap(every, (None, 0, None)), (None, None, 0))
    start = time.perf_counter()
    which = jnp.arange(len(policies), dtype=jnp.int32)
    metrics = jax.block_until_ready(jax.jit(every)(traces, pools, which))
    seconds = time.perf_counter() - start
    count = len(policies) * len(args.pool_tokens) * args.traces
    print(
        f"block size {block_size:>3}, sharing {'on ' if sharing else 'off'}: "
        f"{count * args.num_steps} steps of {count} schedulers in {seconds:.1f} s, "
        "compiled and run",
        flush=True,
    )
    return [
        _figures(args, traces, jax.tree.map(lambda x, i=i: np.asarray(x[i]), metrics))
        for i in range(len(policies))
    ]


def _figures(args: Args, traces, metrics) -> dict[str, list[float]]:
    """Means over the traces of metrics with axes [pools, traces, ...]."""
    # Who still waits at the end has waited at least so long; padding counts for nothing.
    arrival = np.broadcast_to(np.asarray(traces.arrival_step), metrics.queueing.shape)
    first = np.asarray(metrics.time_to_first_token, float)
    first = np.where(first < 0, args.num_steps - arrival, first)
    first = np.where(arrival < args.num_steps, first, np.nan)
    arrived = int((np.asarray(traces.arrival_step) < args.num_steps).sum())
    return {
        "preemption_rate": np.nanmean(metrics.preemption_rate, 1).tolist(),
        "time_to_first_token": np.nanmedian(first, (1, 2)).tolist(),
        "utilisation": np.nanmean(metrics.pool_utilisation, 1).tolist(),
        "hit_rate": np.nanmean(metrics.hit_rate, 1).tolist(),
        "served": (metrics.num_finished.sum(1) / arrived).tolist(),
    }


PANELS = (
    ("preemption_rate", "preemptions a request"),
    ("time_to_first_token", "steps to the first token, median"),
    ("utilisation", "share of blocks held"),
)


def draw(args: Args, rows: dict[str, dict[str, dict]]) -> None:
    """rows: title -> label of a curve -> its figures. Writes the picture as PNG and SVG."""
    from matplotlib.figure import Figure  # needs no display
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(12, 10), layout="constrained")
    panels = figure.subplots(len(rows), len(PANELS), sharex=True, squeeze=False)
    for line, (title, curves) in zip(panels, rows.items(), strict=True):
        for axes, (name, label) in zip(line, PANELS, strict=True):
            for (curve_label, figures), marker in zip(curves.items(), "os^Dv", strict=False):
                axes.plot(args.pool_tokens, figures[name], marker=marker, ms=5, label=curve_label)
            axes.set(ylabel=label, xscale="log", ylim=(0, None))
            if name == "time_to_first_token":
                axes.set_yscale("log")
                axes.set_ylim(0.9, None)
                axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            if name == "utilisation":
                axes.set_ylim(0, 1)
            axes.grid(alpha=0.3)
        line[0].set_title(title, loc="left", fontweight="bold")
        line[-1].legend(loc="lower left", fontsize="small")
    ticks = args.pool_tokens[:: 1 if len(args.pool_tokens) < 7 else 2]
    for axes in panels[-1]:
        axes.set(xlabel="pool size, tokens", xticks=ticks, xticklabels=[f"{t:,}" for t in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", labelrotation=30)
    figure.suptitle(
        f"{args.num_rows} rows, {args.rate} requests a step, prompts of {args.prefix} shared and "
        f"{args.prompt[0]} to {args.prompt[1]} own tokens, {args.output[0]} to {args.output[1]} "
        f"output tokens; sharing and policies compared at block size {args.block_size}",
        fontsize=10,
    )
    print("wrote", " and ".join(map(str, save(figure, args.out))))


def main() -> int:
    """Returns the exit status."""
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    if args.bench:
        from simulate_bench import bench

        # Before JAX starts its threads.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        report = bench(args.bench_steps)
    else:
        report = curves(args)
    if args.save is not None:
        args.save.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def curves(args: Args) -> dict:
    """Simulate, draw, and return the figures."""
    traces = draw_traces(args)
    sharing = {
        label: simulated(args, traces, block_size=args.block_size, sharing=on)[0]
        for label, on in (("shared prefixes", True), ("nothing shared", False))
    }
    blocks = {}
    for size in args.block_sizes:
        known = size == args.block_size
        blocks[f"block size {size}"] = (
            sharing["shared prefixes"]
            if known
            else simulated(args, traces, block_size=size, sharing=True)[0]
        )
    pairs = tuple(POLICIES.values())
    by_policy = simulated(args, traces, block_size=args.block_size, sharing=True, policies=pairs)
    rows = {
        "prefix sharing": sharing,
        "block size": blocks,
        "policies": dict(zip(POLICIES, by_policy, strict=True)),
    }
    draw(args, rows)
    return {"pool_tokens": args.pool_tokens, **rows}


if __name__ == "__main__":
    sys.exit(main())
