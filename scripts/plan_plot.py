"""The picture of the block-size study that scripts/plan_memory.py draws."""

from pathlib import Path
from typing import Any

from figure_files import save

WASTE, TABLE = "#c1440e", "#1f5a99"
TICKS = (1, 2, 4, 8, 16, 32, 64, 128)


def plot_study(plan: dict[str, Any], path: Path) -> list[Path]:
    """Draws the study of a plan as PNG and SVG beside each other; returns both paths.

    The left panel shows what share of the held memory is empty, the right one compares in bytes
    what the last blocks waste with what the block table takes. Equal plans give equal SVG files.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # needs no display

    with rc_context({"font.size": 11}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        left, right = figure.subplots(1, 2)
        lengths = plan["lengths"]
        span = f"{lengths['shortest']:,} to {lengths['longest']:,} tokens"
        span += f", {lengths['mean']:,.1f} in the mean"
        if lengths["shortest"] == lengths["longest"]:
            span = f"{lengths['longest']:,} tokens"
        model = Path(plan["model"]).name
        figure.suptitle(
            f"{model}, keys and values in {plan['dtype']}, sequences of {span}\n", fontsize=12
        )
        _draw_waste(left, plan)
        _draw_bytes(right, plan)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
            axes.set_xlabel("block size (tokens)")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        return save(figure, path)


def _draw_waste(axes: Any, plan: dict[str, Any]) -> None:
    from matplotlib.patheffects import withStroke

    rows = plan["block_sizes"]
    sizes, waste = [r["block_size"] for r in rows], [100 * r["waste"] for r in rows]
    axes.plot(sizes, waste, color=WASTE, linewidth=1.5, alpha=0.7)
    axes.set(title="Memory held but empty", ylabel="share of the held blocks (%)")
    halo = [withStroke(linewidth=4, foreground="white")]
    for row in rows:
        if row["block_size"] in TICKS:
            share = 100 * row["waste"]
            axes.plot(row["block_size"], share, "o", color=WASTE)
            axes.annotate(
                f"{share:.1f}",
                (row["block_size"], share),
                xytext=(-6, 6),
                textcoords="offset points",
                ha="right",
                path_effects=halo,
            )
    axes.set_xlim(0.6, 150)
    axes.set_ylim(0, 1.12 * max(*waste, 1e-9))


def _draw_bytes(axes: Any, plan: dict[str, Any]) -> None:
    rows = plan["block_sizes"]
    wasted = [(r["block_size"], r["wasted_bytes"]) for r in rows if r["wasted_bytes"] > 0]
    table = [(r["block_size"], r["table_bytes"]) for r in rows]
    axes.set_yscale("log", base=2)
    curves = (
        (wasted, WASTE, "empty places of the last block"),
        (table, TABLE, f"row of the block table, for {plan['max_model_len']:,} tokens"),
    )
    for points, color, name in curves:
        if points:
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.5, label=name)
        marked = [point for point in points if point[0] in TICKS]
        if marked:
            axes.plot(*zip(*marked, strict=True), "o", color=color)
    axes.set(title="Bytes of one sequence", ylabel="bytes (mean)")
    axes.set_xlim(0.6, 150)
    ticks = [4**i for i in range(2, 20)]
    low, high = axes.get_ylim()
    axes.set_ylim(low, 32 * high)  # the legend's place
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [_binary(tick) for tick in shown])
    axes.minorticks_off()
    axes.legend(loc="upper left", frameon=False)


def _binary(size_bytes: int) -> str:
    """A power of two in the largest unit that leaves at least 1."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power:
            return f"{size_bytes >> power:,} {unit}"
    return f"{size_bytes} B"
