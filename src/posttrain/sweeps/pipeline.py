"""A pipeline: demonstrations, reward models, policies, contests. What is run, before it is.

A pipeline file is YAML::

    description: what it is about
    start: sft-hh-gpt2           # trained once; everything else begins with its final weights
    reward_models:               # trained once per seed
      proxy: rm-hh-gpt2
      judge: {recipe: rm-hh-gpt2, task: {half: second}}
    optimize: proxy              # what policies are rewarded by
    judge: judge                 # what says who wins; no policy has been trained against it
    policies:                    # trained once per seed
      grpo: grpo-hh-gpt2         # samples, and is rewarded by the proxy of its seed
      dpo: {recipe: grpo-hh-gpt2, objective: dpo, ...}
      dpo-files: dpo-hh-gpt2     # learns from the data themselves
    evaluate: {task: {name: hh_rlhf, split: test}, n: 256, max_tokens: 128}
    seeds: 3

A source (``start``, a reward model, a policy) is the name of a recipe, ``{recipe: name, ...overrides}`` or a recipe
written out, as in a compare file. ``model.name`` of all but the start is set to the start's weights, and
``train.seed`` to the seed. A policy that samples is rewarded by the proxy of its seed: its words ``reward_model`` are
given that run; where it has none, the proxy's score is its whole reward.

In the end each policy meets the start on the prompts of ``evaluate`` (``posttrain evaluate POLICY --against START``):
both judges score the same answers, and the KL is measured. Every part is an ordinary run under ``cells/`` (or
``start``), or an ordinary evaluation under ``contests/``. Unknown keys are refused with a suggestion and the line.
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
from posttrain.sweeps.sources import Source, SweepFile, check_task, choose_names, label_of, read_source, read_sweep_file

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
    recipes = {
        name: read_source(document, source, f"reward_models.{name}") for name, source in content.reward_models.items()
    }
    for name, recipe in recipes.items():
        if not recipe.trains_scorer:
            raise RecipeError(
                f"{document.line_of(f'reward_models.{name}')}reward_models.{name}: objective {recipe.objective.name!r} "
                "trains no reward model; use bradley_terry, outcome or process"
            )
    policies = {name: read_source(document, content.policies[name], f"policies.{name}") for name in names}
    for name, recipe in (recipes | policies).items():
        group = "policies" if name in policies else "reward_models"
        where = f"{document.line_of(f'{group}.{name}')}{group}.{name}"
        if recipe.model.init is not None:
            raise RecipeError(f"{where}.model.init: it begins with the weights of the start; leave this out")
        if name in policies and recipe.trains_scorer:
            raise RecipeError(f"{where}: objective {recipe.objective.name!r} trains a reward model, not a policy")
    seeds = range(num_seeds if num_seeds is not None else content.seeds)
    sources = {"start": content.start, **content.reward_models, **{name: content.policies[name] for name in names}}
    return PipelinePlan(
        folder=Path(folder),
        description=content.description,
        parts=_parts(content, Path(folder), start, recipes, policies, seeds),
        num_seeds=len(seeds),
        resolved=_resolve(content, start, recipes, policies, len(seeds)),
        optimize=content.optimize,
        judge=content.judge,
        evaluate=content.evaluate,
        sources={name: label_of(source) for name, source in sources.items()},
    )


def _resolve(
    content: PipelineFile,
    start: Recipe,
    reward_models: Mapping[str, Recipe],
    policies: Mapping[str, Recipe],
    num_seeds: int,
) -> dict[str, Any]:
    about = {"description": content.description} if content.description else {}
    return {
        **about,
        "start": start.dump(),
        "reward_models": {name: recipe.dump() for name, recipe in reward_models.items()},
        "optimize": content.optimize,
        "judge": content.judge,
        "policies": {name: recipe.dump() for name, recipe in policies.items()},
        "evaluate": content.evaluate.model_dump(mode="json"),
        "seeds": num_seeds,
    }


def _parts(
    content: PipelineFile,
    folder: Path,
    recipe: Recipe,
    reward_models: Mapping[str, Recipe],
    policies: Mapping[str, Recipe],
    seeds: Sequence[int],
) -> list[Part]:
    """The start, then seed by seed, so that a pipeline that is stopped has finished seeds to tell of."""
    start = plan_start(folder, recipe, alone=False)
    parts: list[Part] = [start]
    for seed in seeds:
        scorers = {}
        for name, own in reward_models.items():
            run = plan_run(folder, "reward_models", name, seed, own, "part of the pipeline", ["start"])
            run.recipe.model.name = start.weights
            scorers[name] = run
        trained = [_policy(start, scorers[content.optimize], name, seed, own) for name, own in policies.items()]
        judges = [scorers[content.judge], scorers[content.optimize]]
        parts += [*scorers.values(), *trained, *(_contest(content.evaluate, start, own, judges) for own in trained)]
    return parts


def _policy(start: Training, proxy: Training, name: str, seed: int, recipe: Recipe) -> Training:
    run = plan_run(start.folder.parent, "policies", name, seed, recipe, "part of the pipeline", ["start"])
    run.recipe.model.name = start.weights
    if recipe.rollout is None:
        return replace(run, recipe=run.recipe.resolve())
    words = run.recipe.rewards
    if not any(word.name == "reward_model" for word in words):
        words = [RewardWord.model_validate(_WHOLE_REWARD)]
    run.recipe.rewards = [
        RewardWord.model_validate(word.model_dump() | {"run": str(proxy.folder)})
        if word.name == "reward_model"
        else word
        for word in words
    ]
    return replace(run, recipe=run.recipe.resolve(), needs=("start", proxy.name))


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
