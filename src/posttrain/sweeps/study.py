"""A study: one start, reward models, policies trained against them, the best of n. What is run, before it is.

The keys of its file are told in docs/studies.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain.errors import DataError, RecipeError
from posttrain.evals.items import Item, read_items
from posttrain.evals.statistics import Summary
from posttrain.evals.tables import NOTHING, TextTable, to_markdown
from posttrain.recipes.document import Document
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RewardWord
from posttrain.store.durable import sayable
from posttrain.sweeps.plan import (
    ITEMS,
    AskedSection,
    Labelling,
    Part,
    Plan,
    Sampling,
    Training,
    plan_run,
    plan_start,
    problems,
)
from posttrain.sweeps.runner import Outcome
from posttrain.sweeps.sources import (
    Recipes,
    Source,
    SweepFile,
    check_task,
    label_of,
    label_of_word,
    read_parts,
    read_source,
    read_sweep_file,
    refusal,
    resolve_file,
)
from posttrain.untrusted import paragraph, plain

Kind = Literal["overoptimization", "best_of_n"]
# Of steps that the study labels, as they were cut: each keeps the white space before it, so nothing is put between.
_TASK_OF_STEPS = {"task": {"name": "preferences", "path": "", "step_separator": ""}}


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
    for name in set(content.reward_models) & set(content.policies):
        says = "a reward model and a policy have the same name; call one of them otherwise"
        raise refusal(document, f"policies.{name}", says)
    start = read_source(document, content.start, "start")
    given = {(group, name): source for group in StudyFile.groups for name, source in getattr(content, group).items()}
    steps = {
        key: {**source, **_TASK_OF_STEPS} if content.learns_steps(key[1]) else source for key, source in given.items()
    }
    recipes = read_parts(document, steps)
    for name in content.policies:
        _check_policy(content, name, recipes["policies", name], document)
    seeds = range(num_seeds if num_seeds is not None else content.seeds)
    sources = {"start": content.start, **{name: source for (_, name), source in given.items()}}
    return StudyPlan(
        folder=Path(folder),
        description=content.description,
        parts=_parts(content, Path(folder), start, recipes, seeds),
        num_seeds=len(seeds),
        resolved=_resolve(content, start, recipes, len(seeds)),
        study=content.study,
        best_of_n=content.best_of_n,
        sources={name: label_of(source) for name, source in sources.items()},
    )


def _check_policy(content: StudyFile, name: str, recipe: Recipe, document: Document[StudyFile]) -> None:
    """Raises RecipeError for a policy that does not sample, or that says what is the study's to say."""

    def refuse(key: str, says: str) -> RecipeError:
        return refusal(document, f"policies.{name}{key}", says)

    if recipe.rollout is None:
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
    resolved = resolve_file(content, start, recipes, num_seeds)
    for name in content.policies:
        del resolved["policies"][name]["rewards"]
    for name in filter(content.learns_steps, content.reward_models):
        del resolved["reward_models"][name]["task"]
    return resolved


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
    needs = ["start"]
    if group == "policies":  # with its own rewards, before it is checked
        (proxy,) = content.reward_models
        needs.append(f"{proxy}-seed{seed}")
        rewarder = {"name": "reward_model", "run": str(folder / "cells" / needs[1])}
        recipe = recipe.model_copy(update={"rewards": [RewardWord.model_validate(rewarder)]})
    run = plan_run(folder, group, method, seed, recipe, "part of the study", needs)
    run.recipe.model.name = start.weights
    if group == "policies":
        return replace(run, recipe=run.recipe.resolve())
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


def collect_study(plan: StudyPlan, outcome: Outcome, command: str) -> StudyResults:
    """Read every finished part.

    Raises:
        RunFailure: too little is finished for a report.
        DataError: a record is damaged.
    """
    from posttrain.sweeps import best_of_n, overoptimization  # they draw on this module

    tell = {"overoptimization": overoptimization.report, "best_of_n": best_of_n.report}[plan.study]
    chosen: dict[str, dict[int, list[Item]]] = {}
    num_asked = 0
    for part in plan.choosing:
        if part.standing == "finished":
            items = read_items(part.folder / ITEMS, plan.best_of_n.samples)
            num_asked = num_asked or len(items)
            if len(items) != num_asked or not any(item.samples for item in items):
                raise DataError(part.folder / ITEMS, "not answers to the problems of this study; delete the folder")
            chosen.setdefault(part.method, {})[part.seed] = items
    about = {"study": plan.study, "sources": plan.sources}
    return tell(plan, chosen, begin_report(plan, outcome, command, describe_common(plan), about))


def begin_report(
    plan: Plan, outcome: Outcome, command: str, common: list[tuple[str, str]], data: dict[str, Any]
) -> StudyReport:
    """What is told of any study or pipeline, before what it has found."""
    return StudyReport(
        title=plan.folder.name,
        description=" ".join(plan.description.split()),
        tables=[],
        findings=[],
        notes=[],
        common=common,
        data=data,
        command=command,
        problems=[f"{name}: {message}" for name, message in problems(plan, outcome.failures).items()],
        environment=plan.environment(),
    )


def describe_common(plan: StudyPlan) -> list[tuple[str, str]]:
    """What was done, as (what, value)."""
    (start,), asked = plan.trainings("start"), plan.best_of_n
    begin = f"{start.recipe.model.name} after {plan.sources['start']}, {start.recipe.train.steps} steps"
    facts = [("start", begin), ("held-out problems", f"{asked.n} of {label_of_word(asked.task)}")]
    how = f"at most {asked.max_tokens} tokens, temperature {asked.temperature:g}"
    facts.append(("best of n", f"{asked.samples} answers to each problem, {how}"))
    for part in (*plan.trainings("reward_models"), *plan.trainings("policies")):
        if part.seed == 0:
            facts.append((part.method, describe_training(part.recipe)))
    facts.append(("seeds", ", ".join(str(seed) for seed in range(plan.num_seeds))))
    return facts


def describe_training(recipe: Recipe) -> str:
    """How a part is trained: objective, steps, rate, and what it learns from."""
    train = recipe.train
    told = f"{recipe.objective.name}, {train.steps} steps at {train.lr:g}"
    if recipe.rollout is not None:
        updates = train.epochs * train.minibatches
        batches = max(1, -(-(train.steps or 0) // updates))
        each = f"{recipe.rollout.prompts} prompts × {recipe.rollout.group} answers"
        return f"{told}; {each}" + (f", {batches} times" if batches > 1 else ", drawn once from the start")
    assert recipe.data is not None
    return f"{told}, {recipe.data.batch} rows each, of {label_of_word(recipe.task)}"


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
