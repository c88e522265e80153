"""Prompt formats, chat rendering, and stop tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain import registry
from posttrain.data.reading import ROLES
from posttrain.data.render.calls import TAGGED, write_call
from posttrain.data.render.chat_template import mark, probed, render_dicts, render_history
from posttrain.data.render.encoding import (
    END_THINK,
    THINK,
    Piece,
    Tokenizer,
    decode_ids,
    encode_pieces,
    markers_of,
    text_of,
)
from posttrain.data.render.sheet import Sheet, as_row_texts
from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.registry import suggest
from posttrain.types import Call, Example, Message

OPENED = re.compile(r"<think>\s*\Z")
# Empty thinking block that some chat templates write in the last turn only.
_EMPTY_THINKING = re.compile(r"\A<think>\s*</think>\s*")


def without_empty_thinking(tokenizer: Tokenizer, text: str, variables: Mapping[str, object]) -> str:
    """Drop an empty thinking block if the chat template writes it in the last turn only."""

    def keeps(settings: Mapping[str, Any]) -> bool:
        """Check if the chat template keeps this block when another message follows."""
        turns = [(role, mark(number)) for number, role in enumerate(("user", "assistant", "user"))]
        try:
            before = render_history(tokenizer, turns, settings, prompt=False).partition(mark(1))[0]
        except UsageError:
            return False
        return re.search(r"<think>\s*</think>\s*\Z", before) is not None

    rest = _EMPTY_THINKING.sub("", text)
    if rest != text and probed(tokenizer, "empty thinking", variables, keeps):
        return text
    return rest


def begins_with_empty_thinking(text: str) -> bool:
    """Check if a response begins with an empty thinking block."""
    return _EMPTY_THINKING.match(text) is not None


def check_messages(messages: Sequence[Message]) -> None:
    """Validate prompt messages.

    Raises:
        UsageError: no messages, an unknown role, a blank message, or a trailing assistant message.
    """
    if not messages:
        raise UsageError(
            "an empty prompt: the example contains no messages. Use prompt.template document to train on raw text"
        )
    for number, message in enumerate(messages, start=1):
        if message.role not in ROLES:
            known = f"{suggest(message.role, ROLES)} Known: {', '.join(ROLES)}"
            raise UsageError(f"message {number} has the role {message.role!r}.{known}")
        if not message.content.strip() and not message.calls and message.role != "tool":
            raise UsageError(f"an empty prompt: message {number} ({message.role}) has no text")
    if messages[-1].role == "assistant":
        raise UsageError("the prompt ends with an assistant message, so the model has nothing to answer")


def chat_pieces(
    messages: Sequence[Message], tokenizer: Tokenizer, system: str = "", variables: Mapping[str, object] | None = None
) -> list[Piece]:
    """Render a conversation with the tokenizer's chat template, including the generation prompt.

    ``system`` is the recipe's system message (trusted). A system message from the data is appended to it.
    ``variables`` are passed to the chat template.

    Raises:
        UsageError: missing chat template, or rendering fails.
    """
    check_messages(messages)
    if variables is None:
        variables = {}
    shown = with_reasoning(tokenizer, messages, variables)
    pieces, _ = render_pieces(tokenizer, shown, system, variables, prompt=True)
    return pieces


def with_reasoning(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[Message, ...]:
    """Put reasoning into a separate field if the chat template renders that, else into the content."""

    def closes(message: Message) -> bool:
        """Check if a message closes a thinking block that the prompt may have opened."""
        before, closed, _ = message.content.partition(END_THINK)
        return message.role == "assistant" and message.reasoning is None and bool(closed) and THINK not in before

    def thinks(message: Message) -> bool:
        is_inline = message.content.lstrip().startswith(THINK) or closes(message)
        return message.role == "assistant" and (message.reasoning is not None or is_inline)

    def change(message: Message) -> Message:
        if not thinks(message):
            return message
        if hidden:
            return replace(message, content=message.text, reasoning=None)
        thinking, closed, answer = message.content.partition(END_THINK)
        reasoning = thinking.partition(THINK)[2].strip("\n")
        if message.reasoning is not None or not closed or not answer.strip() or not reasoning.strip():
            return message
        return replace(message, content=answer.lstrip("\n"), reasoning=reasoning)

    if not any(map(thinks, messages)):
        return tuple(messages)
    if any(map(closes, messages)) and _opens_thinking(tokenizer, variables):
        opened = []
        for message in messages:
            if closes(message):
                message = replace(message, content=THINK + message.content)
            opened.append(message)
        messages = opened
    probe = [Message("user", "a"), Message("assistant", "b", reasoning="c")]
    _, hidden = render_pieces(tokenizer, probe, "", variables, prompt=False)
    return tuple(map(change, messages))


def _opens_thinking(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> bool:
    """Check if the generation prompt ends with an open thinking block."""
    plain = {key: value for key, value in variables.items() if key != "tools"}
    prompt = render_dicts(tokenizer, [{"role": "user", "content": "a"}], plain, prompt=True)
    return OPENED.search(prompt) is not None


def spell(messages: Sequence[Message]) -> list[Message]:
    """Convert messages for templates supporting only roles and contents.

    Raises:
        UsageError: a message with a name.
    """
    for number, message in enumerate(messages, start=1):
        if message.name is not None and message.role != "tool":
            raise UsageError(
                f"message {number}: this prompt.template cannot show the name {message.name!r}. Move it into the "
                "content, or ignore names with task.ignore_keys: [name]"
            )
    return spell_calls([replace(m, content=m.text, reasoning=None) for m in messages], results="user")


def render_pieces(
    tokenizer: Tokenizer, messages: Sequence[Message], system: str, variables: Mapping[str, object], *, prompt: bool
) -> tuple[list[Piece], set[int]]:
    """Render a conversation to pieces, and list messages whose reasoning the chat template drops.

    If the chat template cannot render calls, this writes them into the content. Without a tool role, results become
    user messages. A short probe conversation tests both.

    Raises:
        UsageError: missing chat template, or rendering fails.
    """

    def find(settings: Mapping[str, Any]) -> str:
        calling = Message("assistant", "", calls=(Call("f", '{"a": "b"}', "", "ok"),))
        probe = [Message("user", "q"), calling, Message("tool", "r"), Message("assistant", "s")]
        for name, written in (("own", probe), ("tool", spell_calls(probe))):
            with suppress(UsageError):
                Sheet(tokenizer, "", settings).render(written, prompt=False)
                return name
        return "user"

    if any(message.calls for message in messages):
        form = probed(tokenizer, "calls", variables, find)
        if form != "own":
            messages = spell_calls(messages, results=form)
    return Sheet(tokenizer, system, variables).render(messages, prompt=prompt)


def spell_calls(messages: Sequence[Message], results: str = "tool") -> list[Message]:
    """Write calls into message contents, and optionally merge each turn's results into one user message."""
    spelled: list[Message] = []
    previous_role = ""
    for message in messages:
        role = message.role
        if message.calls:
            lines = [text_of(write_call(call, TAGGED)) for call in message.calls]
            if message.content:
                lines.insert(0, message.content)
            message = replace(message, content="\n".join(lines), calls=())
        elif role == "tool" and results != "tool":
            opening, closing = TAGGED.results
            content = f"{opening}{message.content}{closing}"
            if previous_role == "tool":
                content = f"{spelled.pop().content}\n{content}"
            message = Message(results, content)
        spelled.append(message)
        previous_role = role
    return spelled


@dataclass(frozen=True)
class Ending:
    """Suffix that a chat template adds to an assistant message, through the last special token.

    Attributes:
        text: ending used after the final message.
        lead: part generated before the stop token.
        ids: special tokens ending a turn, both mid-conversation and at the final message.
        middle: ending used if another message follows. Empty when only the final turn gets one.
    """

    text: str
    lead: str
    ids: tuple[int, ...]
    middle: str


def ending(tokenizer: Tokenizer) -> Ending | None:
    """Find how the tokenizer's chat template ends a turn. None without a special token.

    Raises:
        UsageError: missing chat template.
    """
    return probed(tokenizer, "ending", {}, lambda settings: _ending(tokenizer, settings))


def _ending(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Ending | None:
    def render(count: int, *, prompt: bool = False) -> str:
        roles = ("user", "assistant", "user")[:count]
        turns = [(role, mark(number)) for number, role in enumerate(roles)]
        return render_history(tokenizer, turns, settings, prompt=prompt)

    whole = render(2)
    tail = whole.partition(mark(1))[2]
    find = markers_of(tokenizer).find
    found = list(find(tail))
    if len(found) > 1 and render(1) == render(1, prompt=True):  # an unconditional suffix may begin the next turn
        marker_ids = [index for _, _, index in find(whole) if index != tokenizer.bos_token_id]
        ids_behind = [index for _, _, index in found]
        if marker_ids and marker_ids[0] in ids_behind:
            begun = ids_behind.index(marker_ids[0])
            found = found[: max(1, begun)]
    if not found:
        return None
    next_tail = ""
    with suppress(UsageError):
        next_tail = render(3).partition(mark(1))[2].partition(mark(2))[0]
    _, end, last_id = found[-1]
    shared = [place for place in found if next_tail.startswith(tail[: place[1]])]
    if not shared:
        return Ending(tail[:end], tail[: found[-1][0]], (last_id,), "")
    start, stop, stop_id = shared[-1]
    ids = tuple(dict.fromkeys((stop_id, last_id)))
    return Ending(tail[:end], tail[:start], ids, tail[:stop])


@dataclass(frozen=True)
class Template:
    """Prompt format: renders prompts and demonstrations, and extracts final answers.

    Attributes:
        name: name used in recipes.
        opening: prompt suffix graded together with the completion (``<think>``).
        tags: names of the reasoning and answer tags. May be empty.
        prompt: builds prompt pieces from messages and a tokenizer. Chat templates also accept ``variables``.
        response: builds demonstration pieces, which follow the opening and exclude any ending. Empty when a given
            response contains nothing to put between the tags.
        extract: finds the answer in graded text (opening + completion), or None.
        chat: prompts and response endings use the tokenizer's chat template.
        variables: variables passed to the chat template.
        frame: prefix and suffix around a reply, used without a chat template (trusted).
        quote: escapes untrusted text resembling a turn header.
        system: system message given by the recipe, for chats.
        space: inserted before responses that do not begin with whitespace.
        takes_rendered: accept already rendered prompts, in any format, unchanged.
        turns: training on conversations: follow the chat template (``rendered``), one example per assistant turn
            (``apart``), or only the last turn (``last``).
    """

    name: str
    opening: str
    tags: tuple[str, ...]
    prompt: Callable[..., list[Piece]]
    response: Callable[[Example], list[Piece]]
    extract: Callable[[str], str | None]
    chat: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    frame: tuple[str, str] = ("\n", "\n")
    quote: Callable[[str], str] = str
    system: str = ""
    space: str = ""
    turns: Literal["rendered", "apart", "last"] = "apart"
    takes_rendered: bool = False


def prompt_pieces(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], variables: Mapping[str, Any]
) -> list[Piece]:
    """Build the pieces of a prompt. ``variables`` are chat template variables given by a row, such as tools.

    Raises:
        UsageError: see ``encode_prompt``; also variables that the chat template ignores, or without a chat template.
    """
    _refuse_rendered(template, messages)
    if not variables:
        return template.prompt(messages, tokenizer)
    names = ", ".join(map(repr, variables))
    wrong = ""
    if not template.chat:
        wrong = f"template {template.name} cannot show {names}, which requires a chat template"
    elif "tools" in variables.keys() & template.variables.keys():
        wrong = f"template {template.name} already sets tools, and the row also sets {names}"
    if wrong:
        raise UsageError(f"{wrong}. Choose a different one, or add {names} to task.ignore_keys")
    read = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    unread = [name for name in variables if name not in read]
    if unread:
        key = "tools" if unread == ["tools"] else "chat_template_kwargs"
        raise UsageError(
            f"the tokenizer's chat template ignores {', '.join(map(repr, unread))}. Use a chat template supporting it, "
            f"or ignore the key in every row with task.ignore_keys: [{key}]"
        )
    return template.prompt(messages, tokenizer, {**template.variables, **as_row_texts(variables)})


def _refuse_rendered(template: Template, messages: Sequence[Message]) -> None:
    """Refuse prompts rendered by a different template. Policy and reward model can use different ones."""
    end = template.frame[1].strip()
    for message in messages:
        is_own = template.takes_rendered or (end and message.content.rstrip().endswith(end))
        if message.is_rendered and not is_own:
            raise UsageError(
                f"some prompts are rendered already (the first ends in {message.content[-20:]!r}), and template "
                f"{template.name} would render them again. Use plain questions, or a model trained with as_is"
            )


def encode_prompt(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], variables: Mapping[str, object] | None = None
) -> list[int]:
    """Tokenize a prompt including the template's opening. For ``variables`` see ``prompt_pieces``.

    Raises:
        UsageError: no messages, a blank message, an unknown role, or a missing chat template.
    """
    ids = encode_pieces(tokenizer, prompt_pieces(tokenizer, template, messages, variables or {}))
    if template.chat or template.name == "document":  # rendering already includes BOS
        return ids
    leading = list(markers_of(tokenizer).leading)
    if ids[: len(leading)] == leading:
        return ids
    return leading + ids


def stop_ids(tokenizer: Tokenizer, template: Template) -> frozenset[int]:
    """Collect all stop tokens: EOS from tokenizer and model, plus, in a chat, tokens ending a turn.

    Raises:
        UsageError: missing ``eos_token``.
    """
    ends = frozenset(trained_ends(tokenizer, template)) | getattr(tokenizer, "generation_end_ids", frozenset())
    if tokenizer.eos_token_id is None:
        return ends
    return ends | {tokenizer.eos_token_id}


def trained_ends(tokenizer: Tokenizer, template: Template) -> tuple[int, ...]:
    """Find trained stop tokens: those ending a turn in a chat, else the tokenizer's EOS.

    Raises:
        UsageError: missing ``eos_token``.
    """
    found = _chat_ending(tokenizer, template)
    if found is not None:
        return found.ids
    return (end_id(tokenizer, template),)


def _chat_ending(tokenizer: Tokenizer, template: Template) -> Ending | None:
    """Find how a chat turn ends. None without a chat, or if the chat template writes no special token."""
    if template.chat:
        return ending(tokenizer)
    return None


def further_ends(tokenizer: Tokenizer, template: Template) -> list[str]:
    """Describe stop tokens defined only by the model's configuration, if any."""
    trained = end_id(tokenizer, template)
    further = sorted(stop_ids(tokenizer, template) - {tokenizer.eos_token_id, trained})
    if not further:
        return []
    names = ", ".join(str(tokenizer.convert_ids_to_tokens(index)) for index in further)
    trained_name = tokenizer.convert_ids_to_tokens(trained)
    return [f"responses also stop at {names} because of the model's configuration; training uses {trained_name}"]


def end_id(tokenizer: Tokenizer, template: Template) -> int:
    """Find a demonstration's final token: the last one ending a turn in a chat, else EOS.

    Raises:
        UsageError: missing ``eos_token``.
    """
    found = _chat_ending(tokenizer, template)
    end = tokenizer.eos_token_id
    if found is not None:
        end = found.ids[-1]
    if end is None:
        raise UsageError(
            "missing eos_token: the tokenizer defines no end token, so completions would never end. Set one in "
            "tokenizer_config.json"
        )
    return int(end)


def end_text(tokenizer: Tokenizer, template: Template, *, continued: bool = False) -> str:
    """Find a turn's ending. ``continued``: another message follows.

    Raises:
        UsageError: missing ``eos_token``.
    """
    found = _chat_ending(tokenizer, template)
    if found is None:
        return decode_ids(tokenizer, [end_id(tokenizer, template)])
    if continued:
        return found.middle or found.text
    return found.text


def end_ids(tokenizer: Tokenizer, template: Template, *, continued: bool = False) -> list[int]:
    """Tokenize ``end_text`` following a response.

    Raises:
        UsageError: missing ``eos_token``.
    """
    found = _chat_ending(tokenizer, template)
    if found is None:
        return [end_id(tokenizer, template)]
    text = end_text(tokenizer, template, continued=continued)
    return encode_pieces(tokenizer, [Piece(text, trusted=True)], markers_of(tokenizer).anchors.get(".", ()))


def end_lead(tokenizer: Tokenizer, template: Template) -> str:
    """Find the part of the ending generated before the stop token. Usually empty."""
    found = _chat_ending(tokenizer, template)
    if found is not None:
        return found.lead
    return ""


def without_end(tokenizer: Tokenizer, template: Template, ids: Sequence[int]) -> list[int]:
    """Strip the ending from a response."""
    kept = list(ids)
    stops = stop_ids(tokenizer, template)
    whole = end_ids(tokenizer, template)
    if len(whole) > 1 and kept[-len(whole) :] == whole:
        return kept[: -len(whole)]
    if not kept or kept[-1] not in stops:
        return kept
    kept.pop()
    lead = end_ids(tokenizer, template, continued=True)[:-1]
    if lead and kept[-len(lead) :] == lead:
        return kept[: -len(lead)]
    return kept


def build_template(word: Component, where: str = "prompt.template") -> Template:
    """Build the prompt format named in a recipe."""
    make = registry.find("template", word.name, where).bind(word.options, where)
    return registry.construct(where, make, Template)
