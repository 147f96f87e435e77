"""Fill the kernels' tuning tables (pallas_kernels/tuning/*.json) on a machine with an NVIDIA GPU.

    python scripts/tune_kernels.py                         # all kernels, this machine's chip
    python scripts/tune_kernels.py --kernel paged_attention_decode --budget-s 600
    python scripts/tune_kernels.py --dry-run-cpu           # tiny, interpreted; writes nothing

For each shape every candidate is timed; the fastest is written when it beats the kernel's own
heuristic by more than the noise (3 %). Entries of other chips and shapes are kept. Candidates
that do not compile, or do not fit, are passed over. How a kernel reads the tables:
pallas_kernels/tuning/__init__.py.
"""

import argparse
import contextlib
import functools
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from gpu_bench import rivals, timing  # noqa: E402
from gpu_bench.cases import Case, decode_case, make_arrays, with_cold_layers  # noqa: E402
from gpu_bench.tables import Use, using  # noqa: E402

from pallas_kernels import gather_blocks, tuning, write_kv  # noqa: E402

MIN_GAIN = 0.03
COLD_BYTES, MOST_BYTES = 512 << 20, 8 << 30


def grid(**values: tuple) -> list[Use]:
    """Every combination."""
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


CANDIDATES: dict[str, list[Use]] = {
    "paged_attention_decode": grid(
        chunk=(32, 64, 128), stages=(2, 3, 4), split=(128, 256, 512, 1024)
    ),
    # On other chips than Hopper, and for its largest heads, "wgmma" is passed over.
    "paged_attention_prefill": grid(instruction=("mma_sync",), chunk=(32, 64), stages=(2, 3, 4))
    + grid(instruction=("wgmma",), chunk=(64, 128), stages=(2, 3, 4)),
    "write_kv": grid(tokens_per_block=(1, 2, 4, 8)),
    "gather_blocks": grid(accesses_per_thread=(1, 2, 4, 8)),
}
"""Parameters that each kernel takes from its table."""


def attention_shape(case: Case) -> dict[str, Any]:
    """The keys that the attention kernels look up (``choose_config``)."""
    return {
        "batch": len(case.seq_lens),
        "max_context": case.max_blocks * case.block_size,
        "num_kv_heads": case.num_kv_heads,
        "group": case.num_heads // case.num_kv_heads,
        "head_dim": case.head_dim,
        "block_size": case.block_size,
    }


MODELS = {
    "llama-3-8b": dict(num_heads=32, num_kv_heads=8, head_dim=128),
    "smollm2-135m": dict(num_heads=9, num_kv_heads=3, head_dim=64),
}


def attention_cases(kernel: str, *, tiny: bool) -> list[Case]:
    """Shapes to tune attention at."""
    if tiny:
        small = dict(num_heads=4, num_kv_heads=2, head_dim=64)
        return [decode_case(1, 16, **small)]
    cases = []
    for model in MODELS.values():
        if kernel == "paged_attention_decode":
            points = ((1, 2048), (8, 2048), (32, 2048), (64, 8192), (256, 2048), (1, 32768))
            cases += [decode_case(batch, context, **model) for batch, context in points]
        else:
            cases += [Case(query_lens=(n,), seq_lens=(n,), **model) for n in (512, 2048, 8192)]
    return [with_cold_layers(x, least_bytes=COLD_BYTES, most_bytes=MOST_BYTES) for x in cases]


def time_attention(case: Case, kernel: str, use: Use | None, quick: bool) -> float:
    """Seconds of one call with one candidate."""
    with using(kernel, use):
        arrays = make_arrays(case, poison=False)
        call, q, rest = rivals.make_call("pallas", case, arrays)
        return timing.seconds_per_call(
            call, q, *rest, num_layers=case.num_layers, target_s=0.02, quick=quick
        )


def time_copies(shape: Mapping[str, int], kernel: str, use: Use | None, quick: bool) -> float:
    """Seconds of ``write_kv`` or ``gather_blocks`` on a Llama-like pool."""
    # The pools are in the loop's carry, where they are updated in place.
    if kernel == "write_kv":
        tokens, row = shape["num_tokens"], shape["row"]
        pool = jnp.zeros((4, max(64, tokens // 8), 16, 1, row), jnp.bfloat16)
        rows = jnp.ones((tokens, 1, row), jnp.bfloat16)
        slots = jnp.arange(tokens, dtype=jnp.int32)

        def call(pools, layer, rows, slots):
            return jnp.stack(
                write_kv(*pools, rows, rows, slots, layer=layer % 4, implementation="pallas")
            )

        rest: tuple = (rows, slots)
    else:
        elements = shape["num_elements"]
        pool = jnp.zeros((8, 256, 16, 1, elements // 16), jnp.bfloat16)

        def call(pools, layer, blocks):
            gathered, _ = gather_blocks(*pools, blocks + layer % 2, implementation="pallas")
            return pools.at[0, 0, 0].set(gathered[0, 0])

        rest = (jnp.arange(64, dtype=jnp.int32),)
    with using(kernel, use):
        pools = jnp.stack([pool, pool])
        return timing.seconds_per_call(
            call, pools, *rest, num_layers=1 << 20, target_s=0.02, quick=quick
        )


def copy_shapes(kernel: str, *, tiny: bool) -> list[dict[str, int]]:
    """Shapes to tune the copying kernels at."""
    if tiny:
        return [{"num_tokens": 4, "row": 128}] if kernel == "write_kv" else []
    if kernel == "write_kv":
        return [{"num_tokens": n, "row": row} for n in (64, 512, 2048, 8192) for row in (1024, 192)]
    return [{"num_elements": n, "itemsize": 2} for n in (16 * 1024, 16 * 192)]


def tune_one(kernel: str, shape: dict[str, Any], timer, *, deadline: float) -> dict | None:
    """The entry for one shape, or None where nothing beats the heuristic by enough."""
    base = timer(None)
    best, best_use = base, None
    for use in CANDIDATES[kernel]:
        if time.perf_counter() > deadline:
            break
        try:
            seconds = timer(use)
        except Exception as error:  # does not compile or does not fit: not a candidate
            print(f"    {use}: {rivals.describe(error)}")
            continue
        if seconds < best:
            best, best_use = seconds, use
    print(f"  {shape}: heuristic {base * 1e6:.1f} us, best {best * 1e6:.1f} us {best_use or ''}")
    if best_use is None or best > base * (1 - MIN_GAIN):
        return None
    return {"shape": shape, "use": best_use, "seconds": best, "heuristic_seconds": base}


def merged(table: dict[str, list], chip: str, entries: list[dict]) -> dict[str, list]:
    """``table`` with the chip's entries of the same shapes replaced, all others kept."""
    shapes = [entry["shape"] for entry in entries]
    kept = [entry for entry in table.get(chip, []) if entry["shape"] not in shapes]
    return {**table, chip: kept + entries}


def write_table(path: Path, table: dict[str, list]) -> None:
    """One entry a line."""
    chips = []
    for chip, entries in sorted(table.items()):
        rows = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
        chips.append(f'  "{chip}": [\n{rows}\n  ]' if rows else f'  "{chip}": []')
    path.write_text("{\n" + ",\n".join(chips) + "\n}\n")


def tune(kernel: str, *, tiny: bool, deadline: float) -> list[dict]:
    """Entries for all of a kernel's shapes."""
    entries = []
    if kernel.startswith("paged_attention"):
        cases = attention_cases(kernel, tiny=tiny)
        work = [(attention_shape(x), functools.partial(time_attention, x)) for x in cases]
    else:
        shapes = copy_shapes(kernel, tiny=tiny)
        work = [(x, functools.partial(time_copies, x)) for x in shapes]
    for shape, measure in work:
        timer = functools.partial(measure, kernel, quick=tiny)
        if time.perf_counter() > deadline:
            print("  the time is up")
            break
        entry = tune_one(kernel, shape, timer, deadline=deadline)
        if entry:
            entries.append(entry)
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", choices=CANDIDATES, action="append")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="for each kernel")
    parser.add_argument("--folder", type=Path, default=tuning.TABLES)
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny, interpreted, no files")
    args = parser.parse_args()
    chip = tuning.current_chip()
    if chip is None and not args.dry_run_cpu:
        print(f"no tables are kept for {jax.devices()[0].device_kind}", file=sys.stderr)
        return 2
    mode = contextlib.nullcontext()
    if args.dry_run_cpu:
        from pallas_kernels.interpret import interpret_mode

        mode = interpret_mode()
    with mode:
        for kernel in args.kernel or CANDIDATES:
            print(kernel, flush=True)
            deadline = time.perf_counter() + args.budget_s
            entries = tune(kernel, tiny=args.dry_run_cpu, deadline=deadline)
            if entries and not args.dry_run_cpu:
                path = args.folder / f"{kernel}.json"
                table = json.loads(path.read_text()) if path.is_file() else {}
                write_table(path, merged(table, chip, entries))
                print(f"  wrote {len(entries)} entries to {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
