"""A recipe that compares two models. Its section is ``changes``. No torch."""

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
# As few features a token as two seeds still agree on (docs/how-to/sparse-autoencoders.md).
_DICTIONARY: dict[str, object] = {"name": "batchtopk", "k": 4, "expansion": 3.0}
_TRAIN: dict[str, object] = {"steps": 1600, "batch": 1024, "lr": 5.0e-3}


class Compared(Section):
    """One of the two models: the ``name`` of a model or a run, or a training ``recipe``.

    A recipe without a finished run is trained first; that of ``post`` starts from the base.
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
            raise ValueError("give either the 'name' of a model or a run, or a training 'recipe'")
        return self


class PatchingSection(Section):
    """Patching the base: on how many ``documents``, with which ``counts`` of features."""

    documents: int = Field(default=64, ge=1)
    counts: list[int] = Field(default=[1, 2, 4, 8, 16, 32, 64, 128])


class CausalSection(Section):
    """The causal test: greedy answers to ``prompts`` prompts that were not recorded, with features moved or scaled.

    ``measure``: the reward, or the share of right answers. ``counts``: numbers of the most changed features that are
    moved all the way, or taken away. ``features``: the number that is moved by each of the ``steering_factors`` (1: all
    the way) and multiplied by each of the ``factors``. ``draws``: sets of random features.
    """

    measure: Literal["reward", "accuracy"] = "reward"
    prompts: int = Field(default=64, ge=2)
    counts: list[int] = Field(default=[4, 16, 64])
    features: int = Field(default=16, ge=1)
    steering_factors: list[float] = Field(default=[0.5, 1.0, 1.5])
    factors: list[float] = Field(default=[0.0, 0.5, 2.0])
    draws: int = Field(default=2, ge=1)


class ChangesSection(Section):
    """The comparison.

    ``site``: such as ``resid.2``; by default the middle of the model. ``prompts`` of the task are answered ``samples``
    times ``by`` one of the models, at ``temperature``, and both models read prompts and answers. ``seeds``:
    dictionaries of the base. ``held_out``: share of the rows that they do not learn from. A feature counts as changed
    if it fires in ``min_documents`` documents, the change is significant, and larger than ``min_change``.
    ``kl_documents``: the number on which KL is measured token by token. ``show``: the number of features shown with
    contexts. ``patching``, ``causal``: null leaves them out.
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
        """Let options of the training, and of a dictionary without a name, change single defaults."""
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
    """Two models compared. ``task``: the prompts (default: the post run's task, its test split); ``template``: their
    form (default: the post run's)."""

    label = "a recipe of a comparison"

    description: str = ""
    base: Compared
    post: Compared
    task: Component | None = None
    template: Component | None = None
    changes: ChangesSection = Field(default_factory=ChangesSection)

    def resolve(self) -> DiffRecipe:
        """Return the recipe with the options of every component checked and their defaults filled in."""
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
    """Return the recipe of a name or file, or of the names of two models."""
    if len(models) == 2:
        document = Document(DiffRecipe, {"base": {"name": models[0]}, "post": {"name": models[1]}}, "command line")
    else:
        document = Document.load(DiffRecipe, models[0]).extend()
        if SECTION not in document.content:
            raise RecipeError(
                f"{document.place}: this compares no models (it has no section {SECTION!r}). Give BASE and POST, or a "
                "recipe such as tiny/what-did-rl-change"
            )
    return document.override(overrides).check()
