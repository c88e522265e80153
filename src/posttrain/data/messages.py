"""Parse conversations from rows. Each message key is either used or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from posttrain.data.reading import OTHER_ROLES, ROLES, Row, is_only_space
from posttrain.option_types import shown_with_type
from posttrain.registry import suggest
from posttrain.types import Call, Message

SYSTEM_KEYS = ("system", "system_prompt", "system_message")
QUESTION_KEYS = ("question", "problem", "query")  # alternatives to ``prompt``
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# ``train: false`` and ``weight: 0`` are equivalent: the message is context only.
_TRAINED_KEYS = ("weight", "train")
_CALL_KEYS = ("name", "arguments", "function", "id", "type", "index")
_FUNCTION_KEYS = ("name", "arguments", "parsed_arguments")  # OpenAI's client adds the redundant ``parsed_arguments``
_OTHER_KEYS = ("tool_calls", "tool_call_id", "name", *REASONING_KEYS, *_TRAINED_KEYS)


def read_prompt(row: Row, key: str) -> tuple[Message, ...]:
    """Read a prompt. Text becomes a user message; messages must not end with the assistant."""
    if row.is_text(key) or key not in row.data:
        return (Message("user", row.text(key)),)
    messages = read_messages(row, key)
    row.refuse_if(
        messages[-1].role == "assistant",
        f"{key!r} ends with an assistant message, but must end before the response",
    )
    return messages


def read_messages(
    row: Row, key: str, *, before: Sequence[Message] = (), ends_with_calls: bool = False
) -> tuple[Message, ...]:
    """Read a conversation: a list of messages, or a single message.

    ``before``: preceding messages. ``ends_with_calls``: the last message may call tools without results.

    Raises:
        DataError: missing, wrong type, empty, unknown role or key, or tool results that do not match calls.
    """
    row.need(key)
    value = row.nested(key)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise row.fail(f"{key!r} must be a list of messages with role and content; got {shown_with_type(value)}")
    messages = [_read_message(row, item, key, number) for number, item in enumerate(value, start=1)]
    if not before and len(messages) > 1 and messages[0].role == "assistant":
        opening = _fields_of(row, value[0], key)
        _refuse_training(row, f"{key!r}, message 1", opening, "an assistant message without a prompt")
    previous_role = ""
    if before:
        previous_role = before[-1].role
    _check_results(row, key, messages, previous_role, ends_with_calls)
    return tuple(_in_order(row, key, value, messages))


def last_of_user(messages: Sequence[Message]) -> int | None:
    """Find the last user message's index."""
    return max((place for place, message in enumerate(messages) if message.role == "user"), default=None)


def with_content(messages: tuple[Message, ...], place: int, content: str) -> tuple[Message, ...]:
    """Replace a message's content."""
    return (*messages[:place], replace(messages[place], content=content), *messages[place + 1 :])


def refuse_two_replies(row: Row, messages: Sequence[Message]) -> None:
    """Refuse training conversations with consecutive assistant messages."""
    for number, (one, other) in enumerate(pairwise(messages), start=1):
        row.refuse_if(
            one.role == other.role == "assistant" and not one.calls,
            f"messages {number} and {number + 1} are both from the assistant; merge them",
        )


def _read_message(row: Row, item: object, key: str, number: int) -> Message:
    where = f"{key!r}, message {number}"
    place = f"{key} {number}"
    fields = _fields_of(row, item, key)
    if "role" in fields:
        role_key = "role"
        content_key = "content"
    else:
        role_key = "from"
        content_key = "value"
    calls = _calls_in(fields)
    if fields.get("from") == "function_call":
        fields["value"] = ""  # the value is the call
    needs_content = not calls and fields.get(role_key) != "tool"
    if role_key not in fields or (content_key not in fields and needs_content):
        hint = ""
        if "function_call" in fields:
            hint = ". Use 'tool_calls' instead of 'function_call'"
        raise row.fail(f"{where}: requires keys 'role' and 'content'; got {shown_with_type(item)}{hint}")
    role = row.checked(fields[role_key], f"{place} {role_key}")
    role = OTHER_ROLES[role_key].get(role, role)
    if role not in ROLES:
        raise row.fail(f"{where}: unknown role {role!r}. Known: {', '.join(ROLES)}")
    for name in fields:
        if name not in (role_key, content_key, *_OTHER_KEYS):
            raise row.fail(_unknown_key(where, name, ("role", "content", *_OTHER_KEYS)))
    content = fields.get(content_key, "")
    text = _text(row, content, f"{place} {content_key}", needed=not calls and role != "tool")
    reasoning = _reasoning_in(row, fields, where, place)
    if role != "assistant" and (calls or reasoning):
        what = "'tool_calls'" if calls else "reasoning"
        raise row.fail(f"{where}: only assistant messages may have {what}, not role {role!r}")
    row.refuse_if(calls and not isinstance(calls, list), f"{where}: 'tool_calls' must be a list")
    read_calls = []
    for call_number, call in enumerate(calls or (), start=1):
        read_calls.append(_read_call(row, f"{place} tool_calls {call_number}", call))
    speaker = None
    if "name" in fields:
        speaker = row.checked(fields["name"], f"{place} name")
    is_trained = _is_trained(row, where, fields)
    if role != "assistant":
        _refuse_training(row, where, fields, f"a message with role {role!r}")
    return Message(role, text, reasoning=reasoning, calls=tuple(read_calls), name=speaker, is_trained=is_trained)


def _fields_of(row: Row, item: object, key: str) -> dict[str, Any]:
    """Collect non-null, non-ignored message keys, and mark all non-null keys as used."""
    if not isinstance(item, Mapping):
        return {}
    given = {name: value for name, value in item.items() if value is not None and value != []}
    row.used.update(f"{key}[].{name}" for name in given)
    return {name: value for name, value in given.items() if name not in row.ignored}


def _calls_in(fields: Mapping[str, Any]) -> Any:
    """Extract calls: a list, its JSON text, or ShareGPT's ``function_call`` value."""
    if fields.get("from") == "function_call":
        calls = _decoded(fields.get("value"))
        if isinstance(calls, list):
            return calls
        return [calls]
    calls = fields.get("tool_calls")
    if isinstance(calls, str):
        decoded = _decoded(calls)
        if isinstance(decoded, list):
            return decoded
    return calls


def _reasoning_in(row: Row, fields: Mapping[str, Any], where: str, place: str) -> str | None:
    """Read reasoning. Multiple keys are accepted if they contain identical text."""
    given = [key for key in REASONING_KEYS if key in fields and str(fields[key]).strip()]
    if not given:
        return None
    reasoning = row.checked(fields[given[0]], f"{place} {given[0]}")
    if any(fields[key] != reasoning for key in given):
        raise row.fail(f"{where}: {' and '.join(map(repr, given))} differ; keep only one")
    return reasoning


def _unknown_key(where: str, key: str, known: Sequence[str], of_what: str = "") -> str:
    """Explain an unknown key in a message or call."""
    return (
        f"{where}: unknown key {key!r}{of_what}.{suggest(key, known)} Known: {', '.join(known)}. Rename it, "
        "remove it from the row, or add it to task.ignore_keys"
    )


def _text(row: Row, value: Any, name: str, *, needed: bool) -> str:
    """Read content: text, or a list of text parts."""
    if isinstance(value, list):
        value = "".join(_text_of_part(row, part, name) for part in value)
    if not needed and is_only_space(value):
        return str(value)
    return row.checked(value, name)


def _text_of_part(row: Row, part: object, name: str) -> str:
    kind = part
    if isinstance(part, Mapping):
        kind = part.get("type")
        text = part.get("text")
        if kind == "text" and isinstance(text, str):
            for key, value in part.items():
                if value is not None and key not in {"type", "text", *row.ignored}:
                    raise row.fail(
                        f"{name!r}: unknown key {key!r} in a part. Known: type, text. Remove it from the row, or "
                        "add it to task.ignore_keys"
                    )
            return text
    raise row.fail(f"{name!r}: non-text part ({kind!r}); training supports only text")


def _is_trained(row: Row, where: str, fields: Mapping[str, object]) -> bool:
    values = {key: fields[key] for key in _TRAINED_KEYS if key in fields}
    for key, value in values.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            allowed = "0 or 1" if key == "weight" else "true or false"
            raise row.fail(f"{where}: {key!r} must be {allowed}; got {value!r}")
    verdicts = {bool(value) for value in values.values()}
    row.refuse_if(len(verdicts) > 1, f"{where}: 'weight' and 'train' contradict each other; keep only one")
    return False not in verdicts


def _refuse_training(row: Row, where: str, fields: Mapping[str, object], what: str) -> None:
    """Refuse to mark a message as trained if it never is by itself. ``what`` describes the message."""
    for key in _TRAINED_KEYS:
        row.refuse_if(
            fields.get(key),
            f"{where}: {key!r} {fields.get(key)!r} marks {what} as trained, but only assistant messages after a prompt "
            f"can be marked. Remove {key!r} from the message; to train on prompts too, set data.train_on: all",
        )


def _read_call(row: Row, place: str, fields: object) -> Call:
    """Read a call: ``{"function": {"name": ..., "arguments": ...}}``, with arguments as object or JSON text."""
    if not isinstance(fields, Mapping):
        fields = {}
    function = fields.get("function", fields)
    arguments = None
    if isinstance(function, Mapping):
        arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _decoded(arguments or "{}")
    elif arguments is None and row.is_arrow and isinstance(function, Mapping):
        arguments = {}
    row.refuse_if(
        not isinstance(arguments, dict),
        f'{place!r}: expected a call {{"function": {{"name": "...", "arguments": {{...}}}}}}',
    )
    _refuse_other_keys(row, place, fields, _CALL_KEYS)
    if function is not fields:
        _refuse_other_keys(row, place, function, _FUNCTION_KEYS)
    kind = fields.get("type") or "function"
    row.refuse_if(kind != "function", f"{place!r}: only function calls are supported; got type {kind!r}")
    name = row.checked(function.get("name"), f"{place} name")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise row.fail(f"{place!r}: arguments contain a number that JSON cannot represent (NaN, Infinity)") from None
    return Call(name, row.checked(written, f"{place} arguments"), "", "ok")


def _refuse_other_keys(row: Row, place: str, part: Mapping[str, object], known: Sequence[str]) -> None:
    for key, value in part.items():
        if value is not None and key not in known and key not in row.ignored:
            raise row.fail(_unknown_key(repr(place), key, known, " in a call"))


def _decoded(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _in_order(row: Row, key: str, items: Sequence[Any], messages: Sequence[Message]) -> list[Message]:
    """Reorder results to match their calls, using ``tool_call_id`` if all calls have distinct ids."""
    ordered = list(messages)
    for at, message in enumerate(messages[:-1]):
        if not message.calls:
            continue
        calls = items[at].get("tool_calls")
        if not isinstance(calls, list):
            continue
        first = at + 1  # index of the first result
        stop = first + len(message.calls)
        ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
        named = [item.get("tool_call_id") for item in items[first:stop]]
        row.refuse_if(
            not all(isinstance(one, str | int | None) for one in [*ids, *named]),
            f"{key!r}, message {at + 1}: ids for calls and results must be strings",
        )
        if None in ids or None in named or len(set(ids)) < len(ids):
            _check_places(row, key, first, ids, named)
            continue
        if set(ids) != set(named):
            wrong = next((name for name in named if name not in ids), named[0])
            what = f"{wrong!r} must match a preceding call ({', '.join(map(repr, ids))}), each exactly once"
            raise row.fail(f"{key!r}, message {first + 1 + named.index(wrong)}: 'tool_call_id' {what}")
        ordered[first:stop] = [messages[first + named.index(name)] for name in ids]
    return ordered


def _check_places(row: Row, key: str, first: int, ids: Sequence[object], named: Sequence[object]) -> None:
    """Check that ids are consistent with results in call order. ``first``: index of the first result."""
    for number, (call_id, name) in enumerate(zip(ids, named, strict=True), start=first + 1):
        is_of_other_call = name is not None and name != call_id and (call_id is not None or name in ids)
        row.refuse_if(
            is_of_other_call,
            f"{key!r}, message {number}: 'tool_call_id' {name!r} does not match the call at this position. Reordering "
            "requires distinct ids for all calls and results",
        )


def _check_results(row: Row, key: str, messages: Sequence[Message], previous: str, ends_with_calls: bool) -> None:
    """Refuse unmatched calls and results, and messages between them. ``previous``: role preceding ``messages``."""
    missing = 0
    has_called = False
    for number, message in enumerate([*messages, None], start=1):
        where = f"{key!r}, message {number}"
        if message is not None and message.role == "tool":
            row.refuse_if(
                not missing,
                f"{where}: tool result without a call; results must follow an assistant message with 'tool_calls'",
            )
            missing -= 1
            previous = message.role
            continue
        is_last_call = message is None and ends_with_calls and messages[-1].calls
        row.refuse_if(
            missing and not is_last_call,
            f"{key!r}, message {number - 1}: call without result; each call must be followed by a tool message",
        )
        if message is None:
            return
        row.refuse_if(
            has_called and message.role != "assistant",
            f"{where}: expected an assistant message after tool results",
        )
        row.refuse_if(
            message.calls and previous not in ("user", "tool"),
            f"{where}: tool calls must follow a user message or tool results",
        )
        missing = len(message.calls)
        has_called = bool(message.calls)
        previous = message.role


def read_variables(row: Row) -> dict[str, object]:
    """Read chat template variables: ``tools`` and ``chat_template_kwargs``.

    Tools are a list of schemas or its JSON text. Each is normalized to ``{"function": ...}``.

    Raises:
        DataError: wrong type, or a reserved variable.
    """
    given: Any = {}
    if row.has("chat_template_kwargs"):
        given = row.nested("chat_template_kwargs")
    if not isinstance(given, Mapping) or not {"messages", "tools", "add_generation_prompt"}.isdisjoint(given):
        form = "an object with chat template variables (except messages, tools and add_generation_prompt)"
        raise row.fail(f"'chat_template_kwargs' must be {form}; got {shown_with_type(given)}")
    tools: Any = []
    if row.has("tools") and row.data["tools"] != "":
        tools = row.nested("tools")
    if not isinstance(tools, list) or not all(isinstance(one, Mapping) for one in tools):
        form = 'a list of schemas like {"type": "function", "function": {"name": "...", "parameters": {...}}}'
        raise row.fail(f"'tools' must be {form}; got {shown_with_type(row.data['tools'])}")
    if not tools:
        return dict(given)
    schemas = [_read_schema(row, number, tool) for number, tool in enumerate(tools, start=1)]
    return {**given, "tools": schemas}


def _read_schema(row: Row, number: int, tool: Mapping[str, Any]) -> dict[str, object]:
    """Normalize a tool schema to ``{"function": ...}``. The function must have a name."""
    function = tool.get("function", tool)
    name = None
    if isinstance(function, Mapping):
        name = function.get("name")
    row.checked(name, f"tools {number} name")
    if "function" in tool:
        return dict(tool)
    return {"type": "function", "function": dict(tool)}


def add_system(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Prepend the row's system message (``SYSTEM_KEYS``), if any.

    Raises:
        DataError: conflicting system messages.
    """
    keys = [key for key in SYSTEM_KEYS if row.has(key) and str(row.data[key]).strip()]
    texts = {key: row.text(key) for key in keys}
    if len({text.strip() for text in texts.values()}) > 1:
        raise row.fail(f"{' and '.join(map(repr, texts))} differ; keep only one")
    for key, text in texts.items():
        if messages[0].role != "system":
            messages = (Message("system", text), *messages)
        elif messages[0].content.strip() != text.strip():
            raise row.fail(f"{key!r} differs from the conversation's system message; keep only one")
    return messages


def read_instruction(row: Row) -> tuple[Message, ...]:
    """Read Alpaca's ``instruction``, followed by ``input`` (Dolly: ``context``) after a blank line, and preceded by
    ``history``.

    Raises:
        DataError: wrong type.
    """
    earlier: list[Message] = []
    history: Any = []
    if row.has("history"):
        history = row.nested("history") or []
    if not isinstance(history, list):
        history = [history]
    for pair in history:
        row.refuse_if(
            not isinstance(pair, list | tuple) or len(pair) != 2,
            "'history' must be a list of (question, answer) pairs",
        )
        texts = [row.checked(text, "history") for text in pair]
        earlier += [Message("user", texts[0]), Message("assistant", texts[1])]
    for key in QUESTION_KEYS:
        row.refuse_if(row.has(key), f"got both 'instruction' and {key!r}; ignore one with task.ignore_keys")
    further = [key for key in ("input", "context") if row.has(key) and not is_only_space(row.data[key])]
    parts = [row.text(key) for key in ("instruction", *further)]
    return (*earlier, Message("user", "\n\n".join(parts)))
