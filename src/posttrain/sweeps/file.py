"""The file of a sweep: its keys, how it is read, and what an override of the command line reaches.

A source is the name of a recipe, ``{recipe: name, ...overrides}`` or a recipe written out (docs/compare.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from posttrain import registry
from posttrain.errors import RecipeError, UnknownWord, UsageError
from posttrain.option_types import Repetitions, Tokens, Unread
from posttrain.recipes.document import (
    Content,
    Document,
    apply_override,
    complete_word,
    interpretation_names,
    merge,
    numbered_key,
    recipe_names,
)
from posttrain.recipes.recipe import WORD_KINDS, Recipe, load_recipe
from posttrain.recipes.sections import Section, Word
from posttrain.registry import suggest
from posttrain.runs.directory import NAME_RULE, RUN_NAME
from posttrain.untrusted import is_stored

SHELF = "sweep/"
LABELLED = "labelled"
NEEDS = "needs"
_KINDS = {path.rpartition(".")[2]: kind for path, kind in WORD_KINDS.items()}
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
# Keys of the files of comparisons, studies and pipelines, and what to write instead.
_OLD_KEYS = {
    "methods": "rows",
    "reward_models": "rows",
    "policies": "rows, and needs: NAME of the reward model that rewards it",
    "study": "rows with best_of_n; leave this out",
    "optimize": "needs: NAME in each row that the reward model rewards",
    "judge": "head_to_head: {judge: NAME, task: ...}",
    "evaluate": "head_to_head",
}


def _as_source(value: Any) -> Any:
    """A bare name, alone or with overrides of the command line (which call it ``name``), as ``{recipe: name}``."""
    if isinstance(value, str):
        return {"recipe": value}
    if isinstance(value, dict) and "name" in value and "recipe" not in value:
        return {"recipe" if key == "name" else key: part for key, part in value.items()}
    return {} if value is None else value


Source = Annotated[dict[str, Any], BeforeValidator(_as_source), Unread()]


class AnswersSection(Section):
    """A task whose problems some models answer, and how they sample."""

    task: Word
    n: int = Field(default=256, ge=2)
    samples: int = Field(default=1, ge=1)
    max_tokens: Tokens = 128
    temperature: float = Field(default=1.0, gt=0)


class BestOfN(AnswersSection):
    """The held-out problems that the start answers, and how many answers the reward models choose among."""

    samples: int = Field(default=64, ge=2)


class Labelled(BestOfN):
    """The problems whose answers become labelled steps, and how many answers each gets from the start."""

    n: int = Field(default=256, ge=1)
    samples: int = Field(default=8, ge=2)


class HeadToHead(AnswersSection):
    """The prompts on which each policy is compared with the start, and the row whose reward model is the judge."""

    judge: str


class SweepFile(Content):
    """The keys of a sweep's file."""

    extensible = False
    label: ClassVar[str] = "a sweep"

    description: str = ""
    start: Source | None = None
    base: Source | None = None
    rows: Annotated[dict[str, Source], Field(min_length=1)]
    labelled: Labelled | None = None
    best_of_n: BestOfN | None = None
    head_to_head: HeadToHead | None = None
    seeds: Repetitions = 3


def sweep_names() -> list[str]:
    """Names of the sweeps that ship, such as ``sweep/ppo-grpo-dpo``."""
    return recipe_names(SHELF)


def training_recipe_names() -> list[str]:
    """Names of the shipped recipes that ``posttrain train`` takes."""
    others = {*sweep_names(), *interpretation_names()}
    return [name for name in recipe_names() if name not in others]


def read_sweep(
    name_or_path: str, overrides: Sequence[tuple[str, str]], over: tuple[str, Sequence[str]] | None
) -> tuple[SweepFile, Document[SweepFile]]:
    """The checked file of a sweep, and the document that says where its sources stand.

    Args:
        name_or_path: a file or a shipped sweep, with or without ``sweep/``; or a recipe of one run.
        overrides: dotted keys of the file with values.
        over: a key and its values: a row of the recipe for each.

    Raises:
        RecipeError: with file, line and key.
        UsageError: an override of a row that the file does not have.
    """
    if f"{SHELF}{name_or_path}" in sweep_names() and not Path(name_or_path).is_file():
        name_or_path = f"{SHELF}{name_or_path}"
    document = Document.load(SweepFile, name_or_path, shelf=SHELF)
    is_recipe = "rows" not in document.content and document.content.keys() & {"objective", "extends"}
    for key in () if is_recipe else document.content.keys() & _OLD_KEYS.keys():
        raise RecipeError(f"{document.line_of(key)}{key} was removed. Use {_OLD_KEYS[key]}.")
    if is_recipe:
        document = Document(SweepFile, _rows_over(name_or_path, over), "command line")
    elif over is not None:
        raise UsageError(f"--over: {document.place} is a sweep with rows of its own; give a recipe of one run")
    known = list(map(str, document.content.get("rows") or ()))
    document = document.override(overrides)
    content = document.check()
    for name in content.rows:
        if name not in known:
            there = ", ".join(known)
            raise UsageError(
                f"--rows.{name}: {document.place} has no row {name!r}.{suggest(name, known)} There: {there}"
            )
        if not RUN_NAME.fullmatch(name) or name in ("start", LABELLED):
            says = (
                f"a row's name is made of {NAME_RULE}, because its runs are called by it, and not start or {LABELLED}"
            )
            raise refusal(document, f"rows.{name}", says)
    for key in (LABELLED, "best_of_n", "head_to_head"):
        if (section := getattr(content, key)) is not None:
            complete_word(section.task, "task", f"{document.line_of(f'{key}.task')}{key}.task")
            if content.start is None:
                raise refusal(document, key, "the start answers; give 'start'")
    return content, document


def _rows_over(recipe: str, over: tuple[str, Sequence[str]] | None) -> dict[str, Any]:
    """The file of a recipe with one key at several values: ``lr-1e-4``, ``lr-3e-4``; without a key, of it alone.

    Raises:
        UsageError: the seed, which every row has several of, or values that cannot be told apart.
        RecipeError: a key that cannot be.
    """
    if over is None:
        name = _NO_NAME.sub("-", Path(recipe).stem).strip("-")
        return {"description": f"{recipe} with several seeds.", "base": {"recipe": recipe}, "rows": {name: {}}}
    key, values = over
    if key == "train.seed":
        raise UsageError("--over train.seed: every row is trained with several seeds; --seeds says how many")
    rows: dict[str, Any] = {}
    for value in values:
        name = f"{key.rpartition('.')[2]}-{_NO_NAME.sub('-', value).strip('-') or 'empty'}"
        if name in rows:
            raise UsageError(f"--over {key}: two values would both be called {name}; leave one out")
        rows[name] = {}
        apply_override(rows[name], key, value)
    return {"description": f"{recipe} over {key}.", "base": {"recipe": recipe}, "rows": rows}


def split_overrides(
    overrides: Sequence[tuple[str, str]],
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(overrides of the sweep's own keys, overrides that reach every row that has the key).

    Raises:
        UsageError: the seed, or a key of earlier versions.
    """
    own: list[tuple[str, str]] = []
    common: list[tuple[str, str]] = []
    for key, value in overrides:
        group = key.partition(".")[0]
        if group in _OLD_KEYS:
            raise UsageError(f"--{key}: {group} was removed. Use {_OLD_KEYS[group]}.")
        if key == "train.seed":
            raise UsageError("--train.seed: every trial has a seed of its own; --seeds says how many there are")
        (own if group in SweepFile.model_fields else common).append((key, value))
    return own, common


def choose_rows(content: SweepFile, needs: Mapping[str, Sequence[str]], wanted: Sequence[str] | None) -> list[str]:
    """The wanted rows and those that they need, in an order in which none stands before what it needs.

    ``wanted``: None or ``["all"]`` for all.

    Raises:
        UsageError: the file has no such row, or none is named.
        RecipeError: rows that need one another.
    """
    known = list(content.rows)
    chosen = known if wanted is None or list(wanted) == ["all"] else list(wanted)
    for name in chosen:
        if name not in known:
            raise UsageError(f"--rows: there is no row {name!r}.{suggest(name, known)} There: {', '.join(known)}")
    if not chosen:
        raise UsageError(f"--rows: name at least one of {', '.join(known)}")
    if content.head_to_head is not None and content.head_to_head.judge in known:
        chosen = [content.head_to_head.judge, *chosen]
    wanted_rows, ordered = set(chosen), list[str]()
    while more := {need for name in wanted_rows for need in needs[name] if need != LABELLED} - wanted_rows:
        wanted_rows |= more
    while left := [name for name in known if name in wanted_rows and name not in ordered]:
        ready = [name for name in left if {*needs[name]} <= {*ordered, LABELLED}]
        if not ready:
            raise RecipeError(f"rows: {' and '.join(left)} need one another in a circle; leave one need out")
        ordered.append(ready[0])
    return ordered


def read_needs(document: Document[SweepFile], content: SweepFile) -> dict[str, tuple[str, ...]]:
    """The needs of each row, which are taken out of its source, in place.

    Raises:
        RecipeError: with the line of a need that is neither a row nor ``labelled``.
    """
    needs: dict[str, tuple[str, ...]] = {}
    for name, source in content.rows.items():
        value = source.pop(NEEDS, None)
        own = [] if value is None else value if isinstance(value, list) else [value]
        known = [*content.rows, *([LABELLED] if content.labelled is not None else [])]
        for need in own:
            if need not in known or need == name:
                hint = suggest(str(need), known)
                says = f"there is no other row {need!r}.{hint} There: {', '.join(known)}"
                raise refusal(document, f"rows.{name}.{NEEDS}", says)
        needs[name] = tuple(own)
    return needs


def label_of(source: Mapping[str, Any]) -> str:
    """Describe a source for a reader of results."""
    name = source.get("recipe", "a recipe of its own")
    return f"{name} with overrides" if len(source) > 1 and "recipe" in source else str(name)


def label_of_word(word: Word) -> str:
    """Describe a component with its options for a reader of results."""
    chosen = ", ".join(f"{key} {value}" for key, value in word.options.items() if value is not None)
    return f"{word.name} ({chosen})" if chosen else word.name


def source_data(document: Document[SweepFile], source: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a source: that of its recipe, if it names one, with its overrides laid over."""
    changes = {key: value for key, value in source.items() if key != "recipe"}
    return merge(named_recipe(document, source).dump(), changes) if "recipe" in source else changes


def named_recipe(document: Document[SweepFile], source: Mapping[str, Any]) -> Recipe:
    """The recipe that a source names, without its overrides."""
    return load_recipe(str(source["recipe"]), is_own=not is_stored(document.place))


def has_key(recipe: Recipe, key: str) -> bool:
    """Return whether a resolved recipe has the section, or the component with the option, of a dotted key."""
    try:
        *above, last = numbered_key(recipe.dump(), key)
    except RecipeError:
        return False
    place: Any = recipe.dump()
    for part in above:
        place = place[int(part)] if isinstance(place, list) else place.get(part)
        if not isinstance(place, dict | list):
            return False
    if not above or isinstance(place, list):
        return last in place
    kind = _KINDS.get(next((part for part in reversed(above) if not part.isdigit()), ""))
    if kind is None or last in place:  # an unknown key of a section is refused where it is laid over the row
        return True
    return last in registry.find(kind, place["name"]).options_model.model_fields


def refusal(document: Document[SweepFile], where: str, says: str) -> RecipeError:
    """The error that what stands at a dotted key cannot be."""
    return RecipeError(f"{document.line_of(where)}{where}: {says}")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors in it begin with ``what``."""
    try:
        yield
    except (RecipeError, UnknownWord) as error:
        raise type(error)(f"{what}: {error}") from None
