"""Prompt templates, prompts by the tokenizer's own chat template, and what ends an answer."""

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
# An empty block of thinking that some chat templates write into the last turn alone.
_EMPTY_THINKING = re.compile(r"\A<think>\s*</think>\s*")


def without_empty_thinking(tokenizer: Tokenizer, text: str, variables: Mapping[str, object]) -> str:
    """A turn's beginning without the empty block of thinking that the chat template writes into the last turn alone."""

    def keeps(settings: Mapping[str, Any]) -> bool:
        """Return True if the block stays when another message follows."""
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
    """Return True for an answer with an empty block of thinking."""
    return _EMPTY_THINKING.match(text) is not None


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse a prompt that has no messages, an unknown role or a blank message, or ends with the assistant's.

    Raises:
        UsageError: it is such a prompt.
    """
    if not messages:
        raise UsageError(
            "an empty prompt: the example has no messages; a text to read is trained under prompt.template document"
        )
    for number, message in enumerate(messages, start=1):
        if message.role not in ROLES:
            known = f"{suggest(message.role, ROLES)} Known: {', '.join(ROLES)}"
            raise UsageError(f"message {number} has the role {message.role!r}.{known}")
        if not message.content.strip() and not message.calls and message.role != "tool":
            raise UsageError(f"an empty prompt: message {number} ({message.role}) has no text")
    if messages[-1].role == "assistant":
        raise UsageError("the last message of a prompt is the assistant's, so nothing is left to answer")


def chat_pieces(
    messages: Sequence[Message], tokenizer: Tokenizer, system: str = "", variables: Mapping[str, object] | None = None
) -> list[Piece]:
    """The conversation by the tokenizer's chat template, up to where the assistant begins to speak.

    ``system`` is the recipe's own (trusted) system message; one from the data follows below it in the
    same message. ``variables`` are passed to the chat template.

    Raises:
        UsageError: no chat template, or it cannot render these messages.
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
    """The messages with their reasoning where the chat template shows it: apart, or else in the content."""

    def closes(message: Message) -> bool:
        """Return True if the text closes a block of thinking that it has not opened: a prompt may have."""
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
    """Return True if the chat template opens a block of thinking at the end of a prompt."""
    plain = {key: value for key, value in variables.items() if key != "tools"}
    prompt = render_dicts(tokenizer, [{"role": "user", "content": "a"}], plain, prompt=True)
    return OPENED.search(prompt) is not None


def spell(messages: Sequence[Message]) -> list[Message]:
    """The messages for a template that has roles and contents alone.

    Raises:
        UsageError: a message with a name.
    """
    for number, message in enumerate(messages, start=1):
        if message.name is not None and message.role != "tool":
            raise UsageError(
                f"message {number}: the prompt template does not show the name {message.name!r}. Write it into the "
                "content, or leave names out by task.ignore_keys: [name]"
            )
    return spell_calls([replace(m, content=m.text, reasoning=None) for m in messages], results="user")


def render_pieces(
    tokenizer: Tokenizer, messages: Sequence[Message], system: str, variables: Mapping[str, object], *, prompt: bool
) -> tuple[list[Piece], set[int]]:
    """The pieces of a conversation, and which of its messages have reasoning that the chat template does not show.

    Where the template has no form for calls, they are written into the content, and results, where it has no role for
    them, as messages of the user; a short conversation of our own shows it.

    Raises:
        UsageError: no chat template, or it cannot render these messages.
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
    """The messages with their calls in the content; results may become messages of the user, one for each turn."""
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
    """The text that a chat template writes after an answer, up to and including its last special token.

    Attributes:
        text: behind the last answer of a conversation.
        lead: the part of it that a model writes before the token at which it stops.
        ids: of the special tokens that end an answer: before another message, and at the end of the conversation.
        middle: behind an answer that another message follows; empty where only a conversation is ended.
    """

    text: str
    lead: str
    ids: tuple[int, ...]
    middle: str


def ending(tokenizer: Tokenizer) -> Ending | None:
    """The end of an answer in the tokenizer's chat template; None where it writes no special token behind it.

    Raises:
        UsageError: no chat template.
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
    if len(found) > 1 and render(1) == render(1, prompt=True):  # what it writes in any case may begin the next answer
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
    """Functions that make of an example a prompt, a demonstration and a graded answer.

    Attributes:
        name: the word in the recipe.
        opening: text at the end of the prompt that belongs to the graded answer (``<think>``).
        tags: names of the reasoning and the answer tag, or empty.
        prompt: the pieces of the prompt, of its messages and the tokenizer; of a chat also with other ``variables``.
        response: the pieces of a demonstration, which follow the opening; without the end token. None at all where a
            given response has nothing that could stand between the tags.
        extract: the answer in a graded text (opening + completion), or None.
        chat: the prompt is written by the tokenizer's chat template: a response ends with the end
            of the turn.
        variables: for the chat template.
        frame: the texts before and behind a reply to a turn, where there is no chat template (trusted).
        quote: makes a text safe to stand there, where it could look like the start of a turn.
        system: the recipe's own system message, of a chat.
        space: the text before an answer that does not itself begin with white space.
        takes_rendered: a prompt that is rendered already, in whatever form, stands as it is.
        turns: how a conversation is trained: as the chat template renders it (``rendered``), one example for each turn
            of the assistant (``apart``), or its last turn alone (``last``).
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
    """The pieces of a prompt; ``variables`` are a row's own for the chat template, such as its tools.

    Raises:
        UsageError: as ``encode_prompt``, or variables where no chat template reads them.
    """
    _refuse_rendered(template, messages)
    if not variables:
        return template.prompt(messages, tokenizer)
    names = ", ".join(map(repr, variables))
    wrong = ""
    if not template.chat:
        wrong = f"template {template.name} does not show {names}, which only a chat template can"
    elif "tools" in variables.keys() & template.variables.keys():
        wrong = f"template {template.name} has tools of its own, and the row brings {names}"
    if wrong:
        raise UsageError(f"{wrong}. Choose another, or name {names} in task.ignore_keys")
    read = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    unread = [name for name in variables if name not in read]
    if unread:
        key = "tools" if unread == ["tools"] else "chat_template_kwargs"
        raise UsageError(
            f"the tokenizer's chat template does not read {', '.join(map(repr, unread))}. Give it one that does, or "
            f"leave the key out of all rows by task.ignore_keys: [{key}]"
        )
    return template.prompt(messages, tokenizer, {**template.variables, **as_row_texts(variables)})


def _refuse_rendered(template: Template, messages: Sequence[Message]) -> None:
    """Refuse a prompt that another template has written; a reward model's is not always the policy's."""
    end = template.frame[1].strip()
    for message in messages:
        is_own = template.takes_rendered or (end and message.content.rstrip().endswith(end))
        if message.is_rendered and not is_own:
            raise UsageError(
                f"prompts that are rendered already (the first ends in {message.content[-20:]!r}) would be rendered "
                f"again by template {template.name}. Give the questions alone, or use a model that was trained with "
                "as_is"
            )


def encode_prompt(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], variables: Mapping[str, object] | None = None
) -> list[int]:
    """Token ids of the prompt, up to and including the template's opening; ``variables``: see ``prompt_pieces``.

    Raises:
        UsageError: no messages, a blank one, an unknown role, or no chat template where one is needed.
    """
    ids = encode_pieces(tokenizer, prompt_pieces(tokenizer, template, messages, variables or {}))
    if template.chat or template.name == "document":  # they spell out whatever must come first (BOS)
        return ids
    leading = list(markers_of(tokenizer).leading)
    if ids[: len(leading)] == leading:
        return ids
    return leading + ids


def stop_ids(tokenizer: Tokenizer, template: Template) -> frozenset[int]:
    """Ids that end a completion: the end tokens of tokenizer and model, and, in a chat, the end of the turn.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    ends = frozenset(trained_ends(tokenizer, template)) | getattr(tokenizer, "generation_end_ids", frozenset())
    if tokenizer.eos_token_id is None:
        return ends
    return ends | {tokenizer.eos_token_id}


def trained_ends(tokenizer: Tokenizer, template: Template) -> tuple[int, ...]:
    """The ids that end the answers of training: the end of the turn in a chat, else the tokenizer's end token.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    found = _chat_ending(tokenizer, template)
    if found is not None:
        return found.ids
    return (end_id(tokenizer, template),)


def _chat_ending(tokenizer: Tokenizer, template: Template) -> Ending | None:
    """The end of an answer in a chat; None for other prompts, and if the chat template writes no special token."""
    if template.chat:
        return ending(tokenizer)
    return None


def further_ends(tokenizer: Tokenizer, template: Template) -> list[str]:
    """A line on the end tokens that only the model's configuration names; none where there are none."""
    trained = end_id(tokenizer, template)
    further = sorted(stop_ids(tokenizer, template) - {tokenizer.eos_token_id, trained})
    if not further:
        return []
    names = ", ".join(str(tokenizer.convert_ids_to_tokens(index)) for index in further)
    trained_name = tokenizer.convert_ids_to_tokens(trained)
    return [f"answers also end at {names}, by the model's configuration; {trained_name} is trained"]


def end_id(tokenizer: Tokenizer, template: Template) -> int:
    """The last id of a demonstration: the last of the end of the turn in a chat, else the tokenizer's end token.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    found = _chat_ending(tokenizer, template)
    end = tokenizer.eos_token_id
    if found is not None:
        end = found.ids[-1]
    if end is None:
        raise UsageError(
            "the tokenizer has no end token (eos_token), so no completion could ever end; set one in its files"
        )
    return int(end)


def end_text(tokenizer: Tokenizer, template: Template, *, continued: bool = False) -> str:
    """The text that ends an answer; ``continued``: one that another message follows.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    found = _chat_ending(tokenizer, template)
    if found is None:
        return decode_ids(tokenizer, [end_id(tokenizer, template)])
    if continued:
        return found.middle or found.text
    return found.text


def end_ids(tokenizer: Tokenizer, template: Template, *, continued: bool = False) -> list[int]:
    """The ids of ``end_text``, which follow an answer.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    found = _chat_ending(tokenizer, template)
    if found is None:
        return [end_id(tokenizer, template)]
    text = end_text(tokenizer, template, continued=continued)
    return encode_pieces(tokenizer, [Piece(text, trusted=True)], markers_of(tokenizer).anchors.get(".", ()))


def end_lead(tokenizer: Tokenizer, template: Template) -> str:
    """The text that ends an answer before the token at which it stops; mostly empty."""
    found = _chat_ending(tokenizer, template)
    if found is not None:
        return found.lead
    return ""


def without_end(tokenizer: Tokenizer, template: Template, ids: Sequence[int]) -> list[int]:
    """The ids of an answer without those that end it."""
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
    """The prompt template that a recipe names."""
    make = registry.find("template", word.name, where).bind(word.options, where)
    return registry.construct(where, make, Template)
