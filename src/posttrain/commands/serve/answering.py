"""Answer generation for ``posttrain serve``: detokenization, complete or streamed, and the record file."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.commands.serve.requests import Sampled
from posttrain.commands.serve.turns import DecodingThread, End, Take, TurnsTask
from posttrain.data.render.encoding import TextStream
from posttrain.randomness import derive_key
from posttrain.sampling.base import Conversation, Sampling
from posttrain.sampling.models import OpenedModel
from posttrain.sampling.native.engine import NativeEngine
from posttrain.store.durable import cut_torn_line, storage_errors
from posttrain.types import Finish


@dataclass(frozen=True)
class AnswerJob:
    """A request for ``body.n`` answers per prompt (token ids), with the same randomness as
    ``posttrain generate --seed``.

    Answers do not depend on concurrent requests or on streaming. ``opening``: text opened by the template. ``lead``:
    hidden text preceding the stop token. ``call_tag``: prefix of tool calls if ``tools`` are offered.
    """

    id: str
    endpoint: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    seed: int
    body: Sampled
    opening: str = ""
    lead: str = ""
    call_tag: str = ""
    tools: Sequence[dict[str, Any]] = ()
    created: int = field(default_factory=lambda: int(time.time()))


class ServedAnswer:
    """An answer being generated. Complete and streamed answers have identical text.

    ``text`` starts with the job's opening and excludes the stop text. ``ids`` include the token that completed the
    stop text. ``finish`` is None during generation.
    """

    def __init__(self, tokenizer: object, job: AnswerJob, prompt: Sequence[int] = (), key: int = 0) -> None:
        self.job = job
        self.prompt = prompt
        self.key = key
        self.text = job.opening
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish | None = None
        self._decoded = TextStream(tokenizer, prompt, job.lead)
        self._held = ""  # possible prefix of a stop text or a call

    def push(self, token: int, logprob: float, *, is_last: bool) -> str:
        """Append a token, and return newly confirmed text, possibly empty."""
        assert self.finish is None, "nothing follows the end of an answer"
        self.ids.append(token)
        self.logprobs.append(logprob)
        stops = list(self.job.body.stop or ())
        tag = self.job.call_tag
        is_end = token in self.job.sampling.stop_ids
        held = self._held
        if is_end:
            held += self._decoded.end()
        else:
            held += self._decoded.push(token)
        if is_last:
            held += self._decoded.flush()
        places = [held.find(stop) for stop in stops if stop in held]
        if places or is_end or is_last:
            self.finish = "length"
            if places or is_end:
                self.finish = "stop"
            certain = min(places, default=len(held))
        else:  # calls are returned with the final token
            certain = len(held) - _length_begun(held, [*stops, tag])
            if tag and tag in held:
                certain = min(certain, held.find(tag))
        added = held[:certain]
        self._held = held[certain:]
        self.text += added
        return added


class Answerer:
    """Generates answers with a single model."""

    def __init__(self, opened: OpenedModel) -> None:
        assert isinstance(opened.engine, NativeEngine), "this server samples in its own process"
        self.opened = opened
        self.context = opened.context_tokens
        self.turns = DecodingThread(opened.engine)

    def close(self) -> None:
        """End all work."""
        self.turns.close()

    def begin(self, job: AnswerJob) -> list[ServedAnswer]:
        """Create empty answers for a job, ordered by prompt."""
        keys = [derive_key(job.seed, "generate", i) for i in range(job.body.n)]
        return [ServedAnswer(self.opened.tokenizer, job, prompt, key) for prompt in job.prompts for key in keys]

    async def complete(self, answers: Sequence[ServedAnswer]) -> None:
        """Generate all answers for a job. Cancelling this coroutine stops sampling.

        Raises:
            PosttrainError: raised by the engine.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def take(number: int, tokens: Sequence[tuple[int, float]], is_last: bool) -> bool:
            push_all(answers[number], tokens, is_last)
            return answers[number].finish is not None

        def finish(error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(_settle, done, error)

        task = self._task(answers, take, finish)
        self.turns.submit(task)
        try:
            await done
        finally:
            self.turns.cancel(task)

    async def stream(self, answer: ServedAnswer) -> AsyncGenerator[str, None]:
        """Generate an answer, yielding text for each token.

        Raises:
            PosttrainError: raised by the engine.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[tuple[int, float, bool] | BaseException] = asyncio.Queue()

        def put(item: tuple[int, float, bool] | BaseException) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(news.put_nowait, item)

        def take(number: int, tokens: Sequence[tuple[int, float]], is_last: bool) -> bool:
            for place, (token, logprob) in enumerate(tokens, start=1):
                put((token, logprob, is_last and place == len(tokens)))
            return False

        def finish(error: BaseException | None) -> None:
            if error is not None:
                put(error)

        task = self._task([answer], take, finish)
        self.turns.submit(task)
        try:
            while answer.finish is None:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                token, logprob, is_last = item
                yield answer.push(token, logprob, is_last=is_last)
        finally:
            self.turns.cancel(task)

    def _task(self, answers: Sequence[ServedAnswer], take: Take, finish: End) -> TurnsTask:
        """Build a decoding task for answers to the same job."""
        sampling = answers[0].job.sampling
        context = sampling.within(self.context)
        numbers: dict[tuple[int, ...], int] = {}
        rows = []
        for sample, answer in enumerate(answers):
            prompt = tuple(answer.prompt)
            number = numbers.setdefault(prompt, len(numbers))
            limit = min(sampling.max_tokens, context - len(prompt))
            rows.append(Conversation(number, sample, answer.key, limit))
        return TurnsTask(list(numbers), rows, sampling, take, finish)


def _length_begun(held: str, texts: Sequence[str]) -> int:
    """Measure the longest suffix of ``held`` that is a proper prefix of any given text."""
    longest = 0
    for text in texts:
        for length in range(1, min(len(text), len(held) + 1)):
            if length > longest and held.endswith(text[:length]):
                longest = length
    return longest


def push_all(answer: ServedAnswer, tokens: Sequence[tuple[int, float]], is_last: bool) -> None:
    """Append tokens until the answer finishes, possibly early because of a stop text."""
    for place, (token, logprob) in enumerate(tokens, start=1):
        if answer.finish is None:
            answer.push(token, logprob, is_last=is_last and place == len(tokens))


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class Recorder:
    """A JSONL file with a line per answer (``--record``), each written atomically.

    Raises:
        UsageError, StorageError: the file is not writable.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self.model = model
        with storage_errors("records", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            cut_torn_line(self._descriptor)

    def add(self, index: int, answer: ServedAnswer) -> None:
        """Record an answer; aborted answers have ``finish`` null."""
        job = answer.job
        sampling = answer.job.sampling
        line = {
            "id": job.id,
            "time": round(time.time(), 3),
            "endpoint": job.endpoint,
            "model": self.model,
            "index": index,
            "prompt_ids": answer.prompt,
            "ids": answer.ids,
            "logprobs": answer.logprobs,
            "text": answer.text,
            "finish": answer.finish,
            "seed": job.seed,
            "sampling": {key: getattr(sampling, key) for key in ("max_tokens", "temperature", "top_k", "top_p")},
        }
        content = (json.dumps(line) + "\n").encode()
        with storage_errors("records", self.path):
            try:
                while content:
                    content = content[os.write(self._descriptor, content) :]
            except OSError:
                cut_torn_line(self._descriptor)
                raise

    def close(self) -> None:
        """Close the file, after the last answer."""
        os.close(self._descriptor)
