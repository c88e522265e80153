"""Find options in resolved recipes that cannot affect training, and say why.

Options declare their conditions (``posttrain.acting``) in annotations on section fields and keyword-only component
arguments.
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

ROOM = 10  # minimum clip range, as a multiple of the ratio mismatch
BF16_MISMATCH = 5e-3  # mean ratio error per sampled token in bf16, on models with 0.1 to 2 billion parameters


@dataclass(frozen=True, slots=True)
class InertOption:
    """Option without effect on training.

    ``reason``: explanation; ``is_exact``: False if the option only changes weight rounding. ``is_shown``: value
    differs from the default, or the option is central to its method.
    """

    key: str
    reason: str
    is_exact: bool
    is_shown: bool
    remedy: str


def condition_of(field: FieldInfo) -> ActsIf | None:
    """Find the condition declared on an option."""
    for extra in field.metadata:
        if isinstance(extra, ActsIf):
            return extra
    return None


def facts_of(recipe: Recipe, needs: Collection[str]) -> RunFacts:
    """Collect facts for evaluating conditions from a resolved recipe and the batch fields it ``needs``."""
    scale_free = False
    if recipe.advantage is not None and is_declared(recipe.advantage.name):
        scale_free = bool(registry.find("advantage", recipe.advantage.name).traits.get("scale_free"))
    return RunFacts(flatten(recipe.dump()), frozenset(needs), scale_free, recipe.trains_scorer)


def find_inert_options(recipe: Recipe, needs: Collection[str]) -> list[InertOption]:
    """Find all options without effect in a resolved recipe, in key order."""
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
    """Compute each ratio bound's distance from 1, by option key."""
    bounds = {}
    for key, value, field in _options_of(recipe):
        condition = condition_of(field)
        if condition is not None and condition.distance is not None and value is not None:
            bounds[key] = condition.distance(value)
    return bounds


def narrow_bounds(bounds: Mapping[str, float], mismatch: float) -> str:
    """List ratio bounds within ``ROOM`` times the mismatch, including values, as text."""
    narrow = []
    for key, distance in bounds.items():
        if distance < ROOM * mismatch:
            narrow.append(f"{key} {distance:g}")
    return ", ".join(narrow)


def option_notes(recipe: Recipe, needs: Collection[str]) -> list[str]:
    """Build startup notices about options without effect or with effect on rounding only."""
    narrow = expected_narrow_bounds(ratio_bounds(recipe), recipe.model.dtype, recipe.rollout)
    return [*describe_inert_options(find_inert_options(recipe, needs)), *narrow]


def expected_narrow_bounds(bounds: Mapping[str, float], dtype: str, rollout: RolloutSection | None) -> list[str]:
    """Warn about ratio ``bounds`` close to 16-bit rounding, before measuring the mismatch.

    ``dtype``: trained model's dtype.
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
        f"{narrow}: sampler and trainer round differently in bf16, which changes ratios by about {BF16_MISMATCH:g}. A "
        f"clip range below {ROOM} times that mostly clips rounding errors. Set rollout.old_logprobs: trainer"
    ]


def _silent_values(field: FieldInfo) -> list[object]:
    """List default values for an option, including equivalents for a None default."""
    if field.is_required():
        return []
    default = field.get_default(call_default_factory=True)
    if default is None:
        return [None, 0]
    return [default]


def describe_inert_options(options: Collection[InertOption]) -> list[str]:
    """Build one notice for options in the same section or component with the same reason.

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
    """Explain why comparing values for ``key`` is pointless; empty if the option has an effect."""
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
    """Yield (dotted key, value, declaration) for all section and component options."""
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
    """Yield component options, including tasks inside mixtures."""
    if not is_declared(component.name):
        return
    fields = registry.find(kind, component.name, where).options_model.model_fields
    for name, value in component.options.items():
        if name in fields:
            yield f"{where}.{name}", value, fields[name]
    if type(component) is not Component:  # rewards also have a weight
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
