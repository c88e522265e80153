"""``comparison.png``: learning curves, reward against KL, accuracy against time, for up to some twenty methods.

Methods are numbered by rank. A method's colour and line style are the same in every panel; the numbers do without
colours at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.reports.charts.picture import COLORS, DASHES, label_panel, save_picture, ticks_of_shares, titled_grid
from posttrain.store.headline import Headline
from posttrain.sweeps.comparison import Band, Comparison, band_over_seeds

LABEL_SHARE = 0.036  # least distance of two labels, as a share of the panel's height
NAME_LENGTH = 20  # characters of a method's name that have room
NUM_BANDED = 8  # with more methods the bands are fainter


@dataclass(frozen=True)
class Line:
    """A method as it is drawn: its rank (from 1), name, curve and look."""

    rank: int
    name: str
    band: Band
    color: str
    dashes: Any


def draw_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Draw the three panels and save them as PNG.

    Raises:
        StorageError: the file cannot be written.
    """
    lines = make_lines(comparison)
    assert lines, "a comparison without a finished cell has no curves"
    size = (12.0, 9.6)
    figure, grid = titled_grid(comparison.title, size, 2, 0.9, bottom=0.062, hspace=0.3, height_ratios=(1.25, 1.0))
    top = figure.add_subplot(grid[0, :])
    top.set_position((0.062, 0.515, 0.7, 0.385))
    _draw_curves(top, lines, comparison)
    _draw_drift(figure.add_subplot(grid[1, 0]), lines, comparison.headline)
    _draw_pace(figure.add_subplot(grid[1, 1]), lines, comparison)
    return save_picture(figure, path)


def make_lines(comparison: Comparison) -> list[Line]:
    """The methods that have a curve, in the order of the table."""
    banded = [(row.name, band_over_seeds(row.cells)) for row in comparison.rows]
    drawn = [(name, band) for name, band in banded if band.steps]
    looks = [(COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i in range(len(drawn))]
    return [
        Line(rank, name, band, color, dashes)
        for rank, ((name, band), (color, dashes)) in enumerate(zip(drawn, looks, strict=True), start=1)
    ]


def _draw_curves(axes: Any, lines: Sequence[Line], comparison: Comparison) -> None:
    alpha = 0.16 if len(lines) <= NUM_BANDED else 0.07
    for line in reversed(lines):  # the best on top
        band = line.band
        axes.fill_between(band.steps, band.low, band.high, color=line.color, alpha=alpha, linewidth=0)
        axes.plot(band.steps, band.means, color=line.color, linestyle=line.dashes, linewidth=1.7)
    _draw_start(axes, comparison)
    several = any(len(row.finished) > 1 for row in comparison.rows)
    band_note = "; band: lowest to highest seed" if several else ""
    headline = comparison.headline
    what = "held-out answers that are right" if headline.counts_right else f"held-out: {headline.label}"
    _dress(axes, "Learning curves", f"{what}{band_note}", "updates", headline.is_share)
    axes.margins(x=0.0)
    _label_ends(axes, lines, headline)


def _label_ends(axes: Any, lines: Sequence[Line], headline: Headline) -> None:
    """Rank, name and last value of each method, right of the panel, at the height where its curve ends."""
    low, high = axes.get_ylim()
    last = max(line.band.steps[-1] for line in lines)
    ends = [(line.band.means[-1] - low) / (high - low) for line in lines]
    places = spread_labels(ends, LABEL_SHARE)
    frame = axes.get_yaxis_transform()
    for line, end, place in zip(lines, ends, places, strict=True):
        x = line.band.steps[-1] / last if last else 1.0
        heights = [low + share * (high - low) for share in (end, place, place)]
        axes.plot([x, 1.025, 1.04], heights, transform=frame, color=line.color, linewidth=0.7, alpha=0.7, clip_on=False)
        axes.plot(
            [1.04, 1.075], heights[1:], transform=frame, color=line.color, linestyle=line.dashes, linewidth=2,
            clip_on=False,
        )  # fmt: skip
        style: dict[str, Any] = {"transform": frame, "fontsize": 9, "va": "center", "color": "#222222"}
        axes.text(1.1, heights[1], str(line.rank), **style, ha="right", fontweight="bold")
        name = line.name if len(line.name) <= NAME_LENGTH else f"{line.name[: NAME_LENGTH - 1]}…"
        axes.text(1.108, heights[1], name, **style)
        axes.text(1.318, heights[1], headline.show(line.band.means[-1]), **style, ha="right")


def spread_labels(targets: Sequence[float], distance: float) -> list[float]:
    """Places near ``targets`` with at least ``distance`` between any two, in the order of the targets.

    Labels that would overlap form a block around the mean of their targets; equal targets keep their
    order, the first one highest. All stay inside 0..1 as long as they fit.
    """
    order = sorted(range(len(targets)), key=lambda i: (targets[i], -i))
    blocks: list[list[int]] = []

    def bottom(block: list[int]) -> float:
        middle = sum(targets[i] for i in block) / len(block)
        height = (len(block) - 1) * distance
        return max(0.0, min(middle - height / 2, 1.0 - height))

    for index in order:
        blocks.append([index])
        while len(blocks) > 1 and bottom(blocks[-1]) < bottom(blocks[-2]) + len(blocks[-2]) * distance:
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    places = [0.0] * len(targets)
    for block in blocks:
        for position, index in enumerate(block):
            places[index] = bottom(block) + position * distance
    return places


def _draw_drift(axes: Any, lines: Sequence[Line], headline: Headline) -> None:
    """Reward (or, where evaluations have none, the headline) against the KL from the start.

    Methods with a reward of their own have none that could be compared, and are left out.
    """
    has_reward = any(None not in line.band.rewards for line in lines)
    name = "reward" if has_reward else headline.metric.replace("_", " ")
    better = "higher" if has_reward or headline.higher_is_better else "lower"
    subtitle = f"held-out {name}; {better} with less drift is better"
    if has_reward and any(None in line.band.rewards for line in lines):
        subtitle += "; without methods of another reward"
    drawn = 0
    for line in reversed(lines):
        values = line.band.rewards if has_reward else line.band.means
        points = [(x, y) for x, y in zip(line.band.kls, values, strict=True) if x is not None and y is not None]
        if points:
            _draw_path(axes, line, points)
            drawn += 1
    is_share = headline.is_share and not has_reward
    _dress(axes, f"{name.capitalize()} against KL", subtitle, "KL from the start, nats per answer", is_share=is_share)
    if not drawn:
        axes.set(xticks=[], yticks=[])
        why = "no evaluation recorded kl_from_start"
        axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color="#777777")


def _draw_pace(axes: Any, lines: Sequence[Line], comparison: Comparison) -> None:
    for line in reversed(lines):
        _draw_path(axes, line, list(zip(line.band.seconds, line.band.means, strict=True)))
    _draw_start(axes, comparison)
    title = f"{comparison.headline.metric.replace('_', ' ').capitalize()} against time"
    _dress(axes, title, "seconds of training, evaluation left out", "seconds", comparison.headline.is_share)
    axes.set_xlim(left=0)


def _draw_path(axes: Any, line: Line, points: Sequence[tuple[float, float]]) -> None:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axes.plot(xs, ys, color=line.color, linestyle=line.dashes, linewidth=1.1, alpha=0.55, zorder=2)
    layer = 4 + 1 / line.rank
    axes.plot(xs[-1:], ys[-1:], "o", color=line.color, markersize=12.5, markeredgecolor="white", markeredgewidth=0.9,
              zorder=layer)  # fmt: skip
    axes.annotate(
        str(line.rank), (xs[-1], ys[-1]), ha="center", va="center", fontsize=7, color="white", fontweight="bold",
        zorder=layer,
    )  # fmt: skip


def _draw_start(axes: Any, comparison: Comparison) -> None:
    if comparison.baseline is None:
        return
    headline = comparison.headline
    value = comparison.baseline.results[headline.metric]
    axes.axhline(value, color="#999999", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"start {headline.show(value)}", (1.0, value), xycoords=axes.get_yaxis_transform(), xytext=(-2, 3),
        textcoords="offset points", ha="right", fontsize=8, color="#777777",
    )  # fmt: skip


def _dress(axes: Any, title: str, subtitle: str, x_label: str, is_share: bool = True) -> None:
    if is_share:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.01), min(high, 1.02))
        ticks_of_shares(axes)
    label_panel(axes, title, subtitle, x_label, is_share=is_share)
