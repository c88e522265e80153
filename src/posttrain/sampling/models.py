"""Open models by name, with template, grader and engine."""

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
# Templates for embedded models: a base model without chat training, and a model trained on one format.
EMBEDDED_TEMPLATES = {
    EMBEDDED["tiny"]: DEFAULT_TEMPLATE,
    EMBEDDED["tiny-sft"]: Component.model_validate({"name": "r1_zero", "preamble": ""}),
}
NATIVE = Component(name="native")

Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class ModelSource:
    """Model resolved by name (``runs.models.find_source``).

    ``label`` is shown in tables, and ``path`` is loaded. ``run`` and ``recipe`` are set only for runs and checkpoints.
    """

    name: str
    label: str
    path: str
    run: Path | None = None
    recipe: Recipe | None = None

    @property
    def task(self) -> Component | None:
        """Training task; None unless trained in a run."""
        if self.recipe is None:
            return None
        return self.recipe.task

    @cached_property
    def template(self) -> Component:
        """Training template, else ``chat`` if the tokenizer has a chat template, else ``r1_zero``. Embedded models
        have fixed ones.

        Raises:
            UsageError: unknown model, or its tokenizer cannot be loaded.
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
        """Tokenizer, loaded once since loading takes as long as a small model's weights.

        Raises:
            UsageError: unknown model, or its tokenizer cannot be loaded.
        """
        return load_tokenizer(self.path, trust_remote_code=self.section().runs_remote_code)

    def describe_template(self, template: Component | None = None) -> str | None:
        """Describe an automatically chosen template in one line.

        None if the template was set by the user or a run, and for embedded models.
        """
        if template is not None or self.recipe is not None:
            return None
        if self.template == CHAT:
            reason = "from the tokenizer's chat template"
        elif self.name in EMBEDDED:
            return None
        else:
            reason = "not trained in a run here, and without a chat template"
        return f"{self.label}: prompt template {self.template.name} ({reason}); --template NAME takes another"

    def keeps(self, template: Component | None) -> bool:
        """Check if a template (None: the model's) is the one that the model was trained with."""
        return template is None or template.name == self.template.name

    @property
    def max_tokens(self) -> int:
        """Answer length limit from the recipe, or ``DEFAULT_MAX_TOKENS``."""
        if self.recipe is None:
            return DEFAULT_MAX_TOKENS
        trained = None
        if self.recipe.rollout is not None:
            trained = self.recipe.rollout.max_tokens
        return self.recipe.eval.max_tokens or trained or DEFAULT_MAX_TOKENS

    @property
    def is_scorer(self) -> bool:
        """True if a reward model was trained instead of a policy."""
        return self.recipe is not None and self.recipe.trains_scorer

    def section(self, dtype: Dtype | None = None, device: Device | None = None) -> ModelSection:
        """Build loading options from the recipe, overridden by these arguments."""
        options: dict[str, Any] = {}
        if self.recipe is not None:
            options = {key: getattr(self.recipe.model, key) for key in ("dtype", "device", "trust_remote_code")}
        if dtype is not None:
            options["dtype"] = dtype
        if device is not None:
            options["device"] = device
        return ModelSection(name=self.path, **options)

    def refuse_scorer(self) -> None:
        """Raise ``UsageError`` for reward models."""
        if self.recipe is not None and self.is_scorer:
            raise UsageError(
                f"{self.name}: this run trained a reward model ({self.recipe.objective.name}); it scores answers and "
                f"writes none. Measure it with: posttrain evaluate {self.name}"
            )


def plays(source: ModelSource, template: Component | None) -> bool:
    """Check if a run's environment or tools can be used with this template."""
    recipe = source.recipe
    if recipe is None or recipe.rollout is None:
        return False
    if recipe.environment is None and not recipe.tools:
        return False
    return source.keeps(template)


def checkpoint_of(path: Path) -> Path:
    """Resolve a quantized copy to its checkpoint; other paths are unchanged."""
    if path.name in QUANTIZED_FOLDERS.values():
        return path.parent
    return path


@dataclass(frozen=True)
class OpenedModel(Sampler):
    """Loaded model. ``model`` is None if the engine samples in another process."""

    source: ModelSource
    model: Any

    @property
    def label(self) -> str:
        return self.source.label

    def on_stage(self, template: Component | None) -> OpenedModel:
        """Apply a template, with the run's environment and tools if they exist and the template is unchanged.

        ``template`` None selects the training template and rewards.

        Raises:
            UnallowedCode: the run's recipe names code that was not allowed.
            UsageError: environment or tools cannot be used here.
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
    """Load a model with ``template``, or its training template if None.

    If the engine samples elsewhere, only the tokenizer is loaded, and option ``checkpoint`` names the model.

    Raises:
        UsageError: unknown model, loading failed, or a reward model.
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
        already = vars(source).get("tokenizer")  # already loaded if the template required it
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
    """Build a grader for a template, using the run's rewards if the template is unchanged.

    Model-based rewards are omitted, so that policies can be sampled without their judge. Custom code from a stored
    recipe is also omitted unless allowed (see ``check_rewards``).
    """
    component = template or source.template
    rewards = [RewardComponent(name="correct")]
    if source.recipe is not None and source.keeps(template):
        rewards = source.recipe.rewards
    plain = []
    for reward in rewards:
        traits = registry.traits_of("reward", reward.name)
        if traits is not None and not traits.get("asks_a_model"):
            plain.append(reward)
    return build_grader(plain, build_template(component, "template"))


def check_rewards(source: ModelSource, template: Component | None) -> None:
    """Refuse to measure a run's rewards if any is unavailable.

    Raises:
        UnallowedCode: the recipe names reward code that was not allowed.
    """
    if source.recipe is None or not source.keeps(template):
        return
    for index, reward in enumerate(source.recipe.rewards):
        if not registry.is_lost(reward.name):  # defined in a notebook, so it cannot be imported
            registry.find("reward", reward.name, f"rewards.{index}")


def complete_template(template: Component | None, source: ModelSource) -> Component | None:
    """Merge options (``--template.preamble``) into the model's template, unless a different template is named."""
    if template is None:
        return None
    if template.name and source.recipe is None and source.name not in EMBEDDED:
        return template
    own = source.template
    if template.name not in ("", own.name):
        return template
    return Component(name=own.name, **(own.options | template.options))
