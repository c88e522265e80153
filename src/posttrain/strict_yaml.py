"""Strict YAML for recipes: JSON values under YAML 1.2 rules, tracking line numbers.

PyYAML parses; this module adds YAML 1.2 rules and limits. Values differing between YAML 1.1 and 1.2 are read as text
(``1:30``, ``on``), or refused if surely meant as numbers (``010``).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from posttrain.errors import RecipeError

MAX_CHARS, MAX_VALUES, MAX_DEPTH, MAX_KEY_CHARS, MAX_DIGITS = 2**19, 50_000, 50, 200, 1000
_TAG = "tag:yaml.org,2002:"
_PLAIN, _TEXT = "plain", f"{_TAG}str"
_NUMBER = re.compile(
    r"[-+]?(0x(?P<hex>[0-9a-fA-F]+)|(?P<whole>0[0-9_]*|[1-9][0-9]*(_[0-9]+)*)"
    r"|(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?)"
)
_NAMED = dict.fromkeys(("", "~", "null", "Null", "NULL")) | {"true": True, "True": True, "TRUE": True}
_NAMED |= {"false": False, "False": False, "FALSE": False}
_NAMED |= {f"{sign}.{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in ("inf", "Inf", "INF")}
_NAMED |= dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan"))
_OLD_TRUTH = re.compile("yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_OLD_LINE_ENDS = re.compile("[\x85\u2028\u2029]")  # line breaks in YAML 1.1; folding turns one into a space


class OldTruth(str):
    """A plain ``yes``, ``no``, ``on`` or ``off``: truth to YAML 1.1, text to YAML 1.2; a key's type decides."""


def read_yaml(text: str, place: str) -> tuple[Any, dict[str, int]]:
    """Parse a single document, plus 1-based line numbers per dotted key; keys are strings.

    Raises:
        RecipeError: invalid YAML, non-plain data, duplicate keys, or too large or deep. States ``place`` and line.
    """
    try:
        reader = _Reader(text, place)
        return reader.read(), reader.lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = ""
        if mark is not None:
            line = f":{mark.line + 1}"
        reason = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", "damaged")).split())
        advice = "write it as `key: value`, one to a line"
        if "'\\t'" in reason:
            advice = "use spaces, no tabs"
        raise RecipeError(f"{place}{line}: not valid YAML: {reason}; {advice}") from None


def read_option(text: str, key: str) -> object:
    """Parse a command-line value as YAML, falling back to text.

    Raises:
        RecipeError: too large, too deep, duplicate keys, or an ambiguous number. Names the key.
    """
    try:
        return _Reader(text, f"command line: {key}", has_lines=False).read()
    except yaml.YAMLError:
        return text


def write_yaml(data: object) -> str:
    """Dump plain data as YAML that ``read_yaml`` reads back unchanged."""
    return str(yaml.dump(data, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=100))


def plain_value(text: str) -> Any:
    """Interpret an unquoted word: null, boolean, number, or text.

    Raises:
        ValueError: ambiguous number, or thousands of digits.
    """
    number = _NUMBER.fullmatch(text)
    if number is None:
        if text in _NAMED:
            return _NAMED[text]
        if _OLD_TRUTH.fullmatch(text):
            return OldTruth(text)
        return text
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} characters; give one of at most {MAX_DIGITS:,}, or quote it")
    if number["hex"]:
        return int(text, 16)
    whole = number["whole"] or ""
    if whole[:1] == "0" and whole != "0":
        raise ValueError(f"{text} is octal to some and decimal to others; write it without the 0, or quote it for text")
    if whole:
        return int(text)
    return float(text.replace("_", ""))


class _Reader(yaml.SafeLoader):
    """Construct values from PyYAML nodes, enforcing limits and recording lines."""

    def __init__(self, text: str, place: str, *, has_lines: bool = True) -> None:
        self.place = place
        self.has_lines = has_lines
        self.num_values = 0
        self.lines: dict[str, int] = {}
        if len(text) > MAX_CHARS:
            what = "a value"
            if has_lines:
                what = "a recipe"
            raise RecipeError(f"{place}: {len(text):,} characters; {what} has at most {MAX_CHARS:,}")
        super().__init__(text)

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Resolve a node's tag, leaving unquoted words to ``plain_value``."""
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return str(super().resolve(kind, value, implicit))

    def read(self) -> Any:
        """Read the document."""
        try:
            node = None
            if self.check_node():
                node = self.get_node()
            if self.check_node():
                second = "a second document begins here; a recipe is one, so leave the --- out"
                self._check(False, self.get_node(), second)
            if node is None:
                return None
            return self._build(node, "", ())
        except RecursionError:
            raise RecipeError(f"{self.place}: nested more than {MAX_DEPTH} deep; a recipe must be flatter") from None
        finally:
            self.dispose()

    def _check(self, is_right: bool, node: Any, otherwise: str) -> None:
        if not is_right:
            line = ""
            if self.has_lines:
                line = f":{node.start_mark.line + 1}"
            raise RecipeError(f"{self.place}{line}: {otherwise}")

    def _build(self, node: Any, prefix: str, above: tuple[Any, ...]) -> Any:
        self.num_values += 1
        over = f"more than {MAX_VALUES:,} values, aliases written out; a recipe must be smaller"
        self._check(self.num_values <= MAX_VALUES, node, over)
        self._check(node not in above, node, "an anchor holds itself; write its value out")
        is_word = isinstance(node, yaml.ScalarNode)
        self._check(
            is_word or len(above) <= MAX_DEPTH, node, f"nested more than {MAX_DEPTH} deep; a recipe must be flatter"
        )
        kind = (type(node), node.tag)
        inside = (*above, node)
        if kind == (yaml.SequenceNode, f"{_TAG}seq"):
            self.lines |= {f"{prefix}{index}": item.start_mark.line + 1 for index, item in enumerate(node.value)}
            return [self._build(item, f"{prefix}{index}.", inside) for index, item in enumerate(node.value)]
        if kind == (yaml.MappingNode, f"{_TAG}map"):
            return self._mapping(node, prefix, inside)
        if not is_word or node.tag not in (_PLAIN, _TEXT):
            what = f"the tag {node.tag.replace(_TAG, '!!')} is not for this"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        try:
            if node.tag == _TEXT:
                return node.value
            return plain_value(node.value)
        except ValueError as error:
            self._check(False, node, str(error))

    def _mapping(self, node: yaml.MappingNode, prefix: str, above: tuple[object, ...]) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: list[Any] = []
        for key, held in node.value:
            is_word = isinstance(key, yaml.ScalarNode) and key.tag in (_PLAIN, _TEXT)
            self._check(is_word, key, "a key must be a plain word, such as `train`")
            size = len(key.value)
            where = f"{prefix}{key.value}"
            self._check(size <= MAX_KEY_CHARS, key, f"a key of {size:,} characters; one has at most {MAX_KEY_CHARS}")
            self._check(key.value not in own, key, f"{where}: this key stands twice; leave one of them out")
            self.lines[where] = key.start_mark.line + 1
            own[key.value] = value = self._build(held, f"{where}.", above)
            if key.value == "<<" and key.tag == _PLAIN:
                merged = [own, *reversed(value if isinstance(value, list) else [value])]
                are_mappings = all(isinstance(part, dict) for part in merged)
                self._check(are_mappings, key, "<< takes a mapping in, or a list of mappings; give one")
        if merged:
            del own["<<"]
        return {name: item for part in [*merged[1:], own] for name, item in part.items()}


class _Writer(yaml.SafeDumper):
    """Quotes texts that would otherwise be misread."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Represent a string."""
        is_word = type(_NAMED.get(text, text)) is str and not _OLD_TRUTH.fullmatch(text) and not _NUMBER.fullmatch(text)
        if _OLD_LINE_ENDS.search(text):
            style = '"'
        elif is_word:
            style = None
        else:
            style = "'"
        return self.represent_scalar(_TEXT, str(text), style=style)


_Writer.add_representer(str, _Writer.represent_text)
_Writer.add_representer(OldTruth, _Writer.represent_text)
