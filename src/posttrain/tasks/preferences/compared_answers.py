"""Two answers to an instruction, compared by people (LLMBar, PandaLM) or by a model (UltraFeedback)."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from typing import Annotated, Any

from pydantic import Field

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.preferences.rows import read_pair, read_prompt, require
from posttrain.tasks.reader import Dropped, Split, collect, reads_rows
from posttrain.tasks.reading import Row, read_file, read_source
from posttrain.types import Example, Message, Response

ANNOTATORS = ("annotator1", "annotator2", "annotator3")


@register("task")
@reads_rows
def llmbar(*, path: str) -> Task:
    """LLMBar from a local file: pairs of which one follows the instruction; the other often reads better.

    Zeng et al. (2023), "Evaluating large language models at evaluating instruction following". Keys: ``input`` (the
    instruction), ``output_1``, ``output_2``, ``label`` (1 or 2: the better one) and maybe ``subset``, kept in meta.
    There is one split. Dropped and counted: equal or blank outputs.
    """

    def read(row: Row) -> Example:
        label = row.data.get("label")
        if label not in (1, 2) or isinstance(label, bool):
            raise row.fail(f"'label' must be 1 or 2; got {label!r}")
        return Example(
            id=f"llmbar/{row.line}",
            messages=(Message("user", row.text("input").strip()),),
            responses=compared(row, ("output_1", "output_2"), label),
            meta={"subset": row.text("subset")} if row.has("subset") else {},
        )

    return collect(read_file(path), read, path).as_task("llmbar", path)


@register("task")
@reads_rows
def pandalm(*, path: str) -> Task:
    """PandaLM's human test set from a local file: answers of small models, compared by three annotators.

    Wang et al. (2023), "PandaLM: an automatic evaluation benchmark for LLM instruction tuning optimization". Keys:
    ``instruction``, ``input`` (may be blank), ``response1``, ``response2``, ``annotator1`` to ``annotator3`` (1 or 2:
    the better one; 0: a tie) and maybe ``motivation_app``, kept in meta as ``source``. The better answer is the one
    that at least two annotators named. An answer that is a number or a truth value stands for its text, as the
    published file has a few. There is one split. Dropped and counted: ties, no majority, equal or blank answers.
    """

    def read(row: Row) -> Example:
        votes: list[Any] = [row.data.get(key) for key in ANNOTATORS]
        if any(vote not in (0, 1, 2) or isinstance(vote, bool) for vote in votes):
            raise row.fail(f"{', '.join(ANNOTATORS)} must each be 0, 1 or 2; got {votes}")
        verdict, count = Counter(votes).most_common(1)[0]
        if count == 1:
            raise Dropped("no two annotators agree")
        if verdict == 0:
            raise Dropped("a tie")
        return Example(
            id=f"pandalm/{row.line}",
            messages=read_prompt(row),
            responses=compared(row, ("response1", "response2"), verdict),
            meta={"source": row.text("motivation_app")} if row.has("motivation_app") else {},
        )

    return collect(read_file(path), read, path).as_task("pandalm", path)


def compared(row: Row, keys: tuple[str, str], better: int) -> tuple[Response, Response]:
    """The better answer (the first or the second, counted from 1) with score 1, then the other with score 0.

    Raises:
        Dropped: one is missing or blank, or both are the same.
        DataError: one is neither text nor a number nor a truth value.
    """
    for key in keys:
        require(row, key)
        if isinstance(row.data[key], float) and not isfinite(row.data[key]):
            raise row.fail(f"{key!r} must be text, a number or a truth value; got {row.data[key]!r}")
    first, second = (
        str(row.data[key]) if isinstance(row.data[key], bool | int | float) else row.text(key) for key in keys
    )
    if first == second:
        raise Dropped("both answers are the same")
    chosen, rejected = (first, second) if better == 1 else (second, first)
    return Response(chosen, 1.0), Response(rejected, 0.0)


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
