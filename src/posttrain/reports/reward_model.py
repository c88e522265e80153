"""Results of reward models as tables, and ``summary.md``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.evaluation.reward_models.measures import RewardEvaluation
from posttrain.evaluation.statistics import paired_bootstrap
from posttrain.evaluation.tables import (
    NOTHING,
    TextTable,
    kind_tables,
    show_interval,
    show_number,
    show_share,
    to_markdown,
)
from posttrain.reports.evaluation import first_items, quoted, settings_list
from posttrain.untrusted import plain

Results = Mapping[str, float]
Show = Callable[[Results, str], str]


def _decimals(results: Results, name: str) -> str:
    return f"{results[name]:.3f}" if name in results else NOTHING


_PAIRS: Sequence[tuple[str, str, Show]] = (
    ("pair accuracy", "pair_accuracy", show_share),
    ("95 % interval", "pair_accuracy", show_interval),
    ("margin", "margin", _decimals),
)
_ANSWERS: Sequence[tuple[str, str, Show]] = (
    ("answer accuracy", "answer_accuracy", show_share),
    ("95 % interval", "answer_accuracy", show_interval),
    ("AUC", "auc", _decimals),
)
_CHOOSING: Sequence[tuple[str, str, Show]] = (
    ("top 1", "top_one", show_share),
    ("95 % interval", "top_one", show_interval),
    ("any one", "random_one", show_share),
    ("best there is", "oracle", show_share),
)
_STEPS: Sequence[tuple[str, str, Show]] = (
    ("solution accuracy", "solution_accuracy", show_share),
    ("95 % interval", "solution_accuracy", show_interval),
    ("F1", "error_f1", show_share),
    ("erroneous", "accuracy_erroneous", show_share),
    ("correct", "accuracy_correct", show_share),
    ("step accuracy", "step_accuracy", show_share),
    ("step AUC", "step_auc", _decimals),
)
# The tables of a view: subject, the result that is n, and columns (label, result, how it is shown). A column for which
# no model has a number is left out, and so is a table without columns.
PARTS: Mapping[str, Sequence[tuple[str, str, Sequence[tuple[str, str, Show]]]]] = {
    "pairs": [("pairs", "n", _PAIRS)],
    "judged answers": [
        ("judged answers", "n", _ANSWERS),
        ("choosing among the answers to a problem", "num_problems", _CHOOSING),
    ],
    "labelled steps": [("labelled steps", "n", _STEPS)],
}
# What the numbers mean, under the tables.
NOTES: Mapping[str, str] = {
    "pairs": "pair accuracy: the chosen answer has the higher score; a tie counts half.",
    "judged answers": "answer accuracy: the score is on the right side of one half. Top 1: the highest-scored answer "
    "to a problem is right; for comparison any one of them, and the best there is (some answer is right).",
    "labelled steps": "solution accuracy: the first step with P(good) < 1/2 is the first that is labelled bad, or "
    "there is neither. F1: the harmonic mean of that over solutions with an error and without.",
}


def _groups(rows: Sequence[tuple[str, RewardEvaluation]]) -> dict[tuple[str, str], list[tuple[str, RewardEvaluation]]]:
    """The evaluations of each task and view."""
    keys = dict.fromkeys((evaluation.name, evaluation.view) for _, evaluation in rows)
    return {key: [row for row in rows if (row[1].name, row[1].view) == key] for key in keys}


def score_tables(rows: Sequence[tuple[str, RewardEvaluation]]) -> list[TextTable]:
    """The tables of each task and what was measured on it, one line for each model."""
    tables = []
    for (name, view), own in _groups(rows).items():
        for about, count, every in PARTS[view]:
            columns = [column for column in every if any(column[1] in e.results for _, e in own)]
            lines = [
                [label, show_number(e.results, count), *(show(e.results, key) for _, key, show in columns)]
                for label, e in own
            ]
            if columns:
                header = ["model", "n", *(label for label, _, _ in columns)]
                tables.append(TextTable(f"{name}, {about}", header, lines))
    return tables


def difference_tables(rows: Sequence[tuple[str, RewardEvaluation]]) -> list[TextTable]:
    """For every task on which several models were measured alike: each model's accuracy less that of the first.

    Over the items that both have scored, by the paired bootstrap (``evals/statistics.py``).
    """
    tables = []
    for (name, view), ((first, base), *others) in _groups(rows).items():
        lines = []
        for label, evaluation in others:
            if pairs := shared_verdicts(base.items, evaluation.items):
                gap = paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs])
                points = f"{100 * gap.difference:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
                lines.append([label, f"{gap.n}", points, f"{gap.p:.2g}"])
        if lines:
            header = ["model", "n", "points (95 % interval)", "p"]
            tables.append(TextTable(f"{name}, {view}: compared with {first}", header, lines))
    return tables


def shared_verdicts(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """The verdicts of both on each problem that both have scored: the means of ``right`` over the items of both."""
    known = {item["id"]: item for item in a if item["right"] is not None}
    of_problem: dict[str, list[tuple[float, float]]] = {}
    for item in b:
        other = known.get(item["id"])
        if other is not None and item["right"] is not None:
            both = float(other["right"]), float(item["right"])
            of_problem.setdefault(item.get("problem", item["id"]), []).append(both)
    return [
        (statistics.fmean(x for x, _ in pairs), statistics.fmean(y for _, y in pairs)) for pairs in of_problem.values()
    ]


def write_score_page(label: str, evaluation: RewardEvaluation, settings: Mapping[str, object]) -> str:
    """Return the page of one evaluation, as Markdown."""
    results = evaluation.results
    shown = {name for _, _, columns in PARTS[evaluation.view] for _, name, _ in columns} | {"num_problems", "n"}
    further = [name for name in results if name not in shown and not name.endswith(("_low", "_high"))]
    tables = [
        *score_tables([(label, evaluation)]),
        *kind_tables(evaluation.kinds),
        TextTable("Further results", ["result", "value"], [[name, show_number(results, name)] for name in further]),
    ]
    dropped = ", ".join(f"{n} {reason}" for reason, n in evaluation.dropped.items())
    parts = [
        f"# {plain(evaluation.name)}: {plain(label)}\n",
        f"{NOTES[evaluation.view]}\n",
        *(to_markdown(table) for table in tables if table.lines),
        f"Not measured: {dropped}\n" if dropped else "",
        settings_list(settings),
        first_items(evaluation.items, lambda item: (item["id"], _SHOWN[evaluation.view](item))),
    ]
    return "\n".join(part for part in parts if part)


def _number(value: float | None) -> str:
    return "no score" if value is None else f"{value:.3f}"


def _shown_pair(item: Mapping[str, Any]) -> str:
    sides = ("chosen", "rejected")
    return "\n".join(f"{side}: {_number(item[f'{side}_score'])}\n\n{quoted(item[side])}\n" for side in sides)


def _shown_answer(item: Mapping[str, Any]) -> str:
    text = item["text"] if item["answer"] is None else f"{item['text']}\nanswer: {item['answer']}"
    return f"label {item['label']:g}, score {_number(item['score'])}\n\n{quoted(text)}\n"


def _shown_steps(item: Mapping[str, Any]) -> str:
    lines = [
        f"{p:.2f}  label {'–' if label is None else label}  {step.strip()}"
        for step, p, label in zip(item["steps"], item["probabilities"], item["labels"], strict=True)
    ]
    return f"P(good), label and text of each step\n\n{quoted(chr(10).join(lines))}\n"


_SHOWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "pairs": _shown_pair,
    "judged answers": _shown_answer,
    "labelled steps": _shown_steps,
}
