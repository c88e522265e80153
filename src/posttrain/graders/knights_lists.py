"""Lists and tables of knights and knaves, spelt out: "Knights: A, B; knaves: C" becomes one statement for each name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

_ROLE = re.compile(r"\W{0,8}(knight|knave)s?\W{0,8}", re.IGNORECASE)
_RULER = re.compile(r"[\s|:]*-[\s|:-]*")
_YES = frozenset(("✓", "✔", "✔️", "✅", "☑", "yes", "true"))
_NOBODY = r"none|nobody|no\s{1,3}one|\(none\)|\[\s?\]|\{\s?\}|∅|[-–—]"
# What may stand in front of "knights:" where a group begins; "knights and knaves:" is a heading.
_START = (
    r"(?P<start>^[^\w]{0,8}|[.;,(]\s{0,3}|(?<!knights\s)(?<!knight\s)\band\s{1,3}|\b(?:while|but|so|therefore|thus)\s{1,3})"
    r"(?:(?:the|all|only)\s{1,3}){0,2}"
)


def spell_out(text: str, names: Sequence[str]) -> list[str]:
    """The lines of the text, with groups and the rows of tables as ``NAME is a knight``."""
    lines = _spell_tables(text.splitlines(), any_name_of(tuple(names)))
    return [_spell_groups(line, tuple(names)) for line in lines]


def name_pattern(names: Sequence[str]) -> str:
    """One of the names, as words of their own."""
    longest_first = sorted(names, key=len, reverse=True)
    return rf"(?<!\w)(?:{'|'.join(re.escape(name) for name in longest_first)})(?!\w)"


@lru_cache(maxsize=256)  # a puzzle is graded many times in a row
def any_name_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds each of the names."""
    return re.compile(name_pattern(names), re.IGNORECASE)


@lru_cache(maxsize=256)
def _groups(names: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Names behind a role ("knights: A, B"), and a role behind several names ("A and B are knights")."""
    one = name_pattern(names)
    further = rf"(?:\s{{0,3}}(?:,\s{{0,3}}(?:and\b|&)|,|and\b|&|\+)\s{{0,3}}{one})"
    behind = (
        rf"{_START}(?P<role>knight|knave)s?\s{{0,3}}(?:\(s\)|\([0-9]\))?\s{{0,3}}(?:are\b|is\b|->|[:=→–—-])\s{{0,3}}[\[{{(]?\s?"
        rf"(?P<names>{one}{further}{{0,99}}|{_NOBODY})[\])}}]?"
        r"(?=\s{0,3}(?:[.;!|]|$|,?\s{0,3}(?:(?:and|while|but)\s{1,3})?(?:(?:the|only|all)\s{1,3}){0,2}(?:knight|knave)))"
    )
    before = (
        rf"(?P<start>\bboth\s{{1,3}})?(?P<names>{one}{further}{{1,99}})\s{{0,3}}(?:(?:are|must\s{{1,3}}be)\b|[:=→–—-])\s{{0,3}}"
        r"(?:(?:both|all|the|definitely|therefore|thus)\s{1,3}){0,2}(?P<role>knight|knave)s\b"
    )
    return re.compile(behind, re.IGNORECASE), re.compile(before, re.IGNORECASE)


def _spell_groups(line: str, names: tuple[str, ...]) -> str:
    def state(match: re.Match[str]) -> str:
        start = (match["start"] or "").removeprefix("both ")
        return f"{start}{_state(any_name_of(names).findall(match['names']), match['role'])} "

    for pattern in _groups(names):
        line = pattern.sub(state, line)
    return line


def _state(names: Sequence[str], role: str) -> str:
    return ", ".join(f"{name} is a {role.lower()}" for name in names)


def _spell_tables(lines: Sequence[str], any_name: re.Pattern[str]) -> Iterator[str]:
    """Rows of tables whose columns, or whose first cells, are the roles; all other lines as they are."""
    roles: dict[int, str] = {}  # by column, of the table that is being read
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 2:
            roles = {}
            yield line
            continue
        named = {i: match[1] for i, cell in enumerate(cells) if (match := _ROLE.fullmatch(cell))}
        if len({role.lower() for role in named.values()}) == 2 and not any_name.search(line):
            roles = named
            yield ""
        elif _RULER.fullmatch(line):
            yield ""
        elif roles:
            yield _read_row(cells, roles, any_name)
        elif list(named) == [0] and any_name.search(line):
            yield _state(any_name.findall(line), named[0])
        else:
            yield line


def _read_row(cells: Sequence[str], roles: dict[int, str], any_name: re.Pattern[str]) -> str:
    """A row below columns of roles: names in them, or a mark in one of them beside a name."""
    beside = [name for i, cell in enumerate(cells) if i not in roles for name in any_name.findall(cell)]
    stated = []
    for i, role in roles.items():
        cell = cells[i] if i < len(cells) else ""
        others = [cells[j] for j in roles if j != i and j < len(cells)]
        marked = cell.casefold() in _YES or (cell.casefold() == "x" and not any(others))
        stated.append(_state(beside if marked else any_name.findall(cell), role))
    return ", ".join(one for one in stated if one)
