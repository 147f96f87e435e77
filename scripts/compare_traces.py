"""The same serving workload through XLA and through the Pallas kernels, step by step.

    python scripts/compare_traces.py                    # CPU: a tiny model, kernels interpreted
    python scripts/compare_traces.py --model smollm2-135m   # on a GPU: the real kernels
    python scripts/compare_traces.py --aot h100         # also the counts of a GPU's programs

Prompts in pieces beside decoding rows, a shared beginning, blocks copied on write and preemptions.
Each step is run by both from the same state: how far apart are the outputs of attention in each
layer, the logits, the tokens, and the keys and values in the pool? Then the operations of both
programs, FLOPs, bytes and memory side by side, and a profiler trace of each for Perfetto. The
folder gets report.md, report.json, differences.png and .svg, trace_xla and trace_pallas. Needs jax
0.11 or later. Exit status: 0 they agree, 1 they do not or it could not run.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
sys.path[:0] = [str(SCRIPTS), str(ROOT)]

from trace_compare import aot, counting, lockstep, plot, profile, report, workload  # noqa: E402

from pagedjax.core.state import EngineState  # noqa: E402
from pagedjax.core.step import step  # noqa: E402
from pagedjax.models.params import default_dtype  # noqa: E402
from pallas_kernels.interpret import interpret_mode  # noqa: E402
from pallas_kernels.mosaic import require_mosaic_gpu  # noqa: E402

NAMES = ("xla", "pallas")
"""The reference first."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of the largest value of a tensor. In float32 a sum in another order makes about 1e-6; in bfloat16
a rounding is 4e-3, and layers hand theirs on."""


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with what depends on the platform filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="tiny, a preset, a directory or a GGUF file")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200, help="at most; by default to the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/compare_traces"))
    parser.add_argument("--dtype", choices=TOLERANCES, help="of weights and pool")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--buckets", type=int, nargs="+", help="step sizes in tokens")
    parser.add_argument("--num-blocks", type=int, help="of the pool; default: too few")
    parser.add_argument("--tolerance", type=float, help="relative; default by dtype")
    parser.add_argument("--free-run", action="store_true", help="also each on its own way")
    parser.add_argument("--no-operations", action="store_true", help="no counts, no profiles")
    parser.add_argument("--profile-steps", type=int, default=2, help="steps in a profiler trace")
    parser.add_argument("--aot", choices=aot.CHIPS, nargs="+", default=[], help="compile for these")
    args = parser.parse_args(arguments)
    on_gpu = jax.default_backend() == "gpu"
    args.model = args.model or ("smollm2-135m" if on_gpu else "tiny")
    tiny = args.model == "tiny"
    args.dtype = args.dtype or ("float32" if tiny and not on_gpu else default_dtype().name)
    args.block_size = args.block_size or (8 if tiny else 16)
    args.buckets = sorted(set(args.buckets or ((4, 16) if tiny else (4, 64))))
    args.tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    for name, least in (("requests", 1), ("steps", 1), ("profile_steps", 1), ("block_size", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.buckets[0] < 1:
        parser.error("--buckets must be at least 1")
    return args


def run_lockstep(
    core: lockstep.Core, requests: list[workload.Request], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], EngineState, int]:
    """The steps as plain data; the state before the busiest of them and its bucket."""
    steps, busiest, most = [], (None, 0), (-1, -1)
    bar = tqdm(desc="lockstep", unit="step")
    for record, before in lockstep.lockstep(
        core, requests, kv_dtype=jnp.dtype(args.dtype), max_steps=args.steps
    ):
        steps.append(report.step_data(record))
        mixed = min(record.prefill_tokens, record.decode_tokens)
        if (mixed, record.num_rows) > most:
            most, busiest = (mixed, record.num_rows), (before, record.bucket)
        worst = max(d["relative"] for d in steps[-1]["attention"])
        bar.update()
        bar.set_postfix(rows=record.num_rows, attention=f"{worst:.1e}")
    bar.close()
    return steps, *busiest


def compile_steps(core: lockstep.Core, state: EngineState, buckets: list[int]) -> dict:
    """bucket -> implementation -> (operations, compiled step that consumes its state)."""
    programs: dict[int, dict[str, Any]] = {}
    jobs = [(bucket, name) for bucket in buckets for name in core.configs]
    for bucket, name in tqdm(jobs, desc="compiling", unit="step size"):
        whole = functools.partial(step, config=core.configs[name], num_tokens=bucket)
        traced = jax.jit(whole, donate_argnums=1).trace(core.params, state)
        compiled = traced.lower().compile()
        operations = counting.count_program(traced.jaxpr, compiled)
        programs.setdefault(bucket, {})[name] = (operations, compiled)
    return programs


def profile_steps(
    core: lockstep.Core, programs: dict, state: EngineState, bucket: int, args: argparse.Namespace
) -> dict[str, Any]:
    """A trace of each implementation over the same steps, begun at ``state``."""
    found = {}
    for name in core.configs:
        compiled = programs[bucket][name][1]

        def run(mine: EngineState, compiled: Any = compiled) -> EngineState:
            for _ in range(args.profile_steps):
                mine, _ = compiled(core.params, mine)
            return mine

        # Each call consumes its state. The first is not recorded, nor is the copying.
        jax.block_until_ready(run(jax.tree.map(jnp.copy, state)))
        mine = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        path = profile.record(args.out / f"trace_{name}", functools.partial(run, mine))
        found[name] = profile.summarize(path) | {"path": str(path.relative_to(args.out))}
    return found


def describe_run(args: argparse.Namespace, core: lockstep.Core, interpreted: bool) -> dict:
    """What ran, on what."""
    sizes = core.sizes
    return {
        "command": shlex.join(["python", "scripts/compare_traces.py", *sys.argv[1:]]),
        "implementations": list(NAMES),
        "model": args.model,
        "dtype": args.dtype,
        "requests": args.requests,
        "seed": args.seed,
        "tolerance": args.tolerance,
        "interpreted": interpreted,
        "device": jax.devices()[0].device_kind,
        "versions": {
            "Python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        },
        "sizes": {
            "block_size": sizes.block_size,
            "num_blocks": sizes.num_blocks,
            "max_num_seqs": sizes.max_num_seqs,
            "buckets": ", ".join(map(str, core.buckets)),
        },
    }


def compare(args: argparse.Namespace, interpreted: bool) -> dict[str, Any]:
    """Everything, as plain data."""
    if args.aot:
        aot.check()
    model = workload.load(args.model, dtype=args.dtype, seed=args.seed, text=ROOT / "README.md")
    sizes = workload.Sizes(
        block_size=args.block_size,
        buckets=tuple(args.buckets),
        num_blocks=args.num_blocks,
        dtype=args.dtype,
    )
    requests = workload.make_requests(
        model.text, args.requests, block_size=args.block_size, seed=args.seed
    )
    configs = {
        name: workload.step_config(model.config, requests, sizes, attention=name) for name in NAMES
    }
    # Before the long part: what it lacks should not be found out at the end.
    counts = None
    if args.aot:
        counts = aot.compile_for_chips(args.aot, args.model, requests, sizes, NAMES)
    core = lockstep.Core(
        jax.device_put(model.params, jax.devices()[0]), configs, buckets=sizes.buckets
    )
    steps, busiest, bucket = run_lockstep(core, requests, args)
    found = {
        "run": describe_run(args, core, interpreted),
        "features": report.features(steps),
        "findings": report.findings(steps, args.tolerance),
        "steps": steps,
        "free_run": None,
        "operations": {},
        "profiles": {},
        "aot": counts,
    }
    if args.free_run:
        free = lockstep.free_run(
            core, requests, kv_dtype=jnp.dtype(args.dtype), max_steps=args.steps
        )
        found["free_run"] = dataclasses.asdict(free)
    if not args.no_operations:
        used = sorted({s["bucket"] for s in steps})
        programs = compile_steps(core, busiest, used)
        found["operations"] = {
            str(size): {name: dataclasses.asdict(entry[0]) for name, entry in of.items()}
            for size, of in programs.items()
        }
        args.out.mkdir(parents=True, exist_ok=True)
        found["profiles"] = profile_steps(core, programs, busiest, bucket, args)
        found["run"]["profiled"] = (
            f"{args.profile_steps} steps of {bucket} tokens from the state with most prompt and "
            "decode tokens together"
        )
    return found


def plain(value: Any) -> Any:
    """For JSON, which has no infinity and no NaN: those as strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    try:
        require_mosaic_gpu("compare_traces")
        args = parse_args(arguments)
        interpreted = jax.default_backend() != "gpu"
        started = time.perf_counter()
        with interpret_mode() if interpreted else contextlib.nullcontext():
            found = compare(args, interpreted)
    except (NotImplementedError, FileNotFoundError, ValueError, aot.CannotCompile) as error:
        print(error, file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.json").write_text(json.dumps(plain(found), indent=1) + "\n")
    (args.out / "report.md").write_text(report.render(found), encoding="utf-8")
    plot.draw(found, args.out / "differences")
    worst = max(d["relative"] for s in found["steps"] for d in s["attention"])
    tokens = sum(s["num_samples"] for s in found["steps"])
    apart = sum(len(s["tokens"]) for s in found["steps"])
    print(
        f"{len(found['steps'])} steps, attention apart by {worst:.1e} at most, {tokens - apart} of "
        f"{tokens} tokens equal; {time.perf_counter() - started:.0f} s; wrote "
        f"{args.out / 'report.md'}"
    )
    for text in found["findings"][:5]:
        print(text)
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
