"""Recipe for training a dictionary: activations, kind, training. Section ``dictionary``. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from posttrain.errors import RecipeError
from posttrain.option_types import Dtype, Seed, Tokens
from posttrain.recipes.document import Content, Document, Rule, complete_component
from posttrain.recipes.sections import Component, ComponentList, ModelSection, Section, as_list

SECTION = "dictionary"
# Source name for post − base in paired recordings: isolates changes from training.
DIFFERENCE = "difference"
ACTIVATIONS = "activations"  # recording folder inside a run


class ActivationsSection(Section):
    """Training activations: a ``folder`` from `posttrain activations`, or a recording made first.

    ``site``: such as ``resid.20``, the output of the 20th block. ``source``: for paired recordings ``base``, ``post``
    or their ``difference`` (post − base). To record: give a ``model``, a ``site`` and one of ``task``, ``text``
    (file) or ``rollouts`` (run).
    """

    folder: str | None = None
    site: str | None = None
    source: Literal["model", "base", "post", "difference"] | None = None
    model: ModelSection | None = None
    task: Component | None = None
    text: str | None = None
    rollouts: str | None = None
    template: Component = Component(name="r1_zero")
    context_tokens: Tokens = Field(default=1024, ge=2)
    max_rows: int | None = Field(default=None, ge=1)
    batch: int | None = Field(default=None, ge=1)
    dtype: Dtype = "bf16"
    outliers: float = Field(default=10.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        texts = [key for key in ("task", "text", "rollouts") if getattr(self, key) is not None]
        if (self.folder is None) == (self.model is None):
            raise ValueError("give either 'folder' with activations, or 'model' to record them")
        if self.model is not None and (len(texts) != 1 or self.site is None):
            raise ValueError("to record, give 'site', such as resid.20, and one of 'task', 'text' and 'rollouts'")
        if self.folder is not None and texts:
            raise ValueError("'folder' already contains texts; remove 'task', 'text' and 'rollouts'")
        return self


class SaeComponent(Component):
    """Dictionary kind with options and size.

    ``expansion``: features per activation dimension, unless ``features`` is given.
    """

    expansion: float = Field(default=8.0, gt=0)
    features: int | None = Field(default=None, ge=1)

    def num_features(self, d: int) -> int:
        if self.features is not None:
            return self.features
        return max(1, round(self.expansion * d))


class SaeTrainSection(Section):
    """Training settings: ``steps`` with ``batch`` rows each; epochs are consecutive without gaps.

    ``lr``: default 3e-4·√(2¹⁴/F), at most 1e-3; ``warmup`` and ``decay``: fractions of steps with rising and falling
    rate. ``auxk``: weight for the loss reviving features inactive for ``dead_after`` · steps · batch rows; default
    1/32 for kinds with competing features, else 0. ``precision``: for matrix products; weights and sums are fp32.
    bf16 suits GPUs; many CPUs are ten times slower with it. ``save_every: 0``: save only after training.
    """

    steps: int = Field(default=2000, ge=1)
    batch: int = Field(default=4096, ge=2)
    lr: float | None = Field(default=None, gt=0)
    warmup: float = Field(default=0.05, ge=0, le=1)
    decay: float = Field(default=0.2, ge=0, le=1)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    auxk: float | None = Field(default=None, ge=0)
    dead_after: float = Field(default=0.02, gt=0)
    precision: Dtype = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Seed = 0
    log_every: int = Field(default=20, ge=1)
    save_every: int = Field(default=0, ge=0)
    keep_checkpoints: int = Field(default=2, ge=1)

    @property
    def schedule(self) -> str:
        """Name the step-dependent schedule; it prevents changing ``steps`` on resume."""
        return "warmup and decay"

    def learning_rate(self, num_features: int) -> float:
        if self.lr is not None:
            return self.lr
        return min(1e-3, 3e-4 * math.sqrt(2**14 / num_features))


class SaeEvalSection(Section):
    """Measure on ``rows`` held-out rows, every ``every`` steps (0: never) and after training.

    ``documents``: held-out documents for measuring recovered predictions with the reconstruction spliced into the
    model; 0: the model is not loaded.
    """

    rows: int = Field(default=16_384, ge=1)
    every: int = Field(default=0, ge=0)
    documents: int = Field(default=0, ge=0)


class SaeRecipe(Content):
    """Dictionary recipe. ``track``: trackers receiving metrics, besides ``metrics.jsonl``."""

    label = "a recipe of a dictionary"

    description: str = ""
    activations: ActivationsSection
    dictionary: SaeComponent
    train: SaeTrainSection = Field(default_factory=SaeTrainSection)
    eval: SaeEvalSection = Field(default_factory=SaeEvalSection)
    track: Annotated[ComponentList, BeforeValidator(as_list)] = Field(default_factory=list)

    def rules(self) -> Iterator[Rule]:
        """Refuse splicing a difference dictionary into a model."""
        yield (
            self.activations.source == DIFFERENCE and self.eval.documents > 0,
            "eval.documents",
            ": difference dictionaries cannot be spliced into a model; set it to 0",
        )

    def resolve(self) -> SaeRecipe:
        """Validate component options and fill in defaults."""
        resolved = self.model_copy(deep=True)
        resolved.dictionary = complete_component(resolved.dictionary, "dictionary", "dictionary")
        activations = resolved.activations
        if activations.task is not None:
            activations.task = complete_component(activations.task, "task", "activations.task")
        activations.template = complete_component(activations.template, "template", "activations.template")
        trackers = []
        for index, component in enumerate(resolved.track):
            trackers.append(complete_component(component, "tracker", f"track.{index}"))
        resolved.track = trackers
        return resolved


def load_sae_recipe(name_or_path: str, overrides: Sequence[tuple[str, str]] = ()) -> SaeRecipe:
    """Load a recipe, apply dotted overrides, validate. Components are checked by ``resolve``."""
    document = Document.load(SaeRecipe, name_or_path).extend()
    if SECTION not in document.content:
        raise RecipeError(
            f"{document.place}: not a dictionary recipe (section {SECTION!r} is missing); use: "
            f"posttrain train {name_or_path}"
        )
    return document.override(overrides).check()
