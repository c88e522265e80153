"""Two evaluations of the same items, one beside the other: is the difference more than chance?"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import UsageError
from posttrain.evals.files import Finished
from posttrain.evals.items import Item
from posttrain.evals.measures import graded_items, item_values, measure_names
from posttrain.evals.statistics import Difference, mcnemar_p, paired_bootstrap
from posttrain.store.durable import replace_file, storage_errors

COMPARISON = "comparison.json"
# Settings in which two evaluations must agree: else more than the model would differ.
ALIKE = ("samples", "max_tokens", "temperature", "top_k", "top_p", "best_of")
# Settings in which they may differ, which is then told.
TOLD = ("model", "checkpoint", "template", "task", "engine", "dtype", "seed")
NUM_FLIPS = 3
ALPHA = 0.05
MIN_ITEMS = 30  # below, resampled items tell little of the items that there might have been


@dataclass(frozen=True)
class Paired:
    """What a comparison found. ``a`` and ``b`` are what the two are called.

    ``differences`` by measure: ``accuracy`` first, then pass@k and its like, format, and length over the items that
    both answered (left out where there is none). ``table``: of items
    with one answer each, how many both, only A, only B and neither got right; with several answers, on how many
    A has the higher share, B has, or neither. ``gained`` and ``lost``: items on which B is right and A is not, and
    the other way round (with several samples, those where the shares differ most), the first few.
    """

    a: str
    b: str
    n: int
    differences: dict[str, Difference]
    table: dict[str, int]
    mcnemar: float | None
    gained: list[tuple[Item, Item]]
    lost: list[tuple[Item, Item]]

    def in_words(self) -> str:
        """The outcome in one sentence. It may be chance unless the bootstrap and McNemar's test both say no."""
        accuracy = self.differences["accuracy"]
        sign = -100.0 if accuracy.difference < 0 else 100.0
        low, high = sorted((accuracy.low * sign, accuracy.high * sign))
        is_inside = accuracy.low <= 0 <= accuracy.high
        exact = self.mcnemar if self.mcnemar is not None and self.mcnemar >= ALPHA and not is_inside else None
        told = show_p(accuracy.p) + (f" (McNemar's exact test: {show_p(exact)})" if exact is not None else "")
        facts = f"[{low:.1f}, {high:.1f}], {told}, on {accuracy.n} items"
        if accuracy.difference == 0:
            return f"{self.b} and {self.a} are right equally often, {facts}"
        way = "better" if accuracy.difference > 0 else "worse"
        chance = ", which may be chance," if is_inside or exact is not None or accuracy.p >= ALPHA else ""
        return f"{self.b} is {way} than {self.a} by {accuracy.difference * sign:.1f} points{chance} {facts}"

    def cautions(self) -> list[str]:
        """Why the interval and its p are worth less than they look."""
        accuracy = self.differences["accuracy"]
        notes = []
        if accuracy.is_constant:
            notes.append(
                f"all {accuracy.n} items differ by the same amount ({100 * accuracy.difference:+.1f} points), so the "
                "interval has no width and says nothing about so few differences"
            )
        if accuracy.n < MIN_ITEMS:
            exact = "; McNemar's exact test holds for few items too" if self.mcnemar is not None else ""
            notes.append(f"{accuracy.n} items are few: below {MIN_ITEMS} the interval is too narrow{exact}")
        return notes


def show_p(p: float) -> str:
    """``p = 0.02``, ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.995 else "p = 1"


def pair_items(a: Sequence[Item], b: Sequence[Item]) -> list[tuple[Item, Item]]:
    """The items of two evaluations side by side, by their ids.

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
    """In which of the settings that may differ two evaluations do.

    Raises:
        UsageError: they differ in how answers were drawn, so that their difference would not be the model's.
    """
    wrong = [f"{name}: {a.get(name)} and {b.get(name)}" for name in ALIKE if a.get(name) != b.get(name)]
    if wrong:
        raise UsageError(f"the two were not measured alike ({'; '.join(wrong)}); evaluate both with the same options")
    return {name: (a.get(name), b.get(name)) for name in TOLD if a.get(name) != b.get(name)}


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
    answered = [pair for pair in pairs if pair[0].samples and pair[1].samples]  # what was not asked has no length
    formatted = [] if any(s.in_format is None for i in (*left, *right) for s in i.samples) else pairs
    for name, value, own in (("format", _in_format, formatted), ("num_tokens", _mean_tokens, answered)):
        if own:
            differences[name] = paired_bootstrap([value(x) for x, _ in own], [value(y) for _, y in own], seed=seed)
    table, mcnemar = _table(pairs, samples)
    return Paired(*labels, len(pairs), differences, table, mcnemar, _farthest(pairs, 1), _farthest(pairs, -1))


def _farthest(pairs: Sequence[tuple[Item, Item]], sign: int) -> list[tuple[Item, Item]]:
    """The items on which B is ahead (or behind, with sign −1), the farthest first; ties in the items' order."""
    ahead = [(sign * (y.share - x.share), (x, y)) for x, y in pairs]
    return [pair for lead, pair in sorted(ahead, key=lambda entry: -entry[0]) if lead > 0][:NUM_FLIPS]


def _in_format(item: Item) -> float:
    return statistics.fmean(bool(sample.in_format) for sample in item.samples) if item.samples else 0.0


def _mean_tokens(item: Item) -> float:
    return statistics.fmean(sample.num_tokens for sample in item.samples)


def _table(pairs: Sequence[tuple[Item, Item]], samples: int) -> tuple[dict[str, int], float | None]:
    if samples > 1:
        higher_a, higher_b = (sum(sign * (y.share - x.share) > 0 for x, y in pairs) for sign in (-1, 1))
        return {"a_higher": higher_a, "b_higher": higher_b, "alike": len(pairs) - higher_a - higher_b}, None
    right = [(bool(x.num_right), bool(y.num_right)) for x, y in pairs]
    cells = {"both": (True, True), "only_a": (True, False), "only_b": (False, True), "neither": (False, False)}
    table = {name: right.count(cell) for name, cell in cells.items()}
    return table, mcnemar_p(table["only_a"], table["only_b"])


def compare_finished(a: Finished, b: Finished, seed: int = 0) -> tuple[Paired, dict[str, tuple[Any, Any]]]:
    """The comparison of two evaluations on the disk, and the settings in which they differ.

    Raises:
        UsageError: they were not measured alike, or on other items.
    """
    if a.evaluation != b.evaluation:
        raise UsageError(f"{a.folder} is of {a.evaluation} and {b.folder} of {b.evaluation}: not the same task")
    apart = settings_apart(a.settings, b.settings)
    labels = _labels(a, b)
    ks = [k for k in a.settings.get("ks", ()) if k in b.settings.get("ks", ())]
    samples = int(a.settings.get("samples", 1))
    return compare_items(a.items(), b.items(), labels=labels, samples=samples, ks=ks, seed=seed), apart


def _labels(a: Finished, b: Finished) -> tuple[str, str]:
    """What the two are called: by their models, their templates, or else their folders."""
    for left, right in ((a.label, b.label), (a.template, b.template)):
        if left != right:
            return left, right
    return str(a.folder), str(b.folder)


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
        "gained": [x.id for x, _ in paired.gained],
        "lost": [x.id for x, _ in paired.lost],
    }
    with storage_errors("comparison", out):
        out.mkdir(parents=True, exist_ok=True)
    replace_file(out / COMPARISON, json.dumps(content, indent=1).encode() + b"\n")
