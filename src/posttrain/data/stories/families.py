"""Story families for the task ``stories``. Each builds a story with a given number of steps.

Families are functions ``(rng, steps, limit) -> Story | None``. All numbers in a story, including working and answer,
lie in 0..``limit``. If a draw leaves this range, the family returns None and the caller draws again. All randomness
comes from ``rng``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from random import Random
from typing import Any

from posttrain.strict_yaml import read_yaml

# Words and phrases by name. Phrases for changes are keyed by operation (``+``, ``*2``).
TEXT: dict[str, Any] = read_yaml(
    (resources.files("posttrain") / "data" / "stories.yaml").read_text(encoding="utf-8"), "stories.yaml"
)[0]
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_EQUATION = re.compile(r"(?<![\d.])(\d+)\s*([-+*/])\s*(\d+)\s*=\s*(\d+)(?!\d)")
Operation = tuple[str, int | None]  # (sign, operand). None means any operand.
Phrases = Mapping[str, Sequence[str]]
# Indices of earlier equations that produced each operand. None for numbers given in the story.
Origins = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Equation:
    """A step such as ``19 + 12 = 31``. ``claimed`` overrides the result with an incorrect one."""

    left: int
    sign: str
    right: int
    claimed: int | None = None

    @property
    def result(self) -> int:
        if self.claimed is None:
            return int(_APPLY[self.sign](self.left, self.right))
        return self.claimed

    @property
    def holds(self) -> bool:
        """Check for exact division by a positive divisor, and non-negative differences."""
        if self.sign == "/":
            return self.right > 0 and self.left % self.right == 0
        return self.sign != "-" or self.left >= self.right

    @property
    def key(self) -> str:
        """Canonical text, identical for ``a + b`` and ``b + a``, used to assign splits."""
        if self.sign in "+*" and self.left > self.right:
            return f"{self.right}{self.sign}{self.left}"
        return f"{self.left}{self.sign}{self.right}"

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right} = {self.result}."


def is_worked(written: str) -> bool:
    """Check if text shows working: at least one true equation such as ``19 + 12 = 31``."""
    for parts in _EQUATION.findall(written):
        if max(map(len, parts)) > 9:
            continue
        left, sign, right, result = parts
        equation = Equation(int(left), sign, int(right))
        if equation.holds and equation.result == int(result):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Story:
    """A word problem: text ending with the question, and equations leading to the answer.

    ``origins`` tracks where each equation's operands come from.
    """

    family: str
    text: str
    equations: tuple[Equation, ...]
    origins: tuple[Origins, ...]

    @property
    def answer(self) -> int:
        return self.equations[-1].result

    @property
    def working(self) -> str:
        return " ".join(str(equation) for equation in self.equations)

    @property
    def signature(self) -> str:
        """Structure and numbers, ignoring words and the order of operands in sums and products."""
        return ";".join(equation.key for equation in self.equations)


@dataclass
class StoryCast:
    """People and things in a story."""

    name: str
    they: str
    friend: str
    things: str
    place: str

    def fill(self, template: str, **numbers: object) -> str:
        them = "her" if self.they == "she" else "him"
        words = {**vars(self), "They": self.they.capitalize(), "them": them, **numbers}
        return template.format(**words)


def draw_cast(rng: Random) -> StoryCast:
    """Draw a hero, a friend, countable things and a place."""
    (name, they), (friend, _) = rng.sample(TEXT["people"], 2)
    return StoryCast(name, they, friend, rng.choice(TEXT["things"]), rng.choice(TEXT["places"]))


@dataclass(slots=True)
class Draft:
    """A partially written story. ``value`` is the current quantity."""

    rng: Random
    limit: int
    cast: StoryCast
    sentences: list[str] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    origins: list[Origins] = field(default_factory=list)
    value: int = 0

    @property
    def last(self) -> int | None:
        """Index of the equation that produced ``value``. None if given by the story."""
        if self.equations:
            return len(self.equations) - 1
        return None

    def work(self, left: int, sign: str, right: int, origins: Origins = (None, None)) -> bool:
        """Add a step. False if it leaves the range or does not divide."""
        equation = Equation(left, sign, right)
        if not equation.holds or max(left, right, equation.result) > self.limit:
            return False
        self.equations.append(equation)
        self.origins.append(origins)
        self.value = equation.result
        return True

    def say(self, templates: Sequence[str], **numbers: object) -> None:
        self.sentences.append(self.cast.fill(self.rng.choice(templates), **numbers))

    def change(self, phrases: Phrases) -> bool:
        """Add an event: the value grows, shrinks, doubles, halves, ..."""
        self.cast.place = self.rng.choice(TEXT["places"])
        sign, operand = draw_operation(self.rng, self.value, self.limit)
        number = operand
        if number is None:
            number = draw_operand(self.rng, sign, self.value, self.limit)
        if number < 2 or not self.work(self.value, sign, number, (self.last, None)):
            return False
        self.say(phrases[f"{sign}{operand or ''}"], n=number)
        return True

    def go_on(self, phrases: Phrases, family: str, questions: Sequence[str], steps: int) -> Story | None:
        """Add events until ``steps`` is reached, then the question. None if an event fails."""
        while len(self.equations) < steps:
            if not self.change(phrases):
                return None
        return self.finish(family, questions)

    def finish(self, family: str, questions: Sequence[str]) -> Story:
        """Finish the story with a question and sometimes an aside."""
        if self.rng.random() < 0.15:
            template = self.rng.choice(TEXT["asides"])
            aside = self.cast.fill(template, n=self.rng.randint(2, min(20, self.limit)))
            self.sentences.insert(self.rng.randint(1, len(self.sentences)), aside)
        self.say(questions)
        return Story(family, " ".join(self.sentences), tuple(self.equations), tuple(self.origins))


def draw_operation(rng: Random, value: int, limit: int) -> Operation:
    """Draw an operation suitable for ``value``, usually addition or subtraction."""
    choices: list[Operation] = [("+", None), ("-", None)] * 3
    if value > 0:
        choices += [("*", k) for k in (2, 3) if value * k <= limit]
        choices += [("/", k) for k in (2, 3) if value % k == 0]
    return rng.choice(choices)


def draw_operand(rng: Random, sign: str, value: int, limit: int) -> int:
    """Draw a number to add to or subtract from ``value``: at least 2 (plural), or 0 if impossible."""
    if sign == "+":
        room = limit - value
    else:
        room = value
    if room >= 2:
        return rng.randint(2, room)
    return 0


def chain(rng: Random, steps: int, limit: int) -> Story | None:
    """A growing and shrinking heap, with one event per step."""
    draft = Draft(rng, limit, draw_cast(rng), value=rng.randint(2, limit))
    draft.say(TEXT["starts"], n=draft.value)
    return draft.go_on(TEXT["changes"], "chain", TEXT["questions"], steps)


def compare(rng: Random, steps: int, limit: int) -> Story | None:
    """People who each have more, fewer, twice as many as their predecessor, sometimes ending in a sum."""
    cast = draw_cast(rng)
    names = [name for name, _ in rng.sample(TEXT["people"], steps + 1)]
    together = steps >= 2 and rng.random() < 0.4
    draft = Draft(rng, limit, cast, value=rng.randint(2, limit))
    draft.sentences.append(f"{names[0]} has {draft.value} {cast.things}.")
    previous = draft.value
    before = draft.last
    num_comparisons = steps - together
    for i in range(num_comparisons):
        previous = draft.value
        before = draft.last
        cast.friend = names[i]
        cast.name = names[i + 1]
        if not draft.change(TEXT["comparisons"]):
            return None
    if not together:
        return draft.finish("compare", ("How many {things} does {name} have?",))
    if not draft.work(previous, "+", draft.value, (before, draft.last)):
        return None
    return draft.finish("compare", ("How many {things} do {friend} and {name} have together?",))


def shop(rng: Random, steps: int, limit: int) -> Story | None:
    """Prices and amounts, then change from a purse, then events involving the coins."""
    draft = Draft(rng, limit, draw_cast(rng))
    goods = rng.sample(TEXT["goods"], 2)
    kinds = 1 if steps < 3 else rng.randint(1, 2)
    prices = [rng.randint(2, 12) for _ in range(kinds)]
    amounts = [rng.randint(2, 9) for _ in range(kinds)]
    costs = []
    for price, amount in zip(prices, amounts, strict=True):
        if not draft.work(price, "*", amount):
            return None
        costs.append(price * amount)
    if kinds == 2 and not draft.work(costs[0], "+", costs[1], (0, 1)):
        return None
    offers: list[str] = []
    baskets: list[str] = []
    for (one, several), price, amount in zip(goods, prices, amounts, strict=False):
        article = "a" if offers else "A"
        offers.append(f"{article} {one} costs {price} coins")
        baskets.append(f"{amount} {several}")
    draft.sentences.append(" and ".join(offers) + ".")
    draft.sentences.append(f"{draft.cast.name} buys {' and '.join(baskets)}.")
    if len(draft.equations) == steps:
        return draft.finish("shop", ("How many coins does {name} pay?", "How many coins does that cost?"))
    purse = rng.randint(draft.value, limit)
    if rng.random() < 0.5:
        draft.sentences.insert(0, f"{draft.cast.name} has {purse} coins.")
    else:
        draft.say(("{They} pays from a purse of {n} coins.",), n=purse)
    draft.work(purse, "-", draft.value, (None, draft.last))
    return draft.go_on(TEXT["coin_changes"], "shop", TEXT["coin_questions"], steps)


def rate(rng: Random, steps: int, limit: int) -> Story | None:
    """A fixed number per day for multiple days, sometimes added to a heap, then events."""
    draft = Draft(rng, limit, draw_cast(rng))
    pace = rng.randint(2, 12)
    times = rng.randint(2, 9)
    if not draft.work(pace, "*", times):
        return None
    onto_heap = steps >= 2 and rng.random() < 0.5 and draft.value <= limit - 2
    draft.say(TEXT["gains" if onto_heap else "rates"], n=pace, m=times)
    if onto_heap:
        before = rng.randint(2, limit - draft.value)
        gained = draft.value
        draft.sentences.insert(0, draft.cast.fill("{name} has {n} {things}.", n=before))
        draft.work(before, "+", gained, (None, draft.last))
    return draft.go_on(TEXT["changes"], "rate", TEXT["questions"], steps)


def share(rng: Random, steps: int, limit: int) -> Story | None:
    """A heap, or two combined, shared equally. Then events affecting a single person's share."""
    cast = draw_cast(rng)
    draft = Draft(rng, limit, cast)
    among = rng.randint(2, 9)
    each = rng.randint(2, 20)
    total = among * each
    if total > limit:
        return None
    if steps >= 2 and rng.random() < 0.6:
        mine = rng.randint(2, total - 2)
        draft.say(("{name} has {n} {things} and {friend} has {m}.",), n=mine, m=total - mine)
        draft.say(("They share all of them equally among {n} friends.",), n=among)
        draft.work(mine, "+", total - mine)
    else:
        draft.say(("{name} has {n} {things}.", "{name} brings a bag of {n} {things}."), n=total)
        draft.say(("{They} shares them equally among {n} friends.",), n=among)
    draft.work(total, "/", among, (draft.last, None))
    if len(draft.equations) == steps:
        return draft.finish("share", ("How many {things} does each friend get?",))
    others = [person for person in TEXT["people"] if person[0] not in (cast.name, cast.friend)]
    cast.friend = cast.name
    cast.name, cast.they = rng.choice(others)
    draft.sentences.append(f"One of the friends is {cast.name}.")
    return draft.go_on(TEXT["changes"], "share", TEXT["share_questions"], steps)


FAMILIES: dict[str, Callable[[Random, int, int], Story | None]] = {
    family.__name__: family for family in (chain, compare, shop, rate, share)
}
