"""Do the changed features do anything? A model answers while something is done to some of its features.

Three treatments, at one site, of the features j of some set:

    given     the base answers, and its features are moved to where the post model has them:
              x + α·Σⱼ (fⱼ(x_post) − fⱼ(x))·dⱼ, where the post model reads along
    returned  the post model answers, and its features are moved to where the base has them
    scaled    the post model answers with gⱼ·fⱼ·dⱼ in place of fⱼ·dⱼ: 0 takes a feature away, 2 doubles it

What the dictionary does not reconstruct stays in place, so a dose α = 0 or g = 1 is the model itself. The same is done
to random features that fire about as often and as strongly; only the difference between the two tells of the features,
for any damage to a model costs it something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.engines.rollout import Attempt, RolloutRequest, Sampler, collect
from posttrain.evals.seeds import Summary, summarize_seeds
from posttrain.interpret.activations.lockstep import Added, write_with
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.differences.patching import encode_some, feature_patch
from posttrain.render import decode_response, encode_prompt, stop_ids
from posttrain.types import Completion, Example, Rollout

Measure = Literal["reward", "accuracy"]


@dataclass(frozen=True)
class Subject(Sampler):
    """A sampler whose model is at hand, to be changed while it answers."""

    model: Any
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
        sampling = self.sampling(self.max_tokens, temperature)
        groups, _ = collect(self, RolloutRequest(examples, prompts, sampling, (seed, purpose, 0), samples))
        return [rollout for group in groups for rollout in group]


def move_features(dictionary: Dictionary, features: Sequence[int], dose: float, limit: float = float("inf")) -> Added:
    """α·Σⱼ (fⱼ(donor) − fⱼ(x))·dⱼ: some features of the writer, moved towards where the donor has them.

    Activations with a norm above ``limit``, in either model, stay as they are.
    """
    patch = feature_patch(dictionary, features)

    def added(x: Tensor, donor: Tensor) -> Tensor:
        within = (x.norm(dim=-1, keepdim=True) <= limit) & (donor.norm(dim=-1, keepdim=True) <= limit)
        return dose * patch(x, donor) * within

    return added


def scale_features(dictionary: Dictionary, factors: Mapping[int, float], limit: float = float("inf")) -> Added:
    """Σⱼ (gⱼ − 1)·fⱼ(x)·dⱼ for activations [n, d]; those with a norm above ``limit`` stay as they are.

    Args:
        dictionary: of one model's raw activations.
        factors: g by feature.
    """
    chosen = torch.tensor(list(factors), dtype=torch.long, device=dictionary.b_dec.device)
    gains = torch.tensor(list(factors.values()), device=dictionary.b_dec.device) - 1.0

    def added(x: Tensor, _: Tensor) -> Tensor:
        moved = (encode_some(dictionary, x, chosen) * gains) @ dictionary.W_dec[chosen, 0]
        return moved * (x.norm(dim=-1, keepdim=True) <= limit)

    return added


def leave(x: Tensor, _: Tensor) -> Tensor:
    """The treatment that does nothing."""
    return torch.zeros_like(x)


def replace_all(x: Tensor, donor: Tensor) -> Tensor:
    """The treatment that puts all of the donor's activations in."""
    return donor - x


class Trial:
    """A writer, a donor that reads along, fixed examples: what greedy answers earn under treatments."""

    def __init__(
        self, writer: Subject, donor: Subject, site: str, examples: Sequence[Example], measure: Measure
    ) -> None:
        self.writer, self.donor, self.site, self.examples, self.measure = writer, donor, site, examples, measure
        template = writer.grader.template
        self.prompts = [encode_prompt(writer.tokenizer, template, example.messages) for example in examples]

    def outcomes(self, treatments: Sequence[Added]) -> list[float]:
        """For each treatment the mean reward, or the share of right answers."""
        written = write_with(
            self.writer.model,
            self.donor.model,
            self.site,
            self.prompts,
            treatments,
            max_tokens=self.writer.max_tokens,
            stop_ids=stop_ids(self.writer.tokenizer, self.writer.grader.template),
        )
        return [self._mean(completions) for completions in written]

    def _mean(self, completions: Sequence[Sequence[int]]) -> float:
        grader, tokenizer = self.writer.grader, self.writer.tokenizer
        stops = stop_ids(tokenizer, grader.template)
        attempts = []
        for example, prompt, ids in zip(self.examples, self.prompts, completions, strict=True):
            text = decode_response(tokenizer, grader.template, ids)
            finish: Literal["stop", "length"] = "stop" if ids and ids[-1] in stops else "length"
            asked = tokenizer.decode(list(prompt), skip_special_tokens=False)
            attempts.append(Attempt(example, asked, text, Completion(tuple(ids), (), finish)))
        grades = grader.grade(attempts)
        if self.measure == "reward":
            return sum(grade.reward for grade in grades) / len(grades)
        return sum(float(grade.parts.get("correct", 0.0) == 1.0) for grade in grades) / len(grades)


@dataclass(frozen=True, slots=True)
class Dose:
    """What one dose to ``num_features`` features does, with one dictionary: to the changed ones and to others.

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
    treat: Callable[[Sequence[int], float], Added],
    ranked: Sequence[int],
    matched: Sequence[Sequence[int]],
    plan: Sequence[tuple[int, float]],
) -> list[Dose]:
    """The outcome of every (number of features, dose) of the plan, all of them decoded side by side.

    Args:
        treat: (features, dose) -> the treatment.
        ranked: the changed features, the most changed first.
        matched: sets of other features, entry i of each matched to ``ranked[i]``.
    """
    sets = (ranked, *matched)
    outcomes = trial.outcomes([treat(features[:count], dose) for count, dose in plan for features in sets])
    found = []
    for index, (count, dose) in enumerate(plan):
        part = outcomes[index * len(sets) : (index + 1) * len(sets)]
        found.append(Dose(min(count, len(ranked)), dose, part[0], tuple(part[1:])))
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
