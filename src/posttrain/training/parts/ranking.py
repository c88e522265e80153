"""Track the best evaluation and early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.errors import UsageError
from posttrain.store.metric_names import Metric


@dataclass(slots=True)
class EvaluationRanking:
    """Best evaluation by primary metric (``{"step": s, NAME: value}``) and number of ``stale`` evaluations since.

    An evaluation is stale if it does not improve on the best. Ties move the best to the later step but still count as
    stale. Everything is stored in checkpoints, so resumed runs stop at the same step.

    ``patience``: stop after this many consecutive stale evaluations; None trains until the last step.
    """

    patience: int | None = None
    best: dict[str, float] | None = None
    stale: int = 0

    def add(self, primary: Metric | None, evaluations: Mapping[str, Mapping[str, float]], step: int) -> None:
        """Add an evaluation. Weights before the first step (0) are not ranked.

        Raises:
            UsageError: early stopping without a primary metric.
        """
        if primary is None and self.patience is not None:
            raise UsageError(
                "eval.patience: no evaluation reports a primary metric. Choose one with eval.best, or remove patience"
            )
        if primary is None or step == 0:
            return
        value = primary.mean(evaluations.values())
        if value is None:
            return
        before = None
        if self.best is not None:
            before = self.best.get(primary.name)  # None after a metric change
        if before is None or primary.goodness(value) > primary.goodness(before):
            self.stale = 0
        else:
            self.stale += 1
        if self.stale == 0 or before is None or primary.goodness(value) >= primary.goodness(before):
            self.best = {"step": float(step), primary.name: value}

    def has_waited(self) -> bool:
        """Check if early stopping applies."""
        return self.patience is not None and self.stale >= self.patience

    def describe(self, step: int, steps: int) -> str:
        """Describe early stopping before the last step."""
        shown = ""
        if self.best is not None:
            (name, value), *_ = [item for item in self.best.items() if item[0] != "step"]
            shown = f" than {name} {value:.4g} of step {self.best['step']:.0f}"
        times = "evaluation was"
        if self.stale > 1:
            times = f"{self.stale} evaluations in a row were"
        return f"eval.patience: the last {times} not better{shown}, so the run ends after step {step} of {steps}"
