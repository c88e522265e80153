"""From the parts of a study to its report and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import RunFailure
from posttrain.evals.items import Item, read_items
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Word
from posttrain.runs.directory import RunDirectory
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps import best_of_n as study_best_of_n
from posttrain.sweeps import overoptimization as study_overoptimization
from posttrain.sweeps.study import Kind, StudyPlan
from posttrain.sweeps.study_curves import Course, in_units_of, score_scale
from posttrain.sweeps.study_results import StudyReport

ITEMS = "items.jsonl"


@dataclass(frozen=True)
class StudyFound:
    """The report of a study, and what its picture shows, as its kind's drawing takes it."""

    kind: Kind
    report: StudyReport
    shown: tuple[Any, ...]


def collect_study(plan: StudyPlan, finished: set[str], problems: Mapping[str, str], command: str) -> StudyFound:
    """Read every finished part.

    Args:
        finished: names of the parts that are.
        problems: by name, why others are not.

    Raises:
        RunFailure: too little is finished for a report.
        DataError: a record is damaged.
    """
    chosen: dict[str, dict[int, list[Item]]] = {}
    for part in plan.choosing:
        if part.name in finished:
            chosen.setdefault(part.method, {})[part.seed] = read_items(part.folder / ITEMS)
    found = _KINDS[plan.kind](plan, finished, chosen)
    told = [f"{name}: {message}" for name, message in problems.items()]
    report = StudyReport(
        title=plan.folder.name,
        description=" ".join(plan.description.split()),
        tables=found["tables"],
        findings=found["findings"],
        notes=found["notes"],
        common=describe_common(plan),
        data={"study": plan.kind, "sources": plan.sources} | found["data"],
        command=command,
        problems=told,
        environment=_environment(plan),
    )
    return StudyFound(plan.kind, report, found["shown"])


def _overoptimization(
    plan: StudyPlan, finished: set[str], chosen: Mapping[str, Mapping[int, list[Item]]]
) -> dict[str, Any]:
    module = study_overoptimization
    by_seed = next(iter(chosen.values()), {})
    if not by_seed:
        raise RunFailure("nothing to report yet: no best-of-n of the proxy is finished, which gives its scale")
    scales = {seed: score_scale(items) for seed, items in by_seed.items()}
    own = [Course(module.BEST_OF_N, seed, module.choosing_points(items)) for seed, items in by_seed.items()]
    methods = [module.describe_method(module.BEST_OF_N, "best_of_n", [in_units_of(c, scales[c.seed]) for c in own])]
    for name in dict.fromkeys(part.cell.method for part in plan.policies):
        courses = []
        for part in plan.policies:
            if part.cell.method == name and part.name in finished and part.cell.seed in scales:
                points = module.training_points(MetricsLog(part.cell.folder / "metrics.jsonl").read())
                courses.append(in_units_of(Course(name, part.cell.seed, points), scales[part.cell.seed]))
        if courses:
            methods.append(module.describe_method(name, "training", courses))
    return {
        "tables": module.tables(methods),
        "findings": module.findings(methods),
        "notes": module.notes(methods, plan.best_of_n.samples, len(by_seed)),
        "data": module.to_data(methods),
        "shown": (methods,),
    }


def _best_of_n(plan: StudyPlan, finished: set[str], chosen: Mapping[str, Mapping[int, list[Item]]]) -> dict[str, Any]:
    module = study_best_of_n
    names = list(dict.fromkeys(part.cell.method for part in plan.reward_models))
    shared = sorted(set.intersection(*(set(chosen.get(name, {})) for name in names)))
    if not shared:
        raise RunFailure("nothing to report yet: for no seed have all reward models chosen")
    evaluations = {name: [chosen[name][seed] for seed in shared] for name in names}
    module.check_alike(evaluations, str(plan.folder / "chosen"))
    found = module.choose(evaluations)
    differences = module.contrasts(found, len(names))
    return {
        "tables": module.tables(found, differences),
        "findings": module.findings(found[: len(names)], differences),
        "notes": module.notes(len(shared), len(evaluations[names[0]][0])),
        "data": module.to_data(found, differences),
        "shown": (found, len(names)),
    }


_KINDS: Mapping[Kind, Callable[..., dict[str, Any]]] = {
    "overoptimization": _overoptimization,
    "best_of_n": _best_of_n,
}


def describe_common(plan: StudyPlan) -> list[tuple[str, str]]:
    """What was done, as (what, value)."""
    start = plan.start.cell.recipe
    facts = [("start", f"{start.model.name} after {plan.sources['start']}, {start.train.steps} steps")]
    asked = plan.best_of_n
    facts.append(("held-out problems", f"{asked.n} of {_word(asked.task)}"))
    how = f"at most {asked.max_tokens} tokens, temperature {asked.temperature:g}"
    facts.append(("best of n", f"{asked.samples} answers to each problem, {how}"))
    for part in (*plan.reward_models, *plan.policies):
        if part.cell.seed == 0:
            facts.append((part.cell.method, _training(part.cell.recipe)))
    facts.append(("seeds", ", ".join(str(seed) for seed in range(plan.num_seeds))))
    return facts


def _word(word: Word) -> str:
    chosen = ", ".join(f"{key} {value}" for key, value in word.options.items() if value is not None)
    return f"{word.name} ({chosen})" if chosen else word.name


def _training(recipe: Recipe) -> str:
    train = recipe.train
    told = f"{recipe.objective.name}, {train.steps} steps at {train.lr:g}"
    if recipe.rollout is not None:
        updates = train.epochs * train.minibatches
        batches = max(1, -(-train.steps // updates))
        each = f"{recipe.rollout.prompts} prompts × {recipe.rollout.group} answers"
        return f"{told}; {each}" + (f", {batches} times" if batches > 1 else ", drawn once from the start")
    assert recipe.data is not None
    return f"{told}, {recipe.data.batch} rows each, of {_word(recipe.task)}"


def _environment(plan: StudyPlan) -> dict[str, Any]:
    starts = RunDirectory(plan.start.cell.folder).read_environment().get("starts", [])
    newest = starts[-1] if starts else {}
    return {key: newest[key] for key in ("started", "versions", "hardware", "git") if newest.get(key)}
