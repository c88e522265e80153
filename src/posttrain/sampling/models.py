"""Models by name, opened with a template, a grader and an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain import registry
from posttrain.data.render.template import build_template
from posttrain.errors import UsageError
from posttrain.models.config import context_length
from posttrain.models.load import QUANTIZED_FOLDERS, load_model, load_tokenizer
from posttrain.models.sources import EMBEDDED, resolve_model_name
from posttrain.option_types import Dtype
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Component, ModelSection, RewardComponent
from posttrain.sampling.base import Engine
from posttrain.sampling.rollout import Grader, Sampler, build_grader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_MAX_TOKENS = 256
DEFAULT_TEMPLATE = Component(name="r1_zero")
CHAT = Component(name="chat")
# Of embedded models: a base model, which no chat has trained, and one that learned a format.
EMBEDDED_TEMPLATES = {
    EMBEDDED["tiny"]: DEFAULT_TEMPLATE,
    EMBEDDED["tiny-sft"]: Component.model_validate({"name": "r1_zero", "preamble": ""}),
}
NATIVE = Component(name="native")

Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class ModelSource:
    """A model by name (``runs.models.find_source``).

    ``label`` is its name in tables, ``path`` is loaded. ``run`` and ``recipe`` are there for a run or a checkpoint.
    """

    name: str
    label: str
    path: str
    run: Path | None = None
    recipe: Recipe | None = None

    @property
    def task(self) -> Component | None:
        """The task that it was trained on; None of a model that is no run."""
        if self.recipe is None:
            return None
        return self.recipe.task

    @cached_property
    def template(self) -> Component:
        """The template of its training, else the chat template of its tokenizer, else ``r1_zero``.

        Raises:
            UsageError: there is no such model, or its tokenizer cannot be loaded.
        """
        if self.recipe is not None:
            return self.recipe.prompt.template
        embedded = EMBEDDED_TEMPLATES.get(Path(resolve_model_name(self.path)))
        if embedded is not None:
            return embedded
        if self.tokenizer.chat_template:
            return CHAT
        return DEFAULT_TEMPLATE

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Its tokenizer, which takes as long to load as a small model's weights.

        Raises:
            UsageError: there is no such model, or its tokenizer cannot be loaded.
        """
        return load_tokenizer(self.path, trust_remote_code=self.section().runs_remote_code)

    def describe_template(self, template: Component | None = None) -> str | None:
        """Return one line about the template of a model that no run here trained.

        None if the user chose the template, or a run did.
        """
        if template is not None or self.recipe is not None:
            return None
        if self.template == CHAT:
            reason = "its tokenizer has this chat template"
        elif self.name in EMBEDDED:
            return None
        else:
            reason = "no run says how it was trained, and its tokenizer has no chat template"
        return f"{self.label}: prompt template {self.template.name} ({reason}); --template NAME takes another"

    @property
    def max_tokens(self) -> int:
        """The limit of its answers in its run."""
        if self.recipe is None:
            return DEFAULT_MAX_TOKENS
        trained = None
        if self.recipe.rollout is not None:
            trained = self.recipe.rollout.max_tokens
        return self.recipe.eval.max_tokens or trained or DEFAULT_MAX_TOKENS

    @property
    def is_scorer(self) -> bool:
        """True if its run trained a reward model, and not a policy."""
        return self.recipe is not None and self.recipe.trains_scorer

    def section(self, dtype: Dtype | None = None, device: Device | None = None) -> ModelSection:
        """Return the options of loading: those of its run, changed by those given here."""
        options: dict[str, Any] = {}
        if self.recipe is not None:
            options = {key: getattr(self.recipe.model, key) for key in ("dtype", "device", "trust_remote_code")}
        if dtype is not None:
            options["dtype"] = dtype
        if device is not None:
            options["device"] = device
        return ModelSection(name=self.path, **options)

    def refuse_scorer(self) -> None:
        """Raise ``UsageError`` if the run trained a reward model."""
        if self.recipe is not None and self.is_scorer:
            raise UsageError(
                f"{self.name}: this run trained a reward model ({self.recipe.objective.name}); it scores answers and "
                f"writes none. Measure it with: posttrain evaluate {self.name}"
            )


def plays(source: ModelSource, template: Component | None) -> bool:
    """Return True if an environment answers the model's turns: its run's, under its own template."""
    recipe = source.recipe
    if recipe is None or recipe.rollout is None:
        return False
    if recipe.environment is None and not recipe.tools:
        return False
    return template is None or template.name == source.template.name


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint of a path: itself, or the folder of a quantized copy."""
    if path.name in QUANTIZED_FOLDERS.values():
        return path.parent
    return path


@dataclass(frozen=True)
class OpenedModel(Sampler):
    """A loaded model. ``model`` is None where the engine samples in another process."""

    source: ModelSource
    model: Any

    @property
    def label(self) -> str:
        return self.source.label

    def on_stage(self, template: Component | None) -> OpenedModel:
        """Return the model under a template (None: its own, with its run's rewards), and with its run's environment and
        tools where it has any and keeps its template.

        Raises:
            UnallowedCode: they are code that the run's recipe names, and nobody allowed it.
            UsageError: they cannot be used here.
        """
        plain = replace(self, grader=grader_for(self.source, template), stage=None)
        recipe = self.source.recipe
        if recipe is None or not plays(self.source, template):
            return plain
        from posttrain.sampling.episodes import build_stage

        stage = build_stage(recipe, plain.grader.template, self.tokenizer)
        assert stage is not None, "it plays"
        grader = replace(plain.grader, template=stage.template)
        return replace(plain, grader=grader, stage=stage)


def open_model(
    source: ModelSource,
    template: Component | None = None,
    *,
    engine: Component = NATIVE,
    dtype: Dtype | None = None,
    device: Device | None = None,
) -> OpenedModel:
    """Load a model with the template of its training (``template`` None), or another.

    For an engine that samples elsewhere the tokenizer alone is loaded, and its option ``checkpoint`` names the model.

    Raises:
        UsageError: no such model, one that cannot be loaded, or a reward model.
    """
    source.refuse_scorer()
    section = source.section(dtype, device)
    grader = grader_for(source, template)
    entry = registry.find("engine", engine.name, "--engine")
    options = dict(engine.options)
    if "checkpoint" in entry.options_model.model_fields:
        options.setdefault("checkpoint", resolve_model_name(source.path))
    make = entry.bind(options, "--engine")
    model = None
    if entry.traits.get("needs_model", True):
        already = vars(source).get("tokenizer")  # if its template was read from it
        loaded = load_model(section, seed=0, tokenizer=already)
        model = loaded.model
        tokenizer = loaded.tokenizer
    else:
        tokenizer = load_tokenizer(source.path, trust_remote_code=section.runs_remote_code)
    built = registry.construct("--engine", make, Engine, model, tokenizer)  # type: ignore[type-abstract]
    built.uses_cache = True
    if model is None:
        context_tokens = built.context_tokens
    else:
        context_tokens = context_length(model.config)
    return OpenedModel(built, tokenizer, grader, context_tokens, source, model)


def grader_for(source: ModelSource, template: Component | None) -> Grader:
    """Return the grader under a template, with the run's rewards if it is the run's own.

    Rewards that are models are left out (a policy can be asked where its judge is gone), and so is code that a stored
    recipe names and that is not allowed (see ``check_rewards``).
    """
    component = template or source.template
    rewards = [RewardComponent(name="correct")]
    if source.recipe is not None and component.name == source.template.name:
        rewards = source.recipe.rewards
    plain = []
    for reward in rewards:
        traits = registry.traits_of("reward", reward.name)
        if traits is not None and not traits.get("asks_a_model"):
            plain.append(reward)
    return build_grader(plain, build_template(component, "template"))


def check_rewards(source: ModelSource, template: Component | None) -> None:
    """Refuse to measure a run's rewards without one of them.

    Raises:
        UnallowedCode: one is code that the run's recipe names, and it is not allowed.
    """
    if source.recipe is None:
        return
    if template is None or template.name == source.template.name:
        for index, reward in enumerate(source.recipe.rewards):
            if not registry.is_lost(reward.name):  # that of a notebook, which nobody can import
                registry.find("reward", reward.name, f"rewards.{index}")


def complete_template(template: Component | None, source: ModelSource) -> Component | None:
    """Add options (``--template.preamble``) to the model's own template, if that or no other is named."""
    if template is None:
        return None
    if template.name and source.recipe is None and source.name not in EMBEDDED:
        return template
    own = source.template
    if template.name not in ("", own.name):
        return template
    return Component(name=own.name, **(own.options | template.options))
