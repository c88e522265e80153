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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain.errors import RecipeError
from posttrain.evals.statistics import Summary
from posttrain.evals.tables import NOTHING, TextTable, to_markdown
from posttrain.recipes.document import Document
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RewardWord
from posttrain.store.durable import sayable
from posttrain.sweeps.plan import AskedSection, Labelling, Part, Plan, Sampling, Training, plan_run, plan_start
from posttrain.sweeps.sources import Source, SweepFile, check_task, label_of, read_source, read_sweep_file
from posttrain.untrusted import paragraph, plain

Kind = Literal["overoptimization", "best_of_n"]
# Of steps that the study labels, as they were cut: each keeps the white space before it, so nothing is put between.
_TASK_OF_STEPS = {"task": {"name": "preferences", "path": "", "step_separator": ""}}
# Recipes by (key of the file, name), reward models first.
Recipes = Mapping[tuple[str, str], Recipe]


class BestOfNSection(AskedSection):
    """What the start is asked, and how many answers it gives to each problem."""

    samples: int = Field(default=64, ge=2)


class LabelledSection(BestOfNSection):
    """The problems whose answers become labelled steps, and how many answers each gets from the start."""

    n: int = Field(default=256, ge=1)
    samples: int = Field(default=8, ge=2)


class StudyFile(SweepFile):
    """The keys of a study file."""

    label = "a study"
    shelf = "study/"
    singles = ("start",)
    groups: ClassVar[Mapping[str, str]] = {"reward_models": "reward model", "policies": "policy"}

    study: Kind
    start: Source
    reward_models: Annotated[dict[str, Source], Field(min_length=1)]
    policies: dict[str, Source] = Field(default_factory=dict)
    labelled: LabelledSection | None = None
    best_of_n: BestOfNSection

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.study == "overoptimization" and len(self.reward_models) != 1:
            raise ValueError("an overoptimization study has one reward model, the proxy that everything is up against")
        if self.study == "best_of_n" and self.policies:
            raise ValueError("a best_of_n study trains no policies; leave 'policies' out")
        return self

    @classmethod
    def check_kind(cls, data: Mapping[str, Any], place: str) -> None:
        if "study" not in data:
            command = "posttrain compare" if "methods" in data else "posttrain train"
            raise RecipeError(f"{place}: this is no study (it has no key 'study'); run it with: {command}")

    def learns_steps(self, name: str) -> bool:
        """Whether a reward model learns from steps that the study labels."""
        source = self.reward_models.get(name, {"task": None})
        return self.labelled is not None and "task" not in source and "recipe" not in source


@dataclass(frozen=True, kw_only=True)
class StudyPlan(Plan):
    """A checked study. ``sources``: by name, where the start, the reward models and the policies are from."""

    what = "study"
    file_name = "study.yaml"
    verb = "Study"
    parts_are = "parts"
    is_even = False

    study: Kind
    best_of_n: BestOfNSection
    sources: dict[str, str]

    @property
    def choosing(self) -> list[Sampling]:
        """Where a reward model chooses among answers of the start, seed by seed."""
        return [part for part in self.parts if isinstance(part, Sampling) and part.group == "best_of_n"]


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
        UsageError: an override of a part that the study does not have.
    """
    content, document = read_sweep_file(StudyFile, name_or_path, overrides)
    for section in ("best_of_n", "labelled"):
        if (asked := getattr(content, section)) is not None:
            check_task(document, section, asked.task)
    shared = set(content.reward_models) & set(content.policies)
    if shared:
        name = min(shared)
        where = f"{document.line_of(f'policies.{name}')}policies.{name}"
        raise RecipeError(f"{where}: a reward model and a policy have the same name; call one of them otherwise")
    start = read_source(document, content.start, "start")
    recipes = {}
    for section in StudyFile.groups:
        for name, source in getattr(content, section).items():
            task = _TASK_OF_STEPS if content.learns_steps(name) else {}
            recipes[section, name] = recipe = read_source(document, {**source, **task}, f"{section}.{name}")
            _check_part(content, section, name, recipe, document)
    seeds = range(num_seeds if num_seeds is not None else content.seeds)
    sources = {name: getattr(content, section)[name] for section, name in recipes}
    return StudyPlan(
        folder=Path(folder),
        description=content.description,
        parts=_parts(content, Path(folder), start, recipes, seeds),
        num_seeds=len(seeds),
        resolved=_resolve(content, start, recipes, len(seeds)),
        study=content.study,
        best_of_n=content.best_of_n,
        sources={name: label_of(source) for name, source in {"start": content.start, **sources}.items()},
    )


def _check_part(content: StudyFile, section: str, name: str, recipe: Recipe, document: Document[StudyFile]) -> None:
    """Raises RecipeError for a part that is of the wrong kind, or that says what is the study's to say."""

    def refuse(key: str, says: str) -> RecipeError:
        where = f"{section}.{name}{key}"
        return RecipeError(f"{document.line_of(where)}{where}: {says}")

    scores = recipe.trains_scorer
    if recipe.model.init is not None:
        raise refuse(".model.init", "it begins with the weights of the study's start; leave this out")
    if section == "reward_models":
        if not scores:
            objective = recipe.objective.name
            raise refuse("", f"objective {objective!r} trains no reward model; use bradley_terry, outcome or process")
        return
    if scores or recipe.rollout is None:
        raise refuse("", "a policy learns from answers that it samples; give a recipe with 'rollout'")
    if "rewards" in content.policies[name]:
        raise refuse(".rewards", "the reward of a policy is the study's reward model; leave this out")
    if not recipe.eval.every or not recipe.eval.drift_prompts:
        raise refuse(".eval", "give every and drift_prompts; there gold, proxy and KL are measured along the way")
    drawn, asked = recipe.rollout.temperature, content.best_of_n.temperature
    if drawn != asked:
        raise refuse(
            ".rollout.temperature",
            f"{drawn} here and {asked} in best_of_n; KL is told from one and the same distribution, so give both the "
            "same",
        )


def _resolve(content: StudyFile, start: Recipe, recipes: Recipes, num_seeds: int) -> dict[str, Any]:
    """The file with everything resolved, but for what is not the file's to say: what the study gives to its parts."""
    resolved: dict[str, Any] = {"study": content.study}
    resolved |= {"description": content.description} if content.description else {}
    resolved |= {"start": start.dump()}
    for (section, name), recipe in recipes.items():
        data = recipe.dump()
        if section == "policies":
            del data["rewards"]
        elif content.learns_steps(name):
            del data["task"]
        resolved.setdefault(section, {})[name] = data
    if content.labelled is not None:
        resolved["labelled"] = content.labelled.model_dump(mode="json")
    return resolved | {"best_of_n": content.best_of_n.model_dump(mode="json"), "seeds": num_seeds}


def _parts(content: StudyFile, folder: Path, recipe: Recipe, recipes: Recipes, seeds: Sequence[int]) -> list[Part]:
    """The start, then seed by seed, so that a study that is stopped has finished seeds to tell of."""
    start = plan_start(folder, recipe, alone=False)
    parts: list[Part] = [start]
    for seed in seeds:
        labelling = _labelling(content.labelled, start, seed) if content.labelled is not None else None
        trainings = [_training(content, start, labelling, key, seed, recipes[key]) for key in recipes]
        scorers = [part for part in trainings if part.group == "reward_models"]
        parts += [labelling] if labelling is not None else []
        parts += [*trainings, *(_choosing(content.best_of_n, start, scorer) for scorer in scorers)]
    return parts


def _training(
    content: StudyFile, start: Training, labelling: Labelling | None, key: tuple[str, str], seed: int, recipe: Recipe
) -> Training:
    group, method = key
    folder = start.folder.parent
    run = plan_run(folder, group, method, seed, recipe, "part of the study", ["start"])
    run.recipe.model.name = start.weights
    if group == "policies":
        (proxy,) = content.reward_models
        needed = f"{proxy}-seed{seed}"
        rewarder = {"name": "reward_model", "run": str(folder / "cells" / needed)}
        run.recipe.rewards = [RewardWord.model_validate(rewarder)]
        return replace(run, recipe=run.recipe.resolve(), needs=("start", needed))
    if labelling is not None and content.learns_steps(method):
        run.recipe.task = run.recipe.task.model_copy(update={"path": str(labelling.target)})
        return replace(run, needs=("start", labelling.name))
    return run


def _choosing(asked: BestOfNSection, start: Training, scorer: Training) -> Sampling:
    folder = start.folder.parent / "chosen" / scorer.name
    return Sampling(
        name=f"{scorer.name}-best-of-{asked.samples}",
        group="best_of_n",
        method=scorer.method,
        seed=scorer.seed,
        folder=folder,
        needs=("start", scorer.name),
        command=(*_sampling_words(asked, start, scorer.seed, folder), "--best-of", str(scorer.folder)),
    )


def _labelling(asked: LabelledSection, start: Training, seed: int) -> Labelling:
    folder = start.folder.parent / "labelled" / f"seed{seed}"
    return Labelling(
        name=f"labelled-seed{seed}",
        group="labelled",
        method="labelled",
        seed=seed,
        folder=folder,
        needs=("start",),
        command=_sampling_words(asked, start, seed, folder),
        target=folder.with_suffix(".jsonl"),
        task=asked.task,
        n=asked.n,
        template=start.recipe.prompt.template,
    )


def _sampling_words(asked: BestOfNSection, start: Training, seed: int, target: Path) -> tuple[str, ...]:
    words = ["evaluate", start.weights, *asked.task_words, *asked.drawing_words]
    return (*words, "--seed", str(seed), "--out", str(target), "--quiet")


# What a study has found, as data: tables, sentences, notes and facts, whatever its kind.


@dataclass(frozen=True)
class Answer:
    """What one model answered, and its score, if it has one."""

    who: str
    text: str
    score: float | None


@dataclass(frozen=True)
class Answers:
    """A prompt with the answers of several models; ``gold``: the right one, where there is one."""

    question: str
    answers: list[Answer]
    gold: str | None = None


@dataclass(frozen=True)
class StudyReport:
    """All that is told about a study, or a pipeline.

    ``findings``: what the numbers say, a sentence each. ``notes``: what must be known to read them.
    ``common``: (what, value). ``data``: everything as plain data, for ``results.json``. ``samples``: answers side by
    side, for the page.
    """

    title: str
    description: str
    tables: list[TextTable]
    findings: list[str]
    notes: list[str]
    common: list[tuple[str, str]]
    data: dict[str, Any]
    command: str
    problems: list[str] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    samples: list[Answers] = field(default_factory=list)


@dataclass(frozen=True)
class StudyResults:
    """The report of a study or pipeline, and what its picture shows, as its kind's drawing takes it."""

    kind: Kind | Literal["pipeline"]
    report: StudyReport
    shown: tuple[Any, ...]


def show_summary(summary: Summary | None, *, is_share: bool = False, digits: int = 2) -> str:
    """``0.61 ± 0.12``, or ``61.2 % ± 12.0`` of a share; without interval for one seed."""
    if summary is None:
        return NOTHING
    scale, places = (100.0, 1) if is_share else (1.0, digits)
    unit = " %" if is_share else ""
    mean = f"{summary.mean * scale:.{places}f}"
    return mean + (f" ± {summary.half_width * scale:.{places}f}" if summary.half_width is not None else "") + unit


def to_page(report: StudyReport) -> str:
    """``table.md``."""
    parts = [f"# {plain(report.title)}\n"]
    parts += [f"{paragraph(report.description)}\n"] if report.description else []
    parts += ["\n".join(f"- {plain(line)}" for line in (*report.problems, *report.findings)) + "\n"]
    parts += [to_markdown(table) for table in report.tables]
    parts += ["\n".join(f"- {plain(note)}" for note in report.notes) + "\n"] if report.notes else []
    parts += ["\n".join(f"- {what}: {plain(value)}" for what, value in report.common) + "\n"]
    parts += [f"```bash\n{report.command}\n```\n"]
    return "\n".join(parts)


def to_json(report: StudyReport) -> str:
    """``results.json``; a number that is not finite is null."""
    content = {name: value for name, value in vars(report).items() if name not in ("tables", "data", "samples")}
    return json.dumps(sayable(content | {"common": dict(report.common)} | report.data), indent=1, allow_nan=False)
