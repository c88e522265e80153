"""Merge recipe data and set dotted keys."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.errors import RecipeError
from posttrain.strict_yaml import MAX_DEPTH, MAX_KEY_CHARS, read_option
from posttrain.untrusted import cut_end

# Sections with a plain ``name`` key that are not components. Unspecified keys keep inherited values.
_NAMED_SECTIONS = ("model", "teacher")
# Training length keys. Setting one removes the other.
LENGTHS = ("steps", "num_epochs")
# YAML value; commas inside quotes or brackets do not split.
_VALUE = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|\[[^][]*\]|\{[^{}]*\}|[^,])+""")


def split_values(listed: str) -> list[str]:
    """Split ``1e-4,3e-4`` at commas, ignoring commas inside quotes or brackets.

    If a value between commas is missing, the last value is empty.
    """
    found = _VALUE.findall(listed)
    values = [value.strip() for value in found]
    if ",".join(found) != listed:
        values.append("")
    return values


def apply_overrides(data: dict[str, object], overrides: Sequence[tuple[str, str]]) -> list[str]:
    """Set dotted keys in place. Whole components are set before component options, regardless of order.

    Changing the task drops earlier ``eval.tasks``.

    Returns:
        Keys with names of list entries resolved to indices.

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
    """Remove ``eval.tasks`` after a task change, so evaluation uses the new task."""
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
    """Set a dotted key (``train.lr``, ``rewards.0.weight`` or ``rewards.correct.weight``) in place.

    ``value`` is parsed as YAML. A plain name for a component (``objective reinforce``) also replaces its options.
    Returns the key with list indices.

    Raises:
        RecipeError: the path goes through a value that isn't a section.
    """
    shown = cut_end(key, MAX_KEY_CHARS)
    parsed: object = ""
    if value:
        parsed = read_option(value, shown)
    parts = key.split(".")
    if not all(parts) or len(parts) > MAX_DEPTH or max(map(len, parts)) > MAX_KEY_CHARS:
        raise RecipeError(f"command line: {shown}: no such key; write it like train.lr")
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
        elif isinstance(child, str):  # give a plain name options
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
    """Resolve a section key (``ppo-epochs`` to ``ppo_epochs``), or a list index by number or name.

    Raises:
        RecipeError: missing or ambiguous list entry.
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
        raise RecipeError(
            f"command line: {path}: the list has multiple entries named {part!r}; give an index, {numbers}"
        )
    named = [name for name in names if isinstance(name, str)]
    there = "the list is empty"
    if entries:
        there = f"the list has entries 0 to {len(entries) - 1}"
    if named:
        there += f" ({', '.join(named)})"
    raise RecipeError(f"command line: {path}: {there}; give the whole list, or one entry")


def merge(below: Mapping[str, Any], above: Mapping[str, Any], inside: bool = False) -> dict[str, Any]:
    """Merge changes into recipe data. See ``Document.extend`` for the rules.

    ``inside`` sections and components, ``null`` is an ordinary value (``max_grad_norm: null``). Changes with a new
    task but without ``eval.tasks`` inherit no evaluation tasks.
    """
    merged = dict(below)
    _displace(merged, above)
    for key, value in above.items():
        known: object = merged.get(key)
        if isinstance(known, str) and isinstance(value, Mapping):
            known = {"name": known}  # plain name that may gain options
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
    """Remove training length keys from ``below`` if ``above`` sets a different one."""
    given = [key for key in LENGTHS if above.get(key) is not None]
    if given:
        for key in LENGTHS:
            if key not in given:
                below.pop(key, None)


def flatten(data: object, prefix: str = "") -> dict[str, Any]:
    """List dotted keys for nested mappings and lists: ``{"train": {"lr": 1}}`` gives ``{"train.lr": 1}``."""
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
