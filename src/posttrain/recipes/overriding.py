"""Plain data of a recipe laid over other data, and dotted keys set in it: what replaces what."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.errors import RecipeError
from posttrain.strict_yaml import MAX_DEPTH, MAX_KEY_CHARS, read_option
from posttrain.untrusted import cut_end

# Sections that have a key called name, and are no components: what is not given stays as it was below.
_NAMED_SECTIONS = ("model", "teacher")
# Keys of the length of a training: one replaces the other.
LENGTHS = ("steps", "num_epochs")
# A value as YAML has it: a comma in quotes or brackets is its own.
_VALUE = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|\[[^][]*\]|\{[^{}]*\}|[^,])+""")


def split_values(listed: str) -> list[str]:
    """Split ``1e-4,3e-4`` into values at its commas, but not at those in quotes or brackets.

    If one between commas is missing, the last value is empty.
    """
    found = _VALUE.findall(listed)
    values = [value.strip() for value in found]
    if ",".join(found) != listed:
        values.append("")
    return values


def apply_overrides(data: dict[str, object], overrides: Sequence[tuple[str, str]]) -> list[str]:
    """Set dotted keys in plain data, in place: whole components before their options, in whichever order they come.

    With another task, ``eval.tasks`` of the earlier one go.

    Return the keys with the numbers of list entries that they named.

    Raises:
        RecipeError: see ``apply_override``.
    """
    task = copy.deepcopy(data.get("task"))
    whole_first = sorted(overrides, key=lambda override: override[0].count("."))
    keys = [apply_override(data, key, value) for key, value in whole_first]
    if not any(key == "eval" or key.startswith("eval.tasks") for key, _ in overrides):
        _drop_evaluation_of(task, data)
    return keys


def _drop_evaluation_of(before: object, data: dict[str, object]) -> None:
    """Remove ``eval.tasks`` where another task is trained on than ``before``: evaluation is then of the new task."""
    name = _component_name(data.get("task"))
    evaluation = data.get("eval")
    if before is None or name in (None, _component_name(before)) or not isinstance(evaluation, Mapping):
        return
    tasks = evaluation.get("tasks")
    if not tasks:
        return
    if not isinstance(tasks, list):
        tasks = [tasks]
    if any(_component_name(task) != name for task in tasks):
        data["eval"] = {key: value for key, value in evaluation.items() if key != "tasks"}


def _component_name(component: object) -> object:
    if not isinstance(component, Mapping):
        return component
    return component.get("name")


def apply_override(data: dict[str, Any], key: str, value: str) -> str:
    """Set a dotted key (``train.lr``, ``rewards.0.weight`` or ``rewards.correct.weight``) in plain data, in place.

    ``value`` is read as YAML. A name for a whole component (``objective reinforce``) replaces its options too. Returns
    the key with numbers.

    Raises:
        RecipeError: the path runs through something that is not a section.
    """
    shown = cut_end(key, MAX_KEY_CHARS)
    parsed: object = ""
    if value:
        parsed = read_option(value, shown)
    parts = key.split(".")
    if not all(parts) or len(parts) > MAX_DEPTH or max(map(len, parts)) > MAX_KEY_CHARS:
        raise RecipeError(f"command line: {shown}: there is no such key; write it like train.lr")
    target: Any = data
    for i, part in enumerate(parts):
        place = _place_in(target, part, ".".join(parts[: i + 1]))
        parts[i] = str(place)
        path = ".".join(parts[: i + 1])
        if i + 1 == len(parts):
            break
        if isinstance(target, dict):
            child = target.get(place)
        else:
            child = target[place]
        if child is None:
            child = {}
        elif isinstance(child, str):  # a bare name gains options
            child = {"name": child}
        elif not isinstance(child, dict | list):
            raise RecipeError(f"command line: {key}: {path} is a value, not a section; set {path} itself")
        target[place] = child
        target = child
    if isinstance(target, dict):
        _displace(target, {str(place): parsed})
    target[place] = parsed
    return ".".join(parts)


def _place_in(entries: Mapping[str, object] | list[object], part: str, path: str) -> str | int:
    """Return a key of a section (``ppo-epochs`` is ``ppo_epochs``), or the index of a list's entry by number or name.

    Raises:
        RecipeError: a list has no such entry, or several of that name.
    """
    if not isinstance(entries, list):
        if part in entries:
            return part
        return part.replace("-", "_")
    if part.isascii() and part.isdigit() and len(part) < MAX_KEY_CHARS and int(part) < len(entries):
        return int(part)
    names = [_component_name(entry) for entry in entries]
    if names.count(part) == 1:
        return names.index(part)
    if part in names:
        numbers = " and ".join(str(place) for place, name in enumerate(names) if name == part)
        raise RecipeError(f"command line: {path}: the list has several entries {part!r}; give the number, {numbers}")
    named = [name for name in names if isinstance(name, str)]
    there = "there is nothing in the list"
    if entries:
        there = f"the list has entries 0 to {len(entries) - 1}"
    if named:
        there += f" ({', '.join(named)})"
    raise RecipeError(f"command line: {path}: {there}; give the whole list, or one of its entries")


def merge(below: Mapping[str, Any], above: Mapping[str, Any], inside: bool = False) -> dict[str, Any]:
    """Return plain data of a recipe with changes laid over it; see ``Document.extend`` for the rules.

    ``inside`` a section or component, ``null`` is a value like any other (``max_grad_norm: null``). Changes that name
    another task and no ``eval.tasks`` inherit none.
    """
    merged = dict(below)
    _displace(merged, above)
    for key, value in above.items():
        known: object = merged.get(key)
        if isinstance(known, str) and isinstance(value, Mapping):
            known = {"name": known}  # a bare name, which may gain options
        joins = isinstance(value, Mapping) and ("name" not in value or key in _NAMED_SECTIONS)
        if joins and isinstance(known, Mapping):
            merged[key] = merge(known, value, inside=True)
        elif value is None and not inside:
            merged.pop(key, None)
        else:
            merged[key] = value
    own = above.get("eval")
    if not inside and not (isinstance(own, Mapping) and "tasks" in own):
        _drop_evaluation_of(below.get("task"), merged)
    return merged


def _displace(below: dict[str, object], above: Mapping[str, object]) -> None:
    """Remove a length from ``below`` where ``above`` has another one."""
    given = [key for key in LENGTHS if above.get(key) is not None]
    if given:
        for key in LENGTHS:
            if key not in given:
                below.pop(key, None)


def flatten(data: object, prefix: str = "") -> dict[str, Any]:
    """Return the dotted keys of nested mappings and lists: ``{"train": {"lr": 1}}`` gives ``{"train.lr": 1}``."""
    if not isinstance(data, Mapping | list) or not data:
        return {prefix: data}
    pairs: Iterable[tuple[object, object]] = enumerate(data)
    if isinstance(data, Mapping):
        pairs = data.items()
    above = ""
    if prefix:
        above = f"{prefix}."
    flat: dict[str, Any] = {}
    for key, value in pairs:
        flat |= flatten(value, f"{above}{key}")
    return flat
