"""A pipeline: demonstrations, reward models, policies, contests. What is run, before it is.

The keys of its file are told in docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from posttrain.errors import RecipeError
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RewardWord
from posttrain.sweeps.plan import AskedSection, Part, Plan, Sampling, Training, plan_run, plan_start
from posttrain.sweeps.sources import (
    Recipes,
    Source,
    SweepFile,
    check_task,
    choose_names,
    label_of,
    read_parts,
    read_source,
    read_sweep_file,
    resolve_file,
)

# What a policy is rewarded by where its recipe names no reward model.
_WHOLE_REWARD: dict[str, Any] = {"name": "reward_model", "run": ""}


class PipelineFile(SweepFile):
    """The keys of a pipeline file."""

    label = "a pipeline"
    shelf = "pipeline/"
    singles = ("start",)
    groups: ClassVar[Mapping[str, str]] = {"reward_models": "reward model", "policies": "policy"}

    start: Source
    reward_models: Annotated[dict[str, Source], Field(min_length=2)]
    optimize: str
    judge: str
    policies: Annotated[dict[str, Source], Field(min_length=1)]
    evaluate: AskedSection

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for key in ("optimize", "judge"):
            if (name := getattr(self, key)) not in self.reward_models:
                raise ValueError(f"{key}: {name!r} is none of the reward models: {', '.join(self.reward_models)}")
        if self.optimize == self.judge:
            raise ValueError("the judge must be another reward model than the one that policies are rewarded by")
        shared = {"start", *self.reward_models} & set(self.policies)
        if shared:
            raise ValueError(f"{', '.join(sorted(shared))}: a policy needs a name of its own")
        return self

    @classmethod
    def check_kind(cls, data: Mapping[str, Any], place: str) -> None:
        if "judge" in data and "policies" in data:
            return
        others = {"study": "study", "methods": "compare", "objective": "train"}
        command = next((f"; run it with: posttrain {name}" for key, name in others.items() if key in data), "")
        raise RecipeError(f"{place}: this is no pipeline (it has no keys 'judge' and 'policies'){command}")


@dataclass(frozen=True, kw_only=True)
class PipelinePlan(Plan):
    """A checked pipeline. ``sources``: by name, where the start, the reward models and the policies are from."""

    what = "pipeline"
    file_name = "pipeline.yaml"
    verb = "Run"
    parts_are = "parts"
    is_even = False

    optimize: str
    judge: str
    evaluate: AskedSection
    sources: dict[str, str]

    @property
    def contests(self) -> list[Sampling]:
        """Where a policy meets the start, seed by seed."""
        return [part for part in self.parts if isinstance(part, Sampling)]


def load_pipeline(
    name_or_path: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    folder: str | Path,
    methods: Sequence[str] | None = None,
    num_seeds: int | None = None,
) -> PipelinePlan:
    """Read a pipeline file and check every part.

    Args:
        name_or_path: a file, or a shipped one with or without ``pipeline/``.
        overrides: dotted keys with values: ``policies.grpo.train.steps``, ``evaluate.n``.
        folder: the pipeline's directory; nothing is written here.
        methods: names of the policies wanted; by default (or ``["all"]``) all.
        num_seeds: instead of the file's.

    Raises:
        RecipeError, UnknownWord: with file, line, part and key.
        UsageError: an override or a policy of something that the file does not have.
    """
    content, document = read_sweep_file(PipelineFile, name_or_path, overrides)
    check_task(document, "evaluate", content.evaluate.task)
    wanted = None if methods is None or list(methods) == ["all"] else methods
    names = choose_names(list(content.policies), wanted, document.place, "policy")
    start = read_source(document, content.start, "start")
    chosen = {name: content.policies[name] for name in names}
    groups = {"reward_models": content.reward_models, "policies": chosen}
    recipes = read_parts(document, {(group, name): own[name] for group, own in groups.items() for name in own})
    seeds = range(num_seeds if num_seeds is not None else content.seeds)
    sources = {"start": content.start, **content.reward_models, **chosen}
    return PipelinePlan(
        folder=Path(folder),
        description=content.description,
        parts=_parts(content, Path(folder), start, recipes, seeds),
        num_seeds=len(seeds),
        resolved=resolve_file(content, start, recipes, len(seeds)),
        optimize=content.optimize,
        judge=content.judge,
        evaluate=content.evaluate,
        sources={name: label_of(source) for name, source in sources.items()},
    )


def _parts(content: PipelineFile, folder: Path, recipe: Recipe, recipes: Recipes, seeds: Sequence[int]) -> list[Part]:
    """The start, then seed by seed, so that a pipeline that is stopped has finished seeds to tell of."""
    start = plan_start(folder, recipe, alone=False)
    parts: list[Part] = [start]
    for seed in seeds:
        trained: dict[str, Training] = {}
        for (group, name), own in recipes.items():
            recipe, needs = own, ["start"]
            if group != "reward_models" and own.rollout is not None:  # the proxy rewards a policy that samples
                proxy = trained[content.optimize]
                recipe, needs = _rewarded(own, proxy), ["start", proxy.name]
            run = plan_run(folder, group, name, seed, recipe, "part of the pipeline", needs)
            run.recipe.model.name = start.weights
            trained[name] = run if group == "reward_models" else replace(run, recipe=run.recipe.resolve())
        judges = [trained[content.judge], trained[content.optimize]]
        policies = [run for run in trained.values() if run.group == "policies"]
        parts += [*trained.values(), *(_contest(content.evaluate, start, own, judges) for own in policies)]
    return parts


def _rewarded(recipe: Recipe, proxy: Training) -> Recipe:
    """A policy's recipe with the rewards of the proxy."""
    recipe, words = recipe.model_copy(deep=True), recipe.rewards
    if not any(word.name == "reward_model" for word in words):
        words = [RewardWord.model_validate(_WHOLE_REWARD)]
    recipe.rewards = [
        RewardWord.model_validate(word.model_dump() | {"run": str(proxy.folder)})
        if word.name == "reward_model"
        else word
        for word in words
    ]
    return recipe


def _contest(asked: AskedSection, start: Training, policy: Training, judges: Sequence[Training]) -> Sampling:
    """A policy against the start; the first of ``judges`` says who wins."""
    folder = start.folder.parent / "contests" / policy.name
    words = ["evaluate", policy.weights, "--against", start.weights, *asked.task_words]
    words += ["--judge", ",".join(str(judge.folder) for judge in judges), *asked.drawing_words]
    words += ["--seed", str(policy.seed), "--out", str(folder), "--quiet"]
    return Sampling(
        name=f"{policy.name}-contest",
        group="evaluate",
        method=policy.method,
        seed=policy.seed,
        folder=folder,
        needs=("start", policy.name, *(judge.name for judge in judges)),
        command=tuple(words),
    )
