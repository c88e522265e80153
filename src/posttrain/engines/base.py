"""The one seam between sampling and everything else: token ids in, completions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from posttrain.errors import UsageError
from posttrain.types import Completion


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    ``temperature`` 0 is greedy. Log-probabilities are always those of the full distribution at
    ``temperature`` (at 1 when greedy), before truncation by ``top_k`` or ``top_p``. Generation
    ends at any of ``stop_ids`` (kept as the completion's last id) or after ``max_tokens``. With ``max_total_tokens``
    a prompt and its completion together have no more than these, and a longer prompt has no room.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    max_total_tokens: int | None = None

    def within(self, context: int) -> int:
        """How long a prompt and its completion may be together in a model of ``context`` tokens."""
        return context if self.max_total_tokens is None else min(context, self.max_total_tokens)


@runtime_checkable
class Engine(Protocol):
    """Samples completions. An engine never drops a row: every key gives one completion."""

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """One completion per key, grouped by prompt.

        ``keys[i]`` holds one 64-bit key per completion of ``prompts[i]``: token t of a completion
        is drawn with the t-th uniform number of its key (``randomness.uniforms``), so it does not
        depend on what else is in the batch.

        Raises:
            UsageError: an empty prompt, or one that leaves no room in the model's context.
        """
        ...


def check_sampling(sampling: Sampling) -> None:
    """Refuse options out of range.

    Raises:
        UsageError: the message names the option.
    """
    checks = {
        "max_tokens": (sampling.max_tokens >= 1, "1 or more"),
        "temperature": (sampling.temperature >= 0, "0 (greedy) or more"),
        "top_k": (sampling.top_k is None or sampling.top_k >= 1, "1 or more, or none"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
    }
    for name, (valid, wanted) in checks.items():
        if not valid:
            raise UsageError(f"sampling.{name} is {getattr(sampling, name)}; it must be {wanted}")


def check_prompts(prompts: Sequence[Sequence[int]], context: int, vocab_size: int | None) -> None:
    """Refuse prompts that cannot be continued in ``context`` tokens; None: the vocabulary is not known here.

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
        if min(prompt) < 0:
            raise UsageError(f"prompt {i} has token id {min(prompt)}; ids are 0 or more")
        if vocab_size is not None and max(prompt) >= vocab_size:
            raise UsageError(
                f"prompt {i} has token id {max(prompt)} but the model's vocabulary has {vocab_size} entries; "
                "tokenizer and model do not belong together"
            )
