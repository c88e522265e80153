"""Recipe for comparing two models, with section ``changes``. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from posttrain.errors import RecipeError
from posttrain.interpret.saes.sae_recipe import SaeComponent, SaeTrainSection
from posttrain.option_types import Dtype, Repetitions, Seed, Tokens
from posttrain.recipes.document import Content, Document, complete_component
from posttrain.recipes.sections import Component, Section

SECTION = "changes"
# Few features per token, so that different seeds agree (docs/how-to/sparse-autoencoders.md).
_DICTIONARY: dict[str, object] = {"name": "batchtopk", "k": 4, "expansion": 3.0}
_TRAIN: dict[str, object] = {"steps": 1600, "batch": 1024, "lr": 5.0e-3}


class Compared(Section):
    """A model to compare: ``name`` (model or run), or a training ``recipe``.

    A recipe without a finished run is trained first; for ``post``, training starts from the base.
    """

    name: str | None = None
    recipe: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.name is None) == (self.recipe is None):
            raise ValueError("give either 'name' (model or run), or a training 'recipe'")
        return self


class PatchingSection(Section):
    """Patching the base: number of ``documents``, and feature ``counts`` to patch."""

    documents: int = Field(default=64, ge=1)
    counts: list[int] = Field(default=[1, 2, 4, 8, 16, 32, 64, 128])


class CausalSection(Section):
    """Causal test: greedy answers to ``prompts`` unrecorded prompts, with features moved or scaled.

    ``measure``: reward or accuracy. ``counts``: how many of the most changed features are fully moved or removed.
    ``features``: number moved by each factor in ``steering_factors`` (1: fully), and multiplied by each in
    ``factors``. ``draws``: number of random feature sets.
    """

    measure: Literal["reward", "accuracy"] = "reward"
    prompts: int = Field(default=64, ge=2)
    counts: list[int] = Field(default=[4, 16, 64])
    features: int = Field(default=16, ge=1)
    steering_factors: list[float] = Field(default=[0.5, 1.0, 1.5])
    factors: list[float] = Field(default=[0.0, 0.5, 2.0])
    draws: int = Field(default=2, ge=1)


class ChangesSection(Section):
    """Comparison settings.

    ``site``: such as ``resid.2``; defaults to the middle layer. ``samples`` answers to each of ``prompts`` task
    prompts are generated ``by`` base or post at ``temperature``, and read through both models. ``seeds``: number of
    base dictionaries. ``held_out``: fraction of rows excluded from their training. A feature counts as changed if it
    fires in ``min_documents`` documents, and the change is significant and larger than ``min_change``.
    ``kl_documents``: number of documents for per-token KL. ``show``: number of features shown with contexts.
    ``patching``, ``causal``: null skips them.
    """

    site: str | None = None
    prompts: int = Field(default=512, ge=4)
    samples: int = Field(default=2, ge=1)
    by: Literal["post", "base"] = "post"
    temperature: float = Field(default=1.0, ge=0)
    max_tokens: Tokens | None = None
    outliers: float = Field(default=10.0, ge=0)
    dtype: Dtype = "fp32"
    seeds: Repetitions = 3
    seed: Seed = 0
    dictionary: SaeComponent = SaeComponent.model_validate(_DICTIONARY)
    train: SaeTrainSection = Field(default_factory=lambda: SaeTrainSection.model_validate(_TRAIN))
    held_out: float = Field(default=0.1, gt=0, lt=1)
    min_documents: int = Field(default=12, ge=2)
    min_change: float = Field(default=0.2, ge=0)
    kl_documents: int = Field(default=256, ge=1)
    show: int = Field(default=24, ge=1)
    patching: PatchingSection | None = Field(default_factory=PatchingSection)
    causal: CausalSection | None = Field(default_factory=CausalSection)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: object) -> object:
        """Merge partial training and dictionary options with defaults, unless a dictionary name is given."""
        if not isinstance(value, Mapping):
            return value
        filled = dict(value)
        train = value.get("train")
        if isinstance(train, Mapping):
            filled["train"] = _TRAIN | dict(train)
        dictionary = value.get("dictionary")
        if isinstance(dictionary, Mapping) and "name" not in dictionary:
            filled["dictionary"] = _DICTIONARY | dict(dictionary)
        return filled


class DiffRecipe(Content):
    """Comparison of ``base`` and ``post``. ``task``: prompts (default: the post run's task, test split);
    ``template``: default is the post run's.
    """

    label = "a recipe of a comparison"

    description: str = ""
    base: Compared
    post: Compared
    task: Component | None = None
    template: Component | None = None
    changes: ChangesSection = Field(default_factory=ChangesSection)

    def resolve(self) -> DiffRecipe:
        """Validate component options and fill in defaults."""
        resolved = self.model_copy(deep=True)
        resolved.changes.dictionary = complete_component(
            resolved.changes.dictionary, "dictionary", "changes.dictionary"
        )
        for kind in ("task", "template"):
            component = getattr(resolved, kind)
            if component is not None:
                setattr(resolved, kind, complete_component(component, kind, kind))
        return resolved


def load_diff_recipe(models: Sequence[str], overrides: Sequence[tuple[str, str]] = ()) -> DiffRecipe:
    """Load a comparison recipe by name or path, or build one from two model names."""
    if len(models) == 2:
        document = Document(DiffRecipe, {"base": {"name": models[0]}, "post": {"name": models[1]}}, "command line")
    else:
        document = Document.load(DiffRecipe, models[0]).extend()
        if SECTION not in document.content:
            raise RecipeError(
                f"{document.place}: not a comparison recipe (section {SECTION!r} is missing). Give BASE and POST, or a "
                "recipe such as tiny/what-did-rl-change"
            )
    return document.override(overrides).check()
