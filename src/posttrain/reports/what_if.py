"""Table, figure and results of a what-if, as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from posttrain.evaluation.statistics import Summary
from posttrain.reports.charts import NUM_TOGETHER, Panel, Series, draw_png, interval_ends
from posttrain.runs.what_if.plan import UNCHANGED
from posttrain.runs.what_if.results import FutureResult, WhatIfResults
from posttrain.store.durable import replace_file
from posttrain.store.metric_names import Metric
from posttrain.store.metrics import MetricsRow, evaluation_points, is_evaluation
from posttrain.untrusted import harmless

PICTURE = "futures.png"
HISTORY = 2  # how much of the original run to show, as a multiple of a future's length


def write_what_if(results: WhatIfResults, folder: Path) -> Path | None:
    """Write ``results.json``, ``table.md`` and, once any future ran, ``futures.png``. Returns the figure's path.

    Raises:
        StorageError: the disk is full or not writable.
    """
    replace_file(folder / "results.json", results.to_json().encode() + b"\n", durable=False)
    replace_file(folder / "table.md", harmless(results.to_markdown()).encode(), durable=False)
    panels = what_if_panels(results)
    if not panels:
        return None
    return draw_png(panels, results.table().title, folder / PICTURE, columns=2)


def what_if_panels(results: WhatIfResults) -> list[Panel]:
    """Panels: differences between futures, then training and held-out metrics by step."""
    panels = []
    drawn = [(results.training, False)]
    if results.has_evaluations:
        drawn.append((results.primary, True))
    for metric, held_out in drawn:
        panels += _difference_panel(results, metric, held_out)
    for metric, held_out in drawn:
        together = _lines_panel(results, metric, held_out)
        if together.series:
            panels.append(together)
    by_step = _differences_by_step(results)
    if by_step.series:
        panels.append(by_step)
    return panels


def _difference_panel(results: WhatIfResults, metric: Metric, held_out: bool) -> list[Panel]:
    """Difference of each future from the unchanged one. Requires at least two futures."""
    names = []
    summaries: list[Summary] = []
    for label in results.labels():
        summary = results.difference(label, metric.name, held_out=held_out)
        if label != UNCHANGED and summary is not None:
            names.append(label)
            summaries.append(summary)
    if not names:
        return []
    ys, low, high = interval_ends(summaries)
    series = Series("", [float(place) for place in range(len(names))], ys, low, high, is_points=True, color="c0")
    what = f"mean of steps {results.plan.at + 1} to {results.plan.end}"
    if held_out:
        what = "held out, last evaluation"
    caption = f"minus the unchanged future; {what}"
    title = f"{metric.label.capitalize()}: difference"
    return [Panel(title, caption, [series], levels=[("", 0.0)], is_share=metric.is_share, names=names)]


def _lines_panel(results: WhatIfResults, metric: Metric, held_out: bool) -> Panel:
    """The run up to the branching step, followed by each future; the unchanged one is black."""
    plan = results.plan
    past = _past(results, metric, held_out)
    steps = sorted(past)
    series = []
    if steps:
        series.append(
            Series("the run before", [float(step) for step in steps], [past[step] for step in steps], color="soft")
        )
    join = {step: past[step] for step in steps[-1:]}
    others = [label for label in results.labels() if label != UNCHANGED]
    for label in (*others, UNCHANGED):
        line = _line(results.of(label), metric, held_out, join)
        if not line.xs:
            continue
        if label == UNCHANGED:
            series.append(replace(line, label=label, color="c7"))
        else:
            series.append(replace(line, label=label, is_thin=len(others) > NUM_TOGETHER))
    what = "mean over seeds; band: min to max" if plan.num_seeds > 1 else "one seed"
    if held_out:
        what = f"held out; {what}"
    return Panel(metric.label.capitalize(), what, series, metric.is_share)


def _differences_by_step(results: WhatIfResults) -> Panel:
    """Per-step difference from the unchanged future during training, averaged over seeds."""
    metric = results.training
    bases = {one.future.seed: _values(one.rows, metric, False) for one in results.of(UNCHANGED)}
    series = []
    for label in results.labels():
        by_step: dict[int, list[float]] = {}
        for one in results.of(label):
            base = bases.get(one.future.seed, {})
            for step, value in _values(one.rows, metric, False).items():
                if step in base:
                    by_step.setdefault(step, []).append(value - base[step])
        if label != UNCHANGED and by_step:
            steps = sorted(by_step)
            means = [fmean(by_step[step]) for step in steps]
            series.append(Series(label, [float(step) for step in steps], means))
    caption = "minus the unchanged future, step by step"
    return Panel(f"{metric.label.capitalize()}: difference by step", caption, series, levels=[("", 0.0)])


def _past(results: WhatIfResults, metric: Metric, held_out: bool) -> dict[int, float]:
    """The run's metric up to the branching step."""
    plan = results.plan
    first = plan.at - HISTORY * plan.steps
    values = _values([row for row in results.run_rows if row.step <= plan.at], metric, held_out)
    return {step: value for step, value in values.items() if step > first}


def _line(futures: Sequence[FutureResult], metric: Metric, held_out: bool, join: Mapping[int, float]) -> Series:
    """Mean over seeds by step, with minimum and maximum for multiple seeds."""
    seeds = [{**join, **_values(one.rows, metric, held_out)} for one in futures]
    if not seeds:
        return Series("", [], [])
    steps = sorted(set.intersection(*(set(values) for values in seeds)))
    if len(steps) <= len(join):
        return Series("", [], [])
    columns = [[values[step] for values in seeds] for step in steps]
    low: list[float] = []
    high: list[float] = []
    if len(seeds) > 1:
        low = [min(column) for column in columns]
        high = [max(column) for column in columns]
    return Series("", [float(step) for step in steps], [fmean(column) for column in columns], low, high)


def _values(rows: Sequence[MetricsRow], metric: Metric, held_out: bool) -> dict[int, float]:
    """A metric by step, from training or averaged over held-out tasks."""
    values: dict[int, float] = {}
    if not held_out:
        for row in rows:
            if not is_evaluation(row) and metric.name in row.metrics:
                values[row.step] = row.metrics[metric.name]
        return values
    by_step: dict[int, list[dict[str, float]]] = {}
    for point in evaluation_points(rows):
        by_step.setdefault(point.step, []).append(point.results)
    for step, results in by_step.items():
        mean = metric.mean(results)
        if mean is not None:
            values[step] = mean
    return values
