"""What a model makes of its own answers (Bai et al. 2022b): critique and revision (3.1), preferences (4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.engines.base import Sampling
from posttrain.engines.feedback.principles import Principle
from posttrain.engines.rollout import Sampler
from posttrain.errors import UsageError
from posttrain.models.forward.forward import Forward
from posttrain.randomness import derive_key, permutation
from posttrain.render import Template, decode_response, encode_plain, encode_prompt
from posttrain.render.encoding import markers_of
from posttrain.tasks.reader import Dropped, answer_text
from posttrain.types import Example, Message, Sample, collate, with_float64

# A model asked in conversations: texts, or the reason why one cannot be used; and which of two words it would say.

TOO_LONG = "the prompt does not fit into the model's context"
Conversation = Sequence[Message]


class Unusable(str):
    """Why there is no text: counted by its words."""


def refuse_tags(tokenizer: Any, template: Template) -> None:
    """Refuse a template whose tags are tokens of their own: text of a file can never become these.

    Raises:
        UsageError: it is one.
    """
    known = markers_of(tokenizer).ids
    tags = [f"<{tag}>" for tag in template.tags if f"<{tag}>" in known]
    if tags:
        raise UsageError(
            f"--template {template.name}: it writes {' and '.join(tags)} as tokens of their own, which the texts of a "
            "file cannot hold; use one without tags, such as chat, dialogue or plain"
        )


def ask(
    sampler: Sampler, conversations: Sequence[Conversation], keys: Sequence[int], sampling: Sampling
) -> list[str | Unusable]:
    """One answer to each conversation, without its thinking; or why it cannot be used.

    A text that was cut off is not used: in training it would end where it never did. Nor is one with a marker of
    the tokenizer in it, which would be other tokens there.
    """
    template, tokenizer = sampler.grader.template, sampler.tokenizer
    prompts = [encode_prompt(tokenizer, template, messages) for messages in conversations]
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < sampler.context_tokens]
    texts: list[str | Unusable] = [Unusable(TOO_LONG)] * len(prompts)
    if fitting:
        sampled = sampler.engine.generate([prompts[i] for i in fitting], [[keys[i]] for i in fitting], sampling)
        for i, (completion,) in zip(fitting, sampled, strict=True):
            text = decode_response(tokenizer, template, completion.ids, prompts[i]).removeprefix(template.opening)
            texts[i] = Unusable("cut off at --max-tokens") if completion.finish == "length" else _usable(sampler, text)
    return texts


def _usable(sampler: Sampler, text: str) -> str | Unusable:
    if "</think>" in text or "<think>" in text:
        try:
            text = answer_text(text, strip_thinking=not sampler.grader.template.tags)
        except Dropped as reason:
            return Unusable(reason)
    if not text.strip():
        return Unusable("blank")
    if next(markers_of(sampler.tokenizer).find(text), None) is not None:
        return Unusable("with a special token in it")
    return text


def with_edges_of(first: str, text: str) -> str:
    """``text`` between the white space of ``first``, so that the two differ in what they say alone."""
    inner = first.strip()
    start = first.index(inner)
    return f"{first[:start]}{text.strip()}{first[start + len(inner) :]}"


@torch.no_grad()
def preference(forward: Forward, tokenizer: Any, prompt: Sequence[int], words: tuple[str, str]) -> float:
    """``P(first) / (P(first) + P(second))`` of two continuations of a prompt, by the sums of log-probabilities."""
    samples = []
    for word in words:
        ids = encode_plain(tokenizer, word)
        samples.append(Sample([*prompt, *ids], [False] * len(prompt) + [True] * len(ids), prefix=len(prompt)))
    first, second = with_float64(forward(collate(samples), "none").logprobs).double().sum(dim=1).tolist()
    return 1.0 / (1.0 + math.exp(min(700.0, second - first)))


UNCHANGED = "nothing is changed: no rule objects, or the revision is the first answer"
UNREPAIRED = "broken, and the rule cannot put it right"


@dataclass(slots=True)
class Draft:
    """An answer on its way: what it was first, what it is now, and who objected with what.

    ``slot`` is the place of its example among those that are asked; ``reason`` says why it is given up.
    """

    slot: int
    example: Example
    first: str = ""
    text: str = ""
    principles: list[str] = field(default_factory=list)
    critiques: list[str] = field(default_factory=list)
    reason: str | None = None

    def revise(self, principle: Principle, critique: str, revision: str) -> None:
        """Take a revision over, unless it says the same."""
        revision = with_edges_of(self.first, revision)
        if revision.split() != self.text.split():
            self.text = revision
            self.principles.append(principle.name)
            self.critiques.append(critique.strip())


def revise(
    sampler: Sampler,
    drafts: Sequence[Draft],
    principles: Sequence[Principle],
    sampling: Sampling,
    rounds: int,
    seed: int,
) -> None:
    """Answer, then ``rounds`` times criticize and revise by a principle, each time another one; in place.

    Which principles, and all that is sampled, is a function of (seed, slot, round), whatever else is in the list.
    """
    answer(sampler, drafts, sampling, seed)
    orders = {d.slot: permutation(seed, "feedback principles", d.slot, len(principles)) for d in drafts}
    for turn in range(min(rounds, len(principles))):
        chosen = [(d, principles[int(orders[d.slot][turn])]) for d in drafts if d.reason is None]
        for draft, principle in chosen:
            if principle.rule is not None:
                _apply_rule(draft, principle)
        asked = [(d, p) for d, p in chosen if p.rule is None]
        _ask_model(sampler, asked, sampling, (seed, turn))
    for draft in drafts:
        if draft.reason is None and draft.text.split() == draft.first.split():
            draft.reason = UNCHANGED


def answer(sampler: Sampler, drafts: Sequence[Draft], sampling: Sampling, seed: int, sample: int = 0) -> None:
    """The first answers, in place."""
    keys = [derive_key(seed, "feedback answer", d.slot, sample) for d in drafts]
    for draft, text in zip(drafts, ask(sampler, [d.example.messages for d in drafts], keys, sampling), strict=True):
        if isinstance(text, Unusable):
            draft.reason = f"first answer: {text}"
        else:
            draft.first = draft.text = text


def _apply_rule(draft: Draft, principle: Principle) -> None:
    objection = principle.objection(draft.text, draft.example)
    if objection is None:
        return
    if objection.revision is None:
        draft.reason = f"{principle.name}: {UNREPAIRED}"
    elif not objection.revision.strip():
        draft.reason = "revision: blank"
    else:
        draft.revise(principle, objection.critique, objection.revision)


def _ask_model(
    sampler: Sampler, asked: Sequence[tuple[Draft, Principle]], sampling: Sampling, key: tuple[int, int]
) -> None:
    """Two more turns of the conversation: the critique, then the revision."""
    seed, turn = key
    talks = [
        [*d.example.messages, Message("assistant", d.text.strip()), Message("user", str(p.asked.critique))]
        for d, p in asked
    ]
    critiques = ask(sampler, talks, [derive_key(seed, "feedback critique", d.slot, turn) for d, _ in asked], sampling)
    going_on = []
    for (draft, principle), talk, critique in zip(asked, talks, critiques, strict=True):
        if isinstance(critique, Unusable):
            draft.reason = f"critique: {critique}"
        else:
            said = [Message("assistant", critique.strip()), Message("user", str(principle.asked.revise))]
            going_on.append((draft, principle, critique, [*talk, *said]))
    keys = [derive_key(seed, "feedback revision", d.slot, turn) for d, *_ in going_on]
    revisions = ask(sampler, [talk for *_, talk in going_on], keys, sampling)
    for (draft, principle, critique, _), revision in zip(going_on, revisions, strict=True):
        if isinstance(revision, Unusable):
            draft.reason = f"revision: {revision}"
        else:
            draft.revise(principle, critique, revision)


# Labels of preference (Bai et al. 2022b, section 4.1): of two answers of the model's, a principle says the better.

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
