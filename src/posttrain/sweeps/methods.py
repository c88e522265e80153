"""What of a recipe is the method, and in what two recipes differ. Plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from posttrain.recipes.document import flatten

# The keys that a method's recipe brings into a comparison. Everything else is the base's.
METHOD_KEYS = (
    "objective",
    "regularize",
    "advantage",
    "aggregate",
    "correction",
    "kl_in_reward",
    "head",
    "teacher",
    "rollout.select",
    "rollout.label_above",
    "rollout.drop_uniform_groups",
    "rollout.uniform_by",
    "rollout.max_rounds",
    "rollout.old_logprobs",
)
# What a method brings besides where it learns from the other kind of thing (data, or its own answers): it cannot learn
# from the base's. Everything else is held equal.
SOURCE_KEYS = ("task", "rollout", "data", "rewards", "train.epochs", "train.minibatches")
LEARNS_FROM = "what it learns from"
# What tells the cells of one method apart, or is only said about them.
CELL_KEYS = ("train.seed", "description")


def belongs_to_method(key: str) -> bool:
    """Whether a dotted key is, or lies under, one of ``METHOD_KEYS``."""
    return any(key == known or key.startswith(f"{known}.") for known in METHOD_KEYS)


def without_method(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's data without its method."""
    copy = deepcopy(dict(data))
    for key in METHOD_KEYS:
        section, _, name = key.rpartition(".")
        place = copy.get(section) if section else copy
        if isinstance(place, dict):
            place.pop(name, None)
    return copy


def method_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """The method alone, as nested data; keys that the recipe does not give are not there."""
    part: dict[str, Any] = {}
    for key in METHOD_KEYS:
        section, _, name = key.rpartition(".")
        place = data.get(section) if section else data
        if isinstance(place, Mapping) and place.get(name) is not None:
            target = part.setdefault(section, {}) if section else part
            target[name] = deepcopy(place[name])
    return part


def with_source_of(base: Mapping[str, Any], donor: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the base's data that learns from what the donor learns from."""
    copy = deepcopy(dict(base))
    for key in SOURCE_KEYS:
        section, _, name = key.rpartition(".")
        place, own = (copy.setdefault(section, {}), donor.get(section, {})) if section else (copy, donor)
        place.pop(name, None)
        if own.get(name) is not None:
            place[name] = deepcopy(own[name])
    return copy


def tell_sources(changes: Mapping[str, tuple[Any, Any]], learns: tuple[str, str]) -> dict[str, tuple[Any, Any]]:
    """Differences in which the keys of ``rollout`` and ``data`` are one: what the base and the method learn from."""
    kept = {key: pair for key, pair in changes.items() if key.partition(".")[0] not in ("rollout", "data")}
    return {LEARNS_FROM: learns, **kept}


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What ``document.merge`` must lay over ``old`` to get ``new``; None takes a key away."""
    changes: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if before == value:
            continue
        is_section = isinstance(value, Mapping) and ("name" not in value or key == "model")  # else a word, or a value
        if is_section and isinstance(before, Mapping):
            changes[key] = changes_between(before, value)
        else:
            changes[key] = deepcopy(value)
    return changes


def differences(base: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys outside of the method in which a cell differs from the base, as (base, cell)."""
    old, new = flatten(base), flatten(cell)
    return {
        key: (old.get(key), new.get(key))
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not belongs_to_method(key) and key not in CELL_KEYS
    }
