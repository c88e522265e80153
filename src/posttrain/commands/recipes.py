"""``posttrain recipes``: the recipes that ship."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from posttrain.errors import UsageError
from posttrain.recipes.document import interpretation_names, parse_yaml, recipe_names, recipe_text
from posttrain.recipes.json_schema import recipe_schema
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.file import shipped_sweeps, training_recipe_names
from posttrain.terminal.console import Text, open_console, plain_table, print_json, print_rows

_SIZE = re.compile(r"(?i)\b(\d+(?:\.\d+)?)([bm])\b")
_END_OF_SENTENCE = re.compile(r"(?<!\bal)(?<!\bDr)\.\s+(?=[A-Z])")
# Purpose of each training recipe folder.
FOLDERS = {
    "tiny": "with the embedded model, in minutes: posttrain train NAME",
    "smollm2": "with SmolLM2 from the package index (0.1B, CPU, 30 minutes): posttrain train NAME",
    "rl": "policy gradients: posttrain train NAME",
    "preference": "preferences: posttrain train NAME",
    "distillation": "distillation: posttrain train NAME",
    "": "with large models and real data: posttrain train NAME",
}
# Folders whose recipes are made for a CPU, although their models have names that tell a size.
CPU_FOLDERS = ("smollm2",)
PLANNED_GIB = 80  # memory of the GPU assumed in plans
COLUMNS = ("recipe", "task", "model", "size", "hardware", "what it does")


def run_recipes(arguments: argparse.Namespace) -> int:
    """List shipped recipes, or print a recipe file."""
    if arguments.action == "schema":
        if arguments.name is not None:
            raise UsageError(f"recipes schema: {arguments.name!r} is unexpected; the schema covers all recipes")
        print(json.dumps(recipe_schema(), indent=2))
        return 0
    if arguments.action == "show":
        if arguments.name is None:
            raise UsageError(f"missing recipe name: posttrain recipes show NAME. Known: {', '.join(recipe_names())}")
        print(recipe_text(arguments.name)[1].rstrip())
        return 0
    console = open_console()
    groups = recipe_groups()
    if print_json([{"title": title, "rows": rows} for title, rows in groups]):
        return 0
    for title, rows in groups:
        common = {label: rows[0][label] for label in COLUMNS[1:-1] if len({row[label] for row in rows}) == 1}
        shown = [label for label in COLUMNS if label not in common]
        head = Text().append(title, "bold")
        if common:
            head.append(f"\n{', '.join(common.values())}", "dim")
        table = plain_table(title=head, title_justify="left", title_style="none")
        for label in shown:
            table.add_column(label, no_wrap=True, overflow="ellipsis")
        styles = {"recipe": "cyan"}
        lines = [[Text(row[label], style=styles.get(label, "")) for label in shown] for row in rows]
        print_rows(console, table, lines, crop=False)
        console.print()
    console.print(
        f"GiB: planned peak memory on a {PLANNED_GIB} GiB GPU:  "
        f"train NAME --dry-run --memory --gpu-memory {PLANNED_GIB}"
    )
    console.print("read one: posttrain recipes show NAME")
    return 0


def recipe_groups() -> list[tuple[str, list[dict[str, str]]]]:
    """Build table rows (``COLUMNS``) for shipped recipes, grouped by purpose and command."""
    groups: dict[str, list[dict[str, str]]] = {title: [] for title in FOLDERS.values()}
    for name in training_recipe_names():
        folder = name.rpartition("/")[0]
        title = FOLDERS.get(folder, f"{folder}: posttrain train NAME")
        groups.setdefault(title, []).append(_training_row(name))
    for title, names in (
        ("dictionaries of features: posttrain sae train NAME", interpretation_names("dictionary")),
        ("what training changed: posttrain sae diff NAME", interpretation_names("changes")),
        ("sweeps: posttrain sweep NAME", shipped_sweeps()),
    ):
        groups[title] = [_other_row(name, parse_yaml(recipe_text(name)[1], name)[0]) for name in names]
    return [(title, rows) for title, rows in groups.items() if rows]


@cache
def planned_gib() -> dict[str, float]:
    """Load peak memory in GiB for recipes that need a GPU.

    ``make docs`` writes this file with ``training/memory.py``, because planning takes seconds and imports torch.
    """
    text = files("posttrain").joinpath("recipes", "memory.json").read_text(encoding="utf-8")
    return {name: float(gib) for name, gib in json.loads(text).items()}


def needs_gpu(name: str, model: str) -> bool:
    """Check if a recipe needs a GPU: its model is larger than the embedded one, and its folder is not for CPUs."""
    return _billions(model) is not None and name.partition("/")[0] not in CPU_FOLDERS


def _training_row(name: str) -> dict[str, str]:
    recipe = load_recipe(name)
    return _row(name, recipe.task.name, recipe.model.name, [name], recipe.description)


def _other_row(name: str, content: Mapping[str, Any]) -> dict[str, str]:
    """Build a table row for a sweep, based on its first recipe, or for a ``posttrain sae`` recipe."""
    source = content.get("start") or content.get("base") or {}
    if isinstance(source, str):
        source = {"recipe": source}
    begins = source.get("recipe")
    below = {}
    if begins:
        below = _training_row(begins)
    activations = content.get("activations", {})
    task = (content.get("task") or activations.get("task") or {}).get("name", below.get("task", "text"))
    model = activations.get("model", {}).get("name") or source.get("name") or below.get("model", "")
    return _row(name, task, model, list(_texts(content)), content.get("description", ""))


def _texts(content: object) -> Iterator[str]:
    """Yield all texts in a document, including recipes named in a sweep."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for part in content.values():
            yield from _texts(part)
    elif isinstance(content, list):
        for part in content:
            yield from _texts(part)


def _row(name: str, task: str, model: str, trains: Sequence[str], description: str) -> dict[str, str]:
    """Return a row; ``trains``: the recipes, among other texts, whose memory counts."""
    hardware = "CPU"
    if needs_gpu(name, model):
        plan = planned_gib()
        gib = max((plan[each] for each in trains if each in plan), default=None)
        hardware = "GPU"
        if gib is not None:
            hardware = f"GPU, {math.ceil(gib)} GiB"
    columns = (name, task, model.rpartition("/")[2], _written(_billions(model)), hardware, first_sentence(description))
    return dict(zip(COLUMNS, columns, strict=True))


def _written(size: float | None) -> str:
    if size is None:
        return "0.9M"
    if size < 0.5:
        return f"{1000 * size:.0f}M"
    return f"{size:g}B"


def _billions(model: str) -> float | None:
    """Guess the parameter count from a model name; None for shipped models and runs based on them."""
    found = _SIZE.search(model)
    if found is None and "gpt2" in model:
        return 0.124
    if found is None:
        return None
    number = float(found[1])
    if found[2] in "mM":
        return number / 1000
    return number


def first_sentence(description: str) -> str:
    """Return a recipe's description in a line."""
    text = " ".join(description.partition("What to watch:")[0].split())
    return _END_OF_SENTENCE.split(text, maxsplit=1)[0].rstrip(".")
