"""Calling of reward functions: each asks by parameter name for what it reads.

A reward is any function that returns a number. Its positional parameters are names from
``AVAILABLE``; its keyword-only parameters are options of the recipe. The same rule holds for
ours and for users' (``module:function``). A reward registered with ``batched=True`` is called once for many
completions: each parameter is then a sequence, one value for each, and so is the result. A result is a
number, a ``Verdict`` or ``Measured``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from posttrain import registry
from posttrain.errors import PosttrainError, RewardFailure, UsageError
from posttrain.graders.grading import Measured, Verdict
from posttrain.recipes.sections import RewardWord
from posttrain.registry import Entry, suggest

# What a reward may ask for, with its meaning.
AVAILABLE: dict[str, str] = {
    "prompt": "the rendered prompt (str)",
    "text": "the graded text: the template's opening and the completion (str)",
    "extracted": "the answer found in the text (str or None)",
    "answer": "the gold answer (str or None)",
    "num_tokens": "length of the completion in tokens that the model wrote, the end token included (int)",
    "finish": "how it ended: 'stop', 'length', or with an environment also another word (str)",
    "tags": "the template's tags (tuple of str, maybe empty)",
    "grader": "the name of the task's own grader (str)",
    "example": "the example itself (Example)",
    "meta": "the example's further facts (mapping)",
    "folder": "the run's own folder, for what is kept (Path, or None outside of a run)",
    "turns": "with an environment, the turns with their calls (sequence of Turn)",
    "environment_reward": "what the environment's get_reward says (float or None)",
}

# Templates without tags that ask for a format, and the reward that measures it.
_FORMATS = {"boxed": "boxed_format"}


Result = float | Verdict | Measured
MAX_REWARD = 1e15  # its square still fits into fp32, in which advantages and values are kept


@dataclass(frozen=True)
class BoundReward:
    """A reward with its options filled in and its parameters checked."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    batched: bool = False

    def __call__(self, available: Mapping[str, Any], example_id: str = "") -> float:
        """The reward for one completion; see ``grade``."""
        reward = self.grade([available], [example_id])[0]
        return reward if isinstance(reward, float) else reward.value

    def grade(self, available: Sequence[Mapping[str, Any]], example_ids: Sequence[str]) -> list[Result]:
        """The rewards for many completions, in order.

        Args:
            available: for each completion a value for every name of ``AVAILABLE`` that the reward asks for.
            example_ids: named in the message when the reward fails.

        Raises:
            RewardFailure: the function raised, ended the program, or returned no finite number up to ``MAX_REWARD``.
        """
        places = [f"reward {self.name!r}" + (f", example {one!r}" if one else "") for one in example_ids]
        if self.batched:
            place = places[0] if len(set(example_ids)) == 1 else f"reward {self.name!r}"
            columns = {name: [one[name] for one in available] for name in self.parameters}
            values = self._call(columns, place)
            values = values.tolist() if hasattr(values, "tolist") else values  # an array is as good as a list
            if isinstance(values, str | bytes) or not isinstance(values, Sequence):
                count = len(available)
                raise RewardFailure(
                    f"{place}: the function returned {_shown(values)}; {count} completions need a list of {count}"
                )
            if len(values) != len(available):
                what = f"the function returned {len(values)} results for {len(available)} completions; give one each"
                raise RewardFailure(f"{place}: {what}")
        else:
            values = [
                self._call({name: one[name] for name in self.parameters}, place)
                for one, place in zip(available, places, strict=True)
            ]
        return [_check_result(value, place) for value, place in zip(values, places, strict=True)]

    def _call(self, arguments: Mapping[str, Any], place: str) -> Any:
        try:
            return self.function(**arguments)
        except PosttrainError:
            raise  # it says already what is wrong and what would work
        except (Exception, SystemExit) as error:  # a user's function may raise anything; the cause is kept
            raise RewardFailure(
                f"{place}: the function raised {type(error).__name__}: {error}. "
                "Correct it (--traceback shows the place in it), or have it return a number there"
            ) from error


def bind_reward(
    reward: Entry | Callable[..., Any], options: Mapping[str, Any] | None = None, where: str = ""
) -> BoundReward:
    """Fill in the options and check that the reward asks only for what there is.

    Args:
        reward: an entry of the registry, or a plain function.
        options: the recipe's options; of an entry they are validated.
        where: the recipe's key (``rewards.0``), for messages.

    Raises:
        RecipeError: an option is unknown, missing or of the wrong type.
        UsageError: a parameter of the function is nothing that can be provided.
    """
    if isinstance(reward, Entry):
        name, function, bound = reward.name, reward.function, reward.bind(options or {}, where)
        batched = bool(reward.traits.get("batched"))
        prepare = reward.traits.get("prepare")
        if prepare is not None:
            prepare(**bound.keywords)
    else:
        name, function = getattr(reward, "__name__", repr(reward)), reward
        bound, batched = partial(reward, **(options or {})), False
    return BoundReward(name, bound, _asked(name, function, where, bound.keywords), batched)


def reward_parts(words: Sequence[RewardWord], template: str, *, has_tags: bool) -> list[str]:
    """The names of a recipe's rewards, which a run with this prompt template can compute; nothing is loaded for it.

    A name that stands twice gets a number behind it. ``correct`` and the format are reported in every run.

    Raises:
        UsageError: a reward asks for something that there is not, such as the tags of a template without tags.
    """
    names: list[str] = []
    for index, word in enumerate(words):
        where = f"rewards.{index}"
        entry = registry.find("reward", word.name, where)
        name = entry.name if entry.name not in names else f"{entry.name}_{index}"
        asked = _asked(entry.name, entry.function, where, entry.bind(word.options, where).keywords)
        if not has_tags and ":" not in word.name and "tags" in asked:
            raise UsageError(
                f"{where}: {name} looks at the tags of the prompt template, and {template!r} has none; "
                "set prompt.template to r1_zero or xml_reasoning, or leave this reward out"
            )
        names.append(name)
    reported = ("correct", format_part(template, has_tags=has_tags))
    return [*names, *(name for name in reported if name is not None and name not in names)]


def format_part(template: str, *, has_tags: bool) -> str | None:
    """Return the reward that measures the format that a prompt template asks for; None where it asks for none."""
    return "xml_format" if has_tags else _FORMATS.get(template)


def _asked(name: str, function: Callable[..., Any], where: str, bound: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that the function asks for, beside those that are ``bound`` already."""
    place = f"{where}: " if where else ""
    asked: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or parameter.name in bound:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            asked.extend(known for known in AVAILABLE if known not in asked)
            continue
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise UsageError(
                f"{place}reward {name!r}: parameter {parameter.name!r} cannot be passed by name; "
                f"ask for one or more of: {', '.join(AVAILABLE)}"
            )
        if parameter.name not in AVAILABLE:
            raise UsageError(
                f"{place}reward {name!r} asks for {parameter.name!r}, which is not available."
                f"{suggest(parameter.name, AVAILABLE)} Available: {', '.join(AVAILABLE)}. "
                "An option of the recipe is a keyword-only parameter (behind a *)."
            )
        asked.append(parameter.name)
    return tuple(asked)


def _check_result(value: Any, place: str) -> Result:
    if not isinstance(value, Verdict | Measured):
        return _check_number(value, place)
    for number in (value.value, *value.facts.values()):
        _check_number(number, place)
    return value


def _check_number(value: Any, place: str) -> float:
    if not isinstance(value, Real):
        remedy = "; return a float, such as value.item() of a tensor" if hasattr(value, "item") else "; return a float"
        if value is None:
            remedy = "; a path through it ends without return"
        elif inspect.iscoroutine(value):
            value.close()  # Python would warn that nobody awaited it
            remedy = "; write it without async (asyncio.run inside of it waits for a result)"
        raise RewardFailure(f"{place}: the function returned {_shown(value)}, which is no number{remedy}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailure(
            f"{place}: the function returned {_shown(value)}, which is not finite; have it return a number there"
        )
    return check_size(number, f"{place}: the function returned {_shown(value)}")


def check_size(reward: float, place: str) -> float:
    """The reward itself.

    Raises:
        RewardFailure: it is beyond ``MAX_REWARD``.
    """
    if not abs(reward) <= MAX_REWARD:
        raise RewardFailure(
            f"{place}; rewards are averaged and squared, so that beyond {MAX_REWARD:g} nothing can be learned from them"
        )
    return reward


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) else f"an integer of {value.bit_length()} bits"
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"
