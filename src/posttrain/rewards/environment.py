"""What an environment pays, and what calls cost."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.errors import RewardFailure
from posttrain.registry import register
from posttrain.types import Turn


@register("reward")
def environment(environment_reward: float | None) -> float:
    """What the environment's ``get_reward()`` says at the end of the episode.

    Raises:
        RewardFailure: the recipe has no environment, or one without ``get_reward``.
    """
    if environment_reward is None:
        raise RewardFailure("reward environment: there is no environment with get_reward; name one in the recipe")
    return environment_reward


@register("reward")
def tool_calls(turns: Sequence[Turn]) -> float:
    """How many calls of tools were made, the malformed ones included; with a negative weight they cost something."""
    return float(sum(len(turn.calls) for turn in turns))


@register("reward")
def turn_rewards(turns: Sequence[Turn]) -> float:
    """The sum of what the environment's ``get_turn_reward()`` said behind each turn.

    Advantages per completion see the sum. ``turn_normalized``, and those per token (``return_to_go``, ``gae``), see
    each at the last token of its turn; all other rewards are paid at the end.
    """
    return sum(turn.reward or 0.0 for turn in turns)
