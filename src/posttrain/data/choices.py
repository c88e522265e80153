"""Multiple choice detection: finds option columns, the gold column, and the index base.

Detection inspects column contents across all rows, and uses names mainly to exclude unlikely columns. Options are a
single list column or separate columns. All gold answers must have the same format: label, option text, letter, or
index.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.data.messages import last_of_user, with_content
from posttrain.data.reading import Row, are_messages
from posttrain.errors import DataError
from posttrain.graders.choice import LETTERS
from posttrain.option_types import shorten
from posttrain.types import Example, Message

GoldKind = Literal["label", "text", "letter", "index"]
FirstIndex = Literal[0, 1]
BOOLEAN_OPTIONS = ("Yes", "No")  # options for boolean gold answers
# Only columns with such names may be gold answers, unless ``task.answer_key`` is set. Excludes ``weight``,
# ``language``, etc.
_GOLD_NAME = re.compile(r"answer|label|gold|correct|target|solution|cop\b", re.IGNORECASE)
# Numbered columns named like this are question parts, not options: two labeled sentences, for example.
_QUESTION_PART = re.compile(
    r"(?:sent|sentence|text|premise|hypothesis|question|prompt|query|passage|paragraph|context|input|output|turn|fact|"
    r"hint|step|example|doc|document|article|title|word|phrase|id|tag|source|meta|score|column)s?",
    re.IGNORECASE,
)
# Lists named like this describe the question, so neighboring numbers do not index them.
_ABOUT_QUESTION = re.compile(
    r".*(?:tag|topic|keyword|categor|subject|source|author|hint|step|concept|skill|entit|fact|sentence|context|passage|"
    r"paragraph|reference|document|evidence|token|id|url|name|label|type|level|note|message|turn|history|tool)\w*",
    re.IGNORECASE,
)
_LABELS_NAME = re.compile(r"label|key|letter", re.IGNORECASE)
_WRONG_OPTIONS = re.compile(r"(?:distract|incorrect|wrong).*", re.IGNORECASE)
# Without such a name, a list is probably unrelated to numbers that would fit either index base.
_OPTIONS_NAME = re.compile(r"choice|option|answer|ending|candidate|alternative|select|target", re.IGNORECASE)
_LABEL = re.compile(r"[(\[]?([A-Ja-j])(?:[)\].:]+|\s*\Z)")
# Suffixes of columns that hold one option each, in order.
_SPREAD = (
    (re.compile(r"(.*?)([A-Ja-j])"), (LETTERS, LETTERS.lower())),
    (re.compile(r"(.*?)([0-9])"), ("0123456789", "123456789")),
)


@dataclass(frozen=True, slots=True)
class ChoiceColumns:
    """Detected multiple choice columns.

    ``keys``: a list column, or separate option columns; empty with boolean gold answers. ``gold``: gold answer column.
    ``first_index``: index base. ``is_shown``: prompts already include the options.
    """

    keys: tuple[str, ...]
    gold: str
    kind: GoldKind | Literal["boolean"]
    first_index: FirstIndex = 0
    why: str = ""
    is_shown: bool = False

    def describe(self) -> str:
        """Format a startup line describing detected columns and index base."""
        if self.kind == "boolean":
            names = " and ".join(BOOLEAN_OPTIONS)
            return f"multiple choice: boolean {self.gold!r}, shown as options {names}"
        kind: str = self.kind
        if self.kind == "index":
            kind += f", counted from {self.first_index}{self.why}"
        options = ", ".join(self.keys)
        if self.is_shown:
            options += " (already in the prompts)"
        return (
            f'multiple choice: options {options}; gold answer {self.gold} ({kind}). task.choices_key: "" disables this'
        )

    def options_of(self, row: Row) -> tuple[str, ...]:
        """Read a row's options in order, without labels."""
        if self.kind == "boolean":
            return BOOLEAN_OPTIONS
        found = _options(row, self.keys)
        if found is None:
            raise row.fail(
                f"{', '.join(map(repr, self.keys))} must contain 2 to {len(LETTERS)} options, like other rows"
            )
        row.used.update(self.keys)
        return found.options

    def letter_of(self, row: Row) -> str:
        """Find the correct option's letter."""
        row.used.add(self.gold)
        if self.kind == "boolean":
            is_true = row.data[self.gold] is True
            return LETTERS[int(not is_true)]
        place = _place(row, self.keys, self.gold, self.kind, self.first_index)
        if place is None:
            value = row.data.get(self.gold)
            raise row.fail(f"{self.gold!r} matches no option; got {value!r}. Correct it, or remove the row")
        return LETTERS[place]


@dataclass(frozen=True, slots=True)
class _Options:
    """Options, with labels if given by the row."""

    options: tuple[str, ...]
    labels: tuple[str, ...] = ()
    are_numbers: bool = False


def candidate_columns(
    rows: Sequence[Row],
    answer_key: str,
    excluded: frozenset[str] = frozenset(),
    choices_key: str | None = None,
    first_index: FirstIndex | None = None,
) -> list[ChoiceColumns]:
    """Find columns that fit a multiple choice in all rows. The index base is not yet decided.

    Args:
        answer_key: gold column. If the first row lacks it, consider columns named like gold answers.
        excluded: columns to ignore.
        choices_key: options column. None considers all columns.
        first_index: index base given by the recipe, if any.

    Raises:
        DataError: ``choices_key`` contains anything except option lists, or gold answers do not fit them.
    """
    is_named = rows[0].has(answer_key)
    is_wanted = choices_key is not None or first_index is not None
    if is_named:
        golds = [answer_key]
    else:
        golds = _scalar_columns(rows, excluded)
    if choices_key is None:
        groups = [*_list_columns(rows, excluded), *_spread_columns(rows, excluded | {answer_key})]
    else:
        groups = [(choices_key,)]
        bad = next((row for row in rows if _list_of(row, choices_key) is None), None)
        if bad is not None:
            raise bad.fail(f"task.choices_key: {choices_key!r} must contain 2 to {len(LETTERS)} texts in all rows")
    found = []
    for keys in groups:
        for gold in golds:
            if gold in keys:
                continue
            kind = _kind_of(rows, keys, gold, is_wanted=is_wanted)
            if kind is not None:
                found.append(ChoiceColumns(keys, gold, kind))
    if choices_key is not None and not found:
        raise rows[0].fail(
            f"task.choices_key: no column is an index, letter or text from {choices_key!r} in all rows. Set "
            "task.answer_key to the gold answer's column"
        )
    if groups or found or not is_named:
        return found
    if all(isinstance(_value(row, answer_key), bool) for row in rows):
        return [ChoiceColumns((), answer_key, "boolean")]
    return []


def choose_columns(
    rows: Sequence[Row],
    candidates: Sequence[ChoiceColumns],
    prompt_of: Callable[[Row], str],
    first_index: FirstIndex | None = None,
) -> ChoiceColumns:
    """Choose the best candidate.

    Args:
        prompt_of: reads a row's question text.
        first_index: index base. None infers it from rows.

    Raises:
        DataError: ambiguous index base, options or gold answer.
    """
    chosen = _choose(rows[0], candidates)
    if chosen.kind == "index":
        chosen = _with_first_index(rows, chosen, first_index)
    elif first_index is not None:
        raise rows[0].fail(f"task.first_index: {chosen.gold!r} is not an index. Remove the option")
    return replace(chosen, is_shown=all(_shows(prompt_of(row), chosen.options_of(row)) for row in rows))


def has_options(row: Row, answer_key: str, excluded: frozenset[str]) -> bool:
    """Check if a row may contain options, or a boolean gold answer."""
    if _list_columns([row], excluded) or any(_spread_columns([row], excluded | {answer_key})):
        return True
    if _wrong_options(row, excluded) or isinstance(_value(row, answer_key), bool):
        return True
    return any(isinstance(value, list | tuple) for value in row.data.values() if not are_messages(value))


def _wrong_options(row: Row, excluded: frozenset[str]) -> list[str]:
    """List columns whose names suggest incorrect options: ``distractors``, ``incorrect_answers``."""
    return [key for key in row.data if key not in excluded and _WRONG_OPTIONS.match(key)]


def describe_near_miss(rows: Sequence[Row], answer_key: str, excluded: frozenset[str]) -> tuple[str, ...]:
    """Describe lists that resemble options in at least half of all rows, or contain too many options."""
    lines = []
    wrong = _wrong_options(rows[0], excluded)
    if wrong:
        names = ", ".join(wrong)
        lines.append(f"{names}: incorrect options, not shown in prompts; task.meta: [{names}] silences this")
    for key, value in rows[0].data.items():
        if key not in excluded and isinstance(value, list | tuple):
            line = _describe_list(rows, key, answer_key)
            if line:
                lines.append(line)
    return tuple(lines)


def _describe_list(rows: Sequence[Row], key: str, answer_key: str) -> str:
    """Describe a list column that resembles options. Empty if it does not."""
    for row in rows:
        if _is_among_many(_value(row, answer_key), _value(row, key)):
            return f"{key!r} contains more than {len(LETTERS)} options, so prompts do not show them"
    kinds: tuple[GoldKind, ...] = ("label", "text", "letter")
    unfit = [[row for row in rows if _place(row, (key,), answer_key, kind, 0) is None] for kind in kinds]
    fewest = min(unfit, key=len)
    if not fewest or 2 * len(fewest) > len(rows):
        return ""
    gold = shorten(_value(fewest[0], answer_key))
    return (
        f"{key!r} resembles options, but row {fewest[0].number} has the gold answer {gold}, which matches none, so "
        f"prompts do not show them. Correct the row, or silence this with task.meta: [{key}]"
    )


def _is_among_many(gold: object, values: object) -> bool:
    """Check if the gold answer occurs in a list longer than the alphabet of option letters."""
    return isinstance(values, list | tuple) and len(values) > len(LETTERS) and isinstance(gold, str) and gold in values


def with_choices(example: Example, columns: ChoiceColumns, row: Row, *, shows: bool) -> Example:
    """Add lettered options to the question, and convert the gold answer to a letter.

    ``shows``: the question already includes the options.
    """
    options = columns.options_of(row)
    letter = columns.letter_of(row)
    messages = example.messages
    if not (shows or columns.is_shown):
        place = last_of_user(messages)
        assert place is not None, "multiple choice rows contain a question"
        content = f"{messages[place].content.rstrip()}\n{lettered_lines(options)}"
        messages = with_content(messages, place, content)
    meta = {**example.meta, "choices": list(options)}
    return replace(example, messages=messages, answer=letter, grader="multiple_choice", meta=meta)


def lettered_lines(options: Sequence[str]) -> str:
    """Format options as lines: ``A. iron``."""
    return "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))


def last_question(messages: Sequence[Message]) -> str:
    """Find the last user message's content. Empty if missing."""
    place = last_of_user(messages)
    if place is None:
        return ""
    return messages[place].content


def _value(row: Row, key: str) -> object:
    """Read a value without marking its key as used."""
    if isinstance(row.data, dict):
        return dict.get(row.data, key)
    return None


def _texts(values: object) -> tuple[tuple[str, ...], bool] | None:
    """Convert 2 to 10 strings or numbers to (texts, are_numbers). None if anything else occurs."""
    if not isinstance(values, list | tuple) or not 2 <= len(values) <= len(LETTERS):
        return None
    if all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        return tuple(map(_number_text, values)), True
    if not all(isinstance(one, str) for one in values):
        return None
    texts = tuple(one.strip() for one in values)
    if all(texts):
        return texts, False
    return None


def _number_text(value: object) -> str:
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)


def _list_of(row: Row, key: str) -> _Options | None:
    """Parse a key's options: a list, its JSON text, or an object with texts and labels."""
    value = row.peek(key)
    if isinstance(value, Mapping):
        return _labelled(value)
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):  # OpenBookQA (2018)
        columns = {name: [one.get(name) for one in value] for name in value[0]}
        return _labelled(columns)
    return _unlabelled(value)


def _unlabelled(values: object) -> _Options | None:
    """Parse a plain list of options."""
    read = _texts(values)
    if read is None:
        return None
    texts, are_numbers = read
    return _Options(_without_labels(texts), are_numbers=are_numbers)


def _labelled(value: Mapping[str, object]) -> _Options | None:
    """Parse ARC's ``{"text": [...], "label": [...]}``: lists with equal length, one containing short labels."""
    lists = {name: list(one) for name, one in value.items() if isinstance(one, list | tuple)}
    if len({len(one) for one in lists.values()}) != 1:
        return None
    if len(lists) == 1:
        return _unlabelled(next(iter(lists.values())))
    if len(lists) != 2:
        return None
    found = [name for name, one in lists.items() if _are_labels(one)]
    if not found:
        return None
    labels_key = next((name for name in found if _LABELS_NAME.search(name)), found[-1])  # texts may look like labels
    labels = lists.pop(labels_key)
    (texts,) = lists.values()
    read = _texts(texts)
    if read is None:
        return None
    return _Options(read[0], tuple(str(one).strip() for one in labels), read[1])


def _are_labels(values: Sequence[object]) -> bool:
    """Check for consecutive letters from A, or consecutive numbers from 0 or 1."""
    texts = [str(one).strip() for one in values]
    letters = [LETTERS[: len(texts)], LETTERS[: len(texts)].lower()]
    numbers = [[str(n + first) for n in range(len(texts))] for first in (0, 1)]
    return texts in [*map(list, letters), *numbers]


def _without_labels(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Strip prefixes ``A)``, ``B)``, ... if every text has the expected one."""
    stripped = []
    for letter, text in zip(LETTERS, texts, strict=False):
        match = _LABEL.match(text)
        if match is None or match[1].upper() != letter:
            return texts
        rest = text[match.end() :].strip()
        if not rest:
            return texts
        stripped.append(rest)
    return tuple(stripped)


def _spread_options(row: Row, keys: Sequence[str]) -> _Options | None:
    """Read options from one column each. Trailing columns may be empty."""
    values = [_value(row, key) for key in keys]
    while values and (values[-1] is None or values[-1] == ""):
        values.pop()
    read = _texts(values)
    if read is None and all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in values):
        read = _texts([one if isinstance(one, str) else _number_text(one) for one in values])
    if read is None:
        return None
    return _Options(read[0], are_numbers=read[1])


def _options(row: Row, keys: Sequence[str]) -> _Options | None:
    if len(keys) == 1:
        return _list_of(row, keys[0])
    return _spread_options(row, keys)


def _scalar_columns(rows: Sequence[Row], excluded: frozenset[str]) -> list[str]:
    """List columns containing text or numbers in every row whose names suggest gold answers."""
    return [
        key
        for key, value in rows[0].data.items()
        if key not in excluded
        and _GOLD_NAME.search(key)
        and isinstance(value, str | int | float)
        and all(isinstance(_value(row, key), str | int | float) for row in rows)
    ]


def _list_columns(rows: Sequence[Row], excluded: frozenset[str]) -> list[tuple[str, ...]]:
    names = [key for key, value in rows[0].data.items() if key not in excluded and isinstance(value, list | dict | str)]
    return [(key,) for key in names if all(_list_of(row, key) is not None for row in rows)]


def _spread_columns(rows: Sequence[Row], excluded: frozenset[str]) -> Iterator[tuple[str, ...]]:
    """Yield groups of short-text columns with a common prefix and suffixes A, B, ... or 0, 1, ... or 1, 2, ..."""
    names = dict.fromkeys(key for row in rows[:50] for key in row.data if key not in excluded)
    for pattern, orders in _SPREAD:
        stems: dict[str, dict[str, str]] = {}
        for name in names:
            match = pattern.fullmatch(name)
            if match is not None:
                stem, end = match.groups()
                stems.setdefault(stem, {})[end] = name
        for stem, ends in stems.items():
            is_number_alone = stem == "" and orders[0][0] == "0"
            if is_number_alone or _QUESTION_PART.fullmatch(stem.strip("_- .")):
                continue
            for order in orders:
                keys = [ends[end] for end in itertools.takewhile(ends.__contains__, order)]
                if len(keys) >= 2 and all(_spread_options(row, keys) is not None for row in rows):
                    yield tuple(keys)
                    break


def _kind_of(rows: Sequence[Row], keys: tuple[str, ...], gold: str, *, is_wanted: bool) -> GoldKind | None:
    """Determine the gold answer format used by all rows. None if gold answers do not fit the options.

    ``is_wanted``: the recipe requests multiple choice.
    """
    kinds: tuple[GoldKind, ...] = ("label", "text", "letter")
    for kind in kinds:
        if all(_place(row, keys, gold, kind, 0) is not None for row in rows):
            return kind
    if len(keys) == 1 and _ABOUT_QUESTION.fullmatch(keys[0]):
        return None
    fitting = [first for first in (0, 1) if _fits_from(rows, keys, gold, first)]
    is_sure = is_wanted or len(fitting) == 1 or len(keys) > 1 or _OPTIONS_NAME.search(keys[0])
    if fitting and is_sure:
        return "index"
    return None


def _fits_from(rows: Sequence[Row], keys: Sequence[str], gold: str, first_index: int) -> bool:
    """Check if every gold answer is a valid option index, counting from ``first_index``."""
    return all(_place(row, keys, gold, "index", first_index) is not None for row in rows)


def _place(
    row: Row, keys: Sequence[str], gold: str, kind: GoldKind | Literal["boolean"], first_index: int
) -> int | None:
    """Find the correct option's position, parsing the gold answer as ``kind``. None if that fails."""
    found = _options(row, keys)
    value = _value(row, gold)
    if found is None or value is None or isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = _number_text(value).strip()
    if kind == "label":
        if text in found.labels:
            return found.labels.index(text)
    elif kind == "text":
        if isinstance(value, str) or found.are_numbers:
            return _place_of_text(text, found.options)
    elif kind == "letter":
        if isinstance(value, str):
            return _place_of_letter(text, found.options)
    elif re.fullmatch(r"[0-9]{1,2}", text):
        place = int(text) - first_index
        if 0 <= place < len(found.options):
            return place
    return None


def _place_of_text(text: str, options: Sequence[str]) -> int | None:
    """Find the unique option with this text, ignoring case, whitespace and a final period."""
    if options.count(text) == 1:
        return options.index(text)
    plain = [" ".join(option.split()).rstrip(".").casefold() for option in options]
    wanted = " ".join(text.split()).rstrip(".").casefold()
    if wanted and plain.count(wanted) == 1:
        return plain.index(wanted)
    return None


def _place_of_letter(text: str, options: Sequence[str]) -> int | None:
    """Parse ``B``, ``(b)``, or ``B) text`` followed by the matching option's text."""
    match = _LABEL.match(text)
    if match is None:
        return None
    place = LETTERS.index(match[1].upper())
    rest = text[match.end() :].strip()
    if place < len(options) and rest in ("", options[place]):
        return place
    return None


def _choose(row: Row, found: Sequence[ChoiceColumns]) -> ChoiceColumns:
    """Choose the best fit: labels, then texts, letters, indices, booleans.

    Raises:
        DataError: multiple equally good fits.
    """
    strength = {"label": 0, "text": 1, "letter": 2, "index": 3, "boolean": 4}
    best = min(strength[one.kind] for one in found)
    left = [one for one in found if strength[one.kind] == best]
    if len({one.gold for one in left}) > 1:
        golds = ", ".join(repr(one.gold) for one in left)
        raise row.fail(f"{golds}: multiple possible gold answers. Choose one with task.answer_key")
    if len(left) > 1:
        columns = "; ".join(", ".join(map(repr, one.keys)) for one in left)
        raise row.fail(
            f"{columns}: multiple possible options. Choose one with task.choices_key, or list all others in task.meta"
        )
    return left[0]


def _with_first_index(rows: Sequence[Row], columns: ChoiceColumns, first_index: FirstIndex | None) -> ChoiceColumns:
    """Set the index base. Exactly one base must fit all rows.

    Raises:
        DataError: both fit, or the requested one does not.
    """
    firsts: tuple[FirstIndex, ...] = (0, 1)
    fits = {first: _fits_from(rows, columns.keys, columns.gold, first) for first in firsts}
    if first_index is not None:
        if not fits[first_index]:
            bad = _unfit_row(rows, columns, first_index)
            raise bad.fail(
                f"task.first_index={first_index}: {columns.gold!r} is {_value(bad, columns.gold)!r}, which is not a "
                "valid index"
            )
        return replace(columns, first_index=first_index, why=" as set in task.first_index")
    fitting = [first for first in firsts if fits[first]]
    if len(fitting) > 1:
        keys = ", ".join(map(repr, columns.keys))
        raise DataError(
            rows[0].place,
            f"{columns.gold!r} is an index into options {keys}, but never 0 or the number of options, so its base is "
            'ambiguous. Set task.first_index to 0 or 1 (task.choices_key: "" disables multiple choice)',
        )
    (first,) = fitting
    deciding = _unfit_row(rows, columns, 1 - first)
    why = f": it is {_number_text(_value(deciding, columns.gold))} in row {deciding.number}"
    return replace(columns, first_index=first, why=why)


def _unfit_row(rows: Sequence[Row], columns: ChoiceColumns, first_index: int) -> Row:
    """Find the first row whose gold answer is invalid under ``first_index``. Must exist."""
    return next(row for row in rows if _place(row, columns.keys, columns.gold, "index", first_index) is None)


def _shows(prompt: str, options: Sequence[str]) -> bool:
    """Check if a prompt contains all options with letters, in order."""
    start = 0
    for letter, option in zip(LETTERS, options, strict=False):
        pattern = rf"(?<![A-Za-z]){letter}\s?[).:\]-]+\s*{re.escape(option)}"
        found = re.compile(pattern).search(prompt, start)
        if found is None:
            return False
        start = found.end()
    return True
