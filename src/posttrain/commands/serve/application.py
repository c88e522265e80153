"""The endpoints of ``posttrain serve``, the forms of their answers, and who may ask."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from posttrain.commands.serve import requests
from posttrain.commands.serve.answering import Answer, Answerer, Job, Recorder, Token
from posttrain.commands.serve.conversations import Conversations
from posttrain.commands.serve.requests import (
    MAX_ANSWERS,
    MAX_BODY_BYTES,
    BadRequest,
    ChatMessage,
    OpenAIOptions,
    error_body,
)
from posttrain.engines.base import Sampling, num_tokens_of
from posttrain.errors import PosttrainError
from posttrain.render import Piece, stop_ids
from posttrain.render.assistant import opening_of
from posttrain.render.encoding import encode_pieces, markers_of

WILDCARDS = ("0.0.0.0", "::")
ID_PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "generate": "generate-"}
OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}
Result = TypeVar("Result")


class Access:
    """ASGI layer that refuses pages of other sites, DNS rebinding and, with ``key``, clients without the key.

    A page in a browser can send requests to this machine: across origins, or under a name of its own that it points to
    127.0.0.1. So ``Host`` must be a name of this server, and ``Origin``, if there is one, this server too. A wildcard
    address answers to the machine's name and to any address.
    """

    def __init__(self, application: ASGIApp, host: str, port: int, key: str | None = None) -> None:
        self.application, self.port, self.key = application, port, key
        self.is_wildcard = host in WILDCARDS
        own = socket.gethostname() if self.is_wildcard else f"[{host}]" if ":" in host else host
        self.names = {"127.0.0.1", "localhost", "[::1]", own.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        error = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self.application if error is None else _response(error))(scope, receive, send)

    def _problem(self, headers: Headers) -> BadRequest | None:
        (host, *more), problem = headers.getlist("host") or [""], ""
        if more or not self._is_own(host.lower()):
            problem = "its Host is not this server"
        elif any(origin.lower() != f"http://{host.lower()}" for origin in headers.getlist("origin")):
            problem = "its Origin is another page"
        elif any(site not in ("none", "same-origin") for site in headers.getlist("sec-fetch-site")):
            problem = "a page of another site sent it"
        if problem:
            return BadRequest(f"posttrain serve refuses this request: {problem}", code="refused", status=403)
        kind, _, given = headers.get("authorization", "").partition(" ")
        if self.key is not None and not (
            kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.key.encode())
        ):
            return BadRequest("this server needs its key: Authorization: Bearer KEY", None, "invalid_api_key", 401)
        return None

    def _is_own(self, host: str) -> bool:
        match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?", host)
        if match is None or int(match[2] or 80) != self.port:
            return False
        try:
            return match[1] in self.names or (self.is_wildcard and bool(ipaddress.ip_address(match[1].strip("[]"))))
        except ValueError:
            return False


class Api:
    """The endpoints over one model.

    Args:
        names: names of the model in requests; answers give the first.
        max_tokens: length of an answer where a request does not say.
    """

    def __init__(
        self, answerer: Answerer, names: Sequence[str], max_tokens: int, recorder: Recorder | None = None
    ) -> None:
        self.answerer, self.names, self.max_tokens, self.recorder = answerer, names, max_tokens, recorder
        self.tokenizer, self.template = answerer.opened.tokenizer, answerer.opened.grader.template
        self.conversations = Conversations(answerer.opened)
        self.started = int(time.time())
        self._num_tokens = num_tokens_of(self.tokenizer)
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        self._reader = ThreadPoolExecutor(1, "reader")  # one: how a tokenizer reads markers is a state of it

    def application(self) -> Starlette:
        """Return them as an ASGI application."""
        routes = [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
        ]
        known = "; ".join(f"{min(route.methods or ['GET'])} {route.path}" for route in routes)

        async def respond(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                error = BadRequest(f"{error.detail}: this server answers {known}", status=error.status_code)
            if isinstance(error, RecursionError):
                error = BadRequest("the body is nested too deeply")
            if not isinstance(error, PosttrainError):  # its traceback goes to the terminal of the server
                error = PosttrainError(f"the server failed ({type(error).__name__}); its terminal says more")
            return _response(error)

        async def respond_to_nobody(request: Request, error: Exception) -> Response:
            return Response(status_code=499)

        handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]]
        handlers = dict.fromkeys((PosttrainError, HTTPException, RecursionError, Exception), respond)
        return Starlette(routes=routes, exception_handlers=handlers | {ClientDisconnect: respond_to_nobody})

    async def models(self, request: Request) -> Response:
        """List the one model."""
        card = {"id": self.names[0], "object": "model", "created": self.started, "owned_by": "posttrain"}
        card |= {"root": self.answerer.opened.source.path, "parent": None, "max_model_len": self.answerer.context}
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a text, or of a conversation as the template writes it."""
        asked = await self._read(request, requests.TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise BadRequest("give one of prompt and messages", "prompt")
        messages, tools = asked.messages, asked.schemas
        self._check_length(len(asked.prompt or ""), messages or (), tools)
        if messages is None:
            ids = await self._in_reader(self._encode, asked.prompt, asked.add_special_tokens)
        else:
            ids = await self._in_reader(self.conversations.encode, messages, tools)
        return JSONResponse({"count": len(ids), "max_model_len": self.answerer.context, "tokens": ids})

    async def chat(self, request: Request) -> Response:
        """Return the next message of a conversation."""
        asked = await self._read(request, requests.ChatRequest)
        tools = asked.schemas
        self._check_length(0, asked.messages, tools)
        prompt = await self._in_reader(self.conversations.encode, asked.messages, tools)
        num_likely = (asked.top_logprobs or 0) if asked.logprobs else None
        job = self._job("chat", asked, [prompt], asked.max_completion_tokens or asked.max_tokens, num_likely)
        opening = opening_of(self.tokenizer, self.template, prompt)
        job = replace(job, opening=opening, tools=tools, call_tag=self.conversations.call_tag if tools else "")
        return await self._respond(request, job, asked.stream)

    async def complete(self, request: Request) -> Response:
        """Continue texts or token ids."""
        asked = await self._read(request, requests.CompletionRequest)
        given: Any = asked.prompt
        several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if len(several) * asked.n > MAX_ANSWERS:
            raise BadRequest(f"n: at most {MAX_ANSWERS} answers to one request, over all its prompts", "n")
        for text in several:
            self._check_length(len(text) if isinstance(text, str) else 0)

        def encode() -> list[list[int]]:
            return [self._encode(one, asked.add_special_tokens) if isinstance(one, str) else one for one in several]

        prompts = await self._in_reader(encode)
        job = self._job("completions", asked, prompts, asked.max_tokens, asked.logprobs)
        return await self._respond(request, job, asked.stream)

    async def generate(self, request: Request) -> Response:
        """Continue token ids; the answer is token ids."""
        asked = await self._read(request, requests.GenerateRequest)
        params = requests.read_request(requests.SamplingParams, asked.sampling_params)
        num_likely = params.logprobs if params.logprobs is None or params.logprobs > 1 else 0
        job = self._job("generate", params, [asked.token_ids], params.max_tokens, num_likely)
        return await self._respond(request, replace(job, with_ids=True, ids_as_names=True), asked.stream)

    async def _read(self, request: Request, kind: type[requests.Request]) -> requests.Request:
        """Read a body that is not too large.

        Raises:
            BadRequest: it is none, or asks for another model.
        """
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > MAX_BODY_BYTES:
                text = f"the body has more than {MAX_BODY_BYTES:,} bytes; send smaller requests"
                raise BadRequest(text, code="too_large", status=413)

        def parse() -> requests.Request:
            try:
                body = json.loads(content)
            except (ValueError, RecursionError) as error:
                problem = f"the body is no JSON: {type(error).__name__}: {error}"
                raise BadRequest(problem, code="no_json") from None
            return requests.read_request(kind, body)

        asked = await self._in_reader(parse)
        name = getattr(asked, "model", None)
        if name is not None and name not in self.names:
            problem = f"there is no model {name!r} here; it has {self.names[0]!r}"
            raise BadRequest(problem, "model", "model_not_found", 404)
        return asked

    async def _in_reader(self, work: Callable[..., Result], *about: object) -> Result:
        """Run what may take long, while others are answered."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *about)

    def _check_length(self, num_chars: int, messages: Sequence[ChatMessage] = (), tools: Sequence[object] = ()) -> None:
        """Refuse what is too long for the model before it is tokenized."""
        num_chars += sum(len(message.text) for message in messages)
        num_chars += len(json.dumps(tools)) if tools and self.conversations.shows else 0
        if num_chars > self.answerer.context * self._longest_token:
            self._refuse_length(f"{num_chars:,} characters")

    def _refuse_length(self, length: str) -> None:
        context = f"the maximum context length is {self.answerer.context} tokens, prompt and answer together"
        raise BadRequest(f"the prompt has {length} and {context}: shorten it", code="context_length_exceeded")

    def _encode(self, text: str | None, add_special_tokens: bool = True) -> list[int]:
        """Encode a text of the client's own, in which a marker is the token that it is."""
        leading = markers_of(self.tokenizer).leading if add_special_tokens else ()
        return [*leading, *encode_pieces(self.tokenizer, [Piece(text or "", trusted=True)])]

    def _job(
        self,
        endpoint: str,
        asked: requests.SamplingOptions,
        prompts: Sequence[Sequence[int]],
        limit: int | None,
        num_likely: int | None,
    ) -> Job:
        for prompt in prompts:
            if len(prompt) >= self.answerer.context:
                self._refuse_length(f"{len(prompt)} tokens")
        ends = frozenset() if asked.ignore_eos else stop_ids(self.tokenizer, self.template)
        ends |= frozenset(asked.stop_token_ids or ())
        top_k = asked.top_k if asked.top_k and asked.top_k > 0 else None
        context, known = self.answerer.context, self._num_tokens
        sampling = Sampling(
            limit or self.max_tokens, asked.temperature, top_k, asked.top_p, ends, context, num_tokens=known
        )
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        own_id = ID_PREFIXES[endpoint] + secrets.token_hex(12)
        job = Job(own_id, endpoint, tuple(map(tuple, prompts)), sampling, seed, asked.n, tuple(asked.stop or ()))
        job = replace(job, num_likely=num_likely)
        if isinstance(asked, OpenAIOptions):
            with_usage = (asked.stream_options or {}).get("include_usage", False)
            ids, as_names = asked.return_token_ids, asked.return_tokens_as_token_ids
            job = replace(job, with_ids=ids, ids_as_names=as_names, with_usage=with_usage)
        self.answerer.check(job)
        return job

    async def _respond(self, request: Request, job: Job, stream: bool) -> Response:
        if stream:
            return StreamingResponse(self._events(job), media_type="text/event-stream")
        answers = await _unless_gone(request, self.answerer.answer(job))
        choices = []
        for index, answer in enumerate(answers):
            prompt = job.prompts[index // job.n]
            choice = {"index": index, **self._choice(answer.text, answer.tokens, job, prompt)}
            reply = self.conversations.read(answer)
            if reply.calls:
                choice["message"] |= {"content": reply.content, "tool_calls": reply.tool_calls}
            choices.append(choice | {"finish_reason": "tool_calls" if reply.calls else answer.finish})
            self._record(index, prompt, answer)
        return JSONResponse(self._body(job, choices) | {"usage": _usage(job, answers)})

    async def _events(self, job: Job) -> AsyncGenerator[str, None]:
        """Yield the answers as server-sent events, one answer after the other; an error is an event, too."""
        answers: list[Answer] = []
        try:
            for prompt in job.prompts:
                for key in job.keys:
                    index, answer = len(answers), Answer(self.tokenizer, job)
                    answers.append(answer)
                    begin = self._choice(job.opening, [], job)
                    if job.endpoint == "chat":
                        begin |= {"delta": {"role": "assistant", "content": job.opening}, "logprobs": None}
                    yield self._event(job, [{"index": index, **begin, "finish_reason": None}])
                    try:
                        async with aclosing(self._pieces(answer, prompt, key)) as pieces:
                            async for piece in pieces:
                                yield self._event(job, [{"index": index, **piece}])
                    finally:
                        self._record(index, prompt, answer)
        except PosttrainError as error:
            yield f"data: {json.dumps(error_body(error)[1])}\n\n"
            return
        if job.with_usage:
            yield self._event(job, [], usage=_usage(job, answers))
        yield "data: [DONE]\n\n"

    async def _pieces(self, answer: Answer, prompt: Sequence[int], key: int) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what each token adds to an answer, if it adds anything."""
        job = answer.job
        async with aclosing(self.answerer.stream(job, prompt, key)) as tokens:
            async for token, is_last in tokens:
                length = len(answer.text)
                text = answer.push(token, is_last=is_last)
                reply = self.conversations.read(answer) if answer.finish else None
                calls = reply.tool_calls if reply else []
                if reply and calls:
                    text = reply.text[length:]
                if text or answer.finish or job.with_ids or job.num_likely is not None:
                    yield {**self._choice(text, [token], job), "finish_reason": None if calls else answer.finish}
                if calls:
                    called = {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}
                    yield {"delta": called, "logprobs": None, "finish_reason": "tool_calls"}
                if answer.finish:
                    return

    def _record(self, index: int, prompt: Sequence[int], answer: Answer) -> None:
        if self.recorder is not None:
            self.recorder.add(index, prompt, answer)

    def _event(self, job: Job, choices: list[dict[str, Any]], **more: object) -> str:
        return f"data: {json.dumps(self._body(job, choices, '.chunk') | more)}\n\n"

    def _body(self, job: Job, choices: list[dict[str, Any]], suffix: str = "") -> dict[str, Any]:
        """Return what stands around choices."""
        if job.endpoint == "generate":
            return {"request_id": job.id, "choices": choices, "prompt_logprobs": None}
        kind = OBJECTS[job.endpoint] + (suffix if job.endpoint == "chat" else "")
        return {
            "id": job.id, "object": kind, "created": job.created, "model": self.names[0], "choices": choices
        }  # fmt: skip

    def _choice(
        self, text: str, tokens: Sequence[Token], job: Job, prompt: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return an answer in the form of its endpoint; without ``prompt`` the part of a stream."""
        ids = {"token_ids": [token.id for token in tokens]} if job.with_ids else {}
        if job.endpoint != "generate" and prompt is not None and ids:
            ids["prompt_token_ids"] = list(prompt)
        if job.endpoint == "completions":
            return {"text": text, "logprobs": self._text_logprobs(tokens, job), **ids}
        logprobs = {"content": [self._logprob(token, job) for token in tokens]}
        content: dict[str, Any] = {"logprobs": None if job.num_likely is None else logprobs, **ids}
        if job.endpoint == "chat" and prompt is None:
            content["delta"] = {"content": text}
        elif job.endpoint == "chat":
            content["message"] = {"role": "assistant", "content": text, "refusal": None}
        return content

    def _text_logprobs(self, tokens: Sequence[Token], job: Job) -> dict[str, Any] | None:
        if job.num_likely is None:
            return None
        likely = [{self._name(i, job): logprob for i, logprob in token.likely} for token in tokens]
        return {
            "tokens": [self._name(token.id, job) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": likely if any(likely) else None,
        }

    def _logprob(self, token: Token, job: Job) -> dict[str, Any]:
        own, *likely = (
            {"token": self._name(i, job), "logprob": logprob, "bytes": None}
            for i, logprob in ((token.id, token.logprob), *token.likely)
        )
        return own | {"top_logprobs": likely}

    def _name(self, token: int, job: Job) -> str:
        return f"token_id:{token}" if job.ids_as_names else str(self.tokenizer.decode([token]))


def _usage(job: Job, answers: Sequence[Answer]) -> dict[str, int]:
    """Count the tokens of prompts and answers."""
    read, sampled = sum(map(len, job.prompts)), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _response(error: PosttrainError) -> Response:
    status, body = error_body(error)
    return JSONResponse(body, status)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of the work; cancel it when the client hangs up.

    Raises:
        ClientDisconnect: it has.
    """

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
