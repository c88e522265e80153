"""verifiers environments, including packages from its hub: rows as tasks, rubrics as rewards, and multi-turn play."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from posttrain import registry
from posttrain.data.base import Task
from posttrain.errors import RewardFailure, UsageError
from posttrain.graders.column_rewards import await_results
from posttrain.graders.grading import MeasuredReward
from posttrain.registry import register
from posttrain.sampling.environments.contract import EnvironmentFailed
from posttrain.types import Example, Message
from posttrain.untrusted import harmless

INSTALL = "pip install 'verifiers<0.2'"
STUCK_SECONDS = 5.0
ROW = "verifiers"  # key of ``meta`` with the row as the environment has it


@register("task", held_out="validation")
def verifiers_rows(
    *, load: str, args: dict[str, Any] | None = None, split: Literal["train", "validation"] = "train"
) -> Task:
    """Rows of a single-turn environment: training data, or evaluation data for split ``validation``.

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
    _refuse_answering("task.load", load, environment)
    return _rows(environment, load, split)


@register("task", held_out="validation", played=True)
def verifiers_episodes(
    *, load: str, args: dict[str, Any] | None = None, split: Literal["train", "validation"] = "train"
) -> Task:
    """Rows of a multi-turn environment, to be used with the environment ``verifiers_turns``.

    Args:
        load: as of ``verifiers_rows``.
        args: as of ``verifiers_rows``.

    Source: verifiers, https://github.com/PrimeIntellect-ai/verifiers.

    Raises:
        UsageError: ``verifiers`` is not installed, or the environment cannot be loaded or played here.
    """
    return _rows(_environment("task", load, args), load, split)


def _refuse_answering(key: str, load: str, environment: Any) -> None:
    """Refuse multi-turn environments in single-turn use."""
    if not isinstance(environment, _package().SingleTurnEnv):
        raise UsageError(
            f"{key}: {load} is a {type(environment).__name__}, which is multi-turn. Use the task "
            "verifiers_adapter:verifiers_episodes, the environment verifiers_adapter:verifiers_turns, and the reward "
            "environment"
        )


def _rows(environment: Any, load: str, split: str) -> Task:
    """Convert an environment's rows to examples."""
    warnings = []
    try:
        if split == "train":
            table = environment.get_dataset()
        else:
            table = environment.get_eval_dataset()
            if environment.eval_dataset is None:
                warnings.append(f"task {load}: no evaluation data; using its training data")
    except Exception as error:  # an environment raises what it likes
        raise UsageError(f"task.split: {load} has no rows for {split}: {harmless(str(error))}") from error
    examples = []
    for number, row in enumerate(table):
        _refuse_unreadable(load, row["prompt"])
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
    return Task(load, split, examples, warnings=tuple(warnings))


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
    _refuse_answering("rewards.load", load, environment)
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


def _refuse_unreadable(load: str, prompt: object) -> None:
    """Refuse prompts that are not text-only conversations."""
    if isinstance(prompt, str):
        raise UsageError(f"task.load: {load} has plain text prompts; only conversations are supported")
    for message in prompt:  # type: ignore[attr-defined]
        if message.get("tool_calls") or message["role"] == "tool":
            raise UsageError(f"task.load: {load} has tool calls in its prompts, which are not supported")


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
    try:
        return _made(function, json.dumps(args or {}, sort_keys=True))
    except _Unusable as error:
        raise UsageError(f"{key}.load: {load} {error}") from error


class _Unusable(Exception):
    """Raised if an environment cannot be used. The message follows its name."""


@lru_cache(maxsize=16)
def _made(function: Any, args: str) -> Any:
    """Make an environment; its task, environment and reward share it."""
    vf = _package()
    try:
        environment = function(**json.loads(args))
    except Exception as error:  # a package raises what it likes
        raise _Unusable(f"raised {type(error).__name__}: {harmless(str(error))}") from error
    for one in _parts_of(environment):
        if not isinstance(one, vf.MultiTurnEnv):
            raise _Unusable(
                f"is a {type(one).__name__}, but only subclasses of MultiTurnEnv (SingleTurnEnv, "
                "ToolEnv, StatefulToolEnv) and groups of them are supported. Evaluate it with vf-eval against "
                "posttrain serve"
            )
        if one.rubric._get_group_reward_funcs() or getattr(one.rubric, "has_group_rewards", False):
            raise _Unusable("has group rewards, which are not supported")
        if one.max_total_completion_tokens > 0:
            raise _Unusable("sets max_total_completion_tokens; set rollout.max_tokens instead")
        if one is not environment and one.tool_defs:
            raise _Unusable("is a group with tools; tools must be the same for all rows")
        if hasattr(one, "error_formatter"):
            one.error_formatter = _noting(one.error_formatter)
    return environment


def _parts_of(environment: Any) -> Iterator[Any]:
    """Yield the environment itself, or all members of a group."""
    if not isinstance(environment, _package().EnvGroup):
        yield environment
        return
    for part in environment.envs:
        yield from _parts_of(part)


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


def _response(text: str, finish: str, calls: Sequence[Mapping[str, str]] = ()) -> Any:
    """Build a model response with text and calls, truncated unless ``finish`` is ``stop``."""
    from verifiers.types import Response, ResponseMessage, ToolCall

    is_cut = finish != "stop"
    reason = "stop"
    if is_cut:
        reason = "length"
    elif calls:
        reason = "tool_calls"
    named = [ToolCall(**call) for call in calls] or None
    content = text
    if calls and not text:
        content = None  # type: ignore[assignment]  # like chat completion servers
    message = ResponseMessage(
        role="assistant", content=content, tool_calls=named, finish_reason=reason, is_truncated=is_cut
    )
    return Response(id="sampled", created=0, model="posttrain", message=message)


@lru_cache(maxsize=1)
def _base_client() -> Any:
    """Base class for verifiers clients without a connection."""
    _package()
    from verifiers.clients import Client

    class Unconnected(Client):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(None)

        async def close(self) -> None:
            pass

        async def _nothing(self, *given: Any, **options: Any) -> None:
            pass

        setup_client = to_native_tool = to_native_prompt = get_native_response = _nothing
        raise_from_native_response = from_native_response = _nothing

    return Unconnected


@lru_cache(maxsize=1)
def _writer() -> Any:
    """A client that returns a given text."""

    class Writer(_base_client()):  # type: ignore[misc]
        def __init__(self, text: str, finish: str) -> None:
            super().__init__()
            self.text, self.finish = text, finish

        async def get_response(self, *prompt: Any, **options: Any) -> Any:
            return _response(self.text, self.finish)

    return Writer


@lru_cache(maxsize=1)
def _asker() -> Any:
    """A client that passes each request to an episode and waits for the model's turn."""

    class Asker(_base_client()):  # type: ignore[misc]
        def __init__(self, requests: asyncio.Queue[_Request]) -> None:
            super().__init__()
            self.requests = requests

        async def get_response(self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            turn = asyncio.get_running_loop().create_future()
            await self.requests.put(_Request([one.model_dump() for one in prompt], _schemas(tools), turn))
            return await turn

    return Asker


class _Request(NamedTuple):
    """A request for the model's next turn. ``turn`` receives the response."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    turn: asyncio.Future[Any]


def _schemas(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Convert tools to OpenAI format."""
    schemas = []
    for tool in tools or ():
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        schemas.append({"type": "function", "function": function})
    return schemas


_choosing = threading.Lock()
_errors: ContextVar[list[str] | None] = ContextVar("tool errors in this episode", default=None)


def _noting(formatter: Any) -> Any:
    """Wrap an ``error_formatter`` to record its output, so that failed calls are recorded as failed."""

    def note(error: Exception) -> str:
        text = str(formatter(error))
        errors = _errors.get()
        if errors is not None:
            errors.append(text)
        return text

    return note


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """Event loop for all episodes, because an environment's clients and locks belong to a single loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def _free_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, or a new one if it is blocked: verifiers runs synchronous tools in the loop."""
    with _choosing:
        loop = _loop()
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        if not answered.wait(STUCK_SECONDS):
            _loop.cache_clear()
        return _loop()


@register("environment")
def verifiers_turns(*, load: str, args: dict[str, Any] | None = None) -> VerifiersTurns:
    """A multi-turn or tool environment of verifiers, rewarded by its rubric.

    ``{name: "verifiers_adapter:verifiers_turns", load: "my_env:load_environment"}`` with the task
    ``verifiers_adapter:verifiers_episodes`` of the same ``load`` and ``args``, and the reward ``environment``, which
    records each rubric function as ``rubric/NAME``. verifiers' own loop runs, with sampled turns instead of server
    requests. Both ``max_turns`` and ``rollout.max_turns`` apply.

    Args:
        load: as of the task.
        args: as of the task.

    Source: verifiers, https://github.com/PrimeIntellect-ai/verifiers. It sends the whole conversation as text with
    each request. Here sampled tokens are kept, so episodes that rewrite earlier messages fail.

    Raises:
        UsageError: as the task.
    """
    return VerifiersTurns(_environment("environment", load, args))


class VerifiersTurns:
    """See ``verifiers_turns``."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.tools = _schemas(environment.tool_defs)
        self.done = False
        self._metrics: dict[str, float] = {}
        self._errors: list[str] = []
        self._messages: list[dict[str, Any]] = []  # conversation so far
        self._asked: _Request | None = None  # pending request
        self._state: Any = None
        self._rollout: asyncio.Task[Any] | None = None

    def reset(self, verifiers: Mapping[str, Any] | None = None) -> None:
        """Start the environment's loop for a row."""
        if verifiers is None:
            raise EnvironmentFailed("use it with rows from the task verifiers_adapter:verifiers_episodes")
        self._loop = _free_loop()
        self._wait_for(self._begin(dict(verifiers)))

    def respond(self, text: str, calls: list[dict[str, str]], finish: str) -> list[dict[str, str]] | None:
        """Pass on a turn; returns the environment's reply."""
        return self._wait_for(self._pass_on(text, calls, finish))

    def get_reward(self) -> float:
        """Score the episode with the rubric."""
        return self._wait_for(self._score())

    def get_metrics(self) -> dict[str, float]:
        """Value of each rubric function."""
        return self._metrics

    def close(self) -> None:
        """Stop the environment's loop if it is still running."""
        rollout = self._rollout
        if rollout is not None and not rollout.done():
            rollout.get_loop().call_soon_threadsafe(rollout.cancel)

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self, row: dict[str, Any]) -> None:
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        _errors.set(self._errors)  # inherited by tasks created here
        client = _asker()(self._requests)
        self._rollout = asyncio.create_task(self._environment.rollout(row, client, "posttrain", {}))
        request = await self._next()
        if request is None:
            raise EnvironmentFailed("the episode ended before the first turn")
        if [_shown(one) for one in request.messages] != [_shown(one) for one in row["prompt"]]:
            raise EnvironmentFailed(
                "the first request does not match the prompt in its row; such environments are not supported"
            )
        if request.tools != self.tools:
            raise EnvironmentFailed("this row has different tools; tools must be the same for all rows")
        self._messages = request.messages

    async def _pass_on(self, text: str, calls: list[dict[str, str]], finish: str) -> list[dict[str, str]] | None:
        from verifiers.utils.response_utils import parse_response_message

        assert self._asked is not None, "it waits for a turn"
        response = _response(text, finish, calls)
        said = [one.model_dump() for one in await parse_response_message(response)]
        self._asked.turn.set_result(response)
        request = await self._next()
        if request is None:
            self.done = self._state["stop_condition"] != "no_tools_called"
            last = self._state.get("final_env_response")
            if not last:
                return None
            from verifiers.utils.message_utils import normalize_messages

            return self._messages_of([one.model_dump() for one in normalize_messages(last)])
        before = [*self._messages, *said]
        if request.messages[: len(before)] != before:
            raise EnvironmentFailed(
                "the request does not continue the conversation: earlier messages were changed, or it is a different "
                "conversation; only a single growing conversation is supported"
            )
        if request.tools != self.tools:
            raise EnvironmentFailed("tools changed within an episode; they are shown only once, in the prompt")
        self._messages = request.messages
        return self._messages_of(request.messages[len(before) :])

    def _messages_of(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        written = []
        for message in messages:
            one = {"role": message["role"], "content": _text_of(message)}
            if message["role"] == "tool":
                one["tool_call_id"] = message["tool_call_id"]
                if one["content"] in self._errors:
                    one["outcome"] = "failed"
            written.append(one)
        return written

    async def _next(self) -> _Request | None:
        """Wait for the next request; None if the loop has ended.

        Raises:
            EnvironmentFailed: the environment failed.
        """
        import verifiers as vf

        assert self._rollout is not None, "it has begun"
        asking = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({asking, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        self._asked = None
        if asking.done():
            self._asked = asking.result()
            return self._asked
        asking.cancel()
        self._state = await self._rollout
        error = self._state.get("error")
        if error is not None and not isinstance(error, vf.ToolError):  # caused by the model, so the episode is scored
            cause = error.__cause__ or error
            raise EnvironmentFailed(harmless(f"{type(cause).__name__}: {cause}"))
        return None

    async def _score(self) -> float:
        """Score the episode. If no tokens or turns are left, end the loop first, like for an overlong prompt."""
        import verifiers as vf

        while self._asked is not None:
            self._asked.turn.set_exception(vf.OverlongPromptError("no more turns"))
            await self._next()
        rubric = self._environment.rubric
        if self._environment.score_rollouts:
            await rubric.score_rollout(self._state)
        else:
            await rubric.dummy_score_rollout(self._state)
        await rubric.cleanup(self._state)
        self._metrics = {f"rubric/{name}": float(value) for name, value in (self._state["metrics"] or {}).items()}
        return float(self._state["reward"])


def _shown(message: Mapping[str, Any]) -> tuple[str, str]:
    return str(message["role"]), _text_of(message)
