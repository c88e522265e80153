"""Curricula: which parts of a mixture are drawn from, and which prompts are left out for now. Pure.

Each word is a function of the step and of the recorded ``History``, and returns a ``Mix``. It is asked before every
batch. So a run that is resumed with its history draws what the undisturbed one would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from posttrain import registry
from posttrain.errors import RecipeError, UsageError
from posttrain.registry import register, suggest

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(slots=True)
class Tried:
    """What came of a prompt when it was last drawn: in which pass over its part; the mean success of its answers."""

    in_pass: int
    success: float


@dataclass(slots=True)
class History:
    """What was recorded of the rollout batches so far.

    ``parts``: their names, in the recipe's order. ``batches``: of each part, for every batch in which it was asked the
    sum of its answers' success and their number. ``prompts``: by a prompt's place among those that are drawn from, for
    words that read it. Success is in 0..1: whether an answer is right, or the part of the reward that ``by`` names.
    """

    parts: tuple[str, ...]
    batches: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    prompts: dict[int, Tried] = field(default_factory=dict)

    def num_batches(self, part: str) -> int:
        """In how many batches the part was asked."""
        return len(self.batches.get(part, ()))

    def rate(self, part: str, window: int) -> float | None:
        """Mean success over its answers in the last ``window`` batches in which it was asked; None with fewer."""
        last = self.batches.get(part, ())[-window:]
        if len(last) < window:
            return None
        return sum(total for total, _ in last) / sum(number for _, number in last)


@dataclass(frozen=True, slots=True)
class Mix:
    """What may be drawn.

    ``factors``: what each part's weight is multiplied with; 0 closes a part, and a part that is not named has 1.
    ``resting``: by a prompt's place, the first pass over its part in which it may be drawn again.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    resting: Mapping[int, int] = field(default_factory=dict)


def choose_mix(function: Callable[[int, History], Any], step: int, history: History) -> Mix:
    """What a curriculum says before the batch of a step, checked.

    Raises:
        RunFailure: the function raised.
        UsageError: it returned something else, a factor below 0, a part that is not there, or no open part.
    """
    mix = registry.call("curriculum", function, step, history)
    if not isinstance(mix, Mix):
        raise UsageError(f"curriculum: the function returned {registry.describe_result(mix)}; it must return a Mix")
    _check_parts(mix.factors, "curriculum", history.parts)
    if not all(math.isfinite(factor) and factor >= 0 for factor in mix.factors.values()):
        raise UsageError(f"curriculum: weights are multiplied with numbers from 0 on; got {dict(mix.factors)}")
    if not any(mix.factors.get(part, 1.0) for part in history.parts):
        raise UsageError(f"curriculum: at step {step} it closes every part; one at least must be open")
    return mix


@register("curriculum", reads=())
def stages(step: int, history: History, *, stages: Annotated[list[dict[str, Any]], Field(min_length=1)]) -> Mix:
    """Stages that begin at fixed steps; in each the parts that it names are drawn from, with the weights given there.

    ``stages: [{step: 1, weights: {easy: 1}}, {step: 51, weights: {easy: 1, hard: 3}}]``. These weights multiply those
    of the parts (1 unless said); a part that a stage does not name is closed in it.

    Args:
        stages: each with the ``step`` that it begins at, the first at 1, and ``weights`` by a part's name.

    Raises:
        RecipeError: a stage of another form, steps that do not rise from 1, or a part that is not there.
    """
    begins = 0
    now: Mapping[str, float] = {}
    for number, stage in enumerate(stages):
        where = f"curriculum.stages.{number}"
        first, weights = _read_stage(stage, where, history.parts)
        if (number == 0 and first != 1) or first <= begins:
            wanted = "the first stage begins at step 1" if number == 0 else f"a stage begins after step {begins}"
            raise RecipeError(f"{where}.step: {wanted}, as stages stand in their order; got {first}")
        begins = first
        now = weights if step >= first else now
    return Mix({part: float(now.get(part, 0.0)) for part in history.parts})


def _read_stage(stage: Mapping[str, Any], where: str, parts: Sequence[str]) -> tuple[int, Mapping[str, float]]:
    for key in stage:
        if key not in ("step", "weights"):
            raise RecipeError(
                f"{where}.{key}: a stage has no key {key!r}.{suggest(str(key), ('step', 'weights'))} "
                "Known keys: step, weights"
            )
    first, weights = stage.get("step"), stage.get("weights")
    if not isinstance(first, int) or isinstance(first, bool):
        raise RecipeError(f"{where}.step: give the number of the step that the stage begins at; got {first!r}")
    if not isinstance(weights, Mapping) or not weights:
        raise RecipeError(f"{where}.weights: give the weights of the parts that are open, such as {{{parts[0]}: 1}}")
    _check_parts(weights, f"{where}.weights", parts)
    for part, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise RecipeError(
                f"{where}.weights.{part}: a weight is a number above 0; leave out a part that is closed; got {weight!r}"
            )
    return first, weights


@register("curriculum", reads=("parts",))
def by_success_rate(
    step: int,
    history: History,
    *,
    order: list[str] | None = None,
    rate: Annotated[float, Field(gt=0, le=1)] = 0.7,
    window: Annotated[int, Field(ge=1, le=1000)] = 8,
    review: Annotated[float, Field(ge=0)] = 1.0,
    by: str = "correct",
) -> Mix:
    """Harder parts open when the easier ones succeed often enough; what is open stays open.

    The first part is open from the beginning. The next opens once the mean success of the last one that is open is at
    least ``rate``, over its answers in the last ``window`` batches in which it was asked. One opens at a time.

    Args:
        order: names of parts, the easiest first; parts that are not named are open from the beginning. By default all,
            as they stand in the recipe.
        rate: of success, from which on the next part is open.
        window: batches that it is measured over.
        review: multiplies the weights of the easier parts, once a harder one is open; 0 leaves them.
        by: the part of the reward that is success (``reward``: their weighted sum); ``correct`` is the share of right
            answers among those that can be graded.

    Raises:
        RecipeError: ``order`` names a part that is not there, or one twice.
    """
    ladder = list(history.parts) if order is None else order
    _check_parts(ladder, "curriculum.order", history.parts)
    if not ladder or len(set(ladder)) < len(ladder):
        raise RecipeError(
            f"curriculum.order: name every part once, the easiest first; got {', '.join(ladder) or 'none'}"
        )
    last = max((n for n, part in enumerate(ladder) if history.num_batches(part)), default=0)
    reached = history.rate(ladder[last], window)
    if reached is not None and reached >= rate and last + 1 < len(ladder):
        last += 1
    return Mix({part: review if n < last else float(n == last) for n, part in enumerate(ladder)})


@register("curriculum", reads=("prompts",))
def difficulty_band(
    step: int,
    history: History,
    *,
    low: Share = 0.1,
    high: Share = 0.9,
    rest: Annotated[int, Field(ge=1)] = 1,
    by: str = "correct",
) -> Mix:
    """Prompts that were too hard or too easy when they were last drawn are left out for a while.

    A prompt whose answers had a mean success below ``low`` or above ``high`` is not drawn in the next ``rest`` passes
    over its part, and then tried again, for the model has changed. Prompts that were never drawn are. Where a whole
    part rests, it is drawn from as if none did.

    Args:
        low, high: bounds of the mean success of a prompt's answers; both belong to the band.
        rest: passes over its part in which a prompt is left out.
        by: the part of the reward that is success; see ``by_success_rate``.

    Raises:
        RecipeError: ``low`` is not below ``high``.
    """
    if low >= high:
        raise RecipeError(f"curriculum.low: {low} is not below curriculum.high, {high}; a band has some width")
    return Mix(
        resting={
            prompt: tried.in_pass + rest + 1
            for prompt, tried in history.prompts.items()
            if not low <= tried.success <= high
        }
    )


def _check_parts(named: Sequence[str] | Mapping[str, Any], where: str, parts: Sequence[str]) -> None:
    for part in named:
        if part not in parts:
            raise RecipeError(
                f"{where}: there is no part {part!r} in task.parts.{suggest(str(part), parts)} "
                f"Known parts: {', '.join(parts)}"
            )
