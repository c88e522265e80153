"""LLM judge behind an OpenAI chat endpoint, used as reward and to compare two models."""

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
SUFFIXES = (".yaml", ".yml")  # judge configuration files
_MAX_CACHE_BYTES = 1 << 30
# Reward options that do not affect the judge itself.
_HOW = ("rubric", "scale", "known_answer", "max_failures", "key", "both_orders")
# Turn markers that chat tokenizers recognize even in message content; with them, answers could end their turn.
_TURN_MARKS = re.compile(
    r"<(?=[|｜][^<>\s]{1,40}[|｜]>|/?(?:s|bos|eos|start_of_turn|end_of_turn)>|</?SYS>>)|"
    r"\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT)\])"
)
Failure = Literal["timeout", "crash"]
# Options of rewards that ask a judge.
Temperature = Annotated[float, Field(ge=0)] | None
ReplyTokens = Annotated[int, Field(ge=1)]
Concurrency = Annotated[int, Field(ge=1, le=256)]
Retries = Annotated[int, Field(ge=0, le=20)]
TimeoutSeconds = Annotated[float, Field(gt=0)]
FailureShare = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Opinion:
    """A judged value, or a ``failure`` with its reason.

    ``tokens_in``, ``tokens_out``: cost over all attempts, 0 if cached.
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
    """Fields read from a ``/v1/chat/completions`` response."""

    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Usage | None = None


@dataclass
class Judge:
    """A model behind a server, with the options of reward ``judge``. ``where``: configuration key for messages.

    Opinions are cached by question and judge. With a ``folder``, they are stored in ``judge.jsonl``, so that resumed
    runs get identical values. Failures are not cached. ``tokens_in`` and ``tokens_out`` count usage by this object.

    Raises:
        UsageError: missing URL, or an API key that would be sent insecurely.
        DataError: damaged cache file.
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
                f"{self.where}.url: {self.url}: the key of {KEY_VARIABLE} would be sent unencrypted; use https"
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
        """URL and model, used as cache key."""
        return f"{self.url} {self.model or ''}".strip()

    def find_model(self, retries: int | None = None) -> str:
        """Look up the served model name.

        Raises:
            UsageError: no response, a refused key, or several models without a choice.
        """
        try:
            models = copy(self._server).call("GET", "/v1/models", read=read_models, retries=retries)
        except ServerError as error:
            if isinstance(error, RequestRefused) and error.status in (404, 405) and self.model:
                return self.model  # server without a model list
            raise self._explain(error) from None
        if self.model is None and len(models) != 1:
            names = ", ".join(model.name for model in models) or "none"
            raise UsageError(f"{self.url}: {self.where}.model is required; available: {names}")
        return self.model or models[0].name

    def _explain(self, error: ServerError) -> UsageError:
        text = f"not a model server: {error}"
        if isinstance(error, Unanswered):
            text = (
                f"no judge responds ({error}). Start one, for example `posttrain serve MODEL_OR_RUN`, or "
                f"set {self.where}.url"
            )
        elif isinstance(error, RequestRefused):
            text = f"the judge refuses to answer ({error})"
            if error.status in (401, 403):
                text += f"; set {KEY_VARIABLE} to its API key"
        return UsageError(f"{self.url}: {text}")

    def ask(self, questions: Sequence[Question]) -> list[Opinion]:
        """Collect one opinion per question, in order. Identical questions are sent once.

        Raises:
            UsageError: judge unavailable.
            StorageError: opinions cannot be stored.
        """
        names = [question.digest(self.name) for question in questions]
        fresh = {name: question for name, question in zip(names, questions, strict=True) if name not in self._known}
        judged: dict[str, Opinion] = {}
        if fresh:
            model = self.model or self.find_model()
            server = copy(self._server)  # one client per thread
            opinions = server.session(lambda: all_of(partial(self._ask, server, model), fresh.values()))
            judged = dict(zip(fresh, opinions, strict=True))
            self._keep({name: opinion.value for name, opinion in judged.items() if opinion.value is not None})
            self.tokens_in += sum(opinion.tokens_in for opinion in opinions)
            self.tokens_out += sum(opinion.tokens_out for opinion in opinions)
        results = []
        for name in names:
            results.append(judged.get(name) or Opinion(self._known[name]))
            if name in judged:  # costs count only for the first occurrence
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
                    lines = f"\n{lines}"  # torn by a kill, or another process is writing
                file.write(lines.encode())

    async def _ask(self, server: HttpServer, model: str, question: Question) -> Opinion:
        spent = [0, 0]

        def read(content: object) -> float:
            try:
                answer = _Answer.model_validate(content)
            except ValidationError as error:
                raise Interrupted(f"unreadable response: {describe_fault(error)}") from None
            usage = answer.usage or _Usage()
            spent[0] += usage.prompt_tokens or 0
            spent[1] += usage.completion_tokens or 0
            text = answer.choices[0].message.content or ""
            return question.read(text.encode("utf-8", "replace").decode())  # lone surrogates cannot be stored

        try:
            value = await server.ask("POST", "/v1/chat/completions", self.body(model, question), read=read)
        except Unanswered as error:
            failure: Failure = "crash"
            if "no answer within" in str(error):
                failure = "timeout"
            return Opinion(None, failure, str(error), *spent)
        except RequestRefused as error:
            if error.status in (401, 403, 404, 405):  # applies to all requests, not only this question
                raise self._explain(error) from None
            reason = str(error)
            if "response_format" in reason:
                reason += f" (set {self.where}.structured to false)"
            return Opinion(None, "crash", reason, *spent)
        return Opinion(value, None, "", *spent)

    def body(self, model: str, question: Question) -> dict[str, Any]:
        """Build the request JSON, breaking turn markers with a space (``< |im_end|>``)."""
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
    """Read cached opinions, skipping lines torn by a kill so that they are judged again."""
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
            what = "not a judge's opinion; move the file away to judge again"
            raise DataError(path, what, number) from None


def check_failures(opinions: Sequence[Opinion], bound: float, judge: Judge) -> None:
    """Stop if more than a fraction ``bound`` of opinions failed. A single failure is tolerated if others succeeded.

    Raises:
        RunFailure: includes the last failure's reason.
    """
    failed = [opinion for opinion in opinions if opinion.value is None]
    if not failed:
        return
    if len(failed) == len(opinions) or len(failed) > max(1.0, bound * len(opinions)):
        raise RunFailure(
            f"judge {judge.name}: {len(failed)} of {len(opinions)} requests were not judged, but at most "
            f"{bound:.0%} may fail (max_failures). Last reason: {failed[-1].reason}. Earlier opinions are "
            "kept; repair the judge, then continue (training: with --resume)"
        )


judge_for = cache(Judge)


def prepare_judge(*, where: str = "judge", folder: Path | None = None, **options: Any) -> Judge:
    """Build and check a judge from reward options before sampling starts.

    Raises:
        RecipeError: invalid scale or missing URL.
        UsageError: judge unavailable.
    """
    low, high = options.get("scale", (1, 10))
    if not low < high <= low + 100:
        raise RecipeError(f"{where}.scale: {[low, high]}: give lowest and highest score, at most 100 apart")
    if options.get("url") is None:
        raise RecipeError(
            f"{where}.url: missing. Give a judge's URL; `posttrain serve MODEL` starts one on this machine"
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
    temperature: Temperature = 0.0,
    max_tokens: ReplyTokens = 1024,
    concurrency: Concurrency = 8,
    retries: Retries = 4,
    timeout_seconds: TimeoutSeconds = 120.0,
    max_failures: FailureShare = 0.1,
) -> list[MeasuredReward]:
    """Score from an LLM judge following a rubric: ``r = (score − lowest) / (highest − lowest)``, from 0 to 1.

    Unjudged answers get the prompt's average; without a gold answer their outcome is ``timeout`` or ``crash``.
    ``judge_length``: correlation between reward and length within a batch (docs/how-to/llm-judge.md).

    Args:
        url: server URL with an OpenAI chat endpoint.
        model: served model name; may be omitted if only one is served.
        rubric: scoring criterion.
        scale: lowest and highest score.
        known_answer: show gold answers to the judge if available.
        structured: request replies with a JSON schema; set false for servers without support.
        temperature: judge temperature; null uses the server default.
        max_tokens: maximum tokens per judge reply.
        concurrency: maximum concurrent requests.
        retries: retries per request, with increasing delays.
        timeout_seconds: timeout per attempt.
        max_failures: fraction of unjudged answers tolerated per batch; training stops above it.

    Source: LLM-as-a-judge (Zheng et al. 2023); the wording is ours.

    Raises:
        UsageError: judge unavailable. RunFailure: too many requests failed.
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
    """Judge for comparing two models, with its tolerated failure fraction."""

    judge: Judge
    rubric: str
    max_failures: float

    def meet(self, meetings: Sequence[tuple[str, str, str]]) -> tuple[list[float], dict[str, float]]:
        """Compare pairs ``(prompt, first, second)``. Returns values for first answers, and judge statistics.

        Each pair is compared in both orders: 1 if the first answer wins both, 0.5 if the orders disagree, tie or both
        fail. If one order fails, only the other counts. ``judge_failed``: fraction without any judgment.
        ``judge_first``: mean value of answers shown first; 0.5 means no position bias. ``judge_consistent``: fraction
        of pairs with agreeing orders. ``judge_longer``: mean value of longer answers.

        Raises:
            UsageError: judge unavailable.
            RunFailure: too many requests failed.
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
            votes = []  # values for the first answer
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
    """Load a judge from a file with the options of reward ``judge``, caching opinions in ``folder``.

    Raises:
        UsageError: missing file, unknown option, or judge unavailable.
    """
    place, text = recipe_text(path)
    where = f"{place}: judge"
    options = find("reward", "judge").options(parse_yaml(text, place)[0], where)
    judge = prepare_judge(**options, where=where, folder=folder)
    return PairJudge(judge, options["rubric"], options["max_failures"])
