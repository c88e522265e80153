"""Best of n: which reward model chooses best among n answers, compared with a vote, a random pick and an oracle."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.errors import DataError
from posttrain.evals.items import Item
from posttrain.evals.measures import item_values
from posttrain.evals.statistics import Difference, Summary, item_interval, paired_bootstrap, summarize_seeds
from posttrain.evals.tables import TextTable
from posttrain.sweeps.part import Part, show_summary

MAJORITY, RANDOM, ORACLE = "majority", "random pick", "oracle"
POINTS = 100.0


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, ... below ``samples``, and ``samples``."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


@dataclass(frozen=True)
class Chosen:
    """The share of right answers among those that a reward model, a vote or chance chooses from n, for each n.

    ``values[n]``: per problem, the mean over seeds. ``seeds[n]``: per seed, the mean over problems.
    ``low``, ``high``: 95 % over problems.
    """

    name: str
    ns: list[int]
    values: dict[int, list[float]]
    seeds: dict[int, list[float]]
    low: dict[int, float]
    high: dict[int, float]

    def mean(self, n: int) -> float:
        return statistics.fmean(self.values[n])


@dataclass(frozen=True)
class Contrast:
    """Two ways to choose, ``b`` minus ``a``, at each n: over problems (paired bootstrap) and over seeds."""

    a: str
    b: str
    by_n: dict[int, Difference]
    over_seeds: dict[int, Summary]


def check_alike(evaluations: Mapping[str, Sequence[Sequence[Item]]], place: str) -> None:
    """Refuse reward models that chose among different answers.

    Args:
        evaluations: by reward model, the items of each seed.
        place: where they are, for the message.

    Raises:
        DataError: they differ.
    """
    names = list(evaluations)
    for name in names[1:]:
        for seed, (own, other) in enumerate(zip(evaluations[name], evaluations[names[0]], strict=True)):
            texts = [[(item.id, [sample.text for sample in item.samples]) for item in items] for items in (own, other)]
            if texts[0] != texts[1]:
                raise DataError(
                    place,
                    f"seed {seed}: {name} and {names[0]} had different answers to choose from; delete it and repeat",
                )


def choose(evaluations: Mapping[str, Sequence[Sequence[Item]]]) -> list[Chosen]:
    """Every reward model, then majority, a random pick and the oracle, on the same answers.

    A problem whose prompt did not fit has no answers, and counts as wrong for all of them.
    """
    first = next(iter(evaluations.values()))
    samples = min(len(item.samples) for items in first for item in items if item.samples)
    ns = powers_of_two(samples)
    chosen = [_chosen(name, ns, seeds, "best_of") for name, seeds in evaluations.items()]
    return [*chosen, *(_chosen(name, ns, first, measure) for name, measure in _MEASURES.items())]


# The measure of each way to choose among n of an item's answers.
_MEASURES = {MAJORITY: "majority", RANDOM: "accuracy", ORACLE: "pass"}


def _chosen(name: str, ns: Sequence[int], seeds: Sequence[Sequence[Item]], measure: str) -> Chosen:
    choices = Chosen(name, list(ns), {}, {}, {}, {})
    for n in ns:
        table = [item_values(items, f"{measure}@{n}") for items in seeds]
        choices.values[n] = [statistics.fmean(column) for column in zip(*table, strict=True)]
        choices.seeds[n] = [statistics.fmean(row) for row in table]
        used = 1 if name == RANDOM else n  # of an item's answers, by one choice
        draws = len(seeds) * max(1, max(ns) // used)
        choices.low[n], choices.high[n] = item_interval(choices.values[n], draws)
    return choices


def contrast(a: Chosen, b: Chosen) -> Contrast:
    """``b`` minus ``a`` on the same problems and the same answers."""
    by_n = {n: paired_bootstrap(a.values[n], b.values[n]) for n in b.ns}
    over = {}
    for n in b.ns:
        summary = summarize_seeds([y - x for x, y in zip(a.seeds[n], b.seeds[n], strict=True)])
        assert summary is not None
        over[n] = summary
    return Contrast(a.name, b.name, by_n, over)


def contrasts(choices: Sequence[Chosen], num_models: int) -> list[Contrast]:
    """Each later reward model against the first, and each against majority and a random pick."""
    models, rest = choices[:num_models], {c.name: c for c in choices[num_models:]}
    pairs = [contrast(models[0], other) for other in models[1:]]
    return pairs + [contrast(rest[name], model) for name in (MAJORITY, RANDOM) for model in models]


def tables(choices: Sequence[Chosen], differences: Sequence[Contrast]) -> list[TextTable]:
    """Shares by n, and differences in points at the largest n."""
    ns = choices[0].ns
    lines = [
        [c.name, *(f"{c.mean(n):.1%}" for n in ns), f"{c.low[ns[-1]]:.1%} – {c.high[ns[-1]]:.1%}"] for c in choices
    ]
    header = ["chosen by", *(f"n = {n}" for n in ns), f"95 % at {ns[-1]}"]
    last = ns[-1]
    rows = []
    for d in differences:
        own = d.by_n[last]
        rows.append(
            [
                f"{d.b} less {d.a}",
                f"{own.difference * POINTS:+.1f}",
                f"{own.low * POINTS:+.1f} … {own.high * POINTS:+.1f}",
                f"{own.p:.3f}" if own.p >= 0.001 else "< 0.001",
                show_summary(_points(d.over_seeds[last]), digits=1),
            ]
        )
    columns = ["difference", "points", "95 % over problems", "p", "over seeds"]
    return [
        TextTable("Right answers chosen among n", header, lines),
        TextTable(f"Differences at n = {last}", columns, rows),
    ]


def _points(summary: Summary) -> Summary:
    half = None if summary.half_width is None else summary.half_width * POINTS
    return Summary(summary.mean * POINTS, half, summary.n)


def findings(models: Sequence[Chosen], differences: Sequence[Contrast]) -> list[str]:
    """Where each reward model chooses best, and who chooses better than whom at the largest n: a sentence each."""
    lines = [_curve(model) for model in models]
    for d in differences:
        n = max(d.by_n)
        own = d.by_n[n]
        gap = f"{own.difference * POINTS:+.1f} points [{own.low * POINTS:+.1f}, {own.high * POINTS:+.1f}]"
        if own.low <= 0 <= own.high:
            lines.append(f"{d.b} and {d.a} cannot be lines apart at n = {n}: {gap}")
        else:
            way = "better" if own.difference > 0 else "worse"
            lines.append(f"{d.b} chooses {way} than {d.a} at n = {n}: {gap}")
    return lines


def _curve(model: Chosen) -> str:
    """The n at which a model is best is chosen by its own values, so that its fall is told a little too large."""
    last = model.ns[-1]
    best = max(model.ns, key=lambda n: (model.mean(n), -n))
    start = f"{model.name} goes from {model.mean(1):.1%} at n = 1"
    if best == last:
        return f"{start} to {model.mean(last):.1%} at n = {last}, where it is best"
    fall = paired_bootstrap(model.values[best], model.values[last])
    points = f"{fall.difference * POINTS:+.1f} points [{fall.low * POINTS:+.1f}, {fall.high * POINTS:+.1f}]"
    verb = "over-optimized: it falls" if fall.high < 0 else "then it goes"
    peak = f"is best at n = {best} ({model.mean(best):.1%})" if best > 1 else "is best there"
    return f"{start}, {peak}; {verb} to {model.mean(last):.1%} at n = {last} ({points})"


def notes(num_seeds: int, num_problems: int) -> list[str]:
    """How to read the numbers."""
    lines = [
        "every column is the mean over all subsets of n of the answers to a problem; ties are shared",
        f"intervals are over the {num_problems} held-out problems (of differences: a paired bootstrap), of the mean "
        f"over {num_seeds} seed{'s' if num_seeds > 1 else ''}; thin lines are single seeds",
        "majority: the most frequent final answer; oracle: any of the n is right, the most that any choice can reach",
    ]
    if num_seeds > 1:
        lines.append("over seeds: 95 % Student-t interval; a seed has its own reward models and its own answers")
    return lines


def to_data(choices: Sequence[Chosen], differences: Sequence[Contrast]) -> dict[str, Any]:
    """Everything as plain data, without the single problems."""
    return {
        "chosen_by": {
            c.name: {str(n): {"mean": c.mean(n), "low": c.low[n], "high": c.high[n], "seeds": c.seeds[n]} for n in c.ns}
            for c in choices
        },
        "differences": [
            {
                "a": d.a,
                "b": d.b,
                "by_n": {str(n): asdict(own) for n, own in d.by_n.items()},
                "over_seeds": {str(n): asdict(summary) for n, summary in d.over_seeds.items()},
            }
            for d in differences
        ],
    }


def best_of_n_part(choices: Sequence[Chosen], num_models: int, num_seeds: int) -> Part:
    """The part of a sweep's report about choices among answers; the first ``num_models`` are reward models."""
    differences = contrasts(choices, num_models)
    return Part(
        tables(choices, differences),
        findings(choices[:num_models], differences),
        notes(num_seeds, len(choices[0].values[1])),
        to_data(choices, differences),
    )
