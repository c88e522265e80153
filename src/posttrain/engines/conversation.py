"""Several turns as one growing sequence of ids: sampled ids stay as they are, replies are appended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from posttrain.randomness import derive_key
from posttrain.types import Completion, Finish, Message, Turn

if TYPE_CHECKING:
    from posttrain.engines.base import Sampling

Groups = list[list[Completion]]  # by prompt
Generate = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]], "Sampling"], Groups]


@dataclass(frozen=True, slots=True)
class Reply:
    """Ids that follow a turn, after which the model goes on, or the reason why the completion is over."""

    ids: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One completion with its prompt, of one turn or of all that an environment answered.

    ``reward``: of the environment, None without one; ``failures``: as in ``Rollout``. ``messages``: those of the
    example, with the environment's opening; None without one.
    """

    prompt: tuple[int, ...]
    completion: Completion
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    failures: tuple[str, ...] = ()
    messages: tuple[Message, ...] | None = None


class Respondent(Protocol):
    """Answers turns; a completion is named by its prompt's number and its own among that prompt's."""

    def hear(self, prompt: int, sample: int, turn: Sequence[int], finish: Finish) -> None:
        """Take the ids of a turn that has ended (``stop`` or ``length``); the reply may be made in the background."""

    def reply(self, prompt: int, sample: int) -> Reply:
        """Return the reply to the turn heard last of this completion; wait until it is there."""


def turn_key(key: int, turn: int) -> int:
    """Return the key of the random numbers of turn ``turn`` (from 0) of a completion."""
    return key if turn == 0 else derive_key(key, "turn", turn)


@dataclass(slots=True)
class Conversation:
    """One completion of several turns under way; ``limit`` ids at most, those of the environment included."""

    prompt: int
    sample: int
    key: int
    limit: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    num_turns: int = 0
    finish: Finish | None = None

    def end_turn(self) -> list[int]:
        """Mark the ids after the last reply as the model's turn, and return them."""
        turn = self.ids[len(self.own) :]
        self.own += [True] * len(turn)
        self.num_turns += 1
        return turn

    def add_reply(self, reply: Reply) -> None:
        """Append a reply whole or, where no token would be left to go on with, not at all."""
        if reply.finish is not None:
            self.finish = reply.finish
        elif len(self.ids) + len(reply.ids) >= self.limit:
            self.finish = "length"
        else:
            self.ids += reply.ids
            self.logprobs += [0.0] * len(reply.ids)
            self.own += [False] * len(reply.ids)

    def room(self, max_turn_tokens: int | None) -> int:
        """Return the number of tokens that the next turn may have."""
        left = self.limit - len(self.ids)
        return left if max_turn_tokens is None else min(left, max_turn_tokens)

    def completion(self, version: int) -> Completion:
        """Return the finished conversation; all ids are its own where no turn was ended."""
        assert self.finish is not None, "a conversation goes on until it has finished"
        return Completion(tuple(self.ids), tuple(self.logprobs), self.finish, version, tuple(self.own) or None)


def begin(
    prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], max_tokens: int, context: int
) -> list[list[Conversation]]:
    """Return a row for every key, by prompt, of at most ``max_tokens`` ids, and ``context`` with its prompt."""
    return [
        [Conversation(i, g, key, min(max_tokens, context - len(prompt))) for g, key in enumerate(of_prompt)]
        for i, (prompt, of_prompt) in enumerate(zip(prompts, keys, strict=True))
    ]


def converse_by_generating(
    generate: Generate,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Conversation],
    sampling: Sampling,
    respondent: Respondent,
) -> int:
    """Complete every row turn by turn, each turn a generation over all ids before it; return the version that sampled.

    Whole prompts are read again at every turn, by engines that keep nothing between calls.
    """
    version = 0
    going = list(rows)
    while going:
        rooms = [row.room(sampling.max_turn_tokens) for row in going]
        groups = generate(
            [[*prompts[row.prompt], *row.ids] for row in going],
            [[turn_key(row.key, row.num_turns)] for row in going],
            replace(sampling, max_tokens=max(rooms)),
        )
        for row, room, (turn,) in zip(going, rooms, groups, strict=True):
            row.ids += turn.ids[:room]
            row.logprobs += turn.logprobs[:room]
            version = turn.version
            finish: Finish = "length" if len(turn.ids) > room else turn.finish
            if finish == "length":
                row.finish = finish
            respondent.hear(row.prompt, row.sample, row.end_turn(), finish)
        for row in going:
            reply = respondent.reply(row.prompt, row.sample)
            if row.finish is None:
                row.add_reply(reply)
        going = [row for row in going if row.finish is None]
    return version
