"""The picture of the differences: over the steps, and by layer."""

from pathlib import Path
from typing import Any

import numpy as np
from figure_files import save

ATTENTION, LOGITS, POOL, PREFILL, EVENT = "#c1440e", "#1f5a99", "#5b8c2a", "#e9e4da", "#6a3d9a"
FLOOR = 1e-9
"""Where a difference of exactly 0 is drawn on a logarithmic axis."""


def draw(report: dict[str, Any], path: Path) -> list[Path]:
    """Draws a report as PNG and SVG beside each other; returns both paths."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # needs no display

    with rc_context({"font.size": 11}):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        run = report["run"]
        first, second = run["implementations"]
        where = f"{run['device']}, interpreted" if run["interpreted"] else run["device"]
        figure.suptitle(
            f"{second} beside {first}: {run['model']}, {run['dtype']}, {where}", fontsize=12
        )
        _draw_steps(above, report)
        _draw_layers(figure, below, report)
        return save(figure, path)


def _finite(values: list[float], top: float) -> list[float]:
    """For a logarithmic axis: 0 at the floor, what is not finite at the top."""
    return [max(v, FLOOR) if np.isfinite(v) else top for v in values]


def _draw_steps(axes: Any, report: dict[str, Any]) -> None:
    steps = report["steps"]
    x = [s["step"] for s in steps]
    tolerance = report["run"]["tolerance"]
    curves = {
        "attention, worst layer": (
            [max(d["relative"] for d in s["attention"]) for s in steps],
            ATTENTION,
            "o",
        ),
        "logits": ([s["logits"]["relative"] for s in steps], LOGITS, "s"),
        "keys and values in the pool": ([s["pool"]["relative"] for s in steps], POOL, "^"),
    }
    worst = max([v for c in curves.values() for v in c[0] if np.isfinite(v)], default=tolerance)
    top = 4 * max(worst, tolerance)
    for s in steps:
        if s["prefill_tokens"]:
            axes.axvspan(s["step"] - 0.5, s["step"] + 0.5, color=PREFILL, zorder=0, lw=0)
    for label, (values, color, marker) in curves.items():
        axes.plot(x, _finite(values, top), marker=marker, ms=4.5, lw=1.2, color=color, label=label)
    axes.axhline(tolerance, color="black", lw=1, ls="--")
    axes.annotate(
        f"tolerance {tolerance:g}",
        (0.995, tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
    )
    apart = [s["step"] for s in steps if s["tokens"]]
    if apart:
        axes.plot(apart, [top] * len(apart), "X", color=EVENT, ms=9, label="tokens differ")
    lowest = min([v for c in curves.values() for v in c[0] if v > 0], default=FLOOR)
    axes.set(
        yscale="log",
        ylim=(max(FLOOR, lowest / 5), 40 * top),
        ylabel="largest difference, relative\nto the largest value",
        title="By step (shaded: prompts among its tokens)",
    )
    axes.legend(loc="upper left", ncols=2, frameon=False)
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_layers(figure: Any, axes: Any, report: dict[str, Any]) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    steps = report["steps"]
    grid = np.array([[d["relative"] for d in s["attention"]] for s in steps]).T
    finite = grid[np.isfinite(grid) & (grid > 0)]
    low, high = (finite.min(), finite.max()) if finite.size else (FLOOR, 1.0)
    if high <= low:
        high = 10 * low
    shown = np.where(np.isfinite(grid), np.maximum(grid, low), high)
    x = np.array([s["step"] for s in steps])
    edges = np.append(x, x[-1] + 1) - 0.5
    layers = np.arange(grid.shape[0] + 1) - 0.5
    mesh = axes.pcolormesh(edges, layers, shown, norm=LogNorm(low, high), cmap="viridis")
    figure.colorbar(mesh, ax=axes, label="relative difference", pad=0.01)
    axes.set(xlabel="step", ylabel="layer", title="Attention outputs by layer")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
