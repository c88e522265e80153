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
from posttrain.reports.run_page import Transcript, TranscriptAnswer, turns_of
from posttrain.store.durable import replace_file
from posttrain.store.metric_names import KL, Metric
from posttrain.sweeps.best_of_n import Chosen, MethodCurve
from posttrain.sweeps.head_to_head import Estimate
from posttrain.sweeps.learning import RowResult
from posttrain.sweeps.results import SweepPart, SweepResults
from posttrain.untrusted import fitting, harmless

DISTANCE = "√KL from the initial model (nats per answer)"


def write_sweep(sweep: SweepResults, folder: Path) -> Path:
    """Write ``results.json``, ``table.md``, ``sweep.png`` (once any trial finished) and ``report.html``.

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
    """Panels for all parts of a sweep."""
    return [panel for name, part in sweep.parts.items() for panel in _part_panels(name, part)]


def _part_panels(name: str, part: SweepPart) -> list[Panel]:
    if not part.drawn:
        return []
    return _PANELS.get(name, learning_panels)(*part.drawn)


def _transcripts(part: SweepPart) -> list[Transcript]:
    """Samples for a part, with dialogues split into turns."""
    texts = []
    for question, answers in part.samples:
        texts.append(question)
        texts += [text for _, text, _ in answers]
    fit = fitting(texts)
    transcripts = []
    for question, answers in part.samples:
        prompt = fit(question)
        columns = [TranscriptAnswer(who, fit(text), None, None, reward=score) for who, text, score in answers]
        transcripts.append(Transcript(prompt, None, columns, turns_of(prompt)))
    return transcripts


def learning_panels(
    rows: Sequence[RowResult],
    start: Mapping[str, float],
    primary: Metric,
    over: tuple[str, Mapping[str, float]] | None = None,
) -> list[Panel]:
    """Primary metric by varied key or rank, learning curves, and metric against KL.

    Rows are numbered by rank. With more than ``NUM_TOGETHER`` rows, each gets a separate panel.
    """
    drawn = [row for row in rows if any(trial.points for trial in row.finished)]
    curves = []
    drift = []
    for rank, row in enumerate(drawn, 1):
        curve, against_kl = _learning_curves(row, rank, primary.name)
        curves.append(curve)
        drift.append(against_kl)
    levels = []
    if start:
        levels = [("start", start[primary.name])]
    caption = f"held-out: {primary.label}; band: lowest to highest seed"
    together = Panel("Learning curves", caption, curves, primary.is_share, "updates", levels=levels)
    about_kl = f"held-out {primary.label}, numbered by rank"
    is_many = len(drawn) > NUM_TOGETHER
    panels = []
    if drawn and (over or is_many):
        panels.append(_result_panel(drawn, primary, levels, over))
    if is_many:
        panels += _each_alone(together)
        drift = [replace(series, xs=series.xs[-1:], ys=series.ys[-1:]) for series in drift]
        about_kl = f"{about_kl}; at the last evaluation"
    else:
        panels.append(together)
    title = f"{primary.label.capitalize()} against KL"
    panels.append(Panel(title, about_kl, drift, primary.is_share, "KL from the initial model, nats per answer"))
    return [panel for panel in panels if any(series.xs for series in panel.series)]


def _learning_curves(row: RowResult, rank: int, metric: str) -> tuple[Series, Series]:
    """A row's metric by step with a band over seeds, and mean metric against mean KL."""
    seeds = [{point.step: point.results for point in trial.points} for trial in row.finished]
    steps = sorted(set.intersection(*(set(points) for points in seeds)))
    means = []
    low = []
    high = []
    kls = []
    means_of_kl = []
    for step in steps:
        values = [points[step][metric] for points in seeds]
        mean = fmean(values)
        means.append(mean)
        low.append(min(values))
        high.append(max(values))
        kl = fmean(points[step].get(KL, math.nan) for points in seeds)
        if math.isfinite(kl):
            kls.append(kl)
            means_of_kl.append(mean)
    xs = [float(step) for step in steps]
    curve = Series(f"{rank} {row.name}", xs, means, low, high, mark=str(rank))
    return curve, Series("", kls, means_of_kl, mark=str(rank))


def _result_panel(
    rows: Sequence[RowResult],
    primary: Metric,
    levels: Sequence[tuple[str, float]],
    over: tuple[str, Mapping[str, float]] | None,
) -> Panel:
    """Final results with intervals, plotted over a varied number if possible, else by rank."""
    if over:
        key, places = over
        names = []
        what = f" over {key}"
    else:
        key = " "
        places = {row.name: float(index) for index, row in enumerate(rows)}
        names = [f"{rank} {row.name}" for rank, row in enumerate(rows, 1)]
        what = " by rank"
    rows = sorted(rows, key=lambda row: places[row.name])
    xs = [places[row.name] for row in rows]
    ends = interval_ends([row.summaries[primary.name] for row in rows])
    seeds = [(places[row.name], trial.info[primary.name]) for row in rows for trial in row.finished]
    series = [
        Series("single seeds", [x for x, _ in seeds], [y for _, y in seeds], is_points=True, color="soft"),
        Series("mean, 95 %", xs, *ends, is_points=True, color="c0"),
    ]
    if over:
        series.append(Series("", xs, ends[0], is_thin=True, color="c0"))
    caption = "held out, at the end"
    if levels:
        caption = f"{caption}; dashed: the start"
    return Panel(
        f"{primary.label.capitalize()}{what}",
        caption,
        series,
        primary.is_share,
        key,
        levels=levels,
        x_ticks=[(x, show_tick(x)) for x in xs],
        log_x=min(xs) > 0 and max(xs) >= 10 * min(xs),
        names=names,
    )


def _each_alone(together: Panel) -> list[Panel]:
    """One small panel per line, drawn over all other lines in grey, on shared axes."""
    others = [Series("", one.xs, one.ys, is_thin=True, color="soft") for one in together.series]
    limits = axis_range(together)
    return [
        replace(together, title=one.label, caption="", series=[*others, replace(one, label="", mark="", color="c0")],
                x_label="", y_range=limits)
        for one in together.series
    ]  # fmt: skip


def overoptimization_panels(methods: Sequence[MethodCurve]) -> list[Panel]:
    """Gold against distance, proxy against distance, gold against proxy."""
    gold = []
    proxy = []
    plane = []
    for index, method in enumerate(methods):
        color = nth_color(index)
        distances = [point.distance for point in method.means]
        golds = interval_ends([point.gold for point in method.means])
        proxies = interval_ends([point.proxy for point in method.means])
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
        Panel("Proxy: the optimized reward", about, proxy, x_label=DISTANCE),
        Panel("Gold against proxy", "up and right: the proxy means what it says", plane, True, "proxy"),
    ]


def best_of_n_panels(choices: Sequence[Chosen], num_models: int) -> list[Panel]:
    """Fraction of correct picks by n."""
    shares = []
    ns = choices[0].ns
    for index, chosen in enumerate(choices):
        xs = [float(n) for n in ns]
        color = nth_color(index)
        is_model = index < num_models
        low = [chosen.bounds[n][0] for n in ns]
        high = [chosen.bounds[n][1] for n in ns]
        means = [chosen.mean(n) for n in ns]
        shares.append(Series(chosen.name, xs, means, low, high, is_dashed=not is_model, color=color))
        if not is_model:
            continue
        for of_seed in zip(*(chosen.seeds[n] for n in ns), strict=True):
            shares.append(Series("", xs, list(of_seed), is_thin=True, color=color))
    where = "n answers to choose from"
    ticks = [(float(n), str(n)) for n in ns]
    about = "band: 95 % over problems"
    return [Panel("Right answers among those chosen", about, shares, True, where, log_x=True, x_ticks=ticks)]


def head_to_head_panels(rows: Mapping[str, Mapping[str, Estimate]]) -> list[Panel]:
    """Win rates over the initial model with intervals, and judge reward against √KL. Rows are numbered by rank."""
    rates = []
    plane = [Series("", [0.0], [0.0], is_points=True, color="soft", mark="start")]
    for label, name, color, shift in (("judge", "win_rate", "c0", -0.12), ("proxy", "win_rate_proxy", "c1", 0.12)):
        estimates = [measures[name] for measures in rows.values()]
        means = [mean for mean, _, _ in estimates]
        low = [least for _, least, _ in estimates]
        high = [most for _, _, most in estimates]
        xs = [index + shift for index in range(len(rows))]
        rates.append(Series(f"by the {label}", xs, means, low, high, is_points=True, color=color))
    for rank, measures in enumerate(rows.values(), 1):
        if "kl" in measures:  # cannot be measured for some model pairs
            x = math.sqrt(max(0.0, measures["kl"][0]))
            mean, least, most = measures["reward_judge"]
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
