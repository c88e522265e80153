"""The causal test of a comparison: plain data for ``diff.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.interpret.activations.lockstep import Added
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.differences.causal import (
    Dose,
    Subject,
    Trial,
    judge,
    leave,
    move_features,
    replace_all,
    scale_features,
    try_doses,
)
from posttrain.interpret.differences.divergence import random_features
from posttrain.interpret.differences.features import Seen
from posttrain.interpret.differences.recipe import CausalSection, ChangesSection
from posttrain.types import Example

TESTS = ("given", "returned", "scaled")
# At which dose a test does all of what it does: features moved all the way, or taken away.
WHOLE = {"given": 1.0, "returned": 1.0, "scaled": 0.0}


def measure_causes(
    subjects: Mapping[str, Subject],
    site: str,
    examples: Sequence[Example],
    changes: ChangesSection,
    dictionaries: Sequence[Dictionary],
    seen: Sequence[Seen],
    limit: float,
    observe: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """What base and post model earn untouched, with everything of the other, and with changed features treated.

    For each test of ``TESTS`` (see ``causal``) and each seed a list of {features, dose, changed, random, difference};
    ``verdicts``: the differences over seeds, by test and point (``given 16 at 1``), and of the slopes over doses.
    """
    settings = changes.causal
    assert settings is not None
    pairs = {"base": ("base", "post"), "post": ("post", "base")}
    trials = {
        name: Trial(subjects[writer], subjects[donor], site, examples, settings.measure)
        for name, (writer, donor) in pairs.items()
    }
    both = {name: trial.outcomes([leave, replace_all]) for name, trial in trials.items()}
    found: dict[str, Any] = {
        "measure": settings.measure,
        "prompts": len(examples),
        "features": settings.features,
        "unchanged": {name: outcome[0] for name, outcome in both.items()},
        "everything": {name: outcome[1] for name, outcome in both.items()},
        **{test: [] for test in TESTS},
    }
    most = max(*settings.counts, settings.features)
    for seed, (dictionary, view) in enumerate(zip(dictionaries, seen, strict=True)):
        ranked = view.changes.ranking()[:most].tolist()
        matched = [random_features(view, ranked, changes.seed + seed, 1 + draw) for draw in range(settings.draws)]
        for test in TESTS:
            trial = trials["base" if test == "given" else "post"]
            treat = partial(_scale if test == "scaled" else _move, dictionary, limit)
            doses = try_doses(trial, treat, ranked, matched, plan_of(test, settings))
            found[test].append([_plain(dose) for dose in doses])
        point = next(p for p in found["given"][-1] if (p["features"], p["dose"]) == (min(settings.features, most), 1.0))
        observe(
            f"causal test, seed {seed}: {settings.measure} of the base {found['unchanged']['base']:.3f}, given "
            f"{point['features']} changed features {point['changed']:.3f}, random ones "
            f"{point['changed'] - point['difference']:.3f}"
        )
    found["verdicts"] = _verdicts(found)
    return found


def plan_of(test: str, settings: CausalSection) -> list[tuple[int, float]]:
    """(features, dose) of a test: the whole dose to every count, and every dose to the features that are judged by.

    ``returned`` has no further doses: what they would tell, ``given`` tells.
    """
    whole = WHOLE[test]
    doses = {"given": settings.doses, "returned": [], "scaled": settings.factors}[test]
    points = [(count, whole) for count in settings.counts] + [(settings.features, dose) for dose in (whole, *doses)]
    return sorted(set(points))


def _move(dictionary: Dictionary, limit: float, features: Sequence[int], dose: float) -> Added:
    return move_features(dictionary, features, dose, limit)


def _scale(dictionary: Dictionary, limit: float, features: Sequence[int], dose: float) -> Added:
    return scale_features(dictionary, dict.fromkeys(features, dose), limit)


def _plain(dose: Dose) -> dict[str, Any]:
    return {
        "features": dose.num_features,
        "dose": dose.dose,
        "changed": dose.changed,
        "random": list(dose.others),
        "difference": dose.difference,
    }


def _verdicts(found: Mapping[str, Any]) -> dict[str, Any]:
    """By test and point: mean, half width of the 95 % interval over seeds, whether it separates."""
    differences: dict[str, list[float]] = {}
    for test in TESTS:
        rows = found[test]
        for index, point in enumerate(rows[0]):
            name = f"{test} {point['features']} at {point['dose']:g}"
            differences[name] = [row[index]["difference"] for row in rows]
        same = [i for i, point in enumerate(rows[0]) if point["features"] == found["features"]]
        if len(same) > 1:
            differences[f"{test}, slope"] = [
                _slope([row[i]["dose"] for i in same], [row[i]["difference"] for i in same]) for row in rows
            ]
    verdicts = {}
    for name, values in differences.items():
        verdict = judge(values)
        verdicts[name] = {
            "mean": verdict.summary.mean,
            "half_width": verdict.summary.half_width,
            "seeds": verdict.summary.n,
            "values": values,
            "separates": verdict.separates,
        }
    return verdicts


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The least-squares slope."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
