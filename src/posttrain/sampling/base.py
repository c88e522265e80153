"""Sampling interface: token ids in, completions out.

A multi-turn conversation is one growing id sequence: sampled ids remain unchanged, and replies are appended.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from posttrain.errors import UsageError
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup, Within
from posttrain.randomness import derive_key
from posttrain.types import Completion, ExpertChoices, Finish, KeptSets, LogitRules, Message, Turn

if TYPE_CHECKING:
    from torch import Tensor

UNLIMITED_CONTEXT = 1 << 31
SMALLEST_TEMPERATURE = 1e-5  # anything below is greedy, as in vLLM
# Maximum kept set size, as in prime-rl (pull request 3235): truncates to the most likely tokens.
MOST_KEPT = 512
MOST_STOP_TEXTS = 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options.

    ``temperature``: 0, or anything below ``SMALLEST_TEMPERATURE``, is greedy. Truncation matches vLLM: keep tokens
    with at least ``min_p`` times the largest probability, then the ``top_k`` most likely, then the smallest nucleus
    reaching ``top_p``. Log-probabilities use the full distribution at ``temperature`` (1 if greedy), before
    truncation. With ``keeps_sets``, completions include their kept sets, at most ``MOST_KEPT`` tokens each, and
    log-probabilities are normalized over them. With ``keeps_experts``, completions include the experts chosen by the
    model's routers.

    Generation ends at any ``stop_ids`` token, which is kept, or after ``max_tokens``. ``max_total_tokens`` limits
    prompt plus completion. ``max_turn_tokens`` limits each turn; ``max_tokens`` then covers all turns and replies.
    ``num_tokens``: size of the tokenizer vocabulary; larger ids have no text and are never sampled.

    ``min_tokens``: no stop id is sampled before this many tokens in each answer or turn. ``repetition_penalty``: see
    ``LogitRules``. Both are applied before log-probabilities are computed. ``stop``: texts that also end an answer or
    turn; they are kept.
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
    keeps_experts: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def is_truncated(self) -> bool:
        """True if top-k, top-p or min-p is active."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def rules(self) -> LogitRules | None:
        """Active logit rules, or None."""
        barred: tuple[int, ...] = ()
        if self.min_tokens > 0:
            barred = tuple(sorted(self.stop_ids))
        if not barred and self.repetition_penalty == 1.0:
            return None
        return LogitRules(self.repetition_penalty, barred)

    def within(self, context: int) -> int:
        """Limit for prompt plus completion, given a model context of ``context`` tokens."""
        if self.max_total_tokens is None:
            return context
        return min(context, self.max_total_tokens)


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """``Sampling`` options that most requests leave at their defaults."""

    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def onto(self, sampling: Sampling) -> Sampling:
        """Copy ``sampling`` with these options applied."""
        return replace(sampling, **asdict(self))

    def given(self) -> dict[str, object]:
        """Select options that differ from their defaults."""
        return {name: value for name, value in asdict(self).items() if value != getattr(NO_RULES, name)}


NO_RULES = DecodingRules()


def read_rules(
    min_p: float | None, min_tokens: int | None, repetition_penalty: float | None, stop: str | Sequence[str] | None
) -> DecodingRules:
    """Validate user-supplied rules. None selects a default, and a string becomes a list with one stop text.

    Raises:
        UsageError: names an option with the wrong type or out of range.
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
            f"stop: {stop!r:.80} is not a list with at most {MOST_STOP_TEXTS} strings. Give strings of 1 to 1000 "
            "characters"
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
    """Count tokenizer ids. Models often have more, because embeddings are padded."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    vocabulary = tokenizer.get_vocab()
    if vocabulary:
        return max(vocabulary.values()) + 1
    return None


Groups = list[list[Completion]]  # by prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply ids appended after a turn, or a reason to finish."""

    ids: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """A completion and its prompt, possibly with several turns.

    ``reward``: from an environment; None without one. ``metrics``: its further numbers. ``messages``: example messages
    plus the environment's opening; None without an environment. ``failures`` and ``feedback``: see ``Rollout``.
    """

    prompt: tuple[int, ...]
    completion: Completion
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    failures: tuple[str, ...] = ()
    messages: tuple[Message, ...] | None = None
    feedback: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Respondent(Protocol):
    """Replies to turns. Completions are identified by prompt index and sample index."""

    def hear(self, prompt: int, sample: int, turn: Sequence[int], finish: Finish) -> None:
        """Receive the ids of a finished turn (``stop`` or ``length``). A reply may be computed in the background."""

    def reply(self, prompt: int, sample: int) -> Reply:
        """Wait for a reply to the latest turn."""


def turn_key(key: int, turn: int) -> int:
    """Derive a random key for turn ``turn`` (from 0)."""
    if turn == 0:
        return key
    return derive_key(key, "turn", turn)


@dataclass(slots=True)
class Conversation:
    """A multi-turn completion in progress, limited to ``limit`` ids including environment replies."""

    prompt: int
    sample: int
    key: int
    limit: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    num_turns: int = 0
    finish: Finish | None = None
    kept_ids: list[int] = field(default_factory=list)  # all kept sets, concatenated
    kept_counts: list[int] = field(default_factory=list)
    num_cut: int = 0  # sets truncated to MOST_KEPT
    experts: list[Tensor] = field(default_factory=list)  # chosen at positions read so far, int16 [positions, ...]

    def take_sets(self, kept: KeptSets | None, room: int) -> None:
        """Append kept sets for the first ``room`` ids in a turn."""
        if kept is None:
            return
        end = kept.offsets[: room + 1][-1]
        self.kept_ids += kept.ids[:end]
        self.kept_counts += kept.counts[:room]
        self.num_cut += kept.num_cut

    @property
    def turn(self) -> list[int]:
        """Ids in the current turn."""
        return self.ids[len(self.own) :]

    def end_turn(self) -> list[int]:
        """Mark ids after the last reply as sampled, and return them."""
        turn = self.turn
        self.own += [True] * len(turn)
        self.num_turns += 1
        return turn

    def add_reply(self, reply: Reply) -> None:
        """Append a complete reply, or finish with ``length`` if no room would remain for another turn."""
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
        """Number of tokens available to the next turn."""
        left = self.limit - len(self.ids)
        if max_turn_tokens is None:
            return left
        return min(left, max_turn_tokens)

    def completion(self, version: int) -> Completion:
        """Build the completion once finished. Without turns, all ids count as sampled."""
        assert self.finish is not None, "not finished yet"
        kept: KeptSets | None = None
        if self.kept_counts:
            kept = KeptSets.of_counts(self.kept_ids, self.kept_counts, self.num_cut)
        experts: ExpertChoices | None = None
        if self.experts:
            import torch

            experts = ExpertChoices.of(torch.cat(self.experts))
        own = tuple(self.own) or None
        return Completion(tuple(self.ids), tuple(self.logprobs), self.finish, version, own, kept, experts)


def begin(
    prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], max_tokens: int, context: int
) -> list[list[Conversation]]:
    """Start conversations grouped by prompt, limited by ``max_tokens`` and remaining context."""
    rows = []
    for i, (prompt, of_prompt) in enumerate(zip(prompts, keys, strict=True)):
        limit = min(max_tokens, context - len(prompt))
        rows.append([Conversation(i, g, key, limit) for g, key in enumerate(of_prompt)])
    return rows


class Engine(ABC):
    """Samples one completion per key.

    ``version``: number of updates applied to the sampling weights. ``folder``: run folder for engine files.
    ``process_group``: training processes; each owns an engine and makes identical calls in order. ``uses_cache``:
    allow earlier findings about a model to be read from the user's cache.

    With staleness, an engine registered with ``takes_weights`` is called in a thread of the main process while training
    changes the model. It must then neither read the model nor wait for other processes.
    """

    version: int = 0
    folder: Path | None = None
    process_group: ProcessGroup = SINGLE_PROCESS
    uses_cache: bool = False
    _warnings: tuple[str, ...] = ()  # every warning so far; the first ``_num_shown`` were shown
    _num_shown: int = 0

    def settle(self, folder: Path | None, process_group: ProcessGroup) -> Engine:
        """Configure the run folder and process group, and return this engine.

        Raises:
            UsageError: an engine requirement is missing.
        """
        self.folder = folder
        self.process_group = process_group
        return self

    @property
    def context_tokens(self) -> int:
        """Maximum tokens for prompt plus completion."""
        return UNLIMITED_CONTEXT

    def sync(self, version: int) -> None:
        """Update to the trained weights after ``version`` updates. Each version identifies one set of weights.

        Raises:
            EngineMismatch: after the transfer, log-probabilities on a fixed batch differ from the trained model.
            RunFailure: weight transfer failed.
        """
        self.version = version

    def take_parts(self, within: Within) -> None:
        """Accept a model sharded across ``process_group``; ``within`` gathers it for a computation.

        Raises:
            UsageError: this engine runs the model directly.
        """
        raise UsageError("scale.sharding: this engine runs the model directly, but each process holds only a shard")

    def rest(self) -> None:  # noqa: B027
        """Release memory needed by the trainer until the next ``sync``."""

    def take_warnings(self) -> list[str]:
        """Collect user messages since the last call."""
        warnings = self._warnings[self._num_shown :]
        self._num_shown = len(self._warnings)
        return list(warnings)

    def _say(self, message: str) -> None:
        """Queue a user message unless already given."""
        if message not in self._warnings:
            self._warnings += (message,)

    def close(self) -> None:  # noqa: B027
        """Release resources such as a started server. The engine may be reused."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """Sample one completion per key, grouped by prompt.

        ``keys[i]`` holds one 64-bit key per completion for ``prompts[i]``. Token t uses the t-th uniform number from
        its key (``randomness.uniforms``), independent of batch composition.

        Raises:
            UsageError: empty prompt, or no room left in the model's context.
        """

    def converse(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[int]],
        sampling: Sampling,
        respondent: Respondent,
    ) -> Groups:
        """Sample multi-turn completions, one per key and grouped by prompt, until ``respondent`` finishes each.

        Token t in turn k uses the t-th uniform number from ``turn_key(key, k)``. Turns end at a stop id, which is
        kept, and then receive a reply. Completions without remaining room finish with ``length``.

        Raises:
            UsageError: see ``generate``, or a reply contains an unknown id.
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
        """Complete every row by generating each turn from all previous ids. Returns the sampling version."""
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
    """Refuse sampling options out of range.

    Raises:
        UsageError: names the option.
    """
    if sampling.max_tokens < 1:
        raise _out_of_range("max_tokens", sampling.max_tokens, "1 or more")
    if not sampling.temperature >= 0:
        raise _out_of_range("temperature", sampling.temperature, "0 (greedy) or more")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise _out_of_range("top_k", sampling.top_k, "1 or more, or none")
    if not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "above 0, at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise _out_of_range("min_p", sampling.min_p, "0 to 1")
    if sampling.min_tokens < 0 or sampling.min_tokens > sampling.max_tokens:
        raise _out_of_range("min_tokens", sampling.min_tokens, f"0 to max_tokens ({sampling.max_tokens})")
    if not 0 < sampling.repetition_penalty < math.inf:
        raise _out_of_range("repetition_penalty", sampling.repetition_penalty, "above 0 (1 is none)")
    if "" in sampling.stop:
        raise UsageError("sampling.stop contains an empty string, which would stop immediately; remove it")
    if sampling.max_turn_tokens is not None and sampling.max_turn_tokens < 1:
        raise _out_of_range("max_turn_tokens", sampling.max_turn_tokens, "1 or more, or none")


def _out_of_range(name: str, value: float, wanted: str) -> UsageError:
    return UsageError(f"sampling.{name} is {value}; it must be {wanted}")


def check_prompts(prompts: Sequence[Sequence[int]], context: int, vocab_size: int | None) -> None:
    """Refuse prompts that leave no room in ``context`` tokens. ``vocab_size`` None skips the vocabulary check.

    Raises:
        UsageError: names the prompt.
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
    """Refuse ids outside the vocabulary.

    Raises:
        UsageError: begins with ``what``.
    """
    if min(ids) < 0:
        raise UsageError(f"{what} has token id {min(ids)}; ids must be 0 or more")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise UsageError(
            f"{what} has token id {max(ids)} but the model's vocabulary has {vocab_size} entries; "
            "tokenizer and model do not belong together"
        )
