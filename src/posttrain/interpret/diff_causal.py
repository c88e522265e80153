"""The causal test of a comparison: plain data for ``diff.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.interpret.causal import Dose, Subject, Trial, judge, scale_features, try_doses
from posttrain.interpret.dictionary import Dictionary
from posttrain.interpret.diff_divergence import random_features
from posttrain.interpret.diff_features import Seen
from posttrain.interpret.diff_recipe import ChangesSection
from posttrain.types import Example

# A feature of the base is not made more than so many times stronger, or weaker, to match the post model.
MAX_FACTOR = 5.0


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
    """What the post model earns without its changed features, or with more of them; and the base with its own scaled.

    ``taken``: for each seed the outcome against the number of features that are taken away; ``doses``: against the
    dose; ``base``: the base whose changed features are brought to the post model's level. Each beside rate-matched
    random features under the same treatment. ``verdicts``: the differences over seeds.
    """
    settings = changes.causal
    assert settings is not None
    trials = {name: Trial(subject, site, examples, settings.measure) for name, subject in subjects.items()}
    found: dict[str, Any] = {
        "measure": settings.measure,
        "prompts": len(examples),
        "features": settings.features,
        "unchanged": {name: trial.outcome() for name, trial in trials.items()},
        "taken": [],
        "doses": [],
        "base": [],
    }
    most = max(*settings.counts, settings.features)
    for seed, (dictionary, view) in enumerate(zip(dictionaries, seen, strict=True)):
        ranked = view.changes.ranking()[:most].tolist()
        matched = [random_features(view, ranked, changes.seed + seed, 1 + draw) for draw in range(settings.draws)]
        taken = try_doses(trials["post"], dictionary, ranked, matched, [(n, 0.0) for n in settings.counts], limit)
        plan = [(settings.features, dose) for dose in settings.doses]
        doses = try_doses(trials["post"], dictionary, ranked, matched, plan, limit)
        found["taken"].append([_plain(dose) for dose in taken])
        found["doses"].append([_plain(dose) for dose in doses])
        found["base"].append(_raise_base(trials["base"], dictionary, view, ranked[: settings.features], matched, limit))
        observe(
            f"causal test, seed {seed}: {settings.measure} {doses[0].changed:.3f} at dose {doses[0].dose:g} of the "
            f"changed features, {doses[0].changed - doses[0].difference:.3f} of random ones"
        )
    found["verdicts"] = _verdicts(found)
    return found


def _plain(dose: Dose) -> dict[str, Any]:
    return {
        "features": dose.num_features,
        "dose": dose.dose,
        "changed": dose.changed,
        "random": list(dose.others),
        "difference": dose.difference,
    }


def _raise_base(
    trial: Trial,
    dictionary: Dictionary,
    view: Seen,
    ranked: Sequence[int],
    matched: Sequence[Sequence[int]],
    limit: float,
) -> dict[str, Any]:
    """The base with each changed feature multiplied by post/base of its mean activation; random ones by the same."""
    ratios = [
        min(MAX_FACTOR, max(1 / MAX_FACTOR, float(value))) if float(value) == float(value) else 1.0
        for value in view.changes.ratio[1][list(ranked)]
    ]
    outcomes = [
        trial.outcome(scale_features(dictionary, dict(zip(features, ratios, strict=False)), limit))
        for features in (ranked, *(list(m[: len(ranked)]) for m in matched))
    ]
    others = outcomes[1:]
    return {"changed": outcomes[0], "random": others, "difference": outcomes[0] - sum(others) / len(others)}


def _verdicts(found: Mapping[str, Any]) -> dict[str, Any]:
    """By test: mean, half width of the 95 % interval, whether it separates; ``slope``: outcome per unit of dose."""
    differences: dict[str, list[float]] = {"base": [row["difference"] for row in found["base"]]}
    for index, dose in enumerate(found["doses"][0]):
        differences[f"dose {dose['dose']:g}"] = [row[index]["difference"] for row in found["doses"]]
    for index, taken in enumerate(found["taken"][0]):
        differences[f"without {taken['features']}"] = [row[index]["difference"] for row in found["taken"]]
    differences["slope"] = [
        _slope([d["dose"] for d in row], [d["changed"] for d in row])
        - _slope([d["dose"] for d in row], [sum(d["random"]) / len(d["random"]) for d in row])
        for row in found["doses"]
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
    """The least-squares slope; 0 for a single dose."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
