"""Results of evaluations as tables of text, for a terminal and for ``summary.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.evals.items import Kinds
from posttrain.untrusted import plain

NOTHING = "–"  # what was not measured
MAX_TOO_MANY_CUT = 0.05
AT_K = ("pass", "majority", "best_of")
# Shares that tasks tell of their items (``Task.shares``), by what their columns are called.
BEHAVIOURS = {"refuses": "refusal", "over-refuses": "over_refusal"}


@dataclass(frozen=True)
class Row:
    """One evaluation in a table: the model, its template (None: not to be shown), what was measured on, results."""

    model: str
    template: str | None
    evaluation: str
    results: Mapping[str, float]

    @property
    def is_graded(self) -> bool:
        return self.results.get("num_graded", self.results["n"]) > 0


@dataclass(frozen=True)
class TextTable:
    """Cells of text. ``num_labels``: so many columns at the left are labels, the rest are numbers."""

    title: str
    header: list[str]
    lines: list[list[str]]
    num_labels: int = 1


def show_share(results: Mapping[str, float], name: str) -> str:
    """A share in percent."""
    return f"{results[name]:.1%}" if name in results else NOTHING


def show_interval(results: Mapping[str, float], name: str) -> str:
    """The 95 % interval of a share."""
    return f"{results[f'{name}_low']:.1%} – {results[f'{name}_high']:.1%}" if f"{name}_low" in results else NOTHING


def show_number(results: Mapping[str, float], name: str) -> str:
    """A number, whole if it is large."""
    if name not in results:
        return NOTHING
    value = results[name]
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.3g}"


# A column: its label, the result, how it is shown; whether it means nothing where nothing was graded, and whether it is
# left out where no row has it.
_Column = tuple[str, str, Callable[[Mapping[str, float], str], str], bool, bool]


def _columns(rows: Sequence[Row]) -> list[_Column]:
    columns: list[_Column] = [
        ("right", "accuracy", show_share, True, False),
        ("95 % interval", "accuracy", show_interval, True, False),
    ]
    for kind in AT_K:
        ks = [k for row in rows for k in _ks(row.results, kind)]
        columns += [(f"{kind.replace('_', ' ')}@{max(ks)}", f"{kind}@{max(ks)}", show_share, True, True)] if ks else []
    for label, name in BEHAVIOURS.items():
        columns += [(label, name, show_share, False, True), ("95 % interval", name, show_interval, False, True)]
    columns += [
        ("format", "format", show_share, False, True),
        ("worked", "worked", show_share, False, True),
        ("no answer", "parse_failures", show_share, True, False),
        ("cut off", "truncated", show_share, False, False),
        ("tokens", "num_tokens", lambda r, name: f"{r[name]:.0f}", False, False),
    ]
    return [one for one in columns if not one[4] or any(one[1] in row.results for row in rows)]


def _ks(results: Mapping[str, float], kind: str) -> list[int]:
    """The k of ``pass@k`` and its like among results."""
    names = (name.partition("@") for name in results)
    return sorted(int(k) for start, _, k in names if start == kind and k.isdigit())


def results_table(rows: Sequence[Row]) -> TextTable:
    """One line for each model and template on one task: accuracy with its interval, and what surrounds it."""
    columns = _columns(rows)
    has_templates = any(row.template is not None for row in rows)
    header = ["model", *(["template"] if has_templates else []), *(label for label, *_ in columns)]
    lines = [
        [
            row.model,
            *([row.template or NOTHING] if has_templates else []),
            *(
                NOTHING if is_of_grade and not row.is_graded else show(row.results, name)
                for _, name, show, is_of_grade, _ in columns
            ),
        ]
        for row in rows
    ]
    title = f"{rows[0].evaluation}, n = {rows[0].results['n']:.0f}"
    if rows[0].results.get("samples", 1) > 1:
        title += f", {rows[0].results['samples']:.0f} answers to each"
    return TextTable(title, header, lines, num_labels=1 + has_templates)


def at_k_table(results: Mapping[str, float]) -> TextTable | None:
    """The results of several samples, for each k; None where there is one sample or nothing was graded."""
    kinds, ks = [kind for kind in AT_K if _ks(results, kind)], _ks(results, "pass")
    if not kinds:
        return None
    header = ["k", *(text for kind in kinds for text in (f"{kind.replace('_', ' ')}@k", "95 % interval"))]
    lines = [
        [str(k), *(show(results, f"{kind}@{k}") for kind in kinds for show in (show_share, show_interval))] for k in ks
    ]
    return TextTable("Several answers to each item", header, lines)


def kind_tables(kinds: Kinds) -> list[TextTable]:
    """Accuracy by kind of item, a table for each key."""
    tables = []
    for key, values in kinds.items():
        lines = [
            [value, f"{kind['n']:.0f}", show_share(kind, "accuracy"), show_interval(kind, "accuracy")]
            for value, kind in values.items()
        ]
        tables.append(TextTable(f"By {key}", [key, "n", "right", "95 % interval"], lines))
    return tables


def notes_on(rows: Sequence[Row], dropped: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Notes under the figures; ``dropped`` by evaluation, counts by reason."""
    notes = []
    for row in rows:
        name = " · ".join(part for part in (row.evaluation, row.model, row.template) if part)
        results = row.results
        if not row.is_graded:
            notes.append(f"{name}: nothing was graded, as the items have no gold answer; only lengths and format count")
        elif (ungraded := results["n"] - results.get("num_graded", results["n"])) > 0:
            notes.append(f"{name}: items without a gold answer: {ungraded:.0f}; they do not count in accuracy")
        if too_long := results.get("prompts_too_long"):
            notes.append(
                f"{name}: prompts that do not fit into the model's context: {too_long:.0f}; they count as wrong"
            )
        if results.get("grading_failures"):
            notes.append(f"{name}: {results['grading_failures']:.1%} of the gradings were stopped or crashed")
        of_turns, of_tools = results.get("out_of_turns", 0.0), results.get("tool_failed", 0.0)
        out_of_tokens = results["truncated"] - of_turns - of_tools
        if out_of_tokens > MAX_TOO_MANY_CUT:
            notes.append(f"{name}: {out_of_tokens:.1%} of the answers were cut off; --max-tokens lets them grow longer")
        if of_turns:
            notes.append(f"{name}: {of_turns:.1%} of the answers came to the limit of turns (rollout.max_turns)")
        if of_tools:
            notes.append(f"{name}: {of_tools:.1%} of the answers ended as tools were too slow (rollout.tool_seconds)")
        if results.get("unscored"):
            notes.append(f"{name}: {results['unscored']:.1%} of the answers could not be scored; they are chosen last")
    for evaluation, counts in dropped.items():
        left = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        if left:
            notes.append(f"{evaluation}: left out of the data: {left}")
    return notes


def to_markdown(table: TextTable) -> str:
    """A table under its title, if it has one."""
    header = [plain(text) for text in table.header]
    rule = ["---" if i < table.num_labels else "---:" for i in range(len(header))]
    lines = [[plain(text) for text in line] for line in table.lines]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))
    return f"## {plain(table.title)}\n\n{rows}\n" if table.title else f"{rows}\n"
