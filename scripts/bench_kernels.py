"""Numerics and speed of the GPU kernels, on a machine with an NVIDIA GPU; under 8 minutes.

    python scripts/bench_kernels.py [--json FILE] [--budget-s 420]
    python scripts/bench_kernels.py --dry-run-cpu      # tiny sizes in the interpreter, no speeds

First every kernel is compared with float64 (attention) or bit for bit (what only moves data). Then
decode (batch 1 to 256, context 128 to 32k) and prefill are timed beside XLA, JAX's deprecated op
and cuDNN's paged attention, and set against what the chip can do: a measured copy for decode, which
must read every key and value once, and a measured matrix product for prefill. Points are timed in
order of interest until the time is up; what was left out is listed. Needs jax 0.11 or later. Exit
status: 0, or 1 when a comparison failed.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from gpu_bench import limits, numerics, rivals, timing  # noqa: E402
from gpu_bench.cases import Case, decode_case, make_arrays, with_cold_layers  # noqa: E402

COLD_BYTES = 512 << 20
"""One pass over a case's layers: more than any chip's cache."""

MEMORY_SHARE = 0.35
"""Of the device's memory for one case's pools (some rivals need a second layout of them)."""

BATCHES = (1, 8, 32, 64, 256)
CONTEXTS = (128, 512, 2048, 8192, 32768)
GOALS = {(32, 2048): 0.8, (64, 8192): 0.9}
"""Decode: share of the measured copy bandwidth that the project aims at."""


def decode_points() -> list[tuple[int, int]]:
    """(batch, context): the goals first, then the corners, then the rest."""
    points = [*GOALS, (1, 128), (1, 32768), (256, 128), (256, 2048), (8, 2048), (1, 2048)]
    grid = [(batch, context) for context in CONTEXTS for batch in BATCHES]
    return points + [point for point in grid if point not in points]


def prefill_cases() -> dict[str, Case]:
    """Name to case: whole prompts, a chunk after cached context, chunks mixed with decode."""
    return {
        "prompt 512": Case(query_lens=(512,), seq_lens=(512,)),
        "prompt 2048": Case(query_lens=(2048,), seq_lens=(2048,)),
        "prompt 8192": Case(query_lens=(8192,), seq_lens=(8192,)),
        "chunk 2048 after 6144": Case(query_lens=(2048,), seq_lens=(8192,)),
        "8 prompts of 256": Case(query_lens=(256,) * 8, seq_lens=(256,) * 8),
        "31 decode + 481 of a prompt": Case(
            query_lens=(*(1,) * 31, 481), seq_lens=(*(1024,) * 31, 481)
        ),
    }


def memory_bytes() -> int:
    """Of the device; a guess where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 16 << 30)


def time_case(case: Case, names: list[str], *, quick: bool) -> dict[str, Any]:
    """Seconds of a call by implementation, or why there is none."""
    arrays = make_arrays(case, poison=False)
    result: dict[str, Any] = {}
    for name in names:
        try:
            call, q, rest = rivals.make_call(name, case, arrays)
            result[name] = timing.seconds_per_call(
                call, q, *rest, num_layers=case.num_layers, target_s=0.03, quick=quick
            )
        except Exception as error:  # a rival that fails must not end the run
            result[name] = f"{type(error).__name__}: {rivals.describe(error)}"
    return result


def cases_to_time(*, tiny: bool) -> Iterator[tuple[str, str, Case]]:
    """Kind, label and case, in the order in which they are timed."""
    if tiny:
        small = dict(num_heads=4, num_kv_heads=2, head_dim=64)
        yield "decode", "1 x 16", decode_case(1, 16, **small)
        yield "prefill", "prompt 9", Case(query_lens=(9,), seq_lens=(9,), **small)
        return
    most = int(memory_bytes() * MEMORY_SHARE)
    decode = [
        ("decode", f"{b} x {c}", decode_case(b, c))
        for b, c in decode_points()
        if decode_case(b, c).pool_bytes <= most
    ]
    prefill = [("prefill", name, case) for name, case in prefill_cases().items()]
    # The goals, then the prompts, then the grid.
    for kind, label, case in [*decode[: len(GOALS)], *prefill, *decode[len(GOALS) :]]:
        yield kind, label, with_cold_layers(case, least_bytes=COLD_BYTES, most_bytes=most)


def fraction_of_limit(kind: str, case: Case, seconds: float, limit: limits.Limits) -> float:
    """Of copy bandwidth (decode), or of the faster of bandwidth and product (prefill)."""
    by_memory = case.context_bytes / limit.copy_bytes_per_s
    by_product = case.flops / limit.product_flops_per_s if kind == "prefill" else 0.0
    return max(by_memory, by_product) / seconds


def run_numerics(*, tiny: bool) -> list[numerics.Check]:
    """Print and collect every comparison."""
    checks = []
    for check in numerics.check_all(tiny=tiny):
        checks.append(check)
        if not check.passed:
            print(f"WRONG {check.name}: error {check.error:.2g} {check.note}", flush=True)
    passed = sum(check.passed for check in checks)
    worst = max((check.error for check in checks if check.passed), default=0.0)
    print(f"numerics: {passed} of {len(checks)} right, largest error {worst:.2g}\n", flush=True)
    return checks


def run_speed(
    limit: limits.Limits, *, tiny: bool, budget_s: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time the points until the budget is spent; rows, and labels of what was left out."""
    names = list(rivals.RIVALS)
    head = "".join(f"{name + ' (us)':>20s}" for name in names)
    print(f"{'':38s}{head}{'of limit':>10s}{'goal':>6s}")
    started, rows, skipped = time.perf_counter(), [], []
    for kind, label, case in cases_to_time(tiny=tiny):
        if time.perf_counter() - started > budget_s:
            skipped.append(f"{kind} {label}")
            continue
        found = time_case(case, names, quick=tiny)
        mine = found["pallas"]
        share = fraction_of_limit(kind, case, mine, limit) if isinstance(mine, float) else None
        goals = {f"{b} x {c}": goal for (b, c), goal in GOALS.items()}
        goal = goals.get(label) if kind == "decode" else None
        rows.append(dict(kind=kind, label=label, seconds=found, fraction_of_limit=share, goal=goal))
        cells = "".join(
            f"{x * 1e6:20.1f}" if isinstance(x, float) else f"{'-':>20s}" for x in found.values()
        )
        shown = f"{share:10.0%}" if share is not None else f"{'-':>10s}"
        print(f"{kind + ' ' + label:38s}{cells}{shown}{goal or 0:6.0%}", flush=True)
    reasons = {
        (name, why)
        for row in rows
        for name, why in row["seconds"].items()
        if not isinstance(why, float)
    }
    for name, why in sorted(reasons):
        print(f"no time for {name}: {why}")
    if skipped:
        print(f"left out, the time was up: {', '.join(skipped)}")
    return rows, skipped


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny sizes, interpreted")
    parser.add_argument("--budget-s", type=float, default=420.0, help="for numerics and timing")
    parser.add_argument("--skip-numerics", action="store_true")
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.dry_run_cpu:
        print("needs an NVIDIA GPU; --dry-run-cpu shows the course of it on a CPU", file=sys.stderr)
        return 2
    mode = contextlib.nullcontext()
    if args.dry_run_cpu:
        from pallas_kernels.interpret import interpret_mode

        mode = interpret_mode()
    started = time.perf_counter()
    print(f"jax {jax.__version__}, {device.device_kind}")
    with mode:
        checks = [] if args.skip_numerics else run_numerics(tiny=args.dry_run_cpu)
        if args.dry_run_cpu:
            limit = limits.measure(copy_bytes=1 << 20, size=128, quick=True)
        else:
            limit = limits.measure()
        print(
            f"copy {limit.copy_bytes_per_s / 1e12:.3f} TB/s, product "
            f"{limit.product_flops_per_s / 1e12:.1f} TFLOP/s (bfloat16)\n"
        )
        rows, skipped = run_speed(
            limit,
            tiny=args.dry_run_cpu,
            budget_s=args.budget_s - (time.perf_counter() - started),
        )
    if args.json:
        report = dict(
            jax=jax.__version__,
            device=device.device_kind,
            limits=vars(limit),
            numerics=[vars(check) for check in checks],
            speed=rows,
            skipped=skipped,
        )
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
