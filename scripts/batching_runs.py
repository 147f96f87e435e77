"""The modes and workloads of compare_batching.py, and what is measured of each."""

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench_workloads import FIRST_TOKEN_ID, VOCAB_SIZE, w2

MODES: dict[str, dict[str, Any]] = {
    "no cache": {"kv_cache": "none", "enable_prefix_caching": False},
    "static contiguous": {
        "batching": "static",
        "kv_cache": "contiguous",
        "enable_prefix_caching": False,
    },
    "continuous contiguous": {"kv_cache": "contiguous", "enable_prefix_caching": False},
    "static paged": {"batching": "static", "enable_prefix_caching": False},
    "continuous paged": {"enable_prefix_caching": False},
    "continuous paged shared": {},
}
"""Settings of the engine that make a mode."""

WORKLOADS = {
    "mixed": {"pool_tokens": 8192, "max_num_seqs": 32, "max_model_len": 1024},
    "shared": {"pool_tokens": 8192, "max_num_seqs": 32, "max_model_len": 1024},
    "article": {"pool_tokens": 2048, "max_num_seqs": 4, "max_model_len": 256},
}
"""Sizes that suit each workload."""

ARTICLE = {"A": 100, "B": 50, "C": 200, "D": 30, "E": 120, "F": 120, "G": 120}
"""Output tokens of the article's requests; those of E, F and G it leaves open."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A name, the prompt, output tokens."""

    name: str
    prompt_ids: list[int]
    num_tokens: int


def make_requests(workload: str, count: int | None = None, repeat: int = 0) -> list[Request]:
    """The workload's requests, all there from the start; the first `count` of them.

    Lengths are the same in every repeat and token ids are not, so that nothing is found in the
    prefix cache of an earlier one.
    """
    source, lengths = random.Random(5000 + repeat), random.Random(5)

    def ids(length: int) -> list[int]:
        return [source.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(length)]

    if workload == "article":
        requests = [Request(name, ids(8), length) for name, length in ARTICLE.items()]
    elif workload == "mixed":
        requests = [Request(str(i), *request) for i, request in enumerate(w2(repeat))]
    else:
        prefix = ids(512)
        requests = [Request(str(i), prefix + ids(32), lengths.randint(16, 64)) for i in range(32)]
    return requests[:count]


@dataclasses.dataclass(kw_only=True)
class Run:
    """One mode's run.

    Attributes:
      spans: name -> (state, first step, last step) in order; steps count from 1. States: waiting,
        running, preempted, done (a static batch's request that has ended and keeps its place).
      running, held, filled: of each step: requests that run, blocks that they hold, and share of
        the held slots that have keys in them (None where blocks are shared).
      first_s: of each request: when its first token came.
    """

    mode: str
    seconds: float
    num_places: int
    num_blocks: int
    spans: dict[str, list[tuple[str, int, int]]]
    tokens: dict[str, list[int]]
    running: list[int]
    held: list[int]
    filled: list[float | None]
    first_s: list[float]
    preemptions: int
    computed_tokens: int

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(map(len, self.tokens.values()))

    def figures(self) -> dict[str, float | None]:
        """What the table shows."""
        filled = [share for share in self.filled if share is not None]
        places = self.num_places * len(self.running)
        return {
            "tokens_per_s": self.output_tokens / self.seconds,
            "seconds": self.seconds,
            "steps": len(self.running),
            "mean_running": statistics.mean(self.running),
            "most_running": max(self.running),
            "first_token_mean_s": statistics.mean(self.first_s),
            "first_token_worst_s": max(self.first_s),
            "empty_places": 1 - sum(self.running) / places,
            "pool_held": statistics.mean(self.held) / self.num_blocks,
            "held_but_empty": 1 - statistics.mean(filled) if filled else None,
            "preemptions": self.preemptions,
            "computed_tokens": self.computed_tokens,
        }

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"mode": self.mode, **self.figures(), "spans": self.spans}


def run_mode(
    mode: str,
    model: str,
    workload: str,
    count: int | None,
    settings: dict[str, Any],
    repeats: int,
) -> list[Run]:
    """Builds the mode's engine, serves a few requests to warm up, then all of them `repeats` times.

    Raises:
      RuntimeError: a request failed.
    """
    from pagedjax.config import EngineConfig
    from pagedjax.engine import build_engine

    large = (64,) if workload == "article" else (128, 512)
    buckets = sorted({settings["max_num_seqs"], *large})
    config = EngineConfig(
        **settings,
        **MODES[mode],
        token_buckets=tuple(buckets),
        max_num_batched_tokens=buckets[-1],
    )
    engine = build_engine(model, config, progress=False)
    serve(engine, mode, make_requests(workload, 2, repeat=-1), config)
    return [
        serve(engine, mode, make_requests(workload, count, repeat), config)
        for repeat in range(repeats)
    ]


def serve(engine: Any, mode: str, requests: Sequence[Request], config: Any) -> Run:
    """Serves all requests, added at once."""
    from pagedjax import SamplingParams

    before = engine.stats()
    preemptions, computed = before.preemptions, before.computed_tokens
    last_step = before.steps
    tokens: dict[str, list[int]] = {request.name: [] for request in requests}
    states: dict[str, list[str]] = {request.name: [] for request in requests}
    first_s: dict[str, float] = {}
    running, held, filled = [], [], []
    start = time.perf_counter()
    for request in requests:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        engine.add_request(request.name, request.prompt_ids, params)
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"{mode}: request {output.request_id}: {output.error}")
            tokens[output.request_id] += output.outputs[0].token_ids
            if output.outputs[0].token_ids and output.request_id not in first_s:
                first_s[output.request_id] = now
        stats = engine.stats()
        if stats.steps == last_step:
            continue
        last_step = stats.steps
        seconds = now
        alive = engine.request_states()
        produced = {output.request_id for output in outputs}
        for name, history in states.items():
            state = alive[name].status if name in alive else "ended"
            # The step that ends a request is one in which it ran.
            history.append("running" if name in produced and state == "ended" else state)
        running.append(sum(history[-1] == "running" for history in states.values()))
        used = config.num_blocks - stats.num_free_blocks - stats.num_evictable_blocks
        held.append(used)
        share = None
        if not config.enable_prefix_caching and used:
            slots = sum(state.num_computed_tokens for state in alive.values())
            share = slots / (used * config.block_size)
        filled.append(share)
    after = engine.stats()
    return Run(
        mode=mode,
        seconds=seconds,
        num_places=config.max_num_seqs,
        num_blocks=config.num_blocks,
        spans=_spans(states, static=mode.startswith("static")),
        tokens=tokens,
        running=running,
        held=held,
        filled=filled,
        first_s=list(first_s.values()),
        preemptions=after.preemptions - preemptions,
        computed_tokens=after.computed_tokens - computed,
    )


def _spans(states: dict[str, list[str]], *, static: bool) -> dict[str, list[tuple[str, int, int]]]:
    """Each request's states, step by step, as (state, first step, last step).

    A static batch lets nobody go before all of it have ended, which is when others start.
    """
    words = {name: _words(history) for name, history in states.items()}
    over = _batch_ends(words) if static else {}
    spans: dict[str, list[tuple[str, int, int]]] = {}
    for name, mine in words.items():
        mine = mine + ["done"] * (over.get(name, 0) - len(mine))
        spans[name] = []
        for step, word in enumerate(mine, start=1):
            if spans[name] and spans[name][-1][0] == word:
                spans[name][-1] = (word, spans[name][-1][1], step)
            else:
                spans[name].append((word, step, step))
    return spans


def _batch_ends(words: dict[str, list[str]]) -> dict[str, int]:
    """Of each request the number of steps after which its batch is over: the next one starts, or
    all is done. Who starts while another one of the batch goes on belongs to it."""
    first = {name: w.index("running") for name, w in words.items() if "running" in w}
    batches: list[list[str]] = []
    for name in sorted(first, key=first.__getitem__):
        if not batches or first[name] >= max(len(words[member]) for member in batches[-1]):
            batches.append([])
        batches[-1].append(name)
    starts = [first[batch[0]] for batch in batches[1:]]
    ends = [*starts, max((len(w) for w in words.values()), default=0)]
    return {name: end for batch, end in zip(batches, ends, strict=True) for name in batch}


def _words(history: Sequence[str]) -> list[str]:
    """What the picture calls a request's states, up to its end."""
    words: list[str] = []
    for state in history:
        if state == "ended":
            break
        waits = "preempted" if "running" in words else "waiting"
        words.append("running" if state == "running" else waits)
    return words


def table(runs: Sequence[Run]) -> str:
    """The runs as a Markdown table; ratios are to the first one."""
    lines = [
        "| mode | output tokens/s | ratio | steps | requests at once, mean and most "
        "| first token after, mean and worst (s) | places empty | pool held | held but empty "
        "| preempted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = runs[0].figures()
    for run in runs:
        f = run.figures()
        empty = "-" if f["held_but_empty"] is None else f"{100 * f['held_but_empty']:.1f} %"
        lines.append(
            f"| {run.mode} | {f['tokens_per_s']:.1f} | "
            f"{f['tokens_per_s'] / first['tokens_per_s']:.2f} | {f['steps']} | "
            f"{f['mean_running']:.1f}, {f['most_running']} | "
            f"{f['first_token_mean_s']:.1f}, {f['first_token_worst_s']:.1f} | "
            f"{100 * f['empty_places']:.0f} % | {100 * f['pool_held']:.0f} % | {empty} | "
            f"{f['preemptions']} |"
        )
    return "\n".join(lines)
