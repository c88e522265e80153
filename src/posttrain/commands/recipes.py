"""``posttrain recipes`` and ``posttrain explain``: what there is, read off the code."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from posttrain import registry
from posttrain.commands import explain as words
from posttrain.commands.console import Text, open_console, plain_table, say
from posttrain.errors import GONE, UnknownWord, UsageError
from posttrain.interpret.dictionaries.recipe import load_sae_recipe
from posttrain.recipes.document import interpretation_names, parse_yaml, recipe_names, recipe_text
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.file import sweep_names, training_recipe_names

STYLES = {"name": "cyan", "model": "dim"}
MIN_COLUMNS = 20  # of what a recipe does, however narrow the terminal
_END_OF_SENTENCE = re.compile(r"(?<!\bal)(?<!\bDr)\.\s+(?=[A-Z])")
# What the folders of training recipes are for.
FOLDERS = {
    "tiny": "with the embedded model, in minutes: posttrain train NAME",
    "rl": "policy gradients: posttrain train NAME",
    "preference": "preferences: posttrain train NAME",
    "distillation": "distillation: posttrain train NAME",
    "": "with large models and real data: posttrain train NAME",
}


def run_recipes(arguments: argparse.Namespace) -> int:
    """List the shipped recipes, or print one as it is written."""
    if arguments.action == "show":
        if arguments.name is None:
            raise UsageError(f"give the recipe's name: posttrain recipes show NAME. Known: {', '.join(recipe_names())}")
        print(recipe_text(arguments.name)[1].rstrip())
        return 0
    console = open_console()
    for title, rows in recipe_groups():
        labels = ("name", "model") if len({row.model for row in rows}) > 1 else ("name",)
        table = plain_table(title=Text(title, style="bold"))
        table.title_justify, table.title_style = "left", "none"
        for label in labels:
            table.add_column({"name": "recipe"}.get(label, label), no_wrap=True)
        table.add_column("what it does", no_wrap=True)
        room = console.width - sum(max(len(getattr(row, label)) for row in rows) + 2 for label in labels)
        for row in rows:
            what = Text(row.what)
            if console.is_terminal:
                what.truncate(max(room, MIN_COLUMNS), overflow="ellipsis")
            table.add_row(*(Text(getattr(row, label), style=STYLES[label]) for label in labels), what)
        console.print(table, crop=False)
        console.print()
    console.print("read one: posttrain recipes show NAME")
    return 0


@dataclass(frozen=True)
class ListedRecipe:
    """A line of the list: ``what`` is the first sentence of its description."""

    name: str
    model: str
    what: str


def recipe_groups() -> list[tuple[str, list[ListedRecipe]]]:
    """Every shipped recipe under what it is for and the command that takes it, in the order of the groups."""
    groups: dict[str, list[ListedRecipe]] = {title: [] for title in FOLDERS.values()}
    for name in training_recipe_names():
        recipe = load_recipe(name)
        folder = name.partition("/")[0] if "/" in name else ""
        title = FOLDERS.get(folder, f"{folder}: posttrain train NAME")
        groups.setdefault(title, []).append(ListedRecipe(name, recipe.model.name, first_sentence(recipe.description)))
    dictionaries = [(name, load_sae_recipe(name)) for name in interpretation_names("dictionary")]
    groups["dictionaries of features: posttrain sae train NAME"] = [
        ListedRecipe(name, _model_of(sae.activations), first_sentence(sae.description)) for name, sae in dictionaries
    ]
    groups["what training changed: posttrain sae diff NAME"] = _described(interpretation_names("changes"))
    groups["sweeps: posttrain sweep NAME"] = _described(sweep_names())
    return [(title, rows) for title, rows in groups.items() if rows]


def _model_of(activations: Any) -> str:
    return str(activations.folder if activations.model is None else activations.model.name)


def _described(names: Iterable[str]) -> list[ListedRecipe]:
    texts = {name: parse_yaml(recipe_text(name)[1], name)[0].get("description") for name in names}
    return [ListedRecipe(name, "", first_sentence(text or "")) for name, text in texts.items()]


def first_sentence(description: str) -> str:
    """What a recipe does, in a line."""
    text = " ".join(description.partition("What to watch:")[0].split())
    return _END_OF_SENTENCE.split(text, maxsplit=1)[0].rstrip(".")


def run_explain(arguments: argparse.Namespace) -> int:
    """Print what a word or a section is; without a name, everything that can be named."""
    console = open_console()
    if arguments.name is None:
        _print_all(console)
        return 0
    name = arguments.name
    sections = words.sections()
    kinds = {kind for kind, (key, _) in words.KINDS.items() if name in (kind, key, kind + "s")}
    entries, recipes = _entries_named(name), recipes_called(name)
    shown = [name] if name in sections else []
    having: list[tuple[registry.Entry, words.Option]] = []
    if not entries and not kinds and not recipes and not shown:
        shown, having = words.sections_with(name), words.words_with(name)
        if not shown and not having:
            if name in GONE:
                raise UnknownWord(f"{name!r} was removed. Use {GONE[name]}.")
            hint = registry.suggest(name, words.all_names())
            raise UnknownWord(f"nothing is called {name!r}.{hint} `posttrain explain` lists everything")
    for entry in entries:
        _print_entry(console, entry)
    for kind in sorted(kinds):
        _print_kind(console, kind)
    for section in shown:
        _print_section(console, section, sections[section])
    if having:
        _print_words_with(console, name.rpartition(".")[2], having)
    for recipe in recipes:
        _print_recipe(console, recipe)
    return 0


def recipes_called(name: str) -> list[str]:
    """Shipped recipes of this name, with or without their folder: many a method is words put together."""
    wanted = name.replace("_", "-")
    return [r for r in training_recipe_names() if wanted in (r, r.rpartition("/")[2])]


def _entries_named(name: str) -> list[registry.Entry]:
    if ":" in name:
        return [registry.find("reward", name)]
    return registry.kinds_of(name)


def _print_all(console: Console) -> None:
    for kind in words.KINDS:
        _print_kind(console, kind)
    console.print(Text("sections of a recipe", style="bold"))
    console.print("  " + ", ".join(words.sections()))
    console.print("\nposttrain explain NAME tells more.")


def _print_kind(console: Console, kind: str) -> None:
    key, purpose = words.KINDS[kind]
    table = plain_table(show_header=False, padding=(0, 1, 0, 2))
    table.title, table.title_justify = Text.assemble((kind, "bold"), f" (key {key}): {purpose}"), "left"
    table.title_style = "none"
    table.add_column("word", no_wrap=True)
    table.add_column("what it is")
    for name, entry in registry.entries(kind).items():
        table.add_row(Text(name, style="cyan"), Text(words.summary(entry.doc)))
    console.print(table)
    console.print()


def _print_entry(console: Console, entry: registry.Entry) -> None:
    console.print(Text.assemble((entry.name, "bold cyan"), f"  {entry.kind}, ", (_source_of(entry), "dim")))
    console.print()
    say(console, entry.doc or "(no docstring)")
    console.print()
    # an engine that does not follow training samples for `posttrain evaluate --engine` alone
    key = words.KINDS[entry.kind][0] if entry.traits.get("follows_training", True) else entry.kind
    _print_options(console, words.word_options(entry), key)
    users = words.recipes_by_word().get((entry.kind, entry.name), [])
    console.print(Text.assemble(("recipes that use it: ", "bold"), ", ".join(users) or "none that ships"))
    console.print()


def _print_recipe(console: Console, name: str) -> None:
    recipe = load_recipe(name)
    console.print(Text.assemble((name, "bold cyan"), "  recipe"))
    console.print()
    say(console, recipe.description.strip())
    console.print()
    resolved = recipe.resolve()
    table = plain_table(show_header=False)
    table.add_column("key", no_wrap=True)
    table.add_column("word", no_wrap=True)
    table.add_column("what it is")
    for kind, key in (("objective", "objective"), ("advantage", "advantage"), ("aggregation", "aggregate")):
        word = getattr(resolved, key)
        if word is not None:
            entry = registry.find(kind, word.name)
            options = ", ".join(f"{option} {value}" for option, value in word.options.items())
            table.add_row(key, Text(word.name, style="cyan"), Text(f"{words.summary(entry.doc)} {options}".strip()))
    select = resolved.rollout.select if resolved.rollout is not None else None
    if select is not None and select.name != "every":
        doc = registry.find("selection", select.name).doc
        table.add_row("select", Text(select.name, style="cyan"), Text(words.summary(doc)))
    console.print(table)
    console.print(Text(f"\nread it: posttrain recipes show {name}    train: posttrain train {name}", style="dim"))
    console.print()


def _source_of(entry: registry.Entry) -> str:
    line = inspect.getsourcelines(entry.function)[1]
    return f"{entry.function.__module__.replace('.', '/')}.py:{line}"


def _print_section(console: Console, name: str, section: type[BaseModel]) -> None:
    console.print(Text.assemble((name, "bold cyan"), "  section of a recipe"))
    console.print()
    say(console, inspect.getdoc(section) or "")
    console.print()
    _print_options(console, words.section_options(section), "" if name == "recipe" else name)


def _print_words_with(console: Console, key: str, having: list[tuple[registry.Entry, words.Option]]) -> None:
    console.print(Text.assemble((key, "bold cyan"), "  option of"))
    table = plain_table()
    for column in ("word", "kind", "type", "default"):
        table.add_column(column, no_wrap=column != "type")
    for entry, option in having:
        table.add_row(Text(entry.name, style="cyan"), Text(entry.kind), Text(option.type), Text(option.default))
    console.print(table)
    console.print(Text("posttrain explain WORD says what it is", style="dim"))
    console.print()


def _print_options(console: Console, options: list[words.Option], key: str) -> None:
    if not options:
        console.print("it has no options")
        return
    table = plain_table()
    for column in ("option", "type", "default"):
        table.add_column(column, no_wrap=column != "type")
    for option in options:
        table.add_row(Text(option.name, style="cyan"), Text(option.type), Text(option.default))
    console.print(table)
    if key and key != "rewards":
        console.print(Text(f"on the command line: --{key}.{options[0].name} VALUE", style="dim"))
    console.print()
