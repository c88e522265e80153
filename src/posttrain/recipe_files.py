"""Recipe files as plain data: where they are, YAML with line numbers, extension, overrides. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from posttrain import registry
from posttrain.consent import declare_code, is_stored
from posttrain.errors import RecipeError

# Sections that make a recipe one of `posttrain sae`: of a dictionary that is trained, of models that are compared.
INTERPRETATION = ("dictionary", "changes")


def recipe_names() -> list[str]:
    """Names of the recipes that ship in the package, such as ``tiny/grpo``."""
    root = resources.files("posttrain") / "recipes"
    return sorted(_walk(root, ""))


def _walk(folder: Any, prefix: str) -> Iterator[str]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _walk(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".yaml"):
            yield prefix + item.name.removesuffix(".yaml")


def interpretation_names(section: str | None = None) -> list[str]:
    """Names of the shipped recipes that look into models instead of training them, told by a section of theirs.

    With ``section``, only those that have it.
    """
    wanted = INTERPRETATION if section is None else (section,)
    return [name for name in recipe_names() if any(_has_section(recipe_text(name)[1], key) for key in wanted)]


def study_names() -> list[str]:
    """Names of the shipped recipes that `posttrain study` takes, such as ``study/overoptimization``."""
    return [name for name in recipe_names() if _has_section(recipe_text(name)[1], "study")]


def _has_section(text: str, key: str) -> bool:
    """Whether a top-level key stands in a file; read as lines, for all recipes are looked through at once."""
    return any(line.startswith(f"{key}:") for line in text.splitlines())


def recipe_text(name_or_path: str) -> tuple[str, str]:
    """(place, text) of a recipe file, or of a shipped recipe by name.

    Raises:
        RecipeError: neither a file nor a known name.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise RecipeError(f"{path}: no such recipe file")
        try:
            return str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise RecipeError(f"{path}: not a text file in UTF-8") from None
    known = recipe_names()
    if name_or_path not in known:
        hint = registry.suggest(name_or_path, known)
        raise RecipeError(f"no recipe file or shipped recipe {name_or_path!r}.{hint} `posttrain recipes` lists them")
    resource = resources.files("posttrain") / "recipes" / f"{name_or_path}.yaml"
    return f"{name_or_path}.yaml", resource.read_text(encoding="utf-8")


def parse_yaml(text: str, place: str, *, is_own: bool = True) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in ``text`` and the 1-based line of every dotted key.

    Code that a file of one's own (``is_own``) names is allowed by that, if it is no part of a run (``consent``).

    Raises:
        RecipeError: not YAML, not a mapping, or a key given twice.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise RecipeError(f"{place}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{place}: a recipe is a mapping of sections (model, task, objective, ...)")
    if is_own and Path(place).is_file() and not is_stored(place):
        declare_code(data, Path(place).parent, Path.cwd())
    lines: dict[str, int] = {}
    _collect_lines(node, "", lines, place)
    return data, lines


def _collect_lines(node: Any, prefix: str, lines: dict[str, int], place: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}{key_node.value}"
            if key in lines:
                raise RecipeError(f"{place}:{key_node.start_mark.line + 1}: {key}: this key stands twice")
            lines[key] = key_node.start_mark.line + 1
            _collect_lines(value_node, f"{key}.", lines, place)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines[f"{prefix}{i}"] = item.start_mark.line + 1
            _collect_lines(item, f"{prefix}{i}.", lines, place)


def apply_override(data: dict[str, Any], key: str, value: str) -> None:
    """Set a dotted key (``train.lr``, ``rewards.0.weight``) in plain data, in place.

    ``value`` is read as YAML. Setting a whole word by name (``objective reinforce``) replaces the
    word and its options; ``objective.name`` changes the name alone.

    Raises:
        RecipeError: the path runs through something that is not a section.
    """
    try:
        parsed = yaml.safe_load(value) if value else ""
    except yaml.YAMLError:
        parsed = value
    if isinstance(parsed, str):  # YAML 1.1 reads 1e-4 as text; people mean a number
        with suppress(ValueError):
            parsed = float(parsed)
    target: Any = data
    parts = key.split(".")
    for i, part in enumerate(parts[:-1]):
        path = ".".join(parts[: i + 1])
        if isinstance(target, list):
            target = _list_item(target, part, path)
            continue
        child = target.get(part)
        if child is None:
            child = target[part] = {}
        elif isinstance(child, str):  # a bare word gains options
            child = target[part] = {"name": child}
        elif not isinstance(child, dict | list):
            raise RecipeError(f"command line: {key}: {path} is a value, not a section")
        target = child
    if isinstance(target, list):
        index = int(parts[-1]) if parts[-1].isdigit() and int(parts[-1]) < len(target) else None
        if index is None:
            raise RecipeError(f"command line: {key}: the list has entries 0 to {len(target) - 1}")
        target[index] = parsed
    else:
        target[parts[-1]] = parsed


def _list_item(target: list[Any], part: str, path: str) -> Any:
    if not part.isdigit() or int(part) >= len(target):
        raise RecipeError(f"command line: {path}: the list has entries 0 to {len(target) - 1}")
    index = int(part)
    if isinstance(target[index], str):
        target[index] = {"name": target[index]}
    return target[index]


# Sections that have a key called name, and yet are no words: what is not given stays as it was below.
_NAMED_SECTIONS = ("model", "teacher")


def extend(
    data: Mapping[str, Any], place: str, lines: Mapping[str, int], above: Sequence[str] = (), *, is_own: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """``data`` laid over the recipe that its key ``extends`` names, and where each key of that recipe stands.

    ``place`` is the file that ``data`` is from, with its ``lines``; places are ``file:line`` by dotted key. A file is
    looked for beside the one that names it, then from the working directory. Sections are merged key by key; a
    word replaces the word below it with all its options; ``null`` takes a word or section away. A description is
    not inherited.

    Raises:
        RecipeError: no such recipe, or recipes that extend one another in a circle.
    """
    own = dict(data)
    name = own.pop("extends", None)
    if name is None:
        return own, {}
    where = f"{place}:{lines['extends']}: extends"
    if not isinstance(name, str):
        raise RecipeError(f"{where}: give a recipe's name or file; got {name!r}")
    if name in above:
        what = " and ".join(map(repr, above))
        raise RecipeError(
            f"{where}: {what} {'extends itself' if len(above) == 1 else 'extend one another in a circle'}"
        )
    beside = Path(place).parent / name
    try:
        below_place, text = recipe_text(str(beside) if beside.is_file() else name)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    is_own = is_own and not is_stored(place)  # what a stored recipe extends is its business, and no word of the user's
    below_data, below_lines = parse_yaml(text, below_place, is_own=is_own)
    below, places = extend(below_data, below_place, below_lines, (*above, name), is_own=is_own)
    below.pop("description", None)
    places |= {key: f"{below_place}:{line}" for key, line in below_lines.items()}
    return merge(below, own), places


def merge(below: Mapping[str, Any], above: Mapping[str, Any], inside: bool = False) -> dict[str, Any]:
    """Plain data of a recipe with changes laid over it; see ``extend`` for the rules.

    ``inside`` a section or word, ``null`` is a value like any other (``max_grad_norm: null``).
    """
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        if isinstance(known, str) and isinstance(value, Mapping):
            known = {"name": known}  # a bare word, which may gain options
        joins = isinstance(value, Mapping) and ("name" not in value or key in _NAMED_SECTIONS)
        if joins and isinstance(known, Mapping):
            merged[key] = merge(known, value, inside=True)
        elif value is None and not inside:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged
