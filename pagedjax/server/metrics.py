"""GET /metrics: the engine's counts in Prometheus' text format (version 0.0.4)."""

from collections.abc import Iterator

from pagedjax.engine import EngineStats
from pagedjax.engine.stats import Histogram


def render_metrics(stats: EngineStats, model: str) -> str:
    """All metrics, each with its help and type."""
    lines = []
    for name, kind, text, samples in _families(stats):
        lines += [f"# HELP pagedjax_{name} {text}", f"# TYPE pagedjax_{name} {kind}"]
        for suffix, labels, value in samples:
            pairs = ",".join(f'{k}="{_escape(v)}"' for k, v in {"model": model, **labels}.items())
            lines.append(f"pagedjax_{name}{suffix}{{{pairs}}} {value}")
    return "\n".join(lines) + "\n"


Sample = tuple[str, dict[str, str], float]


def _families(stats: EngineStats) -> Iterator[tuple[str, str, str, list[Sample]]]:
    used = stats.num_blocks - stats.num_free_blocks - stats.num_evictable_blocks
    for name, text, value in (
        ("requests_running", "Requests that hold blocks.", stats.num_running),
        ("requests_waiting", "Requests that wait for blocks or for a row.", stats.num_waiting),
        ("blocks", "Blocks of the KV pool.", stats.num_blocks),
        ("blocks_used", "Blocks that running requests hold.", used),
        ("blocks_cached", "Blocks kept for reuse that nobody holds.", stats.num_evictable_blocks),
        ("host_blocks", "Blocks of the pool in host memory.", stats.num_host_blocks),
        (
            "host_blocks_used",
            "Of them, those of requests swapped out.",
            stats.num_host_blocks - stats.num_free_host_blocks,
        ),
    ):
        yield name, "gauge", text, [("", {}, value)]
    for name, text, value in (
        ("prompt_tokens_total", "Prompt tokens of started requests.", stats.prompt_tokens),
        ("cached_tokens_total", "Of them, found in the prefix cache.", stats.cached_tokens),
        ("output_tokens_total", "Tokens generated.", stats.output_tokens),
        ("steps_total", "Steps of the engine.", stats.steps),
        ("step_tokens_total", "Tokens computed, over all steps.", stats.computed_tokens),
        ("step_places_total", "Sizes of all steps, padding included.", stats.padded_tokens),
        ("preemptions_total", "Requests put back for want of blocks.", stats.preemptions),
        (
            "early_preemptions_total",
            "Of them, of requests that had got no token since they resumed.",
            stats.early_preemptions,
        ),
        ("recomputed_tokens_total", "Computed again after that.", stats.recomputed_tokens),
        ("swaps_out_total", "Requests moved to host memory.", stats.swaps_out),
        ("swaps_in_total", "Requests moved back.", stats.swaps_in),
        ("blocks_swapped_out_total", "Blocks moved to host memory.", stats.blocks_swapped_out),
        ("blocks_swapped_in_total", "Blocks moved back.", stats.blocks_swapped_in),
        ("requests_refused_total", "Requests that found the queue full.", stats.refused),
    ):
        yield name, "counter", text, [("", {}, value)]
    finished: list[Sample] = [
        ("", {"reason": reason}, count) for reason, count in sorted(stats.finished.items())
    ]
    yield "requests_finished_total", "counter", "Requests that ended, by reason.", finished
    for name, text, histogram in (
        (
            "time_to_first_token_seconds",
            "From arrival to first token.",
            stats.time_to_first_token,
        ),
        ("time_per_output_token_seconds", "Between two tokens.", stats.time_per_token),
        ("request_seconds", "From arrival to the end.", stats.request_time),
    ):
        yield name, "histogram", text, _histogram(histogram)


def _histogram(histogram: Histogram) -> list[Sample]:
    samples, count = [], 0
    for bound, n in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += n
        label = "+Inf" if bound == float("inf") else str(bound)
        samples.append(("_bucket", {"le": label}, count))
    return [*samples, ("_sum", {}, histogram.total), ("_count", {}, count)]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
