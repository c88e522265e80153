"""Bodies that no client should send to `posttrain serve`: each is answered or refused, and the server never fails."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served, serving_here

TURNS = [{"role": "user", "content": "Eva has 3 shells."}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"a": {"b": 1}}}}
USUAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [*TURNS, {"role": "assistant", "content": [{"type": "text", "text": "3"}]}, *TURNS],
        "model": "tiny", "temperature": 1.0, "top_p": 0.9, "top_k": 5, "n": 1, "max_tokens": 1, "seed": 1,
        "stop": ["x"], "stop_token_ids": [3], "tools": [TOOL], "tool_choice": "auto", "logprobs": True,
        "stream_options": {"include_usage": True}, "metadata": {"a": "b"}, "logit_bias": {}, "user": "me",
    },
    "/v1/completions": {"prompt": "Eva", "max_tokens": 1, "seed": 1, "logprobs": 0, "n": 1, "stop": "x"},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "seed": 1, "logprobs": 1}},
    "/tokenize": {"messages": TURNS, "tools": [TOOL], "add_special_tokens": True},
}  # fmt: skip
LONE = "\ud800"
STRANGE: list[Any] = [
    LONE, f"a{LONE}", "\udfff\ud800", "\x00", "\u202e\u2028", "x" * 3000, "", None, True, -1, 0, 2**31, 2**63, 2**64,
    10**400, -(10**400), 1e308, 5e-324, -0.0, float("nan"), float("inf"), [], {}, [[]], {"": None}, {LONE: 1}, [LONE],
    [None], {"role": LONE, "content": LONE}, "null", "1e999", "{{x}}", "{% for a in b %}", "<|im_end|>",
]  # fmt: skip
NAMES = [LONE, "\x00", "", "self", "__class__"]
TEXTS = [
    b"", b" ", b"null", b"1", b"[]", b'"x"', b"{", b'{"a":1', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"\\ud800":1}',
    b'{"\\ud800\\ud800":{"\\udc00":1}}', b'{"prompt":"a","prompt":"b","max_tokens":1}', b'{"max_tokens":1e999}',
    b'{"prompt":"a","seed":NaN}', b'{"prompt":"a","temperature":Infinity}',
    b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", b'{"prompt":"a\x00"}',
    b'{"prompt":"a","n":1.0000000000000000001,"max_tokens":1}', '{"prompt":"a"}'.encode("utf-16"),
    b'{"prompt":' + b"[" * 2000 + b"]" * 2000 + b"}", b'{"a":' * 5000 + b"1" + b"}" * 5000, b"{" * 100_000,
    b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", b'{"prompt":"' + b"\xed\xa0\x80" + b'"}',
    b'{"user":"\\ud800","prompt":"a","max_tokens":1}', b'{"__class__":1}', b'{"self":1}', b'{"model_config":1}',
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving_here("tiny", "--runs-dir", str(folder), "--record", str(folder / "all.jsonl")) as server:
        yield server


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every value inside."""
    if above:
        yield above
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*above, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from places(value[index], (*above, index))


def changed(body: dict[str, Any], way: tuple[Any, ...], value: Any, *, as_key: bool) -> dict[str, Any] | None:
    """The body with another value at the end of a way, or with another name there."""
    body = copy.deepcopy(body)
    inner: Any = body
    for part in way[:-1]:
        inner = inner[part]
    if not as_key:
        inner[way[-1]] = value
    elif isinstance(inner, dict) and isinstance(value, str):
        inner[value] = inner.pop(way[-1])
    else:
        return None
    return body


def check(served: Served, path: str, body: Any, **headers: str) -> int:
    """Ask, and return the status; a refusal is JSON that says what is wrong."""
    status, content = served.fetch(path, body, **headers)
    answer = json.loads(content)
    assert status < 500, (path, body, answer)
    if status != 200:
        assert status >= 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].strip()
        content.decode().encode()
    return status


@pytest.mark.parametrize("path", USUAL)
def test_any_value_and_any_name_in_a_body_is_answered_or_refused(served: Served, path: str) -> None:
    assert check(served, path, USUAL[path]) == 200
    statuses = set()
    for way in places(USUAL[path]):
        bodies = [changed(USUAL[path], way, value, as_key=False) for value in STRANGE]
        bodies += [changed(USUAL[path], way, name, as_key=True) for name in NAMES]
        statuses |= {check(served, path, body) for body in bodies if body is not None}
    assert statuses == {200, 400, 404} or statuses == {200, 400}
    assert check(served, path, USUAL[path]) == 200, "it still answers"


@pytest.mark.parametrize("path", USUAL)
def test_any_text_as_a_body_is_refused_or_answered(served: Served, path: str) -> None:
    statuses = [check(served, path, text) for text in TEXTS]
    assert statuses[TEXTS.index(b'{"\\ud800":1}')] == 400
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "\xff", ""):
        assert check(served, path, json.dumps(USUAL[path]).encode(), **{"Content-Type": kind}) in (200, 400, 415)


@pytest.mark.parametrize("path", USUAL)
def test_lone_surrogate_is_named_in_a_clear_refusal(served: Served, path: str) -> None:
    for body in ({LONE: 1}, USUAL[path] | {LONE: 1}, USUAL[path] | {"model": LONE}):
        status, answer = served.ask(path, body)
        assert status == 400
        assert "surrogate" in answer["error"]["message"]


@pytest.mark.parametrize("value", [LONE, {LONE: 1}, [None], 10**400, "x"])
def test_stream_of_a_strange_body_is_refused_before_it_begins(served: Served, value: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        for key in ("stop", "stream_options", "stream"):
            status, content = served.fetch(path, USUAL[path] | {"stream": True, key: value})
            assert status in (200, 400), content


def test_strange_paths_and_methods_are_refused(served: Served) -> None:
    for path in (
        "/",
        "/%00",
        "/v1/models/%ed%a0%80",
        "/v1/" + "x" * 5000,
        "/v1/models?a=%ff",
        "//evil.example/v1/models",
    ):
        status, _ = served.fetch(path)
        assert status in (200, 400, 404), path
    assert served.fetch("/v1/models", {})[0] == 405
    assert served.fetch("/v1/completions")[0] == 405
