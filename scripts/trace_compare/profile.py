"""A profiler trace of a few steps, and what is in it."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def record(folder: Path, run: Callable[[], Any]) -> Path:
    """Call ``run`` under JAX's profiler; the trace for Perfetto that it left.

    ``folder`` also gets the profile that TensorBoard and xprof read. Nothing is opened or sent.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call of an interpreter would drown the rest
    with jax.profiler.trace(
        str(folder),
        create_perfetto_link=False,
        create_perfetto_trace=True,
        profiler_options=options,
    ):
        jax.block_until_ready(run())
    return newest_trace(folder)


def newest_trace(folder: Path) -> Path:
    """The trace for Perfetto that was written last below a folder."""
    found = sorted(folder.rglob("perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"the profiler left no perfetto_trace.json.gz in {folder}")
    return found[-1]


def summarize(path: Path, *, top: int = 8) -> dict[str, Any]:
    """``events``: how many slices; ``longest``: names with the most time, (name, count, ms).

    A slice counts with what is nested in it, so the times do not add up to the whole.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = content["traceEvents"] if isinstance(content, dict) else content
    slices = [event for event in events if event.get("ph") == "X"]
    times, counts = Counter(), Counter()
    for event in slices:
        times[event["name"]] += event.get("dur", 0)
        counts[event["name"]] += 1
    return {
        "events": len(slices),
        "longest": [(name, counts[name], us / 1000) for name, us in times.most_common(top)],
    }
