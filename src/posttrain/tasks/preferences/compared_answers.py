"""Two answers to an instruction, compared by a model (UltraFeedback)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.preferences.rows import read_pair, require
from posttrain.tasks.reader import Split, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.types import Example

SCORES = ("score_chosen", "score_rejected")


@register("task", held_out="validation")
@reads_rows
def ultrafeedback(
    *,
    split: Split = "train",
    path: str | None = None,
    hub: str = "HuggingFaceH4/ultrafeedback_binarized",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.02,
    strip_thinking: bool = False,
) -> Task:
    """Pairs of UltraFeedback from the hub, or from a local file in the binarized layout.

    Keys: ``prompt``; ``chosen`` and ``rejected`` (text, or the whole conversation as a list of messages);
    ``score_chosen`` and ``score_rejected``, from 1 to 10. Cui et al. (2023), "UltraFeedback: boosting language models
    with high-quality feedback". GPT-4 gave the scores: the chosen answer is the best of four, the rejected
    one of the others. The difference of the scores is the pair's margin.

    Dropped and counted: equal scores (about one pair in ten), equal answers, and whatever is blank or missing.

    Args:
        split: ``validation`` is a part of the training prompts chosen by a hash, and ``train`` is the rest. ``test`` of
            a local file is the whole file. On the hub these are ``train_prefs`` and ``test_prefs``.
        validation_share: share of the training prompts that is held out.
        strip_thinking: leave ``<think>`` … ``</think>`` out of the answers.
    """
    rows, place = read_source(path, hub, None, "test_prefs" if split == "test" else "train_prefs")
    collected = collect(rows, lambda row: read_example(row, split, strip_thinking=strip_thinking), place)
    return collected.as_task("ultrafeedback", place, split, validation_share)


def read_example(row: Row, split: str, *, strip_thinking: bool = False) -> Example:
    """One row as a pair.

    Raises:
        Dropped: the row cannot be used.
        DataError: a key has the wrong type.
    """
    for key in SCORES:
        require(row, key)
    messages, responses = read_pair(row, scores=SCORES, strip_thinking=strip_thinking)
    return Example(f"ultrafeedback/{split}/{row.line}", messages, responses=responses)
