"""Collect a sweep's results from its finished trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.errors import DataError, RunFailure
from posttrain.evaluation.files import ITEMS
from posttrain.evaluation.items import Item, read_items
from posttrain.recipes.overriding import flatten
from posttrain.store.metric_names import Metric, metric_of
from posttrain.store.metrics import evaluation_points, is_evaluation, learning_warnings
from posttrain.sweeps.best_of_n import best_of_n_part, choose, collect_curves, overoptimization_part
from posttrain.sweeps.head_to_head import head_to_head_part, read_comparison
from posttrain.sweeps.judges import JudgeAgreement, read_agreement
from posttrain.sweeps.learning import rank_rows, read_trial, rows_part
from posttrain.sweeps.made import describe_made
from posttrain.sweeps.plan import SweepPlan, Training
from posttrain.sweeps.results import SweepPart, SweepResults
from posttrain.sweeps.runner import SweepOutcome


def collect_sweep(plan: SweepPlan, outcome: SweepOutcome, command: str) -> SweepResults:
    """Read the records of all finished trials.

    Raises:
        RunFailure: too few trials have finished.
        DataError: a record is damaged.
    """
    content = plan.content
    failures = dict(outcome.failures)
    for run in plan.trainings:  # including failures from earlier attempts
        status = run.status
        if status is not None and status.state == "failed":
            failures.setdefault(run.name, status.message or "no reason recorded")
    parts: dict[str, SweepPart] = {}
    if content.best_of_n is None and content.head_to_head is None:
        stored = _primary_metrics(plan.policies or plan.scorers)
        primary = metric_of(next(iter(stored.values()), "accuracy"))
        parts["rows"] = _read_rows(plan, failures, plan.trainings, primary)
    if content.best_of_n is not None:
        parts |= _read_choices(plan, content.best_of_n.samples)
    if content.head_to_head is not None:
        trials = [trial for trial in plan.evaluations("head_to_head") if trial.state == "finished"]
        comparisons = [read_comparison(trial.folder, trial.row, trial.seed) for trial in trials]
        if not comparisons:
            raise RunFailure("nothing to report yet: no policy has been compared with the start")
        parts["head_to_head"] = head_to_head_part(comparisons, _weights(plan), _read_agreements(plan))
    if "rows" not in parts:
        parts |= _read_learning(plan, failures)
    differences = []
    if plan.base is not None:
        differences = _describe_differences(plan)
    problems = [f"{name}: {message}" for name, message in failures.items()]
    runs = [_run_line(plan, run) for run in plan.trials if isinstance(run, Training)]
    return SweepResults(
        title=plan.folder.name,
        description=" ".join(content.description.split()),
        made=describe_made(plan),
        command=command,
        parts=parts,
        file=plan.to_yaml(),
        differences=differences,
        problems=problems + _describe_no_learning(plan),
        runs=runs,
    )


def _weights(plan: SweepPlan) -> dict[str, str]:
    """Map policies (``ROW-seedN``) and ``start`` to their weights."""
    weights = {run.name: run.weights for run in plan.policies}
    if plan.start is not None:
        weights["start"] = plan.start.weights
    return weights


def _read_agreements(plan: SweepPlan) -> list[JudgeAgreement]:
    """Read held-out agreements for judges evaluated after training."""
    assert plan.content.head_to_head is not None
    found = []
    for run in plan.scorers:
        if run.row != plan.content.head_to_head.judge:
            continue
        points = evaluation_points(run.metrics())
        if points and points[-1].step > 0:
            agreement = read_agreement(run.seed, points[-1].results)
            if agreement is not None:
                found.append(agreement)
    return found


def _run_line(plan: SweepPlan, run: Training) -> tuple[str, str, str, str]:
    """Collect a run's name, state and result, and the relative link to its report."""
    page = run.folder / "report.html"
    address = ""
    if page.is_file():
        address = page.relative_to(plan.folder).as_posix()
    return run.name, run.state, run.result, address


def _primary_metrics(runs: Sequence[Training]) -> dict[str, str]:
    """Map runs to their primary metrics; runs without one are skipped."""
    found = {}
    for run in runs:
        status = run.status
        if status is not None and status.primary_metric is not None:
            found[run.name] = status.primary_metric
    return found


def _read_learning(plan: SweepPlan, failures: Mapping[str, str]) -> dict[str, SweepPart]:
    """Build learning sections for reward models and head-to-head policies, by primary metric."""
    parts = {}
    policies = []
    if plan.content.head_to_head is not None:
        policies = plan.policies
    for title, runs in (("Reward models", plan.scorers), ("Learning of the policies", policies)):
        primaries = _primary_metrics(runs)
        for primary in dict.fromkeys(primaries.values()):
            own = [run for run in runs if primaries.get(run.name) == primary]
            metric = metric_of(primary)
            part = _read_rows(plan, failures, own, metric, title)
            name = f"{title}: {metric.label}"
            parts[name] = replace(part, data={name: part.data})
    return parts


def numeric_key(plan: SweepPlan) -> tuple[str, dict[str, float]] | None:
    """Find the single key in which rows differ, with its value in each; None unless numeric everywhere."""
    sources = {row.name: flatten(plan.content.rows[row.name]) for row in plan.rows}
    keys = {key for source in sources.values() for key in source}
    values = {name: value for name, source in sources.items() for value in source.values()}
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    if len(keys) == 1 and len(values) == len(plan.rows) > 1 and is_numeric:
        return (keys.pop(), values)
    return None


def _read_rows(
    plan: SweepPlan, failures: Mapping[str, str], runs: Sequence[Training], primary: Metric, title: str = ""
) -> SweepPart:
    own_reward = {row.name for row in plan.rows if any(key.startswith("rewards") for key in row.differs)}
    trials = []
    for run in runs:
        rows = run.metrics()
        if run.row in own_reward:  # custom rewards are not comparable across rows
            for row in rows:
                for name in [name for name in row.metrics if name.endswith("/reward")]:
                    del row.metrics[name]
        state = "unfinished"
        if run.state == "finished":
            state = "finished"
        elif run.name in failures:
            state = "failed"
        trials.append(read_trial(rows, run.row, run.seed, state, primary))
    names = {run.row for run in runs}
    sources = {row.name: row.source for row in plan.rows if row.name in names}
    ranked = rank_rows(trials, list(sources), primary)
    return rows_part(ranked, plan.start_source, primary, sources, title, numeric_key(plan))


def _describe_no_learning(plan: SweepPlan) -> list[str]:
    """List runs that cannot learn, and note if all rows are identical apart from the learning rate."""
    lines: list[str] = []
    by_seed: dict[int, list[list[dict[str, float]]]] = {}
    for run in plan.trainings:
        if run.state == "finished":
            rows = run.metrics()
            lines += [f"{run.name}: {warning}" for warning in learning_warnings(rows).values()]
            steps = [row.metrics | {"lr": 0.0} for row in rows if not is_evaluation(row)]
            by_seed.setdefault(run.seed, []).append(steps)
    if by_seed and all(map(_are_equal, by_seed.values())):
        what = "all rows have identical metrics for every seed, so their differences have no effect"
        lines.insert(0, f"{what}. Check that this method reads the key, and that the runs learn at all")
    return lines


def _are_equal(runs: Sequence[Sequence[Mapping[str, float]]]) -> bool:
    """Check if several runs have identical metrics at every step."""
    return len(runs) > 1 and len(runs[0]) > 0 and all(other == runs[0] for other in runs)


def _read_choices(plan: SweepPlan, samples: int) -> dict[str, SweepPart]:
    """Read reward model selections, for comparing reward models or for studying over-optimization."""
    chosen: dict[str, dict[int, list[Item]]] = {run.row: {} for run in plan.scorers}
    for trial in plan.evaluations("best_of_n"):
        if trial.state == "finished":
            items = read_items(trial.folder / ITEMS, samples)
            counts = {len(items)}
            for of_seed in chosen.values():
                counts |= {len(other) for other in of_seed.values()}
            if len(counts) != 1 or not any(item.samples for item in items):
                raise DataError(trial.folder / ITEMS, "answers do not match this sweep's problems; delete the folder")
            chosen[trial.row][trial.seed] = items
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in chosen.values())))
    if not seeds:
        raise RunFailure("nothing to report yet: no seed has evaluations for all reward models")
    if any(set(row.needs) & chosen.keys() for row in plan.rows):
        runs = [(run.row, run.seed, run.metrics()) for run in plan.policies if run.state == "finished"]
        of_proxy = next(iter(chosen.values()))
        return {"overoptimization": overoptimization_part(collect_curves(of_proxy, runs))}
    choices = choose({name: [of_seed[seed] for seed in seeds] for name, of_seed in chosen.items()})
    return {"best_of_n": best_of_n_part(choices, len(chosen))}


def _describe_differences(plan: SweepPlan) -> list[str]:
    """Describe row differences outside the method, one line each, with a summary line for all other rows."""
    lines = []
    rest = []
    for row in plan.rows:
        changes = [f"{key} = {new} (base: {old})" for key, (old, new) in row.differs.items()]
        if changes:
            lines.append(f"{row.name} ({row.source}) differs from the base in: {'; '.join(changes)}")
        else:
            rest.append(f"{row.name} ({row.source})")
    if rest:
        what = "objective, advantage, aggregation, selection and related keys"
        lines.append(f"rows that differ only in the method ({what}): {', '.join(rest)}")
    return lines
