"""Labels of preference (Bai et al. 2022b, section 4.1): of two answers of the model's, a principle says the better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.engines.base import Sampling
from posttrain.engines.feedback.asking import TOO_LONG, preference
from posttrain.engines.feedback.principles import Principle
from posttrain.engines.feedback.revision import Draft, answer
from posttrain.engines.rollout import Sampler
from posttrain.models.forward.forward import Forward
from posttrain.randomness import permutation
from posttrain.render import encode_prompt
from posttrain.types import Example, Message

OPTIONS = ("(A)", "(B)")


@dataclass(slots=True)
class Label:
    """Two answers to an example, and the probability that the first is the better one by the principle."""

    first: Draft
    second: Draft
    principle: Principle
    probability: float | None = None
    reason: str | None = None


def label(
    sampler: Sampler,
    slots: Sequence[tuple[int, Example]],
    principles: Sequence[Principle],
    sampling: Sampling,
    seed: int,
    forward: Forward | None,
) -> list[Label]:
    """Two answers to every example, labelled by one of the principles.

    A rule prefers the answer that keeps it: probability 1 or 0. A question is put with the answers as (A) and (B) and
    as (B) and (A), and the model's probabilities of saying which are averaged, so that a liking for a letter cancels.

    Args:
        forward: reads the model's probabilities; None where every principle is a rule.
    """
    labels = []
    for slot, example in slots:
        principle = principles[int(permutation(seed, "feedback principles", slot, len(principles))[0])]
        labels.append(Label(Draft(slot, example), Draft(slot, example), principle))
    answer(sampler, [one.first for one in labels], sampling, seed)
    answer(sampler, [one.second for one in labels], sampling, seed, sample=1)
    for one in labels:
        one.reason = one.first.reason or one.second.reason
        if one.reason is None and one.first.text.split() == one.second.text.split():
            one.reason = "both answers are the same"
        elif one.reason is None and one.principle.rule is not None:
            _by_rule(one)
        elif one.reason is None:
            assert forward is not None, "a principle that asks needs a model to be read"
            _by_model(sampler, forward, one)
    return labels


def _by_rule(one: Label) -> None:
    broken = [one.principle.objection(draft.text, draft.example) is not None for draft in (one.first, one.second)]
    if broken[0] == broken[1]:
        one.reason = f"both answers {'break' if broken[0] else 'keep'} the rule"
    else:
        one.probability = float(broken[1])


def _by_model(sampler: Sampler, forward: Forward, one: Label) -> None:
    texts = one.first.text.strip(), one.second.text.strip()
    template, tokenizer = sampler.grader.template, sampler.tokenizer
    lead = "" if template.chat else " "
    words = lead + OPTIONS[0], lead + OPTIONS[1]
    asked = [_question(one, left, right) for left, right in (texts, texts[::-1])]
    prompts = [encode_prompt(tokenizer, template, [Message("user", text)]) for text in asked]
    if max(map(len, prompts)) + max(len(tokenizer.encode(word)) for word in words) > sampler.context_tokens:
        one.reason = f"the question: {TOO_LONG}"
        return
    straight, swapped = (preference(forward, tokenizer, prompt, words) for prompt in prompts)
    one.probability = (straight + 1.0 - swapped) / 2.0
    if one.probability == 0.5:
        one.reason = "neither answer is preferred"


def _question(one: Label, left: str, right: str) -> str:
    said = "\n\n".join(f"{message.role}: {message.content}" for message in one.first.example.messages)
    answers = "\n\n".join(f"{letter} {text}" for letter, text in zip(OPTIONS, (left, right), strict=True))
    return (
        f"Consider this conversation:\n\n{said}\n\n{one.principle.asked.prefer}\n\n{answers}\n\n"
        f"Answer with {OPTIONS[0]} or {OPTIONS[1]} alone."
    )
