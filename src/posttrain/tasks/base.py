"""What a task is: examples with answers, and what had to be dropped to get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.types import Example


@dataclass(frozen=True)
class Task:
    """Examples of one split of a task.

    ``examples`` may be made on demand; the same index always gives the same example. ``dropped``
    counts rows that were left out, by reason. ``worked`` says whether a text shows written
    working, where the task can tell (evaluation then reports the share of such answers).
    """

    name: str
    split: str
    examples: Sequence[Example]
    dropped: dict[str, int] = field(default_factory=dict)
    worked: Callable[[str], bool] | None = None
