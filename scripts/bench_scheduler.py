"""What scheduling costs inside the step: `schedule` + `commit` against a scheduler in plain Python.

Both do the same work: admission, prefix cache, allocation, eviction, preemption, flat arrays for
the model. Ours runs as it does in the engine, inside one jit (a `lax.scan` over steps in which a
null model turns the whole plan into the next tokens, so that nothing is dead code). The Python one
is deliberately lean: lists, dicts and numpy, one object a request, no copy-on-write.

    python scripts/bench_scheduler.py                # 256 rows, 8,192 blocks
    python scripts/bench_scheduler.py --rows 64 --blocks 2048

Each line is the median over repeats, both schedulers alternating in one run.
"""

import argparse
import dataclasses
import json
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from python_scheduler import PythonScheduler, Sequence

from pagedjax.core.commit import commit
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.ragged import take
from pagedjax.core.requests import RequestParams, add_request
from pagedjax.core.schedule import schedule
from pagedjax.core.state import NULL, init_scheduler
from pagedjax.sampling import Sampled

STEPS = 40


def null_model(config: SchedulerConfig, plan) -> Sampled:
    """Tokens that depend on every array of the plan, at next to no cost."""
    r, p = plan.row_ids.shape[0], config.max_logprobs
    plan_sum = sum(
        jnp.where(x == NULL, 0, x).sum(dtype=jnp.int32)
        for x in (plan.slot_mapping, plan.block_tables, plan.copy_src, plan.copy_dst)
    )
    plan_sum += plan.query_start_loc.sum() + plan.seq_lens.sum()
    last = take(plan.token_ids, plan.logit_index, 0)
    where = take(plan.positions, plan.logit_index, 0)
    token = (last * 31 + where * 17 + plan_sum) & 8191
    return Sampled(
        token_ids=token,
        logprob=jnp.zeros(r),
        top_token_ids=jnp.broadcast_to(token[:, None], (r, p)),
        top_logprobs=-jnp.broadcast_to(token[:, None], (r, p)).astype(jnp.float32),
        nan=jnp.zeros(r, bool),
    )


def one_step(state, _, *, config, num_tokens):
    state, plan = schedule(state, config=config, num_tokens=num_tokens)
    state, output = commit(state, plan, null_model(config, plan), config=config)
    return state, (output.num_scheduled_tokens, output.num_running)


def params_for(config, max_total):
    return RequestParams(
        max_total_tokens=np.int32(max_total),
        min_output_tokens=np.int32(0),
        stop_token_ids=np.full(config.max_stop_token_ids, NULL, np.int32),
        temperature=np.float32(0),
        top_k=np.int32(0),
        top_p=np.float32(1),
        min_p=np.float32(0),
        seed=np.uint32(0),
        num_logprobs=np.int32(-1),
        salt=np.uint32(0),
    )


def prompts_of(config, length, rng):
    """One prompt a row; the pool is nearly full when `length` is None."""
    if length is None:
        length = config.num_blocks * config.block_size // config.num_rows - config.block_size // 2
    spread = rng.integers(-length // 8, length // 8 + 1, config.num_rows)
    return [rng.integers(0, 8192, length + d) for d in spread]


def jax_runner(config, prompts, max_total):
    """(function that runs STEPS decode steps and returns seconds, tokens seen per step)."""
    wide, narrow = config.max_num_batched_tokens, config.max_num_seqs
    add = jax.jit(partial(add_request, config=config), donate_argnums=0)
    fill = jax.jit(lambda s: one_step(s, None, config=config, num_tokens=wide)[0], donate_argnums=0)

    @partial(jax.jit, donate_argnums=0)
    def many(state):
        body = partial(one_step, config=config, num_tokens=narrow)
        return jax.lax.scan(body, state, None, length=STEPS)

    state = init_scheduler(config)
    for row, prompt in enumerate(prompts):
        padded = np.zeros(config.max_padded_len, np.int32)
        padded[: len(prompt)] = prompt
        state = add(
            state, np.int32(row), padded, np.int32(len(prompt)), params_for(config, max_total)
        )
    for _ in range(2 * sum(map(len, prompts)) // wide + 2):
        state = fill(state)
    box = [state]
    box[0], _ = many(box[0])
    jax.block_until_ready(box[0])

    def run():
        start = time.perf_counter()
        box[0], (scheduled, _) = many(box[0])
        scheduled.block_until_ready()
        return (time.perf_counter() - start) / STEPS, float(scheduled.mean())

    return run, box


def python_runner(config, prompts, max_total):
    scheduler = PythonScheduler(
        num_rows=config.num_rows,
        num_blocks=config.num_blocks,
        max_blocks=config.max_blocks_per_seq,
        block_size=config.block_size,
        token_budget=config.max_num_batched_tokens,
    )
    for prompt in prompts:
        scheduler.waiting.append(Sequence(prompt.tolist(), max_total, config.block_size))
    rng = np.random.default_rng(1)
    samples = rng.integers(0, 8192, (64, config.num_rows)).tolist()

    def step(i):
        scheduled = scheduler.schedule()
        scheduler.plan(scheduled)
        scheduler.commit(scheduled, samples[i % 64])
        return len(scheduled)

    for i in range(2 * sum(map(len, prompts)) // config.max_num_batched_tokens + 2):
        step(i)

    def run():
        start = time.perf_counter()
        seen = sum(step(i) for i in range(STEPS))
        return (time.perf_counter() - start) / STEPS, seen / STEPS

    return run


def measure(name, config, length, max_total, repeats):
    prompts = prompts_of(config, length, np.random.default_rng(0))
    ours, box = jax_runner(config, prompts, max_total)
    theirs = python_runner(config, prompts, max_total)
    times = [(ours(), theirs()) for _ in range(repeats)]
    jax_s = statistics.median(t[0][0] for t in times)
    python_s = statistics.median(t[1][0] for t in times)
    counters = box[0].counters
    row = {
        "workload": name,
        "rows": config.num_rows,
        "blocks": config.num_blocks,
        "jax_us": round(jax_s * 1e6, 1),
        "python_us": round(python_s * 1e6, 1),
        "ratio": round(python_s / jax_s, 2),
        "rows_scheduled": round(statistics.mean(t[0][1] for t in times), 1),
        "preemptions": int(counters.num_preemptions),
        "evictions": int(counters.num_evictions),
    }
    print(
        f"{name:<28} ours {row['jax_us']:>8.1f} us   Python {row['python_us']:>8.1f} us   "
        f"Python / ours {row['ratio']:>5.2f}   rows a step {row['rows_scheduled']:>5.1f}   "
        f"preemptions {row['preemptions']}   evictions {row['evictions']}",
        flush=True,
    )
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    config = SchedulerConfig(
        num_rows=args.rows,
        max_num_seqs=args.rows,
        num_blocks=args.blocks,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        evict_batch=max(1, min(128, args.blocks // 64)),
    )
    average = args.blocks * config.block_size // args.rows
    rows = [
        measure("decode, short contexts", config, average // 8, 4096, args.repeats),
        measure("decode, long contexts", config, average // 2, 4096, args.repeats),
        measure("pressure, pool full", config, None, 4096, args.repeats),
    ]
    flat = rows[1]["jax_us"] / rows[0]["jax_us"]
    print(f"long / short contexts {flat:.2f}: what was generated before costs nothing")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"rows": rows, "config": dataclasses.asdict(config)}, file, indent=1)


if __name__ == "__main__":
    main()
