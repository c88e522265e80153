"""A recipe that trains a dictionary: which activations, which kind, how long. No torch is imported here.

It is told from other recipes by its section ``dictionary``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.option_types import Seed, Tokens
from posttrain.recipes.document import Content, Document, complete_word
from posttrain.recipes.sections import ModelSection, Section, Word, Words, as_list

SECTION = "dictionary"


def _split_sites(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) and "," in value else value


class ActivationsSection(Section):
    """What is learned from: a ``folder`` that `posttrain activations` made, or what is recorded first (``recording``).

    ``site``: such as ``resid.20``, the output of the 20th block; of several (``[resid.10, resid.20]``) each gets a
    dictionary in a run of its own. ``sites``: those that are recorded in the same pass (default: all of ``site``).
    ``target``: the site that a transcoder writes while it reads
    ``site``: ``mlp.20`` with ``mlp_in.20`` is what an MLP does. ``source``: of a folder with two models ``base``,
    ``post``, their ``difference`` (post − base) or ``both`` (a crosscoder). To record: ``model``, with ``paired`` for a
    second model over the same tokens, and one of ``task``, ``text`` (a file) and ``rollouts`` (a run), as
    `posttrain activations` takes them. ``stream_rows``: nothing is recorded; rows are computed when they are needed,
    from documents of so many tokens at a time, and forgotten (``interpret/activations/record.py``).
    """

    folder: str | None = None
    site: Annotated[str | list[str] | None, BeforeValidator(_split_sites)] = None
    sites: list[str] | None = None
    target: str | None = None
    source: Literal["model", "base", "post", "difference", "both"] | None = None
    model: ModelSection | None = None
    paired: str | None = None
    task: Word | None = None
    text: str | None = None
    rollouts: str | None = None
    template: Word = Word(name="r1_zero")
    context_tokens: Tokens = Field(default=1024, ge=2)
    max_rows: int | None = Field(default=None, ge=1)
    batch: int | None = Field(default=None, ge=1)
    dtype: Literal["bf16", "fp32"] = "bf16"
    outliers: float = Field(default=10.0, ge=0)
    stream_rows: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        texts = [key for key in ("task", "text", "rollouts") if getattr(self, key) is not None]
        if (self.folder is None) == (self.model is None):
            raise ValueError("give either 'folder', with activations, or the 'model' whose activations are recorded")
        if self.model is not None and (len(texts) != 1 or self.site is None):
            raise ValueError("to record, give a 'site' such as resid.20 and one of 'task', 'text' and 'rollouts'")
        if self.folder is not None and (texts or self.paired is not None):
            raise ValueError(
                "'folder' has its texts and models already; leave out 'task', 'text', 'rollouts', 'paired'"
            )
        named = self.site if isinstance(self.site, list) else [self.site]
        targets = [] if self.target is None else [self.target]
        if not named or len(set(named)) < len(named):
            raise ValueError("'site' is one place such as resid.20, or a list of different ones")
        if self.target is not None and (len(named) != 1 or named[0] in (None, self.target)):
            raise ValueError("'target' is what a transcoder writes; it goes with one other 'site', which it reads")
        if self.stream_rows is not None and self.folder is not None:
            raise ValueError("'stream_rows' is about what a 'model' computes; a 'folder' is read as it is")
        if self.sites is not None and (self.folder is not None or not {*named, *targets} <= set(self.sites)):
            raise ValueError("'sites' are recorded together: those of 'site' among them, and none with a 'folder'")
        return self

    @property
    def one_site(self) -> str | None:
        """The place of one dictionary (``SaeRecipe.each_site``)."""
        assert not isinstance(self.site, list), "a recipe of several dictionaries is trained one by one"
        return self.site


class DictionaryWord(Word):
    """A kind of dictionary with its options, and how large it is.

    ``expansion``: features for each coordinate of an activation, unless ``features`` says how many. ``matryoshka``:
    sizes of nested dictionaries, each of which reconstructs alone, as shares of all features. ``skip``: a
    transcoder with a linear map of what it reads beside its features (Paulo et al. 2025).
    """

    expansion: float = Field(default=8.0, gt=0)
    features: int | None = Field(default=None, ge=1)
    matryoshka: list[Annotated[float, Field(gt=0, lt=1)]] | None = None
    skip: bool = False

    def num_features(self, d: int) -> int:
        return self.features if self.features is not None else max(1, round(self.expansion * d))

    def prefixes(self, d: int) -> list[int]:
        return [max(1, round(share * self.num_features(d))) for share in self.matryoshka or ()]


class DictionaryTrainSection(Section):
    """The training. ``steps`` of ``batch`` rows; epochs follow one another without a gap.

    ``lr``: by default 3e-4·√(2¹⁴/F), at most 1e-3; it rises over the first ``warmup`` and falls over the last
    ``decay`` share of the steps. ``auxk``: weight of the loss that revives features that have not fired for
    ``dead_after`` · steps · batch rows; by default 1/32 for kinds in which features compete, else 0. ``precision``:
    of the matrix products; weights and sums are fp32. ``save_every: 0``: at the end only.
    """

    steps: int = Field(default=2000, ge=1)
    batch: int = Field(default=4096, ge=2)
    lr: float | None = Field(default=None, gt=0)
    warmup: float = Field(default=0.05, ge=0, le=1)
    decay: float = Field(default=0.2, ge=0, le=1)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    auxk: float | None = Field(default=None, ge=0)
    dead_after: float = Field(default=0.02, gt=0)
    precision: Literal["fp32", "bf16"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Seed = 0
    log_every: int = Field(default=20, ge=1)
    save_every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)

    @property
    def schedule(self) -> str:
        """The learning rates depend on ``steps``, so these cannot change when a run is resumed."""
        return "warmup and decay"

    def learning_rate(self, num_features: int) -> float:
        return self.lr if self.lr is not None else min(1e-3, 3e-4 * math.sqrt(2**14 / num_features))


class DictionaryEvalSection(Section):
    """Measuring on ``rows`` that are held out, every ``every`` steps (0: never) and at the end.

    ``documents``: with so many of the held-out documents, the reconstruction is put into the model to see how much of
    its predictions is recovered; 0 for not loading the model.
    """

    rows: int = Field(default=16_384, ge=1)
    every: int = Field(default=0, ge=0)
    documents: int = Field(default=0, ge=0)


class SaeRecipe(Content):
    """One dictionary. ``track``: where the metrics are shown besides ``metrics.jsonl``."""

    label = "a recipe of a dictionary"

    description: str = ""
    activations: ActivationsSection
    dictionary: DictionaryWord
    train: DictionaryTrainSection = Field(default_factory=DictionaryTrainSection)
    eval: DictionaryEvalSection = Field(default_factory=DictionaryEvalSection)
    track: Annotated[Words, BeforeValidator(as_list)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_skip(self) -> Self:
        if self.dictionary.skip and self.activations.target is None:
            raise ValueError("dictionary.skip is for a transcoder; give activations.target, the site that it writes")
        return self

    def resolve(self) -> SaeRecipe:
        """The recipe with every word's options checked and all their defaults filled in.

        Raises:
            UnknownWord, RecipeError: with the key that is wrong.
        """
        resolved = self.model_copy(deep=True)
        resolved.dictionary = complete_word(resolved.dictionary, "dictionary", "dictionary")
        if resolved.train.auxk is None:
            entry = registry.find("dictionary", resolved.dictionary.name)
            resolved.train.auxk = 1 / 32 if entry.traits.get("needs_rank") else 0.0
        activations = resolved.activations
        if activations.task is not None:
            activations.task = complete_word(activations.task, "task", "activations.task")
        activations.template = complete_word(activations.template, "template", "activations.template")
        resolved.track = [complete_word(word, "tracker", f"track.{i}") for i, word in enumerate(resolved.track)]
        return resolved

    def each_site(self) -> list[SaeRecipe]:
        """A recipe for each dictionary; where the sites are several, all of them name the same recording."""
        sites = self.activations.site
        if not isinstance(sites, list):
            return [self]
        recorded = None if self.activations.folder is not None else self.activations.sites or sites
        changes = [{"site": site, "sites": recorded} for site in sites]
        return [
            self.model_copy(update={"activations": self.activations.model_copy(update=change)}, deep=True)
            for change in changes
        ]


def load_sae_recipe(name_or_path: str, overrides: Sequence[tuple[str, str]] = ()) -> SaeRecipe:
    """Read a recipe, apply dotted overrides, validate. Words are checked by ``resolve``.

    Raises:
        RecipeError: with file, line and key.
    """
    document = Document.load(SaeRecipe, name_or_path).extend()
    if SECTION not in document.content:
        raise RecipeError(
            f"{document.place}: this trains no dictionary (it has no section {SECTION!r}); run it with: "
            f"posttrain train {name_or_path}"
        )
    return document.override(overrides).check()
