"""The page, picture and files of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from posttrain.evaluation.statistics import Summary
from posttrain.reports.charts import Panel, Series, draw_png
from posttrain.reports.page import render, write_html
from posttrain.store.durable import replace_file
from posttrain.store.metric_names import KL, Metric
from posttrain.sweeps.best_of_n import Chosen
from posttrain.sweeps.head_to_head import Estimate
from posttrain.sweeps.learning import RowResult
from posttrain.sweeps.overoptimization import MethodCurve
from posttrain.sweeps.results import SweepResults
from posttrain.untrusted import harmless

DISTANCE = "√KL from the initial model (KL in nats per answer)"


def write_sweep(sweep: SweepResults, folder: Path) -> Path:
    """Write ``results.json``, ``table.md``, ``sweep.png`` (once a trial has finished) and ``report.html``.

    Returns the page's path.

    Raises:
        StorageError: the disk is full or not writable.
    """
    replace_file(folder / "results.json", sweep.to_json().encode() + b"\n", durable=False)
    replace_file(folder / "table.md", harmless(sweep.to_markdown()).encode(), durable=False)
    panels = sweep_panels(sweep)
    if panels:
        draw_png(panels, sweep.title, folder / "sweep.png", columns=2)
    return write_html(render_sweep(sweep, panels), folder / "report.html")


def render_sweep(sweep: SweepResults, panels: Sequence[Panel]) -> str:
    """The whole page as HTML."""
    shell = {"title": sweep.title, "lead": sweep.description, "command": sweep.command}
    return render("sweep.jinja", sweep=sweep, panels=panels, **shell)


def sweep_panels(sweep: SweepResults) -> list[Panel]:
    """The panels of all parts of a sweep."""
    return [panel for name, part in sweep.parts.items() if part.drawn for panel in _PANELS[name](*part.drawn)]


def learning_panels(rows: Sequence[RowResult], start: Mapping[str, float], primary: Metric) -> list[Panel]:
    """Learning curves, and the primary metric against KL; rows are numbered by rank."""
    curves, drift, metric = [], [], primary.name
    for rank, row in enumerate((row for row in rows if any(trial.points for trial in row.finished)), 1):
        seeds = [{point.step: point.results for point in trial.points} for trial in row.finished]
        steps = sorted(set.intersection(*(set(points) for points in seeds)))
        values = [[points[step][metric] for points in seeds] for step in steps]
        kls = [[points[step].get(KL, math.nan) for points in seeds] for step in steps]
        xs, means = [float(step) for step in steps], [_mean(of_step) for of_step in values]
        low, high = [min(of_step) for of_step in values], [max(of_step) for of_step in values]
        curves.append(Series(f"{rank} {row.name}", xs, means, low, high, mark=str(rank)))
        pairs = [(_mean(kl), mean) for kl, mean in zip(kls, means, strict=True) if math.isfinite(_mean(kl))]
        drift.append(Series("", [x for x, _ in pairs], [y for _, y in pairs], mark=str(rank)))
    name, is_share = primary.label, primary.is_share
    level = [("start", start[metric])] if start else []
    label, about = f"held-out: {primary.label}", f"held-out {name}, numbered by rank"
    panels = [
        Panel("Learning curves", f"{label}; band: lowest to highest seed", curves, is_share, "updates", levels=level,
              size="wide"),
        Panel(f"{name.capitalize()} against KL", about, drift, is_share, "KL from the initial model, nats per answer"),
    ]  # fmt: skip
    return [panel for panel in panels if any(series.xs for series in panel.series)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def overoptimization_panels(methods: Sequence[MethodCurve]) -> list[Panel]:
    """Gold against distance, proxy against distance, gold against proxy."""
    gold, proxy, plane = [], [], []
    for index, method in enumerate(methods):
        color, distances = f"c{index}", [point.distance for point in method.means]
        golds, proxies = (_ends([getattr(point, kind) for point in method.means]) for kind in ("gold", "proxy"))
        gold.append(Series(method.name, distances, *golds, color=color))
        proxy.append(Series(method.name, distances, *proxies, color=color))
        plane.append(Series(method.name, proxies[0], golds[0], color=color))
        for points in method.curves.values():
            xs = [point.distance for point in points]
            gold.append(Series("", xs, [point.gold for point in points], is_thin=True, color=color))
            proxy.append(Series("", xs, [point.proxy for point in points], is_thin=True, color=color))
    about = "the reward model's score, in deviations of the start's own"
    return [
        Panel("Gold: answers that are right", "band: 95 % over seeds; thin: single seeds", gold, True, DISTANCE),
        Panel("Proxy: the reward that is optimized", about, proxy, x_label=DISTANCE),
        Panel("Gold against proxy", "up and right: the proxy means what it says", plane, True, "proxy"),
    ]


def _ends(summaries: Sequence[Summary]) -> tuple[list[float], list[float], list[float]]:
    """Means, and ends of the intervals where all have one."""
    means, halves = [s.mean for s in summaries], [s.half_width for s in summaries if s.half_width is not None]
    if len(halves) < len(means):
        return means, [], []
    pairs = list(zip(means, halves, strict=True))
    return means, [mean - half for mean, half in pairs], [mean + half for mean, half in pairs]


def best_of_n_panels(choices: Sequence[Chosen], num_models: int) -> list[Panel]:
    """Shares of right choices against n."""
    shares, ns = [], choices[0].ns
    for index, chosen in enumerate(choices):
        xs, color, is_model = [float(n) for n in ns], f"c{index}", index < num_models
        low, high = ([chosen.bounds[n][side] for n in ns] for side in (0, 1))
        means = [chosen.mean(n) for n in ns]
        shares.append(Series(chosen.name, xs, means, low, high, is_dashed=not is_model, color=color))
        for own in zip(*(chosen.seeds[n] for n in ns), strict=True) if is_model else ():
            shares.append(Series("", xs, list(own), is_thin=True, color=color))
    where, ticks = "n answers to choose from", [(float(n), str(n)) for n in ns]
    about = "band: 95 % over problems"
    return [Panel("Right answers among those chosen", about, shares, True, where, log_x=True, x_ticks=ticks)]


def head_to_head_panels(rows: Mapping[str, Mapping[str, Estimate]]) -> list[Panel]:
    """Win rates over the start with intervals, and the judge's reward against √KL."""
    rates, plane = [], [Series("start", [0.0], [0.0], is_points=True, color="soft")]
    for label, name, color, shift in (("judge", "win_rate", "c0", -0.08), ("proxy", "win_rate_proxy", "c1", 0.08)):
        means, low, high = ([measures[name][i] for measures in rows.values()] for i in range(3))
        xs = [index + shift for index in range(len(rows))]
        rates.append(Series(f"by the {label}", xs, means, low, high, is_points=True, color=color))
    for index, (row, measures) in enumerate(rows.items()):
        if "kl" in measures:  # it could not be measured of every pair of models
            x, (mean, least, most) = math.sqrt(max(0.0, measures["kl"][0])), measures["reward_judge"]
            plane.append(Series(row, [x], [mean], [least], [most], is_points=True, color=f"c{index}"))
    names = [(float(index), row) for index, row in enumerate(rows)]
    return [
        Panel("Wins over the start", "share of prompts; bars: 95 %", rates, is_share=True, x_label=" ", x_ticks=names,
              x_range=(-0.5, len(names) - 0.5), levels=[("as often", 0.5)]),
        Panel("Reward gained and distance", "under the judge, in deviations of the start's answers", plane,
              x_label=DISTANCE, levels=[("", 0.0)]),
    ]  # fmt: skip


_PANELS: Mapping[str, Callable[..., list[Panel]]] = {
    "rows": learning_panels,
    "overoptimization": overoptimization_panels,
    "best_of_n": best_of_n_panels,
    "head_to_head": head_to_head_panels,
}
