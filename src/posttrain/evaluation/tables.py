"""Results of evaluations as tables of text, and the test of the difference of two evaluations of the same items."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.errors import UsageError
from posttrain.evaluation.files import Finished
from posttrain.evaluation.items import Item, Kinds, graded_items, item_values, measure_names
from posttrain.evaluation.statistics import Difference, mcnemar_p, paired_bootstrap
from posttrain.store.durable import replace_file, storage_errors
from posttrain.store.metric_names import METRICS, metric_of
from posttrain.untrusted import plain

NOTHING = "–"  # what was not measured
MAX_TOO_MANY_CUT = 0.05
AT_K = ("pass", "majority", "best_of")
BEHAVIOURS = ("refusal", "over_refusal")  # shares that tasks measure of their items (``Task.shares``)


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
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}"


# A column: its label, the result, how it is shown; whether it means nothing where nothing was graded, and whether it is
# left out where no row has it.
_Column = tuple[str, str, Callable[[Mapping[str, float], str], str], bool, bool]


def _columns(rows: Sequence[Row]) -> list[_Column]:
    largest = {kind: max((k for row in rows for k in _ks(row.results, kind)), default=0) for kind in AT_K}
    at_k = {f"{kind}@{k}": f"{kind.replace('_', ' ')}@{k}" for kind, k in largest.items() if k}
    behaviours = ((METRICS[name].label, name) for name in BEHAVIOURS)
    columns: list[_Column] = [
        ("accuracy", "accuracy", show_share, True, False),
        ("95 % interval", "accuracy", show_interval, True, False),
        *((label, name, show_share, True, True) for name, label in at_k.items()),
        *(
            column
            for label, name in behaviours
            for column in ((label, name, show_share, False, True), ("95 % interval", name, show_interval, False, True))
        ),
        ("format", "format", show_share, False, True),
        ("shows reasoning", "shows_reasoning", show_share, False, True),
        ("no answer", "parse_failures", show_share, True, False),
        ("truncated", "truncated", show_share, False, False),
        ("completion length", "completion_length", lambda r, name: f"{r[name]:.0f}", False, False),
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
        name = next(name for kind in values.values() for name in kind if name.endswith("accuracy"))
        lines = [
            [value, f"{kind['n']:.0f}", show_share(kind, name), show_interval(kind, name)]
            for value, kind in values.items()
        ]
        tables.append(TextTable(f"By {key}", [key, "n", metric_of(name).label, "95 % interval"], lines))
    return tables


# Notes by the result that, where it is not 0, asks for them.
_NOTES = {
    "prompts_too_long": "prompts that do not fit into the model's context: {prompts_too_long:.0f}; they count as wrong",
    "repeated_prompts": "{repeated_prompts:.0f} questions repeat others and are asked once: n and intervals are of "
    "{n:.0f} distinct ones",
    "trained_rows": "{trained_rows:.0f} of {n:.0f} rows were in the training data of this run",
    "grading_failures": "{grading_failures:.1%} of the gradings were stopped or crashed",
    "out_of_tokens": "{out_of_tokens:.1%} of the answers were cut off; --max-tokens lets them grow longer",
    "out_of_turns": "{out_of_turns:.1%} of the answers came to the limit of turns (rollout.max_turns)",
    "tool_failed": "{tool_failed:.1%} of the answers ended as tools were too slow (rollout.tool_seconds)",
    "unscored": "{unscored:.1%} of the answers could not be scored; they are chosen last",
}


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
        known = defaultdict(float, results)
        out_of_tokens = results["truncated"] - known["out_of_turns"] - known["tool_failed"]
        known["out_of_tokens"] = out_of_tokens if out_of_tokens > MAX_TOO_MANY_CUT else 0.0
        notes += [f"{name}: {text.format(**known)}" for result, text in _NOTES.items() if known[result]]
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


COMPARISON = "comparison.json"
# Settings in which two evaluations must agree: else more than the model would differ.
ALIKE = ("samples", "max_tokens", "temperature", "top_k", "top_p", "best_of")
# Settings in which they may differ; the differences are reported.
MAY_DIFFER = ("model", "checkpoint", "template", "task", "engine", "dtype", "seed")
ALPHA = 0.05
MIN_ITEMS = 30  # below, resampled items say little about other items
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
    """The outcome of a comparison. ``a`` and ``b`` are the names of the two.

    ``differences`` by measure: ``accuracy`` first, then pass@k and its like, format, and length over the items that
    both answered (left out where there is none). ``table``: of items with one answer each, how many both, only A,
    only B and neither got right; with several answers, on how many A has the higher share, B has, or neither.
    ``gained`` and ``lost``: ids of the items on which B has the higher share of right answers, and the lower.
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
        """The outcome in one sentence. It may be chance unless the bootstrap and McNemar's test both say no."""
        accuracy = self.differences["accuracy"]
        sign = -100.0 if accuracy.difference < 0 else 100.0
        low, high = sorted((accuracy.low * sign, accuracy.high * sign))
        is_inside = accuracy.low <= 0 <= accuracy.high
        exact = self.mcnemar if self.mcnemar is not None and self.mcnemar >= ALPHA and not is_inside else None
        tests = show_p(accuracy.p) + (f" (McNemar's exact test: {show_p(exact)})" if exact is not None else "")
        info = f"[{low:.1f}, {high:.1f}], {tests}, on {accuracy.n} items"
        if accuracy.difference == 0:
            return f"{self.b} and {self.a} are right equally often, {info}"
        way = "better" if accuracy.difference > 0 else "worse"
        chance = ", which may be chance," if is_inside or exact is not None or accuracy.p >= ALPHA else ""
        return f"{self.b} is {way} than {self.a} by {accuracy.difference * sign:.1f} points{chance} {info}"

    def cautions(self) -> list[str]:
        """Reasons why the interval and its p say less than they seem to."""
        accuracy, notes = self.differences["accuracy"], []
        if accuracy.is_constant:
            notes.append(f"all {accuracy.n} items differ by the same amount, so the interval has no width")
        if accuracy.n < MIN_ITEMS:
            exact = "; McNemar's exact test holds for few items too" if self.mcnemar is not None else ""
            notes.append(f"{accuracy.n} items are few: below {MIN_ITEMS} the interval is too narrow{exact}")
        return notes

    def counts(self) -> str:
        """The table of items in one line, with McNemar's test."""
        counts = " · ".join(f"{TABLE_WORDS[name]} {count}" for name, count in self.table.items())
        return counts + (f" · McNemar's exact test: {show_p(self.mcnemar)}" if self.mcnemar is not None else "")


def show_p(p: float) -> str:
    """``p = 0.02``, ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.995 else "p = 1"


def differences_table(paired: Paired) -> TextTable:
    """Each measure of both, and their difference."""
    lines = []
    for name, gap in paired.differences.items():
        unit, form, percent = (1.0, ".2f", "") if name == "completion_length" else (100.0, ".1f", "%")
        label = metric_of(name).label
        lines.append(
            [
                label if gap.n == paired.n else f"{label}, of {gap.n} items that both answered",
                f"{gap.a * unit:{form}}{percent}",
                f"{gap.b * unit:{form}}{percent}",
                f"{gap.difference * unit:+{form}}",
                f"{gap.low * unit:+{form}} to {gap.high * unit:+{form}}",
                f"{gap.p:.2g}" if gap.p >= 0.001 else "< 0.001",
            ]
        )
    return TextTable(f"n = {paired.n}", ["", "A", "B", "B − A", "95 % interval", "p"], lines)


def pair_items(a: Sequence[Item], b: Sequence[Item]) -> list[tuple[Item, Item]]:
    """The items of two evaluations, joined by their ids.

    Raises:
        UsageError: they are not of the same items, or not the same questions with the same gold answers.
    """
    left, right = ({item.id: item for item in items} for items in (a, b))
    for which, items, by_id in (("A", a, left), ("B", b, right)):
        if len(by_id) < len(items):
            raise UsageError(f"{len(items)} items of {which} have {len(by_id)} ids; each item needs an id of its own")
    only_a, only_b = [key for key in left if key not in right], [key for key in right if key not in left]
    if only_a or only_b:
        named = ", ".join((only_a or only_b)[:3])
        raise UsageError(
            f"the two are not of the same items: {len(only_a)} are in A alone and {len(only_b)} in B alone, such as "
            f"{named}. Evaluate both on the same task and split with the same --limit"
        )
    pairs = [(item, right[item.id]) for item in a]
    changed = [x.id for x, y in pairs if (x.question, x.answer) != (y.question, y.answer)]
    if changed:
        raise UsageError(f"{len(changed)} items are not alike in question or gold answer, such as {changed[0]}")
    return pairs


def settings_apart(a: Mapping[str, object], b: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The settings that may differ, and do.

    Raises:
        UsageError: they differ in how answers were drawn, so that their difference would not be the model's.
    """
    wrong = [f"{name}: {a.get(name)} and {b.get(name)}" for name in ALIKE if a.get(name) != b.get(name)]
    if wrong:
        raise UsageError(f"the two were not measured alike ({'; '.join(wrong)}); evaluate both with the same options")
    return {name: (a.get(name), b.get(name)) for name in MAY_DIFFER if a.get(name) != b.get(name)}


def compare_items(
    a: Sequence[Item],
    b: Sequence[Item],
    *,
    labels: tuple[str, str],
    samples: int,
    ks: Sequence[int] = (),
    seed: int = 0,
) -> Paired:
    """Test the difference B − A, item by item.

    Raises:
        UsageError: not the same items, or none of them was graded.
    """
    pairs = pair_items(a, b)
    graded = {item.id for item in graded_items(a)} & {item.id for item in graded_items(b)}
    pairs = list({(x.question, x.answer): (x, y) for x, y in reversed(pairs) if x.id in graded}.values())[::-1]
    if not pairs:
        raise UsageError("nothing was graded in these evaluations, so there is no accuracy to compare")
    left, right = [x for x, _ in pairs], [y for _, y in pairs]
    names = ["accuracy", *(measure_names([*left, *right], ks) if samples > 1 else [])]
    differences = {
        name: paired_bootstrap(item_values(left, name), item_values(right, name), seed=seed) for name in names
    }
    answered = [pair for pair in pairs if pair[0].samples and pair[1].samples]  # an unanswered item has no length
    formatted = [] if any(s.in_format is None for i in (*left, *right) for s in i.samples) else pairs
    for name, field, own in (("format", "in_format", formatted), ("completion_length", "num_tokens", answered)):
        sides = [[_mean(field, item) for item in side] for side in zip(*own, strict=True)]
        if sides:
            differences[name] = paired_bootstrap(*sides, seed=seed)
    gained, lost = ([x.id for x, y in pairs if sign * (y.share - x.share) > 0] for sign in (1, -1))
    if samples > 1:
        table = {"a_higher": len(lost), "b_higher": len(gained), "alike": len(pairs) - len(gained) - len(lost)}
        return Paired(*labels, len(pairs), differences, table, None, gained, lost)
    num_both = sum(x.num_correct > 0 and y.num_correct > 0 for x, y in pairs)
    table = {"both": num_both, "only_a": len(lost), "only_b": len(gained)}
    table["neither"] = len(pairs) - sum(table.values())
    return Paired(*labels, len(pairs), differences, table, mcnemar_p(len(lost), len(gained)), gained, lost)


def _mean(field: str, item: Item) -> float:
    return statistics.fmean(float(getattr(one, field)) for one in item.samples) if item.samples else 0.0


def compare_finished(a: Finished, b: Finished, seed: int = 0) -> tuple[Paired, dict[str, tuple[object, object]]]:
    """The comparison of two evaluations on the disk, and the settings in which they differ.

    Raises:
        UsageError: they were not measured alike, or on other items.
    """
    if a.evaluation != b.evaluation:
        raise UsageError(f"{a.folder} is of {a.evaluation} and {b.folder} of {b.evaluation}: not the same task")
    apart = settings_apart(a.settings, b.settings)
    named = ((a.label, b.label), (a.template, b.template), (str(a.folder), str(b.folder)))
    labels = next((pair for pair in named if pair[0] != pair[1]), named[-1])
    ks = [k for k in a.settings.get("ks", ()) if k in b.settings.get("ks", ())]
    samples = int(a.settings.get("samples", 1))
    return compare_items(a.items(), b.items(), labels=labels, samples=samples, ks=ks, seed=seed), apart


def write_comparison(
    out: Path, a: Finished, b: Finished, paired: Paired, apart: Mapping[str, tuple[object, object]]
) -> None:
    """``comparison.json``.

    Raises:
        StorageError: the disk is full or not writable.
    """
    content = {
        "evaluation": a.evaluation,
        "a": {"name": paired.a, "folder": str(a.folder)},
        "b": {"name": paired.b, "folder": str(b.folder)},
        "outcome": paired.in_words(),
        "cautions": paired.cautions(),
        "n": paired.n,
        "differences": {name: asdict(difference) for name, difference in paired.differences.items()},
        "table": paired.table,
        "mcnemar_p": paired.mcnemar,
        "settings_apart": {name: list(values) for name, values in apart.items()},
        "gained": paired.gained,
        "lost": paired.lost,
    }
    with storage_errors("comparison", out):
        out.mkdir(parents=True, exist_ok=True)
    replace_file(out / COMPARISON, json.dumps(content, indent=1).encode() + b"\n")
