"""The work of the offline benchmark and the loop that measures it: the same for every engine.

Token ids from fixed seeds, so that no tokenizer takes part and every engine gets the same work.

    W1   one prompt of 128 tokens, 128 output tokens, alone
    W2   64 requests, prompts of 32 to 256 and outputs of 16 to 256 tokens, at most 32 at once
    W3   32 requests that share a prefix of 512 tokens, 32 own tokens and 32 output tokens each
    W3w  the same with the prefix computed before the clock starts (a warm prefix cache)
    W4   one prompt of 1,024 tokens, 1 output token

Lengths are the same in every repeat; token ids differ, so that nothing carries over in a prefix
cache from one repeat to the next. Repeat -1 is the warm-up.
"""

import functools
import os
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

WORKLOADS = ("W1", "W2", "W3", "W3w", "W4")
MAX_NUM_SEQS = 32
MAX_MODEL_LEN = 2048
# Of SmolLM2's vocabulary; ids 0 to 16 are special.
FIRST_TOKEN_ID, VOCAB_SIZE = 17, 49152

# Workload -> the figures reported for it; the first is the one that counts.
METRICS = {
    "W1": ("decode_tps", "ttft_ms"),
    "W2": ("out_tps", "total_tps"),
    "W3": ("out_tps", "total_tps"),
    "W3w": ("out_tps", "total_tps"),
    "W4": ("prefill_tps",),
}

Request = tuple[list[int], int]  # prompt ids, output tokens


class Runner(Protocol):
    """An engine as the benchmark sees it. Greedy, end-of-sequence ignored."""

    def stream(self, prompt_ids: list[int], num_tokens: int) -> tuple[float, float, int]:
        """Serves one request; (time to first token in s, total time in s, output tokens)."""

    def batch(self, requests: Sequence[Request]) -> tuple[float, int]:
        """Serves all requests, at most MAX_NUM_SEQS at once; (seconds, output tokens)."""


def _token_ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(count)]


def w1(repeat: int) -> Request:
    """One request of 128 and 128 tokens."""
    return _token_ids(random.Random(1000 + repeat), 128), 128


def w2(repeat: int) -> list[Request]:
    """64 requests of uniformly drawn lengths."""
    lengths = random.Random(2)
    sizes = [(lengths.randint(32, 256), lengths.randint(16, 256)) for _ in range(64)]
    source = random.Random(2000 + repeat)
    return [(_token_ids(source, prompt), output) for prompt, output in sizes]


def w3(repeat: int, *, warm: bool = False) -> tuple[list[int], list[Request]]:
    """The shared prefix, and 32 requests that begin with it."""
    source = random.Random((3500 if warm else 3000) + repeat)
    prefix = _token_ids(source, 512)
    return prefix, [(prefix + _token_ids(source, 32), 32) for _ in range(32)]


def w4(repeat: int) -> Request:
    """One request of 1,024 and 1 tokens."""
    return _token_ids(random.Random(4000 + repeat), 1024), 1


def run_one(runner: Runner, workload: str, repeat: int) -> dict[str, float]:
    """One repeat of one workload: its figures, seconds, and cores used by us and by others."""
    if workload in ("W1", "W4"):
        prompt_ids, num_tokens = (w1 if workload == "W1" else w4)(repeat)
        before = cpu_seconds()
        first_s, total_s, produced = runner.stream(prompt_ids, num_tokens)
        expected, seconds = num_tokens, total_s
        if workload == "W1":
            decode_tps = (num_tokens - 1) / (total_s - first_s)
            figures = {"decode_tps": decode_tps, "ttft_ms": first_s * 1e3}
        else:
            figures = {"prefill_tps": len(prompt_ids) / total_s}
    else:
        if workload == "W2":
            requests = w2(repeat)
        else:
            prefix, requests = w3(repeat, warm=workload == "W3w")
            if workload == "W3w":
                runner.batch([(prefix, 1)])
        before = cpu_seconds()
        seconds, produced = runner.batch(requests)
        expected = sum(count for _, count in requests)
        tokens_in = sum(len(prompt_ids) for prompt_ids, _ in requests)
        figures = {"out_tps": expected / seconds, "total_tps": (tokens_in + expected) / seconds}
    if produced != expected:
        raise RuntimeError(f"{workload}: {produced} output tokens instead of {expected}")
    own_s, all_s = (now - then for now, then in zip(cpu_seconds(), before, strict=True))
    figures |= {"s": seconds, "own": own_s / seconds, "others": (all_s - own_s) / seconds}
    return {name: round(value, 3) for name, value in figures.items()}


def run_all(
    runner: Runner,
    which: Sequence[str] = WORKLOADS,
    repeats: int = 3,
    *,
    warmup: bool = True,
    log: Callable[[str], Any] = functools.partial(print, flush=True),  # noqa: B008
) -> dict[str, dict[str, Any]]:
    """{workload: {figure: its median, "best": the fastest repeat, "rows": every repeat}}."""
    results = {}
    for workload in which:
        rows = []
        for repeat in range(-1 if warmup else 0, repeats):
            row = run_one(runner, workload, repeat)
            log(f"  {workload} {'warm-up' if repeat < 0 else f'repeat {repeat}'}: {row}")
            if repeat >= 0:
                rows.append(row)
        results[workload] = {
            **{name: statistics.median(row[name] for row in rows) for name in rows[0]},
            "best": min(rows, key=lambda row: row["s"]),
            "rows": rows,
        }
    return results


def cpu_seconds() -> tuple[float, float]:
    """CPU time so far in seconds: (this process and its descendants, the whole machine)."""
    ticks = os.sysconf("SC_CLK_TCK")
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    machine = sum(fields[:3]) + sum(fields[5:])  # all but idle and waiting for disks
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(path.parent.name)
        children.setdefault(int(values[1]), []).append(pid)
        used[pid] = int(values[11]) + int(values[12])

    def tree(pid: int) -> int:
        return used.get(pid, 0) + sum(tree(child) for child in children.get(pid, ()))

    return tree(os.getpid()) / ticks, machine / ticks


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Several runs as a Markdown table, with the first one's ratio to each of the others.

    A ratio above 1 means that the first is better: more tokens a second, less time.
    """
    columns = [(workload, metric) for workload in WORKLOADS for metric in METRICS[workload]]

    def value(run: dict[str, Any], workload: str, metric: str) -> float | None:
        return run["results"].get(workload, {}).get(metric)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    busy = "others' cores"
    lines = [
        line(["engine", "dtype", *(f"{w} {m}" for w, m in columns), busy]),
        line(["---"] * (len(columns) + 3)),
    ]
    for run in runs:
        cells = [value(run, *column) for column in columns]
        others = max((result["others"] for result in run["results"].values()), default=0.0)
        texts = ["-" if cell is None else f"{cell:.1f}" for cell in cells]
        lines.append(line([run["peer"], run["dtype"], *texts, f"{others:.2f}"]))
    mine = runs[0]
    for run in runs[1:]:
        texts = []
        for workload, metric in columns:
            pair = value(mine, workload, metric), value(run, workload, metric)
            if metric.endswith("_ms"):
                pair = pair[::-1]
            texts.append("-" if None in pair else f"{pair[0] / pair[1]:.2f}x")
        lines.append(line([f"{mine['peer']} / {run['peer']}", run["dtype"], *texts, ""]))
    return "\n".join(lines)
