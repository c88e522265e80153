"""From the parts of a study to its report and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import RunFailure
from posttrain.evals import study_best_of_n, study_overoptimization
from posttrain.evals.items import Item, read_items
from posttrain.evals.report_study import draw_best_of_n, draw_overoptimization
from posttrain.evals.study_curves import Course, in_units_of, score_scale
from posttrain.evals.study_page import render_study
from posttrain.evals.study_results import StudyReport, to_json, to_page
from posttrain.recipe import Recipe, Word
from posttrain.runs.directory import RunDirectory
from posttrain.runs.study import Kind, StudyPlan
from posttrain.store.durable import replace_file
from posttrain.store.metrics import MetricsLog
from posttrain.untrusted import harmless

ITEMS, PICTURE = "items.jsonl", "study.png"
Draw = Callable[[str, Path], Path]


@dataclass(frozen=True)
class StudyFound:
    """The report of a study, and what draws its picture (title, path)."""

    report: StudyReport
    draw: Draw


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
    return StudyFound(report, found["draw"])


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
        "draw": lambda title, path: draw_overoptimization(methods, title, path),
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
        "draw": lambda title, path: draw_best_of_n(found, len(names), title, path),
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


def write_study(found: StudyFound, folder: Path) -> Path:
    """``results.json``, ``table.md``, ``study.png`` and ``report.html``; returns the report's path.

    Raises:
        StorageError: the disk is full or not writable.
    """
    replace_file(folder / "results.json", to_json(found.report).encode() + b"\n", durable=False)
    replace_file(folder / "table.md", harmless(to_page(found.report)).encode(), durable=False)
    picture = found.draw(found.report.title, folder / PICTURE)
    report = folder / "report.html"
    replace_file(report, render_study(found.report, picture.read_bytes()).encode(), durable=False)
    return report
