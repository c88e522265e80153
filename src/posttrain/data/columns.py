"""Additional columns: detect text that prompts do not show, and format prompts with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Annotated

from pydantic import BeforeValidator

from posttrain.data.choices import lettered_lines
from posttrain.data.messages import last_of_user, with_content
from posttrain.data.reading import Row
from posttrain.errors import RecipeError
from posttrain.option_types import shown_with_type
from posttrain.registry import suggest
from posttrain.types import Example, Message

PROMPT = "prompt"  # shorter values without sentence punctuation may be names or labels
MIN_WORDS = 5  # shorter values without sentence punctuation may be names or labels
MAX_LABEL_WORDS = 8
MIN_REPEATS = 2  # short values repeated this often on average are labels
MIN_IDEOGRAPHS = 10
_SENTENCE = re.compile(r"\w[^\n]*\s[^\n]*[.!?…][\"'”’)]?(?:\s|\Z)|[。！？]")
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def _of_braces(value: object) -> object:
    """Restore ``{article}``, which YAML parses as a mapping."""
    if isinstance(value, dict) and len(value) == 1 and list(value.values()) == [None]:
        return f"{{{next(iter(value))}}}"
    return value


FormatText = Annotated[str, BeforeValidator(_of_braces)]


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Prompt text with column names in braces: ``{article}\\n\\n{question}``."""

    text: str
    fields: tuple[str, ...]

    def fill(self, row: Row, question: str | None, options: Mapping[str, Sequence[str]] | None = None) -> str:
        """Format a row's prompt.

        Args:
            question: value for ``{prompt}`` if rows lack such a column. None if the row contains no question.
            options: multiple choice columns, formatted as lettered lines.

        Raises:
            DataError: a column is missing, or neither text nor number.
        """
        parts = []
        for literal, name, _, _ in Formatter().parse(self.text):
            parts.append(literal)
            if name is None:
                continue
            if options is not None and name in options:
                parts.append(lettered_lines(options[name]))
            elif name == PROMPT and question is not None:  # even if the column holds messages
                parts.append(question)
            else:
                parts.append(_text_of(row, name))
        return row.checked("".join(parts).strip(), "task.prompt_format")

    def rewrite(
        self,
        row: Row,
        messages: tuple[Message, ...],
        question_keys: Iterable[str] = (),
        options: Mapping[str, Sequence[str]] | None = None,
    ) -> tuple[Message, ...]:
        """Reformat the last user message. ``{prompt}`` is replaced by its original content.

        Raises:
            DataError: no user message, or a format without the question.
        """
        place = last_of_user(messages)
        if place is None:
            raise row.fail("task.prompt_format rewrites the last user message, but the conversation contains none")
        row.refuse_if(
            not {PROMPT, *question_keys}.intersection(self.fields),
            "task.prompt_format omits the question; insert {prompt}",
        )
        return with_content(messages, place, self.fill(row, messages[place].content, options))


def read_format(text: str | None) -> PromptFormat | None:
    """Parse ``task.prompt_format``. None if unset.

    If the text contains no newline, literal ``\\n`` (as left by shells) is converted.

    Raises:
        RecipeError: unpaired braces, or anything except column names between them.
    """
    if text is None:
        return None
    where = "task.prompt_format"
    if "\n" not in text:
        text = text.replace("\\n", "\n")
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise RecipeError(f"{where}: {error}; write literal braces twice, {{{{ or }}}}") from None
    way_out = 'Write column names in braces: "{article}\\n\\n{question}"'
    names = []
    for _, name, spec, conversion in parsed:
        if name is None:
            continue
        if spec or conversion is not None or not name.strip():
            raise RecipeError(f"{where}: {{{name}}} is not a column name. {way_out}")
        names.append(name)
    if not names:
        raise RecipeError(f"{where}: contains no column. {way_out}")
    return PromptFormat(text, tuple(dict.fromkeys(names)))


def _text_of(row: Row, name: str) -> str:
    if not row.has(name):
        near = suggest(name, row.data)
        known = ", ".join(row.data)
        raise row.fail(f"task.prompt_format: the row lacks key {name!r}.{near} Available: {known}")
    value = row.data[name]
    if not isinstance(value, str):
        value = row.nested(name)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    if isinstance(value, str | int | float):
        return str(value).strip()
    raise row.fail(
        f"task.prompt_format: {name!r} must be text, a number, or a list of text; got {shown_with_type(value)}"
    )


@dataclass(slots=True)
class _Column:
    num_values: int = 0
    num_prose: int = 0
    is_long: bool = False
    distinct: set[int] = field(default_factory=set)

    @property
    def is_text(self) -> bool:
        """Check if values are text, as opposed to ids, names or labels."""
        is_label = not self.is_long and self.num_values >= MIN_REPEATS * len(self.distinct) and self.num_values > 2
        return 2 * self.num_prose >= self.num_values > 0 and not is_label


@dataclass(slots=True)
class UnshownColumns:
    """Text columns missing from prompts, collected over a file's rows. ``silenced`` comes from ``task.meta``."""

    silenced: frozenset[str] = frozenset()
    columns: dict[str, _Column] = field(default_factory=dict)

    def count(self, carried: Mapping[str, object], example: Example) -> None:
        """Count a row's unread values."""
        if not example.messages:  # raw text without prompt
            return
        texts = [message.content for message in example.messages]
        texts += [text for text in (example.answer, example.solution, example.demonstration) if text]
        texts += [response.text for response in example.responses]
        for name, value in carried.items():
            parts = [part for part in _parts(value) if not any(part in text for text in texts)]
            if name in self.silenced or not parts:
                continue
            text = max(parts, key=len)
            column = self.columns.setdefault(name, _Column())
            column.num_values += 1
            column.num_prose += _is_prose(text)
            column.is_long = column.is_long or len(text.split()) > MAX_LABEL_WORDS or bool(_SENTENCE.search(text))
            column.distinct.add(hash(text))

    def describe(self, question: str) -> tuple[str, ...]:
        """Format a startup line, if needed. ``question`` is the question's column name."""
        names = [name for name, column in self.columns.items() if column.is_text]
        if not names:
            return ()
        plain = next((name for name in names if not re.search(r"[{}:!]", name)), None)
        silence = f"task.meta: [{', '.join(names)}] silences this"
        if plain is None:
            show = ""
        elif plain == question:
            show = f"task.prompt_format omits {{{question}}}; "
        else:
            show = f'task.prompt_format: "{{{plain}}}\\n\\n{{{question}}}" shows one, '
        return (f"columns that the prompt does not show: {', '.join(names)}. {show}{silence}",)


def _parts(value: object) -> list[str]:
    """List non-blank strings in a string or list. Empty for any other type."""
    values: Sequence[object] = [value]
    if isinstance(value, list | tuple):
        values = value
    return [one.strip() for one in values if isinstance(one, str) and one.strip()]


def _is_prose(text: str) -> bool:
    """Check if text is longer than a name: several words, a sentence, or many ideographs."""
    if len(text.split()) >= MIN_WORDS or len(_IDEOGRAPH.findall(text[:200])) >= MIN_IDEOGRAPHS:
        return True
    return bool(_SENTENCE.search(text))


def refuse_unknown(names: Iterable[str], known: Iterable[str], place: str, option: str) -> None:
    """Refuse option values that match no key in any row.

    Raises:
        RecipeError: unknown key. The message suggests the nearest one.
    """
    there = sorted(known)
    for name in names:
        if name not in there:
            near = suggest(name, there)
            known_keys = ", ".join(there)
            raise RecipeError(f"{option}: no row in {place} contains the key {name!r}.{near} Available: {known_keys}")
