"""``posttrain recipes`` and ``posttrain explain``: what there is, read off the code."""

from __future__ import annotations

import argparse
import inspect

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from posttrain import registry
from posttrain.commands import explain as words
from posttrain.commands.console import Text, open_console
from posttrain.errors import UnknownWord, UsageError
from posttrain.interpret.dictionaries.recipe import load_sae_recipe
from posttrain.recipes.document import interpretation_names, parse_yaml, recipe_names, recipe_text, study_names
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.compare import comparison_names, describe_comparison, training_recipe_names


def run_recipes(arguments: argparse.Namespace) -> int:
    """List the shipped recipes, or print one as it is written."""
    if arguments.action == "show":
        if arguments.name is None:
            raise UsageError(f"give the recipe's name: posttrain recipes show NAME. Known: {', '.join(recipe_names())}")
        print(recipe_text(arguments.name)[1].rstrip())
        return 0
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("model", no_wrap=True)
    table.add_column("what it does")
    for name in training_recipe_names():
        recipe = load_recipe(name)
        table.add_row(Text(name, style="bold"), Text(recipe.model.name), Text(_what_it_does(recipe.description)))
    for name in interpretation_names("dictionary"):
        sae = load_sae_recipe(name)
        model = sae.activations.model.name if sae.activations.model is not None else str(sae.activations.folder)
        table.add_row(Text(name, style="bold"), Text(model), Text(_what_it_does(sae.description)))
    for name in interpretation_names("changes"):
        description = parse_yaml(recipe_text(name)[1], name)[0].get("description", "")
        table.add_row(Text(name, style="bold"), Text("two"), Text(_what_it_does(description)))
    for name in comparison_names():
        table.add_row(Text(name, style="bold"), Text("several"), Text(describe_comparison(name)))
    for name in study_names():
        description = parse_yaml(recipe_text(name)[1], name)[0].get("description", "")
        table.add_row(Text(name, style="bold"), Text("several"), Text(_what_it_does(description)))
    console = open_console()
    console.print(table)
    console.print("\nRun one: posttrain train NAME    Read one: posttrain recipes show NAME")
    console.print("Run one of a dictionary: posttrain sae train NAME")
    console.print("See what training changed: posttrain sae diff NAME")
    if comparison_names():
        console.print("Run a comparison: posttrain compare compare/NAME")
    if study_names():
        console.print("Run a study: posttrain study study/NAME")
    return 0


def run_explain(arguments: argparse.Namespace) -> int:
    """Print what a word or a section is; without a name, everything that can be named."""
    console = open_console()
    if arguments.name is None:
        _print_all(console)
        return 0
    name = arguments.name
    sections = words.sections()
    kinds = {kind for kind, (key, _) in words.KINDS.items() if name in (kind, key, kind + "s")}
    found, recipes = _entries_named(name), recipes_called(name)
    if not found and not kinds and not recipes and name not in sections:
        known = sorted(
            {word for group in words.all_words().values() for word in group}
            | set(sections)
            | set(words.KINDS)
            | {recipe.rpartition("/")[2] for recipe in training_recipe_names()}
        )
        raise UnknownWord(
            f"nothing is called {name!r}.{registry.suggest(name, known)} `posttrain explain` lists everything"
        )
    for entry in found:
        _print_entry(console, entry)
    for kind in sorted(kinds):
        _print_kind(console, kind)
    if name in sections:
        _print_section(console, name, sections[name])
    for recipe in recipes:
        _print_recipe(console, recipe)
    return 0


def recipes_called(name: str) -> list[str]:
    """Shipped recipes of this name, with or without their folder: many a method is words put together."""
    wanted = name.replace("_", "-")
    return [r for r in training_recipe_names() if wanted in (r, r.rpartition("/")[2])]


def _what_it_does(description: str) -> str:
    return description.partition("What to watch:")[0].strip()


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
    console.print(Text.assemble((kind, "bold"), f" (key {key}): {purpose}"))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, entry in registry.entries(kind).items():
        table.add_row(Text(name, style="cyan"), Text(words.summary(entry.doc)))
    console.print(table)
    console.print()


def _print_entry(console: Console, entry: registry.Entry) -> None:
    console.print(Text.assemble((entry.name, "bold cyan"), f"  {entry.kind}, ", (_source_of(entry), "dim")))
    console.print()
    console.print(Text(entry.doc or "(no docstring)"), soft_wrap=True)
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
    console.print(Text(recipe.description.strip()), soft_wrap=True)
    console.print()
    resolved = recipe.resolve()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for kind, key in (("objective", "objective"), ("advantage", "advantage"), ("aggregation", "aggregate")):
        word = getattr(resolved, key)
        if word is not None:
            entry = registry.find(kind, word.name)
            given = ", ".join(f"{option} {value}" for option, value in word.options.items())
            table.add_row(key, Text(word.name, style="cyan"), Text(f"{words.summary(entry.doc)} {given}".strip()))
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
    console.print(Text(inspect.getdoc(section) or ""), soft_wrap=True)
    console.print()
    _print_options(console, words.section_options(section), "" if name == "recipe" else name)


def _print_options(console: Console, options: list[words.Option], key: str) -> None:
    if not options:
        console.print("it has no options")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("option", "type", "default"):
        table.add_column(column, no_wrap=column != "type")
    for option in options:
        table.add_row(Text(option.name, style="cyan"), Text(option.type), Text(option.default))
    console.print(table)
    if key and key != "rewards":
        console.print(Text(f"on the command line: --{key}.{options[0].name} VALUE", style="dim"))
    console.print()
