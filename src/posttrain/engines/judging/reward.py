"""The reward that a judge gives: a language model reads the answer, by a rubric or beside another one."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from posttrain.engines.judging.asking import (
    KEY_VARIABLE,
    RUBRIC,
    Judge,
    Opinion,
    Question,
    compare,
    rate,
)
from posttrain.errors import DataError, RecipeError, RunFailure
from posttrain.graders.grading import Measured
from posttrain.recipes.document import parse_yaml, recipe_text
from posttrain.registry import find, register
from posttrain.store import posix
from posttrain.store.durable import storage_errors
from posttrain.store.reading import open_record
from posttrain.store.rollouts import prompt_text
from posttrain.types import Example

# Opinions that are asked for once: a cache by content, what may fail, and what judges are known to be drawn by.

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
                if file.tell() and posix.read_at(file.fileno(), 1, file.tell() - 1) != b"\n":
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
            "kept; see that it answers, then go on (a run: with --resume)"
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


Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=256)]


def build_judge(url: str | None, where: str = "judge", **options: Any) -> Judge:
    """The judge at ``url``; ``where``: its key, in messages.

    Raises:
        RecipeError: none is named.
        UsageError: the URL or the name of the key's variable is none.
    """
    if url is None:
        raise RecipeError(
            f"{where}.url: say where a judge answers; a model of this machine is one behind `posttrain serve MODEL`"
        )
    return Judge(url, where=where, **options)


@cache
def _opinions(folder: Path | None, **who: Any) -> Opinions:
    return Opinions(build_judge(**who), folder)


def prepare(*, where: str = "judge", scale: tuple[int, int] = (1, 10), **options: Any) -> None:
    """Find out whether the judge can be asked before anything is sampled.

    Raises:
        UsageError: it cannot.
    """
    if not scale[0] < scale[1] <= scale[0] + 100:
        raise RecipeError(f"{where}.scale: {list(scale)}: the lowest score, then the highest, at most 100 above it")
    build_judge(where=where, **{name: value for name, value in options.items() if name not in _HOW}).check()


@register("reward", batched=True, asks_a_model=True, prepare=prepare)
def judge(
    example: Sequence[Example],
    text: Sequence[str],
    folder: Sequence[Path | None],
    where: str = "judge",
    *,
    url: str | None = None,
    model: str | None = None,
    rubric: str = RUBRIC,
    scale: tuple[int, int] = (1, 10),
    pairwise: bool = False,
    known_answer: bool = True,
    structured: bool = True,
    temperature: Annotated[float, Field(ge=0)] | None = 0.0,
    max_tokens: Annotated[int, Field(ge=1)] = 1024,
    key_variable: str = KEY_VARIABLE,
    concurrency: Count = 8,
    retries: Annotated[int, Field(ge=0, le=20)] = 4,
    timeout_seconds: Annotated[float, Field(gt=0)] = 120.0,
    max_failures: Share = 0.1,
) -> list[Measured]:
    """Let a language model judge the answer, from 0 to 1.

    By a rubric ``r = (score − lowest) / (highest − lowest)``. With ``pairwise`` the answers to a prompt stand in a
    ring, each is compared with its two neighbours in both orders, and ``r`` is its mean worth there (1 better, ½ tie).
    An unjudged answer gets the mean of the others to its prompt; its outcome is ``timeout`` or ``crash`` where no gold
    answer decides that. ``judge_length``: the correlation of reward and length in the batch; docs/judges.md says more.

    Args:
        url: where a server answers that knows OpenAI's chat endpoint.
        model: its name there; the only one that the server has, if none is given.
        rubric: by what is judged.
        scale: the lowest and the highest score of a rubric.
        known_answer: show the judge the gold answer where there is one (not with ``pairwise``).
        structured: send the schema of the reply along; false for servers that refuse it.
        temperature: of the judge; null leaves it to the server.
        max_tokens: of the judge's reply.
        key_variable: the environment variable with the server's key; its name ends with _API_KEY.
        concurrency: questions under way at a time.
        retries: how often a question is asked again, with growing pauses.
        timeout_seconds: how long one attempt may take.
        max_failures: the share of a batch that may go unjudged; above it the run ends.

    Source: LLM-as-a-judge (Zheng et al. 2023), both orders of a pair as in section 4; the wording is ours.

    Raises:
        UsageError: the judge cannot be asked. RunFailure: more of it failed than may.
    """
    asking: dict[str, Any] = {"url": url, "where": where, "model": model, "structured": structured}
    asking |= {"temperature": temperature, "max_tokens": max_tokens, "key_variable": key_variable}
    asking |= {"concurrency": concurrency, "retries": retries, "timeout_seconds": timeout_seconds}
    opinions = _opinions(folder[0], **asking)
    groups = _groups(example)
    if pairwise:
        told = _compared(opinions, groups, example, text, rubric, where)
    else:
        golds = [one.answer if known_answer else None for one in example]
        told = _rated(opinions, example, text, golds, rubric=rubric, scale=scale)
    check_failures(told, max_failures, opinions.judge)
    return _measured(told, groups, text)


def _groups(examples: Sequence[Example]) -> list[range]:
    """The places of the answers to each prompt, which stand side by side."""
    starts = [i for i, one in enumerate(examples) if i == 0 or one.id != examples[i - 1].id]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(examples)], strict=True)]


def _rated(
    opinions: Opinions, examples: Sequence[Example], texts: Sequence[str], golds: Sequence[str | None], **how: Any
) -> list[Opinion]:
    asked = zip(examples, texts, golds, strict=True)
    return opinions.ask([rate(prompt_text(example), text, gold=gold, **how) for example, text, gold in asked])


def _compared(
    opinions: Opinions,
    groups: Sequence[range],
    examples: Sequence[Example],
    texts: Sequence[str],
    rubric: str,
    where: str,
) -> list[Opinion]:
    """Each answer beside its neighbours in the ring of its group, as one opinion."""
    if any(len(group) < 2 for group in groups):
        raise RecipeError(
            f"{where}.pairwise: compares the answers to a prompt, and here is one; give rollout.group 2 or more"
        )
    rings = [(i, group[(k + 1) % len(group)]) for group in groups for k, i in enumerate(group)]
    rings = [pair for pair in rings if pair[0] < pair[1] or pair[::-1] not in rings]  # two answers meet once
    pairs = [(prompt_text(examples[i]), texts[i], texts[j]) for i, j in rings]
    of_answer: list[list[Opinion]] = [[] for _ in texts]
    for (i, j), one in zip(rings, match(opinions, pairs, rubric), strict=True):
        failed = next((order for order in one.orders if order.failure), Opinion(None))
        cost_in, cost_out = (sum(getattr(order, name) for order in one.orders) for name in ("tokens_in", "tokens_out"))
        cached = all(order.is_cached for order in one.orders)
        for place, value, paid in ((i, one.value, 1), (j, None if one.value is None else 1.0 - one.value, 0)):
            failure = failed.failure if value is None else None
            of_answer[place].append(Opinion(value, failure, failed.reason, paid * cost_in, paid * cost_out, cached))
    return [_mean(several) for several in of_answer]


def _mean(several: Sequence[Opinion]) -> Opinion:
    values = [one.value for one in several if one.value is not None]
    costs = sum(one.tokens_in for one in several), sum(one.tokens_out for one in several)
    if not values:
        return Opinion(None, several[0].failure, several[0].reason, *costs)
    return Opinion(statistics.fmean(values), None, "", *costs, all(one.is_cached for one in several))


def _measured(told: Sequence[Opinion], groups: Sequence[range], texts: Sequence[str]) -> list[Measured]:
    known = [one.value for one in told if one.value is not None]
    values = [0.0] * len(told)
    for group in groups:
        own = [value for i in group if (value := told[i].value) is not None]
        middle = statistics.fmean(own or known)
        for i in group:
            value = told[i].value
            values[i] = middle if value is None else value
    lengths = [float(len(text)) for text in texts]
    varies = len(set(values)) > 1 and len(set(lengths)) > 1
    drawn_by_length = statistics.correlation(values, lengths) if varies else 0.0
    return [
        Measured(
            value,
            {
                "judge_failed": float(one.value is None),
                "judge_tokens_in": float(one.tokens_in),
                "judge_tokens_out": float(one.tokens_out),
                "judge_cached": float(one.is_cached),
                "judge_length": drawn_by_length,
            },
            one.failure,
        )
        for one, value in zip(told, values, strict=True)
    ]


# A judge between two models: it compares their answers, and says what else it was drawn by.

SUFFIXES = (".yaml", ".yml")
# Keys of the reward that say how answers are judged; the others say who judges.
_HOW = ("rubric", "scale", "pairwise", "known_answer", "max_failures")


@dataclass(frozen=True)
class PairJudge:
    """A judge, by what it compares, and the share of opinions that may fail."""

    opinions: Opinions
    rubric: str
    max_failures: float

    def meet(self, meetings: Sequence[tuple[str, str, str]]) -> tuple[list[float], dict[str, float]]:
        """Of each ``(prompt, first, second)`` what the first is worth beside the second, and facts about the judge.

        A meeting that was not judged in either order decides nothing (one half). ``judge_failed``: the share of these.

        Raises:
            UsageError: the judge cannot be asked.
            RunFailure: too many of its opinions failed.
        """
        matches = match(self.opinions, meetings, self.rubric)
        check_failures([order for one in matches for order in one.orders], self.max_failures, self.opinions.judge)
        facts = describe_bias(meetings, matches)
        facts["judge_failed"] = statistics.fmean(float(one.value is None) for one in matches)
        facts["judge_tokens_in"] = float(self.opinions.tokens_in)
        facts["judge_tokens_out"] = float(self.opinions.tokens_out)
        return [0.5 if one.value is None else one.value for one in matches], facts


def read_pair_judge(path: str, folder: Path | None = None) -> PairJudge:
    """The judge of a file with the keys of the reward ``judge``; what it says is kept in ``folder``.

    Raises:
        UsageError: no file, a key or value that is none, or a judge that cannot be asked.
    """
    place, text = recipe_text(path)
    where = f"{place}: judge"
    asked = find("reward", "judge").options(parse_yaml(text, place)[0], where)
    who = {name: value for name, value in asked.items() if name not in _HOW}
    judge = build_judge(**who, where=where)
    judge.check()
    return PairJudge(Opinions(judge, folder), asked["rubric"], asked["max_failures"])
