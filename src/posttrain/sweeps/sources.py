"""Reading the file of a sweep: strict YAML whose sources become recipes, checked one by one.

A source is the name of a recipe, ``{recipe: name, ...overrides}`` or a recipe written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ValidationError

from posttrain.consent import is_stored
from posttrain.errors import RecipeError, UnknownWord, UsageError
from posttrain.option_types import Repetitions, Unread
from posttrain.recipes.document import apply_override, merge, parse_yaml, recipe_names, recipe_text
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.recipes.sections import Section, Word
from posttrain.registry import explain_validation, suggest
from posttrain.runs.directory import NAME_RULE, RUN_NAME


def _as_source(value: Any) -> Any:
    return {"recipe": value} if isinstance(value, str) else {} if value is None else value


Source = Annotated[dict[str, Any], BeforeValidator(_as_source), Unread()]


class SweepFile(Section):
    """What the files of all kinds of sweeps have in common.

    ``label``: what it is, for messages. ``shelf``: the folder of the shipped recipes that holds such files.
    ``singles``: keys of one source. ``groups``: keys of sources by name, and what one of them is.
    """

    label: ClassVar[str]
    shelf: ClassVar[str]
    singles: ClassVar[tuple[str, ...]]
    groups: ClassVar[Mapping[str, str]]

    description: str = ""
    seeds: Repetitions = 3

    @classmethod
    def check_kind(cls, data: Mapping[str, Any], place: str) -> None:
        """Raises RecipeError where the file is of another kind."""


File = TypeVar("File", bound=SweepFile)


def read_sweep_file(
    kind: type[File],
    name_or_path: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    content_of_command: Mapping[str, Any] | None = None,
) -> tuple[File, SourceReader]:
    """The file of a sweep, and what turns its sources into recipes.

    Args:
        name_or_path: a file, or a shipped one with or without the name of its shelf.
        overrides: dotted keys of the file with values.
        content_of_command: what stands in the file, where the command line says it all and there is none.

    Raises:
        RecipeError: with file, line and key.
        UsageError: an override of a source that the file does not have.
    """
    if f"{kind.shelf}{name_or_path}" in recipe_names() and not Path(name_or_path).is_file():
        name_or_path = f"{kind.shelf}{name_or_path}"
    if content_of_command is None:
        place, text = recipe_text(name_or_path)
        data, lines = parse_yaml(text, place)
    else:
        place, data, lines = "command line", dict(content_of_command), {}
    kind.check_kind(data, place)
    for key, value in overrides:
        _override(kind, data, key, value, place)
    reader = SourceReader(place, lines, {key for key, _ in overrides})
    try:
        content = kind.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain_validation(error, list(kind.model_fields), "", kind.label, reader.place_of)) from None
    for group, member in kind.groups.items():
        for name in getattr(content, group):
            if not RUN_NAME.fullmatch(name):
                raise RecipeError(
                    f"{reader.place_of(f'{group}.{name}')}{group}.{name}: a {member}'s name is made of {NAME_RULE}, "
                    "because its runs are called by it"
                )
    return content, reader


def _override(kind: type[SweepFile], data: dict[str, Any], key: str, value: str, place: str) -> None:
    """Apply an override of one of the file's own keys, in place; a bare name gains overrides beside it."""
    group, _, rest = key.partition(".")
    holder, name = (data.get(group), rest.partition(".")[0]) if group in kind.groups else (data, group)
    if group in kind.groups and isinstance(holder, dict) and name not in holder:
        names = list(map(str, holder))
        raise UsageError(
            f"--{key}: {place} has no {kind.groups[group]} {name!r}.{suggest(name, names)} There: {', '.join(names)}"
        )
    if group in (*kind.groups, *kind.singles) and isinstance(holder, dict) and name in holder:
        holder[name] = _as_source(holder[name])
    apply_override(data, key, value)


def label_of(source: Mapping[str, Any]) -> str:
    """A source as a reader of results is told of it."""
    name = source.get("recipe", "a recipe of its own")
    return f"{name} with overrides" if len(source) > 1 and "recipe" in source else str(name)


def label_of_word(word: Word) -> str:
    """A word with its options, as a reader of results is told of it."""
    chosen = ", ".join(f"{key} {value}" for key, value in word.options.items() if value is not None)
    return f"{word.name} ({chosen})" if chosen else word.name


@dataclass(frozen=True)
class SourceReader:
    """Turns the sources of one file into recipes; errors say where they stand in it."""

    place: str
    lines: Mapping[str, int]
    overridden: set[str]

    def source(self, source: Mapping[str, Any], where: str) -> Recipe:
        """A resolved recipe from a name, a name with overrides, or a recipe written out."""
        with self.named(where):
            return self.recipe(self.lay_over_recipe(source), where).resolve()

    def lay_over_recipe(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """The data of a source: that of its recipe, if it names one, with its overrides laid over."""
        overrides = {key: value for key, value in source.items() if key != "recipe"}
        return merge(self.named_recipe(source).dump(), overrides) if "recipe" in source else overrides

    def named_recipe(self, source: Mapping[str, Any]) -> Recipe:
        """The recipe that a source names, without its overrides."""
        return load_recipe(str(source["recipe"]), is_own=not is_stored(self.place))

    def recipe(self, data: Mapping[str, Any], where: str, overridden: set[str] | None = None) -> Recipe:
        """A checked recipe from data that stand at ``where``; ``overridden``: further keys of the command line."""
        prefix = f"{where}."
        lines = {key.removeprefix(prefix): n for key, n in self.lines.items() if key.startswith(prefix)}
        keys = self.overridden | (overridden or set())
        return validate_recipe(
            data, self.place, lines, {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}, is_own=False
        )

    def place_of(self, key: str) -> str:
        """File and line of a key, or of what it stands in, as messages begin."""
        if key in self.overridden:
            return "command line: "
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.place}:{self.lines[key]}: " if key else f"{self.place}: "

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Errors in it begin with ``what``."""
        try:
            yield
        except (RecipeError, UnknownWord) as error:
            raise type(error)(f"{what}: {error}") from None
