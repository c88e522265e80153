"""Messages of a conversation as rows write them. Every key of a message is read, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from posttrain.data.reading import OTHER_ROLES, ROLES, Row, shown
from posttrain.registry import suggest
from posttrain.types import Call, Message

SYSTEM_KEYS = ("system", "system_prompt", "system_message")  # of a row
QUESTION_KEYS = ("question", "problem", "query")  # of a prompt in rows without ``prompt``
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# ``train: false`` and ``weight: 0`` say the same: the message is read, and not trained.
_TRAINED_KEYS = ("weight", "train")
_CALL_KEYS = ("name", "arguments", "function", "id", "type", "index")
_FUNCTION_KEYS = ("name", "arguments", "parsed_arguments")  # OpenAI's client adds the last, which says the same
_OTHER_KEYS = ("tool_calls", "tool_call_id", "name", *REASONING_KEYS, *_TRAINED_KEYS)


def read_prompt(row: Row, key: str) -> tuple[Message, ...]:
    """The prompt under ``key``: a text is the user's, messages end with another's than the assistant's."""
    if row.is_text(key) or key not in row.data:
        return (Message("user", row.text(key)),)
    messages = read_messages(row, key)
    row.refuse_if(
        messages[-1].role == "assistant",
        f"{key!r} ends with the assistant's message, which an answer would have to continue",
    )
    return messages


def read_messages(
    row: Row, key: str, *, before: Sequence[Message] = (), ends_with_calls: bool = False
) -> tuple[Message, ...]:
    """The conversation under ``key``: a list of messages, or one message.

    ``before``: the messages that these go on from. ``ends_with_calls``: the last may call tools without results.

    Raises:
        DataError: missing, of another shape, empty, with an unknown role or key, or a tool's results that fit no calls.
    """
    row.need(key)
    value = row.nested(key)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise row.fail(f"{key!r} must be a list of messages with role and content; got {shown(value)}")
    messages = [_read_message(row, item, key, number) for number, item in enumerate(value, start=1)]
    _check_results(row, key, messages, before[-1].role if before else "", ends_with_calls)
    return tuple(_in_order(row, key, value, messages))


def refuse_two_replies(row: Row, messages: Sequence[Message]) -> None:
    """Refuse a conversation to train on in which the assistant follows the assistant."""
    for number, (one, other) in enumerate(pairwise(messages), start=1):
        row.refuse_if(
            one.role == other.role == "assistant" and not one.calls,
            f"messages {number} and {number + 1} are both the assistant's; join them into one",
        )


def _read_message(row: Row, item: object, key: str, number: int) -> Message:
    where = f"{key!r}, message {number}"
    if isinstance(item, Mapping):
        fields = {k: v for k, v in item.items() if v is not None and v != []}
    else:
        fields = {}
    row.used.update(f"{key}[].{k}" for k in fields)
    fields = {k: v for k, v in fields.items() if k not in row.ignored}
    if "role" in fields:
        of_role = "role"
        of_content = "content"
    else:
        of_role = "from"
        of_content = "value"
    calls = fields.get("tool_calls")
    if isinstance(calls, str) and isinstance(decoded := _decoded(calls), list):
        calls = decoded
    if fields.get("from") == "function_call":  # the call is the value
        calls = _decoded(fields.get("value"))
        fields["value"] = ""
        if not isinstance(calls, list):
            calls = [calls]
    if "function_call" in fields:
        old = ". A call is written as 'tool_calls', not 'function_call'"
    else:
        old = ""
    if of_role not in fields or (of_content not in fields and not calls and fields[of_role] != "tool"):
        raise row.fail(f"{where}: needs the keys 'role' and 'content'; got {shown(item)}{old}")
    role = row.checked(fields[of_role], f"{key} {number} {of_role}")
    role = OTHER_ROLES[of_role].get(role, role)
    if role not in ROLES:
        raise row.fail(f"{where}: unknown role {role!r}. Known: {', '.join(ROLES)}")
    known = ("role", "content", *_OTHER_KEYS)
    unknown = next((k for k in fields if k not in (of_role, of_content, *_OTHER_KEYS)), None)
    if unknown is not None:
        raise row.fail(
            f"{where}: unknown key {unknown!r}.{suggest(unknown, known)} Known: {', '.join(known)}. Rename it, "
            "take it out of the row, or name it in task.ignore_keys"
        )
    text = _text(row, fields.get(of_content, ""), f"{key} {number} {of_content}", needed=not calls and role != "tool")
    thoughts = [k for k in REASONING_KEYS if k in fields and str(fields[k]).strip()]
    reasoning = next((row.checked(fields[k], f"{key} {number} {k}") for k in thoughts), None)
    if any(fields[k] != reasoning for k in thoughts):
        raise row.fail(f"{where}: {' and '.join(map(repr, thoughts))} differ; give one of them")
    if role != "assistant" and (calls or reasoning):
        what = "'tool_calls'" if calls else "reasoning"
        raise row.fail(f"{where}: only a message of the assistant has {what}, and this is of the role {role!r}")
    row.refuse_if(calls and not isinstance(calls, list), f"{where}: 'tool_calls' is a list of calls")
    return Message(
        role,
        text,
        reasoning=reasoning,
        calls=tuple(_read_call(row, f"{key} {number} tool_calls {n}", one) for n, one in enumerate(calls or (), 1)),
        name=row.checked(fields["name"], f"{key} {number} name") if "name" in fields else None,
        is_trained=_is_trained(row, where, fields),
    )


def _text(row: Row, value: Any, name: str, *, needed: bool) -> str:
    """A content: a text, or a list of parts that are texts."""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                if isinstance(part, Mapping):
                    kind = part.get("type")
                else:
                    kind = part
                raise row.fail(f"{name!r}: a part that is no text ({kind!r}); only text can be trained on")
            for key in (k for k, v in part.items() if v is not None and k not in {"type", "text", *row.ignored}):
                raise row.fail(
                    f"{name!r}: unknown key {key!r} of a part. Known: type, text. Take it out of the row, or "
                    "name it in task.ignore_keys"
                )
        value = "".join(part["text"] for part in value)
    if not needed and is_blank(value):
        return str(value)
    return row.checked(value, name)


def _is_trained(row: Row, where: str, fields: Mapping[str, object]) -> bool:
    values = {key: fields[key] for key in _TRAINED_KEYS if key in fields}
    for key, value in values.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            allowed = "0 or 1" if key == "weight" else "true or false"
            raise row.fail(f"{where}: {key!r} must be {allowed}; got {value!r}")
    row.refuse_if(
        len({bool(value) for value in values.values()}) > 1,
        f"{where}: 'weight' and 'train' say the opposite; give one of them",
    )
    return all(values.values())


def _read_call(row: Row, place: str, fields: object) -> Call:
    """A call: ``{"function": {"name": ..., "arguments": ...}}``, arguments an object or its text."""
    if not isinstance(fields, Mapping):
        fields = {}
    function = fields.get("function", fields)
    if isinstance(function, Mapping):
        arguments = function.get("arguments", {})
    else:
        arguments = None
    if isinstance(arguments, str):
        arguments = _decoded(arguments or "{}")
    elif arguments is None and row.is_arrow:
        arguments = {}
    row.refuse_if(
        not isinstance(arguments, dict), f'{place!r}: a call is {{"function": {{"name": "...", "arguments": {{...}}}}}}'
    )
    for part, known in ((fields, _CALL_KEYS), (function, _CALL_KEYS if function is fields else _FUNCTION_KEYS)):
        for key in (k for k, v in part.items() if v is not None and k not in {*known, *row.ignored}):
            raise row.fail(
                f"{place!r}: unknown key {key!r} of a call.{suggest(key, known)} Known: {', '.join(known)}. Rename it, "
                "take it out of the row, or name it in task.ignore_keys"
            )
    kind = fields.get("type") or "function"
    row.refuse_if(kind != "function", f"{place!r}: only functions are called here; got the type {kind!r}")
    name = row.checked(function.get("name"), f"{place} name")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise row.fail(f"{place!r}: its arguments hold a number that JSON has not (NaN, Infinity)") from None
    return Call(name, row.checked(written, f"{place} arguments"), "", "ok")


def _decoded(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _in_order(row: Row, key: str, items: Sequence[Any], messages: Sequence[Message]) -> list[Message]:
    """The messages with results in the order of their calls, by ``tool_call_id`` where all calls have their own."""
    ordered = list(messages)
    for at, message in enumerate(messages):
        calls = items[at].get("tool_calls") if message.calls else None
        if not isinstance(calls, list) or at == len(messages) - 1:
            continue
        ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
        named = [items[i].get("tool_call_id") for i in range(at + 1, at + 1 + len(message.calls))]
        row.refuse_if(
            not all(isinstance(one, str | int | None) for one in [*ids, *named]),
            f"{key!r}, message {at + 1}: the ids of calls and of their results are texts",
        )
        if None in ids or None in named or len(set(ids)) < len(ids):  # by their places, which no id may contradict
            for place, (own, name) in enumerate(zip(ids, named, strict=True), start=at + 2):
                row.refuse_if(
                    name is not None and name != own and (own is not None or name in ids),
                    f"{key!r}, message {place}: 'tool_call_id' {name!r} is not that of the call in its place, and not "
                    "all calls and results have an id of their own",
                )
            continue
        if set(ids) != set(named):
            wrong = next((name for name in named if name not in ids), named[0])
            what = f"{wrong!r} must name one of the calls before it ({', '.join(map(repr, ids))}), each once"
            raise row.fail(f"{key!r}, message {at + 2 + named.index(wrong)}: 'tool_call_id' {what}")
        ordered[at + 1 : at + 1 + len(ids)] = [messages[at + 1 + named.index(name)] for name in ids]
    return ordered


def _check_results(row: Row, key: str, messages: Sequence[Message], previous: str, ends_with_calls: bool) -> None:
    """Refuse calls without results, results without calls, and what stands between them; ``previous``: a role."""
    missing = 0
    has_called = False
    for number, message in enumerate([*messages, None], start=1):
        where = f"{key!r}, message {number}"
        if message is not None and message.role == "tool":
            row.refuse_if(
                not missing,
                f"{where}: a result of a tool that was not called; an assistant's message with 'tool_calls' comes "
                "before results",
            )
            missing -= 1
            continue
        row.refuse_if(
            missing and not (message is None and ends_with_calls and messages[-1].calls),
            f"{key!r}, message {number - 1}: a call has no result; a message of the role tool follows for each call",
        )
        if message is None:
            return
        row.refuse_if(
            has_called and message.role != "assistant",
            f"{where}: a message amid the use of tools; after its tools the assistant answers, in one last message",
        )
        row.refuse_if(
            message.calls and (messages[number - 2].role if number > 1 else previous) not in ("user", "tool"),
            f"{where}: tools are used in answer to a message of the user",
        )
        missing = len(message.calls)
        has_called = bool(message.calls)


def read_variables(row: Row) -> dict[str, object]:
    """Variables that a row passes to the chat template: its ``tools``, and its ``chat_template_kwargs``.

    Tools are a list of schemas or its text; each is read as ``{"function": ...}``.

    Raises:
        DataError: of another form, or a variable that is not the row's to set.
    """
    if row.has("chat_template_kwargs"):
        given = row.nested("chat_template_kwargs")
    else:
        given = {}
    if not isinstance(given, Mapping) or not {"messages", "tools", "add_generation_prompt"}.isdisjoint(given):
        form = "an object of variables for the chat template (not messages, tools or add_generation_prompt)"
        raise row.fail(f"'chat_template_kwargs' must be {form}; got {shown(given)}")
    if row.has("tools") and row.data["tools"] != "":
        tools = row.nested("tools")
    else:
        tools = []
    if not isinstance(tools, list) or not all(isinstance(one, Mapping) for one in tools):
        form = 'a list of schemas such as {"type": "function", "function": {"name": "...", "parameters": {...}}}'
        raise row.fail(f"'tools' must be {form}; got {shown(row.data['tools'])}")
    for number, one in enumerate(tools, start=1):
        function = one.get("function", one)
        row.checked(function.get("name") if isinstance(function, Mapping) else None, f"tools {number} name")
    schemas = [dict(one) if "function" in one else {"type": "function", "function": dict(one)} for one in tools]
    if tools:
        return {**given, "tools": schemas}
    return dict(given)


def add_system(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages below the row's own system message (``SYSTEM_KEYS``), where it has one.

    Raises:
        DataError: the messages begin with another system message, or the row has two.
    """
    keys = [key for key in SYSTEM_KEYS if row.has(key) and str(row.data[key]).strip()]
    texts = {key: row.text(key) for key in keys}
    if len({text.strip() for text in texts.values()}) > 1:
        raise row.fail(f"{' and '.join(map(repr, texts))} differ; give one of them")
    for key, text in texts.items():
        if messages[0].role != "system":
            messages = (Message("system", text), *messages)
        elif messages[0].content.strip() != text.strip():
            raise row.fail(
                f"{key!r} differs from the system message that the conversation begins with; give one of them"
            )
    return messages


def read_instruction(row: Row) -> tuple[Message, ...]:
    """Alpaca's ``instruction``, then its ``input`` (Dolly: ``context``) after a blank line; ``history`` comes before.

    Raises:
        DataError: of the wrong type.
    """
    earlier: list[Message] = []
    if row.has("history"):
        history = row.nested("history")
    else:
        history = []
    for pair in history if isinstance(history, list) else [history] if history else []:
        row.refuse_if(
            not isinstance(pair, list | tuple) or len(pair) != 2,
            "'history' must be a list of pairs: what was asked, and what was answered",
        )
        texts = [row.checked(text, "history") for text in pair]
        earlier += [Message("user", texts[0]), Message("assistant", texts[1])]
    for key in QUESTION_KEYS:
        row.refuse_if(row.has(key), f"'instruction' and {key!r} are both there; leave one out by task.ignore_keys")
    further = [key for key in ("input", "context") if row.has(key) and not is_blank(row.data[key])]
    return (*earlier, Message("user", "\n\n".join(row.text(key) for key in ("instruction", *further))))


def is_blank(value: object) -> bool:
    """Return True if a value is a text of nothing but white space."""
    return isinstance(value, str) and not value.strip()
