"""A recipe that trains a dictionary: activations, kind, training. Its section is ``dictionary``. No torch."""

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
# The source of a store with base and post that is neither of them: what training added.
DIFFERENCE = "difference"
ACTIVATIONS = "activations"  # the folder of the recording inside a run


class ActivationsSection(Section):
    """The activations to learn from: a ``folder`` of `posttrain activations`, or a recording that is made first.

    ``site``: such as ``resid.20``, the output of the 20th block. ``source``: of a folder with two models ``base``,
    ``post`` or their ``difference`` (post − base). To record: a ``model``, a ``site`` and one of ``task``, ``text`` (a
    file) and ``rollouts`` (a run).
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
            raise ValueError("give either 'folder', with activations, or the 'model' whose activations are recorded")
        if self.model is not None and (len(texts) != 1 or self.site is None):
            raise ValueError("to record, give a 'site' such as resid.20 and one of 'task', 'text' and 'rollouts'")
        if self.folder is not None and texts:
            raise ValueError("'folder' has its texts already; leave out 'task', 'text' and 'rollouts'")
        return self


class SaeComponent(Component):
    """A kind of dictionary with its options, and how large it is.

    ``expansion``: features for each coordinate of an activation, unless ``features`` says how many.
    """

    expansion: float = Field(default=8.0, gt=0)
    features: int | None = Field(default=None, ge=1)

    def num_features(self, d: int) -> int:
        if self.features is not None:
            return self.features
        return max(1, round(self.expansion * d))


class SaeTrainSection(Section):
    """The training: ``steps`` of ``batch`` rows; epochs follow one another without a gap.

    ``lr``: by default 3e-4·√(2¹⁴/F), at most 1e-3; it rises over the first ``warmup`` and falls over the last
    ``decay`` share of the steps. ``auxk``: weight of the loss that revives features that have not fired for
    ``dead_after`` · steps · batch rows; by default 1/32 for kinds in which features compete, else 0. ``precision``:
    of the matrix products; weights and sums are fp32. bf16 suits GPUs; many CPUs take ten times as long in it.
    ``save_every: 0``: at the end only.
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
        """The learning rates depend on ``steps``, so these cannot change when a run is resumed."""
        return "warmup and decay"

    def learning_rate(self, num_features: int) -> float:
        if self.lr is not None:
            return self.lr
        return min(1e-3, 3e-4 * math.sqrt(2**14 / num_features))


class SaeEvalSection(Section):
    """Measuring on ``rows`` that are held out, every ``every`` steps (0: never) and at the end.

    ``documents``: the number of held-out documents on which the reconstruction is put into the model, to measure how
    much of its predictions is recovered; 0: the model is not loaded.
    """

    rows: int = Field(default=16_384, ge=1)
    every: int = Field(default=0, ge=0)
    documents: int = Field(default=0, ge=0)


class SaeRecipe(Content):
    """One dictionary. ``track``: where the metrics are shown besides ``metrics.jsonl``."""

    label = "a recipe of a dictionary"

    description: str = ""
    activations: ActivationsSection
    dictionary: SaeComponent
    train: SaeTrainSection = Field(default_factory=SaeTrainSection)
    eval: SaeEvalSection = Field(default_factory=SaeEvalSection)
    track: Annotated[ComponentList, BeforeValidator(as_list)] = Field(default_factory=list)

    def rules(self) -> Iterator[Rule]:
        """Refuse to put a dictionary of a difference into a model."""
        yield (
            self.activations.source == DIFFERENCE and self.eval.documents > 0,
            "eval.documents",
            ": only a dictionary of one model can be put into it; set it to 0 for a difference",
        )

    def resolve(self) -> SaeRecipe:
        """Return the recipe with the options of every component checked and all their defaults filled in."""
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
    """Read a recipe, apply dotted overrides, validate. Components are checked by ``resolve``."""
    document = Document.load(SaeRecipe, name_or_path).extend()
    if SECTION not in document.content:
        raise RecipeError(
            f"{document.place}: this trains no dictionary (it has no section {SECTION!r}); run it with: "
            f"posttrain train {name_or_path}"
        )
    return document.override(overrides).check()
