"""Plan a sweep: its trials, one process each, and their dependencies.

A trial is an ordinary run or evaluation in a separate folder, so it can be inspected or repeated by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.errors import RecipeError, UsageError
from posttrain.evaluation.files import RESULTS
from posttrain.recipes.document import Rule
from posttrain.recipes.inert import find_inert_options, refuse_inert_option
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RewardComponent
from posttrain.runs.directory import RunDirectory, RunStatus
from posttrain.store.metric_names import metric_of
from posttrain.store.metrics import MetricsLog, MetricsRow
from posttrain.strict_yaml import write_yaml
from posttrain.sweeps.file import (
    LABELLED,
    Overrides,
    RowReader,
    SweepFile,
    SweepRow,
    choose_rows,
    divide_overrides,
    error_at,
    label_of,
    read_needs,
    read_sweep,
)

TrialState = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True, kw_only=True)
class SweepTrial:
    """One process in a sweep: a run (``Training``) or an evaluation.

    ``row``: name in the sweep file. ``needs``: trials whose files it reads. ``command``: arguments for ``posttrain``,
    except ``--resume`` for runs. ``section``: the file key that requests an evaluation; ``labelled`` evaluations
    become a file of steps.
    """

    name: str
    row: str
    seed: int
    folder: Path
    command: tuple[str, ...]
    section: str = ""
    needs: tuple[str, ...] = ()

    @property
    def last_file(self) -> Path:
        """The file written last."""
        if self.section == LABELLED:
            return self.folder.with_suffix(".jsonl")
        return self.folder / RESULTS

    @property
    def state(self) -> TrialState:
        if not self.folder.exists():
            return "new"
        if self.last_file.is_file():
            return "finished"
        return "unfinished"

    @property
    def settings(self) -> tuple[Path, str]:
        """The file beside the trial's folder that stores its settings, and the file's text."""
        return self.folder.with_name(f"{self.folder.name}.command.json"), json.dumps(self.command, indent=1) + "\n"

    @property
    def result(self) -> str:
        """A run's primary metric at its last evaluation, as text; empty if unavailable."""
        return ""

    def conflict(self) -> str | None:
        """Explain why the existing folder cannot be continued; None if it can."""
        path, text = self.settings
        if path.is_file() and path.read_bytes() == text.encode():
            return None
        return f"{self.folder}: created with different {self.section} settings"


@dataclass(frozen=True, kw_only=True)
class Training(SweepTrial):
    """A run, defined by its resolved ``recipe``."""

    recipe: Recipe

    @property
    def weights(self) -> str:
        """Path to the final weights."""
        return str(self.folder / "checkpoints" / f"step-{self.recipe.train.steps:06d}")

    @property
    def status(self) -> RunStatus | None:
        return RunDirectory(self.folder).read_status()

    def metrics(self) -> list[MetricsRow]:
        return MetricsLog(self.folder / "metrics.jsonl").read()

    @property
    def state(self) -> TrialState:
        if not RunDirectory(self.folder).recipe_path.is_file():
            return "new"
        status = self.status
        if status is not None and status.state == "finished":
            return "finished"
        return "unfinished"

    @property
    def settings(self) -> tuple[Path, str]:
        return self.folder.with_name(f"{self.name}.yaml"), self.recipe.to_yaml()

    @property
    def result(self) -> str:
        status = self.status
        if status is None or status.primary_metric is None:
            return ""
        metric = metric_of(status.primary_metric)
        return metric.describe(metric.brief(status.held_out))

    def conflict(self) -> str | None:
        changed = RunDirectory(self.folder).changed_keys(self.recipe)
        if not changed:
            return None
        shown = ", ".join(f"{key} ({old!r} there, {new!r} now)" for key, (old, new) in sorted(changed.items()))
        return f"{self.folder}: created by a different recipe, which differs in {shown}"


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A checked sweep with its trials in dependency order.

    ``start_source``: origin of the initial model. ``base``: the recipe shared by all rows, if any.
    """

    folder: Path
    content: SweepFile
    rows: list[SweepRow]
    trials: list[SweepTrial]
    num_seeds: int
    base: Recipe | None
    start_source: str

    @property
    def start(self) -> Training | None:
        """The run that trains the shared initial model, first and only once."""
        return next((trial for trial in self.trials if trial.row == "start" and isinstance(trial, Training)), None)

    @property
    def trainings(self) -> list[Training]:
        """Row runs, seed by seed, without the start."""
        return [trial for trial in self.trials if isinstance(trial, Training) and trial.row != "start"]

    @property
    def scorers(self) -> list[Training]:
        """Runs that train reward models."""
        return [trial for trial in self.trainings if trial.recipe.trains_scorer]

    @property
    def policies(self) -> list[Training]:
        """Runs that train policies."""
        return [trial for trial in self.trainings if not trial.recipe.trains_scorer]

    def evaluations(self, section: str) -> list[SweepTrial]:
        """Evaluations requested by a section of the file, seed by seed."""
        return [trial for trial in self.trials if trial.section == section]

    def to_yaml(self) -> str:
        """Render the file with complete recipes for all rows; loading it yields the same trials."""
        scorers = {row.name for row in self.rows if row.recipe.trains_scorer}
        rows = {}
        for row in self.rows:
            data = row.recipe.dump()
            if row.needs:
                data["needs"] = list(row.needs)
            if LABELLED in row.needs:  # the sweep supplies these
                del data["task"]
            if scorers & set(row.needs) and not _reward_models(row.recipe.rewards):
                del data["rewards"]
            rows[row.name] = data
        content = self.content.model_dump(mode="json")
        if self.start is not None:
            content["start"] = self.start.recipe.dump()
        content |= {"base": None, "rows": rows, "seeds": self.num_seeds}
        return write_yaml({key: value for key, value in content.items() if value not in ("", None)})


def load_sweep(
    name_or_path: str,
    overrides: Overrides = (),
    *,
    folder: str | Path,
    rows: Sequence[str] | None = None,
    num_seeds: int | None = None,
    over: tuple[str, Sequence[str]] | None = None,
) -> SweepPlan:
    """Load a sweep file and check every trial.

    Args:
        name_or_path: a file or shipped sweep, with or without ``sweep/``; or a single-run recipe.
        overrides: dotted keys in the file (``rows.dapo.objective.clip_high``), or in every row (``train.lr``).
        folder: the sweep's directory; nothing is written here.
        rows, num_seeds: selected rows (None: all), and number of seeds (None: the file's).
        over: for a recipe, a key and its values; each value becomes a row.

    Raises:
        RecipeError, UnknownComponent: names file, line, row and key.
        UsageError: an override or row that the file does not have.
    """
    keys = [key for key, _ in overrides]
    if over is not None:
        keys.append(over[0])
    if "train.seed" in keys:
        raise UsageError("--train.seed: set per trial; use --seeds to choose the number of seeds")
    own, common = divide_overrides(overrides)
    content, document = read_sweep(name_or_path, own, over)
    needs = read_needs(document, content)
    reader = RowReader(document, content, common, {key for key, _ in own})
    read = {name: reader.row(name, needs[name]) for name in choose_rows(content, needs, rows)}
    start = reader.start()
    if over is not None:
        _refuse_inert(over[0], read.values())
    for broken, key, message in _rules(content, read, [*common, *own]):
        if broken:
            raise error_at(document, key, message)
    if num_seeds is None:
        num_seeds = content.seeds
    trials = list(_Builder(content, Path(folder), read).trials(start, range(num_seeds)))
    counts = Counter(trial.name for trial in trials)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise RecipeError(f"sweep: two trials would be named {twice[0]}; rename one row")
    if content.start is not None:
        start_source = label_of(content.start)
    else:
        first_row = next(iter(read.values()))
        start_source = (reader.base or first_row.recipe).model.name
    return SweepPlan(
        folder=Path(folder),
        content=content,
        rows=list(read.values()),
        trials=trials,
        num_seeds=num_seeds,
        base=reader.base,
        start_source=start_source,
    )


def _refuse_inert(key: str, rows: Collection[SweepRow]) -> None:
    """Refuse a varied key without any effect.

    Raises:
        UsageError: explains why, and what would make it effective.
    """
    from posttrain.training.checks import resolve_components

    message = ""
    for row in rows:
        needs = resolve_components(row.recipe).needs
        message = refuse_inert_option(key, find_inert_options(row.recipe, needs))
        if not message:
            return
    raise UsageError(f"--over {key}: all rows would be identical: {message}")


def _rules(content: SweepFile, rows: Mapping[str, SweepRow], overrides: Overrides) -> Iterator[Rule]:
    """Yield conditions on file sections and rows; see ``Rule``."""
    scorers = [name for name, row in rows.items() if row.recipe.trains_scorer]
    proxies = {need for row in rows.values() for need in row.needs if need in scorers}
    if content.best_of_n is not None:
        yield not scorers, "best_of_n", "needs a reward model as selector, but no row trains one"
        several = "with policies, there must be exactly one reward model, which trains all of them"
        yield bool(proxies) and len(scorers) != 1, "best_of_n", several
    if content.head_to_head is not None:
        judge = content.head_to_head.judge
        key = "head_to_head.judge"
        yield (
            judge not in scorers,
            key,
            f"{judge!r} is not a reward model row. Reward models: {', '.join(scorers) or 'none'}",
        )
        other = "policies need exactly one reward model, and the judge must be a different one"
        yield len(proxies) != 1 or judge in proxies, key, other
    for row in rows.values():
        yield from _row_rules(content, row, scorers, overrides)


def _row_rules(content: SweepFile, row: SweepRow, scorers: Sequence[str], overrides: Overrides) -> Iterator[Rule]:
    """Yield conditions on one row; ``scorers``: rows that train reward models."""
    source = content.rows[row.name]
    where = f"rows.{row.name}"
    recipe = row.recipe
    models = [need for need in row.needs if need in scorers]
    before = [need for need in row.needs if need not in (*models, LABELLED)]
    yield len(before) > 1 or len(models) > 1, f"{where}.needs", "give at most one reward model and one policy"
    if before or content.start is not None:
        other_weights = "training starts from another run's weights; omit this key"
        keys = [key.removeprefix(f"{where}.") for key, _ in overrides]
        if (content.base is not None or "recipe" in source) and source.get("model"):
            keys += [f"model.{key}" for key in source["model"]]
        yield recipe.model.init is not None, f"{where}.model.init", other_weights
        yield "model.name" in keys, f"{where}.model.name", other_weights
    if not models:
        return
    policy = "a reward model needs sampled answers; give a policy recipe with 'rollout'"
    yield recipe.trains_scorer or recipe.rollout is None, where, policy
    reward = "the reward comes from the required reward model; use reward_model, or omit this key"
    yield "rewards" in source and not _reward_models(recipe.rewards), f"{where}.rewards", reward
    section = content.best_of_n
    if section is not None and recipe.rollout is not None:
        measured = "set every and num_kl_prompts, to measure gold, proxy and KL during training"
        yield not (recipe.eval.every and recipe.eval.num_kl_prompts), f"{where}.eval", measured
        given = recipe.rollout.temperature
        same = f"{given} here but {section.temperature} in best_of_n; use the same value, so that KLs are comparable"
        yield given != section.temperature, f"{where}.rollout.temperature", same


def _reward_models(rewards: Sequence[RewardComponent]) -> list[RewardComponent]:
    return [reward for reward in rewards if reward.name == "reward_model"]


def _rewards_by(rewards: Sequence[RewardComponent], scorer: Training) -> list[RewardComponent]:
    """Insert a reward model's run into a policy recipe's rewards, or make it the only reward."""
    plain = [reward.model_dump() for reward in rewards]
    if not _reward_models(rewards):
        plain = [{"name": "reward_model"}]
    for reward in plain:
        if reward["name"] == "reward_model":
            reward["run"] = str(scorer.folder)
    return [RewardComponent.model_validate(reward) for reward in plain]


@dataclass
class _Builder:
    """Builds the trials: start first, then seed by seed, so that a stopped sweep has complete seeds."""

    content: SweepFile
    folder: Path
    rows: Mapping[str, SweepRow]
    start: Training | None = None

    def trials(self, start: Recipe | None, seeds: Sequence[int]) -> Iterator[SweepTrial]:
        """Yield all trials in dependency order."""
        if start is not None:
            self.start = self._run("start", start.train.seed, start)
            yield self.start
        for seed in seeds:
            if any(LABELLED in row.needs for row in self.rows.values()):
                yield self._evaluation(LABELLED, seed)
            runs: dict[str, Training] = {}
            for row in self.rows.values():
                runs[row.name] = self._row(row, seed, runs)
                yield runs[row.name]
            scorers = {run.row: run for run in runs.values() if run.recipe.trains_scorer}
            if self.content.best_of_n is not None:
                for run in scorers.values():
                    yield self._evaluation("best_of_n", seed, run, [run])
            if self.content.head_to_head is not None:
                needed = {need for row in self.rows.values() for need in row.needs}
                (proxy,) = needed & scorers.keys()
                judges = [runs[self.content.head_to_head.judge], runs[proxy]]  # the first judge decides the winner
                for run in runs.values():
                    if run.row not in scorers:
                        yield self._evaluation("head_to_head", seed, run, judges)

    def _row(self, row: SweepRow, seed: int, runs: Mapping[str, Training]) -> Training:
        own = row.recipe.model_copy(deep=True)
        own.train.seed = seed
        own.description = f"{row.name} with seed {seed}, a trial of the sweep {self.folder.name}."
        needed = [runs[need] for need in row.needs if need != LABELLED]
        scorers = [run for run in needed if run.recipe.trains_scorer]
        before = [run for run in needed if run not in scorers]
        if not before and self.start is not None:
            before = [self.start]
        needs = [run.name for run in (*before, *scorers)]
        for run in before:
            own.model.name = run.weights
        if LABELLED in row.needs:
            needs.append(f"{LABELLED}-seed{seed}")
            own.task = own.task.model_copy(update={"path": str(self.folder / LABELLED / f"seed{seed}.jsonl")})
        for scorer in scorers:  # at most one; if the recipe names no reward, it is the only one
            own = own.model_copy(update={"rewards": _rewards_by(own.rewards, scorer)}).resolve()
        return self._run(row.name, seed, own, needs)

    def _run(self, row: str, seed: int, recipe: Recipe, needs: Sequence[str] = ()) -> Training:
        from posttrain.training.checks import resolve_components

        if row == "start":
            name = row
            place = self.folder
        else:
            name = f"{row}-seed{seed}"
            place = self.folder / "cells"
        if recipe.train.steps is None:
            raise RecipeError(
                f"{name}: train.num_epochs: dependent trials need the final step number; give train.steps"
            )
        try:  # check before any trial trains
            resolve_components(recipe.resolve())
        except UsageError as error:
            raise RecipeError(f"{name}: {error}") from None
        return Training(
            name=name,
            row=row,
            seed=seed,
            folder=place / name,
            recipe=recipe,
            needs=tuple(needs),
            command=("train", str(place / f"{name}.yaml"), "--runs-dir", str(place), "--run", name, "--quiet"),
        )

    def _evaluation(
        self, section: str, seed: int, run: Training | None = None, judges: Sequence[Training] = ()
    ) -> SweepTrial:
        """Build an evaluation: the initial model with ``judges`` as selectors, or the policy ``run`` against it."""
        assert self.start is not None
        settings = getattr(self.content, section)
        name = f"{LABELLED}-seed{seed}"
        place = f"seed{seed}"
        if run is not None:
            name = f"{run.name}-{section.replace('_', '-')}"
            place = run.name
        words = ["evaluate"]
        if run is not None and section == "head_to_head":
            words += [run.weights, "--against"]
        words += [self.start.weights, "--task", settings.task.name]
        for key, value in settings.task.options.items():
            words += [f"--task.{key}", json.dumps(value)]
        drawing = {"limit": "n", "samples": "samples", "max-tokens": "max_tokens", "temperature": "temperature"}
        for option, key in drawing.items():
            words += [f"--{option}", str(getattr(settings, key))]
        if judges:
            option = "--best-of"
            if section == "head_to_head":
                option = "--judge"
            words += [option, ",".join(str(judge.folder) for judge in judges)]
        shelf = section
        if section == "best_of_n":
            shelf = "chosen"
        folder = self.folder / shelf / place
        needs = ["start"]
        row = LABELLED
        if run is not None:
            needs.append(run.name)
            row = run.row
        needs += [judge.name for judge in judges]
        return SweepTrial(
            name=name,
            row=row,
            seed=seed,
            folder=folder,
            command=(*words, "--seed", str(seed), "--out", str(folder), "--quiet"),
            section=section,
            needs=tuple(dict.fromkeys(needs)),
        )
