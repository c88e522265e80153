"""Plan a comparison: try every row at every learning rate, then retrain at the best rate with fresh seeds.

Trials are ordinary runs, identified by the fingerprint of their resolved recipe.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from posttrain.errors import RecipeError, UsageError
from posttrain.evaluation.comparisons import detectable_difference, mean_height
from posttrain.evaluation.files import ITEMS
from posttrain.recipes.document import Document, decisive
from posttrain.recipes.inert import find_inert_options
from posttrain.recipes.overriding import apply_override, flatten
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.recipes.sections import TrainSection
from posttrain.runs.paths import TRIALS
from posttrain.strict_yaml import write_yaml
from posttrain.sweeps.comparison.records import TrialRecord
from posttrain.sweeps.file import (
    Comparison,
    EvaluatedRuns,
    Overrides,
    RowReader,
    SweepFile,
    SweepRow,
    choose_rows,
    divide_overrides,
    error_at,
    read_needs,
    read_sweep,
)

StageName = Literal["tuning", "final"]
FIRST_FINAL_SEED = 100  # tuning seeds give optimistic results at the chosen rate
POWER = 0.8
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class ComparisonTrial:
    """One run: row, variant (index into ``comparison.over.values``), learning rate and seed."""

    stage: StageName
    row: str
    variant: int
    rate: float
    seed: int
    folder: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of non-default recipe settings; adding new keys does not change it."""
        given = decisive(self.recipe.model_dump(mode="json", exclude_defaults=True))
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """A checked comparison: recipes for all rows, and the trials to run.

    ``twins``: maps (row, variant) to an equivalent row, if the options in which they differ have no effect there.
    """

    folder: Path
    content: SweepFile
    rows: list[SweepRow]
    num_seeds: int
    twins: Mapping[tuple[str, int], str] = field(default_factory=dict)

    @property
    def design(self) -> Comparison:
        assert self.content.comparison is not None, "load_comparison has checked it"
        return self.content.comparison

    @property
    def variants(self) -> list[str]:
        """Variant labels, such as ``updates a batch = 8``; a single empty label without variants."""
        over = self.design.over
        if over is None:
            return [""]
        return [f"{over.label} = {value}" for value in over.values]

    @property
    def arms(self) -> list[tuple[SweepRow, int]]:
        """Experiment arms: every row in every variant, without duplicates of an equivalent row."""
        every = [(row, variant) for variant in range(len(self.variants)) for row in self.rows]
        return [(row, variant) for row, variant in every if (row.name, variant) not in self.twins]

    def tuning(self) -> list[ComparisonTrial]:
        """Trials that select the learning rates, seed by seed."""
        trials = []
        for seed in range(self.design.tuning.seeds):
            for row, variant in self.arms:
                trials += [self._trial("tuning", row, variant, rate, seed) for rate in self.design.rates]
        return trials

    def final(self, rates: Mapping[tuple[str, int], float]) -> list[ComparisonTrial]:
        """Trials at the selected rates, by row and variant, seed by seed; rows without a rate are skipped."""
        trials = []
        for seed in range(FIRST_FINAL_SEED, FIRST_FINAL_SEED + self.num_seeds):
            for row, variant in self.arms:
                rate = rates.get((row.name, variant))
                if rate is not None:
                    trials.append(self._trial("final", row, variant, rate, seed))
        return trials

    def first_trials(self) -> list[ComparisonTrial]:
        """One trial per row and variant, checked before training starts."""
        rate = self.design.rates[0]
        return [self._trial("final", row, variant, rate, FIRST_FINAL_SEED) for row, variant in self.arms]

    def _trial(self, stage: StageName, row: SweepRow, variant: int, rate: float, seed: int) -> ComparisonTrial:
        words = [stage, row.name]
        if self.design.over is not None:
            words.append(f"{self.design.over.key.rpartition('.')[2]}-{self.design.over.values[variant]}")
        name = "-".join([*words, f"lr{rate:g}", f"seed{seed}"])
        data = self._data(stage, row.recipe, variant)
        data["train"] = {**data["train"], "lr": rate, "seed": seed}
        data["description"] = f"{row.name} with seed {seed}, a trial of the comparison {self.folder.name}."
        recipe = validate_recipe(data, f"row {row.name!r}").resolve()
        folder = self.folder / TRIALS / name
        return ComparisonTrial(
            stage=stage, row=row.name, variant=variant, rate=rate, seed=seed, folder=folder, recipe=recipe
        )

    def _data(self, stage: StageName, recipe: Recipe, variant: int) -> dict[str, Any]:
        """Build recipe data for a variant, with the stage's evaluation settings."""
        data = recipe.dump()
        section: EvaluatedRuns = getattr(self.design, stage)
        tasks = [{**task, "split": section.split} for task in data["eval"]["tasks"]]
        evaluation = {"tasks": tasks, "every": section.every, "num_examples": section.problems}
        data["eval"] = {**data["eval"], **evaluation}
        if self.design.pairs is not None:
            data |= self._learning_from_pairs(recipe.train)
            del data["rollout"]
            data.pop("rewards", None)
        if self.design.over is not None:
            apply_override(data, self.design.over.key, json.dumps(self.design.over.values[variant]))
        return data

    def _learning_from_pairs(self, section: TrainSection) -> dict[str, Any]:
        """Build the sections for training on pairs instead of sampling; ``section``: the recipe's ``train`` section."""
        assert self.design.pairs is not None, "the caller has looked"
        task = {"name": "preferences", "path": str(self.pairs_folder / ITEMS), "split": "all"}
        train = section.model_dump(exclude_none=True)
        train |= {"ppo_epochs": 1, "num_minibatches": 1}
        return {"task": task, "data": {"batch_size": self.design.pairs.batch_size}, "train": train}

    @property
    def pairs_folder(self) -> Path:
        """Evaluation of the initial model whose correct and incorrect answers form the pairs."""
        return self.folder / "pairs"

    def pairs_command(self) -> list[str]:
        """Build the ``posttrain`` arguments that sample answers for ``comparison.pairs``; empty without it."""
        pairs = self.design.pairs
        if pairs is None:
            return []
        recipe = self.rows[0].recipe
        words = ["evaluate", recipe.model.name, "--task", pairs.task.name]
        for key, value in pairs.task.options.items():
            words += [f"--task.{key}", json.dumps(value)]
        words += ["--template", recipe.prompt.template.name]
        for key, value in recipe.prompt.template.options.items():
            words += [f"--template.{key}", json.dumps(value)]
        words += ["--limit", str(pairs.n), "--samples", str(pairs.samples), "--max-tokens", str(pairs.max_tokens)]
        words += ["--temperature", str(pairs.temperature)]
        return [*words, "--out", str(self.pairs_folder), "--quiet"]

    def to_yaml(self) -> str:
        """Render the file with complete recipes for all rows; loading it yields the same trials."""
        content = self.content.model_dump(mode="json")
        rows = {row.name: row.recipe.dump() for row in self.rows}
        content |= {"start": None, "base": None, "rows": rows, "seeds": self.num_seeds}
        return write_yaml({key: value for key, value in content.items() if value not in ("", None)})


def names_comparison(name_or_path: str, overrides: Overrides, over: object) -> bool:
    """Check if a sweep file has a ``comparison`` section."""
    if over is not None:
        return False
    own, _ = divide_overrides(overrides)
    content, _ = read_sweep(name_or_path, own, None)
    return content.comparison is not None


def load_comparison(
    name_or_path: str,
    overrides: Overrides = (),
    *,
    folder: str | Path,
    rows: Sequence[str] | None = None,
    num_seeds: int | None = None,
) -> ComparisonPlan:
    """Load a comparison file and check every row in every variant; arguments as in ``load_sweep``.

    Raises:
        RecipeError, UnknownComponent: names file, line, row and key.
        UsageError: an override or row that the file does not have.
    """
    for key in ("train.seed", "train.lr"):
        if key in dict(overrides):
            raise UsageError(f"--{key}: set per trial; use --seeds and --comparison.rates instead")
    own, common = divide_overrides(overrides)
    content, document = read_sweep(name_or_path, own, None)
    design = content.comparison
    assert design is not None, "names_comparison has said so"
    if design.baseline not in content.rows:
        known = ", ".join(content.rows)
        raise error_at(document, "comparison.baseline", f"no row {design.baseline!r}. Give one of {known}")
    if any(read_needs(document, content).values()):
        raise error_at(document, "rows", "a comparison trains every row independently; omit needs")
    for key in ("start", "labelled", "best_of_n", "head_to_head"):
        if getattr(content, key) is not None:
            raise error_at(document, key, "not supported in a comparison; omit it, or omit comparison")
    reader = RowReader(document, content, common, {key for key, _ in own})
    chosen = [reader.row(name, ()) for name in choose_rows(content, dict.fromkeys(content.rows, ()), rows)]
    for row in chosen:
        if design.pairs is not None and row.recipe.rollout is None:
            raise error_at(
                document, f"rows.{row.name}", "comparison.pairs replaces the rollout section; add one to this row"
            )
    plan = ComparisonPlan(folder=Path(folder), content=content, rows=chosen, num_seeds=num_seeds or content.seeds)
    return replace(plan, twins=_check(plan, document))


def _check(plan: ComparisonPlan, document: Document[SweepFile]) -> dict[tuple[str, int], str]:
    """Refuse mismatched list lengths, duplicate values, and untrainable recipes before the first run.

    Returns rows equivalent to another row (``ComparisonPlan.twins``).
    """
    from posttrain.training.checks import resolve_components

    design = plan.design
    for stage in ("tuning", "final"):
        given = len(getattr(design, stage).cpu_seconds)
        if given not in (1, len(plan.variants)):
            key = f"comparison.{stage}.cpu_seconds"
            raise error_at(document, key, f"{given} numbers for {len(plan.variants)} variants; give one per variant")
    if len(set(design.rates)) < len(design.rates):
        raise error_at(document, "comparison.rates", "duplicate rate; remove one")
    if len(set(plan.variants)) < len(plan.variants):
        raise error_at(document, "comparison.over.values", "duplicate value; remove one")
    seen: dict[tuple[int, str], str] = {}
    twins = {}
    for trial in plan.first_trials():
        if not trial.recipe.eval.tasks:
            raise RecipeError(f"{trial.row}: eval.tasks: a comparison needs held-out problems; name a task")
        try:
            needs = resolve_components(trial.recipe).needs
        except UsageError as error:
            raise RecipeError(f"{trial.name}: {error}") from None
        acting = flatten(decisive(trial.recipe.dump()))
        for inert in find_inert_options(trial.recipe, needs):
            acting.pop(inert.key, None)
        twin = seen.setdefault((trial.variant, json.dumps(acting, sort_keys=True)), trial.row)
        if twin != trial.row:
            twins[trial.row, trial.variant] = twin
    for row in plan.rows:
        if all((row.name, variant) in twins for variant in range(len(plan.variants))):
            twin = twins[row.name, 0]
            raise RecipeError(f"rows.{row.name}: identical to {twin}, so there is nothing to compare; remove one")
    return twins


def choose_rates(plan: ComparisonPlan, records: Sequence[TrialRecord]) -> dict[tuple[str, int], float]:
    """Select the best rate by row and variant: highest mean final accuracy over tuning seeds.

    Ties are broken by the higher mean learning curve, then the smaller rate. Incompletely tuned rows are skipped.
    """
    chosen = {}
    for row, variant in plan.arms:
        found = tuning_results(plan, records, row.name, variant)
        counts = [len(own) for own in found.values()]
        if counts == [plan.design.tuning.seeds] * len(plan.design.rates):
            heights = {rate: (*_height(own), -rate) for rate, own in found.items()}
            chosen[row.name, variant] = max(heights, key=heights.__getitem__)
    return chosen


def _height(records: Sequence[TrialRecord]) -> tuple[float, float]:
    return fmean(record.accuracy for record in records), fmean(mean_height(record.curve) for record in records)


def tuning_results(
    plan: ComparisonPlan, records: Sequence[TrialRecord], row: str, variant: int
) -> dict[float, list[TrialRecord]]:
    """Collect a row's tuning records in a variant, by rate."""
    found: dict[float, list[TrialRecord]] = {}
    for rate in plan.design.rates:
        own = [
            record
            for record in records
            if record.stage == "tuning" and (record.row, record.variant, record.rate) == (row, variant, rate)
        ]
        if own:
            found[rate] = own
    return found


def describe_design(plan: ComparisonPlan, records: Sequence[TrialRecord]) -> list[str]:
    """Describe cost and statistical power, one line each: runs, time, detectable differences."""
    design = plan.design
    num_arms = len(plan.arms)
    num_tuning = num_arms * len(design.rates) * design.tuning.seeds
    num_final = num_arms * plan.num_seeds
    costs = list(_costs(plan, records))
    hours = math.fsum(count * seconds for count, seconds in costs) / 3600
    shape = f"{len(plan.rows)} methods"
    if design.over is not None:
        shape = f"{num_arms} of {len(plan.rows)} methods x {len(plan.variants)} variants ({', '.join(plan.variants)})"
    num_left = num_tuning + num_final - len(records)
    lines = [
        f"{num_tuning + num_final} runs: {shape} x {len(design.rates)} learning rates x {design.tuning.seeds} seeds to "
        f"tune, then {plan.num_seeds} fresh seeds at each method's best rate; {num_left} remaining",
        f"about {hours:.1f} CPU-hours in all: {' + '.join(f'{count} x {seconds:.0f} s' for count, seconds in costs)}",
        f"rates are chosen on {design.tuning.problems} {design.tuning.split} problems, results are on "
        f"{design.final.problems} {design.final.split} problems",
    ]
    for (row, variant), twin in plan.twins.items():
        lines.append(f"{row} equals {twin} if {plan.variants[variant]}: their differences have no effect there")
    if design.pairs is not None:
        lines.append(f"pairs are sampled once, before training: posttrain {shlex.join(plan.pairs_command())}")
    return [*lines, *describe_power(plan)]


def describe_power(plan: ComparisonPlan) -> list[str]:
    """Describe the differences detectable with the final seeds, in standard deviations over seeds."""
    if plan.num_seeds < 2:
        return ["one seed per method: no difference can be tested. Give --seeds 2 or more"]
    num_pairs = len(list(combinations(plan.rows, 2)))
    parts = []
    for count, what in ((1, "one comparison"), (len(plan.rows) - 1, "against the baseline"), (num_pairs, "all pairs")):
        if count > 0 and (count > 1 or what == "one comparison"):
            size = detectable_difference(plan.num_seeds, num_comparisons=count, power=POWER, level=LEVEL)
            divided = ""
            if count > 1:
                divided = f", level {LEVEL:.0%} / {count}"
            parts.append(f"{size:.2f} ({what}{divided})")
    return [
        f"smallest difference detectable with {plan.num_seeds} seeds per method at {POWER:.0%} power, in standard "
        f"deviations over seeds: {'; '.join(parts)}"
    ]


def _costs(plan: ComparisonPlan, records: Sequence[TrialRecord]) -> Iterator[tuple[int, float]]:
    """Yield the number of runs and the CPU-seconds per run, measured or estimated, by stage and variant."""
    design = plan.design
    stages: dict[StageName, int] = {"tuning": len(design.rates) * design.tuning.seeds, "final": plan.num_seeds}
    for stage, runs in stages.items():
        estimates = getattr(design, stage).cpu_seconds
        for variant in range(len(plan.variants)):
            measured = [
                record.whole_seconds
                for record in records
                if (record.stage, record.variant) == (stage, variant) and record.whole_seconds is not None
            ]
            seconds = estimates[min(variant, len(estimates) - 1)]
            if measured:
                seconds = fmean(measured)
            yield runs * sum(own == variant for _, own in plan.arms), seconds
