"""The evaluations of a run in order: the best one so far, and whether the run has waited long enough for a better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.errors import UsageError
from posttrain.store.metric_names import Metric


@dataclass(slots=True)
class EvaluationRanking:
    """The best evaluation by the primary metric (``{"step": s, NAME: value}``) and the number of ``stale`` ones since.

    An evaluation is stale if it is not better than the best before it. Of equal steps the later is the best, and its
    evaluation is stale. All of it is in a checkpoint, so that a resumed run ends at the same step.

    ``patience``: so many stale evaluations in a row end the run; None: it goes on to its last step.
    """

    patience: int | None = None
    best: dict[str, float] | None = None
    stale: int = 0

    def add(self, primary: Metric | None, evaluations: Mapping[str, Mapping[str, float]], step: int) -> None:
        """Count the evaluation of a step. The weights before the first step (0) are not ranked.

        Raises:
            UsageError: there is no primary metric, and the run waits for a better one.
        """
        if primary is None and self.patience is not None:
            raise UsageError(
                "eval.patience: no evaluation has a metric that ranks the run. Name one by eval.best, or leave out "
                "patience"
            )
        if primary is None or step == 0:
            return
        value = primary.mean(evaluations.values())
        if value is None:
            return
        before = None
        if self.best is not None:
            before = self.best.get(primary.name)  # None: it was another metric
        if before is None or primary.goodness(value) > primary.goodness(before):
            self.stale = 0
        else:
            self.stale += 1
        if self.stale == 0 or before is None or primary.goodness(value) >= primary.goodness(before):
            self.best = {"step": float(step), primary.name: value}

    def has_waited(self) -> bool:
        """Return whether the run ends because nothing has got better."""
        return self.patience is not None and self.stale >= self.patience

    def describe(self, step: int, steps: int) -> str:
        """Return the line on a run that ends before its last step."""
        shown = ""
        if self.best is not None:
            (name, value), *_ = [item for item in self.best.items() if item[0] != "step"]
            shown = f" than {name} {value:.4g} of step {self.best['step']:.0f}"
        times = "evaluation was"
        if self.stale > 1:
            times = f"{self.stale} evaluations in a row were"
        return f"eval.patience: the last {times} not better{shown}, so the run ends after step {step} of {steps}"
