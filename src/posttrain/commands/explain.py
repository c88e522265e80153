"""``posttrain explain``: describe a component, section, key or metric. Also used to generate ``docs/reference``.

All descriptions are read from code: docstrings, signatures and shipped recipes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from posttrain.errors import GONE, UnknownComponent, nearest
from posttrain.interpret.saes.sae_recipe import load_sae_recipe
from posttrain.other_names import OTHER_NAMES, answer_other_name, answer_spelling
from posttrain.recipes.document import interpretation_names
from posttrain.recipes.inert import condition_of
from posttrain.recipes.recipe import COMPONENT_KINDS, Recipe, load_recipe
from posttrain.recipes.sections import Component, MaskComponent, RewardComponent, Section, task_components
from posttrain.registry import ALL_KINDS, Entry, entries, find, kinds_of, suggest_key
from posttrain.store.metric_names import METRICS, Metric, find_metric
from posttrain.sweeps.file import training_recipe_names
from posttrain.terminal.console import Text, open_console, plain_table, print_rows, say

# Recipe key and purpose for each kind.
KINDS: dict[str, tuple[str, str]] = {
    "objective": ("objective", "loss per token, pair or row, without reduction"),
    "advantage": ("advantage", "converts rewards to advantages, usually relative to a group"),
    "aggregation": ("aggregate", "reduction weights for the loss"),
    "selection": ("rollout.select", "selects completions or pairs for training"),
    "correction": ("correction", "loss weights correcting the mismatch between sampler and trainer"),
    "mask": ("masks", "excludes tokens from the policy loss, based on the whole batch"),
    "reward": ("rewards", "scores a completion"),
    "grader": ("rewards.correct.mode", "checks if an answer is correct"),
    "template": ("prompt.template", "renders examples as prompts, and extracts answers"),
    "task": ("task", "examples with answers"),
    "environment": ("environment", "replies between turns; public methods are tools"),
    "engine": ("rollout.engine", "samples completions"),
    "optimizer": ("optimizer", "turns gradients into updates"),
    "tracker": ("track", "sends metrics to an external service"),
    "batch_field": ("objective", "extra tensors required by objectives (`needs`), never set in a recipe"),
    "dictionary": ("dictionary", "turns pre-activations into sparse features (`posttrain sae train RECIPE`)"),
}

_IN_A_METHOD = ("objective", "advantage", "aggregation")


@dataclass(frozen=True)
class Option:
    """A YAML key with type, default, meaning and named values.

    ``acts``: the condition under which it has an effect.
    """

    name: str
    type: str
    default: str
    meaning: str
    example: str
    choices: tuple[str, ...] = ()
    acts: str = ""

    @property
    def line(self) -> str:
        """``float (at least 0), default 0.2: ε``."""
        default = self.default
        if default != "required":
            default = f"default {default}"
        line = f"{self.type}, {default}"
        if self.meaning:
            line = f"{line}: {self.meaning}"
        if self.acts:
            line = f"{line} Acts {self.acts}."
        return line


_KEY = re.compile(r"(?<![`\w.])[a-z]\w*(?:\.[a-z]\w*)+")  # of a recipe, in a sentence
_MOST_KEYS = 3  # maximum named values explained per sentence
_ARGUMENT = re.compile(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", re.MULTILINE)
_ARGUMENTS = re.compile(r"\n*^Args:\n((?:    .*(?:\n|\Z)|\n(?=    ))*)", re.MULTILINE)


def meanings(doc: str) -> dict[str, str]:
    """Parse argument descriptions from a docstring's ``Args:`` section, one line each."""
    listed = _ARGUMENTS.search(doc)
    if listed is None:
        return {}
    found: dict[str, str] = {}
    for names, text in _ARGUMENT.findall(listed[1]):
        found |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()))
    return found


def without_arguments(doc: str) -> str:
    """Remove the ``Args:`` section from a docstring."""
    return _ARGUMENTS.sub("\n", doc).strip()


def example_value(annotation: object, default: object) -> str:
    """Choose an example value, in command line syntax."""
    choices = [choice for choice in _choices(annotation) if choice != default]
    if isinstance(default, bool) or bool in (annotation, *typing.get_args(annotation)):
        return json.dumps(not default)
    if choices:
        return str(choices[0])
    if default:
        return show_default(default)
    examples = {
        "list": "[NAME]",
        "int": "8",
        "float": "0.1",
        "dict of str, float": "{NAME: 0.1}",
        "dict": "{key: value}",
    }
    for kind, example in examples.items():
        if show_type(annotation).startswith(kind):
            return example
    return "NAME"


def show_type(annotation: object) -> str:
    """Describe an annotation in words: ``one of 'k1', 'k2'``, ``float or none``."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation is type(None):
        return "none"
    if annotation is Any:
        return "anything"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section"
    if isinstance(annotation, type) and issubclass(annotation, Component):
        return "a component"
    if origin is typing.Annotated:
        constraints: list[object] = []
        for extra in arguments[1:]:
            constraints += getattr(extra, "metadata", [])
        return show_type(arguments[0]) + _show_bounds(constraints)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(a) for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(show_type(a) for a in arguments)
    if origin is not None and arguments:
        inner = []
        for argument in arguments:
            inner.append("..." if argument is Ellipsis else show_type(argument))
        return f"{getattr(origin, '__name__', str(origin))} of {', '.join(inner)}"
    return getattr(annotation, "__name__", str(annotation))


def show_default(value: object) -> str:
    """Format a default in recipe syntax."""
    if isinstance(value, Component):
        return value.name
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return str(list(value))
    is_odd = isinstance(value, str) and not (value.strip() and value.isprintable())
    if is_odd or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def component_options(entry: Entry) -> list[Option]:
    """List a component's options, which are keyword-only parameters."""
    return _options(entry.options_model, entry.doc)


def section_options(section: type[BaseModel]) -> list[Option]:
    """List a recipe section's keys."""
    return _options(section, inspect.getdoc(section) or "")


def _options(model: type[BaseModel], doc: str) -> list[Option]:
    options = []
    about = meanings(doc)
    for name, field in model.model_fields.items():
        value = None
        default = "required"
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            default = show_default(value)
        kind = show_type(field.annotation) + _show_bounds(field.metadata)
        example = example_value(field.annotation, value)
        choices = tuple(choice for choice in _choices(field.annotation) if isinstance(choice, str))
        condition = condition_of(field)
        acts = ""
        if condition is not None:
            acts = condition.when
        options.append(Option(name, kind, default, about.get(name, ""), example, choices, acts))
    return options


def _show_bounds(metadata: Iterable[object]) -> str:
    phrases = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = []
    for constraint in metadata:
        for key, phrase in phrases.items():
            bound = getattr(constraint, key, None)
            if bound is not None:
                bounds.append(f"{phrase} {bound:g}")
    if not bounds:
        return ""
    return f" ({', '.join(bounds)})"


def sections() -> dict[str, type[BaseModel]]:
    """List all sections by dotted path: ``train``, ``model.adapter``, ...; ``recipe`` is the root."""
    found: dict[str, type[BaseModel]] = {"recipe": Recipe}

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            for candidate in (field.annotation, *typing.get_args(field.annotation)):
                if isinstance(candidate, type) and issubclass(candidate, Section):
                    found[f"{prefix}{name}"] = candidate
                    walk(candidate, f"{prefix}{name}.")

    walk(Recipe, "")
    return found


def section_keys() -> dict[str, Option]:
    """List all section keys by dotted path."""
    keys = {}
    for name, section in sections().items():
        above = f"{name}."
        if name == "recipe":
            above = ""
        for option in section_options(section):
            keys[f"{above}{option.name}"] = option
    for key, listed in (("rewards", RewardComponent), ("masks", MaskComponent)):
        for option in section_options(listed):
            if option.name != "name":
                keys[f"{key}.0.{option.name}"] = option
    return keys


def keys_with(name: str) -> dict[str, Option]:
    """Find section keys by name (``lr``, ``train.lr``) or by possible value (``lora``)."""
    name = without_places(name)
    keys = section_keys().items()
    return {key: option for key, option in keys if name in (option.name, without_places(key), *option.choices)}


def without_places(name: str) -> str:
    """Return ``rewards.weight`` for ``rewards.0.weight``."""
    return re.sub(r"\.\d+(?=\.|$)", "", name)


def components_with(name: str) -> list[tuple[Entry, Option]]:
    """Find components by option name, optionally prefixed with a component, kind or key."""
    place, _, key = without_places(name).rpartition(".")
    found = []
    for group in all_components().values():
        for entry in group.values():
            if place not in ("", entry.kind, KINDS[entry.kind][0], entry.name):
                continue
            found += [(entry, option) for option in component_options(entry) if option.name == key]
    return found


def all_names() -> set[str]:
    """List every name known to ``explain``: components, kinds, sections, keys, key values and recipes."""
    known = {*sections(), *KINDS, *METRICS, *(recipe.rpartition("/")[2] for recipe in training_recipe_names())}
    for option in section_keys().values():
        known |= {option.name, *option.choices}
    for group in all_components().values():
        known |= group.keys()
        for entry in group.values():
            known |= {option.name for option in component_options(entry)}
    return known


def _choices(annotation: object) -> list[object]:
    inner = list(typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Literal:
        return inner
    choices = []
    for part in inner:
        choices += _choices(part)
    return choices


@cache
def recipes_by_component() -> dict[tuple[str, str], list[str]]:
    """Map components (kind, name) to the shipped recipes that use them."""
    from posttrain.training import checks  # torch, which a list of the recipes does without

    users: dict[tuple[str, str], list[str]] = {}
    for name in training_recipe_names():
        recipe = load_recipe(name).resolve()
        used = _components_of(recipe)
        used |= {("batch_field", field) for field in checks.resolve_components(recipe).needs}
        for component in used:
            users.setdefault(component, []).append(name)
    for name in interpretation_names("dictionary"):
        users.setdefault(("dictionary", load_sae_recipe(name).dictionary.name), []).append(name)
    return users


def _components_of(recipe: Recipe) -> set[tuple[str, str]]:
    """Collect components in a resolved recipe as (kind, name)."""
    used = set()
    for task in (recipe.task, *recipe.eval.tasks):
        used |= {("task", part.name) for part in (task, *task_components(task))}
    for path, kind in COMPONENT_KINDS.items():
        above, _, key = path.rpartition(".")
        section: Any = recipe
        if above:
            section = getattr(recipe, above)
        value = getattr(section, key, None)
        if isinstance(value, list):
            used |= {(kind, component.name) for component in value}
        elif value is not None:
            used.add((kind, value.name))
    return used


def all_components() -> dict[str, dict[str, Entry]]:
    """List registered components by kind."""
    return {kind: entries(kind) for kind in ALL_KINDS}


def summary(doc: str) -> str:
    """Extract a docstring's first paragraph as a single line."""
    return " ".join(doc.strip().split("\n\n")[0].split())


def recipes_called(name: str) -> list[str]:
    """Find shipped recipes by name, with or without folder. Many methods are combinations of components."""
    wanted = name.replace("_", "-")
    return [r for r in training_recipe_names() if wanted in (r, r.rpartition("/")[2])]


def run_explain(arguments: argparse.Namespace) -> int:
    """Print what a component or a section is; without a name, everything that can be named."""
    console = open_console()
    name = " ".join(arguments.name)
    if not name:
        for kind in KINDS:
            _print_kind(console, kind)
        console.print(Text("sections of a recipe", style="bold"))
        console.print("  " + ", ".join(sections()))
        console.print("\nposttrain explain NAME tells more.")
        return 0
    if ":" not in name:
        name = name.strip("-").replace(" ", "_").replace("-", "_").lower()
    found = look_up(name)
    if found.answer:
        say(console, f"{name}:{found.answer}\n")
    for entry in found.components:
        _print_entry(console, entry)
    for kind in sorted(found.kinds):
        _print_kind(console, kind)
    if found.section is not None:
        _print_section(console, name, found.section)
    for key, option in found.keys.items():
        _print_heading(console, key, "key of a recipe", option.meaning)
        lines = [f"type:    {option.type}", f"default: {option.default}", f"example: --{key} {option.example}"]
        if option.acts:
            lines.append(f"acts:    {option.acts}")
        say(console, "\n".join(lines) + "\n")
    if found.having:
        _print_heading(console, name.rpartition(".")[2], "option of")
        rows = [(Text(entry.name, style="cyan"), entry.kind, option.line) for entry, option in found.having]
        print_rows(console, plain_table("component", "kind", "type, default and meaning"), rows)
        console.print(Text("posttrain explain NAME shows details\n", style="dim"))
    metric = found.metric
    if metric is not None:
        _print_heading(console, metric.name, f"metric, {metric.unit}; better: {metric.better}", metric.meaning)
    for recipe in found.recipes:
        _print_recipe(console, recipe)
    return 0


@dataclass
class NameMeanings:
    """All meanings of a name.

    ``keys``: section keys by dotted path. ``having``: components with an option of this name. ``answer``: the
    equivalent for a name from another library.
    """

    components: list[Entry]
    kinds: list[str]
    section: type[BaseModel] | None
    recipes: list[str]
    metric: Metric | None
    keys: dict[str, Option]
    having: list[tuple[Entry, Option]]
    answer: str = ""


def look_up(name: str) -> NameMeanings:
    """Look up all meanings of a name.

    Raises:
        UnknownComponent: unknown name. The message suggests a similar one.
    """
    if ":" in name:
        components = [find("reward", name)]
    else:
        components = kinds_of(name)
    kinds = [kind for kind, (key, _) in KINDS.items() if name in (kind, key, kind + "s")]
    found = NameMeanings(components, kinds, sections().get(name), recipes_called(name), find_metric(name), {}, [])
    if found.components or found.kinds or found.recipes or found.section is not None:
        return found
    found.keys = keys_with(name)
    found.having = components_with(name)
    is_ours = found.keys or (found.having and name not in OTHER_NAMES)
    if not is_ours:
        found.answer = answer_other_name(name)
        if not found.answer and not nearest(name, all_names()):
            found.answer = answer_spelling(name)
    if found.answer:
        listed = section_keys()
        for key in _KEY.findall(found.answer)[:_MOST_KEYS]:
            if key in listed:
                found.keys[key] = listed[key]
    if not (found.keys or found.having or found.metric or found.answer):
        if name in GONE:
            raise UnknownComponent(f"{name!r} was removed. Use {GONE[name]}.")
        hint = suggest_key(name, all_names())
        raise UnknownComponent(f"nothing is called {name!r}.{hint} `posttrain explain` lists everything")
    return found


def _print_heading(console: Console, name: str, what: str, doc: str | None = None) -> None:
    console.print(Text.assemble((name, "bold cyan"), f"  {what}"))
    if doc is not None:
        say(console, f"\n{doc}\n")


def _print_section(console: Console, name: str, section: type[BaseModel]) -> None:
    _print_heading(console, name, "section of a recipe", without_arguments(inspect.getdoc(section) or ""))
    key = name
    if name == "recipe":
        key = ""
    _print_options(console, section_options(section), key)


def _print_kind(console: Console, kind: str) -> None:
    key, purpose = KINDS[kind]
    table = plain_table("component", "what it is", show_header=False, padding=(0, 1, 0, 2))
    table.title = Text.assemble((kind, "bold"), f" (key {key}): {purpose}")
    table.title_justify = "left"
    table.title_style = "none"
    table.columns[0].no_wrap = True
    listed = entries(kind).items()
    print_rows(console, table, [(Text(name, style="cyan"), summary(entry.doc)) for name, entry in listed])
    console.print()


def _print_entry(console: Console, entry: Entry) -> None:
    line = inspect.getsourcelines(entry.function)[1]
    source = f"{entry.function.__module__.replace('.', '/')}.py:{line}"
    _print_heading(console, entry.name, f"{entry.kind}, {source}", without_arguments(entry.doc) or "(no docstring)")
    key = KINDS[entry.kind][0]
    if not entry.traits.get("follows_training", True):  # engine only available to `posttrain evaluate --engine`
        key = entry.kind
    _print_options(console, component_options(entry), key)
    users = recipes_by_component().get((entry.kind, entry.name), [])
    console.print(Text.assemble(("recipes that use it: ", "bold"), ", ".join(users) or "none that ships"))
    console.print()


def _print_recipe(console: Console, name: str) -> None:
    recipe = load_recipe(name).resolve()
    _print_heading(console, name, "recipe", recipe.description.strip())
    components = {kind: getattr(recipe, key) for key, kind in COMPONENT_KINDS.items() if kind in _IN_A_METHOD}
    if recipe.rollout is not None:
        components |= {"selection": recipe.rollout.select}
    rows = []
    for kind, component in components.items():
        if component is not None and component.name != "every":
            options = ", ".join(f"{option} {value}" for option, value in component.options.items())
            what = f"{summary(find(kind, component.name).doc)} {options}".strip()
            rows.append((KINDS[kind][0].rpartition(".")[2], Text(component.name, style="cyan"), what))
    print_rows(console, plain_table("key", "component", "what it is", show_header=False), rows)
    console.print(Text(f"\nread it: posttrain recipes show {name}    train: posttrain train {name}\n", style="dim"))


def _print_options(console: Console, options: list[Option], key: str) -> None:
    if not options:
        console.print("it has no options")
        return
    rows = [(Text(option.name, style="cyan"), option.line) for option in options]
    print_rows(console, plain_table("option", "type, default and meaning"), rows)
    if key and key != "rewards":
        console.print(Text(f"on the command line: --{key}.{options[0].name} VALUE", style="dim"))
    console.print()
