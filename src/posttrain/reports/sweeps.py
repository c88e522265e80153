"""The page, picture and files of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.evals.statistics import Summary
from posttrain.reports.charts import Panel, Series, draw_png
from posttrain.reports.page import render, write_html
from posttrain.store.durable import replace_file
from posttrain.sweeps.best_of_n import RANDOM
from posttrain.sweeps.learning import band_over_seeds, trials_table
from posttrain.sweeps.overoptimization import MeanPoint, MethodCurve
from posttrain.sweeps.report import SweepResults
from posttrain.untrusted import harmless

DISTANCE = "√KL from the start (KL in nats per answer)"


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
    trials = trials_table(sweep.rows, sweep.headline)
    return render("sweep.jinja", sweep=sweep, panels=panels, trials=trials, environment=sweep.environment, **shell)


def sweep_panels(sweep: SweepResults) -> list[Panel]:
    """The panels of all that the sweep found."""
    panels = learning_panels(sweep) if "rows" in sweep.parts else []
    panels += overoptimization_panels(sweep.curves) if sweep.curves else []
    panels += best_of_n_panels(sweep) if sweep.choices else []
    return panels + (head_to_head_panels(sweep) if sweep.policies else [])


def learning_panels(sweep: SweepResults) -> list[Panel]:
    """Learning curves, reward against KL, and the primary metric against time. Rows are numbered by rank.

    Rows with a reward of their own have none that could be compared, and are left out of the second panel.
    """
    headline = sweep.headline
    bands = [(row.name, band_over_seeds(row.trials)) for row in sweep.rows]
    lines = [
        (rank, f"{rank} {name}", band) for rank, (name, band) in enumerate(((n, b) for n, b in bands if b.steps), 1)
    ]
    if not lines:
        return []
    start = [] if sweep.baseline is None else [("start", sweep.baseline.results[headline.metric])]
    has_reward = any(None not in band.rewards for _, _, band in lines)
    name = headline.metric.replace("_", " ")
    curves, drift, pace = [], [], []
    for rank, label, band in lines:
        steps, mark = [float(step) for step in band.steps], str(rank)
        curves.append(Series(label, steps, band.means, band.low, band.high, mark=mark))
        pace.append(Series("", band.seconds, band.means, mark=mark))
        values = band.rewards if has_reward else band.means
        points = [(x, y) for x, y in zip(band.kls, values, strict=True) if x is not None and y is not None]
        drift.append(Series("", [x for x, _ in points], [y for _, y in points], has_dots=True, mark=mark))
    what = "reward" if has_reward else name
    label = "held-out answers that are right" if headline.counts_right else f"held-out: {headline.label}"
    panels = [
        Panel("Learning curves", f"{label}; band: lowest to highest seed", curves, is_share=headline.is_share,
              x_label="updates", levels=start, size="wide"),
        Panel(f"{what.capitalize()} against KL", f"held-out {what}, numbered by rank", drift,
              x_label="KL from the start, nats per answer", is_share=headline.is_share and not has_reward),
        Panel(f"{name.capitalize()} against time", "evaluation left out, numbered by rank", pace,
              x_label="seconds of training", is_share=headline.is_share, levels=start),
    ]  # fmt: skip
    return [panel for panel in panels if any(series.xs for series in panel.series)]


def _ends(summaries: Sequence[Summary]) -> tuple[list[float], list[float], list[float]]:
    """Means, and ends of the intervals where all have one."""
    halves = [summary.half_width for summary in summaries]
    means = [summary.mean for summary in summaries]
    if None in halves:
        return means, [], []
    reach = [half or 0.0 for half in halves]
    low, high = ([m + sign * h for m, h in zip(means, reach, strict=True)] for sign in (-1, 1))
    return means, low, high


def overoptimization_panels(methods: Sequence[MethodCurve]) -> list[Panel]:
    """Gold against distance, proxy against distance, gold near the start, gold against proxy."""

    def over(kind: str, points: Sequence[MeanPoint]) -> tuple[list[float], list[float], list[float]]:
        return _ends([getattr(point, kind) for point in points])

    gold, proxy, plane = [], [], []
    for index, method in enumerate(methods):
        xs, color = [point.distance for point in method.means], f"c{index}"
        gold.append(Series(method.name, xs, *over("gold", method.means), has_dots=True, color=color))
        proxy.append(Series(method.name, xs, *over("proxy", method.means), has_dots=True, color=color))
        golds = over("gold", method.means)[0]
        plane.append(Series(method.name, over("proxy", method.means)[0], golds, has_dots=True, color=color))
        for curve in method.curves:
            distances = [point.distance for point in curve.points]
            thin: dict[str, Any] = {"is_thin": True, "color": color}
            gold.append(Series("", distances, [point.gold for point in curve.points], **thin))
            proxy.append(Series("", distances, [point.proxy for point in curve.points], **thin))
    last = [method.means[-1].distance for method in methods if method.means and method.shape == "best_of_n"]
    share: dict[str, Any] = {"is_share": True, "max_band": 0.1}
    panels = [
        Panel("Gold: answers that are right", "band: 95 % over seeds; thin: single seeds", gold,
              x_label=DISTANCE, **share),
        Panel("Proxy: the reward that is optimized", "score of the reward model, in deviations of the start's own",
              proxy, x_label=DISTANCE, max_band=0.1),
        Panel("Gold against proxy", "up and right: the proxy means what it says", plane, x_label="proxy", **share),
    ]  # fmt: skip
    if last and max(last) > 0:
        near = (-0.02 * max(last), 1.08 * max(last))
        about = "as far as best-of-n reaches"
        panels.insert(2, Panel("Gold, near the start", about, gold, x_label=DISTANCE, x_range=near, **share))
    return panels


def best_of_n_panels(sweep: SweepResults) -> list[Panel]:
    """Shares of right choices against n, and the gain over a random pick of the same answers."""
    base = next(choice for choice in sweep.choices[sweep.num_models :] if choice.name == RANDOM)
    shares, gains = [], []
    for index, chosen in enumerate(sweep.choices):
        color, is_dashed = f"c{index}", index >= sweep.num_models
        xs, means = [float(n) for n in chosen.ns], [chosen.mean(n) for n in chosen.ns]
        low, high = ([bound[n] for n in chosen.ns] for bound in (chosen.low, chosen.high))
        look: dict[str, Any] = {"has_dots": True, "is_dashed": is_dashed, "color": color}
        shares.append(Series(chosen.name, xs, means, low, high, **look))
        gain = [100 * (mean - base.mean(n)) for n, mean in zip(chosen.ns, means, strict=True)]
        gains.append(Series(chosen.name, xs, gain, **look))
        for seed in range(0 if is_dashed else len(chosen.seeds[chosen.ns[0]])):
            own = [chosen.seeds[n][seed] for n in chosen.ns]
            shares.append(Series("", xs, own, is_thin=True, color=color))
    axis: dict[str, Any] = {
        "x_label": "n answers to choose from",
        "log_x": True,
        "x_ticks": [(float(n), str(n)) for n in base.ns],
    }
    return [
        Panel("Right answers among those chosen", "band: 95 % over problems", shares, is_share=True, **axis),
        Panel("Gain over a random pick", "points", gains, **axis),
    ]


def head_to_head_panels(sweep: SweepResults) -> list[Panel]:
    """Win rates over the start with intervals, and the judge's reward against √KL."""
    rates, plane = [], [Series("start", [0.0], [0.0], is_points=True, color="soft")]
    for label, name, color, shift in (
        ("by the judge", "win_rate", "c0", -0.08),
        ("by the proxy", "win_rate_proxy", "c1", 0.08),
    ):
        own = [policy.measures[name] for policy in sweep.policies]
        xs = [index + shift for index in range(len(own))]
        low, high = [e.low for e in own], [e.high for e in own]
        rates.append(Series(label, xs, [e.mean for e in own], low, high, is_points=True, color=color))
    for index, policy in enumerate(sweep.policies):
        if "kl" in policy.measures:  # it could not be measured of every pair of models
            x, reward = math.sqrt(max(0.0, policy.measures["kl"].mean)), policy.measures["reward_judge"]
            plane.append(
                Series(policy.row, [x], [reward.mean], [reward.low], [reward.high], is_points=True, color=f"c{index}")
            )
    names = [(float(index), policy.row) for index, policy in enumerate(sweep.policies)]
    return [
        Panel("Wins over the start", "share of prompts; bars: 95 %", rates, is_share=True, x_label=" ", x_ticks=names,
              x_range=(-0.5, len(names) - 0.5), levels=[("as often", 0.5)]),
        Panel("What the distance has bought", "reward gained under the judge, in deviations of the start's answers",
              plane, x_label=DISTANCE, levels=[("", 0.0)]),
    ]  # fmt: skip
