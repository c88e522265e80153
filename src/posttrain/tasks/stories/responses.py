"""Given answers to stories: the right working, and one with a slip that is carried on consistently.

Only arithmetic tells the two apart. They have the same equations in the same order with the same
signs, the same numbers of the story, equal length to the character, every number within the task's
range, every division without remainder. One result is wrong; what is worked out from it follows from
it rightly, and so does the final answer, which is therefore wrong too. The wrong result is one that
such a step has in other stories: otherwise small products or round quotients would give it away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from posttrain.tasks.stories.families import Equation, Story
from posttrain.types import Response

Responses = Literal["none", "pair", "judged", "steps"]
Kind = tuple[str, int, str, int]
UsualResults = Mapping[Kind, tuple[int, ...]]
NUM_TRIES = 10  # wrong results that are tried for a step before another is chosen


@dataclass(frozen=True, slots=True)
class Working:
    """Equations with the result that is written for each; ``wrong`` is the one that does not hold, if any."""

    equations: tuple[Equation, ...]
    results: tuple[int, ...]
    wrong: int | None = None

    @property
    def sentences(self) -> list[str]:
        """One a step, such as ``19 + 12 = 31.``"""
        return [f"{e.left} {e.sign} {e.right} = {r}." for e, r in zip(self.equations, self.results, strict=True)]

    @property
    def written(self) -> str:
        return " ".join(self.sentences)

    @property
    def answer(self) -> str:
        return str(self.results[-1])


def right_working(story: Story) -> Working:
    """The story's own working."""
    return Working(story.equations, tuple(equation.result for equation in story.equations))


def count_results(stories: Iterable[Story]) -> UsualResults:
    """The results of every kind of step in ``stories``, as often as they occur."""
    by_kind: dict[Kind, list[int]] = {}
    for story in stories:
        for index, equation in enumerate(story.equations):
            by_kind.setdefault(kind_of(story, index), []).append(equation.result)
    return {kind: tuple(results) for kind, results in by_kind.items()}


def kind_of(story: Story, index: int) -> Kind:
    """What the results of a step are compared with: family, place, sign, and digits of the result."""
    equation = story.equations[index]
    return story.family, index, equation.sign, len(str(equation.result))


def corrupt(story: Story, limit: int, usual: UsualResults, rng: Random) -> Working:
    """The working with one wrong result.

    Steps are tried in random order, each with a few results that are usual for such a step, until a
    working fits the rules of this module. Where none does, the last step is off by one.
    """
    right = right_working(story)
    order = rng.sample(range(len(story.equations)), len(story.equations))
    tried = [
        (step, rng.choice(usual[kind]))
        for step in order
        for kind in (kind_of(story, step),)
        if kind in usual
        for _ in range(NUM_TRIES)
    ]
    final = len(story.equations) - 1
    tried += [(final, right.results[final] + slip) for slip in (1, -1)]
    for step, stated in tried:
        working = carry_on(story, step, stated)
        if working is not None and fits(working, right, limit):
            return working
    raise AssertionError("a neighbour of the last result has as many digits and lies in the range")


def carry_on(story: Story, step: int, stated: int) -> Working | None:
    """The working in which ``step`` gives ``stated`` and every later step follows; None if one cannot be worked."""
    equations: list[Equation] = []
    results: list[int] = []
    for index, (equation, (of_left, of_right)) in enumerate(zip(story.equations, story.origins, strict=True)):
        left = equation.left if of_left is None else results[of_left]
        right = equation.right if of_right is None else results[of_right]
        followed = Equation(left, equation.sign, right)
        if not followed.holds:
            return None
        equations.append(followed)
        results.append(stated if index == step else followed.result)
    return Working(tuple(equations), tuple(results), wrong=step)


def fits(working: Working, right: Working, limit: int) -> bool:
    """Whether nothing but arithmetic tells a working from the right one."""
    in_range = all(0 <= result <= limit for result in working.results)
    same_length = all(len(a) == len(b) for a, b in zip(working.sentences, right.sentences, strict=True))
    return in_range and same_length and working.results[-1] != right.results[-1]


def make_responses(story: Story, kind: Responses, limit: int, usual: UsualResults, rng: Random) -> tuple[Response, ...]:
    """The responses of ``kind`` (not ``none``): right (score 1) and corrupted (score 0).

    ``pair`` has the right one first; ``judged`` and ``steps`` have them in random order, as their rows are
    learnt one by one. A step's label is 1 before the first wrong step and 0 from there on.
    """
    workings = [right_working(story), corrupt(story, limit, usual, rng)]
    if kind != "pair":
        rng.shuffle(workings)
    return tuple(_stepwise(w) if kind == "steps" else _whole(w) for w in workings)


def _whole(working: Working) -> Response:
    return Response(working.written, float(working.wrong is None), answer=working.answer)


def _stepwise(working: Working) -> Response:
    """A step begins with the space that stands before it in a written answer."""
    steps = tuple(f" {sentence}" for sentence in working.sentences)
    first_wrong = len(steps) if working.wrong is None else working.wrong
    labels = tuple(int(index < first_wrong) for index in range(len(steps)))
    return Response("".join(steps), float(working.wrong is None), steps, labels)
