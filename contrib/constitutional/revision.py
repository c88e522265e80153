"""Critique and revision of a model's own answers by itself (Bai et al. 2022b, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from principles import Principle

from posttrain.data.hh_rlhf import answer_text
from posttrain.data.reader import Dropped
from posttrain.data.render import Template, decode_response, encode_prompt
from posttrain.data.render.encoding import markers_of
from posttrain.errors import UsageError
from posttrain.randomness import derive_key, permutation
from posttrain.sampling.base import Sampling
from posttrain.sampling.rollout import Sampler
from posttrain.types import Example, Message

TOO_LONG = "the prompt does not fit into the model's context"
Conversation = Sequence[Message]


class Unusable(str):
    """Reason why there is no text; reasons are counted."""


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
        pairs = [(d, p) for d, p in chosen if p.rule is None]
        _ask_model(sampler, pairs, sampling, (seed, turn))
    for draft in drafts:
        if draft.reason is None and draft.text.split() == draft.first.split():
            draft.reason = UNCHANGED


def answer(sampler: Sampler, drafts: Sequence[Draft], sampling: Sampling, seed: int) -> None:
    """The first answers, in place."""
    keys = [derive_key(seed, "feedback answer", d.slot, 0) for d in drafts]
    for draft, text in zip(drafts, ask(sampler, [d.example.messages for d in drafts], keys, sampling), strict=True):
        if isinstance(text, Unusable):
            draft.reason = f"first answer: {text}"
        else:
            draft.first = draft.text = text


def _apply_rule(draft: Draft, principle: Principle) -> None:
    assert principle.rule is not None, "a principle that the model is asked about has no rule"
    objection = principle.rule(draft.text, draft.example)
    if objection is None:
        return
    if objection.revision is None:
        draft.reason = f"{principle.name}: {UNREPAIRED}"
    elif not objection.revision.strip():
        draft.reason = "revision: blank"
    else:
        draft.revise(principle, objection.critique, objection.revision)


def _ask_model(
    sampler: Sampler, pairs: Sequence[tuple[Draft, Principle]], sampling: Sampling, key: tuple[int, int]
) -> None:
    """Two more turns of the conversation: the critique, then the revision."""
    seed, turn = key
    talks = [
        [*d.example.messages, Message("assistant", d.text.strip()), Message("user", str(p.section.critique))]
        for d, p in pairs
    ]
    critiques = ask(sampler, talks, [derive_key(seed, "feedback critique", d.slot, turn) for d, _ in pairs], sampling)
    going_on = []
    for (draft, principle), talk, critique in zip(pairs, talks, critiques, strict=True):
        if isinstance(critique, Unusable):
            draft.reason = f"critique: {critique}"
        else:
            turns = [Message("assistant", critique.strip()), Message("user", str(principle.section.revise))]
            going_on.append((draft, principle, critique, [*talk, *turns]))
    keys = [derive_key(seed, "feedback revision", d.slot, turn) for d, *_ in going_on]
    revisions = ask(sampler, [talk for *_, talk in going_on], keys, sampling)
    for (draft, principle, critique, _), revision in zip(going_on, revisions, strict=True):
        if isinstance(revision, Unusable):
            draft.reason = f"revision: {revision}"
        else:
            draft.revise(principle, critique, revision)
