"""The interface between sampling and everything else: token ids in, completions out.

Several turns are one growing sequence of ids: sampled ids stay as they are, replies are appended.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from posttrain.errors import UsageError
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup, Within
from posttrain.randomness import derive_key
from posttrain.types import Completion, Finish, KeptSets, LogitRules, Message, Turn

UNLIMITED_CONTEXT = 1 << 31
SMALLEST_TEMPERATURE = 1e-5  # that is not greedy, as in vLLM
# Tokens of a kept set at most, as in prime-rl (its pull request 3235): without a bound of one's own the likeliest ones.
MOST_KEPT = 512
MOST_STOP_TEXTS = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of sampling.

    ``temperature``: 0, or below ``SMALLEST_TEMPERATURE``, is greedy. Truncation keeps the tokens of at least ``min_p``
    times the largest probability, of these the ``top_k`` likeliest, and of these the likeliest that have ``top_p``
    together, as vLLM does. Log-probabilities are those of the full distribution at ``temperature`` (at 1 when greedy),
    before truncation. With ``keeps_sets`` completions have their kept sets, at most ``MOST_KEPT`` tokens each, and
    log-probabilities are over these. Generation ends at any of ``stop_ids`` (the completion's last id) or after
    ``max_tokens``. ``max_total_tokens``: limit of prompt and completion together. ``max_turn_tokens``: limit of each of
    several turns; ``max_tokens`` is then that of all turns and replies. ``num_tokens``: ids from here on have no text
    and are never drawn.

    ``min_tokens``: no stop id is drawn before an answer (or turn) has so many. ``repetition_penalty``: see
    ``LogitRules``. Log-probabilities are those after both. ``stop``: an answer (or turn) also ends with the token that
    completes one of these texts, which stays in it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    max_total_tokens: int | None = None
    max_turn_tokens: int | None = None
    num_tokens: int | None = None
    min_p: float = 0.0
    keeps_sets: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from a part of the distribution."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def rules(self) -> LogitRules | None:
        """The rules that change logits; None if there are none."""
        barred: tuple[int, ...] = ()
        if self.min_tokens > 0:
            barred = tuple(sorted(self.stop_ids))
        if not barred and self.repetition_penalty == 1.0:
            return None
        return LogitRules(self.repetition_penalty, barred)

    def within(self, context: int) -> int:
        """Return the limit of a prompt and its completion together in a model of ``context`` tokens."""
        if self.max_total_tokens is None:
            return context
        return min(context, self.max_total_tokens)


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """Options of ``Sampling`` that most requests leave as they are."""

    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def onto(self, sampling: Sampling) -> Sampling:
        """Return the sampling with these options."""
        return replace(sampling, **asdict(self))

    def given(self) -> dict[str, object]:
        """Return those that are not as they are by default."""
        return {name: value for name, value in asdict(self).items() if value != getattr(NO_RULES, name)}


NO_RULES = DecodingRules()


def read_rules(
    min_p: float | None, min_tokens: int | None, repetition_penalty: float | None, stop: str | Sequence[str] | None
) -> DecodingRules:
    """Return rules as a user gives them; None is the default of each, and a text alone is one stop text.

    Raises:
        UsageError: one of another kind or out of range, by its name.
    """
    texts: list[object] = []
    if isinstance(stop, str):
        texts = [stop]
    elif isinstance(stop, Sequence):
        texts = list(stop)
    elif stop is not None:
        texts = [stop]
    if len(texts) > MOST_STOP_TEXTS or not all(isinstance(one, str) and 0 < len(one) <= 1000 for one in texts):
        raise UsageError(
            f"stop: {stop!r:.80} is no list of at most {MOST_STOP_TEXTS} texts of 1 to 1000 characters. Give such texts"
        )
    numbers = {"min_p": (min_p, 0.0, 1.0), "min_tokens": (min_tokens, 0, math.inf)}
    numbers["repetition_penalty"] = (repetition_penalty, 1e-6, 1e6)
    for name, (value, least, most) in numbers.items():
        is_number = isinstance(value, int if name == "min_tokens" else int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value <= most):
            raise UsageError(f"{name}: {value!r:.40} is out of range. Give {least:g} to {most:g}")
    return DecodingRules(
        float(min_p or 0.0), int(min_tokens or 0), float(repetition_penalty or 1.0), tuple(str(one) for one in texts)
    )


def num_tokens_of(tokenizer: object) -> int | None:
    """Return the number of ids with a text in a tokenizer; models often have more, to fill up their embeddings."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    vocabulary = tokenizer.get_vocab()
    if vocabulary:
        return max(vocabulary.values()) + 1
    return None


Groups = list[list[Completion]]  # by prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """Ids that follow a turn, after which the model goes on, or the reason why the completion is over."""

    ids: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One completion with its prompt, of one turn or of all that an environment answered.

    ``reward``: of the environment, None without one; ``failures``: as in ``Rollout``. ``messages``: those of the
    example, with the environment's opening; None without one. ``feedback``: as in ``Rollout``.
    """

    prompt: tuple[int, ...]
    completion: Completion
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    failures: tuple[str, ...] = ()
    messages: tuple[Message, ...] | None = None
    feedback: str | None = None


class Respondent(Protocol):
    """Answers turns; a completion is named by its prompt's number and its own among that prompt's."""

    def hear(self, prompt: int, sample: int, turn: Sequence[int], finish: Finish) -> None:
        """Take the ids of a turn that has ended (``stop`` or ``length``); the reply may be made in the background."""

    def reply(self, prompt: int, sample: int) -> Reply:
        """Return the reply to the turn heard last of this completion; wait until it is there."""


def turn_key(key: int, turn: int) -> int:
    """Return the key of the random numbers of turn ``turn`` (from 0) of a completion."""
    if turn == 0:
        return key
    return derive_key(key, "turn", turn)


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
    kept_ids: list[int] = field(default_factory=list)  # the sets of all ids, one behind the other
    kept_counts: list[int] = field(default_factory=list)
    num_cut: int = 0  # sets that the bound MOST_KEPT cut

    def take_sets(self, kept: KeptSets | None, room: int) -> None:
        """Append the sets of the first ``room`` ids of a turn."""
        if kept is None:
            return
        end = kept.offsets[: room + 1][-1]
        self.kept_ids += kept.ids[:end]
        self.kept_counts += kept.counts[:room]
        self.num_cut += kept.num_cut

    @property
    def turn(self) -> list[int]:
        """The ids of the turn under way."""
        return self.ids[len(self.own) :]

    def end_turn(self) -> list[int]:
        """Mark the ids after the last reply as the model's turn, and return them."""
        turn = self.turn
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
            if self.kept_counts:
                self.kept_counts += [0] * len(reply.ids)

    def room(self, max_turn_tokens: int | None) -> int:
        """Return the number of tokens that the next turn may have."""
        left = self.limit - len(self.ids)
        if max_turn_tokens is None:
            return left
        return min(left, max_turn_tokens)

    def completion(self, version: int) -> Completion:
        """Return the finished conversation; all ids are its own where no turn was ended."""
        assert self.finish is not None, "a conversation goes on until it has finished"
        kept: KeptSets | None = None
        if self.kept_counts:
            kept = KeptSets.of_counts(self.kept_ids, self.kept_counts, self.num_cut)
        return Completion(tuple(self.ids), tuple(self.logprobs), self.finish, version, tuple(self.own) or None, kept)


def begin(
    prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], max_tokens: int, context: int
) -> list[list[Conversation]]:
    """Return a row for every key, by prompt, of at most ``max_tokens`` ids, and ``context`` with its prompt."""
    rows = []
    for i, (prompt, of_prompt) in enumerate(zip(prompts, keys, strict=True)):
        limit = min(max_tokens, context - len(prompt))
        rows.append([Conversation(i, g, key, limit) for g, key in enumerate(of_prompt)])
    return rows


class Engine(ABC):
    """Samples completions: one for every key.

    ``version``: the number of updates of the weights that sample. ``folder``: the run's, for files of the engine.
    ``process_group``: the processes that train; each has an engine and calls the same methods in the same order.
    ``in_background``: the main process alone samples, in a thread, while the model changes; the engine must then
    neither read the model nor wait for the others. ``uses_cache``: what was found out about a model before may be read
    from the user's cache folder.
    """

    version: int = 0
    folder: Path | None = None
    process_group: ProcessGroup = SINGLE_PROCESS
    in_background: bool = False
    uses_cache: bool = False
    _warnings: tuple[str, ...] = ()  # all that were ever given, of which the user has seen the first
    _num_shown: int = 0

    def settle(self, folder: Path | None, process_group: ProcessGroup) -> Engine:
        """Return the engine with its folder and processes.

        Raises:
            UsageError: a requirement of the engine is missing.
        """
        self.folder = folder
        self.process_group = process_group
        return self

    @property
    def context_tokens(self) -> int:
        """The largest number of tokens of a prompt and its completion together."""
        return UNLIMITED_CONTEXT

    def sync(self, version: int) -> None:
        """Sample with the trained model's weights after ``version`` updates; the same version is the same weights.

        Raises:
            EngineMismatch: after the transfer, the engine's log-probabilities of a fixed batch are not the model's.
            RunFailure: the weights could not be transferred.
        """
        self.version = version

    def take_parts(self, within: Within) -> None:
        """Take a model that is sharded over ``process_group``; ``within`` gathers it around a computation.

        Raises:
            UsageError: the engine computes with the model itself.
        """
        raise UsageError("scale.sharding: this engine computes with the model itself, of which each process has a part")

    def rest(self) -> None:  # noqa: B027
        """Give back the memory that the trainer needs until the next ``sync``."""

    def take_warnings(self) -> list[str]:
        """Return messages for the user since the last call."""
        warnings = self._warnings[self._num_shown :]
        self._num_shown = len(self._warnings)
        return list(warnings)

    def _say(self, message: str) -> None:
        """Give the user a message, once."""
        if message not in self._warnings:
            self._warnings += (message,)

    def close(self) -> None:  # noqa: B027
        """Give back what the engine holds (a server that it started); it may be used again."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """Return one completion per key, grouped by prompt.

        ``keys[i]`` holds a 64-bit key per completion of ``prompts[i]``: token t is drawn with the t-th uniform number
        of its key (``randomness.uniforms``), whatever else is in the batch.

        Raises:
            UsageError: an empty prompt, or one that leaves no room in the model's context.
        """

    def converse(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[int]],
        sampling: Sampling,
        respondent: Respondent,
    ) -> Groups:
        """Return one completion per key, grouped by prompt, of as many turns as ``respondent`` keeps going.

        Token t of turn k is drawn with the t-th uniform number of ``turn_key(key, k)``. A turn ends at a stop id, which
        is kept, and is then answered; one that has no room left ends its completion with ``length``.

        Raises:
            UsageError: as ``generate``, or a reply has an id that the model does not know.
        """
        assert len(prompts) == len(keys), f"{len(prompts)} prompts but keys for {len(keys)}"
        context = sampling.within(self.context_tokens)
        check_sampling(sampling)
        check_prompts(prompts, context, None)
        groups = begin(prompts, keys, sampling.max_tokens, context)
        rows = [row for group in groups for row in group]
        version = self._converse(prompts, rows, sampling, respondent)
        return [[row.completion(version) for row in group] for group in groups]

    def _converse(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[Conversation], sampling: Sampling, respondent: Respondent
    ) -> int:
        """Complete every row, by a generation over all ids before each turn; return the version that sampled."""
        version = 0
        going = list(rows)
        while going:
            rooms = [row.room(sampling.max_turn_tokens) for row in going]
            groups = self.generate(
                [[*prompts[row.prompt], *row.ids] for row in going],
                [[turn_key(row.key, row.num_turns)] for row in going],
                replace(sampling, max_tokens=max(rooms)),
            )
            for row, room, (turn,) in zip(going, rooms, groups, strict=True):
                row.ids += turn.ids[:room]
                row.logprobs += turn.logprobs[:room]
                row.take_sets(turn.kept, room)
                version = turn.version
                finish: Finish = turn.finish
                if len(turn.ids) > room:
                    finish = "length"
                if finish == "length":
                    row.finish = finish
                respondent.hear(row.prompt, row.sample, row.end_turn(), finish)
            for row in going:
                reply = respondent.reply(row.prompt, row.sample)
                if row.finish is None:
                    row.add_reply(reply)
            going = [row for row in going if row.finish is None]
        return version


def check_sampling(sampling: Sampling) -> None:
    """Refuse options out of range.

    Raises:
        UsageError: the message names the option.
    """
    if sampling.max_tokens < 1:
        raise _out_of_range("max_tokens", sampling.max_tokens, "1 or more")
    if not sampling.temperature >= 0:
        raise _out_of_range("temperature", sampling.temperature, "0 (greedy) or more")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise _out_of_range("top_k", sampling.top_k, "1 or more, or none")
    if not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise _out_of_range("min_p", sampling.min_p, "0 to 1")
    if sampling.min_tokens < 0 or sampling.min_tokens > sampling.max_tokens:
        raise _out_of_range("min_tokens", sampling.min_tokens, f"0 to max_tokens ({sampling.max_tokens})")
    if not 0 < sampling.repetition_penalty < math.inf:
        raise _out_of_range("repetition_penalty", sampling.repetition_penalty, "above 0 (1 is none)")
    if "" in sampling.stop:
        raise UsageError("sampling.stop holds an empty text, which would end every answer at once; leave it out")
    if sampling.max_turn_tokens is not None and sampling.max_turn_tokens < 1:
        raise _out_of_range("max_turn_tokens", sampling.max_turn_tokens, "1 or more, or none")


def _out_of_range(name: str, value: float, wanted: str) -> UsageError:
    return UsageError(f"sampling.{name} is {value}; it must be {wanted}")


def check_prompts(prompts: Sequence[Sequence[int]], context: int, vocab_size: int | None) -> None:
    """Refuse prompts that cannot be continued in ``context`` tokens; ``vocab_size`` None: not known here.

    Raises:
        UsageError: the message names the prompt.
    """
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UsageError(f"prompt {i} is empty: a model needs at least one token to continue from")
        if len(prompt) >= context:
            raise UsageError(
                f"prompt {i} has {len(prompt)} tokens and the model's context is {context}: no room for a completion. "
                "Shorten it, or drop such prompts with prompt.max_prompt_tokens"
            )
        check_ids(f"prompt {i}", prompt, vocab_size)


def check_ids(what: str, ids: Sequence[int], vocab_size: int | None) -> None:
    """Refuse ids that the model does not know.

    Raises:
        UsageError: the message begins with ``what``.
    """
    if min(ids) < 0:
        raise UsageError(f"{what} has token id {min(ids)}; ids are 0 or more")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise UsageError(
            f"{what} has token id {max(ids)} but the model's vocabulary has {vocab_size} entries; "
            "tokenizer and model do not belong together"
        )
