"""``summary.md`` of an evaluation: what a reader wants to know first, and the first items in full."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from posttrain.evals.generation import Evaluation
from posttrain.evals.items import Item
from posttrain.evals.tables import (
    Row,
    TextTable,
    at_k_table,
    kind_tables,
    notes_on,
    results_table,
    show_number,
    to_markdown,
)
from posttrain.untrusted import bullets, code, plain

T = TypeVar("T")
NUM_ITEMS_SHOWN = 3
MAX_TEXT_CHARS = 1500
# Results that the first table shows, or whose meaning is told there.
_TOLD = {"n", "samples", "num_graded", "prompts_too_long", "seconds"}
_TOLD |= {"accuracy", "format", "parse_failures", "truncated"}


def write_page(evaluation: Evaluation, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """The page of one evaluation, as Markdown."""
    template = settings.get("template")
    name = template["name"] if isinstance(template, Mapping) else template
    row = Row(str(settings.get("label", settings.get("model", ""))), name, evaluation.name, evaluation.results)
    at_k = at_k_table(evaluation.results) if row.is_graded else None
    tables = [*([at_k] if at_k else []), *kind_tables(evaluation.kinds), _further(evaluation.results)]
    parts = [
        f"# {plain(evaluation.name)}: {plain(row.model)}\n",
        to_markdown(results_table([row])),
        bullets(notes_on([row], {evaluation.name: settings.get("dropped", {})})),
        *(to_markdown(table) for table in tables if table.lines),
        settings_list(settings),
        _cost(evaluation, environment),
        first_items(evaluation.items, _shown),
    ]
    return "\n".join(part for part in parts if part)


def write_table_page(rows: Sequence[Row], notes: Sequence[str], folders: Mapping[str, str]) -> str:
    """The page of several evaluations: a table for each task, and where each has its own page."""
    tables = [to_markdown(results_table(own)) for own in by_evaluation(rows)]
    links = "".join(f"- [{plain(name)}]({folder})\n" for name, folder in folders.items())
    parts = ["# Evaluations\n", *tables, bullets(notes), f"## Each by itself\n\n{links}"]
    return "\n".join(part for part in parts if part)


def by_evaluation(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each task, in the order of their first appearance."""
    return [[row for row in rows if row.evaluation == name] for name in dict.fromkeys(row.evaluation for row in rows)]


def _further(results: Mapping[str, float]) -> TextTable:
    """Every result that has no place elsewhere: lengths, rewards, facts of the grader."""
    names = [name for name in results if name not in _TOLD and not re.search(r"@|_low$|_high$", name)]
    return TextTable("Further results", ["result", "mean"], [[name, show_number(results, name)] for name in names])


def settings_list(settings: Mapping[str, Any]) -> str:
    """The settings by name, without those that are empty."""
    lines = [f"{name}: {_plain(value)}" for name, value in settings.items() if value not in (None, [], (), {})]
    return f"## Settings\n\n{bullets(lines)}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return str(value)


def _cost(evaluation: Evaluation, environment: Mapping[str, Any]) -> str:
    timing = evaluation.timing
    lines = [f"{name.removesuffix('_seconds')}: {timing[name]:.1f} s" for name in timing if name.endswith("_seconds")]
    if "generated_tokens_per_second" in timing:
        tokens, rate = timing["generated_tokens"], timing["generated_tokens_per_second"]
        lines.append(f"generated: {tokens:,.0f} tokens, {rate:,.0f} a second")
    versions = environment.get("versions", {})
    lines.append("versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    return f"## Cost and versions\n\n{bullets(lines)}"


def first_items(items: Sequence[T], show: Callable[[T], tuple[str, str]]) -> str:
    """The first items in full, nothing is picked; ``show`` an item: its name, and what is told of it."""
    shown = [show(item) for item in items[:NUM_ITEMS_SHOWN]]
    return "\n".join([f"## The first {len(shown)} items\n", *(f"### {plain(name)}\n\n{text}" for name, text in shown)])


def _shown(item: Item) -> tuple[str, str]:
    """An item with its first answer."""
    parts = [f"{quoted(item.question)}\n"]
    if item.answer is not None:
        parts.append(f"gold answer: {code(item.answer)}\n")
    for sample in item.samples[:1]:
        answer = "no answer found" if sample.extracted is None else f"answer {code(sample.extracted)}"
        cut = ", cut off" if sample.finish == "length" else ""
        parts.append(f"{quoted(sample.text)}\n\n{sample.outcome}: {answer}, {sample.num_tokens} tokens{cut}\n")
    if not item.samples:
        parts.append("The prompt does not fit into the model's context.\n")
    return item.id, "\n".join(parts)


def quoted(text: str) -> str:
    """Text of data or of a model as a block, cut where it is very long; no fence in it can end the block."""
    shown = text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]} …"
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{shown}\n{fence}"
