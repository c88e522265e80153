"""``study.png`` of a pipeline: who wins, and how far each policy went for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.reports.charts.picture import COLORS, error_bars, label_panel, save_picture, show_percent, titled_grid
from posttrain.sweeps.pipelines.results import Standing

ROW = 0.5  # inches
RATES = (("win_rate", "o", "by the judge"), ("win_rate_proxy", "D", "by the proxy"))


def draw_pipeline(standings: Sequence[Standing], title: str, path: str | Path) -> Path:
    """Two panels: win rates over the start with intervals, and the judge's reward against √KL.

    Raises:
        StorageError: the file cannot be written.
    """
    height = 3.6 + ROW * len(standings)
    figure, grid = titled_grid(title, (12.0, height), 1, top=1 - 1.15 / height, bottom=0.75 / height)
    rates, plane = (figure.add_subplot(grid[0, column]) for column in range(2))
    for index, standing in enumerate(standings):
        color = COLORS[index % len(COLORS)]
        for offset, (name, marker, _) in enumerate(RATES):
            estimate = standing.measures[name]
            rates.errorbar(
                [estimate.mean],
                [-index - 0.24 * offset],
                xerr=error_bars([estimate.mean], [estimate.low], [estimate.high]),
                color=color,
                marker=marker,
                markersize=6 - 2 * offset,
                alpha=1.0 - 0.5 * offset,
                capsize=2.5,
                lw=1.6,
            )
        _place(plane, standing, color)
    rates.axvline(0.5, color="#999999", lw=1, ls=(0, (3, 3)))
    rates.set_yticks([-i for i in range(len(standings))], [standing.method for standing in standings], fontsize=10)
    rates.set_ylim(-len(standings) + 0.4, 0.6)
    rates.set_xlim(0.0, 1.0)
    label_panel(
        rates, "Wins over the start", "disc: by the judge; diamond: by the proxy; bars: 95 %", "share of prompts"
    )
    show_percent(rates.xaxis)
    plane.axhline(0.0, color="#999999", lw=1, ls=(0, (3, 3)))
    plane.plot([0.0], [0.0], color="#555555", ls="", marker="s", ms=6, label="start")
    plane.margins(x=0.12, y=0.12)
    plane.legend(loc="center left", frameon=False, fontsize=9)
    subtitle = "reward gained under the judge, in deviations of the start's answers"
    label_panel(plane, "What the distance has bought", subtitle, "√KL from the start (KL in nats per answer)")
    return save_picture(figure, path)


def _place(plane: Any, standing: Standing, color: str) -> None:
    """A method's mean, and its seeds as small points; nothing where no KL could be measured."""
    points = [
        (math.sqrt(max(0.0, m.measures["kl"].mean)), m.measures["reward_judge"].mean)
        for m in standing.meetings
        if "kl" in m.measures
    ]
    if not points:
        return
    plane.plot([x for x, _ in points], [y for _, y in points], color=color, ls="", marker=".", ms=5, alpha=0.5)
    x, y = math.sqrt(max(0.0, standing.measures["kl"].mean)), standing.measures["reward_judge"].mean
    plane.plot([x], [y], color=color, ls="", marker="o", ms=7, label=standing.method)
