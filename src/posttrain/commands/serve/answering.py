"""One model, many who ask: requests that wait together are sampled together, streams take turns token by token.

The model is used by one thread alone. What waits for it stands in a line: a batch of whole answers is one place in it,
each token of a stream another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

from posttrain.commands.serve.speech import Scored, Speech
from posttrain.commands.serve.wire import BadRequest
from posttrain.engines.base import Sampling, check_prompts, check_sampling
from posttrain.engines.models import OpenedModel
from posttrain.engines.native.engine import sampling_mode
from posttrain.engines.native.stream import StreamedToken, stream
from posttrain.models.forward.forward import Forward
from posttrain.randomness import derive_key
from posttrain.types import Completion, Sample, collate

GATHER_SECONDS = 0.005  # what comes within it of the first request is sampled with it


@dataclass(frozen=True)
class Order:
    """``n`` answers to each prompt (token ids), drawn as ``seed`` says: those of ``posttrain generate --seed``.

    ``stops``: texts that end an answer. ``opening``: the template's, in front of the text. ``call_tag``: what a call
    begins with, where tools are offered. An answer does not depend on what else is asked, nor on whether it is
    streamed.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    seed: int
    n: int = 1
    stops: tuple[str, ...] = ()
    opening: str = ""
    call_tag: str = ""

    @property
    def keys(self) -> list[int]:
        """One for each answer to a prompt."""
        return [derive_key(self.seed, "generate", i) for i in range(self.n)]


@dataclass
class _Waiting:
    order: Order
    answered: asyncio.Future[list[list[Completion]]]


class Answerer:
    """Answers orders with one model.

    ``num_batches`` counts the batches so far, ``largest_batch`` the most prompts in one.
    """

    def __init__(self, opened: OpenedModel) -> None:
        self.opened = opened
        self.context = opened.context_tokens
        self.vocab_size = int(opened.model.get_input_embeddings().weight.shape[0])
        self.num_batches = self.largest_batch = 0
        self._thread = ThreadPoolExecutor(1, "engine")
        self._waiting: list[_Waiting] = []
        self._work: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Take no more work; a batch at work is finished first."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check(self, order: Order) -> None:
        """Refuse what cannot be sampled, before it stands in the way of others.

        Raises:
            BadRequest: an option or a prompt that the model cannot take.
        """
        check_sampling(order.sampling)
        for prompt in order.prompts:
            if len(prompt) >= self.context:
                raise BadRequest(
                    f"the prompt has {len(prompt)} tokens and the maximum context length is {self.context} tokens, "
                    "prompt and answer together: shorten it",
                    code="context_length_exceeded",
                )
        check_prompts(order.prompts, self.context, self.vocab_size)

    async def answer(self, order: Order) -> list[list[Speech]]:
        """The answers to every prompt.

        Raises:
            PosttrainError: what the engine raises.
        """
        answered: asyncio.Future[list[list[Completion]]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(order, answered))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._work_off())
        return [[self._said(order, one) for one in sampled] for sampled in await answered]

    def _said(self, order: Order, completion: Completion) -> Speech:
        speech = self.speech(order)
        for i, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True), start=1):
            speech.push(token, logprob, is_last=i == len(completion.ids))
            if speech.finish is not None:
                break
        return speech

    def speech(self, order: Order) -> Speech:
        """An answer that has not begun."""
        return Speech(self.opened.tokenizer, order.sampling.stop_ids, order.stops, order.opening, order.call_tag)

    async def _work_off(self) -> None:
        """Sample whatever waits, those of equal options together, until nothing does."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(GATHER_SECONDS)
        while self._waiting:
            sampling = self._waiting[0].order.sampling
            batch = [one for one in self._waiting if one.order.sampling == sampling]
            self._waiting = [one for one in self._waiting if one.order.sampling != sampling]
            batch = [one for one in batch if not one.answered.done()]  # whoever asked may have gone
            prompts = [prompt for one in batch for prompt in one.order.prompts]
            keys = [one.order.keys for one in batch for _ in one.order.prompts]
            if not batch:
                continue
            self.num_batches += 1
            self.largest_batch = max(self.largest_batch, len(prompts))
            sampling_work = loop.run_in_executor(self._thread, self.opened.engine.generate, prompts, keys, sampling)
            await asyncio.wait([sampling_work])
            error = sampling_work.exception()
            completions = iter(() if error is not None else sampling_work.result())
            for one in batch:
                own = [] if error is not None else [next(completions) for _ in one.order.prompts]
                if one.answered.done():
                    continue
                if error is not None:
                    one.answered.set_exception(error)
                else:
                    one.answered.set_result(own)

    async def stream(
        self, prompt: Sequence[int], key: int, sampling: Sampling, num_likely: int
    ) -> AsyncGenerator[StreamedToken, None]:
        """The tokens of one answer, as they are drawn.

        Raises:
            PosttrainError: what the engine raises.
        """
        loop = asyncio.get_running_loop()
        tokens = stream(self.opened.model, prompt, key, sampling, num_likely=num_likely)
        try:
            while (token := await loop.run_in_executor(self._thread, next, tokens, None)) is not None:
                yield token
        finally:
            self._thread.submit(tokens.close)  # in its turn: a token may be at work

    async def score(
        self, prompt: Sequence[int], ids: Sequence[int], temperature: float, num_likely: int, *, with_prompt: bool
    ) -> list[Scored]:
        """The tokens of an answer, and with ``with_prompt`` those of its prompt but the first, by one forward pass.

        Log-probabilities at ``temperature`` (1 for greedy), before truncation.
        """
        first = 1 if with_prompt else len(prompt)
        work = partial(self._score, [*prompt, *ids], first, temperature or 1.0, num_likely)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @cached_property
    def _forward(self) -> Forward:
        return Forward(self.opened.model)

    def _score(self, ids: Sequence[int], first: int, temperature: float, num_likely: int) -> list[Scored]:
        if len(ids) <= first:
            return []
        with sampling_mode(self.opened.model):
            self._forward.temperature = temperature
            batch = collate([Sample(ids, [i >= first for i in range(len(ids))])])
            logprobs = self._forward(batch, "none").logprobs[0, first:].tolist()
            likely: list[tuple[tuple[int, float], ...]] = [()] * len(logprobs)
            if num_likely:
                names, values = (part[0, first:].tolist() for part in self._forward.top_candidates(batch, num_likely))
                likely = [tuple(zip(*pair, strict=True)) for pair in zip(names, values, strict=True)]
        # A token among the likeliest has exactly their number, so that clients can see whether it was the first.
        return [
            Scored(token, dict(best).get(token, logprob), best)
            for token, logprob, best in zip(ids[first:], logprobs, likely, strict=True)
        ]
