"""``summary.md`` of evaluations: first what a reader wants to know, then the first items in full."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from posttrain.evaluation.generation import Evaluation
from posttrain.evaluation.items import Item
from posttrain.evaluation.tables import (
    NOTHING,
    Row,
    TextTable,
    at_k_table,
    kind_tables,
    notes_on,
    results_table,
    show_interval,
    show_number,
    show_share,
    to_markdown,
)
from posttrain.untrusted import bullets, code, plain

T = TypeVar("T")
Results = Mapping[str, float]
NUM_ITEMS_SHOWN = 3
MAX_TEXT_CHARS = 1500
# Results that the first table shows, or whose meaning stands there.
_SHOWN = {"n", "samples", "num_graded", "prompts_too_long", "seconds"}
_SHOWN |= {"accuracy", "format", "parse_failures", "truncated"}
_JUDGING = {
    "judge_first": "the answer shown first wins (50% without a bias)",
    "judge_consistent": "both orders say the same",
    "judge_longer": "the longer answer wins",
    "judge_failed": "not judged",
}


def write_page(evaluation: Evaluation, settings: Mapping[str, Any], environment: Mapping[str, object]) -> str:
    """The page of one evaluation, as Markdown."""
    template, results = settings.get("template"), evaluation.results
    name = template["name"] if isinstance(template, Mapping) else template
    row = Row(str(settings.get("label", settings.get("model", ""))), name, evaluation.name, results)
    at_k = at_k_table(results) if row.is_graded else None
    others = [name for name in results if name not in _SHOWN and not re.search(r"@|_low$|_high$", name)]
    further = TextTable("Further results", ["result", "mean"], [[name, show_number(results, name)] for name in others])
    tables = [*([at_k] if at_k else []), *kind_tables(evaluation.kinds), further]
    timing = {name: f"{value:,.1f}" for name, value in evaluation.timing.items()}
    parts = [
        f"# {plain(evaluation.name)}: {plain(row.model)}\n",
        to_markdown(results_table([row])),
        bullets(notes_on([row], {evaluation.name: settings.get("dropped", {})})),
        *(to_markdown(table) for table in tables if table.lines),
        settings_list({**settings, "versions": environment.get("versions"), "timing": timing}),
        first_items(evaluation.items, _show_item),
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


def settings_list(settings: Mapping[str, object]) -> str:
    """The settings by name, without those that are empty."""
    lines = [f"{name}: {shown_value(value)}" for name, value in settings.items() if value not in (None, [], (), {})]
    return f"## Settings\n\n{bullets(lines)}"


def shown_value(value: object) -> str:
    """A setting as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown_value(inner)}" for key, inner in value.items())
    return ", ".join(map(shown_value, value)) if isinstance(value, list | tuple) else str(value)


def first_items(items: Sequence[T], show: Callable[[T], tuple[str, str]]) -> str:
    """The first items in full, nothing is picked; ``show`` an item: its name and its text."""
    shown = [show(item) for item in items[:NUM_ITEMS_SHOWN]]
    return "\n".join([f"## The first {len(shown)} items\n", *(f"### {plain(name)}\n\n{text}" for name, text in shown)])


def _show_item(item: Item) -> tuple[str, str]:
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
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    return f"{fence}\n{shown}\n{fence}"


def head_to_head_table(name: str, a: str, b: str, results: Results, others: Mapping[str, Results]) -> TextTable:
    """The results of two models against one another; lines without a number are left out.

    ``others``: of further judges, by name.
    """
    shares = {
        "win_rate": f"{a} wins",
        "win_rate_similar": f"{a} wins, lengths alike (n = {results.get('n_similar', 0):.0f})",
        "accuracy_a": f"right: {a}",
        "accuracy_b": f"right: {b}",
        **_JUDGING,
    }
    lines = [
        [label, show_share(results, key), show_interval(results, key)]
        for key, label in shares.items()
        if key in results
    ]
    parts = [show_share(results, key) for key in ("wins", "ties", "losses")]
    lines.insert(1, ["better / equally good / worse", " / ".join(parts), NOTHING])
    for judge, own in others.items():
        lines.append([f"{a} wins, by {judge}", show_share(own, "win_rate"), show_interval(own, "win_rate")])
    for label, side in ((a, "a"), (b, "b")):
        lines.append([f"characters: {label}", f"{results[f'characters_{side}']:.0f}", NOTHING])
    for label, key in ((f"KL({a} ‖ {b})", "kl_ab"), (f"KL({b} ‖ {a})", "kl_ba")):
        if key in results:
            low, high = (show_number(results, f"{key}_{end}") for end in ("low", "high"))
            interval = f"{low} – {high}" if results[f"{key}_low"] < results[f"{key}_high"] else NOTHING
            lines.append([f"{label}, nats per answer", show_number(results, key), interval])
            lines.append([f"{label}, nats per token", f"{results[f'{key}_per_token']:.3g}", NOTHING])
    return TextTable(f"{name}: {a} against {b}, n = {results['n']:.0f}", ["", "value", "95 % interval"], lines)


def write_head_to_head_page(
    table: TextTable, notes: Sequence[str], settings: Mapping[str, object], items: Sequence[Mapping[str, Any]]
) -> str:
    """The page of two models against one another, as Markdown, with the first items in full."""

    def show(item: Mapping[str, Any]) -> tuple[str, str]:
        texts = [f"{quoted(item['question'])}\n"]
        texts += [f"gold answer: {code(item['answer'])}\n"] if item["answer"] is not None else []
        for side in ("a", "b"):
            answer = item[side][0]
            score = "" if answer["score"] is None else f", score {show_number(answer, 'score')}"
            texts.append(f"{side.upper()}: {answer['outcome']}{score}\n\n{quoted(answer['text'])}\n")
        return item["id"], "\n".join(texts)

    parts = [f"# {plain(table.title)}\n", to_markdown(table), bullets(notes), settings_list(settings)]
    return "\n".join(part for part in [*parts, first_items(items, show)] if part)
