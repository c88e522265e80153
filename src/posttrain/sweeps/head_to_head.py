"""Head-to-head evaluations: distance moved by each policy, and win rate against the initial model.

The judge is a reward model that no policy was trained against. A policy that exploits errors in the proxy therefore
wins only under the proxy. Most judges prefer longer answers, so lengths are reported with win rates.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain.evaluation.files import ITEMS, RESULTS
from posttrain.evaluation.statistics import half_width
from posttrain.evaluation.tables import NOTHING, TextTable
from posttrain.store.reading import read_record
from posttrain.sweeps.judges import JudgeAgreement, describe_judges
from posttrain.sweeps.results import ShownAnswer, ShownPrompt, SweepPart, scale_of

MAX_ITEMS_BYTES = 1 << 30
NUM_SAMPLES = 3
# measure -> (column, True for a fraction)
MEASURES: Mapping[str, tuple[str, bool]] = {
    "win_rate": ("wins (judge)", True),
    "win_rate_similar": ("wins at similar length", True),
    "win_rate_proxy": ("wins (proxy)", True),
    "reward_judge": ("reward gain (judge)", False),
    "reward_proxy": ("reward gain (proxy)", False),
    "kl": ("KL from the start", False),
    "length_ratio": ("relative length", False),
}
NOTES = [
    "judge: a reward model that no policy was trained against; proxy: the reward model used for training",
    "wins: how often a policy's answer outscores the initial model's for the same prompt; ties count one half, "
    "and answers that cannot be scored lose. Similar length: lengths differ by at most 10 % of the longer one",
    "reward gain: policy minus initial model, in standard deviations of scores on initial answers. KL: nats per "
    "answer, the exact sum over next-token distributions, on policy answers. Relative length: policy / initial model",
    "[ ]: 95 % intervals: Student's t over seeds, each with separate reward models, policies and answers; a single "
    "seed's interval is over prompts only, and does not cover variation between seeds",
]
Estimate = tuple[float, float, float]  # mean and 95 % interval


@dataclass(frozen=True)
class PolicyComparison:
    """One policy and seed compared with the initial model. ``measures``: by name.

    ``samples``: first prompts, with answers from the initial model and the policy.
    """

    row: str
    seed: int
    measures: Mapping[str, Estimate]
    samples: Mapping[str, list[ShownAnswer]] = field(default_factory=dict)


def read_comparison(folder: Path, row: str, seed: int) -> PolicyComparison:
    """Read the results of an evaluation against the initial model.

    The proxy is the only additional judge, whatever its recorded path, since sweep folders may be moved.

    Raises:
        DataError: a file is damaged.
    """
    try:
        content = json.loads(read_record(folder / RESULTS))
        items = [json.loads(line) for line in read_record(folder / ITEMS, MAX_ITEMS_BYTES).splitlines()]
        [(proxy, other)] = content["others"].items()
        results = content["results"] | {f"proxy_{name}": value for name, value in other.items()}
        ratio = math.nan
        if results["characters_b"]:
            ratio = results["characters_a"] / results["characters_b"]
        results |= {"ratio": ratio, "ratio_low": ratio, "ratio_high": ratio}
        measures = {"reward_judge": reward_gain(items, None), "reward_proxy": reward_gain(items, proxy)}
        stored = {"win_rate": "win_rate", "win_rate_proxy": "proxy_win_rate", "length_ratio": "ratio"}
        for name, key in (stored | {"win_rate_similar": "win_rate_similar", "kl": "kl_ab"}).items():
            if key in results or name in stored:
                measures[name] = (float(results[key]), float(results[f"{key}_low"]), float(results[f"{key}_high"]))
        samples: dict[str, list[ShownAnswer]] = {}
        for item in items[:NUM_SAMPLES]:
            of_start = item["b"][0]
            of_policy = item["a"][0]
            samples[str(item["question"])] = [
                ("start", str(of_start["text"]), of_start["score"]),
                (row, str(of_policy["text"]), of_policy["score"]),
            ]
        return PolicyComparison(row, seed, measures, samples)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(folder, f"damaged files ({error!r:.200}); delete the folder and repeat") from None


def reward_gain(items: Sequence[Mapping[str, Any]], judge: str | None) -> Estimate:
    """Compute the mean score gain over the initial model on identical prompts, in standard deviations.

    The unit is the standard deviation of scores on initial answers. Prompts with unscored answers are skipped.

    ``judge``: name of an additional judge, or None for the deciding one.

    Raises:
        ValueError: no prompt has scores.
    """

    def score_of(answer: Mapping[str, Any]) -> Any:
        if judge is None:
            return answer["score"]
        return answer["scores"][judge]

    pairs = []
    for item in items:
        own = [score_of(answer) for answer in item["a"]]
        start = [score_of(answer) for answer in item["b"]]
        if None not in own + start:
            pairs.append((own, start))
    if not pairs:
        raise ValueError("no prompt whose answers were all scored")
    gains = [statistics.fmean(own) - statistics.fmean(start) for own, start in pairs]
    unit = statistics.pstdev([score for _, start in pairs for score in start]) or 1.0
    mean = statistics.fmean(gains) / unit
    half = half_width(gains) / unit
    return mean, mean - half, mean + half


def over_seeds(estimates: Sequence[Estimate], *, is_share: bool = False) -> Estimate | None:
    """Average over seeds with Student's t interval; a single seed keeps its interval; None if empty."""
    if len(estimates) < 2:
        if not estimates:
            return None
        return estimates[0]
    means = [mean for mean, _, _ in estimates]
    mean = statistics.fmean(means)
    half = half_width(means)
    if is_share:
        return (mean, max(0.0, mean - half), min(1.0, mean + half))
    return (mean, mean - half, mean + half)


def show_estimate(estimate: Estimate | None, *, is_share: bool = False) -> str:
    """Format an estimate as ``61.2% [55.0, 67.1]``, or ``0.61 [0.50, 0.72]``."""
    if estimate is None:
        return NOTHING
    scale, places, unit = scale_of(is_share=is_share)
    mean, low, high = (f"{value * scale:z.{places}f}" for value in estimate)
    if low == high:
        return f"{mean}{unit}"
    return f"{mean}{unit} [{low}, {high}]"


def head_to_head_part(
    comparisons: Sequence[PolicyComparison],
    weights: Mapping[str, str],
    agreements: Sequence[JudgeAgreement] = (),
) -> SweepPart:
    """Build the report section comparing policies with the initial model.

    Rows are sorted by win rate under the judge. Verdicts and a best model are given only if, for every seed, the
    judge's held-out agreement excludes chance.

    Args:
        weights: paths by ``ROW-seedN``, plus ``start``.
        agreements: measured held-out agreements of the judges, by seed.
    """
    knows, about_judge = describe_judges(sorted({c.seed for c in comparisons}), agreements)
    rows: dict[str, dict[str, Estimate]] = {}
    for row in dict.fromkeys(comparison.row for comparison in comparisons):
        rows[row] = {}
        for name, (_, is_share) in MEASURES.items():
            own = [c.measures[name] for c in comparisons if c.row == row and name in c.measures]
            estimate = over_seeds(own, is_share=is_share)
            if estimate is not None:
                rows[row][name] = estimate
    rows = dict(sorted(rows.items(), key=lambda item: -item[1]["win_rate"][0]))
    lines = []
    findings = [about_judge]
    policies = {}
    for row, measures in rows.items():
        own_seeds = {str(c.seed): c.measures for c in comparisons if c.row == row}
        shown = [show_estimate(measures.get(name), is_share=share) for name, (_, share) in MEASURES.items()]
        lines.append([row, str(len(own_seeds)), *shown])
        finding = f"{row}: wins {shown[0]} under the judge"
        if knows:
            finding = f"{finding}: {_verdict(measures)}"
        findings.append(finding)
        policies[row] = {**_plain(measures), "seeds": {seed: _plain(own) for seed, own in own_seeds.items()}}
    best = None
    if knows:
        best, finding = _choose_best(comparisons, rows, weights)
        findings.append(finding)
    header = ["policy", "seeds", *(column for column, _ in MEASURES.values())]
    table = TextTable("Policies against the start", header, lines)
    judges = [asdict(agreement) for agreement in agreements]
    data = {"best": best, "judge_knows": knows, "judges": judges, "policies": policies}
    return SweepPart([table], findings, NOTES, data, (rows,), _samples(comparisons))


def _choose_best(
    comparisons: Sequence[PolicyComparison], rows: Mapping[str, Mapping[str, Estimate]], weights: Mapping[str, str]
) -> tuple[str, str]:
    """Choose the best model under the judge: the initial model if no row wins more than half."""
    leader = next(iter(rows))
    if rows[leader]["win_rate"][0] <= 0.5:
        start = weights["start"]
        return (
            start,
            f"no policy beats the initial model more than half the time, so the initial model is best: {start}",
        )
    first = [comparison for comparison in comparisons if comparison.row == leader]
    winner = max(first, key=lambda comparison: comparison.measures["win_rate"][0])
    best = weights[f"{winner.row}-seed{winner.seed}"]
    return best, f"best model (selected by the judge, so its win rate is slightly optimistic): {best}"


def _samples(comparisons: Sequence[PolicyComparison]) -> list[ShownPrompt]:
    """Collect the first prompts with answers from the initial model and the first seed's policies."""
    first, *others = [comparison.samples for comparison in comparisons if comparison.seed == comparisons[0].seed]
    samples = []
    for question, start_and_policy in first.items():
        answers = list(start_and_policy)
        for own in others:
            if question in own:
                answers.append(own[question][1])
        samples.append((question, answers))
    return samples


def _plain(measures: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    return {name: {"mean": mean, "low": low, "high": high} for name, (mean, low, high) in measures.items()}


def _verdict(measures: Mapping[str, Estimate]) -> str:
    _, low, high = measures["win_rate"]
    alike = measures.get("win_rate_similar")
    if low > 0.5:
        if alike is None or alike[1] <= 0.5:
            return "better than the initial model, but not measurably at similar length"
        return "better than the initial model"
    verdict = "not distinguishable from the initial model"
    if high < 0.5:
        verdict = "worse than the initial model"
    if measures["win_rate_proxy"][1] > 0.5:
        return f"{verdict}; it wins only under the proxy it was trained against"
    return verdict
