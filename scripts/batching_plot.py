"""The timelines that compare_batching.py draws: a bar for each request, a panel for each mode."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batching_runs import Run
from figure_files import save

COLOURS = {
    "waiting": "#d9d9d9",
    "running": "#1f5a99",
    "preempted": "#c1440e",
    "done": "#f0b95b",
}
LABELS = {
    "waiting": "waits",
    "running": "runs",
    "preempted": "preempted",
    "done": "has ended, waits for its batch",
}


def draw(runs: Sequence[Run], path: Path, *, title: str) -> list[Path]:
    """Writes the picture as PNG and SVG; returns both paths. Equal runs give equal SVG files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    count = max(len(run.spans) for run in runs)
    steps = max(len(run.running) for run in runs)
    panel = min(3.4, 0.9 + 0.16 * count)
    with rc_context({"font.size": 10}):
        figure = Figure(figsize=(11, panel * len(runs) + 1.0), layout="constrained")
        axes_of_all = figure.subplots(len(runs), 1, squeeze=False, sharex=True)[:, 0]
        for axes, run in zip(axes_of_all, runs, strict=True):
            _draw_run(axes, run)
        axes_of_all[0].set_xlim(0.5, steps + 0.5)
        axes_of_all[-1].set_xlabel("step")
        seen = {state for run in runs for bar in run.spans.values() for state, _, _ in bar}
        used = [state for state in COLOURS if state in seen]
        figure.legend(
            handles=[Patch(color=COLOURS[state], label=LABELS[state]) for state in used],
            loc="outside upper center",
            ncols=len(used),
            title=f"{title}: what each request does, step by step",
            frameon=False,
        )
        return save(figure, path)


def _draw_run(axes: Any, run: Run) -> None:
    names = list(run.spans)
    for state, colour in COLOURS.items():
        for place, name in enumerate(names):
            bars = [(a - 0.5, b - a + 1) for word, a, b in run.spans[name] if word == state]
            if bars:
                axes.broken_barh(bars, (place - 0.4, 0.8), color=colour, linewidth=0)
    figures = run.figures()
    axes.set_title(
        f"{run.mode}: {figures['steps']} steps, {figures['seconds']:.1f} s, "
        f"{figures['tokens_per_s']:.0f} tokens/s",
        loc="left",
        fontsize=10,
    )
    axes.set_ylim(len(names) - 0.5, -0.5)
    few = len(names) <= 12
    axes.set_yticks(range(len(names)), names) if few else axes.set_ylabel("request")
    axes.spines[["top", "right"]].set_visible(False)
