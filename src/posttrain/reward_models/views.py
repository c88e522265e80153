"""What the evaluations of a reward model have in common: shares with intervals, calibration, breakdown."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.evals.measures import MAX_KINDS, Kinds, show_kind
from posttrain.evals.ranking import area_under_curve, curve_area_interval
from posttrain.evals.statistics import (
    Bin,
    brier_score,
    calibration_error,
    fit_temperature,
    log_loss,
    reliability_bins,
    sigmoid,
    wilson_interval,
)


@dataclass(slots=True)
class View:
    """Results by name, one record per item, reliability bins (empty where nothing states a probability), what
    could not be measured by reason."""

    results: dict[str, float] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    bins: list[Bin] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def add_share(
    results: dict[str, float], name: str, values: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> None:
    """The mean of ``values`` (one from 0 to 1 per item), and its interval as ``<name>_low`` and ``<name>_high``.

    ``clusters``: of each value; what belongs to one problem hangs together, and counts as fewer. Nothing is added
    for no values.
    """
    if values:
        results[name] = share = statistics.fmean(values)
        effective = float(len(values)) if clusters is None else effective_number(values, clusters)
        results[f"{name}_low"], results[f"{name}_high"] = wilson_interval(share * effective, effective)


def add_area(
    results: dict[str, float],
    name: str,
    scores: Sequence[float],
    labels: Sequence[float],
    clusters: Sequence[Hashable],
) -> None:
    """The area under the curve of ``scores`` for label 1 over 0, with its interval; nothing where either is missing."""
    rows = list(zip(scores, labels, clusters, strict=True))
    right, wrong = ([(score, cluster) for score, z, cluster in rows if z == label] for label in (1.0, 0.0))
    if right and wrong:
        results[name] = area_under_curve([s for s, _ in right], [s for s, _ in wrong])
        results[f"{name}_low"], results[f"{name}_high"] = curve_area_interval(right, wrong)


def effective_number(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """How many independent values of 0 and 1 would tell the mean of ``values`` as surely as these clusters do.

    ``p (1 − p) / SE²`` with the clustered variance ``SE² = Σ_g (Σ_{i∈g} (x_i − p))² / n²``; from 1 to n, and
    the number of clusters where all values are equal. Korn and Graubard (1998).
    """
    n, share = len(values), statistics.fmean(values)
    shifts: dict[Hashable, float] = {}
    for value, cluster in zip(values, clusters, strict=True):
        shifts[cluster] = shifts.get(cluster, 0.0) + value - share
    spread = math.fsum(shift * shift for shift in shifts.values())
    if spread == 0.0:  # all values are equal: nothing shows how much the clusters hang together
        return float(len(shifts))
    return max(1.0, min(float(n), share * (1.0 - share) * n * n / spread))


def add_calibration(view: View, logits: Sequence[float], outcomes: Sequence[float], *, folded: bool = False) -> None:
    """Reliability bins, ``calibration_error``, ``brier``, ``log_loss`` and (where there is one) ``temperature``.

    ``folded``: of pairs. Which of two answers stands first is arbitrary, so what is binned is the probability of
    the answer that the model prefers, from one half to 1, against how often it is the chosen one.
    """
    if not logits:
        return
    probabilities = [sigmoid(x) for x in logits]
    binned, came_true, start = probabilities, list(outcomes), 0.0
    if folded:
        binned = [sigmoid(abs(x)) for x in logits]
        came_true = [z if x > 0 else 1.0 - z if x < 0 else 0.5 for x, z in zip(logits, outcomes, strict=True)]
        start = 0.5
    view.bins = reliability_bins(binned, came_true, start=start)
    view.results["calibration_error"] = calibration_error(view.bins)
    view.results["brier"] = brier_score(probabilities, outcomes)
    view.results["log_loss"] = log_loss(logits, outcomes)
    temperature = fit_temperature(logits, outcomes)
    if temperature is not None:
        view.results["temperature"] = temperature


def break_down(items: Sequence[dict[str, Any]]) -> Kinds:
    """Accuracy (of ``right``) by kind of item: for each key of ``meta`` with a few different values, n and interval.

    A key counts that has 2 to ``MAX_KINDS`` values, at most half as many as there are items that say ``right``.
    """
    judged = [item for item in items if item["right"] is not None]
    kinds: Kinds = {}
    for key in dict.fromkeys(key for item in judged for key in item["meta"]):
        groups: dict[str, list[tuple[float, str]]] = {}
        for item in judged:
            right = float(item["right"]), item.get("problem", item["id"])
            groups.setdefault(show_kind(item["meta"].get(key)), []).append(right)
        if 2 <= len(groups) <= min(MAX_KINDS, len(judged) // 2):
            kinds[key] = {}
            for value in sorted(groups):
                kinds[key][value] = {"n": float(len(groups[value]))}
                rights, problems = [right for right, _ in groups[value]], [problem for _, problem in groups[value]]
                add_share(kinds[key][value], "accuracy", rights, problems)
    return kinds
