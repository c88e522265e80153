"""The primary metric of a run: the held-out result by which runs are shown and ranked and the best weights are kept.

It is chosen at the run's evaluations (``choose_headline``) and stored with the run (``status.json``). Code that shows
or ranks runs asks it, and knows no metric by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.errors import UsageError
from posttrain.registry import suggest

Unit = Literal["share", "number", "nats"]
Further = Literal["kl_from_start", "loss", "perplexity", "token_accuracy"]
Words = Annotated[str, Field(max_length=80)]
KL: Literal["kl_from_start"] = "kl_from_start"
# What may be shown with a primary metric, or be named by ``eval.best``: its name and format.
NAMES: Mapping[str, tuple[str, str]] = {
    KL: ("KL from start", ".3f"),
    "loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ".2f"),
    "token_accuracy": ("token accuracy", ".1%"),
}


@dataclass(frozen=True, slots=True)
class Headline:
    """A result of held-out evaluations, and how it is read.

    ``metric``: its name among the results. ``unit``: a share from 0 to 1 (shown in percent), a number without one, or
    nats. ``label``: after a share (``50.0% right``), before anything else (``reward 0.731``). ``of``: what is counted.
    ``next to``: further results that are shown with it, where there are such.
    """

    metric: Words
    higher_is_better: bool = True
    unit: Unit = "number"
    label: Words = ""
    of: Words = "problems"
    beside: tuple[Further, ...] = ()

    @property
    def is_share(self) -> bool:
        return self.unit == "share"

    @property
    def counts_right(self) -> bool:
        """True for the share of answers that are right."""
        return self.metric == "accuracy"

    def value(self, results: Mapping[str, Any]) -> float | None:
        """Return its value; None where it was not measured, or is no finite number."""
        value = results.get(self.metric)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def mean(self, evaluations: Iterable[Mapping[str, float]]) -> float | None:
        """Return the mean over those evaluations that have it."""
        values = [value for results in evaluations if (value := self.value(results)) is not None]
        return math.fsum(values) / len(values) if values else None

    def interval(self, results: Mapping[str, float]) -> tuple[float, float] | None:
        """Return its 95 % interval, where one was measured."""
        low, high = (results.get(f"{self.metric}_{bound}", math.nan) for bound in ("low", "high"))
        return (low, high) if self.value(results) is not None and math.isfinite(low) and math.isfinite(high) else None

    def goodness(self, value: float) -> float:
        """Return a number that is larger for what is better."""
        return value if self.higher_is_better else -value

    def numbers(self, results: Mapping[str, float]) -> dict[str, float]:
        """Of results, return value, interval and what is shown with them."""
        names = (self.metric, f"{self.metric}_low", f"{self.metric}_high", *self.beside)
        return {name: results[name] for name in names if math.isfinite(results.get(name, math.nan))}

    def only(self, results: Mapping[str, float]) -> dict[str, float]:
        """Of results, return its value and the KL shown with it: enough for a line about one of many runs."""
        names = (self.metric, *({KL} & {*self.beside}))
        return {name: results[name] for name in names if name in results}

    def show(self, value: float) -> str:
        """``50.0%``, ``0.731``."""
        return f"{value:.1%}" if self.is_share else f"{value:.3f}"

    def tell(self, results: Mapping[str, float]) -> str:
        """``50.0% right [43.9%, 56.1%]``, ``reward 0.731 · KL from start 2.310``; empty where it was not measured."""
        value, interval = self.value(results), self.interval(results)
        if value is None:
            return ""
        shown = f"{self.show(value)} {self.label}" if self.is_share else f"{self.label} {self.show(value)}"
        if interval is not None:
            shown += f" [{self.show(interval[0])}, {self.show(interval[1])}]"
        further = [f"{NAMES[name][0]} {results[name]:{NAMES[name][1]}}" for name in self.beside if name in results]
        return " · ".join([shown, *further])


ACCURACY = Headline("accuracy", unit="share", label="right")
# In the order in which they are looked for. Agreement is with the labels that the data have.
_PREFERRED = (
    ACCURACY,
    Headline("pair_accuracy", unit="share", label="pairs right", of="pairs", beside=("loss",)),
    Headline("final_accuracy", unit="share", label="agreement with labels", of="answers", beside=("loss",)),
    Headline("row_accuracy", unit="share", label="agreement with labels", of="answers", beside=("loss",)),
    Headline("step_accuracy", unit="share", label="agreement with step labels", of="solutions", beside=("loss",)),
    Headline("loss", False, "nats", "loss", "examples", ("perplexity", "token_accuracy")),
)
REWARD = Headline("reward", label="reward", of="prompts", beside=(KL,))
_FAILURES = {"truncated", "out_of_turns", "tool_failed", "parse_failures", "grading_failures", "environment_failures"}
_LOWER_IS_BETTER = {*_FAILURES, "perplexity", KL, "num_tokens", "sampled_num_tokens"}
_SHARES = {*_FAILURES, "format", "worked"}
# Results about the measurement itself.
_COUNTS = {"n", "num_graded", "samples", "seconds", "prompts_too_long", "rows_dropped", "standard_error"}


def choose_headline(
    evaluations: Mapping[str, Mapping[str, float]], *, named: str | None, samples: bool
) -> Headline | None:
    """Return the primary metric of a run that is evaluated like this: the first task decides.

    Right answers where there are gold answers; else agreement with labelled pairs, answers or steps; else the reward
    with the KL from the start for a run that samples; else the held-out loss; None where there is none of these.

    Args:
        evaluations: results by task.
        named: the metric that the recipe asks for instead (``eval.best``).
        samples: the run trains on its own samples, by their reward.

    Raises:
        UsageError: no evaluation has a result of that name; the message lists those that there are.
    """
    if named is not None:
        return _named_headline(evaluations, named)
    first = next(iter(evaluations.values()))
    chosen = next((headline for headline in _PREFERRED if headline.metric in first), None)
    if samples and (chosen is None or not chosen.is_share) and REWARD.metric in first:
        return REWARD
    return chosen


def _named_headline(evaluations: Mapping[str, Mapping[str, float]], named: str) -> Headline:
    every = {name for results in evaluations.values() for name in results}
    measured = sorted(name for name in every - _COUNTS if not name.endswith(("_low", "_high")))
    if named not in measured:
        raise UsageError(
            f"eval.best: no evaluation measures {named!r}.{suggest(named, measured)} There are: {', '.join(measured)}"
        )
    for headline in (*_PREFERRED, REWARD):
        if headline.metric == named:
            return headline
    unit: Unit = "share" if named in _SHARES or named.endswith("accuracy") else "nats" if named == KL else "number"
    label = NAMES[named][0] if named in NAMES else named.replace("_", " ")
    return Headline(named, named not in _LOWER_IS_BETTER, unit, label, "prompts")
