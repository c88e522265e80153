"""Critique and revision (Bai et al. 2022b, section 3.1): the first answer is rejected, its revision is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.engines.base import Sampling
from posttrain.engines.feedback.asking import Unusable, ask, with_edges_of
from posttrain.engines.feedback.principles import Principle
from posttrain.engines.rollout import Sampler
from posttrain.randomness import derive_key, permutation
from posttrain.types import Example, Message

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
