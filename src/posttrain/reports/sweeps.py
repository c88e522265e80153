"""The page, picture and files of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from posttrain.reports.charts import (
    NUM_TOGETHER,
    Panel,
    Series,
    axis_range,
    draw_png,
    interval_ends,
    nth_color,
    show_tick,
)
from posttrain.reports.page import render, write_html
from posttrain.reports.run import Answer, Transcript, turns_of
from posttrain.store.durable import replace_file
from posttrain.store.metric_names import KL, Metric
from posttrain.sweeps.best_of_n import Chosen, MethodCurve
from posttrain.sweeps.head_to_head import Estimate
from posttrain.sweeps.learning import RowResult
from posttrain.sweeps.results import Part, SweepResults
from posttrain.untrusted import fitting, harmless

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
    return write_html(render_sweep(sweep), folder / "report.html")


def render_sweep(sweep: SweepResults) -> str:
    """The whole page as HTML."""
    sections = [(part.tables, _part_panels(name, part), _transcripts(part)) for name, part in sweep.parts.items()]
    shell = {"title": sweep.title, "lead": sweep.description, "command": sweep.command}
    return render("sweep.jinja", sweep=sweep, sections=sections, **shell)


def sweep_panels(sweep: SweepResults) -> list[Panel]:
    """The panels of all parts of a sweep."""
    return [panel for name, part in sweep.parts.items() for panel in _part_panels(name, part)]


def _part_panels(name: str, part: Part) -> list[Panel]:
    return _PANELS.get(name, learning_panels)(*part.drawn) if part.drawn else []


def _transcripts(part: Part) -> list[Transcript]:
    """The samples of a part; dialogues as turns."""
    fit = fitting([text for question, answers in part.samples for text in (question, *(one[1] for one in answers))])
    return [
        Transcript(
            fit(question),
            None,
            [Answer(who, fit(text), None, None, reward=score) for who, text, score in answers],
            turns_of(fit(question)),
        )
        for question, answers in part.samples
    ]


def learning_panels(
    rows: Sequence[RowResult],
    start: Mapping[str, float],
    primary: Metric,
    over: tuple[str, Mapping[str, float]] | None = None,
) -> list[Panel]:
    """The primary metric over the key that is varied or by rank, learning curves, and the metric against KL.

    Rows are numbered by rank. Of more than ``NUM_TOGETHER`` rows each has a panel of its own.
    """
    curves, drift, metric = [], [], primary.name
    drawn = [row for row in rows if any(trial.points for trial in row.finished)]
    for rank, row in enumerate(drawn, 1):
        seeds = [{point.step: point.results for point in trial.points} for trial in row.finished]
        steps = sorted(set.intersection(*(set(points) for points in seeds)))
        values = [[points[step][metric] for points in seeds] for step in steps]
        kls = [[points[step].get(KL, math.nan) for points in seeds] for step in steps]
        xs, means = [float(step) for step in steps], [fmean(of_step) for of_step in values]
        low, high = [min(of_step) for of_step in values], [max(of_step) for of_step in values]
        curves.append(Series(f"{rank} {row.name}", xs, means, low, high, mark=str(rank)))
        pairs = [(fmean(kl), mean) for kl, mean in zip(kls, means, strict=True) if math.isfinite(fmean(kl))]
        drift.append(Series("", [x for x, _ in pairs], [y for _, y in pairs], mark=str(rank)))
    name, is_share = primary.label, primary.is_share
    level = [("start", start[metric])] if start else []
    label, about = f"held-out: {primary.label}", f"held-out {name}, numbered by rank"
    together = Panel("Learning curves", f"{label}; band: lowest to highest seed", curves, is_share, "updates",
                     levels=level)  # fmt: skip
    is_many = len(drawn) > NUM_TOGETHER
    panels = [_result_panel(drawn, primary, level, over)] if drawn and (over or is_many) else []
    panels += _each_alone(together) if is_many else [together]
    if is_many:
        drift = [replace(one, xs=one.xs[-1:], ys=one.ys[-1:]) for one in drift]
        about = f"{about}; at the last evaluation"
    panels.append(
        Panel(f"{name.capitalize()} against KL", about, drift, is_share, "KL from the initial model, nats per answer")
    )
    return [panel for panel in panels if any(series.xs for series in panel.series)]


def _result_panel(
    rows: Sequence[RowResult],
    primary: Metric,
    level: Sequence[tuple[str, float]],
    over: tuple[str, Mapping[str, float]] | None,
) -> Panel:
    """The last results with their intervals: over a number that is varied, or else by rank."""
    key, places = over or (" ", {row.name: float(index) for index, row in enumerate(rows)})
    rows = sorted(rows, key=lambda row: places[row.name])
    xs, ends = [places[row.name] for row in rows], interval_ends([row.summaries[primary.name] for row in rows])
    seeds = [(places[row.name], trial.info[primary.name]) for row in rows for trial in row.finished]
    series = [
        Series("single seeds", [x for x, _ in seeds], [y for _, y in seeds], is_points=True, color="soft"),
        Series("mean, 95 %", xs, *ends, is_points=True, color="c0"),
        *([Series("", xs, ends[0], is_thin=True, color="c0")] if over else []),
    ]
    title = primary.label.capitalize() + (f" over {key}" if over else " by rank")
    caption = "held out, after the last update" + "; dashed: the start" * bool(level)
    return Panel(
        title, caption, series, primary.is_share, key, levels=level, x_ticks=[(x, show_tick(x)) for x in xs],
        log_x=min(xs) > 0 and max(xs) >= 10 * min(xs),
        names=[] if over else [f"{rank} {row.name}" for rank, row in enumerate(rows, 1)],
    )  # fmt: skip


def _each_alone(together: Panel) -> list[Panel]:
    """A small panel for each line, over all others in grey, on the same axes."""
    others = [Series("", one.xs, one.ys, is_thin=True, color="soft") for one in together.series]
    limits = axis_range(together)
    return [
        replace(together, title=one.label, caption="", series=[*others, replace(one, label="", mark="", color="c0")],
                x_label="", y_range=limits)
        for one in together.series
    ]  # fmt: skip


def overoptimization_panels(methods: Sequence[MethodCurve]) -> list[Panel]:
    """Gold against distance, proxy against distance, gold against proxy."""
    gold, proxy, plane = [], [], []
    for index, method in enumerate(methods):
        color, distances = nth_color(index), [point.distance for point in method.means]
        golds, proxies = (interval_ends([getattr(point, kind) for point in method.means]) for kind in ("gold", "proxy"))
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


def best_of_n_panels(choices: Sequence[Chosen], num_models: int) -> list[Panel]:
    """Shares of right choices against n."""
    shares, ns = [], choices[0].ns
    for index, chosen in enumerate(choices):
        xs, color, is_model = [float(n) for n in ns], nth_color(index), index < num_models
        low, high = ([chosen.bounds[n][side] for n in ns] for side in (0, 1))
        means = [chosen.mean(n) for n in ns]
        shares.append(Series(chosen.name, xs, means, low, high, is_dashed=not is_model, color=color))
        for own in zip(*(chosen.seeds[n] for n in ns), strict=True) if is_model else ():
            shares.append(Series("", xs, list(own), is_thin=True, color=color))
    where, ticks = "n answers to choose from", [(float(n), str(n)) for n in ns]
    about = "band: 95 % over problems"
    return [Panel("Right answers among those chosen", about, shares, True, where, log_x=True, x_ticks=ticks)]


def head_to_head_panels(rows: Mapping[str, Mapping[str, Estimate]]) -> list[Panel]:
    """Win rates over the start with intervals, and the judge's reward against √KL; rows are numbered by rank."""
    rates, plane = [], [Series("", [0.0], [0.0], is_points=True, color="soft", mark="start")]
    for label, name, color, shift in (("judge", "win_rate", "c0", -0.12), ("proxy", "win_rate_proxy", "c1", 0.12)):
        means, low, high = ([measures[name][i] for measures in rows.values()] for i in range(3))
        xs = [index + shift for index in range(len(rows))]
        rates.append(Series(f"by the {label}", xs, means, low, high, is_points=True, color=color))
    for rank, measures in enumerate(rows.values(), 1):
        if "kl" in measures:  # it could not be measured of every pair of models
            x, (mean, least, most) = math.sqrt(max(0.0, measures["kl"][0])), measures["reward_judge"]
            plane.append(Series("", [x], [mean], [least], [most], is_points=True, mark=str(rank)))
    names = [f"{rank} {row}" for rank, row in enumerate(rows, 1)]
    return [
        Panel("Wins over the start", "share of prompts, with 95 % intervals; dashed: as often", rates, is_share=True,
              x_label=" ", levels=[("", 0.5)], names=names),
        Panel("Reward gained and distance", "under the judge, in deviations of the start's answers; numbered by rank",
              plane, x_label=DISTANCE, levels=[("", 0.0)]),
    ]  # fmt: skip


_PANELS: Mapping[str, Callable[..., list[Panel]]] = {
    "rows": learning_panels,
    "overoptimization": overoptimization_panels,
    "best_of_n": best_of_n_panels,
    "head_to_head": head_to_head_panels,
}
