"""Rewards for a right answer, for its form and length, and what an environment pays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from posttrain.errors import RewardFailure, UsageError
from posttrain.graders.answers import last_boxed
from posttrain.graders.grading import Submission, Verdict, grade, is_blank
from posttrain.registry import register
from posttrain.types import TRUNCATED, Turn


@register("reward", batched=True, words={"mode": "grader"})
def correct(
    text: Sequence[str],
    extracted: Sequence[str | None],
    answer: Sequence[str | None],
    grader: Sequence[str],
    meta: Sequence[Mapping[str, Any]],
    *,
    mode: str | dict[str, Any] = "auto",
    tolerance: Annotated[float, Field(ge=0)] = 0.0,
) -> list[Verdict]:
    """1 if the answer equals the gold answer, else 0; also 0 without an answer or gold, or if grading was stopped.

    ``r = 1[grader(completion, gold) = right]``.

    Args:
        mode: ``auto`` is the grader that the task names; or a grader's name, or a mapping with ``name`` and options
            (``{name: multiple_choice}``). `posttrain explain grader` lists them.
        tolerance: for graders of numbers, the largest absolute difference that still counts as equal.

    Source: the accuracy reward of DeepSeek-R1 (Guo et al. 2025), section 2.2.2.

    Raises:
        RecipeError: a tolerance, and a grader that has none.
    """
    options = {} if isinstance(mode, str) else {key: value for key, value in mode.items() if key != "name"}
    if tolerance:
        options = {"tolerance": tolerance} | options
    fixed = mode if isinstance(mode, str) else str(mode["name"])
    names = list(grader) if fixed == "auto" else [fixed] * len(grader)
    submissions = [Submission(*parts) for parts in zip(text, extracted, answer, meta, strict=True)]
    verdicts: dict[int, Verdict] = {}
    for name in dict.fromkeys(names):
        places = [i for i, own in enumerate(names) if own == name]
        graded = grade(name, [submissions[i] for i in places], options)
        verdicts.update(zip(places, graded, strict=True))
    return [verdicts[i] for i in range(len(submissions))]


@register("reward")
def boxed_format(text: str) -> float:
    """1 if the text has a complete ``\\boxed{…}`` in which something can be seen, else 0."""
    return float(not is_blank(last_boxed(text) or ""))


@register("reward")
def xml_format(text: str, tags: tuple[str, ...]) -> float:
    """1 if the text is exactly one reasoning block followed by exactly one answer block, else 0.

    ``r = 1[text = ␣ <r> … </r> ␣ <a> … </a> ␣]`` where ␣ is white space, each of the four marks stands once, and
    something can be seen in the answer. The reasoning may be empty. Text before, between or after the blocks, repeated
    or reversed tags give 0.

    Source: the format reward of DeepSeek-R1 (Guo et al. 2025), section 2.2.2.

    Raises:
        UsageError: the template has no tags.
    """
    open_r, close_r, open_a, close_a = _marks(tags, "xml_format")
    if any(text.count(mark) != 1 for mark in (open_r, close_r, open_a, close_a)):
        return 0.0
    before, _, rest = text.partition(open_r)
    _, _, rest = rest.partition(close_r)
    between, _, rest = rest.partition(open_a)
    answer, closed, after = rest.partition(close_a)
    if not closed or is_blank(answer):
        return 0.0
    return 0.0 if before.strip() or between.strip() or after.strip() else 1.0


@register("reward")
def xml_soft(text: str, tags: tuple[str, ...]) -> float:
    """1 if a reasoning block followed by an answer block stands anywhere in the text, else 0.

    ``r = 1[text contains <r> … </r> ␣ <a> … </a>]``, with something to be seen in the answer; more text and more
    blocks may stand around.

    Source: the soft format reward of the widely shared GSM8K GRPO notebooks, without its weight of 0.5.

    Raises:
        UsageError: the template has no tags.
    """
    open_r, close_r, open_a, close_a = _marks(tags, "xml_soft")
    start = text.find(open_r)
    if start < 0:
        return 0.0
    for turn in re.compile(re.escape(close_r) + r"\s*" + re.escape(open_a)).finditer(text, start + len(open_r)):
        end = text.find(close_a, turn.end())
        if end < 0:
            break
        if not is_blank(text[turn.end() : end]):
            return 1.0
    return 0.0


@register("reward")
def xml_count(text: str, tags: tuple[str, ...], *, trailing: Annotated[float, Field(ge=0)] = 0.002) -> float:
    """A quarter for each of the four marks that stands exactly once, less a little per trailing character.

    ``r = max(0, (1/4) Σ 1[mark stands once] − trailing · n)``, n characters after the answer block but for white space
    at the end. It never looks at what stands between the marks: an empty answer loses nothing.

    Args:
        trailing: the deduction per character behind ``</answer>``.

    Source: the count reward of the widely shared GSM8K GRPO notebooks (0.125 per mark, 0.001 per character), scaled to
    1. Departure: never below 0.

    Raises:
        UsageError: the template has no tags.
    """
    marks = _marks(tags, "xml_count")
    score = sum(text.count(mark) == 1 for mark in marks) / 4
    _, closed, after = text.rpartition(marks[3])
    excess = len(after.rstrip()) if closed else 0
    return max(0.0, score - trailing * excess)


def _marks(tags: tuple[str, ...], reward: str) -> tuple[str, str, str, str]:
    if len(tags) != 2:
        raise UsageError(
            f"reward {reward} needs a prompt template with tags for reasoning and answer; "
            "set prompt.template to r1_zero or xml_reasoning, or leave the reward out"
        )
    reasoning, answer = tags
    return f"<{reasoning}>", f"</{reasoning}>", f"<{answer}>", f"</{answer}>"


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

    The flat penalty, whatever the limit: of tokens (``length``), turns (``out_of_turns``) or the seconds of a call
    (``tool_failed``).

    Source: the "punitive reward to truncated samples" from which DAPO starts (Yu et al. 2025, section 3.4).
    """
    return -1.0 if finish in TRUNCATED else 0.0


@register("reward")
def environment(environment_reward: float | None) -> float:
    """Return the environment's ``get_reward()`` at the end of the episode.

    Raises:
        RewardFailure: the recipe has no environment, or one without ``get_reward``.
    """
    if environment_reward is None:
        raise RewardFailure("reward environment: there is no environment with get_reward; name one in the recipe")
    return environment_reward


@register("reward")
def tool_calls(turns: Sequence[Turn]) -> float:
    """The number of calls of tools, the malformed ones included; with a negative weight they cost something."""
    return float(sum(len(turn.calls) for turn in turns))


@register("reward")
def turn_rewards(turns: Sequence[Turn]) -> float:
    """The sum of what the environment's ``get_turn_reward()`` said behind each turn.

    Advantages per completion see the sum. ``turn_normalized``, and those per token (``return_to_go``, ``gae``), see
    each at the last token of its turn; all other rewards are paid at the end.
    """
    return sum(turn.reward or 0.0 for turn in turns)
