"""Two evaluations of the same items: the test of their difference."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import UsageError
from posttrain.evals.files import Finished
from posttrain.evals.items import Item, graded_items, item_values, measure_names
from posttrain.evals.statistics import Difference, mcnemar_p, paired_bootstrap
from posttrain.evals.tables import TextTable
from posttrain.store.durable import replace_file, storage_errors

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
        facts = f"[{low:.1f}, {high:.1f}], {tests}, on {accuracy.n} items"
        if accuracy.difference == 0:
            return f"{self.b} and {self.a} are right equally often, {facts}"
        way = "better" if accuracy.difference > 0 else "worse"
        chance = ", which may be chance," if is_inside or exact is not None or accuracy.p >= ALPHA else ""
        return f"{self.b} is {way} than {self.a} by {accuracy.difference * sign:.1f} points{chance} {facts}"

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
        unit, form, percent = (1.0, ".2f", "") if name == "num_tokens" else (100.0, ".1f", "%")
        label = {"accuracy": "right", "num_tokens": "tokens"}.get(name, name.replace("_", " "))
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
            raise UsageError(f"{len(items)} items of {which} have {len(by_id)} ids, so that they cannot be told apart")
    only_a, only_b = [key for key in left if key not in right], [key for key in right if key not in left]
    if only_a or only_b:
        named = ", ".join((only_a or only_b)[:3])
        raise UsageError(
            f"the two are not of the same items: {len(only_a)} are in A alone and {len(only_b)} in B alone, such as "
            f"{named}. Evaluate both on the same task and split with the same --n"
        )
    pairs = [(item, right[item.id]) for item in a]
    changed = [x.id for x, y in pairs if (x.question, x.answer) != (y.question, y.answer)]
    if changed:
        raise UsageError(f"{len(changed)} items are not alike in question or gold answer, such as {changed[0]}")
    return pairs


def settings_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
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
    pairs = [pair for pair in pairs if pair[0].id in graded]
    if not pairs:
        raise UsageError("nothing was graded in these evaluations, so there is no accuracy to compare")
    left, right = [x for x, _ in pairs], [y for _, y in pairs]
    names = ["accuracy", *(measure_names([*left, *right], ks) if samples > 1 else [])]
    differences = {
        name: paired_bootstrap(item_values(left, name), item_values(right, name), seed=seed) for name in names
    }
    answered = [pair for pair in pairs if pair[0].samples and pair[1].samples]  # an unanswered item has no length
    formatted = [] if any(s.in_format is None for i in (*left, *right) for s in i.samples) else pairs
    for name, field, own in (("format", "in_format", formatted), ("num_tokens", "num_tokens", answered)):
        sides = [[_mean(field, item) for item in side] for side in zip(*own, strict=True)]
        if sides:
            differences[name] = paired_bootstrap(*sides, seed=seed)
    gained, lost = ([x.id for x, y in pairs if sign * (y.share - x.share) > 0] for sign in (1, -1))
    if samples > 1:
        table = {"a_higher": len(lost), "b_higher": len(gained), "alike": len(pairs) - len(gained) - len(lost)}
        return Paired(*labels, len(pairs), differences, table, None, gained, lost)
    num_both = sum(x.num_right > 0 and y.num_right > 0 for x, y in pairs)
    table = {"both": num_both, "only_a": len(lost), "only_b": len(gained)}
    table["neither"] = len(pairs) - sum(table.values())
    return Paired(*labels, len(pairs), differences, table, mcnemar_p(len(lost), len(gained)), gained, lost)


def _mean(field: str, item: Item) -> float:
    return statistics.fmean(float(getattr(one, field)) for one in item.samples) if item.samples else 0.0


def compare_finished(a: Finished, b: Finished, seed: int = 0) -> tuple[Paired, dict[str, tuple[Any, Any]]]:
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


def write_comparison(out: Path, a: Finished, b: Finished, paired: Paired, apart: Mapping[str, tuple[Any, Any]]) -> None:
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
