"""From the cells of a comparison to its results and files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.recipes.recipe import Recipe
from posttrain.runs.directory import RunDirectory
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps.cells import Outcome
from posttrain.sweeps.compare import Cell, Plan
from posttrain.sweeps.comparison import (
    CellResult,
    CellState,
    Comparison,
    find_baseline,
    rank_methods,
    read_cell,
)


def collect_results(plan: Plan, outcome: Outcome, command: str) -> Comparison:
    """Read every cell's records.

    Raises:
        DataError: a record is damaged.
    """
    cells = [read_result(cell, outcome.failures.get(cell.name)) for cell in plan.cells]
    own_reward = {m.name for m in plan.methods if any(key.startswith("rewards") for key in m.differs)}
    cells = [without_reward(cell) if cell.method in own_reward else cell for cell in cells]
    differs = {
        method.name: [_show_change(key, old, new) for key, (old, new) in sorted(method.differs.items())]
        for method in plan.methods
    }
    return Comparison(
        title=plan.folder.name,
        description=" ".join(plan.description.split()),
        rows=rank_methods(cells, [method.name for method in plan.methods]),
        baseline=find_baseline(cells, plan.start_source),
        common=describe_common(plan, cells, outcome),
        differs=differs,
        sources={method.name: method.source for method in plan.methods},
        command=command,
        environment=_environment(plan),
    )


def read_result(cell: Cell, problem: str | None) -> CellResult:
    """One cell from its run directory; ``problem`` is what it said when it failed just now."""
    run = RunDirectory(cell.folder)
    status = run.read_status()
    if problem is None and status is not None and status.state == "failed":
        problem = status.message or "no reason was recorded"
    finished = status is not None and status.state == "finished"
    state: CellState = "finished" if finished else "failed" if problem is not None else "unfinished"
    rows = MetricsLog(cell.folder / "metrics.jsonl").read()
    return read_cell(rows, cell.method, cell.seed, state, None if finished else problem)


def without_reward(cell: CellResult) -> CellResult:
    """A cell whose reward is not that of the others: its own number would be read as a comparison."""
    facts = {key: value for key, value in cell.facts.items() if key != "reward"}
    return replace(cell, facts=facts, curve=[replace(point, reward=None) for point in cell.curve])


def _show_change(key: str, old: Any, new: Any) -> str:
    def shown(value: Any) -> str:
        return "nothing" if value is None else str(value)

    return f"{key} = {shown(new)} (base: {shown(old)})"


def describe_common(plan: Plan, cells: list[CellResult], outcome: Outcome) -> list[tuple[str, str]]:
    """What the cells have in common, as (what, value)."""
    base = plan.base
    facts = [("model", base.model.name if plan.start is None else _describe_start(plan.start, plan.start_source))]
    facts.append(("task", _describe_word(base.task.name, base.task.options)))
    measured = next((cell for cell in cells if cell.start), None)
    how = "greedy" if base.eval.temperature == 0 else f"temperature {base.eval.temperature:g}"
    if measured is not None:
        facts.append(("held-out evaluation", f"{measured.evaluation}, {measured.start['n']:.0f} problems, {how}"))
    facts += _describe_training(base)
    facts.append(("seeds", ", ".join(str(seed) for seed in range(plan.num_seeds))))
    threads = f"{outcome.num_threads} thread{'s' if outcome.num_threads > 1 else ''} each"
    facts.append(("ran", f"{outcome.num_jobs} at a time, {threads}"))
    return facts


def _describe_start(start: Cell, source: str) -> str:
    return f"{start.recipe.model.name} after {source}, {start.recipe.train.steps} steps"


def _describe_word(name: str, options: dict[str, Any]) -> str:
    chosen = ", ".join(f"{key} {value}" for key, value in options.items() if value is not None)
    return f"{name} ({chosen})" if chosen else name


def _describe_training(base: Recipe) -> list[tuple[str, str]]:
    facts = [("steps", f"{base.train.steps}, learning rate {base.train.lr:g} ({base.train.schedule})")]
    if base.rollout is not None:
        r = base.rollout
        updates = base.train.epochs * base.train.minibatches
        batch = f"{r.prompts} prompts × {r.group} answers of at most {r.max_tokens} tokens"
        facts.append(("rollouts", batch + (f", for {updates} steps" if updates > 1 else ", for each step")))
        facts.append(("rewards", ", ".join(f"{word.weight:g} × {word.name}" for word in base.rewards)))
    elif base.data is not None:
        facts.append(("data", f"{base.data.batch} rows in each step"))
    return facts


def _environment(plan: Plan) -> dict[str, Any]:
    for cell in plan.cells:
        starts = RunDirectory(cell.folder).read_environment().get("starts", [])
        if starts:
            newest = starts[-1]
            return {key: newest[key] for key in ("started", "versions", "hardware", "git") if newest.get(key)}
    return {}
