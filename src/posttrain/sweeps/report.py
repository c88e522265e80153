"""The results of a sweep: every finished trial read, and a report of all that its rows say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.errors import DataError, RunFailure
from posttrain.evals import tables as text
from posttrain.evals.items import Item, read_items
from posttrain.evals.tables import TextTable
from posttrain.recipes.recipe import Recipe
from posttrain.store.durable import sayable
from posttrain.store.headline import ACCURACY, Headline
from posttrain.sweeps import best_of_n, head_to_head, learning, overoptimization
from posttrain.sweeps.file import AnswersSection, label_of_word
from posttrain.sweeps.learning import Baseline, RowResult, TrialResult
from posttrain.sweeps.method import LEARNS_FROM
from posttrain.sweeps.part import Part
from posttrain.sweeps.plan import ITEMS, Plan, Training, find_problems
from posttrain.sweeps.runner import Outcome
from posttrain.untrusted import bullets, paragraph, plain


@dataclass(frozen=True)
class SweepResults:
    """All that is reported about a sweep.

    ``parts`` by name: ``rows``, ``best_of_n``, ``overoptimization``, ``head_to_head``. What pictures are drawn from:
    ``rows`` with ``baseline`` and ``headline`` (the primary metric), ``choices`` of which the first ``num_models`` are
    reward models, ``curves``, ``policies``. ``common``: (what, value).
    """

    title: str
    description: str
    command: str
    rows: list[RowResult]
    baseline: Baseline | None
    headline: Headline
    parts: dict[str, Part]
    common: list[tuple[str, str]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    choices: Sequence[best_of_n.Chosen] = ()
    num_models: int = 0
    curves: Sequence[overoptimization.MethodCurve] = ()
    policies: Sequence[head_to_head.PolicyResult] = ()
    samples: Sequence[head_to_head.Sample] = ()

    @property
    def tables(self) -> list[TextTable]:
        return [table for part in self.parts.values() for table in part.tables]

    @property
    def findings(self) -> list[str]:
        return [line for part in self.parts.values() for line in part.findings]

    @property
    def notes(self) -> list[str]:
        return [line for part in self.parts.values() for line in part.notes]

    def to_markdown(self) -> str:
        """The text of ``table.md``."""
        parts = [f"# {plain(self.title)}\n"]
        parts += [f"{paragraph(self.description)}\n"] if self.description else []
        lines = [*self.problems, *self.findings]
        parts += [bullets(lines)] if lines else []
        parts += [text.to_markdown(table) for table in self.tables]
        parts += [
            bullets(self.notes),
            "## The same for all\n",
            bullets(f"{name}: {value}" for name, value in self.common),
        ]
        parts += ["## What differs\n", bullets(self.differences)] if self.differences else []
        parts.append(f"## Make it again\n\n```\n{self.command}\n```\n")
        return "\n".join(parts)

    def to_json(self) -> str:
        """The text of ``results.json``: everything, unrounded; a number that is not finite is null."""
        names = ("title", "description", "command", "problems", "findings", "notes", "differences", "environment")
        content = {name: getattr(self, name) for name in names} | {"common": dict(self.common)}
        for part in self.parts.values():
            content |= part.data
        return json.dumps(sayable(content), indent=1, allow_nan=False)


def collect_sweep(plan: Plan, outcome: Outcome, command: str) -> SweepResults:
    """Read the records of every finished trial.

    Raises:
        RunFailure: too little is finished for a report.
        DataError: a record is damaged.
    """
    failures = find_problems(plan, outcome.failures)
    rows, baseline, headline = _read_rows(plan, failures)
    parts: dict[str, Part] = {}
    drawn: dict[str, Any] = {}
    if plan.best_of_n is None and plan.head_to_head is None:
        parts["rows"] = rows_part(rows, baseline, headline, {row.name: row.source for row in plan.rows})
    if plan.best_of_n is not None:
        name, part, drawn = _read_choices(plan)
        parts[name] = part
    if plan.head_to_head is not None:
        parts["head_to_head"], more = _read_head_to_head(plan)
        drawn |= more
    return SweepResults(
        title=plan.folder.name,
        description=" ".join(plan.description.split()),
        command=command,
        rows=rows,
        baseline=baseline,
        headline=headline,
        parts=parts,
        common=describe_common(plan, rows, outcome, headline),
        differences=describe_differences(plan) if plan.base is not None else [],
        problems=[f"{name}: {message}" for name, message in failures.items()] if "rows" not in parts else [],
        environment=plan.environment(),
        **drawn,
    )


def _read_rows(plan: Plan, failures: Mapping[str, str]) -> tuple[list[RowResult], Baseline | None, Headline]:
    own_reward = {row.name for row in plan.rows if any(key.startswith("rewards") for key in row.differs)}
    runs = plan.policies or plan.scorers
    stored = [status.headline for run in runs if (status := run.status) is not None and status.headline]
    headline = stored[0] if stored else ACCURACY
    trials = [_read_run(run, failures.get(run.name), headline) for run in plan.trainings]
    trials = [learning.without_reward(t, headline) if t.row in own_reward else t for t in trials]
    baseline = learning.find_baseline(trials, plan.start_source, headline)
    return learning.rank_rows(trials, [row.name for row in plan.rows], headline), baseline, headline


def _read_run(run: Training, problem: str | None, headline: Headline) -> TrialResult:
    state: learning.TrialState = "failed" if problem is not None else "unfinished"
    if run.state == "finished":
        state, problem = "finished", None
    return learning.read_trial(run.metrics(), run.row, run.seed, state, problem, headline)


def rows_part(
    rows: Sequence[RowResult], baseline: Baseline | None, headline: Headline, sources: Mapping[str, str]
) -> Part:
    """The part of the report about what the rows learned; ``sources``: where each is from."""
    data = {
        "headline": asdict(headline),
        "start": asdict(baseline) if baseline is not None else None,
        "rows": {
            row.name: {
                "source": sources[row.name],
                "summaries": {key: asdict(summary) for key, summary in row.summaries.items()},
                "trials": [asdict(trial) for trial in row.trials],
            }
            for row in rows
        },
    }
    table = learning.rows_table(rows, baseline, headline)
    return Part([table], [], learning.row_notes(rows, baseline, headline), data)


def _read_choices(plan: Plan) -> tuple[str, Part, dict[str, Any]]:
    """What reward models choose: compared with one another, or as the proxy that policies were trained against."""
    asked = plan.best_of_n
    assert asked is not None
    chosen: dict[str, dict[int, list[Item]]] = {}
    for trial in plan.evaluations("best_of_n"):
        if trial.state == "finished":
            items = read_items(trial.folder / ITEMS, asked.samples)
            counts = {len(items), *(len(other) for seeds in chosen.values() for other in seeds.values())}
            if len(counts) != 1 or not any(item.samples for item in items):
                raise DataError(trial.folder / ITEMS, "not answers to the problems of this sweep; delete the folder")
            chosen.setdefault(trial.row, {})[trial.seed] = items
    names = list(dict.fromkeys(run.row for run in plan.scorers))
    seeds = sorted(set.intersection(*(set(chosen.get(name, {})) for name in names)))
    if not seeds:
        raise RunFailure("nothing to report yet: for no seed have all reward models chosen among the start's answers")
    if any(set(row.needs) & set(names) for row in plan.rows):
        runs = [(run.row, run.seed, run.metrics()) for run in plan.policies if run.state == "finished"]
        curves = overoptimization.collect_curves(chosen[names[0]], runs)
        part = overoptimization.overoptimization_part(curves, asked.samples, len(seeds))
        return "overoptimization", part, {"curves": curves}
    evaluations = {name: [chosen[name][seed] for seed in seeds] for name in names}
    best_of_n.check_alike(evaluations, str(plan.folder / "chosen"))
    choices = best_of_n.choose(evaluations)
    part = best_of_n.best_of_n_part(choices, len(names), len(seeds))
    return "best_of_n", part, {"choices": choices, "num_models": len(names)}


def _read_head_to_head(plan: Plan) -> tuple[Part, dict[str, Any]]:
    trials = [trial for trial in plan.evaluations("head_to_head") if trial.state == "finished"]
    comparisons = [head_to_head.read_comparison(trial.folder, trial.row, trial.seed) for trial in trials]
    if not comparisons:
        raise RunFailure("nothing to report yet: no policy has been compared with the start")
    assert plan.head_to_head is not None
    policies = head_to_head.rank_policies(comparisons)
    proxy = next(run.row for run in plan.scorers if any(run.row in row.needs for row in plan.rows))
    weights = {run.name: run.weights for run in plan.policies}
    part = head_to_head.head_to_head_part(policies, plan.head_to_head.judge, proxy, weights)
    return part, {"policies": policies, "samples": head_to_head.choose_samples(comparisons)}


def describe_differences(plan: Plan) -> list[str]:
    """One line per row that has more of its own than its method, and one for all others."""
    lines, rest = [], []
    for row in plan.rows:
        label = f"{row.name} ({row.source})"
        changes = [
            f"{key} = {_or_nothing(new)} (base: {_or_nothing(old)})" for key, (old, new) in sorted(row.differs.items())
        ]
        if changes:
            lines.append(f"{label} differs from the base in: {'; '.join(changes)}")
        else:
            rest.append(label)
    if any(LEARNS_FROM in row.differs for row in plan.rows):
        lines.append(
            "rows that learn from data are compared with rows that learn from their own answers: model, start, "
            "template, optimizer steps, learning rate, evaluation and seeds are equal but for what is named above; "
            "computing time and the number of examples are not"
        )
    if rest:
        what = "objective, advantage, aggregation, selection and what belongs to them"
        lines.append(f"in the method alone ({what}): {', '.join(rest)}")
    return lines


def _or_nothing(value: Any) -> str:
    return "nothing" if value is None else str(value)


def describe_common(
    plan: Plan, rows: Sequence[RowResult], outcome: Outcome, headline: Headline
) -> list[tuple[str, str]]:
    """What the trials have in common, and what each row does, as (what, value)."""
    start, base = plan.start, plan.base
    facts = []
    if start is not None:
        begin = f"{start.recipe.model.name} after {plan.start_source}, {start.recipe.train.steps} steps"
        facts.append(("model" if base is not None else "start", begin))
    if base is not None:
        facts += [] if start is not None else [("model", base.model.name)]
        facts.append(("task", label_of_word(base.task)))
        measured = next((trial for row in rows for trial in row.trials if trial.start), None)
        how = "greedy" if base.eval.temperature == 0 else f"temperature {base.eval.temperature:g}"
        if measured is not None:
            held_out = f"{measured.evaluation}, {measured.start['n']:.0f} {headline.of}, {how}"
            facts.append(("held-out evaluation", held_out))
        facts.append(("training", describe_training(base)))
    else:
        facts += [
            (row.name, f"{row.source}: {row.recipe.objective.name}, {describe_training(row.recipe)}")
            for row in plan.rows
        ]
    if plan.best_of_n is not None:
        facts.append(("best of n", _describe_answers(plan.best_of_n)))
    if plan.head_to_head is not None:
        facts.append(("head to head", _describe_answers(plan.head_to_head)))
    facts.append(("seeds", ", ".join(str(seed) for seed in range(plan.num_seeds))))
    threads = f"{outcome.num_threads} thread{'s' if outcome.num_threads > 1 else ''} each"
    return [*facts, ("ran", f"{outcome.num_jobs} at a time, {threads}")]


def _describe_answers(asked: AnswersSection) -> str:
    each = "one answer each" if asked.samples == 1 else f"{asked.samples} answers each"
    how = f"at most {asked.max_tokens} tokens, temperature {asked.temperature:g}"
    return f"{asked.n} problems of {label_of_word(asked.task)}, {each}, {how}"


def describe_training(recipe: Recipe) -> str:
    """Describe how a row is trained: objective, steps, rate, and what it learns from."""
    train, rollout = recipe.train, recipe.rollout
    line = f"{train.steps} steps at {train.lr:g} ({train.schedule})"
    if rollout is None:
        assert recipe.data is not None
        return f"{line}, {recipe.data.batch} rows each, of {label_of_word(recipe.task)}"
    batches = max(1, -(-(train.steps or 0) // (train.epochs * train.minibatches)))
    each = f"{rollout.prompts} prompts × {rollout.group} answers of at most {rollout.max_tokens} tokens"
    rewards = ", ".join(f"{word.weight:g} × {word.name}" for word in recipe.rewards)
    return f"{line}; {each}, sampled {'once' if batches == 1 else f'{batches} times'}; rewards {rewards}"
