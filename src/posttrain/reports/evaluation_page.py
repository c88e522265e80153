"""``summary.md`` for evaluations and reward models: results, then the first items in full."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.evaluation.generation import Evaluation
from posttrain.evaluation.items import Item
from posttrain.evaluation.statistics import paired_bootstrap
from posttrain.evaluation.tables import (
    NOTHING,
    ResultsRow,
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
from posttrain.untrusted import bullets, code, cut_end, plain

if TYPE_CHECKING:  # pages of policies need no reward model
    from posttrain.evaluation.reward_models.measures import RewardEvaluation

T = TypeVar("T")
Results = Mapping[str, float]
NUM_ITEMS_SHOWN = 3
MAX_TEXT_CHARS = 1500
# Results shown or explained in the first table.
_IN_FIRST_TABLE = {
    "n",
    "samples",
    "num_graded",
    "prompts_too_long",
    "repeated_prompts",
    "seconds",
    "accuracy",
    "format",
}
_IN_FIRST_TABLE |= {"parse_failures", "truncated"}
_JUDGING = {
    "judge_first": "the answer shown first wins (50% without a bias)",
    "judge_consistent": "both orders say the same",
    "judge_longer": "the longer answer wins",
    "judge_failed": "not judged",
}


def write_page(evaluation: Evaluation, settings: Mapping[str, Any], environment: Mapping[str, object]) -> str:
    """Write an evaluation as Markdown."""
    template = settings.get("template")
    results = evaluation.results
    if isinstance(template, Mapping):
        name = template["name"]
    else:
        name = template
    row = ResultsRow(str(settings.get("label", settings.get("model", ""))), name, evaluation.name, results)
    others = [name for name in results if name not in _IN_FIRST_TABLE and not re.search(r"@|_low$|_high$", name)]
    tables = kind_tables(evaluation.kinds)
    tables.append(_further_table("mean", others, results))
    if row.is_graded:
        of_several_answers = at_k_table(results)
        if of_several_answers is not None:
            tables.insert(0, of_several_answers)
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


def _further_table(what: str, names: Sequence[str], results: Results) -> TextTable:
    """Results missing from all other tables."""
    return TextTable("Further results", ["result", what], [[name, show_number(results, name)] for name in names])


def write_table_page(rows: Sequence[ResultsRow], notes: Sequence[str], folders: Mapping[str, str]) -> str:
    """Write multiple evaluations: a table per task, and links to their pages."""
    tables = [to_markdown(results_table(own)) for own in by_evaluation(rows)]
    links = "".join(f"- [{plain(name)}]({folder})\n" for name, folder in folders.items())
    parts = ["# Evaluations\n", *tables, bullets(notes), f"## Each by itself\n\n{links}"]
    return "\n".join(part for part in parts if part)


def by_evaluation(rows: Sequence[ResultsRow]) -> list[list[ResultsRow]]:
    """Rows grouped by task, in order of appearance."""
    groups: dict[str, list[ResultsRow]] = {}
    for row in rows:
        groups.setdefault(row.evaluation, []).append(row)
    return list(groups.values())


def settings_list(settings: Mapping[str, object]) -> str:
    """Named settings, omitting empty ones."""
    lines = [f"{name}: {shown_value(value)}" for name, value in settings.items() if value not in (None, [], (), {})]
    return f"## Settings\n\n{bullets(lines)}"


def shown_value(value: object) -> str:
    """Format a setting."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown_value(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(shown_value, value))
    return str(value)


def first_items(items: Sequence[T], show: Callable[[T], tuple[str, str]]) -> str:
    """The first items in full, without any selection. ``show`` returns an item's name and text."""
    shown = [show(item) for item in items[:NUM_ITEMS_SHOWN]]
    parts = [f"## The first {len(shown)} items\n"]
    for name, text in shown:
        parts.append(f"### {plain(name)}\n\n{text}")
    return "\n".join(parts)


def _show_item(item: Item) -> tuple[str, str]:
    """An item with its first answer."""
    parts = [f"{quoted(item.question)}\n"]
    if item.answer is not None:
        parts.append(f"gold answer: {code(item.answer)}\n")
    for sample in item.samples[:1]:
        if sample.extracted is None:
            answer = "no answer found"
        else:
            answer = f"answer {code(sample.extracted)}"
        cut = ""
        if sample.finish == "length":
            cut = ", cut off"
        parts.append(f"{quoted(sample.text)}\n\n{sample.outcome}: {answer}, {sample.num_tokens} tokens{cut}\n")
    if not item.samples:
        parts.append("The prompt does not fit into the model's context.\n")
    return item.id, "\n".join(parts)


def quoted(text: str) -> str:
    """Quote data or model text as a code block, truncated if very long. Fences inside cannot close it."""
    text = cut_end(text, MAX_TEXT_CHARS)
    longest_run = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest_run + 1)
    return f"{fence}\n{text}\n{fence}"


def head_to_head_table(name: str, a: str, b: str, results: Results, others: Mapping[str, Results]) -> TextTable:
    """Results of comparing two models, omitting lines without numbers.

    ``others``: results of additional judges by name.
    """
    shares = {
        "win_rate": f"{a} wins",
        "win_rate_similar": f"{a} wins, lengths alike (n = {results.get('n_similar', 0):.0f})",
        "accuracy_a": f"right: {a}",
        "accuracy_b": f"right: {b}",
        **_JUDGING,
    }
    lines = []
    for key, label in shares.items():
        if key in results:
            lines.append([label, show_share(results, key), show_interval(results, key)])
    outcomes = " / ".join(show_share(results, key) for key in ("wins", "ties", "losses"))
    lines.insert(1, ["better / equally good / worse", outcomes, NOTHING])
    for judge, own in others.items():
        lines.append([f"{a} wins, by {judge}", show_share(own, "win_rate"), show_interval(own, "win_rate")])
    for label, side in ((a, "a"), (b, "b")):
        lines.append([f"characters: {label}", f"{results[f'characters_{side}']:.0f}", NOTHING])
    for label, key in ((f"KL({a} ‖ {b})", "kl_ab"), (f"KL({b} ‖ {a})", "kl_ba")):
        if key in results:
            interval = NOTHING
            if results[f"{key}_low"] < results[f"{key}_high"]:
                interval = f"{show_number(results, f'{key}_low')} – {show_number(results, f'{key}_high')}"
            lines.append([f"{label}, nats per answer", show_number(results, key), interval])
            lines.append([f"{label}, nats per token", f"{results[f'{key}_per_token']:.3g}", NOTHING])
    return TextTable(f"{name}: {a} against {b}, n = {results['n']:.0f}", ["", "value", "95 % interval"], lines)


def write_head_to_head_page(
    table: TextTable, notes: Sequence[str], settings: Mapping[str, object], items: Sequence[Mapping[str, Any]]
) -> str:
    """Write a comparison of two models as Markdown, with the first items in full."""

    def show(item: Mapping[str, Any]) -> tuple[str, str]:
        texts = [f"{quoted(item['question'])}\n"]
        if item["answer"] is not None:
            texts.append(f"gold answer: {code(item['answer'])}\n")
        for side in ("a", "b"):
            answer = item[side][0]
            score = ""
            if answer["score"] is not None:
                score = f", score {show_number(answer, 'score')}"
            texts.append(f"{side.upper()}: {answer['outcome']}{score}\n\n{quoted(answer['text'])}\n")
        return item["id"], "\n".join(texts)

    parts = [
        f"# {plain(table.title)}\n",
        to_markdown(table),
        bullets(notes),
        settings_list(settings),
        first_items(items, show),
    ]
    return "\n".join(part for part in parts if part)


Show = Callable[[Results, str], str]


def _decimals(results: Results, name: str) -> str:
    if name not in results:
        return NOTHING
    return f"{results[name]:.3f}"


# Tables per view: subject, name of the count, and columns (label, result, format). Columns and tables without data are
# omitted.
TABLES: Mapping[str, Sequence[tuple[str, str, Sequence[tuple[str, str, Show]]]]] = {
    "pairs": [
        ("pairs", "n", [
            ("pair accuracy", "pair_accuracy", show_share),
            ("95 % interval", "pair_accuracy", show_interval),
            ("margin", "margin", _decimals),
        ]),
    ],
    "judged answers": [
        ("judged answers", "n", [
            ("answer accuracy", "answer_accuracy", show_share),
            ("95 % interval", "answer_accuracy", show_interval),
            ("AUC", "auc", _decimals),
        ]),
        ("choosing among the answers to a problem", "num_problems", [
            ("top 1", "top_one", show_share),
            ("95 % interval", "top_one", show_interval),
            ("any one", "random_one", show_share),
            ("best there is", "oracle", show_share),
        ]),
    ],
    "labelled steps": [
        ("labelled steps", "n", [
            ("solution accuracy", "solution_accuracy", show_share),
            ("95 % interval", "solution_accuracy", show_interval),
            ("F1", "error_f1", show_share),
            ("erroneous", "accuracy_erroneous", show_share),
            ("correct", "accuracy_correct", show_share),
            ("step accuracy", "step_accuracy", show_share),
            ("step AUC", "step_auc", _decimals),
        ]),
    ],
}  # fmt: skip
# Notes below the tables.
NOTES: Mapping[str, str] = {
    "pairs": "pair accuracy: fraction of pairs where the chosen answer scores higher. Ties count half.",
    "judged answers": "answer accuracy: the score falls on the correct side of 1/2. Top 1: accuracy of the "
    "highest-scored answer per problem, compared with a random answer and with the best possible choice.",
    "labelled steps": "solution accuracy: the first step with P(good) < 1/2 matches the first step labelled bad, or "
    "neither exists. F1: harmonic mean of solution accuracy on solutions with and without an error.",
}


def _groups(rows: Sequence[tuple[str, RewardEvaluation]]) -> dict[tuple[str, str], list[tuple[str, RewardEvaluation]]]:
    """Group evaluations by task and view."""
    groups: dict[tuple[str, str], list[tuple[str, RewardEvaluation]]] = {}
    for label, evaluation in rows:
        groups.setdefault((evaluation.name, evaluation.view), []).append((label, evaluation))
    return groups


def score_tables(rows: Sequence[tuple[str, RewardEvaluation]]) -> list[TextTable]:
    """Tables per task and measurement, one row per model."""
    tables = []
    for (name, view), own in _groups(rows).items():
        measured = {key for _, evaluation in own for key in evaluation.results}
        for about, count, every in TABLES[view]:
            columns = [(label, key, show) for label, key, show in every if key in measured]
            if not columns:
                continue
            header = ["model", "n", *(label for label, _, _ in columns)]
            lines = []
            for model, evaluation in own:
                values = [show(evaluation.results, key) for _, key, show in columns]
                lines.append([model, show_number(evaluation.results, count), *values])
            tables.append(TextTable(f"{name}, {about}", header, lines))
    return tables


def difference_tables(rows: Sequence[tuple[str, RewardEvaluation]]) -> list[TextTable]:
    """Accuracy differences from the first model, for tasks where multiple models were measured alike.

    Uses a paired bootstrap over shared items (``evaluation/statistics.py``).
    """
    tables = []
    for (name, view), ((first, base), *others) in _groups(rows).items():
        lines = []
        for label, evaluation in others:
            pairs = shared_verdicts(base.items, evaluation.items)
            if pairs:
                gap = paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs])
                points = f"{100 * gap.difference:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
                lines.append([label, f"{gap.n}", points, f"{gap.p:.2g}"])
        if lines:
            header = ["model", "n", "points (95 % interval)", "p"]
            tables.append(TextTable(f"{name}, {view}: compared with {first}", header, lines))
    return tables


def shared_verdicts(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Pair up verdicts on shared problems, as mean ``right`` per problem."""
    known = {item["id"]: item for item in a if item["right"] is not None}
    of_problem: dict[str, list[tuple[float, float]]] = {}
    for item in b:
        other = known.get(item["id"])
        if other is not None and item["right"] is not None:
            both = (float(other["right"]), float(item["right"]))
            of_problem.setdefault(item.get("problem", item["id"]), []).append(both)
    means = []
    for pairs in of_problem.values():
        mean_a = statistics.fmean(right for right, _ in pairs)
        mean_b = statistics.fmean(right for _, right in pairs)
        means.append((mean_a, mean_b))
    return means


def write_score_page(label: str, evaluation: RewardEvaluation, settings: Mapping[str, object]) -> str:
    """Write a reward-model evaluation as Markdown."""
    results = evaluation.results
    shown = {"num_problems", "n"}
    for _, _, columns in TABLES[evaluation.view]:
        shown |= {name for _, name, _ in columns}
    others = [name for name in results if name not in shown and not name.endswith(("_low", "_high"))]
    tables = [
        *score_tables([(label, evaluation)]),
        *kind_tables(evaluation.kinds),
        _further_table("value", others, results),
    ]
    dropped = ""
    if evaluation.dropped:
        dropped = f"Not measured: {', '.join(f'{n} {reason}' for reason, n in evaluation.dropped.items())}\n"
    parts = [
        f"# {plain(evaluation.name)}: {plain(label)}\n",
        f"{NOTES[evaluation.view]}\n",
        *(to_markdown(table) for table in tables if table.lines),
        dropped,
        settings_list(settings),
        first_items(evaluation.items, lambda item: (item["id"], _SHOWN[evaluation.view](item))),
    ]
    return "\n".join(part for part in parts if part)


def _number(value: float | None) -> str:
    if value is None:
        return "no score"
    return f"{value:.3f}"


def _shown_pair(item: Mapping[str, Any]) -> str:
    sides = ("chosen", "rejected")
    return "\n".join(f"{side}: {_number(item[f'{side}_score'])}\n\n{quoted(item[side])}\n" for side in sides)


def _shown_answer(item: Mapping[str, Any]) -> str:
    if item["answer"] is None:
        text = item["text"]
    else:
        text = f"{item['text']}\nanswer: {item['answer']}"
    return f"label {item['label']:g}, score {_number(item['score'])}\n\n{quoted(text)}\n"


def _shown_steps(item: Mapping[str, Any]) -> str:
    lines = []
    for step, probability, label in zip(item["steps"], item["probabilities"], item["labels"], strict=True):
        if label is None:
            label = NOTHING
        lines.append(f"{probability:.2f}  label {label}  {step.strip()}")
    text = "\n".join(lines)
    return f"P(good), label and text of each step\n\n{quoted(text)}\n"


_SHOWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "pairs": _shown_pair,
    "judged answers": _shown_answer,
    "labelled steps": _shown_steps,
}
