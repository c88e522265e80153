"""Prompt templates, and how they become token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain import registry
from posttrain.data.render.encoding import Piece, Tokenizer, encode_pieces, markers_of
from posttrain.data.render.turns import as_row_texts, turn_end
from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.types import Example, Message


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


def prompt_pieces(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], variables: Mapping[str, Any]
) -> list[Piece]:
    """The pieces of a prompt; ``variables`` are a row's own for the chat template, such as its tools.

    Raises:
        UsageError: as ``encode_prompt``, or variables where no chat template reads them.
    """
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
    unread = [name for name in variables if name not in str(tokenizer.chat_template or "")]
    if unread:
        key = "tools" if unread == ["tools"] else "chat_template_kwargs"
        raise UsageError(
            f"the tokenizer's chat template does not read {', '.join(map(repr, unread))}. Give it one that does, or "
            f"leave the key out of all rows by task.ignore_keys: [{key}]"
        )
    return template.prompt(messages, tokenizer, {**template.variables, **as_row_texts(variables)})


def encode_prompt(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of the prompt, up to and including the template's opening; ``variables``: see ``prompt_pieces``.

    Raises:
        UsageError: no messages, a blank one, an unknown role, or no chat template where one is needed.
    """
    ids = encode_pieces(tokenizer, prompt_pieces(tokenizer, template, messages, variables or {}))
    # a chat template and a document spell out whatever must come first (BOS)
    leading = [] if template.chat or template.name == "document" else list(markers_of(tokenizer).leading)
    return ids if ids[: len(leading)] == leading else leading + ids


def stop_ids(tokenizer: Tokenizer, template: Template) -> frozenset[int]:
    """Ids that end a completion: the end tokens of tokenizer and model, and, in a chat, the end of the turn.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    own = {end_id(tokenizer, template), tokenizer.eos_token_id} - {None}
    return frozenset(own) | getattr(tokenizer, "generation_end_ids", frozenset())


def further_ends(tokenizer: Tokenizer, template: Template) -> list[str]:
    """A line on the end tokens that only the model's ``generation_config.json`` names; none where there are none."""
    end = end_id(tokenizer, template)
    further = sorted(stop_ids(tokenizer, template) - {tokenizer.eos_token_id, end})
    names = [str(tokenizer.convert_ids_to_tokens(i)) for i in (*further, end)]
    line = f"answers also end at {', '.join(names[:-1])}, by the model's generation_config.json; {names[-1]} is trained"
    return [line] if further else []


def end_id(tokenizer: Tokenizer, template: Template) -> int:
    """The id that ends a demonstration: the end of the turn in a chat, else the tokenizer's end token.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    end = turn_end(tokenizer) if template.chat else None
    end = tokenizer.eos_token_id if end is None else end
    if end is None:
        raise UsageError(
            "the tokenizer has no end token (eos_token), so no completion could ever end; set one in its files"
        )
    return int(end)


def build_template(word: Component, where: str = "prompt.template") -> Template:
    """The prompt template that a recipe names."""
    return registry.find("template", word.name, where).bind(word.options, where)()
