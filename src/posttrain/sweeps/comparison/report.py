"""Compute comparison results from records: methods, pairs, learning rates, and statistical power."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean

from posttrain.errors import RunFailure
from posttrain.evaluation.comparisons import (
    CrossedEstimate,
    crossed_difference,
    crossed_mean,
    detectable_difference,
    holm,
    improvement_interval,
    interquartile_interval,
    interquartile_mean,
    mean_height,
    pooled_deviation,
    probability_of_improvement,
    seed_difference,
    steps_to,
    usable_rates,
)
from posttrain.evaluation.statistics import item_interval, summarize_seeds
from posttrain.evaluation.tables import NOTHING, TextTable
from posttrain.store.metric_names import ACCURACY
from posttrain.store.metrics import EvaluationPoint
from posttrain.sweeps.comparison.plan import (
    LEVEL,
    POWER,
    ComparisonPlan,
    choose_rates,
    describe_design,
    tuning_results,
)
from posttrain.sweeps.comparison.records import TrialRecord
from posttrain.sweeps.learning import RowResult, TrialResult
from posttrain.sweeps.results import SweepPart, SweepResults
from posttrain.sweeps.runner import SweepOutcome

FELL = 0.05  # accuracy lost since the peak before a fall is reported
MAX_PAIRS = 28  # per table; beyond this, show only pairs with the baseline or with a significant difference
NOTES = (
    "Right, and its differences: final accuracy on test problems, with 95 % intervals over seeds and problems "
    "(two-way clustered, Student's t). Paired methods share problems but not seeds.",
    "IQM: interquartile mean over seeds, with a stratified bootstrap interval; better than the baseline: probability "
    "that a seed beats a baseline seed (both: Agarwal et al. 2021).",
    "Over the run: mean height of the learning curve, with differences tested over seeds (Welch's t). Steps to a "
    "threshold: mean over seeds that reach it.",
    "Holm: p-value corrected for all pairs in the table. Usable: learning rates within 5 points of the best one in "
    "tuning; * marks a best rate at the edge of the tried range, so a better one may lie outside.",
    "Sampled tokens and CPU-seconds: mean per run; seconds cover sampling and updates but not evaluation.",
)


@dataclass(frozen=True)
class MethodResult:
    """A method in one variant. ``tuning``: mean accuracy by rate. ``final``: records with fresh seeds."""

    row: str
    rate: float | None
    tuning: dict[float, float]
    final: list[TrialRecord]

    @property
    def outcomes(self) -> list[list[int]]:
        """``[seeds, problems]``, 1 if the last answer was correct."""
        return [[int(digit) for digit in record.outcomes] for record in self.final]

    @property
    def accuracies(self) -> list[float]:
        return [record.accuracy for record in self.final]

    @property
    def heights(self) -> list[float]:
        """Mean learning curve heights, by seed."""
        return [mean_height(record.curve) for record in self.final]


@dataclass(frozen=True)
class PairResult:
    """Comparison of two methods: ``a`` minus ``b`` at the end and over the run, with Holm-corrected p-values."""

    a: str
    b: str
    end: CrossedEstimate
    run: CrossedEstimate
    end_p: float
    run_p: float


def collect_comparison(
    plan: ComparisonPlan, records: Sequence[TrialRecord], outcome: SweepOutcome, command: str
) -> SweepResults:
    """Collect results so far.

    Raises:
        RunFailure: no run has finished.
    """
    if not records:
        raise RunFailure("nothing to report yet: no run has finished")
    parts: dict[str, SweepPart] = {}
    data: dict[str, dict[str, object]] = {}
    every: dict[str, list[MethodResult]] = {}
    for variant, name in enumerate(plan.variants):
        methods = _read_methods(plan, records, variant)
        every[name] = methods
        measured = [method for method in methods if method.final]
        if not measured:
            continue
        pairs = compare_pairs(measured, plan.design.baseline)
        parts[name or "methods"] = _variant_part(plan, name, measured, pairs)
        data[name or "methods"] = {
            "methods": {method.row: _facts(method, plan) for method in measured},
            "pairs": [asdict(pair) for pair in pairs],
        }
    parts["learning rates"] = _rates_part(plan, every)
    trials = [asdict(record) for record in records]
    tables = [asdict(table) for part in parts.values() for table in part.tables]
    about = {"tables": tables, "design": plan.design.model_dump(mode="json"), "variants": data, "trials": trials}
    parts["records"] = SweepPart([], findings=describe_design(plan, records), data=about)
    return SweepResults(
        title=plan.folder.name,
        description=" ".join(plan.content.description.split()),
        command=command,
        parts=parts,
        file=plan.to_yaml(),
        problems=[f"{name}: {message}" for name, message in outcome.failures.items()],
    )


def _read_methods(plan: ComparisonPlan, records: Sequence[TrialRecord], variant: int) -> list[MethodResult]:
    """Collect methods in a variant, best final mean first."""
    rates = choose_rates(plan, records)
    methods = []
    for row, own_variant in plan.arms:
        if own_variant != variant:
            continue
        tuning = {}
        for rate, own in tuning_results(plan, records, row.name, variant).items():
            tuning[rate] = fmean(record.accuracy for record in own)
        chosen = rates.get((row.name, variant))
        final = [
            record
            for record in records
            if record.stage == "final" and (record.row, record.variant, record.rate) == (row.name, variant, chosen)
        ]
        methods.append(MethodResult(row.name, chosen, tuning, final))

    def badness(method: MethodResult) -> float:
        if not method.final:
            return 1.0
        return -fmean(method.accuracies)

    return sorted(methods, key=badness)


def compare_pairs(methods: Sequence[MethodResult], baseline: str) -> list[PairResult]:
    """Compare all pairs with at least two seeds each, smallest p first. The baseline is always ``b``."""
    usable = [method for method in methods if len(method.final) > 1]
    pairs = []
    for a, b in combinations(usable, 2):
        if a.row == baseline:
            pairs.append((b, a))
        else:
            pairs.append((a, b))
    ends = [crossed_difference(a.outcomes, b.outcomes) for a, b in pairs]
    runs = [seed_difference(a.heights, b.heights) for a, b in pairs]
    end_ps = holm([end.p for end in ends]).tolist()
    run_ps = holm([run.p for run in runs]).tolist()
    results = []
    for (a, b), end, run, end_p, run_p in zip(pairs, ends, runs, end_ps, run_ps, strict=True):
        results.append(PairResult(a.row, b.row, end, run, end_p, run_p))
    return sorted(results, key=lambda pair: pair.end.p)


def _facts(method: MethodResult, plan: ComparisonPlan) -> dict[str, object]:
    """Convert a method's results to plain data."""
    facts: dict[str, object] = {"rate": method.rate, "usable_rates": usable_rates(method.tuning)}
    facts["tuning"] = {f"{rate:g}": accuracy for rate, accuracy in method.tuning.items()}
    facts |= {"accuracies": method.accuracies, "mean_heights": method.heights}
    facts["peaks"] = [record.peak for record in method.final]
    facts["steps_to_threshold"] = [steps_to(record.curve, plan.design.threshold) for record in method.final]
    if len(method.final) > 1:
        facts["end"] = asdict(crossed_mean(method.outcomes))
    return facts


def _variant_part(
    plan: ComparisonPlan, name: str, methods: Sequence[MethodResult], pairs: Sequence[PairResult]
) -> SweepPart:
    baseline = next((method for method in methods if method.row == plan.design.baseline), None)
    header = [
        "method",
        "learning rate",
        "usable",
        "seeds",
        "right",
        "IQM",
        f"better than {plan.design.baseline}",
        "peak",
        "over the run",
        "worst seed",
        f"steps to {plan.design.threshold:.0%}",
        "tokens",
        "CPU-seconds",
    ]
    lines = [_method_line(plan, method, baseline) for method in methods]
    tables = [TextTable(name, header, lines)]
    if pairs:
        tables.append(_pairs_table(name, pairs, plan.design.baseline))
    findings = [*_describe_pairs(name, pairs), *_describe_spread(plan, name, methods), *_describe_falls(methods)]
    rows = [_as_row(method) for method in methods]
    start = {"accuracy": methods[0].final[0].curve[0][1]}
    return SweepPart(tables, findings, list(NOTES), {}, (rows, start, ACCURACY, None))


def _method_line(plan: ComparisonPlan, method: MethodResult, baseline: MethodResult | None) -> list[str]:
    design = plan.design
    assert method.rate is not None, "a method with final runs has a rate"
    mark = ""
    if len(design.rates) > 1 and method.rate in (min(design.rates), max(design.rates)):
        mark = "*"
    usable = usable_rates(method.tuning)
    shown_usable = f"{usable[0]:g} to {usable[-1]:g}"
    if len(usable) == 1:
        shown_usable = f"only {usable[0]:g}"
    scores = [[accuracy] for accuracy in method.accuracies]
    reached = [step for record in method.final if (step := steps_to(record.curve, design.threshold)) is not None]
    shown_steps = NOTHING
    if reached:
        shown_steps = f"{fmean(reached):.0f}"
        if len(reached) < len(method.final):
            shown_steps = f"{shown_steps} ({len(reached)} of {len(method.final)})"
    seconds = [record.cpu_seconds for record in method.final if record.cpu_seconds is not None]
    shown_seconds = NOTHING
    if seconds:
        shown_seconds = f"{fmean(seconds):.1f}"
    return [
        method.row,
        f"{method.rate:g}{mark}",
        shown_usable,
        _count(len(method.final), plan.num_seeds),
        _show_end(method),
        _show_with(interquartile_mean(scores), interquartile_interval(scores), len(scores)),
        _show_improvement(method, baseline),
        f"{fmean(record.peak for record in method.final):.1%}",
        f"{fmean(method.heights):.1%}",
        f"{min(method.accuracies):.1%}",
        shown_steps,
        f"{fmean(record.sampled_tokens for record in method.final) / 1000:.0f}k",
        shown_seconds,
    ]


def _count(done: int, wanted: int) -> str:
    if done < wanted:
        return f"{done} of {wanted}"
    return str(done)


def _show_end(method: MethodResult) -> str:
    mean = fmean(method.accuracies)
    if len(method.final) > 1:
        end = crossed_mean(method.outcomes)
        bounds = (max(0.0, end.low), min(1.0, end.high))
    else:
        bounds = item_interval([float(digit) for digit in method.outcomes[0]])
    return f"{mean:.1%} [{bounds[0]:.1%}, {bounds[1]:.1%}]"


def _show_with(value: float, bounds: tuple[float, float], num_seeds: int) -> str:
    if num_seeds < 2:
        return f"{value:.1%}"
    return f"{value:.1%} [{bounds[0]:.1%}, {bounds[1]:.1%}]"


def _show_improvement(method: MethodResult, baseline: MethodResult | None) -> str:
    if baseline is None or method.row == baseline.row:
        return NOTHING
    scores = [[accuracy] for accuracy in method.accuracies]
    others = [[accuracy] for accuracy in baseline.accuracies]
    value = probability_of_improvement(scores, others)
    if min(len(scores), len(others)) < 2:
        return f"{value:.0%}"
    low, high = improvement_interval(scores, others)
    return f"{value:.0%} [{low:.0%}, {high:.0%}]"


def _pairs_table(name: str, pairs: Sequence[PairResult], baseline: str) -> TextTable:
    """Build the table of pairs. If there are too many, keep those with the baseline or a significant difference."""
    shown = list(pairs)
    title = "all pairs"
    if len(pairs) > MAX_PAIRS:
        shown = [pair for pair in pairs if min(pair.end_p, pair.run_p) < LEVEL or baseline in (pair.a, pair.b)]
        title = f"{len(shown)} of {len(pairs)} pairs: with the baseline, or significant"
    header = ["pair", "right, points", "p", "p (Holm)", "over the run, points", "p", "p (Holm)"]
    lines = []
    for pair in shown:
        end = [_points(pair.end), _p(pair.end.p), _p(pair.end_p)]
        lines.append([f"{pair.a} − {pair.b}", *end, _points(pair.run), _p(pair.run.p), _p(pair.run_p)])
    if name:
        title = f"{name}: {title}"
    return TextTable(title, header, lines)


def _points(estimate: CrossedEstimate) -> str:
    return f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def _p(value: float) -> str:
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}"


def _describe_pairs(name: str, pairs: Sequence[PairResult]) -> list[str]:
    """List pairs with significant differences after correction."""
    if not pairs:
        return []
    start = ""
    if name:
        start = f"{name}: "
    lines = []
    for what, chosen in (
        ("at the end", [(pair, pair.end) for pair in pairs if pair.end_p < LEVEL]),
        ("over the run", [(pair, pair.run) for pair in pairs if pair.run_p < LEVEL]),
    ):
        line = f"{start}{len(chosen)} of {len(pairs)} pairs differ significantly {what} after Holm correction"
        shown = [_describe_pair(pair, estimate) for pair, estimate in chosen[:MAX_PAIRS]]
        if shown:
            line = f"{line}: {'; '.join(shown)}"
        lines.append(line)
    return lines


def _describe_pair(pair: PairResult, estimate: CrossedEstimate) -> str:
    better = pair.a
    worse = pair.b
    if estimate.value < 0:
        better = pair.b
        worse = pair.a
    return f"{better} above {worse} by {100 * abs(estimate.value):.1f} points"


def _describe_spread(plan: ComparisonPlan, name: str, methods: Sequence[MethodResult]) -> list[str]:
    """Describe in points the differences detectable with the available seeds."""
    num_seeds = min(len(method.final) for method in methods)
    if num_seeds < 2 or len(methods) < 2:
        return []
    num_pairs = len(methods) * (len(methods) - 1) // 2
    start = ""
    if name:
        start = f"{name}: "
    lines = []
    for what, groups in (
        ("at the end", [method.accuracies for method in methods]),
        ("over the run", [method.heights for method in methods]),
    ):
        deviation = pooled_deviation(groups)
        if not deviation:  # all seeds agree, or there is only one
            continue
        sizes = [
            100 * deviation * detectable_difference(num_seeds, num_comparisons=count, power=POWER, level=LEVEL)
            for count in (1, num_pairs)
        ]
        lines.append(
            f"{start}{what}, seeds vary by {100 * deviation:.1f} points (standard deviation within a method), so "
            f"{num_seeds} seeds detect {sizes[0]:.1f} points with {POWER:.0%} power, or {sizes[1]:.1f} if "
            f"{num_pairs} pairs are compared; smaller differences are likely to be missed"
        )
    return lines


def _describe_falls(methods: Sequence[MethodResult]) -> list[str]:
    """List methods that ended below their peak."""
    lines = []
    for method in methods:
        peak = fmean(record.peak for record in method.final)
        end = fmean(method.accuracies)
        if peak - end > FELL:
            lines.append(f"{method.row} fell: {peak:.1%} at the peak, {end:.1%} at the end")
    return lines


def _as_row(method: MethodResult) -> RowResult:
    """Convert a method to a sweep row for plotting."""
    trials = []
    for record in method.final:
        points = [EvaluationPoint(step, "", {"accuracy": accuracy}) for step, accuracy in record.curve]
        trials.append(
            TrialResult(method.row, record.seed, "finished", points[-1].step, points, {"accuracy": record.accuracy})
        )
    summary = summarize_seeds(method.accuracies)
    assert summary is not None, "a method with final runs"
    return RowResult(method.row, trials, {"accuracy": summary})


def _rates_part(plan: ComparisonPlan, every: Mapping[str, Sequence[MethodResult]]) -> SweepPart:
    """Build the tuning table: accuracy by learning rate for every method and variant."""
    header = ["tuning: method", *(f"{rate:g}" for rate in sorted(plan.design.rates)), "usable"]
    lines = []
    for name, methods in every.items():
        for method in methods:
            if not method.tuning:
                continue
            label = method.row
            if name:
                label = f"{method.row}, {name}"
            cells = []
            for rate in sorted(plan.design.rates):
                cell = NOTHING
                if rate in method.tuning:
                    cell = f"{method.tuning[rate]:.1%}"
                cells.append(cell)
            lines.append([label, *cells, f"{len(usable_rates(method.tuning))} of {len(plan.design.rates)}"])
    tuning = plan.design.tuning
    note = f"Tuning: {tuning.problems} {tuning.split} problems, {tuning.seeds} seeds that are not reused."
    return SweepPart([TextTable("Learning rates", header, lines)], notes=[note])
