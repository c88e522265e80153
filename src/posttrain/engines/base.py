"""The one seam between sampling and everything else: token ids in, completions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from posttrain.types import Completion


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    ``temperature`` 0 is greedy. Log-probabilities are always those of the full distribution at
    ``temperature`` (at 1 when greedy), before truncation by ``top_k`` or ``top_p``. Generation
    ends at any of ``stop_ids`` (kept as the completion's last id) or after ``max_tokens``.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()


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
