"""Best of n: which reward model chooses best among n answers, compared with a vote, a random pick and an oracle."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from posttrain.errors import DataError
from posttrain.evaluation.items import Item, item_values
from posttrain.evaluation.statistics import item_interval, paired_bootstrap
from posttrain.evaluation.tables import TextTable
from posttrain.sweeps.results import Part

RANDOM = "random pick"
# The measure of each way to choose among n of an item's answers.
_MEASURES = {"majority": "majority", RANDOM: "accuracy", "oracle": "pass"}
NOTES = [
    "every column is the mean over all subsets of n of the answers to a problem; ties are shared",
    "intervals are over the held-out problems (of differences: a paired bootstrap), of the mean over seeds; thin lines "
    "are single seeds",
    "majority: the most frequent final answer; oracle: any of the n is right, the most that any choice can reach",
]


@dataclass(frozen=True)
class Chosen:
    """The share of right answers among those that a reward model, a vote or chance chooses from n, for each n.

    ``values[n]``: per problem, the mean over seeds. ``seeds[n]``: per seed, the mean over problems.
    ``bounds[n]``: the 95 % interval over problems.
    """

    name: str
    ns: list[int]
    values: dict[int, list[float]] = field(default_factory=dict)
    seeds: dict[int, list[float]] = field(default_factory=dict)
    bounds: dict[int, tuple[float, float]] = field(default_factory=dict)

    def mean(self, n: int) -> float:
        return statistics.fmean(self.values[n])


def powers_of_two(items: Sequence[Item]) -> list[int]:
    """1, 2, 4, ... below the number of answers that each item has, and that number."""
    samples = min(len(item.samples) for item in items if item.samples)
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


def choose(evaluations: Mapping[str, Sequence[Sequence[Item]]]) -> list[Chosen]:
    """Every reward model, then majority, a random pick and the oracle, on the same answers.

    A problem whose prompt did not fit has no answers, and counts as wrong for all of them.

    Args:
        evaluations: by reward model, the items of each seed.

    Raises:
        DataError: reward models had different answers to choose from.
    """
    first_name, first = next(iter(evaluations.items()))
    for name, seeds in evaluations.items():
        for seed, pair in enumerate(zip(seeds, first, strict=True)):
            own, other = ([(item.id, [s.text for s in item.samples]) for item in items] for items in pair)
            if own != other:
                what = f"{name} and {first_name} had different answers to choose from; delete it and repeat"
                raise DataError("chosen", f"seed {seed}: {what}")
    ns = powers_of_two([item for items in first for item in items])
    chosen = []
    ways = [(name, "best_of", seeds) for name, seeds in evaluations.items()]
    for name, measure, seeds in [*ways, *((name, measure, first) for name, measure in _MEASURES.items())]:
        choices = Chosen(name, ns)
        for n in ns:
            table = [item_values(items, f"{measure}@{n}") for items in seeds]
            choices.values[n] = [statistics.fmean(column) for column in zip(*table, strict=True)]
            choices.seeds[n] = [statistics.fmean(row) for row in table]
            used = 1 if name == RANDOM else n  # of an item's answers, by one choice
            choices.bounds[n] = item_interval(choices.values[n], len(seeds) * max(1, max(ns) // used))
        chosen.append(choices)
    return chosen


def best_of_n_part(choices: Sequence[Chosen], num_models: int) -> Part:
    """The part of a sweep's report about choices among answers; the first ``num_models`` are reward models.

    Each later reward model is compared with the first, and each with majority and a random pick.
    """
    ns, models, (majority, pick, _) = choices[0].ns, choices[:num_models], choices[num_models:]
    last, lines, findings, differences = ns[-1], [], [], list[dict[str, object]]()
    for model in models:
        best = max(ns, key=lambda n: (model.mean(n), -n))
        findings.append(f"{model.name} is best at n = {best}: {model.mean(best):.1%}; at {last} {model.mean(last):.1%}")
    pairs = [(models[0], other) for other in models[1:]]
    for a, b in [*pairs, *((other, model) for other in (majority, pick) for model in models)]:
        by_n = {n: paired_bootstrap(a.values[n], b.values[n]) for n in ns}
        differences.append({"a": a.name, "b": b.name, "by_n": {str(n): asdict(gap) for n, gap in by_n.items()}})
        gap = by_n[last]
        points, interval = f"{100 * gap.difference:+.1f}", f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}"
        lines.append([f"{b.name} less {a.name}", points, interval, f"{gap.p:.2g}"])
        way = "better than" if gap.low > 0 else "worse than" if gap.high < 0 else "as well as, as far as is shown,"
        findings.append(f"{b.name} chooses {way} {a.name} at n = {last}: {points} points [{interval}]")
    shares = [
        [c.name, *(f"{c.mean(n):.1%}" for n in ns), " – ".join(f"{x:.1%}" for x in c.bounds[last])] for c in choices
    ]
    tables = [
        TextTable("Right answers chosen among n", ["chosen by", *(f"n = {n}" for n in ns), f"95 % at {last}"], shares),
        TextTable(f"Differences at n = {last}", ["difference", "points", "95 % over problems", "p"], lines),
    ]
    by_name = {}
    for c in choices:
        by_name[c.name] = {
            str(n): {"mean": c.mean(n), "low": c.bounds[n][0], "high": c.bounds[n][1], "seeds": c.seeds[n]} for n in ns
        }
    return Part(tables, findings, NOTES, {"chosen_by": by_name, "differences": differences}, (choices, num_models))
