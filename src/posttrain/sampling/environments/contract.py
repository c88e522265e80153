"""The contract of an environment: a class whose ``reset`` begins an episode and whose public methods are tools.

It is that of TRL's ``environment_factory``, so that a class written for it runs as it is:

- It is made without arguments, once for each completion. (Keyword-only parameters with types are its options.)
- ``reset(**row) -> str | None`` begins an episode. It gets the example's fields that it names (``id``, ``prompt``,
  ``answer``, those of ``meta``, and ``seed``, the same for all completions of a group). The text that it returns
  follows the prompt's last user message.
- Every other public method is a tool: its parameters have types, it has a docstring, the model reads its result. The
  model also reads its exceptions, which are recorded.
- ``get_reward() -> float`` (optional): the reward ``environment``, read once, at the end.
- ``get_turn_reward() -> float`` (optional): the reward ``turn_rewards``, read once after each turn with calls.
- ``get_feedback() -> str | None`` (optional): what it says of the whole answer to a teacher that sees that
  (``teacher.sees: environment``), read once, at the end.
- An attribute ``done`` (optional) that has become true ends the episode.
- ``close()`` (optional) gives back resources.

Methods may be async. One that raises ``EnvironmentFailed``, or fails in ``reset``, ``get_reward``,
``get_turn_reward`` or ``get_feedback``, or is needed again while a call of it hangs, is broken: that is no reward of
0, the episode is played again from the same seed.
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
from posttrain.sampling.environments.tools import EnvironmentFailed, Tool, make_tool, result_text
from posttrain.types import Call, CallOutcome, Example, Message

if TYPE_CHECKING:
    from posttrain.sampling.environments.mcp_tools import McpConnection

NO_TOOLS = ("reset", "get_reward", "get_turn_reward", "get_feedback", "close")


@dataclass(frozen=True)
class Toolset:
    """The environment of a recipe, made anew for each completion, and its tools.

    ``name`` is for messages; ``make`` is None where there are only tools. ``connections``: with servers of tools.
    """

    name: str
    make: Callable[[], Any] | None
    tools: Mapping[str, Tool]
    gives_reward: bool
    pays_turns: bool = False
    gives_feedback: bool = False
    connections: Sequence[McpConnection] = ()

    def close(self) -> None:
        """End the servers that were started; a tool that is called later starts its own again."""
        for connection in self.connections:
            connection.close()


def build_toolset(environment: Component | None, named: Sequence[Component] = ()) -> Toolset:
    """Return the environment and the tools of a recipe, checked: one environment is made for that.

    Raises:
        UsageError: no such environment; a class without reset; a tool without types or docstring; two of one name.
        UnallowedCode: code that is not allowed.
    """
    tools: dict[str, Tool] = {}
    make = None
    gives_reward = False
    pays_turns = False
    gives_feedback = False
    name = "tools"
    if environment is not None:
        name = environment.name
        make = registry.find("environment", name, "environment").bind(environment.options, "environment")
        place = f"environment {name!r}"
        probe = registry.call("environment", make)
        kind = type(probe)
        if not callable(getattr(kind, "reset", None)):
            raise UsageError(f"{place}: it has no method reset, which begins an episode; write reset(self, **row)")
        gives_reward = callable(getattr(kind, "get_reward", None))
        pays_turns = callable(getattr(kind, "get_turn_reward", None))
        gives_feedback = callable(getattr(kind, "get_feedback", None))
        # A base's methods first, in the order in which they are written.
        members = []
        for base in reversed(kind.__mro__[:-1]):
            members += [name for name, member in vars(base).items() if isfunction(member)]
        for method in members:
            function = getattr(kind, method)
            if not method.startswith("_") and method not in NO_TOOLS and isfunction(function):
                tools[method] = make_tool(function, place, method=True)
        close = getattr(kind, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            registry.call("environment", probe.close)
    connections: list[McpConnection] = []
    _add_tools(named, tools, connections)
    if not tools:
        raise UsageError(f"environment {name!r}: it has no public method that a model could call; write one")
    return Toolset(name, make, tools, gives_reward, pays_turns, gives_feedback, tuple(connections))


def _add_tools(named: Sequence[Component], tools: dict[str, Tool], connections: list[McpConnection]) -> None:
    """Add the tools that a recipe names, and the connections with their servers, which end if one cannot be used."""
    try:
        for index, component in enumerate(named):
            where = f"tools.{index}"
            for tool in _tools_of(component, where, connections):
                if tool.name in tools:
                    raise RecipeError(f"{where}: there is a tool named {tool.name!r} already; leave one of them out")
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
    """Refuse rewards that the environment does not give, and a teacher that is to see what it does not say.

    Raises:
        UsageError: with the method that is missing.
    """
    if wants_feedback and not toolset.gives_feedback:
        raise UsageError(f"teacher.sees environment: {toolset.name!r} has no get_feedback, which says it; write one")
    for reward, method, is_there in (
        ("environment", "get_reward", toolset.gives_reward),
        ("turn_rewards", "get_turn_reward", toolset.pays_turns),
    ):
        if reward in rewards and not is_there:
            raise UsageError(f"rewards: {toolset.name!r} has no {method}, which the reward {reward} asks; write one")


class Session:
    """One episode: an environment of its own, its calls, and its ``failure``, if it is broken.

    Each call runs in the pool, for at most ``seconds``.
    """

    def __init__(self, toolset: Toolset, pool: Pool, seconds: float) -> None:
        self.toolset = toolset
        self.pool = pool
        self.seconds = seconds
        self.environment: Any = None
        self.failure = ""
        self.num_late = 0
        self._late: EnvironmentJob | None = None  # a call of the environment that has not come back
        self._job: EnvironmentJob | None = None

    def begin(self, example: Example, seed: int) -> None:
        """Make the environment and reset it, in the background; ``opening`` waits for that."""
        make = self.toolset.make
        if make is None:
            return

        def reset() -> Any:
            self.environment = make()
            return self.environment.reset(**row_for(self.environment.reset, example, seed))

        self._job = self.pool.submit(reset, self.seconds)

    def opening(self) -> str:
        """Return the text of reset, maybe empty; after an error ``failure`` is set."""
        if self._job is None:
            return ""
        text = self._outcome(self._job, "reset")
        if isinstance(text, str):
            return text
        if text is not None and not self.failure:
            what = type(text).__name__
            self.failure = f"reset returned {what}, which is no text; return what the model is to read, or None"
        return ""

    def call(self, tool: Tool, arguments: Mapping[str, object]) -> EnvironmentJob | None:
        """Begin a call; return None and set ``failure`` where the environment is broken."""
        if not tool.method:
            function = tool.function
        elif self._is_free(f"tool {tool.name!r}"):
            function = getattr(self.environment, tool.name)
        else:
            return None
        return self.pool.submit(lambda: function(**arguments), self.seconds, cancels=not tool.method)

    def answer(self, tool: Tool, raw_arguments: str, job: EnvironmentJob) -> Call:
        """Wait for a call and return its result. ``failure`` is set where the environment is broken."""
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

    @property
    def done(self) -> bool:
        """True once the environment has ended the episode."""
        return bool(getattr(self.environment, "done", False))

    def reward(self) -> float | None:
        """Return get_reward; None without one, or where the environment is broken, with ``failure`` set."""
        if self.toolset.gives_reward:
            return self._number("get_reward")
        return None

    def turn_reward(self) -> float | None:
        """Return get_turn_reward for the turn whose calls were run; None as ``reward``."""
        if self.toolset.pays_turns:
            return self._number("get_turn_reward")
        return None

    def feedback(self) -> str | None:
        """Return get_feedback; None without one, or where the environment is broken, with ``failure`` set."""
        if not self.toolset.gives_feedback or self.failure or not self._is_free("get_feedback"):
            return None
        job = self.pool.submit(self.environment.get_feedback, self.seconds)
        text = self._outcome(job, "get_feedback")
        if isinstance(text, str):
            return text
        if text is not None and not self.failure:
            what = type(text).__name__
            self.failure = f"get_feedback returned {what}, which is no text; return what it says, or None"
        return None

    def close(self) -> EnvironmentJob | None:
        """Begin to close the environment; return None where there is nothing to do."""
        closes = callable(getattr(self.environment, "close", None))
        if closes:
            return self.pool.submit(self.environment.close, self.seconds)
        return None

    def _is_free(self, what: str) -> bool:
        if self._late is not None and not self._late.done:
            self.failure = f"{what} is needed while a call that took longer than {self.seconds:g} seconds still runs"
        return not self.failure

    def _number(self, method: str) -> float | None:
        if self.failure or not self._is_free(method):
            return None
        job = self.pool.submit(getattr(self.environment, method), self.seconds)
        value = self._outcome(job, method)
        if self.failure:
            return None
        if not isinstance(value, Real) or not math.isfinite(float(value)):
            self.failure = f"{method} returned {value!r:.80}, which is no finite number"
            return None
        return float(value)

    def _outcome(self, job: EnvironmentJob, what: str) -> Any:
        self.pool.wait(job)
        if not job.done:
            self.failure = f"{what} took longer than {self.seconds:g} seconds (rollout.tool_seconds)"
        elif job.error is not None:
            self.failure = f"{what} raised {type(job.error).__name__}: {job.error}"
        return job.result


def row_for(reset: Callable[..., Any], example: Example, seed: int) -> dict[str, Any]:
    """Return the example's fields and the seed that ``reset`` names; all, if it takes any."""
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
    """Return the messages of an example with an environment's opening appended to the last one of the user."""
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
