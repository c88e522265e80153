"""``calibration.png``: what a reward model predicts against what comes true, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.evals.statistics import Bin, wilson_interval
from posttrain.reports.charts.picture import error_bars, new_figure, plain_frame, save_picture, show_percent

COLOR, SOFT = "#2f6fde", "#c9d4e6"


def draw_calibration(bins: Sequence[Bin], title: str, path: str | Path, *, what: str = "came true") -> Path:
    """The reliability diagram, with the 95 % interval of each bin, over a histogram of the predictions.

    ``what``: what the observed share is of. On the diagonal predictions mean what they say; below it they are
    overconfident.

    Raises:
        StorageError: the file cannot be written.
    """
    assert bins, "without predictions there is no diagram"
    figure = new_figure(5.2, 5.6, layout="constrained")
    figure.suptitle(title, fontsize=11, fontweight="bold")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    start = 0.5 if all(b.low >= 0.5 for b in bins) else 0.0
    top.plot([start, 1], [start, 1], color="#999999", linewidth=1, linestyle="--", label="perfect")
    intervals = [wilson_interval(b.observed * b.n, b.n) for b in bins]
    shares = [b.observed for b in bins]
    errors = error_bars(shares, [low for low, _ in intervals], [high for _, high in intervals])
    top.errorbar([b.predicted for b in bins], shares, errors, fmt="o-", color=COLOR, capsize=2, markersize=4)
    top.set_ylim(0, 1.02)
    top.set_ylabel(f"share that {what}", fontsize=9)
    width = max(b.high - b.low for b in bins)
    bottom.bar([b.low for b in bins], [b.n for b in bins], width=width, align="edge", color=SOFT, edgecolor="white")
    bottom.set_xlim(start, 1)
    bottom.set_xlabel("predicted probability", fontsize=9)
    bottom.set_ylabel("count", fontsize=9)
    for axes in (top, bottom):
        show_percent(axes.xaxis, 0)
        plain_frame(axes)
    show_percent(top.yaxis, 0)
    return save_picture(figure, path, 130)
