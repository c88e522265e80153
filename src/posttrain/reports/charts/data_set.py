"""``posttrain data show --plot``: how long the texts are, and how the labels are spread."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from posttrain.errors import UsageError
from posttrain.file_kinds import kind_of_file
from posttrain.reports.charts.picture import COLORS, new_figure, plain_frame, save_picture
from posttrain.tasks.description import Description, percentile

MAX_BARS = 12
NUM_BINS = 40


def draw_data(stats: Description, title: str, unit: str, path: str | Path) -> Path:
    """Histograms of lengths, and one panel of bars for each balance that there is; saved as PNG.

    Raises:
        StorageError: the file cannot be written.
    """
    panels = balances(stats)
    columns = 2 if panels else 1
    rows = 1 + max(0, -(-(len(panels) - 1) // columns))
    figure = new_figure(5.6 * columns, 3.4 * rows + 0.6, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    grid = figure.add_gridspec(rows, columns)
    _draw_lengths(figure.add_subplot(grid[0, 0]), stats, unit)
    for place, (name, counts) in enumerate(panels, start=1):
        _draw_bars(figure.add_subplot(grid[place // columns, place % columns]), name, counts)
    target = Path(path)
    kinds = figure.canvas.get_supported_filetypes()
    if target.suffix and target.suffix.removeprefix(".").lower() not in kinds:
        raise UsageError(f"--plot: {target}: no picture can be written as {target.suffix}; use .png, .svg or .pdf")
    if kind_of_file(target.parent) != "folder" or kind_of_file(target) not in ("file", "nothing"):
        raise UsageError(f"--plot: {target}: no file can be written there; give one in a folder that is there")
    return save_picture(figure, target)


def balances(stats: Description) -> list[tuple[str, Counter[str]]]:
    """What is counted by value: labels of answers and steps, which of a pair is longer, the keys of meta."""
    panels = [(f"labels of {name}", counts) for name, counts in stats.labels.items()]
    if stats.num_pairs:
        longer = stats.longer_chosen / stats.num_pairs
        shares = Counter({"chosen": round(100 * longer), "rejected": round(100 * (1 - longer))})
        panels.append(("the longer one of a pair, %", shares))
    return panels + list(stats.kinds.items())


def _draw_lengths(axes: Any, stats: Description, unit: str) -> None:
    everything = [length for values in stats.lengths.values() for length in values]
    # whole numbers: else some bins would hold one length more than others
    width = max(1, math.ceil(percentile(everything, 0.99) / NUM_BINS))
    last = width * NUM_BINS
    edges = [width * i for i in range(NUM_BINS + 1)]
    for (part, values), color in zip(stats.lengths.items(), COLORS, strict=False):
        label = f"{part} (median {percentile(values, 0.5):,.0f})"
        axes.hist(values, bins=edges, histtype="stepfilled", alpha=0.25, color=color)
        axes.hist(values, bins=edges, histtype="step", color=color, label=label, linewidth=1.4)
    beyond = sum(length > last for length in everything)
    axes.set_xlabel(unit + (f" ({beyond:,} longer texts are beyond the edge)" if beyond else ""))
    axes.set_ylabel("texts")
    axes.set_title("lengths", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    plain_frame(axes, has_grid=False)


def _draw_bars(axes: Any, name: str, counts: Counter[str]) -> None:
    shown = counts.most_common(MAX_BARS)
    if len(counts) > MAX_BARS:
        name += f" (the {MAX_BARS} commonest of {len(counts)})"
    labels = [value[:28] for value, _ in shown][::-1]
    bars = axes.barh(range(len(shown)), [count for _, count in shown][::-1], color=COLORS[0], alpha=0.85)
    axes.set_yticks(range(len(shown)), labels, fontsize=8)
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=3)
    axes.margins(x=0.14)
    axes.set_title(name, loc="left", fontsize=10)
    plain_frame(axes, has_grid=False)
