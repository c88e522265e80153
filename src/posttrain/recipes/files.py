"""Recipe files as plain data: where they are, YAML with line numbers, extension, overrides. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.consent import declare_code, is_stored
from posttrain.errors import RecipeError
from posttrain.file_kinds import kind_of_file
from posttrain.option_types import shorten
from posttrain.strict_yaml import MAX_CHARS, MAX_DEPTH, MAX_KEY_CHARS, read_option, read_yaml

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
    kind = kind_of_file(path)
    if kind == "file":
        return str(path), _read_file(path)
    known = recipe_names()
    if path.suffix in (".yaml", ".yml") or (kind != "nothing" and name_or_path not in known):
        what = "no such recipe file" if kind == "nothing" else f"this is a {kind}; give a recipe's YAML file, or a name"
        raise RecipeError(f"{name_or_path}: {what}. `posttrain recipes` lists those that ship")
    if name_or_path not in known:
        hint = registry.suggest(name_or_path, known)
        raise RecipeError(f"no recipe file or shipped recipe {name_or_path!r}.{hint} `posttrain recipes` lists them")
    resource = resources.files("posttrain") / "recipes" / f"{name_or_path}.yaml"
    return f"{name_or_path}.yaml", resource.read_text(encoding="utf-8")


def _read_file(path: Path) -> str:
    try:
        if path.stat().st_size > 4 * MAX_CHARS:
            raise RecipeError(f"{path}: larger than any recipe; give a file of at most {MAX_CHARS:,} characters")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not a text file in UTF-8; save it as one") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); give a file that can") from None


def parse_yaml(text: str, place: str, *, is_own: bool = True) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in ``text`` and the 1-based line of every dotted key.

    Code that a file of one's own (``is_own``) names is allowed by that, if it is no part of a run (``consent``).

    Raises:
        RecipeError: not YAML, not a mapping, a key given twice, or not what recipes are made of (``strict_yaml``).
    """
    data, lines = read_yaml(text, place)
    if not isinstance(data, dict):
        raise RecipeError(f"{place}: a recipe is a mapping of sections (model, task, objective, ...); write it as one")
    if is_own and kind_of_file(place) == "file" and not is_stored(place):
        declare_code(data, Path(place).parent, Path.cwd())
    return data, lines


def apply_override(data: dict[str, Any], key: str, value: str) -> None:
    """Set a dotted key (``train.lr``, ``rewards.0.weight``) in plain data, in place.

    ``value`` is read as YAML. Setting a whole word by name (``objective reinforce``) replaces the
    word and its options; ``objective.name`` changes the name alone.

    Raises:
        RecipeError: the path runs through something that is not a section.
    """
    parsed = read_option(value, _shown(key)) if value else ""
    if isinstance(parsed, str) and parsed.isascii():  # ``nan`` and ``inf``, and numbers between spaces
        with suppress(ValueError):
            parsed = float(parsed)
    parts = key.split(".")
    if not all(parts) or len(parts) > MAX_DEPTH or max(map(len, parts)) > MAX_KEY_CHARS:
        raise RecipeError(f"command line: {_shown(key)}: there is no such key; write it like train.lr")
    target: Any = data
    for i, part in enumerate(parts[:-1]):
        path = ".".join(parts[: i + 1])
        child = target[_index(target, part, path)] if isinstance(target, list) else target.get(part)
        if child is None:
            child = {}
        elif isinstance(child, str):  # a bare word gains options
            child = {"name": child}
        elif not isinstance(child, dict | list):
            raise RecipeError(f"command line: {key}: {path} is a value, not a section; set {path} itself")
        target[_index(target, part, path) if isinstance(target, list) else part] = child
        target = child
    target[_index(target, parts[-1], key) if isinstance(target, list) else parts[-1]] = parsed


def _index(entries: list[Any], part: str, path: str) -> int:
    if not (part.isascii() and part.isdigit() and len(part) < MAX_KEY_CHARS and int(part) < len(entries)):
        there = f"the list has entries 0 to {len(entries) - 1}" if entries else "there is nothing in the list"
        raise RecipeError(f"command line: {path}: {there}; give the whole list, or one of its entries")
    return int(part)


def _shown(key: str) -> str:
    return key if len(key) <= MAX_KEY_CHARS else f"{key[:40]}..."


# Sections that have a key called name, and yet are no words: what is not given stays as it was below.
_NAMED_SECTIONS = ("model", "teacher")
_MAX_BELOW = 20


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
        raise RecipeError(f"{where}: give a recipe's name or file; got {shorten(name)}")
    if len(above) == _MAX_BELOW:
        raise RecipeError(f"{where}: more than {_MAX_BELOW} recipes extend one another; write some of them together")
    if name in above:
        what = " and ".join(map(repr, above))
        how = "extends itself" if len(above) == 1 else "extend one another in a circle"
        raise RecipeError(f"{where}: {what} {how}; leave one out")
    beside = Path(place).parent / name
    try:
        below_place, text = recipe_text(str(beside) if name and kind_of_file(beside) != "nothing" else name)
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


def flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested mappings and lists: ``{"train": {"lr": 1}}`` gives ``{"train.lr": 1}``."""
    if isinstance(data, Mapping) and data:
        items = [(str(key), value) for key, value in data.items()]
    elif isinstance(data, list) and data:
        items = [(str(index), value) for index, value in enumerate(data)]
    else:
        return {prefix: data}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else key))
    return flat
