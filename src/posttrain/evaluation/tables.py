"""Text tables of evaluation results, and paired tests between two evaluations."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.errors import UsageError
from posttrain.evaluation.files import FinishedEvaluation
from posttrain.evaluation.items import Item, Kinds, graded_items, item_values, measure_names
from posttrain.evaluation.statistics import Difference, mcnemar_p, paired_bootstrap
from posttrain.store.durable import storage_errors, write_json
from posttrain.store.metric_names import METRICS, metric_of
from posttrain.untrusted import plain

NOTHING = "–"  # not measured
MAX_TOO_MANY_CUT = 0.05
AT_K = ("pass", "majority", "best_of")
BEHAVIOURS = ("refusal", "over_refusal")  # rates computed by tasks (``Task.shares``)


@dataclass(frozen=True)
class ResultsRow:
    """One evaluation in a table. ``template`` None: not shown."""

    model: str
    template: str | None
    evaluation: str
    results: Mapping[str, float]

    @property
    def is_graded(self) -> bool:
        num_graded = self.results.get("num_graded", self.results["n"])
        return num_graded > 0


@dataclass(frozen=True)
class TextTable:
    """Text cells. ``num_labels``: number of label columns on the left; the rest are numeric."""

    title: str
    header: list[str]
    lines: list[list[str]]
    num_labels: int = 1


def show_share(results: Mapping[str, float], name: str) -> str:
    """Format a fraction in percent."""
    if name in results:
        return f"{results[name]:.1%}"
    return NOTHING


def show_interval(results: Mapping[str, float], name: str) -> str:
    """Format a fraction's 95 % interval."""
    if f"{name}_low" in results:
        return f"{results[f'{name}_low']:.1%} – {results[f'{name}_high']:.1%}"
    return NOTHING


def show_number(results: Mapping[str, float], name: str) -> str:
    """Format a number, rounded to an integer if large."""
    if name not in results:
        return NOTHING
    value = results[name]
    if abs(value) >= 10:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show_length(results: Mapping[str, float], name: str) -> str:
    """Format a token count, rounded."""
    return f"{results[name]:.0f}"


@dataclass(frozen=True)
class _Column:
    """A column of a results table: label, result name, and formatter.

    ``of_grades``: blank if a row has no graded items. ``is_optional``: omitted if missing from all rows.
    """

    label: str
    name: str
    show: Callable[[Mapping[str, float], str], str]
    of_grades: bool = False
    is_optional: bool = False


def _columns(rows: Sequence[ResultsRow]) -> list[_Column]:
    columns = [
        _Column("accuracy", "accuracy", show_share, of_grades=True),
        _Column("95 % interval", "accuracy", show_interval, of_grades=True),
    ]
    for kind in AT_K:
        ks = [k for row in rows for k in _ks(row.results, kind)]
        largest = max(ks, default=0)
        if largest:
            label = f"{kind.replace('_', ' ')}@{largest}"
            columns.append(_Column(label, f"{kind}@{largest}", show_share, of_grades=True, is_optional=True))
    for name in BEHAVIOURS:
        columns.append(_Column(METRICS[name].label, name, show_share, is_optional=True))
        columns.append(_Column("95 % interval", name, show_interval, is_optional=True))
    columns += [
        _Column("format", "format", show_share, is_optional=True),
        _Column("shows reasoning", "shows_reasoning", show_share, is_optional=True),
        _Column("no answer", "parse_failures", show_share, of_grades=True),
        _Column("truncated", "truncated", show_share),
        _Column("completion length", "completion_length", show_length),
    ]
    measured = {name for row in rows for name in row.results}
    return [column for column in columns if not column.is_optional or column.name in measured]


def _ks(results: Mapping[str, float], kind: str) -> list[int]:
    """Extract the k values present for ``pass@k`` or similar measures."""
    ks = []
    for name in results:
        start, _, k = name.partition("@")
        if start == kind and k.isdigit():
            ks.append(int(k))
    return sorted(ks)


def results_table(rows: Sequence[ResultsRow]) -> TextTable:
    """Build a task's results table: one line per model and template, with accuracy, interval and supporting metrics."""
    columns = _columns(rows)
    has_templates = any(row.template is not None for row in rows)
    header = ["model"]
    if has_templates:
        header.append("template")
    header += [column.label for column in columns]
    lines = []
    for row in rows:
        line = [row.model]
        if has_templates:
            line.append(row.template or NOTHING)
        for column in columns:
            if column.of_grades and not row.is_graded:
                line.append(NOTHING)
            else:
                line.append(column.show(row.results, column.name))
        lines.append(line)
    title = f"{rows[0].evaluation}, n = {rows[0].results['n']:.0f}"
    if rows[0].results.get("samples", 1) > 1:
        title += f", {rows[0].results['samples']:.0f} answers to each"
    return TextTable(title, header, lines, num_labels=1 + has_templates)


def at_k_table(results: Mapping[str, float]) -> TextTable | None:
    """Build a table of results by k; None if only one sample was drawn or nothing was graded."""
    kinds = [kind for kind in AT_K if _ks(results, kind)]
    if not kinds:
        return None
    header = ["k"]
    for kind in kinds:
        header += [f"{kind.replace('_', ' ')}@k", "95 % interval"]
    lines = []
    for k in _ks(results, "pass"):
        line = [str(k)]
        for kind in kinds:
            name = f"{kind}@{k}"
            line += [show_share(results, name), show_interval(results, name)]
        lines.append(line)
    return TextTable("Several answers to each item", header, lines)


def kind_tables(kinds: Kinds) -> list[TextTable]:
    """Build accuracy tables by kind of item, one per metadata key."""
    tables = []
    for key, values in kinds.items():
        names = [name for kind in values.values() for name in kind]
        name = next(name for name in names if name.endswith("accuracy"))
        header = [key, "n", metric_of(name).label, "95 % interval"]
        lines = []
        for value, kind in values.items():
            lines.append([value, f"{kind['n']:.0f}", show_share(kind, name), show_interval(kind, name)])
        tables.append(TextTable(f"By {key}", header, lines))
    return tables


# Notes by result name, shown if the result is nonzero.
_NOTES = {
    "prompts_too_long": "{prompts_too_long:.0f} prompts exceed the model's context and count as wrong",
    "repeated_prompts": "{repeated_prompts:.0f} duplicate questions are skipped: n and intervals refer to {n:.0f} "
    "distinct questions",
    "trained_rows": "{trained_rows:.0f} of {n:.0f} rows also appear in this run's training data",
    "grading_failures": "{grading_failures:.1%} of answers: grading timed out or crashed",
    "out_of_tokens": "{out_of_tokens:.1%} of answers were truncated; raise --max-tokens",
    "out_of_turns": "{out_of_turns:.1%} of answers reached the turn limit (rollout.max_turns)",
    "tool_failed": "{tool_failed:.1%} of answers ended by a tool timeout (rollout.tool_seconds)",
    "unscored": "{unscored:.1%} of answers could not be scored and rank last",
}


def notes_on(rows: Sequence[ResultsRow], dropped: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Collect notes below a results table; ``dropped``: counts by evaluation and reason."""
    notes = []
    for row in rows:
        parts = [part for part in (row.evaluation, row.model, row.template) if part]
        name = " · ".join(parts)
        results = row.results
        num_ungraded = results["n"] - results.get("num_graded", results["n"])
        if not row.is_graded:
            notes.append(
                f"{name}: not graded, because items have no gold answer; only length and format are meaningful"
            )
        elif num_ungraded > 0:
            notes.append(f"{name}: {num_ungraded:.0f} items without a gold answer are excluded from accuracy")
        known = defaultdict(float, results)
        out_of_tokens = results["truncated"] - known["out_of_turns"] - known["tool_failed"]
        if out_of_tokens > MAX_TOO_MANY_CUT:
            known["out_of_tokens"] = out_of_tokens
        else:
            known["out_of_tokens"] = 0.0
        for result, text in _NOTES.items():
            if known[result]:
                notes.append(f"{name}: {text.format(**known)}")
    for evaluation, counts in dropped.items():
        left = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        if left:
            notes.append(f"{evaluation}: dropped rows: {left}")
    return notes


def to_markdown(table: TextTable) -> str:
    """Render as Markdown, with a heading if the table has a title."""
    header = [plain(text) for text in table.header]
    rule = ["---"] * table.num_labels
    rule += ["---:"] * (len(header) - table.num_labels)
    rows = [header, rule]
    for line in table.lines:
        rows.append([plain(text) for text in line])
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if table.title:
        return f"## {plain(table.title)}\n\n{text}\n"
    return f"{text}\n"


COMPARISON = "comparison.json"
# Settings that must match; otherwise results differ by more than the model.
ALIKE = (
    "samples", "max_tokens", "temperature", "top_k", "top_p", "min_p", "min_tokens", "repetition_penalty", "stop",
    "best_of",
)  # fmt: skip
# Settings allowed to differ; differences are reported.
MAY_DIFFER = ("model", "checkpoint", "template", "task", "engine", "dtype", "seed")
ALPHA = 0.05
MIN_ITEMS = 30  # below, bootstrap intervals generalize poorly
TABLE_WORDS = {
    "both": "both right",
    "only_a": "only A right",
    "only_b": "only B right",
    "neither": "neither right",
    "a_higher": "A right more often",
    "b_higher": "B right more often",
    "alike": "equally often",
}


@dataclass(frozen=True)
class Paired:
    """Result of a paired comparison between evaluations named ``a`` and ``b``.

    ``differences`` by measure: ``accuracy``, pass@k and similar, format, and length over items answered by both
    (omitted if none). ``table``, for one answer per item: numbers of items that both, only A, only B or neither
    answered correctly; for several: items with higher accuracy for A, for B, or equal. ``gained`` and ``lost``: item
    ids with higher or lower accuracy for B.
    """

    a: str
    b: str
    n: int
    differences: dict[str, Difference]
    table: dict[str, int]
    mcnemar: float | None
    gained: list[str]
    lost: list[str]

    def in_words(self) -> str:
        """Summarize in one sentence; says "may be chance" unless bootstrap and McNemar's test agree on significance."""
        accuracy = self.differences["accuracy"]
        if accuracy.difference < 0:
            sign = -100.0
        else:
            sign = 100.0
        low, high = sorted((accuracy.low * sign, accuracy.high * sign))
        is_inside = accuracy.low <= 0 <= accuracy.high
        if self.mcnemar is not None and self.mcnemar >= ALPHA and not is_inside:
            exact = self.mcnemar
        else:
            exact = None
        tests = show_p(accuracy.p)
        if exact is not None:
            tests += f" (McNemar's exact test: {show_p(exact)})"
        info = f"[{low:.1f}, {high:.1f}], {tests}, on {accuracy.n} items"
        if accuracy.difference == 0:
            return f"{self.b} and {self.a} have equal accuracy, {info}"
        if accuracy.difference > 0:
            way = "better"
        else:
            way = "worse"
        if is_inside or exact is not None or accuracy.p >= ALPHA:
            chance = ", which may be chance,"
        else:
            chance = ""
        return f"{self.b} is {way} than {self.a} by {accuracy.difference * sign:.1f} points{chance} {info}"

    def cautions(self) -> list[str]:
        """List reasons to distrust the interval and p."""
        accuracy = self.differences["accuracy"]
        notes = []
        if accuracy.is_constant:
            notes.append(f"all {accuracy.n} items differ by the same amount, so the interval is a point")
        if accuracy.n < MIN_ITEMS:
            if self.mcnemar is not None:
                exact = "; McNemar's exact test remains valid"
            else:
                exact = ""
            notes.append(f"only {accuracy.n} items: below {MIN_ITEMS} the interval is too narrow{exact}")
        return notes

    def counts(self) -> str:
        """Format the item counts, and McNemar's test, on one line."""
        counts = [f"{TABLE_WORDS[name]} {count}" for name, count in self.table.items()]
        if self.mcnemar is not None:
            counts.append(f"McNemar's exact test: {show_p(self.mcnemar)}")
        return " · ".join(counts)


def show_p(p: float) -> str:
    """Format as ``p = 0.02`` or ``p < 0.001``."""
    if p < 0.001:
        return "p < 0.001"
    if p < 0.995:
        return f"p = {p:.2g}"
    return "p = 1"


def differences_table(paired: Paired) -> TextTable:
    """Build a table of each measure for A and B, and their difference."""
    lines = []
    for name, gap in paired.differences.items():
        if name == "completion_length":
            unit = 1.0
            form = ".2f"
            percent = ""
        else:
            unit = 100.0
            form = ".1f"
            percent = "%"
        label = metric_of(name).label
        if gap.n != paired.n:
            label = f"{label}, {gap.n} items answered by both"
        if gap.p >= 0.001:
            p = f"{gap.p:.2g}"
        else:
            p = "< 0.001"
        lines.append(
            [
                label,
                f"{gap.a * unit:{form}}{percent}",
                f"{gap.b * unit:{form}}{percent}",
                f"{gap.difference * unit:+{form}}",
                f"{gap.low * unit:+{form}} to {gap.high * unit:+{form}}",
                p,
            ]
        )
    return TextTable(f"n = {paired.n}", ["", "A", "B", "B − A", "95 % interval", "p"], lines)


def pair_items(a: Sequence[Item], b: Sequence[Item]) -> list[tuple[Item, Item]]:
    """Join two evaluations by item id.

    Raises:
        UsageError: different items, questions or gold answers.
    """
    left = {item.id: item for item in a}
    right = {item.id: item for item in b}
    for which, items, by_id in (("A", a, left), ("B", b, right)):
        if len(by_id) < len(items):
            raise UsageError(f"{which}: {len(items)} items share {len(by_id)} ids; ids must be unique")
    only_a = [key for key in left if key not in right]
    only_b = [key for key in right if key not in left]
    if only_a or only_b:
        named = ", ".join(only_a[:3] or only_b[:3])
        raise UsageError(
            f"A and B contain different items: {len(only_a)} only in A and {len(only_b)} only in B, such as {named}. "
            "Evaluate both with the same task, split and --limit"
        )
    pairs = [(item, right[item.id]) for item in a]
    changed = []
    for one, other in pairs:
        if (one.question, one.answer) != (other.question, other.answer):
            changed.append(one.id)
    if changed:
        raise UsageError(f"{len(changed)} items differ in question or gold answer, such as {changed[0]}")
    return pairs


def settings_apart(a: Mapping[str, object], b: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """List allowed settings that differ.

    Raises:
        UsageError: sampling settings differ, which would confound the comparison.
    """
    wrong = []
    for name in ALIKE:
        if a.get(name) != b.get(name):
            wrong.append(f"{name}: {a.get(name)} and {b.get(name)}")
    if wrong:
        raise UsageError(f"A and B used different settings ({'; '.join(wrong)}); evaluate both with the same options")
    apart = {}
    for name in MAY_DIFFER:
        if a.get(name) != b.get(name):
            apart[name] = (a.get(name), b.get(name))
    return apart


def compare_items(
    a: Sequence[Item],
    b: Sequence[Item],
    *,
    labels: tuple[str, str],
    samples: int,
    ks: Sequence[int] = (),
    seed: int = 0,
) -> Paired:
    """Test the difference B − A, paired by item.

    Raises:
        UsageError: different items, or nothing graded.
    """
    pairs = _graded_pairs(a, b)
    if not pairs:
        raise UsageError("no graded items in these evaluations, so accuracy cannot be compared")
    left = [x for x, _ in pairs]
    right = [y for _, y in pairs]
    names = ["accuracy"]
    if samples > 1:
        names += measure_names([*left, *right], ks)
    differences = {}
    for name in names:
        differences[name] = paired_bootstrap(item_values(left, name), item_values(right, name), seed=seed)
    if all(sample.in_format is not None for item in (*left, *right) for sample in item.samples):
        differences["format"] = _compare_means("in_format", pairs, seed)
    answered = [pair for pair in pairs if pair[0].samples and pair[1].samples]  # unanswered items have no length
    if answered:
        differences["completion_length"] = _compare_means("num_tokens", answered, seed)
    gained = [x.id for x, y in pairs if y.share > x.share]
    lost = [x.id for x, y in pairs if x.share > y.share]
    if samples > 1:
        table = {"a_higher": len(lost), "b_higher": len(gained), "alike": len(pairs) - len(gained) - len(lost)}
        return Paired(*labels, len(pairs), differences, table, None, gained, lost)
    num_both = sum(x.num_correct > 0 and y.num_correct > 0 for x, y in pairs)
    table = {"both": num_both, "only_a": len(lost), "only_b": len(gained)}
    table["neither"] = len(pairs) - sum(table.values())
    return Paired(*labels, len(pairs), differences, table, mcnemar_p(len(lost), len(gained)), gained, lost)


def _graded_pairs(a: Sequence[Item], b: Sequence[Item]) -> list[tuple[Item, Item]]:
    """Pair items graded in both evaluations, dropping duplicate questions."""
    graded_a = {item.id for item in graded_items(a)}
    graded_b = {item.id for item in graded_items(b)}
    graded = graded_a & graded_b
    of_question = {}
    # Reversed, so each question keeps its first pair.
    for x, y in reversed(pair_items(a, b)):
        if x.id in graded:
            of_question[x.question, x.answer] = (x, y)
    return list(of_question.values())[::-1]


def _compare_means(field: str, pairs: Sequence[tuple[Item, Item]], seed: int) -> Difference:
    """Compare a field's average over samples, paired by item."""
    left = [_mean(field, x) for x, _ in pairs]
    right = [_mean(field, y) for _, y in pairs]
    return paired_bootstrap(left, right, seed=seed)


def _mean(field: str, item: Item) -> float:
    if not item.samples:
        return 0.0
    return statistics.fmean(float(getattr(sample, field)) for sample in item.samples)


def compare_finished(
    a: FinishedEvaluation, b: FinishedEvaluation, seed: int = 0
) -> tuple[Paired, dict[str, tuple[object, object]]]:
    """Compare two stored evaluations; returns the outcome and differing settings.

    Raises:
        UsageError: different items, or sampling settings that differ.
    """
    if a.evaluation != b.evaluation:
        raise UsageError(f"different tasks: {a.folder} evaluates {a.evaluation}, {b.folder} evaluates {b.evaluation}")
    apart = settings_apart(a.settings, b.settings)
    if a.label != b.label:
        labels = (a.label, b.label)
    elif a.template != b.template:
        labels = (a.template, b.template)
    else:
        labels = (str(a.folder), str(b.folder))
    ks_of_b = b.settings.get("ks", ())
    ks = [k for k in a.settings.get("ks", ()) if k in ks_of_b]
    samples = int(a.settings.get("samples", 1))
    paired = compare_items(a.items(), b.items(), labels=labels, samples=samples, ks=ks, seed=seed)
    return paired, apart


def write_comparison(
    out: Path, a: FinishedEvaluation, b: FinishedEvaluation, paired: Paired, apart: Mapping[str, tuple[object, object]]
) -> None:
    """Write ``comparison.json``.

    Raises:
        StorageError: writing failed, for example on a full disk.
    """
    differences = {name: asdict(difference) for name, difference in paired.differences.items()}
    content = {
        "evaluation": a.evaluation,
        "a": {"name": paired.a, "folder": str(a.folder)},
        "b": {"name": paired.b, "folder": str(b.folder)},
        "outcome": paired.in_words(),
        "cautions": paired.cautions(),
        "n": paired.n,
        "differences": differences,
        "table": paired.table,
        "mcnemar_p": paired.mcnemar,
        "settings_apart": {name: list(values) for name, values in apart.items()},
        "gained": paired.gained,
        "lost": paired.lost,
    }
    with storage_errors("comparison", out):
        out.mkdir(parents=True, exist_ok=True)
    write_json(out / COMPARISON, content)
