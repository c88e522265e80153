"""Opinions that are asked for once: a cache by content, what may fail, and what judges are known to be drawn by."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.engines.judging.asking import Judge, Opinion, Question, compare
from posttrain.errors import DataError, RunFailure
from posttrain.store.durable import storage_errors
from posttrain.store.reading import open_record

CACHE = "judge.jsonl"
_MAX_BYTES = 1 << 30


class Opinions:
    """Asks a judge, and remembers what it said under the content of the question and the judge's name.

    With a ``folder`` it is kept in ``judge.jsonl`` there, so that a resumed run hears the same again. What failed is
    not kept. ``num_asked``, ``num_failed``, ``tokens_in`` and ``tokens_out`` count since it was made.

    Raises:
        DataError: the file is damaged.
    """

    def __init__(self, judge: Judge, folder: Path | None = None) -> None:
        self.judge, self.path = judge, None if folder is None else folder / CACHE
        self.num_asked = self.num_failed = self.tokens_in = self.tokens_out = 0
        self._lock = threading.Lock()
        self._known = {} if self.path is None else dict(_read(self.path))

    def ask(self, questions: Sequence[Question]) -> list[Opinion]:
        """An opinion on each question, in order; the same question is asked once.

        Raises:
            UsageError: the judge cannot be asked at all.
            StorageError: what it said cannot be kept.
        """
        names = [question.digest(self.judge.name) for question in questions]
        open_ones: dict[str, int] = {}
        for i, name in enumerate(names):
            if name not in self._known:
                open_ones.setdefault(name, i)
        fresh = (
            dict(zip(open_ones, self.judge.judge([questions[i] for i in open_ones.values()]), strict=True))
            if open_ones
            else {}
        )
        self.num_asked += len(fresh)
        self.num_failed += sum(opinion.value is None for opinion in fresh.values())
        self.tokens_in += sum(opinion.tokens_in for opinion in fresh.values())
        self.tokens_out += sum(opinion.tokens_out for opinion in fresh.values())
        known = {name: opinion.value for name, opinion in fresh.items() if opinion.value is not None}
        self._keep(known)
        told: list[Opinion] = []
        for i, name in enumerate(names):
            if open_ones.get(name) == i:
                told.append(fresh[name])  # whoever asked it pays for it
            elif name in fresh:
                told.append(replace(fresh[name], tokens_in=0, tokens_out=0, is_cached=fresh[name].value is not None))
            else:
                told.append(Opinion(self._known[name], is_cached=True))
        return told

    def _keep(self, known: dict[str, float]) -> None:
        with self._lock:
            self._known |= known
            if self.path is None or not known:
                return
            lines = "".join(json.dumps({"question": name, "value": value}) + "\n" for name, value in known.items())
            self.path.parent.mkdir(exist_ok=True)  # of a process beside the trainer's
            with storage_errors("what the judge said", self.path), open(self.path, "ab+") as file:
                if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    lines = f"\n{lines}"  # a kill has torn the last line
                file.write(lines.encode())


def _read(path: Path) -> Iterator[tuple[str, float]]:
    """Every line of the file; one that a kill has torn is none, wherever it stands: it is asked again."""
    try:
        with open_record(path, _MAX_BYTES) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, start=1):
        try:
            read = json.loads(line) if line.endswith(b"}") else None
            if read is not None:
                yield str(read["question"]), float(read["value"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(
                path, "is not what a judge said; move the file away, and it is asked again", number
            ) from None


def check_failures(opinions: Sequence[Opinion], bound: float, judge: Judge) -> None:
    """Refuse to go on where more than a share ``bound`` of the opinions failed (one alone may, if others did not).

    Raises:
        RunFailure: with the reason of the last one.
    """
    failed = [opinion for opinion in opinions if opinion.value is None]
    if failed and (len(failed) == len(opinions) or len(failed) > max(1.0, bound * len(opinions))):
        raise RunFailure(
            f"judge {judge.name}: {len(failed)} of {len(opinions)} answers were not judged, and at most "
            f"{bound:.0%} may fail (max_failures). The last reason: {failed[-1].reason}. What it said until now is "
            "kept; see that it answers, then go on with --resume"
        )


@dataclass(frozen=True, slots=True)
class Match:
    """Two answers to one prompt, judged in both orders.

    ``value``: 1 where the first answer is better, 0 where the second is, between where the orders disagree or tie; None
    if neither order was judged. ``orders``: what each order said of the first answer.
    """

    value: float | None
    orders: tuple[Opinion, Opinion]


def match(opinions: Opinions, pairs: Sequence[tuple[str, str, str]], rubric: str) -> list[Match]:
    """Which of two answers is better, of many ``(prompt, first, second)``, each asked in both orders.

    Where one order failed the other counts alone.
    """
    questions = [
        compare(prompt, *order, rubric=rubric)
        for prompt, first, second in pairs
        for order in ((first, second), (second, first))
    ]
    told = opinions.ask(questions)
    matches = []
    for forwards, backwards in zip(told[::2], told[1::2], strict=True):
        turned = replace(backwards, value=None if backwards.value is None else 1.0 - backwards.value)
        values = [one.value for one in (forwards, turned) if one.value is not None]
        matches.append(Match(sum(values) / len(values) if values else None, (forwards, turned)))
    return matches


def describe_bias(pairs: Sequence[tuple[str, str, str]], matches: Sequence[Match]) -> dict[str, float]:
    """What a judge is drawn by beside the answers.

    ``judge_first``: the mean worth of the answer that stood first, over matches whose both orders were judged; 0.5
    without a bias. ``judge_consistent``: the share of these in which both orders said the same. ``judge_longer``: how
    often the longer of two answers of different lengths won (a tie counts one half).
    """
    both = [m for m in matches if all(order.value is not None for order in m.orders)]
    first = [(m.orders[0].value or 0.0) + 1.0 - (m.orders[1].value or 0.0) for m in both]
    same = [float(m.orders[0].value == m.orders[1].value) for m in both]
    longer = [
        m.value if len(a) > len(b) else 1.0 - m.value
        for (_, a, b), m in zip(pairs, matches, strict=True)
        if m.value is not None and len(a) != len(b)
    ]
    facts = {}
    for name, values in (("judge_first", [v / 2 for v in first]), ("judge_consistent", same), ("judge_longer", longer)):
        if values:
            facts[name] = sum(values) / len(values)
    return facts
