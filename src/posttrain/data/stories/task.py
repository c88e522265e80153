"""Procedurally generated tasks: ``stories`` (also as documents), ``sums``, ``episodes``.

Item i is a pure function of (seed, split, i). A hash assigns each story signature (equations without words), and each
sum, to exactly one split; draws from a different split are rejected. Training therefore never shows the full working
for a validation or test item. Facts in documents follow the same rule.

Responses to stories are a correct working, and an incorrect one with a single slip carried through consistently:
identical equation structure and length, all numbers in range, all divisions exact. The incorrect result is drawn from
results of similar steps in other stories. Only arithmetic distinguishes the two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from random import Random
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.acting.methods import IF_DEMONSTRATIONS_ARE_READ
from posttrain.data.base import ExamplesOnDemand, Split, Task
from posttrain.data.stories.families import (
    FAMILIES,
    TEXT,
    Equation,
    Story,
    draw_cast,
    draw_operand,
    draw_operation,
    is_worked,
)
from posttrain.errors import UsageError
from posttrain.option_types import Seed
from posttrain.randomness import derive_key
from posttrain.registry import register
from posttrain.types import Call, Example, Message, Response, Turn

Responses = Literal["none", "pair", "judged", "steps"]
Family = Literal["chain", "compare", "shop", "rate", "share"]
StepKind = tuple[str, int, str, int]  # family, step index, sign, number of digits in the result
UsualResults = Mapping[StepKind, tuple[int, ...]]
NUM_TRIES = 10  # incorrect results to try per step
_NUM_COUNTED = 5000
_MAX_DRAWS = 10_000  # per item, far more than any feasible combination of options needs
_MAX_SUM_DRAWS = 1000  # per item. At most nine in ten belong to other splits.
Bound = Annotated[int, Field(ge=0, lt=10**15)]


@register("task", held_out="validation")
def stories(
    *,
    split: Split = "train",
    seed: Seed = 0,
    size: Annotated[int, Field(ge=1)] = 50_000,
    min_steps: Annotated[int, Field(ge=1, le=6)] = 1,
    max_steps: Annotated[int, Field(ge=1, le=6)] = 4,
    max_value: Annotated[int, Field(ge=30, le=9999)] = 99,
    families: list[Family] | None = None,
    worked: Annotated[float, Field(ge=0, le=1), IF_DEMONSTRATIONS_ARE_READ] = 1.0,
    style: Literal["question", "document"] = "question",
    responses: Responses = "none",
) -> Task:
    """Short word problems with 1 to 6 steps, generated on demand and reproducible.

    Args:
        split: ``train``, ``validation`` or ``test``. Splits never share a working, regardless of seed.
        seed: changes all stories.
        size: number of items. Items are generated lazily.
        min_steps, max_steps: range for the number of steps, drawn uniformly.
        max_value: largest number allowed in a story, including working and answer.
        families: chain, compare, shop, rate, share. Defaults to all.
        worked: fraction of items whose ``solution`` shows the steps. Demonstrations for all other items answer
            immediately.
        style: ``question`` for conversations, ``document`` for pretraining text in ``solution``: worked stories (40
            %), stories with only the answer (15 %), isolated facts (25 %), and fragments with turn markers and tags
            (20 %).
        responses: ``pair`` (correct and incorrect working), ``judged`` (both, scored separately), or ``steps`` (both,
            with step labels: 1 before the slip, 0 from then on).

    Raises:
        UsageError: ``min_steps`` exceeds ``max_steps``, documents with responses, or no story fits the options.
    """
    if min_steps > max_steps:
        raise UsageError(f"task stories: min_steps ({min_steps}) exceeds max_steps ({max_steps})")
    if style == "document" and responses != "none":
        raise UsageError("task stories: documents ask no question, so responses are unavailable; use style question")
    chosen = tuple(families or FAMILIES)
    options = StoryOptions(split, seed, min_steps, max_steps, max_value, chosen, worked, style, responses)
    if style == "document":
        make = make_document
    else:
        make = make_question
    return Task("stories", split, ExamplesOnDemand(size, partial(make, options)), worked=is_worked)


@dataclass(frozen=True, slots=True)
class StoryOptions:
    """Options for ``stories`` that determine items."""

    split: Split
    seed: int = 0
    min_steps: int = 1
    max_steps: int = 4
    max_value: int = 99
    families: tuple[str, ...] = tuple(FAMILIES)
    worked: float = 1.0
    style: str = "question"
    responses: Responses = "none"


@lru_cache(maxsize=1 << 16)
def split_of(key: str) -> Split:
    """Assign a signature to a split by hash: 80 % train, 10 % validation, 10 % test."""
    bucket = hashlib.blake2b(key.encode(), digest_size=8).digest()[0] * 10 // 256
    if bucket < 8:
        return "train"
    if bucket == 8:
        return "validation"
    return "test"


def draw_story(rng: Random, options: StoryOptions) -> Story:
    """Draw a story from the split by rejection sampling.

    The number of steps is drawn only once, so rejection does not favor short stories. The family is redrawn after 200
    failures.
    """
    steps = rng.randint(options.min_steps, options.max_steps)
    for draw in range(_MAX_DRAWS):
        if draw % 200 == 0:
            family = FAMILIES[rng.choice(options.families)]
        story = family(rng, steps, options.max_value)
        if story is not None and split_of(story.signature) == options.split:
            return story
    raise UsageError(
        f"task stories: found no story with {steps} steps from {', '.join(options.families)} and numbers up to "
        f"{options.max_value}. Raise max_value, or lower max_steps"
    )


def make_question(options: StoryOptions, index: int) -> Example:
    """Generate item ``index`` as a question with gold answer."""
    name = f"stories/{options.split}"
    story = draw_story(Random(derive_key(options.seed, name, index)), options)
    shown = Random(derive_key(options.seed, f"{name}/worked", index)).random() < options.worked
    responses: tuple[Response, ...] = ()
    if options.responses != "none":
        rng = Random(derive_key(options.seed, f"{name}/responses", index))
        responses = make_responses(story, options.responses, options.max_value, usual_results(options), rng)
    solution = story.working if shown else None
    num_steps = len(story.equations)
    meta = {"steps": num_steps, "level": num_steps, "family": story.family}
    question = (Message("user", story.text),)
    answer = str(story.answer)
    return Example(f"{name}/{index}", question, answer=answer, solution=solution, responses=responses, meta=meta)


@lru_cache(maxsize=8)
def usual_results(options: StoryOptions) -> UsualResults:
    """Sample result distributions by step kind, from ``_NUM_COUNTED`` additional stories."""
    rng = Random(derive_key(options.seed, f"stories/{options.split}/results"))
    by_kind: dict[StepKind, list[int]] = {}
    for _ in range(_NUM_COUNTED):
        story = draw_story(rng, options)
        for index, equation in enumerate(story.equations):
            by_kind.setdefault(_kind_of(story, index), []).append(equation.result)
    return {kind: tuple(results) for kind, results in by_kind.items()}


def _kind_of(story: Story, index: int) -> StepKind:
    equation = story.equations[index]
    return story.family, index, equation.sign, len(str(equation.result))


def corrupt(story: Story, limit: int, usual: UsualResults, rng: Random) -> tuple[Equation, ...]:
    """Build a working with one incorrect result.

    Steps are tried in random order, each with results typical for that kind of step, until only arithmetic
    distinguishes the working from the correct one. If all fail, the last step is off by one.
    """
    num_steps = len(story.equations)
    slips: list[tuple[int, int]] = []
    for step in rng.sample(range(num_steps), num_steps):
        results = usual.get(_kind_of(story, step), ())
        if results:
            slips += [(step, rng.choice(results)) for _ in range(NUM_TRIES)]
    slips += [(num_steps - 1, story.answer + 1), (num_steps - 1, story.answer - 1)]
    lengths = [len(str(equation)) for equation in story.equations]
    for step, claimed in slips:
        equations = carry_on(story, step, claimed)
        looks_right = [len(str(equation)) for equation in equations] == lengths
        if not looks_right or equations[-1].result == story.answer:
            continue
        if all(0 <= equation.result <= limit for equation in equations):
            return equations
    raise AssertionError("off-by-one results must include one with equal length and in range")


def carry_on(story: Story, step: int, claimed: int) -> tuple[Equation, ...]:
    """Recompute all steps after ``step`` results in ``claimed``. Empty if a step becomes impossible."""
    equations: list[Equation] = []
    for index, equation in enumerate(story.equations):
        left = equation.left
        right = equation.right
        left_origin, right_origin = story.origins[index]
        if left_origin is not None:
            left = equations[left_origin].result
        if right_origin is not None:
            right = equations[right_origin].result
        slip = claimed if index == step else None
        equations.append(Equation(left, equation.sign, right, slip))
    if all(equation.holds for equation in equations):
        return tuple(equations)
    return ()


def make_responses(story: Story, kind: Responses, limit: int, usual: UsualResults, rng: Random) -> tuple[Response, ...]:
    """Build correct (score 1) and corrupted (score 0) responses for any ``kind`` except ``none``.

    For ``pair``, the correct one is first. ``judged`` and ``steps`` shuffle them, since their rows are trained
    separately. Step labels are 1 before the first incorrect step, and 0 from then on. Steps include their leading
    space.
    """
    workings = [story.equations, corrupt(story, limit, usual, rng)]
    if kind != "pair":
        rng.shuffle(workings)
    responses = []
    for equations in workings:
        is_right = [int(equation.claimed is None) for equation in equations]
        labels = tuple(accumulate(is_right, min))
        score = float(labels[-1])
        steps = tuple(f" {equation}" for equation in equations)
        written = "".join(steps)
        if kind == "steps":
            responses.append(Response(written, score, steps, labels))
        else:
            responses.append(Response(written[1:], score, answer=str(equations[-1].result)))
    return tuple(responses)


def make_document(options: StoryOptions, index: int) -> Example:
    """Generate item ``index`` as raw text, without question or gold answer."""
    name = f"stories/{options.split}/document"
    rng = Random(derive_key(options.seed, name, index))
    kind = rng.choices(("worked", "told", "facts", "scraps"), weights=(40, 15, 25, 20))[0]
    if kind in ("worked", "told"):
        story = draw_story(rng, options)
        closing = rng.choice(TEXT["closings"]).format(n=story.answer)
        lead_in = rng.choice(TEXT["lead_ins"])
        if kind == "worked":
            written = f"{story.text} {lead_in}{story.working} {closing}"
        else:
            written = f"{story.text} {closing}"
    elif kind == "facts":
        written = " ".join(str(draw_fact(rng, options)) for _ in range(rng.randint(2, 10)))
    else:
        written = draw_scrap(rng, options)
    return Example(id=f"{name}/{index}", messages=(), answer=None, solution=written, meta={"kind": kind})


def draw_fact(rng: Random, options: StoryOptions) -> Equation:
    """Draw a true equation whose signature belongs to the split."""
    while True:
        value = rng.randint(2, options.max_value)
        if rng.random() < 0.25:  # small product or quotient, typical for shops and rates
            factor = rng.randint(2, 12)
            times = rng.randint(2, 9)
            if rng.random() < 0.5:
                fact = Equation(factor, "*", times)
            else:
                fact = Equation(factor * times, "/", times)
        else:
            sign, operand = draw_operation(rng, value, options.max_value)
            fact = Equation(value, sign, operand or draw_operand(rng, sign, value, options.max_value))
        inside = fact.holds and max(fact.left, fact.right, fact.result) <= options.max_value
        if inside and fact.right > 1 and split_of(fact.key) == options.split:
            return fact


def draw_scrap(rng: Random, options: StoryOptions) -> str:
    """Write a fragment with turn markers or tags, arranged differently than in recipes.

    Tags surround workings, facts and musings, or an answer, but never both. Turns contain small talk. After
    pretraining on fragments, a model knows these tokens but still has to learn the response format.
    """
    cast = draw_cast(rng)
    kind = rng.choices(("thought", "answered", "noted", "mused", "said", "turns"), weights=(35, 20, 10, 10, 10, 15))[0]
    tag = rng.choice(("think", "think", "reasoning"))
    if kind in ("thought", "answered"):
        story = draw_story(rng, options)
        if kind == "answered":
            return f"{story.text} <answer> {story.answer} </answer>"
        closing = rng.choice(TEXT["closings"]).format(n=story.answer)
        return f"{story.text} <{tag}> {story.working} </{tag}> {closing}"
    if kind == "noted":
        info = " ".join(str(draw_fact(rng, options)) for _ in range(rng.randint(1, 4)))
        musing = cast.fill(rng.choice(TEXT["musings"]))
        return f"<{tag}> {info} </{tag}> {musing}"
    if kind == "mused":
        first = cast.fill(rng.choice(TEXT["musings"]))
        second = cast.fill(rng.choice(TEXT["musings"]))
        return f"<{tag}> {first} </{tag}> {second}"
    comment, reply = map(cast.fill, rng.choice(TEXT["remarks"]))
    if kind == "said":
        return f"User: {comment}\nAssistant: {reply}"
    return f"<|im_start|>user\n{comment}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>\n"


@register("task", held_out="validation")
def sums(
    *,
    split: Split = "train",
    seed: Seed = 0,
    size: Annotated[int, Field(ge=1)] = 50_000,
    min_value: Bound = 2,
    max_value: Bound = 99,
    called: Annotated[float, Field(ge=0, le=1), IF_DEMONSTRATIONS_ARE_READ] = 0.0,
) -> Task:
    """Sums and differences of two whole numbers, generated on demand and reproducible: ``What is 19 + 12?``

    Evaluation reports ``called``, the fraction of responses with a tool call.

    Args:
        split: ``train``, ``validation`` or ``test``. Splits never share a pair of numbers with its sign, regardless
            of seed.
        seed: changes all sums.
        size: number of items. Items are generated lazily.
        min_value, max_value: range for both numbers, drawn uniformly. Differences begin with the larger number.
        called: fraction of items whose demonstration calls the tool ``calculator`` before answering. All others write
            ``19 + 12 = 31.``

    Raises:
        UsageError: ``min_value`` exceeds ``max_value``, or no sum in the split fits the options.
    """
    if min_value > max_value:
        raise UsageError(f"task sums: min_value ({min_value}) exceeds max_value ({max_value})")
    name = f"sums/{split}"

    def make(item: int) -> Example:
        equation = _draw_sum(Random(derive_key(seed, name, item)), split, min_value, max_value)
        written = f"{equation.left} {equation.sign} {equation.right}"
        result = str(equation.result)
        larger = max(equation.left, equation.right)
        example = Example(
            id=f"{name}/{item}",
            messages=(Message("user", f"What is {written}?"),),
            answer=result,
            solution=str(equation),
            meta={"digits": len(str(larger))},
        )
        is_called = Random(derive_key(seed, f"{name}/called", item)).random() < called
        if not is_called:
            return example
        call = Call("calculator", json.dumps({"expression": written}), result, "ok")
        return replace(example, solution=None, turns=(Turn("", (call,)),))

    return Task("sums", split, ExamplesOnDemand(size, make), shares=_called)


def _called(items: Sequence[Any]) -> Mapping[str, Sequence[float]]:
    """Compute the fraction of responses with tool calls per item, if calls are counted (reward ``tool_calls``)."""
    shares = []
    for item in items:
        counts = [sample.parts["tool_calls"] for sample in item.samples if "tool_calls" in sample.parts]
        if counts:
            shares.append(fmean(float(count > 0) for count in counts))
    return {"called": shares}


def _draw_sum(rng: Random, split: Split, min_value: int, max_value: int) -> Equation:
    for _ in range(_MAX_SUM_DRAWS):
        left = rng.randint(min_value, max_value)
        right = rng.randint(min_value, max_value)
        sign = rng.choice("+-")
        if sign == "-" and left < right:
            left, right = right, left
        equation = Equation(left, sign, right)
        if split_of(equation.key) == split:
            return equation
    raise UsageError(
        f"task sums: no sum with numbers from {min_value} to {max_value} belongs to split {split}. Raise max_value"
    )


@register("task", held_out="validation", played=True)
def episodes(
    *,
    prompt: str = "Let's play.",
    split: Split = "train",
    size: Annotated[int, Field(ge=1)] = 1024,
    seed: Seed = 0,
) -> Task:
    """Constant prompt for playing an ``environment``, which opens each episode with text determined by the episode's
    seed.

    Without a gold answer to grade, the reward ``environment`` is the return collected in each episode.

    Args:
        prompt: user text before the environment's first text.
        split: included in episode names and therefore seeds. Environments may hold out initial states by split.
        size: number of episodes. The environment is reseeded for each playthrough.
        seed: changes episode names.
    """

    def make(item: int) -> Example:
        return Example(f"episodes/{split}/{seed}/{item}", (Message("user", prompt),), meta={"split": split})

    return Task("episodes", split, ExamplesOnDemand(size, make))
