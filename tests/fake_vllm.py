"""A small stand-in for a vLLM server: the same endpoints over real HTTP, with a model or a script behind them."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.types import Completion

Answer = Callable[[dict[str, Any]], Completion]
Routes = dict[str, Callable[[dict[str, Any]], Any]]


class Reset(Exception):
    """The connection breaks in the middle of the answer."""


class Reply(Exception):
    """This HTTP answer instead."""

    def __init__(self, status: int, content: bytes | dict[str, Any]) -> None:
        super().__init__(status)
        self.status = status
        self.content = content if isinstance(content, bytes) else json.dumps(content).encode()


class QuietServer(ThreadingHTTPServer):
    request_queue_size = 128  # connections wait where the machine is busy, and are not broken off
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what some tests are about."""


class FakeVllm:
    """Serves on a free port of ``host`` while the context is open.

    Args:
        answer: the completion for the body of a request.
        context: what ``/v1/models`` tells as ``max_model_len``.
        trouble: called with (how often this body has come, body) before an answer; may raise ``Reset``
            or ``Reply``, or take its time.
        change: edits the JSON of a good answer.
        key: the bearer token that is asked for.
        masks: it was started with ``--return-sampling-mask --enable-scale-out``, as vLLM 0.32 has them: it returns the
            sets that truncation kept, and refuses greedy requests and those without ``top_k``.
        change_tokens: edits the JSON of a good answer with masks.

    ``bodies`` keeps every body of ``/v1/completions``.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        context: int | None = 64,
        cards: Sequence[dict[str, Any]] | None = None,
        trouble: Callable[[int, dict[str, Any]], None] = lambda count, body: None,
        change: Callable[[dict[str, Any]], Any] = lambda content: content,
        key: str | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
        masks: bool = False,
        change_tokens: Callable[[dict[str, Any]], Any] = lambda content: content,
    ) -> None:
        self.masks, self.change_tokens = masks, change_tokens
        self.answer, self.trouble, self.change, self.key = answer, trouble, change, key
        self.cards = list(cards or [{"id": "small", "root": "/models/small", "max_model_len": context}])
        self.bodies: list[dict[str, Any]] = []
        self.in_flight, self.most_in_flight = 0, 0
        self.gets: Routes = {"/v1/models": lambda body: self.models()}
        self.posts: Routes = {"/v1/completions": self.complete}
        if masks:
            self.posts["/inference/v1/generate"] = self.generate_tokens
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server = QuietServer((host, port), _handler_for(self))
        self.url = f"http://{host}:{self._server.server_address[1]}"

    def __enter__(self) -> FakeVllm:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *details: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": self.cards}

    def generate_tokens(self, body: dict[str, Any]) -> Any:
        """``/inference/v1/generate`` of vLLM 0.32: options in ``sampling_params``, ids and masks in the answer."""
        self.bodies.append(body)
        options = body["sampling_params"]
        self.refuse_without_set(options)
        engine = NativeEngine(self.answer.model)  # type: ignore[attr-defined]
        sampling = replace(sampling_of(options), keeps_sets=True)
        ((found,),) = engine.generate([body["token_ids"]], [[options["seed"]]], sampling)
        assert found.kept is not None
        drawn = zip(found.ids, found.logprobs, strict=True)
        logprobs = [{"token_id": token, "logprob": x, "rank": 1, "top_logprobs": []} for token, x in drawn]
        choice = {
            "index": 0,
            "token_ids": list(found.ids),
            "finish_reason": found.finish,
            "stop_reason": found.ids[-1] if found.finish == "stop" else None,
            "logprobs": {"content": logprobs},
            "sampling_mask": [list(found.kept.at(t)) for t in range(len(found.ids))],
            "routed_experts": None,
        }
        prompt = body["token_ids"] if body["return_token_ids"] else None
        return self.change_tokens({"request_id": "1", "choices": [choice], "prompt_token_ids": prompt})

    def refuse_without_set(self, options: dict[str, Any]) -> None:
        """vLLM 0.32 says so of every request to a server with masks."""
        for wrong, what in ((options["temperature"] <= 0, "temperature > 0"), (options["top_k"] <= 0, "top_k > 0")):
            if self.masks and wrong:
                raise Reply(400, {"error": {"message": f"sampling distribution replay requires {what}"}})

    def complete(self, body: dict[str, Any]) -> Any:
        self.refuse_without_set(body)
        with self._lock:
            self.bodies.append(body)
            self._counts[json.dumps(body)] += 1
            count = self._counts[json.dumps(body)]
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self.trouble(count, body)
            with self._lock:
                content = completion_json(body, self.answer(body))
                model = getattr(self.answer, "model", None)
                if model is not None and (body.get("logprobs") or "prompt_logprobs" in body):
                    add_scores(content["choices"][0], body, model)
            return self.change(content)
        finally:
            with self._lock:
                self.in_flight -= 1


def completion_json(body: dict[str, Any], completion: Completion) -> dict[str, Any]:
    """A completion as vLLM 0.32 writes it down."""
    ids = list(completion.ids)
    logprobs = None
    if body.get("logprobs") is not None:
        names = [f"token_id:{token}" if body["return_tokens_as_token_ids"] else str(token) for token in ids]
        logprobs = {"tokens": names, "token_logprobs": list(completion.logprobs), "text_offset": [0] * len(ids)}
    choice = {
        "index": 0,
        "text": "",
        "logprobs": logprobs,
        "finish_reason": completion.finish,
        "stop_reason": ids[-1] if completion.finish == "stop" else None,
        "token_ids": ids if body["return_token_ids"] else None,
        "prompt_token_ids": body["prompt"],
    }
    return {"object": "text_completion", "model": body["model"], "choices": [choice]}


def add_scores(choice: dict[str, Any], body: dict[str, Any], model: Any) -> None:
    """The likeliest tokens at every place of the answer, and the tokens of the prompt, with their log-probabilities."""
    prompt = body["prompt"]
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([[*prompt, *choice["token_ids"]]])).logits[0].float().log_softmax(-1)
    tops = [logprobs[i].topk(max(1, body["logprobs"] or 1)) for i in range(len(prompt) - 1, len(logprobs) - 1)]
    choice["logprobs"]["top_logprobs"] = [
        {f"token_id:{token}": value for token, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)}
        for top in tops
    ]
    if "prompt_logprobs" in body:
        scored = [{str(token): {"logprob": float(logprobs[i, token])}} for i, token in enumerate(prompt[1:])]
        choice["prompt_logprobs"] = [None, *scored]


def _handler_for(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._reply(fake.gets)

        def do_POST(self) -> None:
            self._reply(fake.posts)

        def _reply(self, endpoints: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            try:
                if fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}":
                    raise Reply(401, {"error": "Unauthorized"})
                route = self.path.partition("?")[0]
                if route not in endpoints:
                    raise Reply(404, {"detail": "Not Found"})
                status, content = 200, json.dumps(endpoints[route](body)).encode()
            except Reply as reply:
                status, content = reply.status, reply.content
            except Reset:
                self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": [')
                # without lingering, closing resets the connection
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *details: object) -> None:
            pass

    return Handler


def sampling_of(body: dict[str, Any]) -> Sampling:
    return Sampling(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        top_k=None if body["top_k"] == -1 else body["top_k"],
        top_p=body["top_p"],
        min_p=body.get("min_p", 0.0),
        min_tokens=body.get("min_tokens", 0),
        repetition_penalty=body.get("repetition_penalty", 1.0),
        stop_ids=frozenset(body["stop_token_ids"]),
    )


def model_answer(model: Any, mode: str) -> Answer:
    """Completions of a model: the native engine's tokens for the seed, log-probabilities in vLLM's ``mode``."""
    engine = NativeEngine(model)

    def answer(body: dict[str, Any]) -> Completion:
        sampling = sampling_of(body)
        ((found,),) = engine.generate([body["prompt"]], [[body["seed"]]], sampling)
        ids = torch.tensor([[*body["prompt"], *found.ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(body["prompt"]) - 1 : -1].float()
        if mode == "processed" and sampling.rules is not None:
            picked = found.logprobs  # of the engine, whose rules have tests of their own
            return Completion(found.ids, picked, found.finish)
        if mode == "processed" and sampling.temperature > 0:
            logits = truncate(logits / sampling.temperature, sampling)
        picked = logits.log_softmax(-1).gather(1, torch.tensor(found.ids)[:, None])[:, 0]
        return Completion(found.ids, tuple(picked.tolist()), found.finish)

    answer.model = model  # type: ignore[attr-defined]
    return answer


def truncate(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Minus infinity wherever top-k or top-p leave a token out."""
    ordered, places = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    out = probabilities.cumsum(-1) - probabilities >= sampling.top_p
    if sampling.top_k is not None:
        out[:, sampling.top_k :] = True
    return logits.masked_fill(torch.zeros_like(out).scatter(1, places, out), float("-inf"))
