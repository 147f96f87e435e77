"""Times four workloads on the real model, in float32 and bfloat16, by PagedJAX or by a peer.

    python scripts/bench_offline.py                               # PagedJAX, both types
    python scripts/bench_offline.py --dtype float32 --which W1,W2 --out ours.json
    python scripts/bench_offline.py --engine vllm --model DIR     # in an environment that has it
    python scripts/bench_offline.py --beside vllm.json            # one table, with ratios

What the workloads are stands in scripts/bench_workloads.py. A peer (transformers, vllm) is imported
only when it is asked for, from the environment that runs this script, and needs a Hugging Face
directory as --model. Any option of the engine (`--block-size`, `--max-num-batched-tokens`, ...) or
a file of them (`--config`) changes how PagedJAX is built. `--dtype auto` runs both types.
"""

import dataclasses
import gc
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_runners import POOL_GIB, NotInstalledError, build_runner
from bench_workloads import MAX_MODEL_LEN, MAX_NUM_SEQS, WORKLOADS, run_all, table

from pagedjax.config import EngineConfig, parse_args

try:
    import tyro
except ImportError:  # a peer's environment has its own packages
    raise SystemExit("error: this script needs tyro beside the peer: pip install tyro") from None

DTYPES = ("float32", "bfloat16")


def default_engine() -> EngineConfig:
    """The engine's defaults, for sequences as long as the peers are set up for."""
    return EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)


@dataclass(frozen=True, kw_only=True)
class Args:
    """The command line."""

    runner: Annotated[Literal["pagedjax", "transformers", "vllm"], tyro.conf.arg(name="engine")] = (
        "pagedjax"
    )
    """Who does the work."""
    model: str = "smollm2-135m"
    """Preset, Hugging Face directory or GGUF file."""
    which: str = ",".join(WORKLOADS)
    """Workloads, with commas between them."""
    reps: int = 3
    """Timed repeats; the median counts."""
    threads: int = 2
    """Cores to use."""
    warmup: bool = True
    """Run each workload once before the clock counts."""
    out: Path | None = None
    """JSON file to write: one run, or a list of them when both types ran."""
    beside: tuple[Path, ...] = ()
    """JSON files of earlier runs to show in the same table, with ratios."""
    config: Path | None = None
    """TOML file of engine settings."""
    engine: EngineConfig = field(default_factory=default_engine)

    def __post_init__(self) -> None:
        names = self.which.split(",")
        if not set(names) <= set(WORKLOADS):
            raise ValueError(f"which must be of {', '.join(WORKLOADS)} (got {self.which!r})")
        for name in ("reps", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")


def limit_cores(threads: int) -> None:
    """Binds the process to its first `threads` cores; XLA starts as many threads as it may use."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        print(f"only {len(cores)} cores here; {threads} were asked for", file=sys.stderr)
    os.sched_setaffinity(0, cores[:threads])


def pool_blocks(args: Args, dtype: str) -> int | None:
    """Blocks of a pool of POOL_GIB for the model (None: the engine decides)."""
    from pagedjax.memory import bytes_per_block
    from pagedjax.models.presets import resolve_model
    from pagedjax.models.weights import read_config

    kv_dtype = dtype if args.engine.kv_cache_dtype == "auto" else args.engine.kv_cache_dtype
    shape = read_config(resolve_model(args.model))
    one = bytes_per_block(shape, block_size=args.engine.block_size, dtype=kv_dtype)
    return (POOL_GIB << 30) // one


def measure(args: Args, dtype: str) -> dict[str, Any]:
    """One run: every workload asked for, in one type."""
    config = dataclasses.replace(args.engine, dtype=dtype)
    if args.runner == "pagedjax" and config.num_blocks is None and config.memory_fraction is None:
        config = dataclasses.replace(config, num_blocks=pool_blocks(args, dtype))
    runner = build_runner(args.runner, args.model, dtype, args.threads, config)
    results = run_all(runner, args.which.split(","), args.reps, warmup=args.warmup)
    return {
        "peer": args.runner,
        "version": runner.version,
        "dtype": dtype,
        "threads": args.threads,
        "results": results,
    }


def load_runs(paths: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Runs of earlier result files."""
    runs = []
    for path in paths:
        content = json.loads(path.read_text())
        runs += content if isinstance(content, list) else [content]
    return runs


def main(args: Args) -> None:
    """Runs, prints and writes everything."""
    limit_cores(args.threads)
    earlier = load_runs(args.beside)
    dtypes = DTYPES if args.engine.dtype == "auto" else (args.engine.dtype,)
    runs = []
    for dtype in dtypes:
        print(f"{args.runner}, {dtype}:", flush=True)
        try:
            runs.append(measure(args, dtype))
        except NotInstalledError as error:
            raise SystemExit(f"error: {error}") from error
        gc.collect()  # the first type's pool goes before the second's comes
        print("RESULT " + json.dumps(runs[-1]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(runs[0] if len(runs) == 1 else runs, indent=1) + "\n")
    for run in runs:
        print("\n" + table([run, *(e for e in earlier if e["dtype"] == run["dtype"])]))


if __name__ == "__main__":
    main(parse_args(Args, description=__doc__))
