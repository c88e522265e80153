"""Sampling for ``posttrain serve``: waiting requests are sampled together, streams take turns token by token.

The model is used by one thread. A batch of whole answers is one piece of work for it, each token of a stream another.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.commands.serve.requests import Sampled
from posttrain.data.render.encoding import TextStream
from posttrain.randomness import derive_key
from posttrain.sampling.base import Sampling
from posttrain.sampling.models import OpenedModel
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.native.stream import stream
from posttrain.store.durable import cut_torn_line, storage_errors
from posttrain.types import Finish

GATHER_SECONDS = 0.005  # requests that come within it of the first are sampled with it


@dataclass(frozen=True)
class Job:
    """A request: ``body.n`` answers to each prompt (token ids), drawn as by ``posttrain generate --seed``.

    An answer depends neither on other requests nor on whether it is streamed. ``opening``: the template's beginning of
    the text. ``lead``: the text before the token at which it stops, which is not shown. ``call_tag``: the beginning of
    a call, where ``tools`` are offered.
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


class Answer:
    """The tokens of one answer up to its end, and its text; whole or as they come, the text is the same.

    ``text`` begins with the job's opening and ends before a stop text, ``ids`` with the token that completed it.
    ``finish`` is None while the answer goes on.
    """

    def __init__(self, tokenizer: object, job: Job, prompt: Sequence[int] = (), key: int = 0) -> None:
        self.job, self.prompt, self.key = job, prompt, key
        self.text = job.opening
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish | None = None
        self._decoded = TextStream(tokenizer, prompt, job.lead)
        self._held = ""  # may be the beginning of a stop text, or a call

    def push(self, token: int, logprob: float, *, is_last: bool) -> str:
        """Add a token; return the text that is certain with it, maybe none."""
        assert self.finish is None, "nothing follows the end of an answer"
        self.ids.append(token)
        self.logprobs.append(logprob)
        stops, tag = self.job.body.stop or (), self.job.call_tag
        is_end = token in self.job.sampling.stop_ids
        held = self._held + (self._decoded.end() if is_end else self._decoded.push(token))
        held += self._decoded.flush() if is_last else ""
        places = [held.find(stop) for stop in stops if stop in held]
        if places or is_end or is_last:
            self.finish = "stop" if places or is_end else "length"
            certain = min(places, default=len(held))
        else:  # a call is returned with the last token
            begun = (
                n for text in (*stops, tag) for n in range(1, min(len(text), len(held) + 1)) if held.endswith(text[:n])
            )
            certain = len(held) - max(begun, default=0)
            certain = min(certain, held.find(tag)) if tag and tag in held else certain
        added, self._held = held[:certain], held[certain:]
        self.text += added
        return added


class Answerer:
    """Answers jobs with one model."""

    def __init__(self, opened: OpenedModel) -> None:
        self.opened, self.context = opened, opened.context_tokens
        self._thread = ThreadPoolExecutor(1, "engine")
        self._waiting: list[tuple[Sequence[Answer], asyncio.Future[None]]] = []
        self._work: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Take no more work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, job: Job) -> list[Answer]:
        """Return the answers of a job without their tokens: those to the first prompt, then those to the next."""
        keys = [derive_key(job.seed, "generate", i) for i in range(job.body.n)]
        return [Answer(self.opened.tokenizer, job, prompt, key) for prompt in job.prompts for key in keys]

    async def complete(self, answers: Sequence[Answer]) -> None:
        """Draw the answers of one job whole. Cancelling this ends their sampling.

        Raises:
            PosttrainError: what the engine raises.
        """
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((answers, done))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._work_off())
        await done

    async def _work_off(self) -> None:
        """Sample what waits, jobs of equal options together, until nothing does."""
        await asyncio.sleep(GATHER_SECONDS)
        while self._waiting:
            sampling = self._waiting[0][0][0].job.sampling
            equal = [one for one in self._waiting if one[0][0].job.sampling == sampling]
            self._waiting = [one for one in self._waiting if one not in equal]
            rows = [(answer, done) for answers, done in equal if not done.done() for answer in answers]
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._sample, rows, sampling)
            await asyncio.wait([work])
            for done in (done for _, done in equal if not done.done()):
                if (error := work.exception()) is not None:
                    done.set_exception(error)
                else:
                    done.set_result(None)

    def _sample(self, rows: Sequence[tuple[Answer, asyncio.Future[None]]], sampling: Sampling) -> None:
        """Draw answers together; one whose job is cancelled meanwhile ends at once."""
        if not rows:
            return
        engine = self.opened.engine
        if isinstance(engine, NativeEngine):
            engine.is_abandoned = lambda row: rows[row][1].cancelled()
        prompts, keys = [answer.prompt for answer, _ in rows], [[answer.key] for answer, _ in rows]
        for (answer, _), (completion,) in zip(rows, engine.generate(prompts, keys, sampling), strict=True):
            for i, token in enumerate(completion.ids):
                if answer.finish is None:
                    answer.push(token, completion.logprobs[i], is_last=i + 1 == len(completion.ids))

    async def stream(self, answer: Answer) -> AsyncGenerator[str, None]:
        """Draw an answer token by token; yield the text that each adds.

        Raises:
            PosttrainError: what the engine raises.
        """
        tokens = stream(self.opened.model, answer.prompt, answer.key, answer.job.sampling)
        try:
            while answer.finish is None:
                token = await asyncio.get_running_loop().run_in_executor(self._thread, next, tokens)
                yield answer.push(token.id, token.logprob, is_last=token.is_last)
        finally:
            self._thread.submit(tokens.close)  # after a token that is being computed


class Recorder:
    """A JSONL file with a line for every answer (``--record``), each written in one piece.

    Raises:
        UsageError, StorageError: the file cannot be written.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model = path, model
        with storage_errors("records", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            cut_torn_line(self._descriptor)

    def add(self, index: int, answer: Answer) -> None:
        """Record an answer; one that was broken off has the finish null."""
        job, sampling = answer.job, answer.job.sampling
        line = {"id": job.id, "time": round(time.time(), 3), "endpoint": job.endpoint, "model": self.model}
        line |= {"index": index, "prompt_ids": answer.prompt, "ids": answer.ids, "logprobs": answer.logprobs}
        line |= {"text": answer.text, "finish": answer.finish, "seed": job.seed}
        line["sampling"] = {key: getattr(sampling, key) for key in ("max_tokens", "temperature", "top_k", "top_p")}
        content = (json.dumps(line) + "\n").encode()
        with storage_errors("records", self.path):
            try:
                while content:
                    content = content[os.write(self._descriptor, content) :]
            except OSError:
                cut_torn_line(self._descriptor)
                raise
