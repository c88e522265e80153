"""From the finished trials of a sweep to its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.errors import DataError, RunFailure
from posttrain.evaluation.files import ITEMS
from posttrain.evaluation.items import Item, read_items
from posttrain.recipes.document import flatten
from posttrain.store.metric_names import Metric, metric_of
from posttrain.store.metrics import is_evaluation, learning_warnings
from posttrain.sweeps.best_of_n import best_of_n_part, choose, collect_curves, overoptimization_part
from posttrain.sweeps.head_to_head import head_to_head_part, read_comparison
from posttrain.sweeps.learning import rank_rows, read_trial, rows_part
from posttrain.sweeps.plan import Plan, Training
from posttrain.sweeps.results import Part, SweepResults
from posttrain.sweeps.runner import Outcome


def collect_sweep(plan: Plan, outcome: Outcome, command: str) -> SweepResults:
    """Read the records of every finished trial.

    Raises:
        RunFailure: too little is finished for a report.
        DataError: a record is damaged.
    """
    content, failures = plan.content, dict(outcome.failures)
    for run in plan.trainings:  # also those of an earlier attempt
        if (status := run.status) is not None and status.state == "failed":
            failures.setdefault(run.name, status.message or "no reason was recorded")
    parts: dict[str, Part] = {}
    if content.best_of_n is None and content.head_to_head is None:
        stored = [status.primary_metric for run in plan.policies or plan.scorers if (status := run.status)]
        primary = metric_of(next((name for name in stored if name is not None), "accuracy"))
        parts["rows"] = _read_rows(plan, failures, plan.trainings, primary)
    if content.best_of_n is not None:
        parts |= _read_choices(plan, content.best_of_n.samples)
    if content.head_to_head is not None:
        trials = [trial for trial in plan.evaluations("head_to_head") if trial.state == "finished"]
        comparisons = [read_comparison(trial.folder, trial.row, trial.seed) for trial in trials]
        if not comparisons:
            raise RunFailure("nothing to report yet: no policy has been compared with the start")
        parts["head_to_head"] = head_to_head_part(comparisons, {run.name: run.weights for run in plan.policies})
    if "rows" not in parts:
        parts |= _read_learning(plan, failures)
    return SweepResults(
        title=plan.folder.name,
        description=" ".join(content.description.split()),
        command=command,
        parts=parts,
        file=plan.to_yaml(),
        differences=_describe_differences(plan) if plan.base is not None else [],
        problems=[f"{name}: {message}" for name, message in failures.items()] + _describe_no_learning(plan),
        runs=[
            (run.name, run.state, run.result, page.relative_to(plan.folder).as_posix() if page.is_file() else "")
            for run in plan.trials
            if isinstance(run, Training)
            for page in [run.folder / "report.html"]
        ],
    )


def _read_learning(plan: Plan, failures: Mapping[str, str]) -> dict[str, Part]:
    """Return the learning of the reward models, and of the policies of head-to-head evaluations, by primary metric."""
    parts = {}
    policies = plan.policies if plan.content.head_to_head is not None else []
    for title, runs in (("Reward models", plan.scorers), ("Learning of the policies", policies)):
        primaries = {run.name: status.primary_metric for run in runs if (status := run.status) is not None}
        for primary in dict.fromkeys(name for name in primaries.values() if name is not None):
            own = [run for run in runs if primaries.get(run.name) == primary]
            metric = metric_of(primary)
            part = _read_rows(plan, failures, own, metric, title)
            name = f"{title}: {metric.label}"
            parts[name] = replace(part, data={name: part.data})
    return parts


def numeric_key(plan: Plan) -> tuple[str, dict[str, float]] | None:
    """Return the one key in which the rows differ, with its value in each; None unless it is a number in all."""
    sources = {row.name: flatten(plan.content.rows[row.name]) for row in plan.rows}
    keys = {key for source in sources.values() for key in source}
    values = {name: value for name, source in sources.items() for value in source.values()}
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    return (keys.pop(), values) if len(keys) == 1 and len(values) == len(plan.rows) > 1 and is_numeric else None


def _read_rows(
    plan: Plan, failures: Mapping[str, str], runs: Sequence[Training], primary: Metric, title: str = ""
) -> Part:
    own_reward = {row.name for row in plan.rows if any(key.startswith("rewards") for key in row.differs)}
    trials = []
    for run in runs:
        rows = run.metrics()
        for row in rows if run.row in own_reward else ():  # it would be read as a comparison
            for name in [name for name in row.metrics if name.endswith("/reward")]:
                del row.metrics[name]
        state = "failed" if run.name in failures else "unfinished"
        trials.append(read_trial(rows, run.row, run.seed, "finished" if run.state == "finished" else state, primary))
    names = {run.row for run in runs}
    sources = {row.name: row.source for row in plan.rows if row.name in names}
    ranked = rank_rows(trials, list(sources), primary)
    return rows_part(ranked, plan.start_source, primary, sources, title, numeric_key(plan))


def _describe_no_learning(plan: Plan) -> list[str]:
    """Return a line for each run that cannot learn, and one where the rows of each seed are equal but for the rate."""
    lines: list[str] = []
    by_seed: dict[int, list[list[dict[str, float]]]] = {}
    for run in plan.trainings:
        if run.state == "finished":
            rows = run.metrics()
            lines += [f"{run.name}: {warning}" for warning in learning_warnings(rows).values()]
            steps = [row.metrics | {"lr": 0.0} for row in rows if not is_evaluation(row)]
            by_seed.setdefault(run.seed, []).append(steps)
    if by_seed and all(len(own) > 1 and own[0] and all(other == own[0] for other in own) for own in by_seed.values()):
        what = "all rows have equal metrics for every seed, so what differs between them has no effect"
        lines.insert(0, f"{what}. Check that this method reads the key, and that the runs learn at all")
    return lines


def _read_choices(plan: Plan, samples: int) -> dict[str, Part]:
    """Choices of reward models: compared with one another, or as the proxy that policies were trained against."""
    chosen: dict[str, dict[int, list[Item]]] = {run.row: {} for run in plan.scorers}
    for trial in plan.evaluations("best_of_n"):
        if trial.state == "finished":
            items = read_items(trial.folder / ITEMS, samples)
            counts = {len(items), *(len(other) for seeds in chosen.values() for other in seeds.values())}
            if len(counts) != 1 or not any(item.samples for item in items):
                raise DataError(trial.folder / ITEMS, "not answers to the problems of this sweep; delete the folder")
            chosen[trial.row][trial.seed] = items
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in chosen.values())))
    if not seeds:
        raise RunFailure("nothing to report yet: for no seed have all reward models chosen among the start's answers")
    if any(set(row.needs) & chosen.keys() for row in plan.rows):
        runs = [(run.row, run.seed, run.metrics()) for run in plan.policies if run.state == "finished"]
        return {"overoptimization": overoptimization_part(collect_curves(next(iter(chosen.values())), runs))}
    choices = choose({name: [of_seed[seed] for seed in seeds] for name, of_seed in chosen.items()})
    return {"best_of_n": best_of_n_part(choices, len(chosen))}


def _describe_differences(plan: Plan) -> list[str]:
    """One line per row that has more of its own than its method, and one for all others."""
    lines, rest = [], []
    for row in plan.rows:
        changes = [f"{key} = {new} (base: {old})" for key, (old, new) in row.differs.items()]
        if changes:
            lines.append(f"{row.name} ({row.source}) differs from the base in: {'; '.join(changes)}")
        else:
            rest.append(f"{row.name} ({row.source})")
    what = "objective, advantage, aggregation, selection and what belongs to them"
    return lines + ([f"in the method alone ({what}): {', '.join(rest)}"] if rest else [])
