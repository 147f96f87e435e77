"""Writing figures to files, for the scripts that draw some."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def save(figure: Any, path: Path) -> list[Path]:
    """Writes a figure as PNG and SVG beside each other; returns both paths.

    A suffix .png or .svg of `path` is dropped, and its folder made. Equal figures give equal SVG
    files.
    """
    from matplotlib import rc_context

    name = path.stem if path.suffix in (".png", ".svg") else path.name
    written = [path.with_name(name + suffix) for suffix in (".png", ".svg")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "pagedjax"}):
        for file in written:
            metadata = {"Date": None} if file.suffix == ".svg" else None
            figure.savefig(file, dpi=110, metadata=metadata)
    return written


def save_losses(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], path: Path, title: str
) -> None:
    """Writes losses over the steps as a PNG: label to (steps, losses)."""
    from matplotlib.figure import Figure  # needs no display

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, (steps, losses) in curves.items():
        axes.plot(steps, losses, label=label)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title, ylim=(0, None))
    if len(curves) > 1:
        axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
