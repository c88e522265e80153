"""A language model as a judge, behind any server with OpenAI's chat endpoint: a reward, and a referee of two models."""

from __future__ import annotations

import json
import os
import re
import statistics
import threading
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from posttrain.errors import DataError, RecipeError, RunFailure, UsageError
from posttrain.graders.grading import MeasuredReward
from posttrain.option_types import LARGEST_COUNT, LOOPBACK, key_for
from posttrain.recipes.document import parse_yaml, recipe_text
from posttrain.registry import find, register
from posttrain.sampling.http import (
    HttpServer,
    Interrupted,
    RequestRefused,
    ServerError,
    Unanswered,
    all_of,
)
from posttrain.sampling.judge_questions import RUBRIC, Question, ask_score, ask_winner
from posttrain.sampling.vllm.client import read_models
from posttrain.store.durable import storage_errors
from posttrain.store.reading import read_record
from posttrain.store.rollouts import prompt_text
from posttrain.types import Example
from posttrain.untrusted import describe_fault

CACHE = "judge.jsonl"
KEY_VARIABLE = "JUDGE_API_KEY"
SUFFIXES = (".yaml", ".yml")  # of a file that names a judge
_MAX_CACHE_BYTES = 1 << 30
# Options of rewards that do not choose the judge.
_HOW = ("rubric", "scale", "known_answer", "max_failures", "key", "both_orders")
# Tokenizers of chats take these for marks of turns, in contents too, so an answer could end its turn with them.
_TURN_MARKS = re.compile(
    r"<(?=[|｜][^<>\s]{1,40}[|｜]>|/?(?:s|bos|eos|start_of_turn|end_of_turn)>|</?SYS>>)|"
    r"\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT)\])"
)
Failure = Literal["timeout", "crash"]


@dataclass(frozen=True, slots=True)
class Opinion:
    """The value of an answer, or the ``failure`` with its reason.

    ``tokens_in``, ``tokens_out``: the cost of all attempts, 0 where it was known before.
    """

    value: float | None
    failure: Failure | None = None
    reason: str = ""
    tokens_in: int = 0
    tokens_out: int = 0


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


_Tokens = Annotated[int, Field(strict=True, ge=0, le=LARGEST_COUNT)]


class _Usage(BaseModel):
    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None


class _Answer(BaseModel):
    """The part of an answer of ``/v1/chat/completions`` that is read."""

    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Usage | None = None


@dataclass
class Judge:
    """A model behind a server; the options are those of the reward ``judge``. ``where`` is its key, for messages.

    Opinions are kept by question and judge, with a ``folder`` in its ``judge.jsonl``, so that a resumed run gets the
    same; failures are not kept. ``tokens_in`` and ``tokens_out`` count since it was made.

    Raises:
        UsageError: no URL, or a key that must not be sent there.
        DataError: the file is damaged.
    """

    url: str
    model: str | None = None
    structured: bool = True
    temperature: float | None = 0.0
    max_tokens: int = 1024
    concurrency: int = 8
    retries: int = 4
    timeout_seconds: float = 120.0
    where: str = "judge"
    folder: Path | None = None
    tokens_in: int = field(default=0, init=False)
    tokens_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        place = urlsplit(self.url)
        key = key_for(self.url, f"{self.where}.url", KEY_VARIABLE)
        if key and place.scheme != "https" and place.hostname not in LOOPBACK:
            raise UsageError(
                f"{self.where}.url: {self.url}: the key of {KEY_VARIABLE} would travel in clear text; use https"
            )
        self._server = HttpServer(
            self.url,
            timeout_seconds=self.timeout_seconds,
            retries=self.retries,
            concurrency=self.concurrency,
            token=key,
        )
        self._lock = threading.Lock()
        self._known: dict[str, float] = {}
        if self.folder is not None:
            self._known = dict(_read_cache(self.folder / CACHE))

    @property
    def name(self) -> str:
        """Address and model, as opinions are kept under them."""
        return f"{self.url} {self.model or ''}".strip()

    def find_model(self, retries: int | None = None) -> str:
        """Return the name of the model at the server.

        Raises:
            UsageError: no answer, a refused key, or several models and none named.
        """
        try:
            models = copy(self._server).call("GET", "/v1/models", read=read_models, retries=retries)
        except ServerError as error:
            if isinstance(error, RequestRefused) and error.status in (404, 405) and self.model:
                return self.model  # the server lists no models
            raise self._explain(error) from None
        if self.model is None and len(models) != 1:
            names = ", ".join(model.name for model in models) or "none"
            raise UsageError(f"{self.url}: {self.where}.model is needed; the server has: {names}")
        return self.model or models[0].name

    def _explain(self, error: ServerError) -> UsageError:
        text = f"this is no server of models: {error}"
        if isinstance(error, Unanswered):
            text = (
                f"no judge answers there ({error}). Start one, such as `posttrain serve MODEL_OR_RUN`, or "
                f"give the place of one with {self.where}.url"
            )
        elif isinstance(error, RequestRefused):
            text = f"the judge refuses to answer ({error})"
            if error.status in (401, 403):
                text += f"; put its key into the environment variable {KEY_VARIABLE}"
        return UsageError(f"{self.url}: {text}")

    def ask(self, questions: Sequence[Question]) -> list[Opinion]:
        """Return an opinion on each question, in order; the same question is asked once.

        Raises:
            UsageError: the judge cannot be asked at all.
            StorageError: the opinions cannot be kept.
        """
        names = [question.digest(self.name) for question in questions]
        fresh = {name: question for name, question in zip(names, questions, strict=True) if name not in self._known}
        judged: dict[str, Opinion] = {}
        if fresh:
            model = self.model or self.find_model()
            server = copy(self._server)  # each thread asks by its own client
            opinions = server.session(lambda: all_of(partial(self._ask, server, model), fresh.values()))
            judged = dict(zip(fresh, opinions, strict=True))
            self._keep({name: opinion.value for name, opinion in judged.items() if opinion.value is not None})
            self.tokens_in += sum(opinion.tokens_in for opinion in opinions)
            self.tokens_out += sum(opinion.tokens_out for opinion in opinions)
        results = []
        for name in names:
            results.append(judged.get(name) or Opinion(self._known[name]))
            if name in judged:  # the first that asks has the costs
                judged[name] = replace(judged[name], tokens_in=0, tokens_out=0)
        return results

    def _keep(self, known: dict[str, float]) -> None:
        with self._lock:
            self._known |= known
            if self.folder is None or not known:
                return
            path = self.folder / CACHE
            lines = ""
            for name, value in known.items():
                lines += json.dumps({"question": name, "value": value}) + "\n"
            self.folder.mkdir(exist_ok=True)
            with storage_errors("what the judge said", path), open(path, "ab+") as file:
                if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n":
                    lines = f"\n{lines}"  # torn by a kill, or another process is writing it
                file.write(lines.encode())

    async def _ask(self, server: HttpServer, model: str, question: Question) -> Opinion:
        spent = [0, 0]

        def read(content: object) -> float:
            try:
                answer = _Answer.model_validate(content)
            except ValidationError as error:
                raise Interrupted(f"an answer that cannot be read: {describe_fault(error)}") from None
            usage = answer.usage or _Usage()
            spent[0] += usage.prompt_tokens or 0
            spent[1] += usage.completion_tokens or 0
            text = answer.choices[0].message.content or ""
            return question.read(text.encode("utf-8", "replace").decode())  # half of a surrogate pair cannot be stored

        try:
            value = await server.ask("POST", "/v1/chat/completions", self.body(model, question), read=read)
        except Unanswered as error:
            failure: Failure = "crash"
            if "no answer within" in str(error):
                failure = "timeout"
            return Opinion(None, failure, str(error), *spent)
        except RequestRefused as error:
            if error.status in (401, 403, 404, 405):  # refusals of the client, not of the question
                raise self._explain(error) from None
            reason = str(error)
            if "response_format" in reason:
                reason += f" (set {self.where}.structured to false)"
            return Opinion(None, "crash", reason, *spent)
        return Opinion(value, None, "", *spent)

    def body(self, model: str, question: Question) -> dict[str, Any]:
        """Return the JSON of a request, in which a space breaks the marks of turns (``< |im_end|>``)."""
        text = _TURN_MARKS.sub(r"\g<0> ", question.text)
        turns = [{"role": "system", "content": question.system}, {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": model, "messages": turns, "max_tokens": self.max_tokens}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.structured:
            form = {"name": "judgement", "strict": True, "schema": dict(question.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


def _read_cache(path: Path) -> Iterator[tuple[str, float]]:
    """Yield the lines of the file; one that a kill has torn is skipped, and asked again."""
    try:
        lines = read_record(path, _MAX_CACHE_BYTES).split(b"\n")
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, start=1):
        try:
            if line.endswith(b"}"):
                read = json.loads(line)
                yield str(read["question"]), float(read["value"])
        except (ValueError, KeyError, TypeError, RecursionError):
            what = "is not what a judge said; move the file away, and it is asked again"
            raise DataError(path, what, number) from None


def check_failures(opinions: Sequence[Opinion], bound: float, judge: Judge) -> None:
    """Refuse to go on where more than a share ``bound`` of the opinions failed (a single one may, if others did not).

    Raises:
        RunFailure: with the reason of the last one.
    """
    failed = [opinion for opinion in opinions if opinion.value is None]
    if not failed:
        return
    if len(failed) == len(opinions) or len(failed) > max(1.0, bound * len(opinions)):
        raise RunFailure(
            f"judge {judge.name}: {len(failed)} of {len(opinions)} answers were not judged, and at most "
            f"{bound:.0%} may fail (max_failures). The last reason: {failed[-1].reason}. What it said until now is "
            "kept; see that it answers, then go on (a run: with --resume)"
        )


judge_for = cache(Judge)


def prepare_judge(*, where: str = "judge", folder: Path | None = None, **options: Any) -> Judge:
    """Return the judge of a reward's options, checked before anything is sampled.

    Raises:
        UsageError: it cannot be asked.
    """
    low, high = options.get("scale", (1, 10))
    if not low < high <= low + 100:
        raise RecipeError(f"{where}.scale: {[low, high]}: the lowest score, then the highest, at most 100 above it")
    if options.get("url") is None:
        raise RecipeError(
            f"{where}.url: say where a judge answers; a model of this machine is one behind `posttrain serve MODEL`"
        )
    chosen = {name: value for name, value in options.items() if name not in _HOW}
    judge = Judge(**chosen, where=where, folder=folder)
    judge.find_model(retries=0)
    return judge


@register("reward", batched=True, asks_a_model=True, prepare=prepare_judge)
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
    known_answer: bool = True,
    structured: bool = True,
    temperature: Annotated[float, Field(ge=0)] | None = 0.0,
    max_tokens: Annotated[int, Field(ge=1)] = 1024,
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8,
    retries: Annotated[int, Field(ge=0, le=20)] = 4,
    timeout_seconds: Annotated[float, Field(gt=0)] = 120.0,
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.1,
) -> list[MeasuredReward]:
    """Let a language model judge the answer by a rubric: ``r = (score − lowest) / (highest − lowest)``, from 0 to 1.

    An unjudged answer gets the mean of the others to its prompt; its outcome is ``timeout`` or ``crash`` where no gold
    answer decides that. ``judge_length``: the correlation of reward and length in the batch (docs/how-to/llm-judge.md).

    Args:
        url: the address of a server with OpenAI's chat endpoint.
        model: its name there; by default the only one that the server has.
        rubric: the standard of the judgement.
        scale: the lowest and the highest score.
        known_answer: show the judge the gold answer where there is one.
        structured: send the schema of the reply along; false for servers that refuse it.
        temperature: of the judge; null leaves it to the server.
        max_tokens: of the judge's reply.
        concurrency: questions under way at a time.
        retries: how often a question is asked again, with growing pauses.
        timeout_seconds: how long one attempt may take.
        max_failures: the share of a batch that may go unjudged; above it the run ends.

    Source: LLM-as-a-judge (Zheng et al. 2023); the wording is ours.

    Raises:
        UsageError: the judge cannot be asked. RunFailure: more of it failed than may.
    """
    limits = (temperature, max_tokens, concurrency, retries, timeout_seconds)
    judge = judge_for(url, model, structured, *limits, where, folder[0])
    questions = []
    for one, answer in zip(example, text, strict=True):
        gold = None
        if known_answer:
            gold = one.answer
        questions.append(ask_score(prompt_text(one), answer, rubric=rubric, scale=scale, gold=gold))
    judged = judge.ask(questions)
    check_failures(judged, max_failures, judge)
    return _measured(judged, [one.id for one in example], text)


def _measured(judged: Sequence[Opinion], ids: Sequence[str], texts: Sequence[str]) -> list[MeasuredReward]:
    of_prompt: dict[str, list[float]] = {}
    for name, opinion in zip(ids, judged, strict=True):
        known = of_prompt.setdefault(name, [])
        if opinion.value is not None:
            known.append(opinion.value)
    overall = statistics.fmean(value for known in of_prompt.values() for value in known)
    means = {}
    for name, known in of_prompt.items():
        means[name] = overall
        if known:
            means[name] = statistics.fmean(known)
    values = []
    for name, opinion in zip(ids, judged, strict=True):
        if opinion.value is None:
            values.append(means[name])
        else:
            values.append(opinion.value)
    lengths = [float(len(text)) for text in texts]
    correlation = 0.0
    if len(set(values)) > 1 and len(set(lengths)) > 1:
        correlation = statistics.correlation(values, lengths)
    measured = []
    for opinion, value in zip(judged, values, strict=True):
        info = {
            "judge_failed": float(opinion.value is None),
            "judge_tokens_in": float(opinion.tokens_in),
            "judge_tokens_out": float(opinion.tokens_out),
            "judge_length": correlation,
        }
        measured.append(MeasuredReward(value, info, opinion.failure))
    return measured


@dataclass(frozen=True)
class PairJudge:
    """A judge of two models, and the share of opinions that may fail."""

    judge: Judge
    rubric: str
    max_failures: float

    def meet(self, meetings: Sequence[tuple[str, str, str]]) -> tuple[list[float], dict[str, float]]:
        """Return the value of the first answer of each ``(prompt, first, second)``, and facts about the judge.

        Each pair is compared in both orders: 1 where the first answer is better in both, 0.5 where the orders disagree,
        tie or both failed, one order alone where the other failed. ``judge_failed``: the share without a judgement.
        ``judge_first``: the mean value of the answer that stood first, 0.5 without a bias. ``judge_consistent``: the
        share of pairs whose orders agree. ``judge_longer``: the mean value of the longer answer.

        Raises:
            UsageError: the judge cannot be asked.
            RunFailure: too many of its opinions failed.
        """
        questions = []
        for prompt, a, b in meetings:
            questions.append(ask_winner(prompt, a, b, rubric=self.rubric))
            questions.append(ask_winner(prompt, b, a, rubric=self.rubric))
        judged = self.judge.ask(questions)
        check_failures(judged, self.max_failures, self.judge)
        values: list[float] = []
        columns: dict[str, list[float]] = {
            "judge_first": [],
            "judge_consistent": [],
            "judge_longer": [],
            "judge_failed": [],
        }
        for (_, a, b), forth, back in zip(meetings, judged[::2], judged[1::2], strict=True):
            votes = []  # values of the first answer
            if forth.value is not None:
                votes.append(forth.value)
            if back.value is not None:
                votes.append(1.0 - back.value)
            columns["judge_failed"].append(float(not votes))
            if not votes:
                values.append(0.5)
                continue
            value = statistics.fmean(votes)
            values.append(value)
            if len(a) > len(b):
                columns["judge_longer"].append(value)
            elif len(a) < len(b):
                columns["judge_longer"].append(1.0 - value)
            if forth.value is not None and back.value is not None:
                columns["judge_first"].append((forth.value + back.value) / 2)
                columns["judge_consistent"].append(float(forth.value == 1.0 - back.value))
        info = {name: statistics.fmean(column) for name, column in columns.items() if column}
        info["judge_tokens_in"] = float(self.judge.tokens_in)
        info["judge_tokens_out"] = float(self.judge.tokens_out)
        return values, info


def read_pair_judge(path: str, folder: Path | None = None) -> PairJudge:
    """Return the judge of a file with the options of the reward ``judge``; its opinions are kept in ``folder``.

    Raises:
        UsageError: no such file or option, or a judge that cannot be asked.
    """
    place, text = recipe_text(path)
    where = f"{place}: judge"
    options = find("reward", "judge").options(parse_yaml(text, place)[0], where)
    judge = prepare_judge(**options, where=where, folder=folder)
    return PairJudge(judge, options["rubric"], options["max_failures"])
