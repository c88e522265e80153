"""Changes of a run's future, as they are typed: ``train.lr=1e-5,1e-4``, ``drop prompt:3``, ``reward 3.2=0``.

``KEY=VALUE & KEY=VALUE`` in one word changes both in the same future.
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
MAX_NUMBER = 1_000_000  # of a prompt or an answer
TOGETHER = " & "
FORMS = "Give KEY=VALUE (train.lr=1e-5), drop prompt:3, or reward 3.2=0"
_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is changed: keys of the recipe, or the first batch.

    ``label``: as it is typed. ``overrides``: dotted keys and their values. ``dropped``: prompts of the first batch that
    are not trained on. ``reward``: prompt, answer and the reward that it gets. All numbers are from 0.
    """

    label: str
    overrides: tuple[tuple[str, str], ...] = ()
    dropped: tuple[int, ...] = ()
    reward: tuple[int, int, float] | None = None


def parse_changes(words: Sequence[str]) -> list[Change]:
    """Read changes; each value of a list between commas is a change of its own.

    ``drop`` and ``reward`` may be words apart from what follows them, as a shell splits them.

    Raises:
        UsageError: a word is no change, or a change is there twice.
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
    """Yield each change as one text, ``drop`` and ``reward`` with the word that follows."""
    rest = [word.strip() for word in words]
    while rest:
        word = rest.pop(0)
        if word in (DROP, REWARD):
            if not rest:
                raise UsageError(f"{word}: nothing follows it. {FORMS}")
            yield f"{word} {rest.pop(0)}"
        else:
            yield word


def _read_drops(text: str, rest: str) -> Iterator[Change]:
    kind, _, listed = rest.partition(":")
    problem = f"{shorten(text)}: the prompts are given by their numbers in the step, from 0. "
    if kind != "prompt" or not listed:
        raise UsageError(f"{problem}Give drop prompt:3, or drop prompt:0,1,2, drop prompt:0-7, drop prompt:3+5")
    for part in listed.split(","):
        together = part.strip()
        bounds = _RANGE.fullmatch(together)
        if bounds:
            first, last = (_read_number(problem, bound) for bound in bounds.groups())
            if last < first:
                raise UsageError(f"{problem}{together} ends before it begins. Give {last}-{first}")
            if last - first >= 1000:
                raise UsageError(f"{problem}{together} is more than a thousand futures. Give fewer")
            for number in range(first, last + 1):
                yield Change(f"drop prompt:{number}", dropped=(number,))
            continue
        numbers = tuple(_read_number(problem, number) for number in together.split("+"))
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"{problem}{together} names one twice. Give it once")
        yield Change(f"drop prompt:{'+'.join(map(str, numbers))}", dropped=numbers)


def _read_rewards(text: str, rest: str) -> Iterator[Change]:
    place, _, listed = rest.partition("=")
    prompt, _, answer = place.strip().partition(".")
    problem = f"{shorten(text)}: prompt and answer are given by their numbers in the step, from 0. "
    if not answer or not listed.strip():
        raise UsageError(f"{problem}Give reward 3.2=0, for answer 2 to prompt 3")
    numbers = (_read_number(problem, prompt), _read_number(problem, answer))
    for value in split_values(listed):
        try:
            reward = float(value)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise UsageError(f"{shorten(text)}: {shorten(value)} is no finite number. Give one, as in reward 3.2=0")
        yield Change(f"reward {numbers[0]}.{numbers[1]}={reward:g}", reward=(*numbers, reward))


def _read_number(problem: str, text: str) -> int:
    plain = text.strip()
    if not (plain.isascii() and plain.isdigit() and len(plain) < 8) or int(plain) > MAX_NUMBER:
        raise UsageError(f"{problem}{shorten(text)} is none. Give a whole number, as in prompt:3")
    return int(plain)


def _read_keys(text: str) -> Iterator[Change]:
    """Yield a change for each value of a key, or one for all ``KEY=VALUE & KEY=VALUE`` together."""
    parts = [_split_key(text, part) for part in text.split(TOGETHER)]
    if len(parts) > 1:
        yield Change(TOGETHER.join(f"{key}={value}" for key, value in parts), overrides=tuple(parts))
        return
    key, listed = parts[0]
    values = split_values(listed)
    if not values or not all(values):
        raise UsageError(f"{shorten(text)}: a value between the commas is empty. Give {key}=VALUE or {key}=A,B")
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
        raise UsageError(f"{shorten(text)} is no change.{hint} {FORMS}")
    return key, value
