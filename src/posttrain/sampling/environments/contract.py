"""Environment contract: a class with ``reset`` to begin an episode, and public methods as tools.

Compatible with TRL's ``environment_factory``, so existing classes work unchanged:

- One instance per completion, constructed without arguments. Typed keyword-only parameters become options.
- ``reset(**row) -> str | None`` begins an episode. It receives the example fields it declares (``id``, ``prompt``,
  ``answer``, entries of ``meta``, and a ``seed`` shared within each group). The returned text is appended to the last
  user message.
- Other public methods are tools. Parameters need types and the method needs a docstring. Results and exceptions are
  shown to the model and recorded.
- ``get_reward() -> float`` (optional): reward ``environment``, read once per episode.
- ``get_turn_reward() -> float`` (optional): reward ``turn_rewards``, read after each turn with calls.
- ``get_feedback() -> str | None`` (optional): feedback on the whole answer for teachers with ``teacher.sees:
  environment``, read once per episode.
- ``get_metrics() -> dict[str, float]`` (optional): numbers recorded next to reward ``environment``.
- ``respond(text) -> str | list[dict] | None`` (optional): reply to a turn without tool calls, as a user message or
  messages (``{"role": "user", "content": "..."}``). None ends the episode, as every turn without calls does otherwise.
  ``finish`` is ``length`` for a turn that was cut off, which gets no reply. If ``respond`` asks for ``calls``
  (``[{"id", "name", "arguments"}]``, arguments as JSON), it answers turns with calls too. Then methods are no tools:
  the attribute ``tools`` describes them in OpenAI's format, and results are messages ``{"role": "tool",
  "tool_call_id", "content"}``.
- ``done`` (optional attribute): if true, the episode ends.
- ``close()`` (optional): release resources.

Methods may be async. An environment is broken if it raises ``EnvironmentFailed``, if ``reset``, ``respond``,
``get_reward``, ``get_turn_reward``, ``get_metrics`` or ``get_feedback`` fails, or if it is needed while a call hangs.
Broken episodes do not count as reward 0; they are repeated with the same seed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from numbers import Real
from typing import TYPE_CHECKING, Any

from posttrain import registry
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.sections import Component
from posttrain.recipes.tool_servers import is_function, read_server
from posttrain.sampling.environments.pool import EnvironmentJob, Pool
from posttrain.sampling.environments.replies import (
    EnvironmentReply,
    HeardTurn,
    Responder,
    read_reply,
    read_responder,
)
from posttrain.sampling.environments.tools import EnvironmentFailed, Tool, make_tool, result_text
from posttrain.types import Call, CallOutcome, Example, Message

if TYPE_CHECKING:
    from posttrain.sampling.environments.mcp_tools import McpConnection

NO_TOOLS = ("reset", "respond", "get_reward", "get_turn_reward", "get_metrics", "get_feedback", "close")


@dataclass(frozen=True)
class Toolset:
    """A recipe's environment and tools.

    ``name`` is used in messages. ``make`` builds an environment for each completion; None if only tools are used.
    ``connections``: to tool servers. ``responder``: how the environment replies to turns, if it does.
    """

    name: str
    make: Callable[[], Any] | None
    tools: Mapping[str, Tool]
    gives_reward: bool
    pays_turns: bool = False
    gives_feedback: bool = False
    connections: Sequence[McpConnection] = ()
    gives_metrics: bool = False
    responder: Responder | None = None

    @property
    def answers_calls(self) -> bool:
        """True if the environment itself answers tool calls."""
        return self.responder is not None and self.responder.answers_calls

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """All tools in OpenAI's format."""
        if self.responder is not None and self.responder.answers_calls:
            return list(self.responder.tools)
        return [tool.schema for tool in self.tools.values()]

    def close(self) -> None:
        """Stop the tool servers. A later call starts its server again."""
        for connection in self.connections:
            connection.close()


def build_toolset(environment: Component | None, named: Sequence[Component] = ()) -> Toolset:
    """Build and check a recipe's environment and tools, constructing one environment for inspection.

    Raises:
        UsageError: unknown environment, missing ``reset``, tools without types or docstrings, or duplicate tool names.
        UnallowedCode: code was not allowed.
    """
    tools: dict[str, Tool] = {}
    make = None
    gives_reward = False
    pays_turns = False
    gives_feedback = False
    gives_metrics = False
    responder = None
    name = "tools"
    if environment is not None:
        name = environment.name
        make = registry.find("environment", name, "environment").bind(environment.options, "environment")
        place = f"environment {name!r}"
        probe = registry.call("environment", make)
        kind = type(probe)
        if not callable(getattr(kind, "reset", None)):
            raise UsageError(f"{place}: reset is missing; define reset(self, **row) to begin an episode")
        gives_reward = callable(getattr(kind, "get_reward", None))
        pays_turns = callable(getattr(kind, "get_turn_reward", None))
        gives_feedback = callable(getattr(kind, "get_feedback", None))
        gives_metrics = callable(getattr(kind, "get_metrics", None))
        responder = read_responder(probe, place)
        if responder is None or not responder.answers_calls:
            tools.update(_methods_as_tools(kind, place))
        elif named:
            raise UsageError(f"tools: {place} answers all calls itself; leave out tools")
        close = getattr(kind, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            registry.call("environment", probe.close)
    connections: list[McpConnection] = []
    _add_tools(named, tools, connections)
    if not tools and responder is None:
        raise UsageError(
            f"environment {name!r}: no public method for a model to call; define at least one, or respond(self, text)"
        )
    opened = tuple(connections)
    return Toolset(name, make, tools, gives_reward, pays_turns, gives_feedback, opened, gives_metrics, responder)


def _methods_as_tools(kind: type, place: str) -> dict[str, Tool]:
    """Build tools from public methods: those of base classes first, in definition order."""
    tools: dict[str, Tool] = {}
    members = []
    for base in reversed(kind.__mro__[:-1]):
        members += [name for name, member in vars(base).items() if isfunction(member)]
    for method in members:
        function = getattr(kind, method)
        if not method.startswith("_") and method not in NO_TOOLS and isfunction(function):
            tools[method] = make_tool(function, place, method=True)
    return tools


def _add_tools(named: Sequence[Component], tools: dict[str, Tool], connections: list[McpConnection]) -> None:
    """Add a recipe's tools and the connections to their servers; after an error all connections are closed."""
    try:
        for index, component in enumerate(named):
            where = f"tools.{index}"
            for tool in _tools_of(component, where, connections):
                if tool.name in tools:
                    raise RecipeError(f"{where}: duplicate tool {tool.name!r}; rename or leave out one of them")
                tools[tool.name] = tool
    except BaseException:
        for connection in connections:
            connection.close()
        raise


def _tools_of(component: Component, where: str, connections: list[McpConnection]) -> Sequence[Tool]:
    if is_function(component, where):
        function = registry.import_component("tool", component.name, where).function
        return [make_tool(function, f"{where}: {component.name}")]
    server = read_server(component, where)
    from posttrain.sampling.environments.mcp_tools import serve_tools

    served = serve_tools(server, where)
    connections.append(served.connection)
    return served.tools


def refuse_unpaid(toolset: Toolset, rewards: Sequence[str], *, wants_feedback: bool = False) -> None:
    """Refuse rewards or teacher feedback that an environment does not provide.

    Raises:
        UsageError: names the missing method.
    """
    if wants_feedback and not toolset.gives_feedback:
        raise UsageError(f"teacher.sees environment: {toolset.name!r} does not define get_feedback; define it")
    for reward, method, is_there in (
        ("environment", "get_reward", toolset.gives_reward),
        ("turn_rewards", "get_turn_reward", toolset.pays_turns),
    ):
        if reward in rewards and not is_there:
            raise UsageError(
                f"rewards: {toolset.name!r} does not define {method}, required by reward {reward}; define it"
            )


class Session:
    """One episode with its environment and calls. ``failure`` is set if the environment is broken.

    Each call runs in the pool for at most ``seconds``.
    """

    def __init__(self, toolset: Toolset, pool: Pool, seconds: float) -> None:
        self.toolset = toolset
        self.pool = pool
        self.seconds = seconds
        self.environment: Any = None
        self.failure = ""
        self.num_late = 0
        self._late: EnvironmentJob | None = None  # a hanging environment call
        self._job: EnvironmentJob | None = None

    def begin(self, example: Example, seed: int) -> None:
        """Construct and reset the environment in the background; ``opening`` waits for it."""
        make = self.toolset.make
        if make is None:
            return

        def reset() -> Any:
            self.environment = make()
            return self.environment.reset(**row_for(self.environment.reset, example, seed))

        self._job = self.pool.submit(reset, self.seconds)

    def opening(self) -> str:
        """Wait for reset and return its text, possibly empty. Sets ``failure`` on errors."""
        if self._job is None:
            return ""
        text = self._outcome(self._job, "reset")
        if isinstance(text, str):
            return text
        if text is not None and not self.failure:
            what = type(text).__name__
            self.failure = f"reset returned {what}, not a string; return text for the model, or None"
        return ""

    def call(self, tool: Tool, arguments: Mapping[str, object]) -> EnvironmentJob | None:
        """Start a call. Returns None and sets ``failure`` if the environment is broken."""
        if not tool.method:
            function = tool.function
        elif self._is_free(f"tool {tool.name!r}"):
            function = getattr(self.environment, tool.name)
        else:
            return None
        return self.pool.submit(lambda: function(**arguments), self.seconds, cancels=not tool.method)

    def answer(self, tool: Tool, raw_arguments: str, job: EnvironmentJob) -> Call:
        """Wait for a call and return its result. Sets ``failure`` if the environment is broken."""
        self.pool.wait(job)
        outcome: CallOutcome = "ok"
        if job.late:
            outcome = "timeout"
            text = f"{tool.name} took longer than {self.seconds:g} seconds and was given up"
            self.num_late += 1
            if tool.method:
                self._late = job
        elif isinstance(job.error, EnvironmentFailed):
            outcome = "failed"
            text = str(job.error)
            self.failure = f"tool {tool.name!r}: {job.error}"
        elif job.error is not None:
            outcome = "failed"
            text = f"{type(job.error).__name__}: {job.error}"
        else:
            text = result_text(job.result)
        return Call(tool.name, raw_arguments, result_text(text), outcome)

    def respond(self, turn: HeardTurn) -> EnvironmentJob | None:
        """Start the environment's reply to a turn. Returns None and sets ``failure`` if it is broken."""
        responder = self.toolset.responder
        assert responder is not None, "it responds"
        if not self._is_free("respond"):
            return None
        arguments = turn.arguments(responder.arguments)
        return self.pool.submit(lambda: self.environment.respond(**arguments), self.seconds)

    def replied(self, turn: HeardTurn, job: EnvironmentJob | None) -> EnvironmentReply | None:
        """Wait for a reply; None ends the episode. Sets ``failure`` if the environment is broken."""
        if job is None:
            return None
        returned = self._outcome(job, "respond")
        if not self.failure:
            try:
                return read_reply(returned, turn)
            except ValueError as error:
                self.failure = str(error)
        return None

    @property
    def done(self) -> bool:
        """True once the environment ended this episode."""
        return bool(getattr(self.environment, "done", False))

    def reward(self) -> float | None:
        """Read ``get_reward``; None if undefined or broken, in which case ``failure`` is set."""
        if self.toolset.gives_reward:
            return self._number("get_reward")
        return None

    def turn_reward(self) -> float | None:
        """Read ``get_turn_reward`` after running a turn's calls; None in the same cases as ``reward``."""
        if self.toolset.pays_turns:
            return self._number("get_turn_reward")
        return None

    def metrics(self) -> dict[str, float]:
        """Read ``get_metrics``; empty if undefined or broken, in which case ``failure`` is set."""
        if not self.toolset.gives_metrics or self.failure or not self._is_free("get_metrics"):
            return {}
        numbers = self._outcome(self.pool.submit(self.environment.get_metrics, self.seconds), "get_metrics")
        if self.failure:
            return {}
        if not isinstance(numbers, Mapping):
            self.failure = f"get_metrics returned {numbers!r:.80}, not numbers by name"
            return {}
        for name, value in numbers.items():
            if not isinstance(name, str) or not isinstance(value, Real) or not math.isfinite(float(value)):
                self.failure = f"get_metrics returned {name!r:.80}: {value!r:.80}, not a name and a finite number"
                return {}
        return {name: float(value) for name, value in numbers.items()}

    def feedback(self) -> str | None:
        """Read ``get_feedback``; None if undefined or broken, in which case ``failure`` is set."""
        if not self.toolset.gives_feedback or self.failure or not self._is_free("get_feedback"):
            return None
        job = self.pool.submit(self.environment.get_feedback, self.seconds)
        text = self._outcome(job, "get_feedback")
        if isinstance(text, str):
            return text
        if text is not None and not self.failure:
            what = type(text).__name__
            self.failure = f"get_feedback returned {what}, not a string; return feedback text, or None"
        return None

    def close(self) -> EnvironmentJob | None:
        """Start closing the environment; None if ``close`` is undefined."""
        closes = callable(getattr(self.environment, "close", None))
        if closes:
            return self.pool.submit(self.environment.close, self.seconds)
        return None

    def _is_free(self, what: str) -> bool:
        if self._late is not None and not self._late.done:
            self.failure = f"{what} is needed while a call still runs after {self.seconds:g} seconds"
        return not self.failure

    def _number(self, method: str) -> float | None:
        if self.failure or not self._is_free(method):
            return None
        job = self.pool.submit(getattr(self.environment, method), self.seconds)
        value = self._outcome(job, method)
        if self.failure:
            return None
        if not isinstance(value, Real) or not math.isfinite(float(value)):
            self.failure = f"{method} returned {value!r:.80}, not a finite number"
            return None
        return float(value)

    def _outcome(self, job: EnvironmentJob, what: str) -> Any:
        self.pool.wait(job)
        if not job.done:
            self.failure = f"{what} took longer than {self.seconds:g} seconds (rollout.tool_seconds)"
        elif isinstance(job.error, EnvironmentFailed):
            self.failure = f"{what}: {job.error}"
        elif job.error is not None:
            self.failure = f"{what} raised {type(job.error).__name__}: {job.error}"
        return job.result


def row_for(reset: Callable[..., Any], example: Example, seed: int) -> dict[str, Any]:
    """Select the example fields and seed declared by ``reset``; all of them if it accepts keyword arguments."""
    fields: dict[str, Any] = {name: value for name, value in example.meta.items() if name.isidentifier()}
    fields["id"] = example.id
    fields["prompt"] = [{"role": message.role, "content": message.content} for message in example.messages]
    fields["answer"] = example.answer
    fields["seed"] = seed
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return fields
    return {parameter.name: fields[parameter.name] for parameter in parameters if parameter.name in fields}


def opened(example: Example, text: str) -> list[Message]:
    """Append an environment's opening to the last user message."""
    messages = list(example.messages)
    if not text.strip():
        return messages
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None:
        return [*messages, Message("user", text)]
    content = messages[last].content
    if content.strip():
        text = f"{content}\n\n{text}"
    messages[last] = Message("user", text)
    return messages
