"""Do the changed features do anything? The model answers while they are taken away, or made stronger.

At one site fⱼ·dⱼ becomes gⱼ·fⱼ·dⱼ for some features: x + Σⱼ (gⱼ − 1)·fⱼ(x)·dⱼ. A dose of 0 takes a feature away, 1
leaves it, 2 doubles it. What the dictionary does not reconstruct stays in place, so a dose of 1 is the model itself.
The same is done to random features that fire about as often and as strongly; only the difference between the two tells
of the features, for any damage to a model costs it something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.engines.base import Engine, Sampling
from posttrain.evals.compare_statistics import Summary, summarize_seeds
from posttrain.interpret.dictionary import Dictionary
from posttrain.interpret.patching import encode_some
from posttrain.interpret.splice import replaced
from posttrain.render import encode_prompt, stop_ids
from posttrain.rollout import Grader, collect
from posttrain.types import Example, Rollout

Measure = Literal["reward", "accuracy"]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model that answers: itself, its tokenizer, the engine that samples from it, and who grades."""

    model: Any
    tokenizer: Any
    engine: Engine
    grader: Grader
    max_tokens: int
    label: str = ""

    def answer(
        self,
        examples: Sequence[Example],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        purpose: str = "what changed",
    ) -> list[Rollout]:
        """Graded answers, those to one example together; a function of the model, the seed and the purpose."""
        prompts = [encode_prompt(self.tokenizer, self.grader.template, example.messages) for example in examples]
        stops = stop_ids(self.tokenizer, self.grader.template)
        groups, _ = collect(
            self.engine,
            self.tokenizer,
            self.grader,
            examples,
            prompts,
            samples,
            Sampling(self.max_tokens, temperature, stop_ids=stops),
            key=(seed, purpose, 0),
            step=0,
        )
        return [rollout for group in groups for rollout in group]


def scale_features(dictionary: Dictionary, factors: dict[int, float], limit: float = float("inf")) -> Change:
    """x + Σⱼ (gⱼ − 1)·fⱼ(x)·dⱼ for activations [..., d]; those with a norm above ``limit`` stay as they are.

    Args:
        dictionary: of one model's raw activations.
        factors: g by feature.
    """
    chosen = torch.tensor(list(factors), dtype=torch.long, device=dictionary.b_dec.device)
    gains = torch.tensor(list(factors.values()), device=dictionary.b_dec.device) - 1.0

    def change(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        added = (encode_some(dictionary, rows, chosen) * gains) @ dictionary.W_dec[chosen, 0]
        added = added * (rows.norm(dim=-1, keepdim=True) <= limit)
        return (rows + added).to(x.dtype).reshape(x.shape)

    return change


class Trial:
    """One model, one site, fixed examples: what it earns under any change of its activations."""

    def __init__(self, subject: Subject, site: str, examples: Sequence[Example], measure: Measure) -> None:
        self.subject, self.site, self.examples, self.measure = subject, site, examples, measure

    def outcome(self, change: Change | None = None) -> float:
        """The mean reward, or the share of right answers, of greedy answers."""
        with nullcontext() if change is None else replaced(self.subject.model, self.site, change):
            rollouts = self.subject.answer(self.examples, purpose="what changed: causal test")
        return sum(self._value(rollout) for rollout in rollouts) / len(rollouts)

    def _value(self, rollout: Rollout) -> float:
        return rollout.reward if self.measure == "reward" else float(rollout.parts.get("correct", 0.0) == 1.0)


@dataclass(frozen=True, slots=True)
class Dose:
    """What ``num_features`` features at one dose do, with one dictionary: outcomes of the changed ones and the others.

    ``others``: one outcome for each set of rate-matched random features.
    """

    num_features: int
    dose: float
    changed: float
    others: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Changed less the mean of the others."""
        return self.changed - sum(self.others) / len(self.others)


def try_doses(
    trial: Trial,
    dictionary: Dictionary,
    ranked: Sequence[int],
    matched: Sequence[Sequence[int]],
    plan: Sequence[tuple[int, float]],
    limit: float = float("inf"),
) -> list[Dose]:
    """The outcome of every (number of features, dose) of the plan.

    Args:
        ranked: the changed features, the most changed first.
        matched: sets of other features, entry i of each matched to ``ranked[i]``.
    """
    found = []
    for count, dose in plan:
        outcomes = [
            trial.outcome(scale_features(dictionary, dict.fromkeys(features[:count], dose), limit))
            for features in (ranked, *matched)
        ]
        found.append(Dose(min(count, len(ranked)), dose, outcomes[0], tuple(outcomes[1:])))
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """The difference between changed and other features over seeds, with its 95 % Student-t interval.

    ``separates``: the interval does not hold 0; None where one seed gives no interval.
    """

    summary: Summary
    separates: bool | None


def judge(differences: Sequence[float]) -> Verdict:
    """Whether differences, one per seed of the dictionary, lie on one side of 0."""
    summary = summarize_seeds(differences)
    assert summary is not None, "at least one seed"
    if summary.half_width is None:
        return Verdict(summary, None)
    return Verdict(summary, abs(summary.mean) > summary.half_width)
