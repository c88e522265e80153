"""The plan of a comparison: every row at every learning rate, then with fresh seeds at the rate that was best.

A trial is an ordinary run, told from others by the fingerprint of its resolved recipe.
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
    error_at,
    read_needs,
    read_sweep,
)

StageName = Literal["tuning", "final"]
FIRST_FINAL_SEED = 100  # seeds that chose a rate say too much good about it
POWER = 0.8
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class ComparisonTrial:
    """One run: of a row, in a variant (its place in ``comparison.over.values``), at a learning rate, with a seed."""

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
        """The SHA-256 (16 hex digits) of what its recipe sets, without defaults: new keys leave it alone."""
        given = decisive(self.recipe.model_dump(mode="json", exclude_defaults=True))
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """A checked comparison: the recipe of each row, and what is trained of it.

    ``twins``: by row and variant, the row that it equals there, because the options that they differ in do nothing.
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
        """The names of the variants, such as ``updates a batch = 8``; one empty name without any."""
        over = self.design.over
        if over is None:
            return [""]
        return [f"{over.label} = {value}" for value in over.values]

    @property
    def arms(self) -> list[tuple[SweepRow, int]]:
        """The arms of the experiment: every row in every variant, but for those that equal another one there."""
        every = [(row, variant) for variant in range(len(self.variants)) for row in self.rows]
        return [(row, variant) for row, variant in every if (row.name, variant) not in self.twins]

    def tuning(self) -> list[ComparisonTrial]:
        """The runs that choose the rates, seed by seed."""
        trials = []
        for seed in range(self.design.tuning.seeds):
            for row, variant in self.arms:
                trials += [self._trial("tuning", row, variant, rate, seed) for rate in self.design.rates]
        return trials

    def final(self, rates: Mapping[tuple[str, int], float]) -> list[ComparisonTrial]:
        """The runs at the chosen rates, by row and variant, seed by seed; a row without a rate has none."""
        trials = []
        for seed in range(FIRST_FINAL_SEED, FIRST_FINAL_SEED + self.num_seeds):
            for row, variant in self.arms:
                rate = rates.get((row.name, variant))
                if rate is not None:
                    trials.append(self._trial("final", row, variant, rate, seed))
        return trials

    def first_trials(self) -> list[ComparisonTrial]:
        """One trial of each row in each variant, to be checked before any is trained."""
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
        with_line = f"row {row.name!r}"
        recipe = validate_recipe(data, with_line).resolve()
        folder = self.folder / TRIALS / name
        return ComparisonTrial(
            stage=stage, row=row.name, variant=variant, rate=rate, seed=seed, folder=folder, recipe=recipe
        )

    def _data(self, stage: StageName, recipe: Recipe, variant: int) -> dict[str, Any]:
        """Return the data of a recipe in a variant, evaluated as a stage wants it."""
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
        """Return the sections of a recipe that samples no answers; ``section``: its ``train`` before."""
        assert self.design.pairs is not None, "the caller has looked"
        task = {"name": "preferences", "path": str(self.pairs_folder / ITEMS), "split": "all"}
        train = section.model_dump(exclude_none=True)
        train |= {"ppo_epochs": 1, "num_minibatches": 1}
        return {"task": task, "data": {"batch_size": self.design.pairs.batch_size}, "train": train}

    @property
    def pairs_folder(self) -> Path:
        """The evaluation of the initial model whose right and wrong answers are the pairs."""
        return self.folder / "pairs"

    def pairs_command(self) -> list[str]:
        """The words after ``posttrain`` that sample the answers of ``comparison.pairs``; none without it."""
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
        """The file with every row as a whole recipe; it makes the same trials again."""
        content = self.content.model_dump(mode="json")
        rows = {row.name: row.recipe.dump() for row in self.rows}
        content |= {"start": None, "base": None, "rows": rows, "seeds": self.num_seeds}
        return write_yaml({key: value for key, value in content.items() if value not in ("", None)})


def names_comparison(name_or_path: str, overrides: Overrides, over: object) -> bool:
    """Return whether the file of a sweep has the section ``comparison``."""
    if over is not None:
        return False
    own = [(key, value) for key, value in overrides if key.partition(".")[0] in SweepFile.model_fields]
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
    """Read the file of a comparison and check every row in every variant; arguments as of ``load_sweep``.

    Raises:
        RecipeError, UnknownComponent: with file, line, row and key.
        UsageError: an override or a row of something that the file does not have.
    """
    for key in ("train.seed", "train.lr"):
        if key in dict(overrides):
            raise UsageError(f"--{key}: every trial has its own; --seeds and --comparison.rates say which")
    own = [(key, value) for key, value in overrides if key.partition(".")[0] in SweepFile.model_fields]
    common = [override for override in overrides if override not in own]
    content, document = read_sweep(name_or_path, own, None)
    design = content.comparison
    assert design is not None, "names_comparison has said so"
    if design.baseline not in content.rows:
        known = ", ".join(content.rows)
        raise error_at(document, "comparison.baseline", f"there is no row {design.baseline!r}. Give one of {known}")
    if any(read_needs(document, content).values()):
        raise error_at(document, "rows", "a comparison trains each row by itself; leave needs out")
    for key in ("start", "labelled", "best_of_n", "head_to_head"):
        if getattr(content, key) is not None:
            raise error_at(document, key, "a comparison has no such part; leave it out, or comparison")
    reader = RowReader(document, content, common, {key for key, _ in own})
    chosen = [reader.row(name, ()) for name in choose_rows(content, dict.fromkeys(content.rows, ()), rows)]
    for row in chosen:
        if design.pairs is not None and row.recipe.rollout is None:
            raise error_at(document, f"rows.{row.name}", "comparison.pairs takes the place of a rollout; give one")
    plan = ComparisonPlan(folder=Path(folder), content=content, rows=chosen, num_seeds=num_seeds or content.seeds)
    return replace(plan, twins=_check(plan, document))


def _check(plan: ComparisonPlan, document: Document[SweepFile]) -> dict[tuple[str, int], str]:
    """Refuse lists of other lengths, repeated values, and recipes that cannot be trained, before the first run.

    Return the rows that equal another one in a variant (``ComparisonPlan.twins``).
    """
    from posttrain.training.checks import resolve_components

    design = plan.design
    for stage in ("tuning", "final"):
        given = len(getattr(design, stage).cpu_seconds)
        if given not in (1, len(plan.variants)):
            key = f"comparison.{stage}.cpu_seconds"
            raise error_at(document, key, f"{given} numbers for {len(plan.variants)} variants; give one for each")
    if len(set(design.rates)) < len(design.rates):
        raise error_at(document, "comparison.rates", "a rate is there twice; leave one out")
    if len(set(plan.variants)) < len(plan.variants):
        raise error_at(document, "comparison.over.values", "a value is there twice; leave one out")
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
            raise RecipeError(f"rows.{row.name}: the same as {twin}, so nothing can differ; leave one out")
    return twins


def choose_rates(plan: ComparisonPlan, records: Sequence[TrialRecord]) -> dict[tuple[str, int], float]:
    """The best rate by row and variant: the highest mean accuracy over the tuning seeds at the end.

    Of equal ones the higher mean height of the curve, then the smaller rate. A row that is not tuned yet has none.
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
    """The records of the tuning of a row in a variant, by rate."""
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
    """Say what the comparison costs and what it can find, a line each: runs, time, smallest differences."""
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
        f"tune, then {plan.num_seeds} fresh seeds at each method's own rate; {num_left} are left",
        f"about {hours:.1f} CPU-hours in all: {' + '.join(f'{count} x {seconds:.0f} s' for count, seconds in costs)}",
        f"rates are chosen on {design.tuning.problems} problems of {design.tuning.split}, results are of "
        f"{design.final.problems} problems of {design.final.split}",
    ]
    for (row, variant), twin in plan.twins.items():
        lines.append(f"{row} is {twin} where {plan.variants[variant]}: what they differ in does nothing there")
    if design.pairs is not None:
        lines.append(f"pairs of one sampling run, before the others: posttrain {shlex.join(plan.pairs_command())}")
    return [*lines, *describe_power(plan)]


def describe_power(plan: ComparisonPlan) -> list[str]:
    """Say which differences the final seeds can find, in standard deviations over seeds."""
    if plan.num_seeds < 2:
        return ["one seed a method has no spread: no difference is more than chance. Give --seeds 2 or more"]
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
        f"smallest difference that {plan.num_seeds} seeds a method find with {POWER:.0%} power, in standard deviations "
        f"over seeds: {'; '.join(parts)}"
    ]


def _costs(plan: ComparisonPlan, records: Sequence[TrialRecord]) -> Iterator[tuple[int, float]]:
    """Yield the number of runs and the CPU-seconds of one, measured or estimated, by stage and variant."""
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
