"""The recorded comparisons of methods as text of the documentation; ``write_reference.py`` puts it into its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARKS = ("<!-- comparison -->", "<!-- end of comparison -->")
# Headers of a page are short: the report's own columns, but for the ones that say the same in another way.
LEFT_OUT = ("seeds", "better than grpo")


def comparison_page(page: str, recorded: Mapping[str, Any]) -> str:
    """Return the page with the recorded comparison between its marks."""
    start, end = MARKS
    before, _, rest = page.partition(start)
    after = rest.partition(end)[2]
    return f"{before}{start}\n\n{comparison_section(recorded)}\n{end}{after}"


def comparison_section(recorded: Mapping[str, Any]) -> str:
    """Return command, power, tables and findings of ``results.json``."""
    parts = [f"```console\n$ {recorded['command']}\n```\n"]
    parts.append("\n".join(f"- {line}" for line in recorded["findings"]) + "\n")
    for table in recorded["tables"]:
        parts.append(f"**{table['title']}**\n\n{markdown(table)}")
    return "\n".join(parts)


def markdown(table: Mapping[str, Any]) -> str:
    """Return a table of a comparison's results as Markdown."""
    shown = [index for index, name in enumerate(table["header"]) if name not in LEFT_OUT]
    ruler = ["---", *("---:" for _ in shown[1:])]
    rows = [[cells[index] for index in shown] for cells in (table["header"], *table["lines"])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (rows[0], ruler, *rows[1:])) + "\n"
