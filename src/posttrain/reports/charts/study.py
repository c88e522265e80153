"""``study.png``: gold and proxy against √KL, or what is gained by choosing among n answers.

Colours and dashes are those of a comparison's picture. Thin lines are single seeds, bands 95 % intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.evals.statistics import Summary
from posttrain.reports.charts.picture import (
    COLORS,
    DASHES,
    error_bars,
    label_panel,
    save_picture,
    show_percent,
    ticks_of_shares,
    titled_grid,
)
from posttrain.sweeps.best_of_n import Chosen
from posttrain.sweeps.overoptimization import Fit, MeanPoint, MethodCourse, Point, distances, fitted
from posttrain.sweeps.pipeline_results import Standing

DISTANCE = "√KL from the start (KL in nats per answer)"
_Get = Callable[[MeanPoint], Summary]


def draw_overoptimization(methods: Sequence[MethodCourse], title: str, path: str | Path) -> Path:
    """Four panels: gold against distance, proxy against distance, gold near the start, gold against proxy.

    Raises:
        StorageError: the file cannot be written.
    """
    figure, panels = _make_figure((12.0, 9.4), title, 2)
    several = any(len(method.courses) > 1 for method in methods)
    band = "; band: 95 % over seeds" if several else ""
    gold, proxy, near, plane = panels
    for index, method in enumerate(methods):
        color = COLORS[index % len(COLORS)]
        for axes in (gold, near):
            _draw_course(axes, method, color, lambda p: p.gold, lambda p: p.gold)
            _draw_fit(axes, method, color)
        _draw_course(proxy, method, color, lambda p: p.proxy, lambda p: p.proxy)
        for course in method.courses:
            plane.plot(
                [p.proxy for p in course.points], [p.gold for p in course.points], color=color, lw=0.6, alpha=0.35
            )
        means = method.means
        plane.plot([p.proxy.mean for p in means], [p.gold.mean for p in means], color=color, lw=1.8, marker="o", ms=3)
    _dress(gold, "Gold: answers that are right", f"dotted: the fitted shape{band}", DISTANCE, is_share=True)
    _dress(proxy, "Proxy: what is optimized", "score of the reward model, in deviations of the start's own", DISTANCE)
    reach = _reach(methods)
    _dress(near, "Gold, near the start", "as far as best-of-n reaches", DISTANCE, is_share=True)
    near.set_xlim(-0.02 * reach, reach)
    _dress(plane, "Gold against proxy", "up and right: the proxy means what it says", "proxy", is_share=True)
    handles = [_handle(method.name, COLORS[i % len(COLORS)]) for i, method in enumerate(methods)]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=10)
    return save_picture(figure, path)


def draw_best_of_n(choices: Sequence[Chosen], num_models: int, title: str, path: str | Path) -> Path:
    """Shares of right choices against n, and the gain over a random pick of the same answers.

    Raises:
        StorageError: the file cannot be written.
    """
    figure, (shares, gains) = _make_figure((12.0, 5.2), title, 1)
    base = next(c for c in choices[num_models:] if c.name == "random pick")
    handles = []
    for index, chosen in enumerate(choices):
        is_model = index < num_models
        color = COLORS[index] if is_model else "#666666"
        dashes = "solid" if is_model else DASHES[1 + (index - num_models) % (len(DASHES) - 1)]
        ns = chosen.ns
        means = [chosen.mean(n) for n in ns]
        shares.plot(ns, means, color=color, linestyle=dashes, lw=1.9 if is_model else 1.4, marker="o", ms=3.5)
        shares.fill_between(
            ns, [chosen.low[n] for n in ns], [chosen.high[n] for n in ns], color=color, alpha=0.14, lw=0
        )
        gain = [100 * (chosen.mean(n) - base.mean(n)) for n in ns]
        gains.plot(ns, gain, color=color, linestyle=dashes, lw=1.9 if is_model else 1.4, marker="o", ms=3.5)
        if is_model:
            for seed in range(len(chosen.seeds[ns[0]])):
                shares.plot(ns, [chosen.seeds[n][seed] for n in ns], color=color, lw=0.6, alpha=0.4)
                own = [100 * (chosen.seeds[n][seed] - base.seeds[n][seed]) for n in ns]
                gains.plot(ns, own, color=color, lw=0.6, alpha=0.4)
        handles.append(_handle(chosen.name, color, dashes))
    for axes in (shares, gains):
        axes.set_xscale("log", base=2)
        axes.set_xticks(choices[0].ns, [str(n) for n in choices[0].ns])
    _dress(shares, "Right answers among those chosen", "band: 95 % over problems", "n answers to choose from", True)
    _dress(gains, "Gain over a random pick", "points; thin: single seeds", "n answers to choose from")
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=10)
    return save_picture(figure, path)


def _make_figure(size: tuple[float, float], title: str, num_rows: int) -> tuple[Any, list[Any]]:
    top, bottom = (0.905, 0.06) if num_rows == 2 else (0.8, 0.11)
    figure, grid = titled_grid(title, size, num_rows, top, bottom=bottom, hspace=0.34)
    return figure, [figure.add_subplot(grid[row, column]) for row in range(num_rows) for column in range(2)]


def _draw_course(axes: Any, method: MethodCourse, color: str, get: _Get, of_point: Callable[[Point], float]) -> None:
    for course in method.courses:
        ordered = course.points
        axes.plot([p.distance for p in ordered], [of_point(p) for p in ordered], color=color, lw=0.6, alpha=0.35)
    xs = [point.distance for point in method.means]
    summaries = [get(point) for point in method.means]
    if all(summary.half_width is not None for summary in summaries):
        low = [s.mean - (s.half_width or 0.0) for s in summaries]
        high = [s.mean + (s.half_width or 0.0) for s in summaries]
        axes.fill_between(xs, low, high, color=color, alpha=0.13, lw=0)
    axes.plot(xs, [s.mean for s in summaries], color=color, lw=1.9, marker="o", ms=3.2)


def _draw_fit(axes: Any, method: MethodCourse, color: str) -> None:
    if method.alpha is None or method.beta is None or not method.means:
        return
    fit = Fit(method.alpha.mean, method.beta.mean, 0.0)
    start = method.means[0].gold.mean
    xs = distances(method)
    axes.plot(
        xs, [start + fitted(fit, method.shape, x) for x in xs], color=color, lw=1.2, ls=(0, (1.2, 1.6)), alpha=0.9
    )


def _reach(methods: Sequence[MethodCourse]) -> float:
    """How far the methods whose KL is given by n go; all of them, where there is none such."""
    last = [m.means[-1].distance for m in methods if m.means and m.shape == "best_of_n"]
    return 1.08 * max(last or [m.means[-1].distance for m in methods if m.means], default=1.0)


def _handle(name: str, color: str, dashes: Any = "solid") -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, linestyle=dashes, linewidth=2, label=name)


def _dress(axes: Any, title: str, subtitle: str, label: str, is_share: bool = False) -> None:
    label_panel(axes, title, subtitle, label, is_share=is_share)
    heights = [float(y) for line in axes.lines for y in line.get_ydata()]  # few seeds have bands far beyond any line
    low, high = min(heights), max(heights)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    if is_share:
        ticks_of_shares(axes)


# ``study.png`` of a pipeline: who wins, and how far each policy went for it.

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
