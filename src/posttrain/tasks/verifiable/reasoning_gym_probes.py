"""What a data set's scorer pays for answers that answer nothing: constants, copies, listings and hedges."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from posttrain.graders.answers import same_answer
from posttrain.graders.scored import Scorer, score_answers

SAMPLE = 40  # questions
MAX_LISTED = 20
MAX_SHOWN = 40  # characters of an answer in a message
# Right without saying it on more than this share of the questions: such a set is refused.
MAX_RATE = 0.1
CONSTANTS = (
    "nan", "inf", "-inf", "None", "null", "0", "1", "-1", "0.0", "1/2", "True", "False", "yes", "no", "a", "x", "A",
    "?", ".", "-", "_", "[]", "{}", "()", '""', "[[]]", "[0]", "0 0", "0/0", "0 = 0", "unknown", "impossible",
    "infeasible", "error", "the answer", "I do not know", "\\boxed{}", "{gold}", "yes or no", "True or False",
)  # fmt: skip
HEDGES = (
    "{gold} or {other}", "{other} or {gold}", "{gold}, {other}", "{other}, {gold}", "{gold} {other}",
    "{gold}\n{other}", "{other}\n{gold}", "either {gold} or {other}", "{gold} / {other}", "{gold}? No, {other}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of the sample, the gold answer (None: the set has none) and the scorer."""

    question: str
    gold: str | None
    scorer: Scorer


@dataclass(frozen=True, slots=True)
class Payment:
    """What one way of answering got: ``rate``, the share of questions on which it is right and the gold says otherwise.

    ``kind``: ``constant``, ``copy``, ``listing`` or ``hedge``; ``pattern``: the answer, or how it is made.
    ``score``: the mean score on the questions on which the gold says otherwise.
    """

    kind: str
    pattern: str
    rate: float
    score: float = 0.0

    def __str__(self) -> str:
        shown = self.pattern if len(self.pattern) <= MAX_SHOWN else self.pattern[:MAX_SHOWN] + "..."
        return f"the {self.kind} {shown!r} is right on {self.rate:.0%} of the questions whose answer is another"


def pays(best: Payment) -> bool:
    """Whether a data set is refused for it."""
    return best.rate > MAX_RATE


def probe(sample: Sequence[Asked]) -> list[Payment]:
    """What each way of answering got, best first.

    A constant is no cheat where the gold answer says the same: a set of yes and no pays "yes" for half of its
    questions, and that is not counted. Hedges (the gold answer beside another) and listings of all gold answers
    never say what the gold says.
    """
    asked = [(kind, pattern, i, answer) for kind, pattern, answers in _ways(sample) for i, answer in answers]
    results = score_answers([(sample[i].scorer, answer) for _, _, i, answer in asked])
    right: Counter[tuple[str, str]] = Counter()
    paid: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (kind, pattern, i, answer), result in zip(asked, results, strict=True):
        gold = sample[i].gold
        otherwise = gold is None or not _says(gold, answer)
        value = result.value if result is not None and result.kind == "value" else 0.0
        right[kind, pattern] += otherwise and value >= 1.0
        paid[kind, pattern] += value if otherwise else 0.0
    payments = [Payment(*way, right[way] / len(sample), paid[way] / len(sample)) for way in paid]
    return sorted(payments, key=lambda one: (-one.rate, -one.score))


def _ways(sample: Sequence[Asked]) -> Iterator[tuple[str, str, list[tuple[int, str]]]]:
    golds = Counter(one.gold for one in sample if one.gold is not None)
    constants = dict.fromkeys([*CONSTANTS, *(gold for gold, _ in golds.most_common(3))])
    for constant in constants:
        yield "constant", constant, [(i, constant) for i in range(len(sample))]
    yield "copy", "the question", [(i, one.question) for i, one in enumerate(sample)]
    listed = list(golds)[:MAX_LISTED]
    if len(listed) > 1:
        for joint in (", ", " ", "\n", " or "):
            answer = joint.join(listed)
            yield "listing", joint, [(i, answer) for i in range(len(sample))]
        pairs = [(i, one.gold, _other_gold(sample, i)) for i, one in enumerate(sample) if one.gold is not None]
        for hedge in HEDGES:
            yield "hedge", hedge, [(i, hedge.format(gold=gold, other=other)) for i, gold, other in pairs]


def _other_gold(sample: Sequence[Asked], i: int) -> str:
    """The next question's gold answer that is another; there is one."""
    following = islice(cycle(sample), i + 1, i + len(sample))
    return next(one.gold for one in following if one.gold is not None and one.gold != sample[i].gold)


def _says(gold: str, answer: str) -> bool:
    plain = ["".join(text.split()).casefold() for text in (gold, answer)]
    return plain[0] == plain[1] or same_answer(gold, answer)
