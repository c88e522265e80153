"""A study: one start, reward models, policies trained against them, the best of n. What is run, before it is.

A study file is YAML::

    study: overoptimization      # or best_of_n
    description: what it is about
    start: tiny/sft              # trained once; everything else begins with its final weights
    reward_models:               # trained once per seed
      proxy: {objective: bradley_terry, ...}
    policies:                    # trained once per seed, against the reward model of that seed
      grpo: {recipe: rl/grpo, train: {steps: 80}, eval: {every: 4, drift_prompts: 256}}
    best_of_n: {task: {name: stories, split: validation}, n: 256, samples: 64, max_tokens: 96}
    seeds: 3

Reward models of steps may learn from the start's own answers, with steps that are labelled by the given working::

    labelled: {task: {name: stories, split: train, seed: 5}, n: 256, samples: 8, max_tokens: 96}
    reward_models:
      prm: {objective: process, ...}      # without a task of its own

``overoptimization`` has one reward model, the proxy; the gold reward is the verifier: whether an answer is right.
The rewards of a policy are the study's: the proxy alone, with the verifier looking on. ``best_of_n`` has reward
models that are to be compared, and no policies.

A source (``start``, a reward model, a policy) is the name of a recipe, ``{recipe: name, ...overrides}`` or a
recipe written out, as in a compare file. ``model.name`` of all but the start is set to the start's weights, and
``train.seed`` to the seed. ``best_of_n`` draws ``samples`` answers to each of ``n`` held-out problems from the
start, with the seed of the reward model that scores them.

Every part is an ordinary run under ``cells/`` (or ``start``), or an ordinary evaluation under ``chosen/``; any of
them can be looked at, or repeated by hand. Unknown keys are refused with a suggestion and the line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from posttrain.errors import RecipeError, UsageError
from posttrain.option_types import Repetitions, Tokens
from posttrain.recipes.document import apply_override, parse_yaml, recipe_names, recipe_text
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RewardWord, Section, Word
from posttrain.registry import explain_validation, suggest
from posttrain.runs.directory import NAME_RULE, RUN_NAME
from posttrain.strict_yaml import write_yaml
from posttrain.sweeps.compare import Cell, Source
from posttrain.sweeps.compare_sources import SourceReader

STUDIES = "study/"  # the folder of the shipped recipes that holds study files
STUDY_FILE = "study.yaml"
Kind = Literal["overoptimization", "best_of_n"]
_SOURCES = ("reward_models", "policies")


class BestOfNSection(Section):
    """What the start is asked, and how many answers it gives to each problem."""

    task: Word
    n: int = Field(default=256, ge=2)
    samples: int = Field(default=64, ge=2)
    max_tokens: Tokens = 128
    temperature: float = Field(default=1.0, gt=0)


class LabelledSection(Section):
    """The problems whose answers become labelled steps, and how many answers each gets from the start."""

    task: Word
    n: int = Field(default=256, ge=1)
    samples: int = Field(default=8, ge=2)
    max_tokens: Tokens = 128
    temperature: float = Field(default=1.0, gt=0)


class StudyFile(Section):
    """The keys of a study file."""

    study: Kind
    description: str = ""
    start: Source
    reward_models: Annotated[dict[str, Source], Field(min_length=1)]
    policies: dict[str, Source] = Field(default_factory=dict)
    labelled: LabelledSection | None = None
    best_of_n: BestOfNSection
    seeds: Repetitions = 3

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.study == "overoptimization" and len(self.reward_models) != 1:
            raise ValueError("an overoptimization study has one reward model, the proxy that everything is up against")
        if self.study == "best_of_n" and self.policies:
            raise ValueError("a best_of_n study trains no policies; leave 'policies' out")
        return self


@dataclass(frozen=True)
class Training:
    """A run of the study. ``needs``: the parts whose weights it reads."""

    cell: Cell
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.cell.name


@dataclass(frozen=True, kw_only=True)
class Choosing:
    """An evaluation of the study: answers of the start, scored by the reward model ``method`` with a seed.

    ``words`` are those behind ``posttrain`` that make it.
    """

    name: str
    method: str
    seed: int
    folder: Path
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Labelling(Choosing):
    """Answers of the start to training problems, which become ``target``, a file of labelled steps."""

    target: Path
    asked: LabelledSection
    template: Word


Part = Training | Choosing


@dataclass(frozen=True)
class StudyPlan:
    """A checked study: its parts in an order in which none stands before what it needs."""

    kind: Kind
    folder: Path
    description: str
    start: Training
    reward_models: list[Training]
    policies: list[Training]
    labelling: list[Labelling]
    choosing: list[Choosing]
    best_of_n: BestOfNSection
    num_seeds: int
    resolved: dict[str, Any]
    sources: dict[str, str]

    @property
    def parts(self) -> list[Part]:
        """The start, then seed by seed, so that a study that is stopped has finished seeds to tell of."""
        later: list[Part] = [*self.labelling, *self.reward_models, *self.policies, *self.choosing]
        return [self.start, *(part for seed in range(self.num_seeds) for part in later if _seed(part) == seed)]

    def to_yaml(self) -> str:
        """The study file with everything resolved; it makes the same study again."""
        return write_yaml(self.resolved)


def _seed(part: Part) -> int:
    return part.cell.seed if isinstance(part, Training) else part.seed


def load_study(
    name_or_path: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    folder: str | Path,
    num_seeds: int | None = None,
) -> StudyPlan:
    """Read a study file and check every part.

    Args:
        name_or_path: a file, or a shipped one with or without ``study/``.
        overrides: dotted keys with values: ``policies.grpo.train.steps``, ``best_of_n.samples``.
        folder: the study's directory; nothing is written here.
        num_seeds: instead of the file's.

    Raises:
        RecipeError, UnknownWord: with file, line, part and key.
        UsageError: an override of something that the study does not have.
    """
    if f"{STUDIES}{name_or_path}" in recipe_names() and not Path(name_or_path).is_file():
        name_or_path = f"{STUDIES}{name_or_path}"
    place, text = recipe_text(name_or_path)
    data, lines = parse_yaml(text, place)
    for key, value in overrides:
        _apply(data, key, value, place)
    content = _validate(data, place, lines, {key for key, _ in overrides})
    reader = SourceReader(place, lines, {key for key, _ in overrides})
    start = reader.source(content.start, "start")
    given = {(kind, name): source for kind in _SOURCES for name, source in getattr(content, kind).items()}
    if content.labelled is not None:
        given = {key: source | (_task_of_steps("") if _has_no_task(source) else {}) for key, source in given.items()}
    recipes = {key: reader.source(source, ".".join(key)) for key, source in given.items()}
    for (section, name), recipe in recipes.items():
        _check_part(section, name, recipe, given[section, name], place)
        drawn = recipe.rollout.temperature if recipe.rollout is not None else None
        if section == "policies" and drawn != content.best_of_n.temperature:
            raise RecipeError(
                f"{place}: policies.{name}.rollout.temperature: {drawn} here and {content.best_of_n.temperature} in "
                "best_of_n; KL is told from one and the same distribution, so give both the same"
            )
    count = num_seeds if num_seeds is not None else content.seeds
    return _plan(content, Path(folder), start, recipes, count)


def _apply(data: dict[str, Any], key: str, value: str, place: str) -> None:
    """An override, in place; a bare name of a recipe gains overrides beside it."""
    section, _, rest = key.partition(".")
    if section not in StudyFile.model_fields:
        known = ", ".join(f"{name}.NAME.KEY" if name in _SOURCES else name for name in StudyFile.model_fields)
        raise UsageError(
            f"--{key}: a study has no key {section!r}.{suggest(section, StudyFile.model_fields)} Its keys: {known}"
        )
    holder, name = (data, section) if section not in _SOURCES else (data.get(section), rest.partition(".")[0])
    if section in _SOURCES and isinstance(holder, dict) and name not in holder:
        names = list(map(str, holder))
        raise UsageError(f"--{key}: {place} has no {name!r} there.{suggest(name, names)} There: {', '.join(names)}")
    if (section in _SOURCES or section == "start") and isinstance(holder, dict) and isinstance(holder.get(name), str):
        holder[name] = {"recipe": holder[name]}
    apply_override(data, key, value)


def _validate(data: Mapping[str, Any], place: str, lines: Mapping[str, int], overridden: set[str]) -> StudyFile:
    def line_of(key: str) -> str:
        if key in overridden:
            return "command line: "
        probe = key
        while probe and probe not in lines:
            probe = probe.rpartition(".")[0]
        return f"{place}:{lines[probe]}: " if probe else f"{place}: "

    if "study" not in data:
        command = "posttrain compare" if "methods" in data else "posttrain train"
        raise RecipeError(f"{place}: this is no study (it has no key 'study'); run it with: {command}")
    try:
        content = StudyFile.model_validate(data)
    except ValidationError as error:
        known = list(StudyFile.model_fields)
        raise RecipeError(explain_validation(error, known, "", "a study", line_of)) from None
    for section in _SOURCES:
        for name in getattr(content, section):
            if not RUN_NAME.fullmatch(name):
                where = f"{section}.{name}"
                raise RecipeError(
                    f"{line_of(where)}{where}: a name is made of {NAME_RULE}, because runs are called by it"
                )
    shared = set(content.reward_models) & set(content.policies)
    if shared:
        raise RecipeError(f"{place}: {', '.join(sorted(shared))}: a reward model and a policy have the same name")
    return content


def _check_part(section: str, name: str, recipe: Recipe, source: Mapping[str, Any], place: str) -> None:
    """Raises RecipeError for a part that is of the wrong kind, or that says what is the study's to say."""
    where = f"{place}: {section}.{name}"
    scores = recipe.trains_scorer
    if recipe.model.init is not None:
        raise RecipeError(f"{where}.model.init: it begins with the weights of the study's start; leave this out")
    if section == "reward_models":
        if not scores:
            raise RecipeError(
                f"{where}: objective {recipe.objective.name!r} trains no reward model; use bradley_terry, outcome or "
                "process"
            )
        return
    if scores or recipe.rollout is None:
        raise RecipeError(f"{where}: a policy learns from answers that it samples; give a recipe with 'rollout'")
    if "rewards" in source:
        raise RecipeError(f"{where}.rewards: the reward of a policy is the study's reward model; leave this out")
    if not recipe.eval.every or not recipe.eval.drift_prompts:
        raise RecipeError(
            f"{where}.eval: give every and drift_prompts; there gold, proxy and KL are measured along the way"
        )


def _plan(
    content: StudyFile, folder: Path, start: Recipe, recipes: Mapping[tuple[str, str], Recipe], count: int
) -> StudyPlan:
    resolved: dict[str, Any] = {"study": content.study}
    resolved |= {"description": content.description} if content.description else {}
    resolved |= {"start": start.dump()}
    for section in _SOURCES:
        own = {name: recipe.dump() for (kind, name), recipe in recipes.items() if kind == section}
        # what the study gives is not the file's to say
        taken = "rewards" if section == "policies" else "task"
        learns = {name for name, source in getattr(content, section).items() if _has_no_task(source)}
        strips = set(own) if section == "policies" else learns if content.labelled is not None else set()
        own = {name: _without(data, taken) if name in strips else data for name, data in own.items()}
        resolved |= {section: own} if own else {}
    if content.labelled is not None:
        resolved["labelled"] = content.labelled.model_dump(mode="json")
    resolved |= {"best_of_n": content.best_of_n.model_dump(mode="json"), "seeds": count}
    first = Training(Cell("start", start.train.seed, start, folder / "start"))
    weights = folder / "start" / "checkpoints" / f"step-{start.train.steps:06d}"
    models, policies, choosing = [], [], []
    asked = content.labelled
    steps = [_labelling(asked, folder, seed, start, weights) for seed in range(count)] if asked is not None else []
    for (section, name), recipe in recipes.items():
        for seed in range(count):
            cell = _cell(folder, name, seed, recipe, weights)
            if section == "reward_models":
                of_steps = content.labelled is not None and _has_no_task(content.reward_models[name])
                if of_steps:
                    cell.recipe.task = cell.recipe.task.model_copy(update={"path": str(steps[seed].target)})
                models.append(Training(cell, ("start", steps[seed].name) if of_steps else ("start",)))
                choosing.append(_choosing(content.best_of_n, folder, cell, weights))
            else:
                (proxy,) = content.reward_models
                run = folder / "cells" / f"{proxy}-seed{seed}"
                cell.recipe.rewards = [RewardWord.model_validate({"name": "reward_model", "run": str(run)})]
                cell = Cell(cell.method, seed, cell.recipe.resolve(), cell.folder)
                policies.append(Training(cell, ("start", run.name)))
    sources = {name: _label(source) for part in _SOURCES for name, source in getattr(content, part).items()}
    return StudyPlan(
        kind=content.study,
        folder=folder,
        description=content.description,
        start=first,
        reward_models=models,
        policies=policies,
        labelling=steps,
        choosing=choosing,
        best_of_n=content.best_of_n,
        num_seeds=count,
        resolved=resolved,
        sources={"start": _label(content.start)} | sources,
    )


def _cell(folder: Path, name: str, seed: int, recipe: Recipe, weights: Path) -> Cell:
    own = recipe.model_copy(deep=True)
    own.model.name = str(weights)
    own.train.seed = seed
    own.description = f"{name} with seed {seed}, a part of the study {folder.name}."
    return Cell(name, seed, own, folder / "cells" / f"{name}-seed{seed}")


def _choosing(asked: BestOfNSection, folder: Path, scorer: Cell, weights: Path) -> Choosing:
    target = folder / "chosen" / scorer.name
    words = [*_sampling_words(asked, weights, scorer.seed, target), "--best-of", str(scorer.folder)]
    name = f"{scorer.name}-best-of-{asked.samples}"
    needs = ("start", scorer.name)
    return Choosing(name=name, method=scorer.method, seed=scorer.seed, folder=target, words=tuple(words), needs=needs)


def _labelling(asked: LabelledSection, folder: Path, seed: int, start: Recipe, weights: Path) -> Labelling:
    target = folder / "labelled" / f"seed{seed}"
    return Labelling(
        name=f"labelled-seed{seed}",
        method="labelled",
        seed=seed,
        folder=target,
        words=tuple(_sampling_words(asked, weights, seed, target)),
        needs=("start",),
        target=target.with_suffix(".jsonl"),
        asked=asked,
        template=start.prompt.template,
    )


def _sampling_words(asked: BestOfNSection | LabelledSection, weights: Path, seed: int, target: Path) -> list[str]:
    words = ["evaluate", str(weights), "--task", asked.task.name]
    for key, value in asked.task.options.items():
        words += [f"--task.{key}", json.dumps(value)]
    words += ["--n", str(asked.n), "--samples", str(asked.samples), "--max-tokens", str(asked.max_tokens)]
    words += ["--temperature", f"{asked.temperature:g}", "--seed", str(seed)]
    return [*words, "--out", str(target), "--quiet"]


def _has_no_task(source: Mapping[str, Any]) -> bool:
    return "task" not in source and "recipe" not in source


def _task_of_steps(path: str) -> dict[str, Any]:
    """Steps as they were cut: each keeps the white space before it, so nothing is put between them."""
    return {"task": {"name": "preferences", "path": path, "step_separator": ""}}


def _without(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != key}


def _label(source: Mapping[str, Any]) -> str:
    name = source.get("recipe", "a recipe of its own")
    return f"{name} with overrides" if len(source) > 1 and "recipe" in source else str(name)
