"""Recipes that pages print, by the name in their first line."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from posttrain.recipes.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parent.parent


def recipe_of_page(page: str, name: str) -> Recipe:
    """Return the resolved recipe that begins with ``# name`` among the YAML blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"```yaml\n# {re.escape(name)}\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1, f"{page} has {len(blocks)} blocks named {name}"
    return load_recipe(yaml.safe_load(blocks[0])).resolve()
