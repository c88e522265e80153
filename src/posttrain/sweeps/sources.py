"""The file of a sweep: a strict document whose sources become recipes, checked one by one.

A source is the name of a recipe, ``{recipe: name, ...overrides}`` or a recipe written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator

from posttrain.consent import is_stored
from posttrain.errors import RecipeError, UnknownWord, UsageError
from posttrain.option_types import Repetitions, Unread
from posttrain.recipes.document import Content, Document, complete_word, key_parts, merge, recipe_names
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.recipes.sections import Word
from posttrain.registry import suggest
from posttrain.runs.directory import NAME_RULE, RUN_NAME


def _as_source(value: Any) -> Any:
    return {"recipe": value} if isinstance(value, str) else {} if value is None else value


# By (key of the file, name), in the file's order.
Recipes = Mapping[tuple[str, str], Recipe]
Source = Annotated[dict[str, Any], BeforeValidator(_as_source), Unread()]


class SweepFile(Content):
    """What the files of all kinds of sweeps have in common.

    ``shelf``: the folder of the shipped recipes that holds such files. ``singles``: keys of one source. ``groups``:
    keys of sources by name, and what one of them is.
    """

    extensible = False
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
) -> tuple[File, Document[File]]:
    """The file of a sweep, checked, and the document that says where its sources stand.

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
        document = Document.load(kind, name_or_path, shelf=kind.shelf)
    else:
        document = Document(kind, dict(content_of_command), "command line")
    kind.check_kind(document.content, document.place)
    for key, _ in overrides:
        _prepare_override(document, key)
    document = document.override(overrides)
    content = document.check()
    for group, member in kind.groups.items():
        for name in getattr(content, group):
            if not RUN_NAME.fullmatch(name):
                says = f"a {member}'s name is made of {NAME_RULE}, because its runs are called by it"
                raise refusal(document, f"{group}.{name}", says)
    return content, document


def _prepare_override(document: Document[File], key: str) -> None:
    """A source that ``key`` belongs to becomes a mapping, in place: overrides stand beside a bare name."""
    kind, holder = document.model, document.content
    group, *rest = key_parts(key)
    name = group
    if group in kind.groups and rest:
        holder, name = holder.get(group, {}), rest[0]
        if isinstance(holder, dict) and name not in holder:
            names = list(map(str, holder))
            hint = suggest(name, names)
            raise UsageError(
                f"--{key}: {document.place} has no {kind.groups[group]} {name!r}.{hint} There: {', '.join(names)}"
            )
    if group in (*kind.groups, *kind.singles) and isinstance(holder, dict) and name in holder:
        holder[name] = _as_source(holder[name])


def choose_names(known: list[str], wanted: Sequence[str] | None, place: str, member: str) -> list[str]:
    """The wanted names of a group, each once; all where None. ``member``: what one of them is.

    Raises:
        UsageError: the file has no such member, or none is named.
    """
    if wanted is None:
        return known
    there = ", ".join(known)
    for name in wanted:
        if name not in known:
            raise UsageError(f"--methods: {place} has no {member} {name!r}.{suggest(name, known)} There: {there}")
    if not wanted:
        raise UsageError(f"--methods: name at least one of {there}")
    return list(dict.fromkeys(wanted))


def label_of(source: Mapping[str, Any]) -> str:
    """A source as a reader of results is told of it."""
    name = source.get("recipe", "a recipe of its own")
    return f"{name} with overrides" if len(source) > 1 and "recipe" in source else str(name)


def label_of_word(word: Word) -> str:
    """A word with its options, as a reader of results is told of it."""
    chosen = ", ".join(f"{key} {value}" for key, value in word.options.items() if value is not None)
    return f"{word.name} ({chosen})" if chosen else word.name


def read_source(document: Document[File], source: Mapping[str, Any], where: str) -> Recipe:
    """A resolved recipe from a name, a name with overrides, or a recipe written out, which stands at ``where``."""
    with named(where):
        return document.part(Recipe, where, lay_over_recipe(document, source)).check().resolve()


def lay_over_recipe(document: Document[File], source: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a source: that of its recipe, if it names one, with its overrides laid over."""
    overrides = {key: value for key, value in source.items() if key != "recipe"}
    return merge(named_recipe(document, source).dump(), overrides) if "recipe" in source else overrides


def named_recipe(document: Document[File], source: Mapping[str, Any]) -> Recipe:
    """The recipe that a source names, without its overrides."""
    return load_recipe(str(source["recipe"]), is_own=not is_stored(document.place))


def refusal(document: Document[File], where: str, says: str) -> RecipeError:
    """That what stands at a dotted key cannot be."""
    return RecipeError(f"{document.line_of(where)}{where}: {says}")


def read_parts(document: Document[File], sources: Mapping[tuple[str, str], Mapping[str, Any]]) -> Recipes:
    """The recipes of reward models and policies, all of which begin with the weights of the file's start.

    Raises:
        RecipeError, UnknownWord: with file, line and key; also one that begins otherwise, or is of the wrong kind.
    """
    recipes: dict[tuple[str, str], Recipe] = {}
    for (group, name), source in sources.items():
        where = f"{group}.{name}"
        recipes[group, name] = recipe = read_source(document, source, where)
        objective = f"objective {recipe.objective.name!r}"
        if recipe.model.init is not None:
            says = "it begins with the weights of the start; leave this out"
            raise refusal(document, f"{where}.model.init", says)
        if group == "reward_models" and not recipe.trains_scorer:
            says = f"{objective} trains no reward model; use bradley_terry, outcome or process"
            raise refusal(document, where, says)
        if group == "policies" and recipe.trains_scorer:
            raise refusal(document, where, f"{objective} trains a reward model, not a policy")
    return recipes


def resolve_file(content: SweepFile, start: Recipe, recipes: Recipes, num_seeds: int) -> dict[str, Any]:
    """A file with everything resolved, from the recipes of its ``start`` and of its parts."""
    resolved = content.model_dump(mode="json") | {"start": start.dump(), "seeds": num_seeds}
    for group in content.groups:
        resolved[group] = {name: recipe.dump() for (own, name), recipe in recipes.items() if own == group}
    return {key: value for key, value in resolved.items() if value not in ("", None, {})}


def check_task(document: Document[File], section: str, word: Word) -> None:
    """Refuse the task of a section of the sweep's own that is unknown, or that has options which it does not take.

    Raises:
        RecipeError, UnknownWord: with file, line and key.
    """
    key = f"{section}.task"
    complete_word(word, "task", f"{document.line_of(key)}{key}")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors in it begin with ``what``."""
    try:
        yield
    except (RecipeError, UnknownWord) as error:
        raise type(error)(f"{what}: {error}") from None
