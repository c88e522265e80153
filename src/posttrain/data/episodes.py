"""Prompts with the same words: the environment asks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.data.base import ExamplesOnDemand, Task
from posttrain.option_types import Seed
from posttrain.registry import register
from posttrain.types import Example, Message


@register("task", held_out="validation", played=True)
def episodes(
    *,
    prompt: str = "Let's play.",
    split: Literal["train", "validation", "test"] = "train",
    size: Annotated[int, Field(ge=1)] = 1024,
    seed: Seed = 0,
) -> Task:
    """The same words for every episode of an ``environment``, which opens each with a text that follows from its seed.

    There is no answer to grade: the reward ``environment`` is what an episode was paid.

    Args:
        prompt: the user's words before the environment's.
        split: episodes of another name, and so of other seeds; an environment may hold out beginnings by it.
        size: number of episodes; the environment is seeded anew each time that one is played.
        seed: names other episodes.
    """

    def make(item: int) -> Example:
        return Example(f"episodes/{split}/{seed}/{item}", (Message("user", prompt),), meta={"split": split})

    return Task("episodes", split, ExamplesOnDemand(size, make))
