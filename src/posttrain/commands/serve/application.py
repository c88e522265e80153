"""HTTP endpoints and response formats for ``posttrain serve``."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from posttrain.commands.serve import requests
from posttrain.commands.serve.answering import Answerer, AnswerJob, Recorder, ServedAnswer
from posttrain.commands.serve.conversations import Conversations
from posttrain.commands.serve.endpoints import build_application, error_body, parse_json
from posttrain.commands.serve.limits import read_content
from posttrain.commands.serve.requests import MAX_ANSWERS, MAX_BODY_BYTES, BadRequest
from posttrain.data.render import Piece, stop_ids
from posttrain.data.render.assistant import opening_of
from posttrain.data.render.encoding import decode_ids, encode_pieces, markers_of
from posttrain.data.render.template import end_lead
from posttrain.errors import PosttrainError
from posttrain.sampling.base import Sampling, check_prompts, check_sampling, num_tokens_of

# Id prefix and object names (complete and streamed) by endpoint.
FORMS = {
    "chat": ("chatcmpl-", "chat.completion", "chat.completion.chunk"),
    "completions": ("cmpl-", "text_completion", "text_completion"),
    "generate": ("generate-", "", ""),
}
Result = TypeVar("Result")


class Api:
    """HTTP endpoints for a model.

    Args:
        names: accepted model names; responses use the first.
        max_tokens: default answer length.
    """

    def __init__(
        self, answerer: Answerer, names: Sequence[str], max_tokens: int, recorder: Recorder | None = None
    ) -> None:
        self.answerer = answerer
        self.names = names
        self.max_tokens = max_tokens
        self.recorder = recorder
        self.tokenizer = answerer.opened.tokenizer
        self.template = answerer.opened.grader.template
        self.conversations = Conversations(answerer.opened)
        self.started = int(time.time())
        self._num_tokens = num_tokens_of(self.tokenizer)
        self.vocab_size = int(answerer.opened.model.get_input_embeddings().weight.shape[0])
        self.longest_token = _longest_token(self.tokenizer)
        self._reader = ThreadPoolExecutor(1, "reader")  # single thread, since tokenizers switch marker parsing globally

    def application(self) -> Starlette:
        """Build the ASGI application."""
        routes = [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
        ]
        return build_application(routes)

    async def models(self, request: Request) -> Response:
        """List the served model."""
        card = {"id": self.names[0], "object": "model", "created": self.started, "owned_by": "posttrain"}
        card |= {"root": self.answerer.opened.source.path, "parent": None, "max_model_len": self.answerer.context}
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        """Tokenize a text, or a conversation rendered with the template."""
        body = await self._read(request, requests.TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", "prompt")
        if body.messages is None:
            ids = await self._in_reader(self._encode, body.prompt, body.add_special_tokens)
        else:
            ids = await self._in_reader(self.conversations.encode, body.messages, body.schemas)
        return JSONResponse({"count": len(ids), "max_model_len": self.answerer.context, "tokens": ids})

    async def chat(self, request: Request) -> Response:
        """Generate the next message in a conversation."""
        body = await self._read(request, requests.ChatRequest)
        tools = body.schemas
        self._refuse_endless(*_texts_of(body.messages))
        prompt = await self._in_reader(self.conversations.encode, body.messages, tools)
        call_tag = ""
        if tools:
            call_tag = self.conversations.form.tag
        job = replace(
            self._job("chat", body, [prompt]),
            opening=opening_of(self.tokenizer, self.template, prompt),
            lead=end_lead(self.tokenizer, self.template),
            tools=tools,
            call_tag=call_tag,
        )
        return await self._respond(request, job, body.stream)

    async def complete(self, request: Request) -> Response:
        """Continue texts or token ids."""
        body = await self._read(request, requests.CompletionRequest)
        given: Any = body.prompt
        several = [given]
        if isinstance(given, list) and given and not isinstance(given[0], int):
            several = given
        if len(several) * body.n > MAX_ANSWERS:
            raise BadRequest(f"n: at most {MAX_ANSWERS} answers per request, over all prompts", "n")

        for prompt in several:
            if isinstance(prompt, str):
                self._refuse_endless(prompt)

        def encode() -> list[list[int]]:
            prompts = []
            for prompt in several:
                if isinstance(prompt, str):
                    prompt = self._encode(prompt, body.add_special_tokens)
                prompts.append(prompt)
            return prompts

        job = self._job("completions", body, await self._in_reader(encode))
        return await self._respond(request, job, body.stream)

    async def generate(self, request: Request) -> Response:
        """Continue token ids, returning token ids."""
        body = await self._read(request, requests.GenerateRequest)
        params = requests.read_request(requests.SamplingParams, body.sampling_params)
        return await self._respond(request, self._job("generate", params, [body.token_ids]), body.stream)

    async def _read(self, request: Request, kind: type[requests.RequestT]) -> requests.RequestT:
        """Read a body with a size limit.

        Raises:
            BadRequest: an invalid body, or a different model.
        """
        content = await read_content(request, MAX_BODY_BYTES)
        parsed = await self._in_reader(lambda: requests.read_request(kind, parse_json(content)))
        name = getattr(parsed, "model", None)
        if name is not None and name not in self.names:
            problem = f"unknown model {name!r}; this server has {self.names[0]!r}"
            raise BadRequest(problem, "model", "model_not_found", 404)
        return parsed

    async def _in_reader(self, work: Callable[..., Result], *about: object) -> Result:
        """Run what may take long, while others are answered."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *about)

    def _refuse_endless(self, *texts: str) -> None:
        """Reject texts that cannot fit into the context, without slow tokenization.

        Raises:
            BadRequest: too long even if every token were the longest one.
        """
        if self.longest_token is None:
            return
        limit = self.answerer.context * self.longest_token
        if sum(map(len, texts)) > limit:
            about = f"the prompt has more than {limit:,} characters and cannot fit into the context, "
            about += f"{self.answerer.context} tokens: shorten the prompt"
            raise BadRequest(about, code="context_length_exceeded")

    def _encode(self, text: str | None, add_special_tokens: bool = True) -> list[int]:
        """Encode client text, parsing markers as special tokens."""
        ids = encode_pieces(self.tokenizer, [Piece(text or "", trusted=True)])
        if add_special_tokens:
            return [*markers_of(self.tokenizer).leading, *ids]
        return list(ids)

    def _job(self, endpoint: str, body: requests.Sampled, prompts: Sequence[Sequence[int]]) -> AnswerJob:
        """Build a job from a request, rejecting requests that cannot be sampled."""
        context = self.answerer.context
        for prompt in prompts:
            if len(prompt) >= context:
                about = f"the prompt has {len(prompt)} tokens and the maximum context length is {context} tokens, "
                raise BadRequest(f"{about}for prompt plus answer: shorten the prompt", code="context_length_exceeded")
        ends: set[int] = set()
        if not body.ignore_eos:
            ends.update(stop_ids(self.tokenizer, self.template))
        if body.stop_token_ids is not None:
            ends.update(body.stop_token_ids)
        top_k = None
        if body.top_k and body.top_k > 0:
            top_k = body.top_k
        limit = getattr(body, "max_completion_tokens", None) or body.max_tokens or self.max_tokens
        sampling = Sampling(
            limit,
            body.temperature,
            top_k,
            body.top_p,
            frozenset(ends),
            context,
            num_tokens=self._num_tokens,
            min_p=body.min_p,
            min_tokens=body.min_tokens,
            repetition_penalty=body.repetition_penalty,
        )
        check_sampling(sampling)
        check_prompts(prompts, context, self.vocab_size)
        name = FORMS[endpoint][0] + secrets.token_hex(12)
        seed = body.seed
        if seed is None:
            seed = secrets.randbits(62)
        return AnswerJob(name, endpoint, tuple(map(tuple, prompts)), sampling, seed, body)

    async def _respond(self, request: Request, job: AnswerJob, stream: bool) -> Response:
        answers = self.answerer.begin(job)
        if stream:
            return StreamingResponse(self._events(job, answers), media_type="text/event-stream")
        await _unless_gone(request, self.answerer.complete(answers))
        choices = []
        for index, answer in enumerate(answers):
            choice = {"index": index, **self._choice(job, answer.text, answer.ids, answer.logprobs)}
            choice["finish_reason"] = answer.finish
            if job.body.return_token_ids and job.endpoint != "generate":
                choice["prompt_token_ids"] = list(answer.prompt)
            if job.endpoint == "chat":
                del choice["delta"]
                choice["message"] = self.conversations.read(answer)
                if "tool_calls" in choice["message"]:
                    choice["finish_reason"] = "tool_calls"
            choices.append(choice)
            self._record(index, answer)
        return JSONResponse(self._body(job, choices) | {"usage": _usage(job, answers)})

    async def _events(self, job: AnswerJob, answers: Sequence[ServedAnswer]) -> AsyncGenerator[str, None]:
        """Yield server-sent events for answers in sequence, including errors."""
        try:
            for index, answer in enumerate(answers):
                try:
                    async with aclosing(self._pieces(answer)) as pieces:
                        async for piece in pieces:
                            yield _event(self._body(job, [{"index": index, **piece}], in_stream=True))
                finally:
                    self._record(index, answer)
        except PosttrainError as error:
            yield _event(error_body(error))
            return
        options = job.body.stream_options
        if options is not None and options.get("include_usage", False):
            yield _event(self._body(job, [], in_stream=True) | {"usage": _usage(job, answers)})
        yield "data: [DONE]\n\n"

    async def _pieces(self, answer: ServedAnswer) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer's opening, then text added by each token, skipping empty additions."""
        job = answer.job
        prefix = answer.job.opening
        begin = self._choice(job, prefix, [], []) | {"finish_reason": None}
        if job.endpoint == "chat":
            begin |= {"delta": {"role": "assistant", "content": prefix}, "logprobs": None}
        yield begin
        async with aclosing(self.answerer.stream(answer)) as tokens:
            async for text in tokens:
                message = {}
                if answer.finish and job.tools:
                    message = self.conversations.read(answer)
                calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
                if calls:
                    text = (message["content"] or "")[len(prefix) :]
                prefix += text
                if text or answer.finish or job.body.return_token_ids or _has_logprobs(job):
                    choice = self._choice(job, text, answer.ids[-1:], answer.logprobs[-1:])
                    choice["finish_reason"] = answer.finish
                    if calls:
                        choice["finish_reason"] = None
                    yield choice
                if calls:
                    yield {"delta": {"tool_calls": calls}, "logprobs": None, "finish_reason": "tool_calls"}

    def _record(self, index: int, answer: ServedAnswer) -> None:
        if self.recorder is not None:
            self.recorder.add(index, answer)

    def _body(self, job: AnswerJob, choices: list[dict[str, Any]], in_stream: bool = False) -> dict[str, Any]:
        """Build the response envelope for choices."""
        if job.endpoint == "generate":
            return {"request_id": job.id, "choices": choices, "prompt_logprobs": None}
        body = {"id": job.id, "object": FORMS[job.endpoint][1 + in_stream], "created": job.created}
        return body | {"model": self.names[0], "choices": choices}

    def _choice(self, job: AnswerJob, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Format a complete or partial answer for an endpoint."""
        choice: dict[str, Any] = {}
        if job.body.return_token_ids:
            choice["token_ids"] = ids
        choice["logprobs"] = None
        if job.endpoint == "completions":
            choice["text"] = text
        elif job.endpoint == "chat":
            choice["delta"] = {"content": text}
        if _has_logprobs(job):
            choice["logprobs"] = self._logprobs(job, ids, logprobs)
        return choice

    def _logprobs(self, job: AnswerJob, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Format tokens and log-probabilities for an endpoint."""
        names = []
        for token in ids:
            if job.body.return_tokens_as_token_ids:
                names.append(f"token_id:{token}")
            else:
                names.append(decode_ids(self.tokenizer, [token]))
        if job.endpoint == "completions":
            return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None}
        content = []
        for name, logprob in zip(names, logprobs, strict=True):
            content.append({"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []})
        return {"content": content}


def _longest_token(tokenizer: object) -> int | None:
    """Measure the longest token in characters; None if the tokenizer may shorten texts before splitting."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is not None:
        return None
    return max(map(len, backend.get_vocab()), default=None)


def _texts_of(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Collect message contents that are texts."""
    contents = [message.get("content") for message in messages]
    return [content for content in contents if isinstance(content, str)]


def _has_logprobs(job: AnswerJob) -> bool:
    """Check if log-probabilities are requested, by true or by a number including 0."""
    return job.body.logprobs is not None and job.body.logprobs is not False


def _usage(job: AnswerJob, answers: Sequence[ServedAnswer]) -> dict[str, int]:
    """Count prompt and answer tokens."""
    read = sum(map(len, job.prompts))
    sampled = sum(len(answer.ids) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _event(body: dict[str, object]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _unless_gone(request: Request, work: Coroutine[object, object, None]) -> None:
    """Wait for a result; cancel work if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_hangs_up(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _hangs_up(request: Request) -> None:
    """Wait until the client closes the connection, after the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
