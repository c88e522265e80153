"""The method in a recipe: what a row takes from its recipe when the sweep has a base. Plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from posttrain.recipes.document import flatten

# The keys that a row's recipe brings into a sweep with a base. Everything else is the base's.
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
    "data.label_above",
    "rollout.drop_uniform_groups",
    "rollout.uniform_by",
    "rollout.max_rounds",
    "rollout.old_logprobs",
)
# What a row also brings where it learns from the other kind of thing (data, or its own answers): it cannot learn from
# the base's. Everything else is held equal.
SOURCE_KEYS = ("task", "rollout", "data", "rewards", "train.epochs", "train.minibatches")
LEARNS_FROM = "what it learns from"
_OF_A_TRIAL = ("train.seed", "description")  # they tell the trials of one row apart


def belongs_to_method(key: str) -> bool:
    """Return whether a dotted key is, or lies under, one of ``METHOD_KEYS``."""
    return any(key == known or key.startswith(f"{known}.") for known in METHOD_KEYS)


def without_method(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's data without its method."""
    return _replaced(data, {}, METHOD_KEYS)


def with_method_of(base: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the base's data with the method of a recipe in place of its own."""
    return _replaced(base, recipe, METHOD_KEYS)


def with_source_of(base: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the base's data that learns from what the recipe learns from."""
    return _replaced(base, recipe, SOURCE_KEYS)


def _replaced(data: Mapping[str, Any], other: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """A copy of ``data`` in which the ``keys`` are those of ``other``; what it does not have is taken away."""
    copy = deepcopy(dict(data))
    for key in keys:
        section, _, name = key.rpartition(".")
        source = (other.get(section) or {}) if section else other
        has_value = source.get(name) is not None
        place = copy.setdefault(section, {}) if section and has_value else copy.get(section) if section else copy
        if isinstance(place, dict):
            place.pop(name, None)
            if has_value:
                place[name] = deepcopy(source[name])
    return copy


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``document.merge`` must lay over ``old`` to get ``new``; None takes a key away."""
    changes: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if before == value:
            continue
        is_section = isinstance(value, Mapping) and ("name" not in value or key == "model")  # else a component or value
        if is_section and isinstance(before, Mapping):
            changes[key] = changes_between(before, value)
        else:
            changes[key] = deepcopy(value)
    return changes


def differences(base: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys outside of the method in which a row differs from the base, as (base, row).

    Where one of them learns from data and the other from its own answers, that is one difference.
    """
    old, new = flatten(base), flatten(row)
    changes = {
        key: (old.get(key), new.get(key))
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not belongs_to_method(key) and key not in _OF_A_TRIAL
    }
    kinds = ["data" if data.get("rollout") is None else "its own answers" for data in (base, row)]
    if kinds[0] != kinds[1]:
        kept = {key: pair for key, pair in changes.items() if key.partition(".")[0] not in ("rollout", "data")}
        return {LEARNS_FROM: (kinds[0], kinds[1]), **kept}
    return changes
