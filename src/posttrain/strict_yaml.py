"""YAML as recipes are written in it: the values that JSON has, read by YAML 1.2's rules, with the line of every key.

One reader for all files and options. Only plain data come out, of a bounded size and depth: no dates, no tags of
one's own, no anchors that hold themselves. What YAML 1.1 and 1.2 read differently is text (``1:30``, ``on``) or,
where a number was surely meant, refused (``010``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from posttrain.errors import RecipeError

MAX_CHARS, MAX_VALUES, MAX_DEPTH = 2**19, 50_000, 50
MAX_KEY_CHARS, MAX_DIGITS = 200, 1000
_QUICK_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*|0x[0-9a-fA-F]+)")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_REAL = re.compile(r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NAMED = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **{f"{sign}{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
}
_BREAKS_OF_OLD = re.compile("[\x85\u2028\u2029]")  # YAML 1.1 breaks lines at them; folded, one of them becomes a space
_TRUTH_OF_OLD = re.compile("yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")


class OldTruth(str):
    """A plain ``yes``, ``no``, ``on`` or ``off``: truth to YAML 1.1, text to YAML 1.2; a key's type decides."""


def read_yaml(text: str, place: str, *, quick: bool = False) -> tuple[Any, dict[str, int]]:
    """The one document in ``text``, and the 1-based line of every dotted key.

    Keys of mappings are texts, as they stand there. ``quick``: by libyaml's parser where it is there, several times as
    fast, whose remarks on what is no YAML are other ones.

    Raises:
        RecipeError: with ``place`` and the line: not YAML, more than plain data, a key twice, too large or too deep.
    """
    if len(text) > MAX_CHARS:
        raise RecipeError(f"{place}: {len(text):,} characters; a recipe has at most {MAX_CHARS:,}")
    reader = _Reader(text, place, loader=_QUICK_LOADER if quick else yaml.SafeLoader)
    try:
        return reader.read(), reader.lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        reason = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", "damaged")).split())
        raise RecipeError(f"{place}{line}: not valid YAML: {reason}; write it as `key: value`, one to a line") from None


def read_option(text: str, key: str) -> Any:
    """What was given on the command line, as YAML; text where it is none.

    Raises:
        RecipeError: with the key; too large, too deep, a key twice, or a number that can be read in two ways.
    """
    try:
        if len(text) <= MAX_CHARS:
            return _Reader(text, f"command line: {key}", lines_told=False).read()
    except yaml.YAMLError:
        return text
    raise RecipeError(f"command line: {key}: {len(text):,} characters; a value has at most {MAX_CHARS:,}")


def write_yaml(data: Any) -> str:
    """Plain data as YAML that ``read_yaml`` reads as the same."""
    return str(yaml.dump(data, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=100))


def plain_value(text: str) -> Any:
    """What an unquoted word means: null, a truth value, a number, or itself.

    Raises:
        ValueError: a number that could be read in two ways, or of thousands of digits.
    """
    if text in _NAMED:
        return _NAMED[text]
    if _TRUTH_OF_OLD.fullmatch(text):
        return OldTruth(text)
    if len(text) > MAX_DIGITS and (_INTEGER.fullmatch(text) or _REAL.fullmatch(text)):
        raise ValueError(f"a number of {len(text):,} characters; give one of at most {MAX_DIGITS:,}, or quote it")
    if _INTEGER.fullmatch(text):
        return int(text, 16 if "x" in text else 10)
    if _OCTAL.fullmatch(text):
        raise ValueError(f"{text} is octal to some and decimal to others; write it without the 0, or quote it for text")
    return float(text.replace("_", "")) if _REAL.fullmatch(text) else text


class _Reader:
    """Builds the values of one document from PyYAML's events, which know neither types nor sizes."""

    def __init__(self, text: str, place: str, *, lines_told: bool = True, loader: Any = yaml.SafeLoader) -> None:
        self.place, self.lines_told = place, lines_told
        self.lines: dict[str, int] = {}
        self._events: Iterator[Any] = yaml.parse(text, Loader=loader)
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._num_values = 0

    def read(self) -> Any:
        value: Any = None
        documents = 0
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._error(event, "a second document begins here; a recipe is one, so leave the --- out")
                value = self._value(next(self._events), "", 0)
        return value

    def _error(self, event: Any, what: str) -> RecipeError:
        line = f":{_line(event)}" if self.lines_told else ""
        return RecipeError(f"{self.place}{line}: {what}")

    def _count(self, event: Any, more: int) -> None:
        self._num_values += more
        if self._num_values > MAX_VALUES:
            raise self._error(event, f"more than {MAX_VALUES:,} values, aliases written out; a recipe must be smaller")

    def _value(self, event: Any, prefix: str, depth: int) -> Any:
        if isinstance(event, AliasEvent):
            if event.anchor not in self._anchors:
                what = f"*{event.anchor} stands for nothing that ends above"
                raise ComposerError(None, None, what, cast(Any, event.start_mark))
            value, size = self._anchors[event.anchor]
            self._count(event, size)
            return copy.deepcopy(value)
        if depth > MAX_DEPTH:
            raise self._error(event, f"nested more than {MAX_DEPTH} deep; a recipe must be flatter")
        before = self._num_values
        self._count(event, 1)
        if isinstance(event, ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, SequenceStartEvent):
            self._check_tag(event, "seq")
            value = self._items(prefix, depth)
        else:
            assert isinstance(event, MappingStartEvent)
            self._check_tag(event, "map")
            value = self._mapping(prefix, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = value, self._num_values - before
        return value

    def _items(self, prefix: str, depth: int) -> list[Any]:
        items: list[Any] = []
        for event in self._events:
            if isinstance(event, CollectionEndEvent):
                break
            where = f"{prefix}{len(items)}"
            self.lines[where] = _line(event)
            items.append(self._value(event, f"{where}.", depth + 1))
        return items

    def _mapping(self, prefix: str, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        below: dict[str, Any] = {}
        for event in self._events:
            if isinstance(event, CollectionEndEvent):
                break
            if not isinstance(event, ScalarEvent) or event.anchor is not None or event.tag is not None:
                raise self._error(event, "a key must be a plain word, such as `train`")
            if len(event.value) > MAX_KEY_CHARS:
                raise self._error(event, f"a key of {len(event.value):,} characters; one has at most {MAX_KEY_CHARS}")
            merges = event.value == "<<" and event.implicit[0]
            where = f"{prefix}{event.value}"
            if event.value in own or (merges and below):
                raise self._error(event, f"{where}: this key stands twice; leave one of them out")
            self.lines[where] = _line(event)
            value = self._value(next(self._events), f"{where}.", depth + 1)
            if merges:
                below = self._merged(event, value)
            else:
                own[event.value] = value
        return below | own

    def _merged(self, event: Any, value: Any) -> dict[str, Any]:
        """What ``<<`` brings in: of several mappings, the first one that has a key."""
        mappings = value if isinstance(value, list) else [value]
        if not all(isinstance(item, dict) for item in mappings):
            raise self._error(event, "<< takes a mapping in, or a list of mappings; give one")
        return {key: held for mapping in reversed(mappings) for key, held in mapping.items()}

    def _check_tag(self, event: Any, *allowed: str) -> None:
        if event.tag not in (None, "!", *(f"{_TAG}{kind}" for kind in allowed)):
            shown = f"!!{event.tag.removeprefix(_TAG)}" if event.tag.startswith(_TAG) else event.tag
            raise ConstructorError(None, None, f"the tag {shown} is not for this", event.start_mark)

    def _scalar(self, event: Any) -> Any:
        kind = event.tag.removeprefix(_TAG) if event.tag not in (None, "!") else None
        if kind == "str" or (kind is None and not event.implicit[0]):
            return event.value
        self._check_tag(event, *_KINDS)
        try:
            value = plain_value(event.value)
        except ValueError as error:
            raise self._error(event, str(error)) from None
        if kind is not None and not _KINDS[kind](value):
            raise ConstructorError(None, None, f"{event.value[:60]!r} is no !!{kind}", event.start_mark)
        return value


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "bool": lambda value: type(value) is bool,
    "null": lambda value: value is None,
}


class _Writer(yaml.SafeDumper):
    """Quotes a text that would be read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        try:
            same = type(plain_value(text)) is str
        except ValueError:
            same = False
        style = '"' if _BREAKS_OF_OLD.search(text) else None if same else "'"
        return self.represent_scalar(f"{_TAG}str", str(text), style=style)


_Writer.add_representer(str, _Writer.represent_text)
_Writer.add_representer(OldTruth, _Writer.represent_text)
