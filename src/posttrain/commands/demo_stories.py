"""The stories that ``posttrain demo`` tells: which recipes, what is said of them, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

StoryName = Literal["reasoning", "tools"]
Results = Mapping[str, float]


@dataclass(frozen=True)
class Story:
    """Three models of one story: ``tiny``, what demonstrations made of it, and what reward made of that.

    ``sft``, ``grpo``: recipes; their runs are called ``run`` with ``-sft`` and ``-grpo`` behind it. ``texts`` are said
    before each of the three, ``descriptions`` stand beside their figures; ``told``: which results of the evaluation are
    told as well, and what is said of each share. ``outcome`` tells in one sentence, from the
    figures before and after reinforcement learning, what it changed.
    """

    run: str
    sft: str
    grpo: str
    title: str
    lead: str
    texts: tuple[str, str, str]
    descriptions: tuple[str, str, str]
    outcome: Callable[[Results, Results], str]
    told: Mapping[str, str] = field(default_factory=dict)


def reasoning_outcome(before: Results, after: Results) -> str:
    """Whether working step by step was discovered."""
    change = f"right answers went from {before['accuracy']:.0%} to {after['accuracy']:.0%}"
    if "worked" in before and "worked" in after:
        change += f", answers that show their working from {before['worked']:.0%} to {after['worked']:.0%}"
    if after["accuracy_low"] > before["accuracy_high"]:
        return f"It discovered that working step by step pays: {change}."
    return f"In this run it found nothing that the intervals could tell from chance: {change}."


def tools_outcome(before: Results, after: Results) -> str:
    """Whether it was discovered when a call pays."""
    large, small = (f"{size}:accuracy" for size in ("large", "small"))
    change = (
        f"of the large sums {before[large]:.0%} were right before and {after[large]:.0%} after, with "
        f"{after['large:called']:.0%} of them computed by the tool; of the small ones {before[small]:.0%} and "
        f"{after[small]:.0%}, with {after['small:called']:.0%} computed by the tool"
    )
    if after[f"{large}_low"] > before[f"{large}_high"] and after["small:called_high"] < after["large:called_low"]:
        return f"It discovered when a tool pays: {change}."
    return f"In this run it did not find out when a tool pays, as far as the intervals tell: {change}."


STORIES: Mapping[StoryName, Story] = {
    "reasoning": Story(
        run="demo",
        sft="tiny/sft",
        grpo="tiny/grpo-demo",
        title="A small model learns to reason",
        lead=(
            "A language model of under a million parameters, trained on this machine in minutes. First it copies a "
            "format from demonstrations that mostly guess. Then reinforcement learning only says right or wrong. "
        ),
        texts=(
            "`tiny` is a language model of under a million parameters that ships with this package. It has read "
            "little stories and worked sums, nothing else: it completes text and does not know what a question is.",
            "It now copies demonstrations of the format <think> ... </think> <answer> ... </answer>. Most of them "
            "guess the answer at once, only some write down their steps; so it learns the format, and mostly to guess.",
            "Nothing is demonstrated any more. For each problem the model writes several answers; those that are right "
            "earn a reward, and whatever made them right becomes likelier. Watch accuracy, length and the share of "
            "worked answers: does it discover that working step by step pays?",
        ),
        descriptions=(
            "has read stories and sums; was never asked anything",
            "knows the format; mostly guesses",
            "was only ever told right or wrong",
        ),
        outcome=reasoning_outcome,
    ),
    "tools": Story(
        run="demo-tools",
        sft="tiny/sft-calculator",
        grpo="tiny/grpo-calculator",
        title="A small model learns when to use a tool",
        lead=(
            "A language model of under a million parameters, trained on this machine in minutes. It can do small sums "
            "in its head and no large ones. Demonstrations show how a calculator is called, and not when. Then "
            "reinforcement learning says right or wrong, and a call costs a little. "
        ),
        texts=(
            "`tiny` is a language model of under a million parameters that ships with this package. It has read sums "
            "of numbers below a hundred. It does not know what a question is, and has never met a tool.",
            "It now copies demonstrations. Most write the sum down and answer; one in four, of small numbers and "
            "large ones alike, calls a calculator with <tool>calculator: ...</tool>, reads its result, and answers. "
            "So it learns how a tool is called, and to call none unless chance will have it.",
            "Nothing is demonstrated any more. A right answer earns 1, and a call costs 0.1. Watch the calls for small "
            "sums and for large ones: does it discover when a call is worth its price?",
        ),
        descriptions=(
            "has read small sums; was never asked anything",
            "was shown a few calls, whatever the numbers",
            "was told right or wrong; a call costs a little",
        ),
        outcome=tools_outcome,
        told={
            "small:accuracy": "of the small sums",
            "small:called": "of these by a call",
            "large:accuracy": "of the large ones",
            "large:called": "of these by a call",
        },
    ),
}
