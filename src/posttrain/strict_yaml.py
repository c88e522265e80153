"""YAML as recipes are written in it: the values that JSON has, read by YAML 1.2's rules, with the line of every key.

PyYAML parses; here are the rules of YAML 1.2 and the limits. Only plain data come out, of a bounded size and depth: no
dates, no tags of one's own, no anchors that hold themselves. What YAML 1.1 and 1.2 read differently is text (``1:30``,
``on``) or, where a number was surely meant, refused (``010``).
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from posttrain.errors import RecipeError

MAX_CHARS, MAX_VALUES, MAX_DEPTH = 2**19, 50_000, 50
MAX_KEY_CHARS, MAX_DIGITS = 200, 1000
_TAG = "tag:yaml.org,2002:"
_PLAIN, _TEXT = "plain", f"{_TAG}str"
_KINDS = {"int": (int,), "float": (int, float), "bool": (bool,), "null": (type(None),)}
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
_OLD_LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # YAML 1.1 breaks lines at them; folded, one of them becomes a space
_OLD_TRUTH = re.compile("yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")


class OldTruth(str):
    """A plain ``yes``, ``no``, ``on`` or ``off``: truth to YAML 1.1, text to YAML 1.2; a key's type decides."""


def read_yaml(text: str, place: str) -> tuple[Any, dict[str, int]]:
    """Return the one document in ``text``, and the 1-based line of every dotted key; keys are texts.

    Raises:
        RecipeError: with ``place`` and the line: not YAML, more than plain data, a key twice, too large or too deep.
    """
    if len(text) > MAX_CHARS:
        raise RecipeError(f"{place}: {len(text):,} characters; a recipe has at most {MAX_CHARS:,}")
    reader = _Reader(place)
    try:
        return reader.read(text), reader.lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        reason = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", "damaged")).split())
        raise RecipeError(f"{place}{line}: not valid YAML: {reason}; write it as `key: value`, one to a line") from None


def read_option(text: str, key: str) -> Any:
    """Return a value of the command line as YAML; text where it is none.

    Raises:
        RecipeError: with the key; too large, too deep, a key twice, or a number that can be read in two ways.
    """
    try:
        if len(text) <= MAX_CHARS:
            return _Reader(f"command line: {key}", has_lines=False).read(text)
    except yaml.YAMLError:
        return text
    raise RecipeError(f"command line: {key}: {len(text):,} characters; a value has at most {MAX_CHARS:,}")


def write_yaml(data: object) -> str:
    """Return plain data as YAML that ``read_yaml`` reads as the same."""
    return str(yaml.dump(data, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=100))


def plain_value(text: str) -> Any:
    """Return what an unquoted word means: null, a truth value, a number, or itself.

    Raises:
        ValueError: a number that could be read in two ways, or of thousands of digits.
    """
    if text in _NAMED:
        return _NAMED[text]
    if _OLD_TRUTH.fullmatch(text):
        return OldTruth(text)
    if len(text) > MAX_DIGITS and (_INTEGER.fullmatch(text) or _REAL.fullmatch(text)):
        raise ValueError(f"a number of {len(text):,} characters; give one of at most {MAX_DIGITS:,}, or quote it")
    if _INTEGER.fullmatch(text):
        return int(text, 16 if "x" in text else 10)
    if _OCTAL.fullmatch(text):
        raise ValueError(f"{text} is octal to some and decimal to others; write it without the 0, or quote it for text")
    return float(text.replace("_", "")) if _REAL.fullmatch(text) else text


class _Loader(yaml.SafeLoader):
    """Leaves unquoted words to ``plain_value``."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return str(super().resolve(kind, value, implicit)) if kind is not yaml.ScalarNode or not implicit[0] else _PLAIN


class _Reader:
    """Builds the values of one document from PyYAML's nodes, with limits and lines."""

    def __init__(self, place: str, *, has_lines: bool = True) -> None:
        self.place, self.has_lines = place, has_lines
        self.lines: dict[str, int] = {}
        self._open: list[yaml.Node] = []
        self._num_values = 0

    def read(self, text: str) -> Any:
        loader = _Loader(text)
        try:
            node = loader.get_node() if loader.check_node() else None
            if loader.check_node():
                second = loader.get_node()
                raise self._error(second, "a second document begins here; a recipe is one, so leave the --- out")
            return None if node is None else self._build(node, "")
        except RecursionError:
            raise RecipeError(f"{self.place}: nested more than {MAX_DEPTH} deep; a recipe must be flatter") from None
        finally:
            loader.dispose()

    def _error(self, node: Any, what: str) -> RecipeError:
        line = f":{node.start_mark.line + 1}" if self.has_lines else ""
        return RecipeError(f"{self.place}{line}: {what}")

    def _build(self, node: yaml.Node, prefix: str) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise self._error(node, f"more than {MAX_VALUES:,} values, aliases written out; a recipe must be smaller")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node in self._open:
            raise self._error(node, "an anchor holds itself; write its value out")
        if len(self._open) > MAX_DEPTH:
            raise self._error(node, f"nested more than {MAX_DEPTH} deep; a recipe must be flatter")
        if node.tag != f"{_TAG}{'seq' if isinstance(node, yaml.SequenceNode) else 'map'}":
            raise _wrong_tag(node)
        self._open.append(node)
        value = self._items(node, prefix) if isinstance(node, yaml.SequenceNode) else self._mapping(node, prefix)
        self._open.pop()
        return value

    def _items(self, node: yaml.SequenceNode, prefix: str) -> list[Any]:
        for index, item in enumerate(node.value):
            self.lines.setdefault(f"{prefix}{index}", item.start_mark.line + 1)
        return [self._build(item, f"{prefix}{index}.") for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.Node, prefix: str) -> dict[str, Any]:
        own: dict[str, Any] = {}
        below: dict[str, Any] | None = None
        for key, held in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (_PLAIN, _TEXT):
                raise self._error(key, "a key must be a plain word, such as `train`")
            if len(key.value) > MAX_KEY_CHARS:
                raise self._error(key, f"a key of {len(key.value):,} characters; one has at most {MAX_KEY_CHARS}")
            merges = key.value == "<<" and key.tag == _PLAIN
            where = f"{prefix}{key.value}"
            if key.value in own or (merges and below is not None):
                raise self._error(key, f"{where}: this key stands twice; leave one of them out")
            self.lines[where] = key.start_mark.line + 1
            value = self._build(held, f"{where}.")
            if not merges:
                own[key.value] = value
                continue
            mappings = value if isinstance(value, list) else [value]
            if not all(isinstance(item, dict) for item in mappings):
                raise self._error(key, "<< takes a mapping in, or a list of mappings; give one")
            below = {name: item for mapping in reversed(mappings) for name, item in mapping.items()}
        return (below or {}) | own

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == _TEXT:
            return node.value
        try:
            value = plain_value(node.value)
        except ValueError as error:
            raise self._error(node, str(error)) from None
        kind = node.tag.removeprefix(_TAG)
        if node.tag != _PLAIN and kind not in _KINDS:
            raise _wrong_tag(node)
        if node.tag != _PLAIN and type(value) not in _KINDS[kind]:
            raise ConstructorError(None, None, f"{node.value[:60]!r} is no !!{kind}", node.start_mark)
        return value


def _wrong_tag(node: yaml.Node) -> ConstructorError:
    what = f"the tag {node.tag.replace(_TAG, '!!')} is not for this"
    return ConstructorError(None, None, what, node.start_mark)


class _Writer(yaml.SafeDumper):
    """Quotes a text that would be read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        try:
            same = type(plain_value(text)) is str
        except ValueError:
            same = False
        style = '"' if _OLD_LINE_ENDS.search(text) else None if same else "'"
        return self.represent_scalar(_TEXT, str(text), style=style)


_Writer.add_representer(str, _Writer.represent_text)
_Writer.add_representer(OldTruth, _Writer.represent_text)
