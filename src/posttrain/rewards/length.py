"""Rewards for the length of a completion."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.errors import UsageError
from posttrain.registry import register


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
