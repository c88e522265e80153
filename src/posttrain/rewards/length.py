"""Rewards for the length of a completion, and for being cut off."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.errors import UsageError
from posttrain.registry import register
from posttrain.types import TRUNCATED


@register("reward")
def overlong(num_tokens: int, *, limit: Annotated[int, Field(ge=1)], cache: Annotated[int, Field(ge=1)]) -> float:
    """0 up to ``limit − cache`` tokens, then falling linearly to −1 at ``limit``.

    With L tokens (the end token included)::

        r = 0                             L ≤ limit − cache
        r = (limit − cache − L) / cache   limit − cache < L ≤ limit
        r = −1                            L > limit

    Args:
        limit: L_max, the length that is punished in full; usually ``rollout.max_tokens``.
        cache: L_cache, the width of the soft margin below it.

    Source: soft overlong punishment, DAPO (Yu et al. 2025), equation 13.

    Raises:
        UsageError: ``cache`` is larger than ``limit``.
    """
    if cache > limit:
        raise UsageError(f"reward overlong: cache ({cache}) is larger than limit ({limit}); it is the margin below it")
    if num_tokens > limit:
        return -1.0
    return min(0.0, (limit - cache - num_tokens) / cache)


@register("reward")
def truncated(finish: str) -> float:
    """−1 for a completion that a limit cut off, 0 for one that came to its end.

    The flat penalty, whatever the length: of tokens (``length``), turns (``out_of_turns``) or the seconds of a call
    (``tool_failed``). ``overlong`` looks at the number of tokens alone, so that an answer that ends with the last token
    that it may have pays as well, and one that a prompt, a turn or a tool cut off before does not.

    Source: the "punitive reward to truncated samples" from which DAPO starts (Yu et al. 2025, section 3.4).
    """
    return -1.0 if finish in TRUNCATED else 0.0
