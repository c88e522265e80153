"""Options of a resolved recipe that cannot change what its run does, with the reason.

The conditions are declared at the options (``posttrain.acting``): in the annotations of sections, and of the
keyword-only arguments of components.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from posttrain import registry
from posttrain.acting.facts import ActsIf, Rounding, RunFacts, SwitchedOff
from posttrain.recipes.overriding import flatten
from posttrain.recipes.recipe import COMPONENT_KINDS, Recipe
from posttrain.recipes.sections import Component, RolloutSection, Section, task_components
from posttrain.untrusted import is_declared

ROOM = 10  # how many times the mismatch of ratios a clip range should be
BF16_MISMATCH = 5e-3  # what bf16 moves the ratio of a sampled token by, in the mean, on models of 0.1 to 2 billion


@dataclass(frozen=True, slots=True)
class InertOption:
    """An option that does nothing in a run.

    ``reason``: why; ``is_exact``: without it the option changes the rounding of the weights. ``is_shown``: the option
    has another value than its default, or is what its method is about.
    """

    key: str
    reason: str
    is_exact: bool
    is_shown: bool
    remedy: str


def condition_of(field: FieldInfo) -> ActsIf | None:
    """Return the condition that an option declares."""
    for extra in field.metadata:
        if isinstance(extra, ActsIf):
            return extra
    return None


def facts_of(recipe: Recipe, needs: Collection[str]) -> RunFacts:
    """Return what conditions read of a resolved recipe whose run fills the batch fields ``needs``."""
    scale_free = False
    if recipe.advantage is not None and is_declared(recipe.advantage.name):
        scale_free = bool(registry.find("advantage", recipe.advantage.name).traits.get("scale_free"))
    return RunFacts(flatten(recipe.dump()), frozenset(needs), scale_free, recipe.trains_scorer)


def find_inert_options(recipe: Recipe, needs: Collection[str]) -> list[InertOption]:
    """Return the options of a resolved recipe that do nothing, in the order of its keys."""
    facts = facts_of(recipe, needs)
    found = []
    for key, value, field in _options_of(recipe):
        condition = condition_of(field)
        if condition is None:
            continue
        reason = condition.why_not(facts, key)
        if not reason:
            continue
        is_default = value in _silent_values(field)
        is_exact = not isinstance(reason, Rounding)
        speaks = condition.by_default and not isinstance(reason, SwitchedOff)
        is_shown = speaks or not is_default
        found.append(InertOption(key, str(reason), is_exact, is_shown, condition.remedy))
    return found


def ratio_bounds(recipe: Recipe) -> dict[str, float]:
    """Return by key how far from 1 the objective's bounds of the ratio to the sampler are."""
    bounds = {}
    for key, value, field in _options_of(recipe):
        condition = condition_of(field)
        if condition is not None and condition.distance is not None and value is not None:
            bounds[key] = condition.distance(value)
    return bounds


def narrow_bounds(bounds: Mapping[str, float], mismatch: float) -> str:
    """Return the bounds of the ratio that are less than ``ROOM`` times its mismatch, with their values, in words."""
    narrow = []
    for key, distance in bounds.items():
        if distance < ROOM * mismatch:
            narrow.append(f"{key} {distance:g}")
    return ", ".join(narrow)


def option_notes(recipe: Recipe, needs: Collection[str]) -> list[str]:
    """Return what a resolved recipe's options do not do, or do by rounding: lines for the start of its run."""
    narrow = expected_narrow_bounds(ratio_bounds(recipe), recipe.model.dtype, recipe.rollout)
    return [*describe_inert_options(find_inert_options(recipe, needs)), *narrow]


def expected_narrow_bounds(bounds: Mapping[str, float], dtype: str, rollout: RolloutSection | None) -> list[str]:
    """Return a line where ``bounds`` of the ratio are as narrow as what 16 bits round, before anything is measured.

    ``dtype``: of the trained model.
    """
    if rollout is None or rollout.old_logprobs == "trainer":
        return []
    types = {dtype, rollout.engine.options.get("dtype", dtype)}
    if "bf16" not in types:
        return []
    narrow = narrow_bounds(bounds, BF16_MISMATCH)
    if not narrow:
        return []
    return [
        f"{narrow}: in bf16 sampler and trainer round apart, which moves ratios by about {BF16_MISMATCH:g}, and a clip "
        f"range below {ROOM} times that clips rounding. Set rollout.old_logprobs: trainer"
    ]


def _silent_values(field: FieldInfo) -> list[object]:
    """Return the values at which nobody set an option: its default, and what stands for none."""
    if field.is_required():
        return []
    default = field.get_default(call_default_factory=True)
    if default is None:
        return [None, 0]
    return [default]


def describe_inert_options(options: Collection[InertOption]) -> list[str]:
    """Return a line for the options of one section or component that do nothing for one reason.

    ``objective.clip_low, clip_high do nothing: one update per batch of answers (...), so the ratio is 1``.
    """
    grouped: dict[tuple[str, str, bool], list[str]] = {}
    for option in options:
        if option.is_shown:
            above, _, name = option.key.rpartition(".")
            grouped.setdefault((above, option.reason, option.is_exact), []).append(name)
    lines = []
    for (above, reason, is_exact), names in grouped.items():
        lines.append(f"{above}.{', '.join(names)} {_what_they_do(len(names), is_exact)}: {reason}")
    return lines


def refuse_inert_option(key: str, options: Collection[InertOption]) -> str:
    """Return the message that values of ``key`` cannot be compared; empty if the option acts."""
    for option in options:
        if option.key == key:
            remedy = option.remedy or "Compare another key"
            return f"{key} {_what_they_do(1, option.is_exact)}: {option.reason}. {remedy}"
    return ""


def _what_they_do(number: int, is_exact: bool) -> str:
    one = number == 1
    if is_exact:
        return "does nothing" if one else "do nothing"
    return "changes rounding only" if one else "change rounding only"


def _options_of(recipe: Recipe) -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yield the dotted key, the value and the declaration of every option of sections and components."""
    yield from _of_section(recipe, "")
    for path, kind in COMPONENT_KINDS.items():
        value: Any = recipe
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, list):
            for number, component in enumerate(value):
                yield from _of_component(component, kind, f"{path}.{number}")
        elif value is not None:
            yield from _of_component(value, kind, path)


def _of_component(component: Component, kind: str, where: str) -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yield the options of a component, and of the tasks of a mixture's parts."""
    if not is_declared(component.name):
        return
    fields = registry.find(kind, component.name, where).options_model.model_fields
    for name, value in component.options.items():
        if name in fields:
            yield f"{where}.{name}", value, fields[name]
    if type(component) is not Component:  # a reward has a weight, too
        for name, field in type(component).model_fields.items():
            if name != "name":
                yield f"{where}.{name}", getattr(component, name), field
    if kind != "task":
        return
    for number, part in enumerate(task_components(component)):
        if part is not component:
            yield from _of_component(part, kind, f"{where}.parts.{number}.task")


def _of_section(section: BaseModel, where: str) -> Iterator[tuple[str, Any, FieldInfo]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{where}{name}"
        if isinstance(value, Section) and not isinstance(value, Component):
            yield from _of_section(value, f"{key}.")
        else:
            yield key, value, field
