"""Environment method ``respond``: available arguments, and allowed return values."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from posttrain.errors import UsageError
from posttrain.registry import suggest
from posttrain.sampling.environments.tools import result_text
from posttrain.types import Call, CallOutcome, Finish

ARGUMENTS = ("text", "calls", "finish")


@dataclass(frozen=True)
class Responder:
    """Arguments requested by an environment's ``respond``. With ``calls``, it answers all turns and has ``tools``."""

    arguments: frozenset[str]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def answers_calls(self) -> bool:
        """True if it also answers turns with tool calls."""
        return "calls" in self.arguments


@dataclass(frozen=True)
class HeardTurn:
    """A finished turn: text without calls, and calls as (name, JSON arguments). ``finish``: ``stop`` or ``length``."""

    text: str
    calls: Sequence[tuple[str, str]]
    finish: Finish

    def arguments(self, names: frozenset[str]) -> dict[str, object]:
        """Select arguments for ``respond``."""
        listed = []
        for number, (name, arguments) in enumerate(self.calls):
            listed.append({"id": f"call_{number}", "name": name, "arguments": arguments})
        available: dict[str, object] = {"text": self.text, "calls": listed, "finish": self.finish}
        return {name: available[name] for name in names}


@dataclass(frozen=True)
class EnvironmentReply:
    """Messages following a turn, all with the same role. ``calls``: calls in this turn, with results."""

    role: Literal["tool", "user"] = "user"
    contents: tuple[str, ...] = ()
    calls: tuple[Call, ...] = field(default=())

    @property
    def said(self) -> tuple[str, ...]:
        """Contents of user messages."""
        if self.role == "tool":
            return ()
        return self.contents


def read_responder(environment: object, place: str) -> Responder | None:
    """Inspect an environment's ``respond``; None if undefined.

    Raises:
        UsageError: unknown arguments, or ``tools`` not in OpenAI format.
    """
    if not callable(getattr(type(environment), "respond", None)):
        return None
    respond: Callable[..., object] = getattr(environment, "respond")  # noqa: B009  # bound, or static
    names = list(inspect.signature(respond).parameters)
    for name in names:
        if name not in ARGUMENTS:
            raise UsageError(
                f"{place}, respond: unknown argument {name!r}.{suggest(name, ARGUMENTS)} Available: "
                f"{', '.join(ARGUMENTS)}"
            )
    tools: Sequence[Mapping[str, Any]] = ()
    if "calls" in names:
        tools = getattr(environment, "tools", ())
    if not isinstance(tools, list | tuple):
        raise UsageError(f"{place}, tools: {tools!r:.80} is not a list of tools; use [] if there are none")
    for tool in tools:
        if not _is_tool(tool):
            raise UsageError(
                f'{place}, tools: {tool!r:.80} is not a tool; write {{"type": "function", "function": {{"name": ..., '
                '"parameters": ...}}'
            )
    named = Counter(str(tool["function"]["name"]) for tool in tools)
    for name, count in named.items():
        if count > 1:
            raise UsageError(f"{place}, tools: {count} tools are named {name!r}; give each its own name")
    return Responder(frozenset(names), tuple(tools))


def _is_tool(tool: object) -> bool:
    """Check if a tool is described in OpenAI's format; parameters are optional."""
    function = None
    if isinstance(tool, Mapping):
        function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("parameters", {}), Mapping)


def read_reply(returned: object, turn: HeardTurn) -> EnvironmentReply | None:
    """Parse a return value of ``respond``; None ends the episode.

    Raises:
        ValueError: neither text nor messages, mixed roles, or a result without a call.
    """
    if returned is None:
        return None
    if isinstance(returned, str):
        return EnvironmentReply(contents=(result_text(returned),))
    if not isinstance(returned, list | tuple) or not returned:
        raise ValueError(f"respond returned {returned!r:.80}; return text, messages, or None to end the episode")
    roles = set()
    contents: list[str] = []
    results: dict[str, tuple[str, CallOutcome]] = {}
    ids = [f"call_{number}" for number in range(len(turn.calls))]
    for message in returned:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ValueError(f"respond returned {message!r:.80}, which is not a message with role and text")
        roles.add(str(message.get("role")))
        contents.append(result_text(message["content"]))
        if message.get("role") == "tool":
            place = message.get("tool_call_id")
            if place not in ids or place in results:
                raise ValueError(f"respond returned a result for call {place!r:.40}; this turn has: {', '.join(ids)}")
            outcome = message.get("outcome", "ok")
            if outcome not in get_args(CallOutcome):
                raise ValueError(f"respond returned the outcome {outcome!r:.40}; there are {get_args(CallOutcome)}")
            results[place] = (contents[-1], outcome)
    if len(roles) > 1:
        raise ValueError(f"respond returned messages with several roles ({', '.join(sorted(roles))}); use one")
    (role,) = roles
    calls = tuple(
        Call(name, arguments, *results.get(place, ("", "ok")))
        for place, (name, arguments) in zip(ids, turn.calls, strict=True)
    )
    if role == "tool":
        return EnvironmentReply("tool", tuple(contents), calls)
    if role == "user":
        return EnvironmentReply("user", tuple(contents), calls)
    raise ValueError(f"respond returned a message with role {role!r:.40}; use tool or user")
