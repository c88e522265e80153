"""Single-turn environments of verifiers, and packages of its hub, as tasks: their rows, and their rubric as reward."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from posttrain import registry
from posttrain.data.base import Task
from posttrain.errors import RewardFailure, UsageError
from posttrain.graders.column_rewards import await_results
from posttrain.graders.grading import MeasuredReward
from posttrain.registry import register
from posttrain.types import Example, Message
from posttrain.untrusted import harmless

INSTALL = "pip install 'verifiers<0.2'"
ROW = "verifiers"  # key of ``meta`` with the row as the environment has it


@register("task", held_out="validation")
def verifiers_rows(
    *, load: str, args: dict[str, Any] | None = None, split: Literal["train", "validation"] = "train"
) -> Task:
    """Rows of an environment: its training data, or as ``validation`` its evaluation data.

    ``{name: "verifiers_adapter:verifiers_rows", load: "my_env:load_environment"}`` with the reward
    ``{name: "verifiers_adapter:verifiers_rubric", load: "my_env:load_environment"}``.

    Args:
        load: the package of the environment (as its hub installs it) and its function.
        args: of that function.

    Source: verifiers, https://github.com/PrimeIntellect-ai/verifiers.

    Raises:
        UsageError: ``verifiers`` is not installed, the environment cannot be loaded, or it answers the model.
    """
    environment = _environment("task", load, args)
    try:
        table = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    except Exception as error:  # an environment raises what it likes
        raise UsageError(f"task.split: {load} has no rows for {split}: {harmless(str(error))}") from error
    examples = []
    for number, row in enumerate(table):
        messages = [Message(str(one["role"]), _text_of(one)) for one in row["prompt"]]
        answer = row.get("answer")
        meta = {ROW: {key: value for key, value in row.items() if value is not None}}
        examples.append(
            Example(
                f"{load.partition(':')[0]}/{split}/{number}",
                tuple(messages),
                answer=None if answer in (None, "") else str(answer),
                meta=meta,
                grader="exact",
                is_conversation=True,
            )
        )
    return Task(load, split, examples)


@register("reward", batched=True)
def verifiers_rubric(
    example: Sequence[Example],
    text: Sequence[str],
    finish: Sequence[str],
    *,
    load: str,
    args: dict[str, Any] | None = None,
) -> list[MeasuredReward]:
    """The reward of the environment's rubric, with each of its functions as ``rubric/NAME``.

    The environment's own loop runs, with the sampled answer in place of a model's.

    Args:
        load: as of the task.
        args: as of the task.

    Source: verifiers, https://github.com/PrimeIntellect-ai/verifiers.

    Raises:
        UsageError: as the task.
        RewardFailure: the environment failed, or a reward is no finite number.
    """
    environment = _environment("rewards", load, args)
    work = [_score(environment, *one) for one in zip(example, text, finish, strict=True)]
    rewards = []
    for one, state in zip(example, await_results(work), strict=True):
        error = state if isinstance(state, BaseException) else state.get("error")  # type: ignore[attr-defined]
        if error is not None:
            what = harmless(f"{type(error).__name__}: {error}")
            raise RewardFailure(f"reward 'verifiers_rubric', example {one.id!r}: the environment failed ({what})")
        metrics = {f"rubric/{name}": float(value) for name, value in (state["metrics"] or {}).items()}  # type: ignore[index]
        numbers = {"verifiers_rubric": float(state["reward"]), **metrics}  # type: ignore[index]
        wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
        if wrong:
            raise RewardFailure(f"reward {wrong[0]!r}, example {one.id!r}: it is {numbers[wrong[0]]}, no finite number")
        rewards.append(MeasuredReward(numbers["verifiers_rubric"], metrics))
    return rewards


async def _score(environment: Any, example: Example, text: str, finish: str) -> Any:
    """The state of an episode in which the model says ``text``."""
    row = example.meta.get(ROW)
    if row is None:
        raise UsageError(
            "rewards: verifiers_adapter:verifiers_rubric scores rows of the task verifiers_adapter:verifiers_rows alone"
        )
    state = await environment.rollout(dict(row), _writer()(text, finish), "posttrain", {})
    await environment.rubric.score_rollout(state)
    await environment.rubric.cleanup(state)
    return state


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError("task.load: its prompts have parts that are no text, which models here cannot read")
    return "".join(texts)


def _environment(key: str, load: str, args: dict[str, Any] | None) -> Any:
    """The environment of a package, made once in a process."""
    if ":" not in load:
        module = load.rpartition("/")[2].replace("-", "_")
        raise UsageError(f"{key}.load: {load!r} names no function. Write load: {module}:load_environment")
    function = registry.import_component("task", load, f"{key}.load").function
    return _made(key, load, function, json.dumps(args or {}, sort_keys=True))


@lru_cache(maxsize=16)
def _made(key: str, load: str, function: Any, args: str) -> Any:
    vf = _package()
    try:
        environment = function(**json.loads(args))
    except Exception as error:  # a package raises what it likes
        raise UsageError(f"{key}.load: {load} raised {type(error).__name__}: {harmless(str(error))}") from error
    if not isinstance(environment, vf.SingleTurnEnv):
        raise UsageError(
            f"{key}.load: {load} is a {type(environment).__name__}, and only a SingleTurnEnv is a task here. One that "
            "answers the model is evaluated by vf-eval against posttrain serve"
        )
    if environment.rubric._get_group_reward_funcs() or getattr(environment.rubric, "has_group_rewards", False):
        raise UsageError(f"{key}.load: {load} has rewards of whole groups, which a reward of one answer is not")
    return environment


@lru_cache(maxsize=1)
def _package() -> Any:
    try:
        import verifiers
    except ImportError:
        raise UsageError(f"this task needs the package verifiers: {INSTALL}") from None
    if not hasattr(verifiers, "SingleTurnEnv"):
        version = getattr(verifiers, "__version__", "this version")
        raise UsageError(f"verifiers {version} has no environments with load_environment: {INSTALL}")
    return verifiers


@lru_cache(maxsize=1)
def _writer() -> Any:
    """A client of verifiers that says one given text."""
    _package()
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Writer(Client):  # type: ignore[misc]
        def __init__(self, text: str, finish: str) -> None:
            super().__init__(None)
            self.text, self.finish = text, finish

        async def get_response(self, *prompt: Any, **options: Any) -> Any:
            reason = "stop" if self.finish == "stop" else "length"
            message = ResponseMessage(
                role="assistant", content=self.text, finish_reason=reason, is_truncated=reason == "length"
            )
            return Response(id="sampled", created=0, model="posttrain", message=message)

        async def close(self) -> None:
            pass

        async def _nothing(self, *given: Any, **options: Any) -> None:
            pass

        setup_client = to_native_tool = to_native_prompt = get_native_response = _nothing
        raise_from_native_response = from_native_response = _nothing

    return Writer
