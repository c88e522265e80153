"""Several turns as one growing sequence of ids: what was sampled stays as it was, what is answered is appended."""

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
    """What follows a turn: ids that the environment says, behind which the model goes on, or why it is over."""

    ids: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """What became of one completion behind its prompt: of one turn, or of all that an environment answered.

    ``reward`` is what the environment pays, None where it says nothing; ``failures``: as in ``Rollout``. ``messages``:
    those of the example, with what the environment opened it with; None without one.
    """

    prompt: tuple[int, ...]
    completion: Completion
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    failures: tuple[str, ...] = ()
    messages: tuple[Message, ...] | None = None


class Respondent(Protocol):
    """Who answers a turn; a completion is named by its prompt's number and its own among that prompt's."""

    def hear(self, prompt: int, sample: int, turn: Sequence[int], finish: Finish) -> None:
        """The ids of a turn that has ended (``stop`` or ``length``); the reply may be made in the background."""

    def reply(self, prompt: int, sample: int) -> Reply:
        """The reply to the turn heard last of this completion; waits until it is there."""


def turn_key(key: int, turn: int) -> int:
    """The key that turn ``turn`` (from 0) of a completion draws its tokens with."""
    return key if turn == 0 else derive_key(key, "turn", turn)


@dataclass(slots=True)
class Conversation:
    """One completion of several turns on its way; ``limit`` ids at most, those of the environment included."""

    prompt: int
    sample: int
    key: int
    limit: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    num_turns: int = 0
    finish: Finish | None = None

    def add_turn(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """What the model wrote, its end token included."""
        self.ids += ids
        self.logprobs += logprobs
        self.end_turn()

    def end_turn(self) -> list[int]:
        """Take what stands behind the last reply as the model's turn, and return its ids."""
        turn = self.ids[len(self.own) :]
        self.own += [True] * len(turn)
        self.num_turns += 1
        return turn

    def add_reply(self, reply: Reply) -> None:
        """What was answered. It is said whole or, where no token would be left to go on with, not at all."""
        if reply.finish is not None:
            self.finish = reply.finish
        elif len(self.ids) + len(reply.ids) >= self.limit:
            self.finish = "length"
        else:
            self.ids += reply.ids
            self.logprobs += [0.0] * len(reply.ids)
            self.own += [False] * len(reply.ids)

    def room(self, max_turn_tokens: int | None) -> int:
        """How many tokens the next turn may have."""
        left = self.limit - len(self.ids)
        return left if max_turn_tokens is None else min(left, max_turn_tokens)

    def completion(self, version: int) -> Completion:
        """The finished conversation; all ids are its own where no turn was ended, because nobody answers."""
        assert self.finish is not None, "a conversation goes on until it has finished"
        return Completion(tuple(self.ids), tuple(self.logprobs), self.finish, version, tuple(self.own) or None)


def begin(
    prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], max_tokens: int, context: int
) -> list[list[Conversation]]:
    """A row for every key, by prompt, of at most ``max_tokens`` ids, and ``context`` with its prompt."""
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
    """Let every row go on turn by turn, each turn a generation over all that was said before it.

    Whole prompts are read again at every turn, by engines that remember nothing. Returns the version that sampled.
    """
    version: int = 0
    going = list(rows)
    while going:
        rooms = [row.room(sampling.max_turn_tokens) for row in going]
        said = generate(
            [[*prompts[row.prompt], *row.ids] for row in going],
            [[turn_key(row.key, row.num_turns)] for row in going],
            replace(sampling, max_tokens=max(rooms)),
        )
        for row, room, (turn,) in zip(going, rooms, said, strict=True):
            ids, cut = turn.ids[:room], len(turn.ids) > room
            row.add_turn(ids, turn.logprobs[:room])
            version = turn.version
            finish: Finish = "length" if cut else turn.finish
            if finish == "length":
                row.finish = finish
            respondent.hear(row.prompt, row.sample, ids, finish)
        for row in going:
            reply = respondent.reply(row.prompt, row.sample)
            if row.finish is None:
                row.add_reply(reply)
        going = [row for row in going if row.finish is None]
    return version
