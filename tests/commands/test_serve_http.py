"""`posttrain serve` over a real socket: the same answers as everywhere else in the package, in OpenAI's forms."""

from __future__ import annotations

import http.client
import json
import math
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import OF_EMBEDDED, approx
from posttrain.cli import main
from posttrain.data.render import decode_response, encode_prompt
from posttrain.randomness import derive_key
from posttrain.runs.models import find_source
from posttrain.sampling.judge_questions import ask_score
from posttrain.sampling.llm_judge import Judge
from posttrain.sampling.models import OpenedModel, open_model
from posttrain.sampling.vllm.server import served_names
from posttrain.types import Completion, Message
from serving import Served, free_port, serving, serving_here

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

QUESTION = "Eva starts with 19 shells. She finds 12 at the beach. How many does she have?"
TURNS = [{"role": "user", "content": QUESTION}]
DEEP_TOOL = b'{"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]}' % (
    b"[" * 900 + b"]" * 900
)
CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder, "tiny", "--record", "asked/all.jsonl") as server:
        yield server
        assert server.process is not None
        server.process.send_signal(signal.SIGINT)
        out, _ = server.process.communicate(timeout=120)
        assert (server.process.returncode, out) == (0, ""), "Ctrl-C ends it"


@pytest.fixture(scope="module")
def opened() -> OpenedModel:
    return open_model(find_source("tiny", "runs"))


def sample(opened: OpenedModel, prompt: list[int], seed: int, temperature: float, limit: int) -> list[Completion]:
    keys = [derive_key(seed, "generate", i) for i in range(2)]
    return opened.engine.generate([prompt], [keys], opened.sampling(limit, temperature))[0]


def chat_prompt(opened: OpenedModel) -> list[int]:
    return encode_prompt(opened.tokenizer, opened.grader.template, [Message("user", QUESTION)])


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_answers_are_those_of_generate(served: Served, opened: OpenedModel, temperature: float) -> None:
    prompt = chat_prompt(opened)
    wanted = sample(opened, prompt, 7, temperature, 40)
    request = {"messages": TURNS, "temperature": temperature, "seed": 7, "max_tokens": 40, "n": 2, "logprobs": True}
    status, answer = served.ask(CHAT, request | {"return_token_ids": True, "model": "tiny"})
    assert status == 200
    (card,) = served.ask("/v1/models")[1]["data"]
    assert (card["id"], card["max_model_len"]) == (answer["model"], 1024)
    assert card["id"] == served_names("tiny")[0]
    assert card["id"] in served.first_line
    template = opened.grader.template
    for choice, own in zip(answer["choices"], wanted, strict=True):
        assert choice["message"]["content"] == decode_response(opened.tokenizer, template, own.ids)
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (list(own.ids), prompt)
        assert choice["finish_reason"] == own.finish
        output = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert output == approx(list(own.logprobs), abs=OF_EMBEDDED)
    num_sampled = sum(len(own.ids) for own in wanted)
    counts = {"prompt_tokens": len(prompt), "completion_tokens": num_sampled}
    assert answer["usage"] == counts | {"total_tokens": len(prompt) + num_sampled}


def test_an_evaluation_over_http_equals_one_in_process(served: Served, folder: Path) -> None:
    options = {"--task": "stories", "--limit": "6", "--max-tokens": "24", "--runs-dir": str(folder)}
    request = ["evaluate", "tiny", *(word for pair in options.items() for word in pair)]
    assert main([*request, "--out", str(folder / "native")]) == 0
    over_http = ["--engine", "vllm", "--engine.url", served.url]
    assert main([*request, "--out", str(folder / "http"), *over_http]) == 0
    items = [(folder / name / "items.jsonl").read_text() for name in ("native", "http")]
    assert items[0] == items[1]
    assert len(items[0].splitlines()) == 6


def test_token_ids_in_and_out_with_log_probabilities_of_a_forward_pass(served: Served, opened: OpenedModel) -> None:
    prompt = chat_prompt(opened)
    params = {"max_tokens": 12, "seed": 3, "temperature": 0.8, "logprobs": 1, "skip_special_tokens": False}
    status, answer = served.ask(GENERATE, {"token_ids": prompt, "sampling_params": params})
    assert status == 200
    (choice,) = answer["choices"]
    ids = choice["token_ids"]
    assert ids == list(sample(opened, prompt, 3, 0.8, 12)[0].ids)
    with torch.no_grad():
        logits = opened.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    wanted = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    content = choice["logprobs"]["content"]
    assert [token["token"] for token in content] == [f"token_id:{i}" for i in ids]
    assert [token["logprob"] for token in content] == approx(wanted.tolist(), abs=OF_EMBEDDED)
    assert answer["request_id"]


@pytest.mark.parametrize(
    "more", [{}, {"stop": ["</think>", " the"]}, {"stop": "9", "temperature": 0}, {"logprobs": True}]
)
def test_a_stream_states_what_a_whole_answer_states(served: Served, more: dict[str, Any]) -> None:
    request = {"messages": TURNS, "temperature": 1.5, "seed": 11, "max_tokens": 60, "n": 2, "return_token_ids": True}
    request |= more
    _, whole = served.ask(CHAT, request)
    events = served.events(CHAT, request | {"stream_options": {"include_usage": True}})
    assert events.pop()["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(piece["delta"]["content"] for piece in own) == choice["message"]["content"]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert [i for piece in own for i in piece.get("token_ids", [])] == choice["token_ids"]
        for stop in request.get("stop", []):
            assert stop not in choice["message"]["content"].removeprefix("<think>")
        if "logprobs" in more:
            pieces = [entry for piece in own if piece["logprobs"] for entry in piece["logprobs"]["content"]]
            for output, wanted in zip(pieces, choice["logprobs"]["content"], strict=True):
                assert output["logprob"] == approx(wanted["logprob"], abs=OF_EMBEDDED)


def test_a_conversation_and_its_tokens(served: Served, opened: OpenedModel) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "<answer> And 4?"},
    ]
    messages = [Message("system", "Be brief."), Message("user", "What is 2 + 3?")]
    messages += [Message("assistant", "5"), Message("user", "<answer> And 4?")]
    wanted = encode_prompt(opened.tokenizer, opened.grader.template, messages)
    output = served.ask("/tokenize", {"messages": turns})[1]
    assert output == {"count": len(wanted), "max_model_len": 1024, "tokens": wanted}
    answer = served.ask(CHAT, {"messages": turns, "temperature": 0, "max_tokens": 4})[1]
    assert answer["usage"]["prompt_tokens"] == len(wanted)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (CHAT, {"messages": TURNS, "temprature": 0}, 400, "temprature", "'temperature'"),
        (CHAT, {"messages": TURNS, "temperature": -1}, 400, "temperature", "equal to 0"),
        (CHAT, {"messages": TURNS, "seed": "x"}, 400, "seed", "valid integer"),
        (CHAT, {"messages": TURNS, "presence_penalty": 0.5}, 400, "presence_penalty", "or give 0"),
        (CHAT, {"messages": TURNS, "model": "gpt-5"}, 404, "model", "'gpt-5'"),
        (CHAT, {"messages": []}, 400, "messages", "list of messages"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, "surrogate"),
        (CHAT, {}, 400, "messages", "required"),
        (CHAT, b"[" * 100_000, 400, None, "not JSON"),
        (CHAT, DEEP_TOOL, 400, None, "nested too deeply"),
        (COMPLETE, {"prompt": "x " * 3000}, 400, None, "maximum context length"),
        (COMPLETE, {"prompt": [9_999]}, 400, None, "token id 9999"),
        (GENERATE, {"token_ids": [5], "sampling_params": {"bad_words": ["a"]}}, 400, "bad_words", "not supported"),
        ("/v1/chat/completion", {}, 404, None, "/v1/chat/completions"),
        (CHAT, b" " * 1_000_001, 413, None, "than 1,000,000 bytes"),
    ],
)
def test_what_cannot_be_answered_is_reported_in_openais_form(
    served: Served, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    output, answer = served.ask(path, body)
    assert output == status, answer
    error = answer["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_answers_are_recorded_with_ids_and_log_probabilities(served: Served, folder: Path) -> None:
    request = {"prompt": "Eva \u001b[2J has", "seed": 21, "max_tokens": 8, "n": 2, "return_token_ids": True}
    request["logprobs"] = 0
    _, whole = served.ask(COMPLETE, request)
    served.events(COMPLETE, request | {"n": 1})
    text = (folder / "asked" / "all.jsonl").read_text()
    assert text.isprintable() or all(c == "\n" or c.isprintable() for c in text)
    lines = [json.loads(line) for line in text.splitlines()]
    own = [line for line in lines if line["id"] == whole["id"]]
    assert [line["index"] for line in own] == [0, 1]
    for line, choice in zip(own, whole["choices"], strict=True):
        assert (line["ids"], line["prompt_ids"]) == (choice["token_ids"], choice["prompt_token_ids"])
        assert line["logprobs"] == choice["logprobs"]["token_logprobs"]
        assert (line["text"], line["finish"], line["seed"]) == (choice["text"], choice["finish_reason"], 21)
        assert line["sampling"] == {"max_tokens": 8, "temperature": 1.0, "top_k": None, "top_p": 1.0}
        assert all(math.isfinite(number) for number in line["logprobs"])
    assert lines[-1]["ids"] == own[0]["ids"], "a stream is recorded too"
    assert lines[-1]["logprobs"] == approx(own[0]["logprobs"], abs=OF_EMBEDDED)


def test_a_judge_asks_our_own_server(served: Served, folder: Path) -> None:
    """``tiny`` is no judge, but it is asked as one: its reply is read, recorded and paid for."""
    opinions = Judge(served.url, structured=False, max_tokens=12, retries=0)
    (output,) = opinions.ask([ask_score(QUESTION, "31", rubric="Is it right?", scale=(1, 10))])
    assert (output.value, output.failure) == (None, "crash")
    assert "the reply is not JSON: '<think>" in output.reason
    line = json.loads((folder / "asked" / "all.jsonl").read_text().splitlines()[-1])
    assert (output.tokens_in, output.tokens_out) == (len(line["prompt_ids"]), len(line["ids"]))
    (output,) = Judge(served.url, max_tokens=12).ask([ask_score(QUESTION, "31", rubric="Is it?", scale=(1, 10))])
    assert "set judge.structured to false" in output.reason


def test_mistakes_end_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def output(*arguments: str) -> str:
        assert main(["serve", *arguments, "--runs-dir", str(tmp_path)]) == 2
        return capsys.readouterr().err

    for host in ("0.0.0.0", "::", "my-machine"):
        assert "add --api-key" in output("tiny", "--host", host)
    assert "16 to 256 letters" in output("tiny", "--api-key", "short")
    assert "no/such/model" in output("no/such/model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}: cannot listen" in output("tiny", "--port", port)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.chdir(tmp_path)
    assert "is not a folder" in " ".join(usage_error("serve", "tiny", "--record", "file/x", capsys=capsys).split())
    for package in ("uvicorn", "starlette"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            patch.setitem(sys.modules, f"{package}.applications", None)
            patch.delitem(sys.modules, "posttrain.commands.serve.application", raising=False)
            assert f"needs the package '{package}'" in output("tiny", "--port", str(free_port()))


def usage_error(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err


def unfinished_head(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1")
    return connection


def test_unfinished_heads_hold_nobody_and_are_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from posttrain.commands.serve import limits

    monkeypatch.setattr(limits, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 20)
    with serving_here("tiny", "--max-requests", "4", "--runs-dir", str(tmp_path)) as server:
        heads = [unfinished_head(server.port) for _ in range(30)]  # ten of them make room for the others
        assert server.ask("/v1/models")[0] == 200
        for head in heads:
            with suppress(ConnectionResetError):
                assert head.recv(100) == b""
        used = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        used.sendall(f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(b"}"):
            answer += used.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 200")
        used.sendall(b"GET /v1")  # a second head, which does not end, on a connection that was used
        assert used.recv(100) == b""


@pytest.mark.parametrize("protocol", [(), ("--train",)])
def test_bodies_that_stop_arriving_hold_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: tuple[str, ...]
) -> None:
    """Two bodies that never end take the two places of the server, for a second."""
    from posttrain.commands.serve import limits

    monkeypatch.setattr(limits, "SILENT_SECONDS", 1.0)
    path = "/v1/completions"
    if protocol:
        path = "/api/v1/create_session"
    with serving_here("tiny", "--max-requests", "2", "--runs-dir", str(tmp_path), *protocol) as server:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 100\r\n\r\n{{"
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(2)]
        for connection in slow:
            connection.sendall(head.encode())
        for connection in slow:
            answer = b""
            while part := connection.recv(10_000):
                answer += part
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"too_slow" in answer
        assert server.ask(path, {"prompt": "a", "max_tokens": 1} if not protocol else {})[0] == 200


def test_requests_above_the_limit_are_told_to_try_again(tmp_path: Path) -> None:
    unending = {"prompt": [30, 31], "max_tokens": 900, "n": 16, "ignore_eos": True}
    with serving_here("tiny", "--max-requests", "1", "--runs-dir", str(tmp_path)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", COMPLETE, json.dumps(unending).encode())
        deadline = time.monotonic() + 30
        while server.ask("/v1/models")[0] == 200:
            assert time.monotonic() < deadline
        status, body = server.ask("/v1/models")
        assert (status, body["error"]["code"]) == (503, "server_busy")
        connection.close()  # who leaves makes room
        while server.ask("/v1/models")[0] != 200:
            assert time.monotonic() < deadline


def test_prompt_beyond_the_context_is_refused_without_being_read(served: Served) -> None:
    status, body = served.ask(COMPLETE, {"prompt": "a b c d " * 110_000, "max_tokens": 1})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    status, body = served.ask(CHAT, {"messages": [{"role": "user", "content": "a b c d " * 110_000}]})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "more than" in body["error"]["message"], "its tokens were not counted"
