#!/usr/bin/env python
"""Static against continuous batching, contiguous against paged memory, with and without sharing.

    python scripts/compare_batching.py                      # 64 requests on the real model
    python scripts/compare_batching.py --workload shared    # 32 requests that begin alike
    python scripts/compare_batching.py --workload article   # seven requests in a batch of four

One workload through every mode in turn, on one model, with the same KV memory. Each mode is the
engine itself with other settings (`--batching`, `--kv-cache` of the server). Prints a table whose
ratios are all from this run; writes PREFIX.png and PREFIX.svg (a bar for each request) and
PREFIX.json.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
from batching_runs import MODES, WORKLOADS, Run, run_mode, table

DEFAULT_MODES = (
    "static contiguous",
    "continuous contiguous",
    "static paged",
    "continuous paged",
    "continuous paged shared",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args:
    """Command line of compare_batching.py."""

    workload: Literal["mixed", "shared", "article"] = "mixed"
    """mixed: prompts of 32 to 256 and outputs of 16 to 256 tokens, W2 of the offline benchmark.
    shared: a common beginning of 512 tokens, 32 own ones, 16 to 64 out. article: requests of 100,
    50, 200 and 30 tokens in a batch of four, then three more."""

    modes: tuple[str, ...] = DEFAULT_MODES
    """What to compare, the first one is the baseline of the ratios. Beside the default there is
    "no cache": every token computed anew for the next (slow: give it few requests)."""

    requests: int | None = None
    """Only the first so many requests."""

    model: str = "smollm2-135m"
    """Preset, Hugging Face directory or GGUF file."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and keys."""

    pool_tokens: int | None = None
    """KV memory of every mode, in tokens. Default: 8,192; for the article eight sequences."""

    max_num_seqs: int | None = None
    """Most requests at once. Default: 32; for the article 4."""

    max_model_len: int | None = None
    """Tokens that a mode without paging reserves for a request. Default: 1,024; for the article
    256."""

    block_size: int = 16
    """Tokens of a block."""

    repeats: int = 1
    """Runs of each mode; the fastest counts, each after a warm-up of its own."""

    out: str = "batching"
    """Path of the picture and the figures, without suffix."""

    plot: bool = True
    """Draw the picture (needs matplotlib)."""

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise ValueError(f"modes must be of {', '.join(MODES)} (got {', '.join(unknown)})")
        for name in ("requests", "pool_tokens", "max_num_seqs", "max_model_len", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 (got {value})")

    def size(self, name: str) -> int:
        """A size, by the workload where it was not given."""
        given = getattr(self, name)
        return WORKLOADS[self.workload][name] if given is None else given


def fastest(runs: list[Run]) -> Run:
    """The run that counts."""
    return min(runs, key=lambda run: run.seconds)


def main(args: Args) -> None:
    """Runs, prints and writes everything."""
    settings: dict[str, Any] = {
        "dtype": args.dtype,
        "block_size": args.block_size,
        "num_blocks": args.size("pool_tokens") // args.block_size,
        "max_num_seqs": args.size("max_num_seqs"),
        "max_model_len": args.size("max_model_len"),
    }
    runs = []
    for mode in args.modes:
        print(f"{mode} ...", file=sys.stderr, flush=True)
        runs.append(
            fastest(
                run_mode(mode, args.model, args.workload, args.requests, settings, args.repeats)
            )
        )
    print(table(runs))
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    modes = [run.as_dict() for run in runs]
    figures = {"workload": args.workload, "settings": settings, "modes": modes}
    Path(f"{path}.json").write_text(json.dumps(figures, indent=1) + "\n")
    written = [f"{path}.json"]
    if args.plot:
        from batching_plot import draw

        written += map(str, draw(runs, path, title=args.workload))
    print("\nwrote " + ", ".join(written))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
