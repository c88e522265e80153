"""From the parts of a study to its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.errors import DataError
from posttrain.evals.items import Item, read_items
from posttrain.recipes.recipe import Recipe
from posttrain.sweeps import best_of_n, overoptimization
from posttrain.sweeps.plan import ITEMS, Plan, problems
from posttrain.sweeps.runner import Outcome
from posttrain.sweeps.sources import label_of_word
from posttrain.sweeps.study import Kind, StudyPlan, StudyReport, StudyResults

_KINDS: Mapping[Kind, Callable[..., StudyResults]] = {
    "overoptimization": overoptimization.report,
    "best_of_n": best_of_n.report,
}


def collect_study(plan: StudyPlan, outcome: Outcome, command: str) -> StudyResults:
    """Read every finished part.

    Raises:
        RunFailure: too little is finished for a report.
        DataError: a record is damaged.
    """
    chosen: dict[str, dict[int, list[Item]]] = {}
    num_asked = 0
    for part in plan.choosing:
        if part.standing == "finished":
            items = read_items(part.folder / ITEMS, plan.best_of_n.samples)
            num_asked = num_asked or len(items)
            if len(items) != num_asked or not any(item.samples for item in items):
                raise DataError(part.folder / ITEMS, "not answers to the problems of this study; delete the folder")
            chosen.setdefault(part.method, {})[part.seed] = items
    about = {"study": plan.study, "sources": plan.sources}
    return _KINDS[plan.study](plan, chosen, begin_report(plan, outcome, command, describe_common(plan), about))


def begin_report(
    plan: Plan, outcome: Outcome, command: str, common: list[tuple[str, str]], data: dict[str, Any]
) -> StudyReport:
    """What is told of any study or pipeline, before what it has found."""
    return StudyReport(
        title=plan.folder.name,
        description=" ".join(plan.description.split()),
        tables=[],
        findings=[],
        notes=[],
        common=common,
        data=data,
        command=command,
        problems=[f"{name}: {message}" for name, message in problems(plan, outcome.failures).items()],
        environment=plan.environment(),
    )


def describe_common(plan: StudyPlan) -> list[tuple[str, str]]:
    """What was done, as (what, value)."""
    (start,), asked = plan.trainings("start"), plan.best_of_n
    begin = f"{start.recipe.model.name} after {plan.sources['start']}, {start.recipe.train.steps} steps"
    facts = [("start", begin), ("held-out problems", f"{asked.n} of {label_of_word(asked.task)}")]
    how = f"at most {asked.max_tokens} tokens, temperature {asked.temperature:g}"
    facts.append(("best of n", f"{asked.samples} answers to each problem, {how}"))
    for part in (*plan.trainings("reward_models"), *plan.trainings("policies")):
        if part.seed == 0:
            facts.append((part.method, describe_training(part.recipe)))
    facts.append(("seeds", ", ".join(str(seed) for seed in range(plan.num_seeds))))
    return facts


def describe_training(recipe: Recipe) -> str:
    """How a part is trained: objective, steps, rate, and what it learns from."""
    train = recipe.train
    told = f"{recipe.objective.name}, {train.steps} steps at {train.lr:g}"
    if recipe.rollout is not None:
        updates = train.epochs * train.minibatches
        batches = max(1, -(-(train.steps or 0) // updates))
        each = f"{recipe.rollout.prompts} prompts × {recipe.rollout.group} answers"
        return f"{told}; {each}" + (f", {batches} times" if batches > 1 else ", drawn once from the start")
    assert recipe.data is not None
    return f"{told}, {recipe.data.batch} rows each, of {label_of_word(recipe.task)}"
