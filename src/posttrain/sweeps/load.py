"""From the file of a sweep to its plan: every row resolved and checked, every trial with what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError
from posttrain.recipes.document import Document, apply_overrides, merge
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RewardWord
from posttrain.sweeps.file import (
    LABELLED,
    NEEDS,
    SweepFile,
    choose_rows,
    has_key,
    label_of,
    named,
    named_recipe,
    read_needs,
    read_sweep,
    refusal,
    source_data,
    split_overrides,
)
from posttrain.sweeps.method import changes_between, differences, with_method_of, with_source_of, without_method
from posttrain.sweeps.plan import Evaluation, Labelling, Plan, Row, Training, Trial, drawing_words
from posttrain.tasks.base import held_out_task

# Of steps that a sweep labels, as they were cut: each keeps the white space before it, so nothing is put between.
_TASK_OF_STEPS = {"name": "preferences", "path": "", "step_separator": ""}
# The reward of a row whose recipe names no reward model.
_WHOLE_REWARD = {"name": "reward_model", "run": ""}
# A base need not name an objective; one of these takes its place while the base is checked by itself.
_ANY_OBJECTIVE = {"rollout": "reinforce", "data": "cross_entropy"}
Overrides = Sequence[tuple[str, str]]
Rule = tuple[bool, str, str]  # broken if true, the key, what is wrong


def load_sweep(
    name_or_path: str,
    overrides: Overrides = (),
    *,
    folder: str | Path,
    rows: Sequence[str] | None = None,
    num_seeds: int | None = None,
    over: tuple[str, Sequence[str]] | None = None,
) -> Plan:
    """Read the file of a sweep and check every trial.

    Args:
        name_or_path: a file, or a shipped sweep with or without ``sweep/``; or a recipe of one run.
        overrides: dotted keys of the file (``rows.dapo.objective.clip_high``), or of every row that has the key
            (``train.lr``).
        folder: the sweep's directory; nothing is written here.
        rows, num_seeds: names of the rows wanted (None: all), and the number of seeds (None: the file's).
        over: of a recipe, a key and the values that it takes in turn: a row for each.

    Raises:
        RecipeError, UnknownWord: with file, line, row and key.
        UsageError: an override or a row of something that the file does not have.
    """
    own, common = split_overrides(overrides)
    content, document = read_sweep(name_or_path, own, over)
    needs = read_needs(document, content)
    reader = _Reader(document, content, needs, common, {key for key, _ in own})
    read = {name: reader.row(name) for name in choose_rows(content, needs, rows)}
    start = reader.start()
    reader.check(read)
    count = num_seeds if num_seeds is not None else content.seeds
    builder = _Builder(content, Path(folder), start, read)
    return Plan(
        folder=Path(folder),
        description=content.description,
        rows=list(read.values()),
        trials=list(builder.trials(range(count))),
        num_seeds=count,
        resolved=_resolve(content, start, reader.base, list(read.values()), count),
        base=reader.base,
        start_source=label_of(content.start) if content.start is not None else reader.model_name(read),
        best_of_n=content.best_of_n,
        head_to_head=content.head_to_head,
    )


class _Reader:
    """Reads the rows of a file. ``base``: the resolved base, if there is one."""

    def __init__(
        self,
        document: Document[SweepFile],
        content: SweepFile,
        needs: Mapping[str, tuple[str, ...]],
        common: Overrides,
        own: set[str],
    ) -> None:
        self.document, self.content, self.needs, self.common, self.own = document, content, needs, common, own
        self.used: set[str] = set()
        self.base: Recipe | None = None
        if content.base is not None:
            self.base, self.base_data = self._read_base(content.base)

    def model_name(self, rows: Mapping[str, Row]) -> str:
        """The name of the model that rows without a start begin with."""
        recipe = self.base or next(iter(rows.values())).recipe
        return recipe.model.name

    def start(self) -> Recipe | None:
        """The resolved recipe of the start."""
        if self.content.start is None:
            return None
        if self.base is not None and self.base.model.init is not None:
            says = "it makes a new model, which leaves nothing for 'start' to do"
            raise refusal(self.document, "base.model.init", says)
        with named("start"):
            return self.document.part(Recipe, "start", source_data(self.document, self.content.start)).check().resolve()

    def _read_base(self, source: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
        """The resolved base, and its data before that: defaults that follow from the objective are not in them."""
        with named("base"):
            data = source_data(self.document, source)
            has_objective = data.get("objective") is not None
            if not has_objective:
                data["objective"] = next((word for key, word in _ANY_OBJECTIVE.items() if key in data), "reinforce")
            checked = self._laid_over("base", data)
            recipe, plain = checked.resolve(), checked.dump()
            if recipe.eval.every == 0:
                says = "0 switches evaluation off; without it there is nothing to compare"
                raise refusal(self.document, "base.eval.every", says)
            if not has_objective:
                del plain["objective"]
            return recipe, plain

    def row(self, name: str) -> Row:
        """One row: its recipe, or the base with its method, with its overrides and those of the command line."""
        source, where = self.content.rows[name], f"rows.{name}"
        with named(f"row {name!r}"):
            data = source_data(self.document, source) if self.base is None else self._data_on_base(source, self.base)
            if data.get("objective") is None:
                raise refusal(self.document, where, "give a recipe or an objective; the base has none")
            if LABELLED in self.needs[name]:
                if "task" in source:
                    raise refusal(self.document, f"{where}.task", "the labelled steps are its task; leave this out")
                data["task"] = _TASK_OF_STEPS
            recipe = self._laid_over(where, data).resolve()
        changes = {} if self.base is None else differences(self.base.dump(), recipe.dump())
        if self.content.start is not None and "model.name" in changes:
            changes["model.name"] = ("the start", recipe.model.name)
        return Row(name, recipe, label_of(source), changes, self.needs[name])

    def _data_on_base(self, source: Mapping[str, Any], base: Recipe) -> dict[str, Any]:
        data = dict(self.base_data)
        if "recipe" in source:
            recipe = named_recipe(self.document, source)
            recipe.resolve()
            other = recipe.dump()
            if (recipe.rollout is None) != (base.rollout is None):
                tasks = base.eval.tasks or [held_out_task(base.task)]
                data = with_source_of(data, other)
                data["eval"] = data["eval"] | {"tasks": [task.model_dump() for task in tasks]}
            data = with_method_of(data, other)
        return merge(data, {key: value for key, value in source.items() if key != "recipe"})

    def _laid_over(self, where: str, data: dict[str, Any]) -> Recipe:
        """The checked recipe of ``data`` with those common keys of the command line that it has."""
        reaches = []
        if self.common:
            plain = self.document.part(Recipe, where, data).check()
            resolved = plain.resolve()
            reaches = [(k, v) for k, v in self.common if f"{where}.{k}" not in self.own and has_key(resolved, k)]
            data = plain.dump()
        if where != "base":
            self.used |= {key for key, _ in reaches}
        return self._with(where, data, reaches)

    def _with(self, where: str, data: dict[str, Any], overrides: Overrides) -> Recipe:
        apply_overrides(data, overrides)
        return self.document.part(Recipe, where, data, {f"{where}.{key}" for key, _ in overrides}).check()

    def check(self, rows: Mapping[str, Row]) -> None:
        """Refuse keys of the command line that no row has, and rows that cannot do what the file asks of them."""
        for key, value in self.common:
            if key not in self.used:
                with named(f"row {next(iter(rows))!r}"):
                    self._with("rows", next(iter(rows.values())).recipe.dump(), [(key, value)]).resolve()
                raise RecipeError(f"--{key}: no row has this key")
        for broken, key, says in (
            *self._rules(rows),
            *(rule for row in rows.values() for rule in self._row_rules(row, rows)),
        ):
            if broken:
                raise refusal(self.document, key, says)

    def _rules(self, rows: Mapping[str, Row]) -> Iterator[Rule]:
        """What must hold between the rows and the sections that ask something of them."""
        scorers = [name for name, row in rows.items() if row.recipe.trains_scorer]
        proxies = {need for row in rows.values() for need in row.needs if need in scorers}
        if self.content.best_of_n is not None:
            yield not scorers, "best_of_n", "a reward model chooses; none of the rows trains one"
            several = "next to policies there is one reward model, which they all learn from"
            yield bool(proxies) and len(scorers) != 1, "best_of_n", several
        if self.content.head_to_head is not None:
            judge, key = self.content.head_to_head.judge, "head_to_head.judge"
            yield judge not in scorers, key, f"{judge!r} is none of the reward models: {', '.join(scorers) or 'none'}"
            other = "policies need one reward model, and the judge must be another one"
            yield len(proxies) != 1 or judge in proxies, key, other

    def _row_rules(self, row: Row, rows: Mapping[str, Row]) -> Iterator[Rule]:
        """What must hold of a row and of those that it needs."""
        where, recipe, asked = f"rows.{row.name}", row.recipe, self.content.best_of_n
        others = [rows[need].recipe.trains_scorer for need in row.needs if need != LABELLED]
        most = "give at most one reward model and one policy"
        yield others.count(True) > 1 or others.count(False) > 1, f"{where}.{NEEDS}", most
        begins = self.base is None and (self.content.start is not None or False in others)
        new = "it begins with the weights of another run; leave this out"
        yield begins and recipe.model.init is not None, f"{where}.model.init", new
        if True in others:
            policy = "a reward model rewards answers that are sampled; give a recipe of a policy with 'rollout'"
            yield recipe.trains_scorer or recipe.rollout is None, where, policy
            own = "its reward is the reward model that it needs; name reward_model, or leave this out"
            yield "rewards" in self.content.rows[row.name] and not _reward_models(recipe), f"{where}.rewards", own
        if True in others and recipe.rollout is not None and asked is not None:
            measured = "give every and drift_prompts; there gold, proxy and KL are measured along the way"
            yield not recipe.eval.every or not recipe.eval.drift_prompts, f"{where}.eval", measured
            drawn = recipe.rollout.temperature
            same = (
                f"{drawn} here and {asked.temperature} in best_of_n; KL is measured of one distribution, give one value"
            )
            yield drawn != asked.temperature, f"{where}.rollout.temperature", same


def _reward_models(recipe: Recipe) -> list[RewardWord]:
    return [word for word in recipe.rewards if word.name == "reward_model"]


def _resolve(
    content: SweepFile, start: Recipe | None, base: Recipe | None, rows: list[Row], seeds: int
) -> dict[str, Any]:
    """The file with everything resolved, but for what the sweep itself gives to its rows."""
    scorers = {row.name for row in rows if row.recipe.trains_scorer}
    dumped = {}
    for row in rows:
        data = row.recipe.dump()
        if LABELLED in row.needs:
            del data["task"]
        if scorers & {*row.needs} and not _reward_models(row.recipe):
            del data["rewards"]
        if base is not None:  # seed and description are the base's: they tell no method apart
            common = without_method(base.dump())
            data["description"], data["train"]["seed"] = common["description"], common["train"]["seed"]
            data = changes_between(common, data)
        dumped[row.name] = data | ({NEEDS: list(row.needs)} if row.needs else {})
    shared = {} if base is None else {"base": without_method(base.dump())}
    begin = {} if start is None else {"start": start.dump()}
    plain = content.model_dump(mode="json") | begin | shared | {"rows": dumped, "seeds": seeds}
    return {key: value for key, value in plain.items() if value not in ("", None)}


@dataclass
class _Builder:
    """Makes the trials of a plan: the start, then seed by seed, so that a sweep that is stopped has finished seeds."""

    content: SweepFile
    folder: Path
    start_recipe: Recipe | None
    rows: Mapping[str, Row]

    def __post_init__(self) -> None:
        recipe, place = self.start_recipe, self.folder / "start"
        self.start = None
        if recipe is not None:
            self.start = Training(name="start", row="start", seed=recipe.train.seed, folder=place, recipe=recipe)

    def trials(self, seeds: Sequence[int]) -> Iterator[Trial]:
        """All trials, in an order in which none stands before what it needs."""
        if self.start is not None:
            yield self.start
        for seed in seeds:
            labelling = self._labelling(seed) if any(LABELLED in row.needs for row in self.rows.values()) else None
            if labelling is not None:
                yield labelling
            runs: dict[str, Training] = {}
            for row in self.rows.values():
                runs[row.name] = self._training(row, seed, runs, labelling)
                yield runs[row.name]
            scorers = [run for run in runs.values() if run.recipe.trains_scorer]
            if self.content.best_of_n is not None:
                yield from (self._best_of_n(scorer) for scorer in scorers)
            if self.content.head_to_head is not None:
                judge = runs[self.content.head_to_head.judge]
                (proxy,) = {need for row in self.rows.values() for need in row.needs} & {run.row for run in scorers}
                policies = [run for run in runs.values() if not run.recipe.trains_scorer]
                yield from (self._head_to_head(policy, [judge, runs[proxy]]) for policy in policies)

    def _training(self, row: Row, seed: int, runs: Mapping[str, Training], labelling: Labelling | None) -> Training:
        own, name = row.recipe.model_copy(deep=True), f"{row.name}-seed{seed}"
        own.train.seed = seed
        own.description = f"{row.name} with seed {seed}, a trial of the sweep {self.folder.name}."
        needed = [runs[need] for need in row.needs if need != LABELLED]
        scorers = [run for run in needed if run.recipe.trains_scorer]
        before = [run for run in needed if run not in scorers] or ([self.start] if self.start is not None else [])
        needs = [run.name for run in (*before, *scorers)]
        for run in before:
            if "model.name" not in row.differs:
                own.model.name = run.weights
            else:
                needs.remove(run.name)
        if labelling is not None and LABELLED in row.needs:
            needs.append(labelling.name)
            own.task = own.task.model_copy(update={"path": str(labelling.target)})
        for scorer in scorers:
            own = _rewarded(own, scorer.folder)
        place = self.folder / "cells" / name
        return Training(name=name, row=row.name, seed=seed, folder=place, needs=tuple(needs), recipe=own)

    def _best_of_n(self, scorer: Training) -> Evaluation:
        assert self.content.best_of_n is not None
        name = f"{scorer.name}-best-of-{self.content.best_of_n.samples}"
        more = ("--best-of", str(scorer.folder))
        return self._evaluation(name, "best_of_n", scorer, self.folder / "chosen" / scorer.name, [scorer], more=more)

    def _head_to_head(self, policy: Training, judges: Sequence[Training]) -> Evaluation:
        """A policy against the start; the first of ``judges`` says which answer wins."""
        folder = self.folder / "head_to_head" / policy.name
        more = ("--judge", ",".join(str(judge.folder) for judge in judges))
        return self._evaluation(
            f"{policy.name}-head-to-head", "head_to_head", policy, folder, [policy, *judges], policy.weights, more
        )

    def _evaluation(
        self,
        name: str,
        section: str,
        run: Training,
        folder: Path,
        needs: Sequence[Training],
        against_start: str | None = None,
        more: Sequence[str] = (),
    ) -> Evaluation:
        """An evaluation of the start, or of the weights ``against_start``, with the seed of a run."""
        assert self.start is not None
        models = [self.start.weights] if against_start is None else [against_start, "--against", self.start.weights]
        words = ["evaluate", *models, *drawing_words(getattr(self.content, section)), *more]
        command = (*words, "--seed", str(run.seed), "--out", str(folder), "--quiet")
        return Evaluation(
            name=name,
            row=run.row,
            section=section,
            seed=run.seed,
            folder=folder,
            needs=("start", *(need.name for need in needs)),
            command=command,
        )

    def _labelling(self, seed: int) -> Labelling:
        asked, start, folder = self.content.labelled, self.start, self.folder / LABELLED / f"seed{seed}"
        assert asked is not None
        assert start is not None
        words = ["evaluate", start.weights, *drawing_words(asked), "--seed", str(seed), "--out", str(folder), "--quiet"]
        return Labelling(
            name=f"{LABELLED}-seed{seed}",
            row=LABELLED,
            section=LABELLED,
            seed=seed,
            folder=folder,
            needs=("start",),
            command=tuple(words),
            target=folder.with_suffix(".jsonl"),
            task=asked.task,
            n=asked.n,
            template=start.recipe.prompt.template,
        )


def _rewarded(recipe: Recipe, scorer: Path) -> Recipe:
    """A recipe whose reward models are the run in a folder; where it names none, that is its whole reward."""
    words = [word.model_dump() for word in recipe.rewards] if _reward_models(recipe) else [_WHOLE_REWARD]
    words = [word | ({"run": str(scorer)} if word["name"] == "reward_model" else {}) for word in words]
    rewards = [RewardWord.model_validate(word) for word in words]
    return recipe.model_copy(update={"rewards": rewards}).resolve()
