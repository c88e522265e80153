"""What a stranger's server may answer to who asks it: a vLLM server, a judge. One message, never a traceback or a hang.

What honest servers get wrong is told in ``tests/engines``.
"""

from __future__ import annotations

import copy
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from posttrain.errors import PosttrainError, RunFailure
from posttrain.sampling import http
from posttrain.sampling.base import Sampling
from posttrain.sampling.http import HttpServer, Unreadable
from posttrain.sampling.judge_questions import ask_score
from posttrain.sampling.llm_judge import Judge, Opinion
from posttrain.sampling.vllm.client import VllmEngine
from posttrain.sampling.vllm.following import WORKERS, control, read_num_workers, read_scores
from refusing import refuses

MODELS, COMPLETE, CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"
IDS = [1, 2, 3, 4]
LOGPROBS = {"tokens": [f"token_id:{i}" for i in IDS], "token_logprobs": [-1.0] * 4}
CHOICE = {"finish_reason": "length", "token_ids": IDS, "prompt_token_ids": [5, 6], "logprobs": LOGPROBS}
REPLY = json.dumps({"reasoning": "because", "score": 3})
GOOD: dict[str, Any] = {
    MODELS: {"data": [{"id": "small", "root": "/models/small", "max_model_len": 64}]},
    COMPLETE: {"choices": [CHOICE]},
    CHAT: {"choices": [{"message": {"content": REPLY}}], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
}
Answers = dict[str, bytes]


def http_answer(body: Any, status: str = "200 OK") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def changed(path: str, place: tuple[Any, ...], value: Any) -> bytes:
    """The good answer with ``value`` at a place in it."""
    answer = inner = copy.deepcopy(GOOD[path])
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return http_answer(answer)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """``serve(answers)`` is the address of a server that sends these bytes, ``drip`` seconds between each."""
    monkeypatch.setattr(http, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    started: list[socketserver.ThreadingTCPServer] = []

    def begin(answers: Answers, drip: float = 0.0, closes: bool = False, before: float = 0.0) -> str:
        every = {path: http_answer(body) for path, body in GOOD.items()} | answers

        class Answer(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while line := self.rfile.readline():
                    length = 0
                    while (header := self.rfile.readline()).strip():
                        name, _, value = header.partition(b":")
                        length = int(value) if name.lower() == b"content-length" else length
                    self.rfile.read(length)
                    self.say(every[line.split()[1].decode()])
                    if closes:
                        return

            def say(self, content: bytes) -> None:
                time.sleep(before)
                try:
                    for i in range(0, len(content), 1 if drip else 1 << 20):
                        self.wfile.write(content[i : i + (1 if drip else 1 << 20)])
                        time.sleep(drip)
                except OSError:  # whoever asked has hung up
                    return

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield begin
    for server in started:
        server.shutdown()
        server.server_close()


def sample(url: str, **options: Any) -> Any:
    engine = VllmEngine(url, **{"retries": 1, "timeout_seconds": 20.0} | options)
    return engine.generate([[5, 6]], [[1]], Sampling(4, stop_ids=frozenset([9])))


def judge(url: str) -> Opinion:
    question = ask_score("Why?", "So.", rubric="Be right.", scale=(0, 10))
    return Judge(url, retries=1, timeout_seconds=20.0).ask([question])[0]


def test_what_is_not_changed_is_taken(serve: Callable[..., str]) -> None:
    url = serve({})
    ((completion,),) = sample(url)
    assert (completion.ids, completion.logprobs) == (tuple(IDS), (-1.0,) * 4)
    assert judge(url) == Opinion(0.3, tokens_in=3, tokens_out=4)


NESTED, DIGITS = b"[" * 200_000, b"1" * 5000
RAW = [
    (http_answer(NESTED), "is not JSON"),
    (http_answer(DIGITS), "is not JSON"),
    (http_answer(b""), "is not JSON"),
    (http_answer(b"\xff\xfe\x1b[2J"), r"is not JSON: .*\\x1b"),
    (http_answer({"error": {"message": "\x1b[2J\ud800"}}, "400 No"), r"\\x1b\[2J\\ud800"),
    (http_answer(NESTED, "400 No"), r"\[\[\["),
    (http_answer({}, "302 Found\r\nLocation: http://192.0.2.1/"), "HTTP 302"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "broke off"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n{}", "broke off"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nab\r\n", "illegal chunk header"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 15 + b"\r\nab\r\n", "broke off"),
]


@pytest.mark.parametrize(("path", "content", "message"), [(MODELS, *raw) for raw in RAW] + [(COMPLETE, *RAW[0])])
def test_what_is_no_answer(path: str, content: bytes, message: str, serve: Callable[..., str]) -> None:
    with pytest.raises(PosttrainError, match=message):
        sample(serve({path: content}, closes=message == "broke off"))


@pytest.mark.parametrize("content", [content for content, _ in RAW[:2]])
def test_what_is_no_judgement(content: bytes, serve: Callable[..., str]) -> None:
    opinion = judge(serve({CHAT: content}))
    assert (opinion.value, opinion.failure) == (None, "crash")
    assert "is not JSON" in opinion.reason


OF_CHOICE = ("choices", 0)


@pytest.mark.parametrize(
    ("path", "place", "value"),
    [
        *((MODELS, ("data", 0, "max_model_len"), value) for value in ("64", -1, float("nan"))),
        (MODELS, ("data",), 7),
        *((COMPLETE, (*OF_CHOICE, "prompt_token_ids"), value) for value in (True, "56")),
        (COMPLETE, (*OF_CHOICE, "logprobs"), [-1.0]),
        *(
            (COMPLETE, (*OF_CHOICE, "logprobs", "token_logprobs", 0), value)
            for value in (-(10**400), -float("inf"), float("nan"), 0.5, False, None)
        ),
        *((COMPLETE, (*OF_CHOICE, "token_ids"), value) for value in ([True] * 4, [-1] * 4, [*IDS, 5], [])),
        (COMPLETE, ("choices",), [CHOICE, CHOICE]),
    ],
)
def test_an_answer_of_another_form(path: str, place: Any, value: Any, serve: Callable[..., str]) -> None:
    with pytest.raises(PosttrainError, match=r"^http://127\.0\.0\.1:\d+: (an answer that cannot be used|/v1/models)"):
        sample(serve({path: changed(path, place, value)}))


def test_a_reply_that_is_no_text(serve: Callable[..., str]) -> None:
    opinion = judge(serve({CHAT: changed(CHAT, (*OF_CHOICE, "message", "content"), ["a"])}))
    assert (opinion.value, opinion.failure) == (None, "crash")
    assert "choices.0.message.content: Input should be a valid string" in opinion.reason


@pytest.mark.parametrize("tokens", [float("inf"), -1, "3"])
def test_costs_that_are_no_numbers_of_tokens(tokens: Any, serve: Callable[..., str]) -> None:
    opinion = judge(serve({CHAT: changed(CHAT, ("usage", "completion_tokens"), tokens)}))
    assert (opinion.value, opinion.failure, opinion.tokens_out) == (None, "crash", 0)
    assert "unreadable response: usage.completion_tokens" in opinion.reason


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n" + b" " * 4000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 90,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 4000,
    ],
)
def test_an_answer_that_comes_drop_by_drop(answer: bytes, serve: Callable[..., str]) -> None:
    """Each piece comes well within the limit, and the whole never would."""
    with refuses(PosttrainError, "within 0.5 seconds"):
        sample(serve({MODELS: answer}, drip=0.02), timeout_seconds=0.5, retries=0)


def test_an_answer_without_an_end(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1 << 20)
    with refuses(PosttrainError, "larger than 1 MiB"):
        sample(serve({MODELS: http_answer(b" " * (2 << 20))}))


def test_a_server_that_closes_after_every_answer_has_its_time(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the time limit of a connection was is not that of the answers behind it."""
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.2)
    closing = {path: http_answer(body, "200 OK\r\nConnection: close") for path, body in GOOD.items()}
    ((completion,),) = sample(serve(closing, closes=True, before=0.5), retries=0)
    assert completion.ids == tuple(IDS)


@pytest.mark.parametrize("answer", [{}, [], {"world_size": "2"}, {"world_size": 0}, {"world_size": 10**30}])
def test_workers_that_nobody_has(answer: Any, serve: Callable[..., str]) -> None:
    url = serve({"/get_world_size": http_answer(answer)})
    with refuses(RunFailure, "/get_world_size: "):
        control(HttpServer(url, timeout_seconds=5, retries=0), "GET", WORKERS, read=read_num_workers)


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [1], "logprobs": {"top_logprobs": [{"token_id:1": -1.0}] * 3}},
        {"token_ids": [1], "logprobs": {"top_logprobs": [{"token_id:1": 10**400}]}},
        {"token_ids": [1] * 2000, "logprobs": {"top_logprobs": [{"token_id:1": -1.0}] * 2000}},
        {"token_ids": [float("inf")], "logprobs": {"top_logprobs": []}},
    ],
)
def test_scores_of_a_probe_at_no_place(choice: dict[str, Any]) -> None:
    with pytest.raises((Unreadable, OverflowError)):
        read_scores({"choices": [choice]}, [1, 2], 10)
