"""``posttrain recipes``: the recipes that ship."""

from __future__ import annotations

import argparse
import re

from posttrain.commands.console import Text, open_console, plain_table
from posttrain.errors import UsageError
from posttrain.recipes.document import interpretation_names, parse_yaml, recipe_names, recipe_text
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.file import sweep_names, training_recipe_names

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
        has_models = len({model for _, model, _ in rows}) > 1
        table = plain_table(title=Text(title, style="bold"))
        table.title_justify, table.title_style = "left", "none"
        for label in ("recipe", "model", "what it does") if has_models else ("recipe", "what it does"):
            table.add_column(label, no_wrap=True, overflow="ellipsis")
        for name, model, what in rows:
            cells = [Text(name, style="cyan"), *([Text(model, style="dim")] if has_models else []), Text(what)]
            table.add_row(*cells)
        console.print(table, crop=False)
        console.print()
    console.print("read one: posttrain recipes show NAME")
    return 0


def recipe_groups() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(name, model, first sentence) of every shipped recipe, under what it is for and the command that takes it."""
    groups: dict[str, list[tuple[str, str, str]]] = {title: [] for title in FOLDERS.values()}
    for name in training_recipe_names():
        recipe = load_recipe(name)
        folder = name.partition("/")[0] if "/" in name else ""
        title = FOLDERS.get(folder, f"{folder}: posttrain train NAME")
        groups.setdefault(title, []).append((name, recipe.model.name, first_sentence(recipe.description)))
    for title, names in (
        ("dictionaries of features: posttrain sae train NAME", interpretation_names("dictionary")),
        ("what training changed: posttrain sae diff NAME", interpretation_names("changes")),
        ("sweeps: posttrain sweep NAME", sweep_names()),
    ):
        texts = {name: parse_yaml(recipe_text(name)[1], name)[0].get("description") for name in names}
        groups[title] = [(name, "", first_sentence(text or "")) for name, text in texts.items()]
    return [(title, rows) for title, rows in groups.items() if rows]


def first_sentence(description: str) -> str:
    """Return a recipe's description in a line."""
    text = " ".join(description.partition("What to watch:")[0].split())
    return _END_OF_SENTENCE.split(text, maxsplit=1)[0].rstrip(".")
