"""Held-out agreement of a sweep's judges with labels, and whether it excludes chance.

If a judge ranks held-out pairs no better than chance, its win rates only show the judge's preference, not quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.store.metric_names import metric_of

# Agreement measures, in order of preference.
AGREEMENTS = ("pair_accuracy", "answer_accuracy")


@dataclass(frozen=True)
class JudgeAgreement:
    """Agreement between one seed's judge and held-out labels.

    Attributes:
        share: fraction of pairs (or answers) ranked as labelled, with 95 % interval ``low, high``.
        n: number of held-out pairs or answers.
        chance: expected agreement by chance; for single answers the more frequent label.
    """

    seed: int
    share: float
    low: float
    high: float
    n: int
    chance: float = 0.5

    @property
    def excludes_chance(self) -> bool:
        """True if the interval is entirely above chance."""
        return self.low > self.chance

    def show(self) -> str:
        """Format as ``60.0% [31.3, 83.2], n = 10``."""
        return f"{self.share:.1%} [{100 * self.low:.1f}, {100 * self.high:.1f}], n = {self.n}"


def read_agreement(seed: int, results: Mapping[str, float]) -> JudgeAgreement | None:
    """Read the agreement from a reward model's last evaluation; None if not measured."""
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
    """Check that the judges of all ``seeds`` beat chance, and describe the measurements in a sentence."""
    measured = {agreement.seed: agreement for agreement in agreements}
    missing = [seed for seed in seeds if seed not in measured]
    if missing:
        of = ", ".join(map(str, missing))
        return False, (
            f"the judge's agreement with held-out labels was not measured (seed {of}): win rates only show the judge's "
            "preference, so no verdict is given. Set eval.every in the judge's row"
        )
    shown = "; ".join(_by_seed(measured[seed], len(seeds) > 1) for seed in seeds)
    weak = [seed for seed in seeds if not measured[seed].excludes_chance]
    if weak:
        return False, (
            f"the judge is no better than chance on held-out labels ({shown}): win rates only show the judge's "
            "preference, so no verdict is given"
        )
    return True, f"the judge agrees with held-out labels: {shown}"


def _by_seed(agreement: JudgeAgreement, is_one_of_several: bool) -> str:
    if is_one_of_several:
        return f"seed {agreement.seed}: {agreement.show()}"
    return agreement.show()
