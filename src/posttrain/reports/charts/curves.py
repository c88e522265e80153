"""``curves.png``: the panels of a run drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.reports.charts.panels import Panel, axis_range
from posttrain.store.durable import storage_errors

COLORS = ("#2f6fde", "#d9662b", "#2a9d6f", "#9a55c4")
NUM_COLUMNS = 3


def draw_curves(panels: Sequence[Panel], title: str, path: str | Path) -> Path:
    """Draw the panels in a grid and save them as PNG.

    Raises:
        StorageError: the file cannot be written.
    """
    assert panels, "a run without numbers has no curves"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    columns = min(NUM_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 2.9 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(panels):
            axes.set_visible(False)
            continue
        panel = panels[index]
        for color, series in zip(COLORS * len(panel.series), panel.series, strict=False):
            if not series.is_points:
                axes.plot(series.steps, series.values, color=color, linewidth=1.4, label=series.label)
                continue
            errors = None
            if series.low:
                below = [max(0.0, v - low) for v, low in zip(series.values, series.low, strict=True)]
                above = [max(0.0, high - v) for v, high in zip(series.values, series.high, strict=True)]
                errors = [below, above]
            axes.errorbar(
                series.steps, series.values, errors, fmt="o", color=color, markersize=4, capsize=2, label=series.label
            )
        low, high = axis_range(panel)
        axes.set_ylim(low, high * 1.03 if panel.is_share else high)
        if panel.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(panel.series) > 1:
            axes.legend(fontsize=7.5, frameon=False)
    target = Path(path)
    with storage_errors(target.name, target):
        figure.savefig(target, dpi=130)
    return target
