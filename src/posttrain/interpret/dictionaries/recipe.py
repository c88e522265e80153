"""A recipe that trains a dictionary: which activations, which kind, how long. No torch is imported here.

It is told from other recipes by its section ``dictionary``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from posttrain import registry
from posttrain.consent import refuse_remote_code
from posttrain.errors import RecipeError
from posttrain.option_types import Seed, Tokens, shorten
from posttrain.recipes.files import apply_override, extend, parse_yaml, recipe_text
from posttrain.recipes.recipe import fingerprint_of
from posttrain.recipes.sections import ModelSection, Section, Word, Words, as_list
from posttrain.strict_yaml import write_yaml

SECTION = "dictionary"


class ActivationsSection(Section):
    """What is learned from: a ``folder`` that `posttrain activations` made, or what is recorded into the run first.

    ``site``: such as ``resid.20``, the output of the 20th block. ``source``: of a folder with two models ``base``,
    ``post``, their ``difference`` (post − base) or ``both`` (a crosscoder). To record: ``model``, with ``paired`` for a
    second model over the same tokens, and one of ``task``, ``text`` (a file) and ``rollouts`` (a run), as
    `posttrain activations` takes them.
    """

    folder: str | None = None
    site: str | None = None
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
        return self


class DictionaryWord(Word):
    """A kind of dictionary with its options, and how large it is.

    ``expansion``: features for each coordinate of an activation, unless ``features`` says how many. ``matryoshka``:
    sizes of nested dictionaries, each of which reconstructs alone, as shares of all features.
    """

    expansion: float = Field(default=8.0, gt=0)
    features: int | None = Field(default=None, ge=1)
    matryoshka: list[Annotated[float, Field(gt=0, lt=1)]] | None = None

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


class SaeRecipe(Section):
    """One dictionary. ``track``: where the metrics are shown besides ``metrics.jsonl``."""

    description: str = ""
    activations: ActivationsSection
    dictionary: DictionaryWord
    train: DictionaryTrainSection = Field(default_factory=DictionaryTrainSection)
    eval: DictionaryEvalSection = Field(default_factory=DictionaryEvalSection)
    track: Annotated[Words, BeforeValidator(as_list)] = Field(default_factory=list)

    def resolve(self) -> SaeRecipe:
        """The recipe with every word's options checked and all their defaults filled in.

        Raises:
            UnknownWord, RecipeError: with the key that is wrong.
        """
        resolved = self.model_copy(deep=True)
        resolved.dictionary = _resolve(resolved.dictionary, "dictionary", "dictionary")
        if resolved.train.auxk is None:
            entry = registry.find("dictionary", resolved.dictionary.name)
            resolved.train.auxk = 1 / 32 if entry.traits.get("needs_rank") else 0.0
        activations = resolved.activations
        if activations.task is not None:
            activations.task = _resolve(activations.task, "task", "activations.task")
        activations.template = _resolve(activations.template, "template", "activations.template")
        resolved.track = [_resolve(word, "tracker", f"track.{i}") for i, word in enumerate(resolved.track)]
        return resolved

    def dump(self) -> dict[str, Any]:
        """Plain data, without keys that are None."""
        return {key: value for key, value in _plain(self).items() if value not in (None, [])}

    def to_yaml(self) -> str:
        return write_yaml(self.dump())

    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of what decides the result; where it works and who watches are no part of it."""
        return fingerprint_of(self.dump())


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        data = {name: getattr(value, name) for name in type(value).model_fields} | dict(value.model_extra or {})
        return {key: _plain(item) for key, item in data.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value


def _resolve(word: Any, kind: str, where: str) -> Any:
    options = registry.find(kind, word.name, where).options(word.options, where)
    fixed = {name: getattr(word, name) for name in type(word).model_fields}
    return type(word)(**fixed, **json.loads(json.dumps({k: v for k, v in options.items() if v is not None})))


def load_sae_recipe(name_or_path: str, overrides: Sequence[tuple[str, str]] = ()) -> SaeRecipe:
    """Read a recipe, apply dotted overrides, validate. Words are checked by ``resolve``.

    Raises:
        RecipeError: with file, line and key.
    """
    place, text = recipe_text(name_or_path)
    data, lines = parse_yaml(text, place)
    data, inherited = extend(data, place, lines)
    if SECTION not in data:
        raise RecipeError(
            f"{place}: this trains no dictionary (it has no section {SECTION!r}); run it with: "
            f"posttrain train {name_or_path}"
        )
    for key, value in overrides:
        apply_override(data, key, value)
    places = inherited | {key: f"{place}:{line}" for key, line in lines.items()}
    given = {key for key, _ in overrides}

    def line_of(key: str) -> str:
        if key in given:
            return "command line: "
        found = next((probe for probe in _upwards(key) if probe in places), None)
        return f"{places[found]}: " if found else f"{place}: "

    refuse_remote_code(data, given, line_of)
    try:
        return SaeRecipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(_explain(error, line_of)) from None


def _upwards(key: str) -> list[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _explain(error: ValidationError, line_of: Any) -> str:
    lines = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        key = ".".join(path)
        if item["type"] == "extra_forbidden":
            known = _known_keys(path[:-1])
            section = f"section {'.'.join(path[:-1])!r}" if path[:-1] else "a recipe of a dictionary"
            hint = registry.suggest(path[-1], known)
            lines.append(
                f"{line_of(key)}{key}: {section} has no key {path[-1]!r}.{hint} Known keys: {', '.join(known)}"
            )
        elif item["type"] == "missing":
            lines.append(f"{line_of(key)}{key}: this key is needed")
        else:
            message = item["msg"].removeprefix("Value error, ")
            shown = "" if item["type"] == "value_error" else f"; got {shorten(item['input'])}"
            lines.append(f"{line_of(key)}{key}: {message}{shown}")
    return "\n".join(lines)


def _known_keys(path: Sequence[str]) -> list[str]:
    model: Any = SaeRecipe
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        annotation = field.annotation if field is not None else None
        choices = [annotation, *getattr(annotation, "__args__", ())]
        model = next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return list(model.model_fields) if model is not None else []
