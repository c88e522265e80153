"""Held-out agreement of a sweep's judges with the labels, and whether it excludes chance.

A win rate under a judge that orders held-out pairs no better than a coin says which answers the judge prefers, and
nothing about which are better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.store.metric_names import metric_of

# Measures of agreement, in the order in which they are looked for.
AGREEMENTS = ("pair_accuracy", "answer_accuracy")


@dataclass(frozen=True)
class JudgeAgreement:
    """Agreement of the judge of one seed with held-out labels.

    Attributes:
        share: of the pairs (or answers) that it orders as they are labelled, with its 95 % interval ``low, high``.
        n: held-out pairs or answers.
        chance: what a coin reaches; of single answers the more frequent label.
    """

    seed: int
    share: float
    low: float
    high: float
    n: int
    chance: float = 0.5

    @property
    def excludes_chance(self) -> bool:
        """True if the whole interval is above chance."""
        return self.low > self.chance

    def show(self) -> str:
        """Write ``60.0% [31.3, 83.2], n = 10``."""
        return f"{self.share:.1%} [{100 * self.low:.1f}, {100 * self.high:.1f}], n = {self.n}"


def read_agreement(seed: int, results: Mapping[str, float]) -> JudgeAgreement | None:
    """Return the agreement among the results of a reward model's last evaluation; None: it was not measured."""
    for name in AGREEMENTS:
        metric = metric_of(name)
        share = metric.value(results)
        interval = metric.interval(results)
        if share is None or interval is None:
            continue
        chance = 0.5
        if name == "answer_accuracy":
            labelled = results.get("correct_share", 0.5)
            chance = max(labelled, 1 - labelled)
        return JudgeAgreement(seed, share, *interval, int(results.get("n", 0)), chance)
    return None


def describe_judges(seeds: Sequence[int], agreements: Sequence[JudgeAgreement]) -> tuple[bool, str]:
    """Return whether the judges of all ``seeds`` know something, and a sentence that says what was measured."""
    measured = {agreement.seed: agreement for agreement in agreements}
    missing = [seed for seed in seeds if seed not in measured]
    if missing:
        of = ", ".join(map(str, missing))
        return False, (
            f"the judge's agreement with held-out labels was not measured (seed {of}): win rates say what the judge "
            "prefers, and no verdict follows. Give the judge's row eval.every"
        )
    shown = "; ".join(_by_seed(measured[seed], len(seeds) > 1) for seed in seeds)
    weak = [seed for seed in seeds if not measured[seed].excludes_chance]
    if weak:
        return False, (
            f"the judge is no better than a coin on held-out labels ({shown}): win rates say what the judge prefers, "
            "and no verdict follows"
        )
    return True, f"the judge agrees with held-out labels: {shown}"


def _by_seed(agreement: JudgeAgreement, is_one_of_several: bool) -> str:
    if is_one_of_several:
        return f"seed {agreement.seed}: {agreement.show()}"
    return agreement.show()
