"""Results of reward models as tables, and ``summary.md``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.evals.statistics import paired_bootstrap
from posttrain.evals.tables import NOTHING, TextTable, kind_tables, show_interval, show_number, show_share, to_markdown
from posttrain.reports.evaluation import first_items, quoted, settings_list
from posttrain.reward_models.measures import RewardEvaluation
from posttrain.untrusted import plain

Results = Mapping[str, float]
Show = Callable[[Results, str], str]


def show_decimals(results: Results, name: str) -> str:
    """A number with three decimals."""
    return f"{results[name]:.3f}" if name in results else NOTHING


@dataclass(frozen=True)
class Part:
    """One table of a view: what it is about, what is counted as n, and its columns (label, result, how it is shown).

    A column for which no model has a number is left out, and so is a table without columns.
    """

    about: str
    count: str
    columns: Sequence[tuple[str, str, Show]]


_RIGHT = (("right", "accuracy", show_share), ("95 % interval", "accuracy", show_interval))
_AREA = (("AUC", "auc", show_decimals),)
_TOP = (("top 1", "top_one", show_share), ("95 % interval", "top_one", show_interval))
_CHOOSING = (("any one", "random_one", show_share), ("best there is", "oracle", show_share))
_FIRST = (("first error", "accuracy", show_share), _RIGHT[1])
_STEPS = (
    ("F1", "error_f1", show_share),
    ("erroneous", "accuracy_erroneous", show_share),
    ("correct", "accuracy_correct", show_share),
    ("steps", "step_accuracy", show_share),
    ("AUC", "step_auc", show_decimals),
)
PARTS: Mapping[str, Sequence[Part]] = {
    "pairs": [Part("pairs", "n", (*_RIGHT, ("margin", "margin", show_decimals)))],
    "judged answers": [
        Part("judged answers", "n", (*_RIGHT, *_AREA)),
        Part("choosing among the answers to a problem", "num_problems", (*_TOP, *_CHOOSING)),
    ],
    "labelled steps": [Part("labelled steps", "n", (*_FIRST, *_STEPS))],
}
# What the numbers mean, under the tables.
NOTES: Mapping[str, str] = {
    "pairs": "right: the chosen answer has the higher score; a tie counts half.",
    "judged answers": "right: the score is on the right side of one half. Top 1: the highest-scored answer to a "
    "problem is right; for comparison any one of them, and the best there is (some answer is right).",
    "labelled steps": "first error: the first step with P(good) < 1/2 is the first that is labelled bad, or there is "
    "neither. F1: the harmonic mean of that over solutions with an error and without.",
}


def score_tables(rows: Sequence[tuple[str, RewardEvaluation]]) -> list[TextTable]:
    """The tables of each task and what was measured on it, one line for each model."""
    tables = []
    for name, view in dict.fromkeys((evaluation.name, evaluation.view) for _, evaluation in rows):
        own = [(label, e.results) for label, e in rows if (e.name, e.view) == (name, view)]
        for part in PARTS[view]:
            columns = [column for column in part.columns if any(column[1] in results for _, results in own)]
            lines = [
                [label, show_number(results, part.count), *(show(results, key) for _, key, show in columns)]
                for label, results in own
            ]
            if columns:
                header = ["model", "n", *(label for label, _, _ in columns)]
                tables.append(TextTable(f"{name}, {part.about}", header, lines))
    return tables


def difference_tables(rows: Sequence[tuple[str, RewardEvaluation]]) -> list[TextTable]:
    """Of every task on which several models were measured alike: each model's accuracy less that of the first.

    Over the items that both have scored, by the paired bootstrap (``evals/statistics.py``).
    """
    tables = []
    for name, view in dict.fromkeys((evaluation.name, evaluation.view) for _, evaluation in rows):
        (first, base), *others = [row for row in rows if (row[1].name, row[1].view) == (name, view)]
        lines = []
        for label, evaluation in others:
            pairs = shared_verdicts(base.items, evaluation.items)
            if pairs:
                gap = paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs])
                points = f"{100 * gap.difference:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
                lines.append([label, f"{gap.n}", points, f"{gap.p:.2g}"])
        if lines:
            header = ["model", "n", "points (95 % interval)", "p"]
            tables.append(TextTable(f"{name}, {view}: beside {first}", header, lines))
    return tables


def shared_verdicts(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """What both say of each problem that both have scored: the mean of ``right`` over its items that both have."""
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


def write_score_page(label: str, evaluation: RewardEvaluation, settings: Mapping[str, Any]) -> str:
    """The page of one evaluation, as Markdown."""
    shown = {name for part in PARTS[evaluation.view] for _, name, _ in part.columns} | {"num_problems"}
    further = [
        [name, show_number(evaluation.results, name)]
        for name in evaluation.results
        if name not in shown | {"n"} and not name.endswith(("_low", "_high"))
    ]
    tables = [
        *score_tables([(label, evaluation)]),
        *kind_tables(evaluation.kinds),
        TextTable("Further results", ["result", "value"], further),
    ]
    parts = [
        f"# {plain(evaluation.name)}: {plain(label)}\n",
        f"{NOTES[evaluation.view]}\n",
        *(to_markdown(table) for table in tables),
    ]
    if evaluation.dropped:
        parts.append("Not measured: " + ", ".join(f"{n} {reason}" for reason, n in evaluation.dropped.items()) + "\n")

    def show_item(item: Mapping[str, Any]) -> tuple[str, str]:
        texts = _SHOWN[evaluation.view](item)
        return item["id"], "\n".join(f"{heading}\n\n{quoted(text)}\n" for heading, text in texts)

    parts += [settings_list(settings), first_items(evaluation.items, show_item)]
    return "\n".join(parts)


def _number(value: float | None) -> str:
    return "no score" if value is None else f"{value:.3f}"


def _shown_pair(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(f"{side}: {_number(item[f'{side}_score'])}", item[side]) for side in ("chosen", "rejected")]


def _shown_answer(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    text = item["text"] if item["answer"] is None else f"{item['text']}\nanswer: {item['answer']}"
    return [(f"label {item['label']:g}, score {_number(item['score'])}", text)]


def _shown_steps(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [
        f"{p:.2f}  label {'–' if label is None else label}  {step.strip()}"
        for step, p, label in zip(item["steps"], item["probabilities"], item["labels"], strict=True)
    ]
    return [("P(good), label and text of each step", "\n".join(lines))]


_SHOWN: Mapping[str, Callable[[Mapping[str, Any]], list[tuple[str, str]]]] = {
    "pairs": _shown_pair,
    "judged answers": _shown_answer,
    "labelled steps": _shown_steps,
}
