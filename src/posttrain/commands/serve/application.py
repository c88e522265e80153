"""The endpoints of ``posttrain serve``: from a request's bytes to an answer's, and who may ask."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from posttrain.commands.serve import wire
from posttrain.commands.serve.answering import Answerer, Order
from posttrain.commands.serve.doorway import Application, Doorway, Headers, Receive, Scope, Send, is_same, reply
from posttrain.commands.serve.speech import Recorder, Scored, Speech
from posttrain.commands.serve.tools import Conversations, Said, Schemas
from posttrain.commands.serve.wire import ChatForm, CompletionForm, Form, GenerateForm, Names, usage
from posttrain.engines.base import Sampling, num_tokens_of
from posttrain.errors import PosttrainError
from posttrain.render import Piece, stop_ids
from posttrain.render.assistant import opening_of
from posttrain.render.encoding import encode_pieces, markers_of

MAX_BODY_BYTES = 4 << 20
BODY_SECONDS = 60.0  # in which a body must have come
_JSON = (b"content-type", b"application/json")
Result = TypeVar("Result")


class Gone(Exception):
    """Whoever asked has hung up."""


class ApiDoor(Doorway):
    """The endpoints behind their checks: no page of a browser, and with ``key`` nobody without it.

    At most ``most`` requests are inside at a time; others are told to come again.
    """

    def __init__(self, application: Application, host: str, port: int, key: str | None = None, most: int = 64) -> None:
        super().__init__(self._bounded, host, port)
        self.inner, self.key, self.most = application, key, most
        self.num_inside = 0

    def problem(self, scope: Scope, headers: Headers) -> str:
        """Why a request may not pass; empty if it may."""
        foreign = super().problem(scope, headers)
        if not foreign and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            foreign = "a page of another site sent it"
        return foreign

    async def refuse(self, send: Send, problem: str) -> None:
        """Say that the request may not pass."""
        text = f"posttrain serve refuses this request: {problem}"
        await _reply_error(send, wire.BadRequest(text, code="refused", status=403))

    async def admit(self, scope: Scope, headers: Headers, send: Send) -> bool:
        """Whether the visitor has the key."""
        kind, _, told = headers.get("authorization", "").partition(" ")
        if self.key is None or (kind.lower() == "bearer" and is_same(told.strip(), self.key)):
            return True
        text = "this server wants its key: Authorization: Bearer KEY"
        await _reply_error(send, wire.BadRequest(text, code="invalid_api_key", status=401))
        return False

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return
        if self.num_inside >= self.most:
            text = f"{self.most} requests are being answered; ask again later (or serve with a larger --max-requests)"
            await _reply_error(
                send, wire.BadRequest(text, code="rate_limit_exceeded", status=429), (b"retry-after", b"1")
            )
            return
        self.num_inside += 1
        try:
            await self.inner(scope, receive, send)
        finally:
            self.num_inside -= 1


async def _reply_error(send: Send, error: wire.BadRequest, *headers: tuple[bytes, bytes]) -> None:
    status, body = wire.error_body(error)
    await reply(send, status, json.dumps(body).encode(), [_JSON, *headers])


@dataclass(frozen=True)
class Asked:
    """A request, ready to be answered.

    ``num_likely``: how many of the likeliest tokens are told at each place; None: no log-probabilities. ``echo``: the
    prompt is told too. ``tools``: what may be called in an answer.
    """

    order: Order
    form: Form
    endpoint: str
    num_likely: int | None = None
    echo: bool = False
    with_usage: bool = True
    tools: Schemas = ()


class Api:
    """The endpoints over one model.

    Args:
        name: what the model is called; ``aliases`` are other names that requests may use.
        max_tokens: how long an answer may be where a request does not say.
    """

    def __init__(
        self,
        answerer: Answerer,
        name: str,
        *,
        aliases: Sequence[str] = (),
        max_tokens: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.answerer, self.name, self.aliases = answerer, name, (name, *aliases)
        self.max_tokens, self.recorder = max_tokens, recorder
        self.tokenizer, self.template = answerer.opened.tokenizer, answerer.opened.grader.template
        self._num_tokens = num_tokens_of(self.tokenizer)
        self.conversations = Conversations(answerer.opened)
        self.started = int(time.time())
        self._reader = ThreadPoolExecutor(1, "reader")  # one: how a tokenizer reads markers is a state of it

    def application(self) -> Starlette:
        """All of them as an ASGI application."""
        routes = [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
        ]
        handlers: dict[Any, Callable[..., Any]] = {
            PosttrainError: _tell_error,
            HTTPException: _tell_http,
            ClientDisconnect: _tell_nobody,
            Gone: _tell_nobody,
            Exception: _tell_bug,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    async def models(self, request: Request) -> Response:
        """The one model."""
        card = {"id": self.name, "object": "model", "created": self.started, "owned_by": "posttrain"}
        card |= {"root": self.answerer.opened.source.path, "parent": None, "max_model_len": self.answerer.context}
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        """A text, or a conversation as the template writes it, as token ids."""
        asked = wire.read_request(wire.TokenizeRequest, await _read_json(request))
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise wire.BadRequest("give one of prompt and messages", "prompt")
        ids = (
            await self._beside(self._encode, asked.prompt, asked.add_special_tokens)
            if asked.messages is None
            else await self._beside(self.conversations.encode, asked.messages, asked.offered)
        )
        return JSONResponse({"count": len(ids), "max_model_len": self.answerer.context, "tokens": ids})

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation."""
        asked = wire.read_request(wire.ChatRequest, await _read_json(request))
        self._check_model(asked.model)
        limit = asked.max_completion_tokens or asked.max_tokens
        prompt = await self._beside(self.conversations.encode, asked.messages, asked.offered)
        order = self._order(asked, [prompt], limit, opening_of(self.tokenizer, self.template, prompt))
        if asked.offered:
            order = replace(order, call_tag=self.conversations.call_tag)
        num_likely = (asked.top_logprobs or 0) if asked.logprobs else None
        form = self._form(ChatForm, asked, num_likely)
        ready = Asked(order, form, "chat", num_likely, with_usage=_wants_usage(asked), tools=asked.offered)
        return await self._answer(request, ready, asked.stream)

    async def complete(self, request: Request) -> Response:
        """What follows a text."""
        asked = wire.read_request(wire.CompletionRequest, await _read_json(request))
        self._check_model(asked.model)
        if asked.echo and asked.stream:
            raise wire.BadRequest("echo: not together with stream; ask for one of them", "echo")
        if asked.max_tokens == 0 and not asked.echo:
            raise wire.BadRequest("max_tokens: 0 is for echo, which tells the prompt back", "max_tokens")
        order = self._order(asked, await self._beside(self._prompts, asked), asked.max_tokens, "")
        form = self._form(CompletionForm, asked, asked.logprobs)
        ready = Asked(order, form, "completions", asked.logprobs, asked.echo, _wants_usage(asked))
        return await self._answer(request, ready, asked.stream, samples=asked.max_tokens != 0)

    async def generate(self, request: Request) -> Response:
        """What follows token ids, as token ids."""
        asked = wire.read_request(wire.GenerateRequest, await _read_json(request))
        self._check_model(asked.model)
        drawn = wire.read_request(wire.SamplingParams, asked.sampling_params)
        order = self._order(drawn, [asked.token_ids], drawn.max_tokens, "")
        names = None if drawn.logprobs is None else Names(self.tokenizer, as_ids=True)
        form = GenerateForm(_new_id(GenerateForm), int(time.time()), self.name, names)
        num_likely = None if drawn.logprobs is None else drawn.logprobs if drawn.logprobs > 1 else 0
        return await self._answer(request, Asked(order, form, "generate", num_likely), asked.stream)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.aliases:
            raise wire.BadRequest(
                f"there is no model {name!r} here; it has {self.name!r}", "model", "model_not_found", 404
            )

    async def _beside(self, work: Callable[..., Result], *about: Any) -> Result:
        """What is read of a request that may be long, while others are answered."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *about)

    def _encode(self, text: str | None, add_special_tokens: bool = True) -> list[int]:
        """A text of the client's own, in which a marker is the token that it is."""
        leading = markers_of(self.tokenizer).leading if add_special_tokens else ()
        return [*leading, *encode_pieces(self.tokenizer, [Piece(text or "", trusted=True)])]

    def _prompts(self, asked: wire.CompletionRequest) -> list[list[int]]:
        prompt: Any = asked.prompt
        several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        return [self._encode(one, asked.add_special_tokens) if isinstance(one, str) else list(one) for one in several]

    def _order(self, asked: wire.Drawing, prompts: Sequence[Sequence[int]], limit: int | None, opening: str) -> Order:
        if len(prompts) * asked.n > wire.MOST_ANSWERS:
            raise wire.BadRequest(f"n: at most {wire.MOST_ANSWERS} answers to one request, over all its prompts", "n")
        ends = frozenset() if asked.ignore_eos else stop_ids(self.tokenizer, self.template)
        ends |= frozenset(asked.stop_token_ids or ())
        top_k = asked.top_k if asked.top_k and asked.top_k > 0 else None
        sampling = Sampling(
            limit or self.max_tokens,
            asked.temperature,
            top_k,
            asked.top_p,
            ends,
            self.answerer.context,
            num_tokens=self._num_tokens,
        )
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        order = Order(tuple(map(tuple, prompts)), sampling, seed, asked.n, tuple(asked.stops), opening)
        self.answerer.check(order)
        return order

    def _form(self, kind: type[Form], asked: wire.Asking, logprobs: int | None) -> Form:
        names = None if logprobs is None else Names(self.tokenizer, asked.return_tokens_as_token_ids)
        return kind(_new_id(kind), int(time.time()), self.name, names, asked.return_token_ids)

    async def _answer(self, request: Request, asked: Asked, stream: bool, samples: bool = True) -> Response:
        if stream:
            return StreamingResponse(self._events(asked), media_type="text/event-stream")
        order, form = asked.order, asked.form
        if samples:
            speeches = await _unless_gone(request, self.answerer.answer(order))
        else:
            speeches = [[self.answerer.speech(order)] * order.n for _ in order.prompts]
        choices: list[dict[str, Any]] = []
        for prompt, several in zip(order.prompts, speeches, strict=True):
            for speech in several:
                scored = await self._scored(asked, prompt, speech)
                choice = {"index": len(choices), **form.choice(speech, scored, prompt)}
                if asked.echo:
                    choice["text"] = self._text(prompt) + speech.text
                said = self._read(asked, speech)
                if said.calls:
                    choice["message"] |= {"content": said.content, "tool_calls": said.tool_calls}
                choices.append(choice | {"finish_reason": "tool_calls" if said.calls else speech.finish or "length"})
                if samples:
                    self._record(asked, len(choices) - 1, prompt, speech)
        num_sampled = sum(len(speech.ids) for several in speeches for speech in several)
        return JSONResponse(form.around(choices) | {"usage": usage(order.prompts, num_sampled)})

    def _read(self, asked: Asked, speech: Speech) -> Said:
        """The text and the calls of an answer that has ended."""
        if not asked.tools:
            return Said(speech.text)
        return self.conversations.read(speech, asked.tools, asked.order.sampling.stop_ids)

    async def _scored(self, asked: Asked, prompt: Sequence[int], speech: Speech) -> list[Scored | None]:
        if asked.num_likely is None:
            return []
        temperature = asked.order.sampling.temperature
        if asked.num_likely or asked.echo:
            scored = await self.answerer.score(
                prompt, speech.ids, temperature, asked.num_likely, with_prompt=asked.echo
            )
            return [None, *scored] if asked.echo else list(scored)
        return [Scored(*pair) for pair in zip(speech.ids, speech.logprobs, strict=True)]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    async def _events(self, asked: Asked) -> AsyncGenerator[str, None]:
        """The answers as server-sent events, one answer after the other; what goes wrong is an event, too."""
        order, form = asked.order, asked.form
        num_sampled = index = 0
        try:
            for prompt in order.prompts:
                for key in order.keys:
                    speech = self.answerer.speech(order)
                    yield _event(
                        form.around(
                            [{"index": index, **form.event(order.opening, None), "finish_reason": None}], is_part=True
                        )
                    )
                    try:
                        async with aclosing(self._spoken(asked, prompt, key, speech)) as pieces:
                            async for piece in pieces:
                                yield _event(form.around([{"index": index, **piece}], is_part=True))
                    finally:
                        self._record(asked, index, prompt, speech)
                    num_sampled += len(speech.ids)
                    index += 1
        except PosttrainError as error:
            yield _event(wire.error_body(error)[1])
            return
        if asked.with_usage:
            yield _event(form.around([], is_part=True) | {"usage": usage(order.prompts, num_sampled)})
        yield "data: [DONE]\n\n"

    async def _spoken(
        self, asked: Asked, prompt: Sequence[int], key: int, speech: Speech
    ) -> AsyncGenerator[dict[str, Any], None]:
        """What each token adds to an answer, where that is something."""
        form = asked.form
        tells_tokens = form.names is not None or form.with_ids or isinstance(form, GenerateForm)
        tokens = self.answerer.stream(prompt, key, asked.order.sampling, asked.num_likely or 0)
        async with aclosing(tokens):
            async for token in tokens:
                told = len(speech.text)
                text = speech.push(token.id, token.logprob, is_last=token.is_last)
                said = self._read(asked, speech) if speech.finish else Said(speech.text)
                if said.calls:
                    text = said.text[told:]
                if text or speech.finish or tells_tokens:
                    event = form.event(text, Scored(token.id, token.logprob, token.likely))
                    yield {**event, "finish_reason": None if said.calls else speech.finish}
                if said.calls:
                    yield _calls_event(said)
                if speech.finish:
                    return

    def _record(self, asked: Asked, index: int, prompt: Sequence[int], speech: Speech) -> None:
        if self.recorder is not None:
            order = asked.order
            drawn = {name: getattr(order.sampling, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
            self.recorder.add(
                asked.form.request_id, asked.endpoint, index, prompt, speech, seed=order.seed, sampling=drawn
            )


def _wants_usage(asked: wire.Asking) -> bool:
    return asked.stream_options is not None and asked.stream_options.include_usage


def _calls_event(said: Said) -> dict[str, Any]:
    """The last event of an answer with calls: each of them whole."""
    calls = [{"index": index, **call} for index, call in enumerate(said.tool_calls)]
    return {"delta": {"tool_calls": calls}, "logprobs": None, "finish_reason": "tool_calls"}


def _new_id(form: type[Form]) -> str:
    return form.prefix + secrets.token_hex(12)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _read_json(request: Request) -> Any:
    """The JSON of a body that is not too large and does not take too long."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MAX_BODY_BYTES:
                    text = f"the body has more than {MAX_BODY_BYTES >> 20} MiB; ask in smaller requests"
                    raise wire.BadRequest(text, code="too_large", status=413)
    except TimeoutError:
        text = f"the body did not come within {BODY_SECONDS:g} seconds"
        raise wire.BadRequest(text, code="timeout", status=408) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise wire.BadRequest(f"the body is no JSON: {type(error).__name__}: {error}", code="no_json") from None


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """What the work gives; it is given up when whoever asked hangs up."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    asked, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait([asked, gone], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise Gone
        return asked.result()
    finally:
        asked.cancel()
        gone.cancel()


async def _tell_error(request: Request, error: PosttrainError) -> Response:
    status, body = wire.error_body(error)
    return JSONResponse(body, status)


async def _tell_http(request: Request, error: HTTPException) -> Response:
    known = "GET /v1/models; POST /v1/chat/completions, /v1/completions, /tokenize, /inference/v1/generate"
    text = f"{error.detail}: this server answers {known}"
    return JSONResponse(wire.error_body(wire.BadRequest(text, status=error.status_code))[1], error.status_code)


async def _tell_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _tell_bug(request: Request, error: Exception) -> Response:
    """For what is no error of ours; its traceback goes to the terminal of the server."""
    text = f"the server failed ({type(error).__name__}); its terminal says more"
    return JSONResponse(wire.error_body(PosttrainError(text))[1], 500)
