"""Parse changes from the command line: ``train.lr=1e-5,1e-4``, ``drop prompt:3``, ``reward 3.2=0``.

``KEY=VALUE & KEY=VALUE`` in one argument applies both in the same future.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.errors import UsageError, nearest
from posttrain.option_types import shorten
from posttrain.recipes.overriding import split_values

DROP = "drop"
REWARD = "reward"
MAX_NUMBER = 1_000_000  # largest prompt or answer index
TOGETHER = " & "
FORMS = "Give KEY=VALUE (train.lr=1e-5), drop prompt:3, or reward 3.2=0"
_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Change:
    """A single change: recipe keys, or the first batch.

    ``label``: text as typed. ``overrides``: dotted keys and values. ``dropped``: prompts in the first batch to exclude
    from training. ``reward``: prompt, answer, and new reward. Indices start at 0.
    """

    label: str
    overrides: tuple[tuple[str, str], ...] = ()
    dropped: tuple[int, ...] = ()
    reward: tuple[int, int, float] | None = None


def parse_changes(words: Sequence[str]) -> list[Change]:
    """Parse changes. Comma-separated values become separate changes.

    ``drop`` and ``reward`` may be separated from their argument, since the shell splits at spaces.

    Raises:
        UsageError: invalid or duplicate change.
    """
    changes: list[Change] = []
    for text in _join_words(words):
        first, _, rest = text.partition(" ")
        if first == DROP:
            changes += _read_drops(text, rest.strip())
        elif first == REWARD:
            changes += _read_rewards(text, rest.strip())
        else:
            changes += _read_keys(text)
    labels = [change.label for change in changes]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"{shorten(label)}: given twice. Give it once")
    return changes


def _join_words(words: Sequence[str]) -> Iterator[str]:
    """Yield each change as one text, joining ``drop`` and ``reward`` with the following word."""
    rest = [word.strip() for word in words]
    while rest:
        word = rest.pop(0)
        if word in (DROP, REWARD):
            if not rest:
                raise UsageError(f"{word}: missing argument. {FORMS}")
            yield f"{word} {rest.pop(0)}"
        else:
            yield word


def _read_drops(text: str, rest: str) -> Iterator[Change]:
    kind, _, listed = rest.partition(":")
    problem = f"{shorten(text)}: prompts are numbered within the step, from 0. "
    if kind != "prompt" or not listed:
        raise UsageError(f"{problem}Give drop prompt:3, or drop prompt:0,1,2, drop prompt:0-7, drop prompt:3+5")
    for part in listed.split(","):
        together = part.strip()
        bounds = _RANGE.fullmatch(together)
        if bounds:
            first, last = (_read_number(problem, bound) for bound in bounds.groups())
            if last < first:
                raise UsageError(f"{problem}{together} is an empty range. Give {last}-{first}")
            if last - first >= 1000:
                raise UsageError(f"{problem}{together} exceeds 1000 futures. Give fewer")
            for number in range(first, last + 1):
                yield Change(f"drop prompt:{number}", dropped=(number,))
            continue
        numbers = tuple(_read_number(problem, number) for number in together.split("+"))
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"{problem}{together} contains a duplicate. Give each prompt once")
        yield Change(f"drop prompt:{'+'.join(map(str, numbers))}", dropped=numbers)


def _read_rewards(text: str, rest: str) -> Iterator[Change]:
    place, _, listed = rest.partition("=")
    prompt, _, answer = place.strip().partition(".")
    problem = f"{shorten(text)}: prompts and answers are numbered from 0. "
    if not answer or not listed.strip():
        raise UsageError(f"{problem}For prompt 3, answer 2, give reward 3.2=0")
    numbers = (_read_number(problem, prompt), _read_number(problem, answer))
    for value in split_values(listed):
        try:
            reward = float(value)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise UsageError(f"{shorten(text)}: {shorten(value)} is not a finite number. Example: reward 3.2=0")
        yield Change(f"reward {numbers[0]}.{numbers[1]}={reward:g}", reward=(*numbers, reward))


def _read_number(problem: str, text: str) -> int:
    plain = text.strip()
    if not (plain.isascii() and plain.isdigit() and len(plain) < 8) or int(plain) > MAX_NUMBER:
        raise UsageError(f"{problem}{shorten(text)} is not a whole number. Example: prompt:3")
    return int(plain)


def _read_keys(text: str) -> Iterator[Change]:
    """Yield one change per value, or a single change for ``KEY=VALUE & KEY=VALUE``."""
    parts = [_split_key(text, part) for part in text.split(TOGETHER)]
    if len(parts) > 1:
        yield Change(TOGETHER.join(f"{key}={value}" for key, value in parts), overrides=tuple(parts))
        return
    key, listed = parts[0]
    values = split_values(listed)
    if not values or not all(values):
        raise UsageError(f"{shorten(text)}: empty value between commas. Give {key}=VALUE or {key}=A,B")
    for value in values:
        yield Change(f"{key}={value}", overrides=((key, value),))


def _split_key(text: str, part: str) -> tuple[str, str]:
    key, equals, value = part.strip().removeprefix("--").partition("=")
    key = key.strip()
    value = value.strip()
    if not equals or not key or not value:
        near = nearest(key.partition(" ")[0], (DROP, REWARD))
        hint = ""
        if near and near != key:
            hint = f" Did you mean {near}?"
        raise UsageError(f"{shorten(text)} is not a valid change.{hint} {FORMS}")
    return key, value
