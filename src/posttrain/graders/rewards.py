"""Rewards and how to call them. Parameter names select the inputs a reward receives.

A reward is any function returning a number, a ``Verdict`` or a ``MeasuredReward``. Positional parameters are names
from ``AVAILABLE``; keyword-only parameters are recipe options. With ``batched=True`` a reward is called once per
batch: each parameter is a sequence, and so is the result. TRL's form (``column_rewards.py``) is supported too.
Asynchronous rewards run concurrently.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Annotated, Any

from pydantic import Field

from posttrain.acting.methods import IF_ANSWERS_GROW_LONG
from posttrain.errors import PosttrainError, RewardFailure, UsageError
from posttrain.graders.answers import last_boxed
from posttrain.graders.column_rewards import (
    READ,
    RewardLog,
    await_results,
    call_with_columns,
    hint_of,
    listed_results,
    takes_columns,
)
from posttrain.graders.grading import MeasuredReward, Submission, Verdict, grade_submissions, is_blank
from posttrain.option_types import shown_with_type
from posttrain.recipes.sections import RewardComponent
from posttrain.registry import Entry, find, register, suggest
from posttrain.types import TRUNCATED, Example, Turn

# Inputs available to rewards, with their meaning.
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
    "environment_metrics": "what the environment's get_metrics says (mapping from str to float)",
}

RewardResult = float | Verdict | MeasuredReward
MAX_REWARD = 1e15  # its square still fits into fp32, the dtype of advantages and values


@dataclass(frozen=True)
class BoundReward:
    """A reward with bound options and checked parameters.

    ``batched``: called once for many completions. ``may_skip``: in TRL's form, so that it may return None.
    """

    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    batched: bool = False
    may_skip: bool = False

    def __call__(self, available: Mapping[str, object], example_id: str = "") -> float:
        """Compute the reward for a single completion; see ``grade``."""
        reward = self.grade([available], [example_id])[0]
        assert reward is not None, "one in TRL's form is called for many"
        if isinstance(reward, float):
            return reward
        return reward.value

    def grade(
        self, available: Sequence[Mapping[str, object]], example_ids: Sequence[str], log: RewardLog | None = None
    ) -> list[RewardResult | None]:
        """The rewards for many completions, in order; None where one in TRL's form says nothing.

        Args:
            available: for each completion a value for every name of ``AVAILABLE`` that the reward asks for.
            example_ids: named in the message when the reward fails.
            log: of a reward in TRL's form: the state that it reads, and what it logs.

        Raises:
            RewardFailure: the function raised, ended the program, or returned no finite number up to ``MAX_REWARD``.
        """
        if log is None:
            log = RewardLog(len(available))
        return grade_together([self], available, example_ids, log)[0]

    def begin(self, available: Sequence[Mapping[str, object]], example_ids: Sequence[str], log: RewardLog) -> Any:
        """Call the function for many completions: their results, in which asynchronous ones are coroutines.

        Raises:
            RewardFailure: the function raised or ended the program.
        """
        if self.batched:
            columns: dict[str, object] = {name: [one[name] for one in available] for name in self.parameters}
            if self.may_skip:
                columns["log"] = log
            return self._call(columns, self._place_of(example_ids))
        values = []
        for one, example_id in zip(available, example_ids, strict=True):
            try:
                values.append(self._call({name: one[name] for name in self.parameters}, self._place(example_id)))
            except BaseException:
                close_pending(values)
                raise
        return values

    def check(self, values: Any, example_ids: Sequence[str]) -> list[RewardResult | None]:
        """Return the awaited results of ``begin``, checked.

        Raises:
            RewardFailure: one is no finite number up to ``MAX_REWARD``, or an error that a coroutine raised.
        """
        places = [self._place(example_id) for example_id in example_ids]
        if self.batched:
            values = self._listed(values, len(example_ids), self._place_of(example_ids))
        checked: list[RewardResult | None] = []
        for value, place in zip(values, places, strict=True):
            self._raise_if_failed(value, place)
            if value is None and self.may_skip:
                checked.append(None)
            else:
                checked.append(_check_result(value, place))
        return checked

    def _place_of(self, example_ids: Sequence[str]) -> str:
        """The place of a call for many completions."""
        if len(set(example_ids)) == 1:
            return self._place(example_ids[0])
        return self._place()

    def _place(self, example_id: str = "") -> str:
        """Name the reward and the example, for error messages."""
        if not example_id:
            return f"reward {self.name!r}"
        return f"reward {self.name!r}, example {example_id!r}"

    def _listed(self, values: Any, count: int, place: str) -> Sequence[object]:
        """Check that a call for many completions gave one result for each."""
        self._raise_if_failed(values, place)
        if self.may_skip:
            values = listed_results(values)
        elif hasattr(values, "tolist"):  # an array is as good as a list
            values = values.tolist()
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise RewardFailure(f"{_returned(values, place)}; {count} completions need a list of {count}")
        if len(values) != count:
            raise RewardFailure(
                f"{place}: the function returned {len(values)} results for {count} completions; give one each"
            )
        return values

    def _call(self, arguments: Mapping[str, object], place: str) -> object:
        try:
            return self.function(**arguments)
        except PosttrainError:
            raise  # already explains what is wrong and how to fix it
        except (Exception, SystemExit) as error:  # a user's function may raise anything; the cause is kept
            raise _failure(error, place) from error

    def _raise_if_failed(self, value: object, place: str) -> None:
        """Raise what a coroutine raised, which is in place of its result."""
        if isinstance(value, PosttrainError):
            raise value
        if isinstance(value, Exception | SystemExit):
            raise _failure(value, place) from value
        if isinstance(value, BaseException):
            raise value


def _failure(error: Exception | SystemExit, place: str) -> RewardFailure:
    hint = ""
    if isinstance(error, Exception):
        hint = hint_of(error)
    return RewardFailure(
        f"{place}: the function raised {type(error).__name__}: {error}. {hint}"
        "Correct it (--traceback shows the place in it), or have it return a number there"
    )


def close_pending(results: Sequence[Any]) -> None:
    """Close coroutines that will not be awaited, of which Python would warn."""
    for result in results:
        if inspect.iscoroutine(result):
            result.close()
        elif isinstance(result, list):
            close_pending(result)


def grade_together(
    rewards: Sequence[BoundReward],
    available: Sequence[Mapping[str, object]],
    example_ids: Sequence[str],
    log: RewardLog,
) -> list[list[RewardResult | None]]:
    """The results of each reward for many completions; all that are asynchronous run at the same time.

    Raises:
        RewardFailure: see ``BoundReward.grade``.
    """
    begun: list[Any] = []
    try:
        for reward in rewards:
            begun.append(reward.begin(available, example_ids, log))
    except BaseException:
        close_pending(begun)
        raise
    pending = [one for one in begun if inspect.iscoroutine(one)]
    for values in begun:
        if isinstance(values, list):
            pending += [value for value in values if inspect.iscoroutine(value)]
    if pending:
        awaited = dict(zip(map(id, pending), await_results(pending), strict=True))
        begun = [_with_awaited(values, awaited) for values in begun]
    columns = []
    for reward, values in zip(rewards, begun, strict=True):
        columns.append(reward.check(values, example_ids))
    return columns


def _with_awaited(values: Any, awaited: Mapping[int, object]) -> Any:
    """Return results with those of coroutines in their places."""
    if id(values) in awaited:
        return awaited[id(values)]
    if isinstance(values, list):
        return [awaited.get(id(value), value) for value in values]
    return values


def bind_reward(reward: Entry, options: Mapping[str, object] | None = None, where: str = "") -> BoundReward:
    """Bind recipe options and check that every requested input exists.

    ``where``: recipe key (``rewards.0``), for error messages.

    Raises:
        RecipeError: unknown, missing or badly typed option.
        UsageError: the function requests an unknown input.
    """
    bound = reward.bind(options or {}, where)
    if (prepare := reward.traits.get("prepare")) is not None:
        prepare(**bound.keywords)
    requested = _requested_arguments(reward.name, reward.function, where, bound.keywords)
    if takes_columns(reward.function):
        return BoundReward(reward.name, partial(call_with_columns, bound), requested, batched=True, may_skip=True)
    return BoundReward(reward.name, bound, requested, bool(reward.traits.get("batched")))


def reward_parts(components: Sequence[RewardComponent], template: str, *, has_tags: bool) -> list[str]:
    """List the names of a recipe's rewards, checking that this prompt template supports them. Loads nothing.

    Duplicate names get a number appended. ``correct`` and the format reward are reported in every run.

    Raises:
        UsageError: a reward needs something unavailable, such as tags from a template without tags.
    """
    names: list[str] = []
    for index, component in enumerate(components):
        where = f"rewards.{index}"
        entry = find("reward", component.name, where)
        name = entry.name
        if name in names:
            name = f"{name}_{index}"
        bound = entry.bind(component.options, where).keywords
        requested = _requested_arguments(entry.name, entry.function, where, bound)
        if not has_tags and ":" not in component.name and "tags" in requested:
            raise UsageError(
                f"{where}: {name} looks at the tags of the prompt template, and {template!r} has none; "
                "set prompt.template to r1_zero or xml_reasoning, or leave this reward out"
            )
        names.append(name)
    for reported in ("correct", format_part(template, has_tags=has_tags)):
        if reported is not None and reported not in names:
            names.append(reported)
    return names


def refuse_rows(components: Sequence[RewardComponent], tasks: Mapping[str, Sequence[Example]]) -> None:
    """Let rewards that read something of each row refuse rows without it, before a model is loaded.

    Raises:
        DataError: with the first such row.
    """
    for index, component in enumerate(components):
        where = f"rewards.{index}"
        entry = find("reward", component.name, where)
        refuse = entry.traits.get("refuses_rows")
        if refuse is None:
            continue
        options = {name: x for name, x in entry.bind(component.options, where).keywords.items() if name != "where"}
        for name, examples in tasks.items():
            refuse(examples, f"{where}: {entry.name}, task {name}", **options)


def format_part(template: str, *, has_tags: bool) -> str | None:
    """Look up the reward measuring the template's format, or None if it has no format."""
    if has_tags:
        return "xml_format"
    if template == "boxed":
        return "boxed_format"
    return None


def _requested_arguments(
    name: str, function: Callable[..., Any], where: str, bound: Mapping[str, object]
) -> tuple[str, ...]:
    """List inputs requested by the function, besides those already ``bound``."""
    place = f"{where}: " if where else ""
    if inspect.isclass(function):
        raise UsageError(
            f"{place}reward {name!r} is a class; give an object of it that can be called, such as {name}()"
        )
    if takes_columns(function):
        return READ
    requested: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or parameter.name in bound:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            requested.extend(known for known in AVAILABLE if known not in requested)
            continue
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise UsageError(
                f"{place}reward {name!r}: parameter {parameter.name!r} cannot be passed by name; "
                f"ask for one or more of: {', '.join(AVAILABLE)} (functools.wraps gives a wrapper the parameters of "
                "what it wraps)"
            )
        has_default = parameter.default is not inspect.Parameter.empty
        if has_default and parameter.name not in AVAILABLE and not suggest(parameter.name, AVAILABLE):
            continue  # keeps its default, as in lambda text, n=n: ...
        if parameter.name not in AVAILABLE:
            raise UsageError(
                f"{place}reward {name!r} asks for {parameter.name!r}, which is not available."
                f"{suggest(parameter.name, AVAILABLE)} Available: {', '.join(AVAILABLE)}. "
                "An option of the recipe is a keyword-only parameter (behind a *)."
            )
        requested.append(parameter.name)
    return tuple(requested)


def _check_result(value: object, place: str) -> RewardResult:
    if not isinstance(value, Verdict | MeasuredReward):
        return _check_number(value, place)
    for number in (value.value, *value.info.values()):
        _check_number(number, place)
    return value


def _check_number(value: object, place: str) -> float:
    has_attributes = hasattr(type(value), "item") and hasattr(type(value), "ndim")  # the object itself may raise
    if has_attributes and getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        item: Callable[[], object] = getattr(value, "item")  # noqa: B009
        value = item()
    if not isinstance(value, Real):
        remedy = "return a float"
        if value is None:
            remedy = "a path through it ends without return"
        elif type(value).__module__.partition(".")[0] in ("torch", "numpy"):
            remedy = "return a float, such as value.item() of a tensor"
        raise RewardFailure(f"{_returned(value, place)}, which is no number; {remedy}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailure(f"{_returned(value, place)}, which is not finite; have it return a number there")
    return check_size(number, _returned(value, place))


def _returned(value: object, place: str) -> str:
    return f"{place}: the function returned {shown_with_type(value)}"


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


@register("reward", batched=True, components={"mode": "grader"})
def correct(
    text: Sequence[str],
    extracted: Sequence[str | None],
    answer: Sequence[str | None],
    grader: Sequence[str],
    meta: Sequence[Mapping[str, object]],
    *,
    mode: str | dict[str, Any] = "auto",
    tolerance: Annotated[float, Field(ge=0)] = 0.0,
) -> list[Verdict]:
    """1 if the answer matches the gold answer, else 0. Also 0 if either is missing or grading was aborted.

    ``r = 1[grader(completion, gold) = right]``.

    Args:
        mode: ``auto`` uses the task's grader. Otherwise a grader name, or a mapping with ``name`` and options
            (``{name: multiple_choice}``). `posttrain explain grader` lists them.
        tolerance: for numeric graders, the largest absolute difference still accepted.

    Source: accuracy reward in DeepSeek-R1 (Guo et al. 2025, arXiv 2501.12948), section 2.2.2.

    Raises:
        RecipeError: ``tolerance`` given for a grader without one.
    """
    options: dict[str, Any] = {}
    if tolerance:
        options["tolerance"] = tolerance
    if isinstance(mode, str):
        chosen = mode
    else:
        chosen = str(mode["name"])
        options |= {key: value for key, value in mode.items() if key != "name"}
    names = list(grader)
    if chosen != "auto":
        names = [chosen] * len(grader)
    submissions = [Submission(*parts) for parts in zip(text, extracted, answer, meta, strict=True)]
    verdicts: dict[int, Verdict] = {}
    for name in dict.fromkeys(names):
        places = [place for place, own in enumerate(names) if own == name]
        graded = grade_submissions(name, [submissions[place] for place in places], options)
        verdicts.update(zip(places, graded, strict=True))
    return [verdicts[place] for place in range(len(submissions))]


@register("reward")
def boxed_format(text: str) -> float:
    """1 if the text contains a complete, non-blank ``\\boxed{…}``, else 0."""
    return float(not is_blank(last_boxed(text) or ""))


@register("reward")
def xml_format(text: str, tags: tuple[str, ...]) -> float:
    """1 if the text is exactly one reasoning block followed by one answer block, else 0.

    ``r = 1[text = ␣ <r> … </r> ␣ <a> … </a> ␣]`` where ␣ is whitespace, each tag appears once, and the answer is not
    blank. Reasoning may be empty. Text before, between or after these blocks, repeated tags or reversed tags give 0.

    Source: format reward in DeepSeek-R1 (Guo et al. 2025, arXiv 2501.12948), section 2.2.2.

    Raises:
        UsageError: the template has no tags.
    """
    marks = _marks(tags, "xml_format")
    if any(text.count(mark) != 1 for mark in marks):
        return 0.0
    open_r, close_r, open_a, close_a = map(re.escape, marks)
    found = re.fullmatch(rf"\s*{open_r}.*{close_r}\s*{open_a}(.*){close_a}\s*", text, re.DOTALL)
    return float(found is not None and not is_blank(found[1]))


@register("reward")
def xml_soft(text: str, tags: tuple[str, ...]) -> float:
    """1 if a reasoning block followed by an answer block appears anywhere in the text, else 0.

    ``r = 1[text contains <r> … </r> ␣ <a> … </a>]`` with a non-blank answer. Additional text and blocks are allowed.

    Source: soft format reward from widely shared GSM8K GRPO notebooks, without their weight of 0.5.

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
    """A quarter per tag that appears exactly once, minus a small penalty per trailing character.

    ``r = max(0, (1/4) Σ 1[tag appears once] − trailing · n)``, where n counts characters following the answer block,
    excluding final whitespace. Tag contents are ignored: an empty answer costs nothing.

    Args:
        trailing: penalty per character following ``</answer>``.

    Source: tag count reward from widely shared GSM8K GRPO notebooks (0.125 per tag, 0.001 per character), rescaled to
    1. Departure: never negative.

    Raises:
        UsageError: the template has no tags.
    """
    marks = _marks(tags, "xml_count")
    score = sum(text.count(mark) == 1 for mark in marks) / 4
    _, closed, after = text.rpartition(marks[3])
    if closed:
        score -= trailing * len(after.rstrip())
    return max(0.0, score)


def _marks(tags: tuple[str, ...], reward: str) -> tuple[str, str, str, str]:
    if len(tags) != 2:
        raise UsageError(
            f"reward {reward} needs a prompt template with tags for reasoning and answer; "
            "set prompt.template to r1_zero or xml_reasoning, or leave the reward out"
        )
    reasoning, answer = tags
    return f"<{reasoning}>", f"</{reasoning}>", f"<{answer}>", f"</{answer}>"


@register("reward")
def overlong(
    num_tokens: int,
    *,
    limit: Annotated[int, Field(ge=1), IF_ANSWERS_GROW_LONG],
    cache: Annotated[int, Field(ge=1), IF_ANSWERS_GROW_LONG],
) -> float:
    """0 up to ``limit − cache`` tokens, then falling linearly to −1 at ``limit``.

    With L tokens, end token included::

        r = 0                             L ≤ limit − cache
        r = (limit − cache − L) / cache   limit − cache < L ≤ limit
        r = −1                            L > limit

    Args:
        limit: L_max, the length with full penalty; usually ``rollout.max_tokens``.
        cache: L_cache, the width of the soft interval below it.

    Source: soft overlong punishment, DAPO (Yu et al. 2025, arXiv 2503.14476), equation 13.

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
    """−1 for truncated completions, otherwise 0.

    Flat penalty for any limit: tokens (``length``), turns (``out_of_turns``) or tool time-outs (``tool_failed``).

    Source: the "punitive reward to truncated samples" that DAPO starts from (Yu et al. 2025, section 3.4).
    """
    if finish in TRUNCATED:
        return -1.0
    return 0.0


@register("reward")
def environment(environment_reward: float | None, environment_metrics: Mapping[str, float]) -> MeasuredReward:
    """The environment's ``get_reward()`` at episode end, with the numbers of its ``get_metrics()``.

    Raises:
        RewardFailure: the recipe has no environment, or its environment has no ``get_reward``.
    """
    if environment_reward is None:
        raise RewardFailure("reward environment: there is no environment with get_reward; name one in the recipe")
    return MeasuredReward(environment_reward, environment_metrics)


@register("reward")
def tool_calls(turns: Sequence[Turn]) -> float:
    """Number of tool calls, malformed ones included. A negative weight makes calls expensive."""
    return float(sum(len(turn.calls) for turn in turns))


@register("reward")
def turn_rewards(turns: Sequence[Turn]) -> float:
    """Sum of the environment's ``get_turn_reward()`` over turns.

    Advantages per completion use this sum. ``turn_normalized`` and per-token advantages (``return_to_go``, ``gae``)
    credit each turn's reward at its last token. All other rewards are credited at the end.
    """
    return sum(turn.reward or 0.0 for turn in turns)
