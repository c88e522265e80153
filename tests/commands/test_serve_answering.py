"""Batches, streams, ends of answers, records and access control of `posttrain serve`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import OF_EMBEDDED, approx
from posttrain.cli import main
from posttrain.commands.serve.answering import Answerer, AnswerJob, Recorder, ServedAnswer
from posttrain.commands.serve.requests import SamplingParams
from posttrain.runs.models import find_source
from posttrain.sampling.base import Conversation, Sampling
from posttrain.sampling.models import OpenedModel, open_model
from serving import free_port

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from posttrain.commands.serve.access import Access

PORT = 8000
PLAIN = SamplingParams()


@pytest.fixture(scope="module")
def opened() -> OpenedModel:
    return open_model(find_source("tiny", "runs"))


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), timeout=120))


def order(
    opened: OpenedModel, prompt: tuple[int, ...], seed: int = 0, limit: int = 12, temperature: float = 1.0
) -> AnswerJob:
    return AnswerJob("id", "completions", (prompt,), opened.sampling(limit, temperature), seed, PLAIN)


async def answer_to(answerer: Answerer, job: AnswerJob) -> ServedAnswer:
    (answer,) = answers = answerer.begin(job)
    await answerer.complete(answers)
    return answer


@dataclass
class Seen:
    """One generation of the engine: the rows that it began with, and those that joined."""

    began: list[Conversation]
    joined: list[Conversation] = field(default_factory=list)

    @property
    def rows(self) -> list[Conversation]:
        return [*self.began, *self.joined]


@pytest.fixture
def generations(opened: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The generations of the engine so far."""
    begin, seen = opened.engine.begin_generation, list[Seen]()

    def watch(prompts: Any, rows: Any, sampling: Any, *, slots: int) -> Any:
        generation = begin(prompts, rows, sampling, slots=slots)
        found, join = Seen(list(rows)), generation.join
        seen.append(found)

        def watch_join(prompts: Any, rows: Any) -> bool:
            has_joined = join(prompts, rows)
            if has_joined:
                found.joined += rows
            return has_joined

        generation.join = watch_join
        return generation

    monkeypatch.setattr(opened.engine, "begin_generation", watch)
    return seen


@pytest.fixture
def answerer(opened: OpenedModel) -> Iterator[Answerer]:
    with closing(Answerer(opened)) as answerer:
        yield answerer


def unending(opened: OpenedModel, limit: int) -> Sampling:
    return replace(opened.sampling(limit, 1.0), stop_ids=frozenset())


def test_complete_of_equal_options_shares_one_generation_and_changes_no_answer(
    opened: OpenedModel, generations: list[Seen], answerer: Answerer
) -> None:
    orders = [order(opened, (30 + i, 40), seed=i) for i in range(5)]
    other = order(opened, (50, 51), temperature=0.5)

    async def together() -> Any:
        left = asyncio.create_task(answer_to(answerer, orders[0]))
        working = [asyncio.create_task(answer_to(answerer, one)) for one in [*orders, other]]
        await asyncio.sleep(0)
        left.cancel()  # who hangs up is not answered
        return await asyncio.gather(*working)

    whole = run(together)
    assert len(generations) == 2
    assert max(len(one.rows) for one in generations) >= 5, "those of equal options in one batch"
    for answer, one in zip(whole, [*orders, other], strict=True):
        again = run(lambda one=one: answer_to(answerer, one))
        assert (answer.ids, answer.text, answer.finish) == (again.ids, again.text, again.finish)
        assert answer.logprobs == approx(again.logprobs, abs=OF_EMBEDDED)


def test_complete_beside_a_large_request_is_answered_before_it(
    opened: OpenedModel, generations: list[Seen], answerer: Answerer
) -> None:
    large = AnswerJob("id", "chat", ((30, 31),), unending(opened, 900), 0, SamplingParams(n=64))
    small = order(opened, (40, 41), limit=5)

    async def work() -> tuple[ServedAnswer, list[ServedAnswer]]:
        answers = answerer.begin(large)
        working = asyncio.create_task(answerer.complete(answers))
        while not any(answer.ids for answer in answers):
            await asyncio.sleep(0.01)
        answer = await answer_to(answerer, small)
        assert not working.done()
        working.cancel()
        return answer, answers

    answer, answers = run(work)
    assert answer.finish is not None
    assert [len(one.rows) for one in generations] == [64, 1]
    assert sum(len(one.ids) for one in answers) < 64 * 900 / 2, "it had a turn long before the large one was over"


def test_complete_joins_a_generation_at_work(opened: OpenedModel, generations: list[Seen], answerer: Answerer) -> None:
    long = AnswerJob("id", "chat", ((30, 31),), unending(opened, 200), 0, PLAIN)
    short = AnswerJob("id", "chat", ((40, 41, 42),), unending(opened, 20), 1, PLAIN)

    async def work() -> list[ServedAnswer]:
        (first,) = answers = answerer.begin(long)
        working = asyncio.create_task(answerer.complete(answers))
        while not first.ids:
            await asyncio.sleep(0.001)
        second = await answer_to(answerer, short)
        await working
        return [first, second]

    answers = run(work)
    assert [len(answer.ids) for answer in answers] == [200, 20]
    assert [(len(one.began), len(one.joined)) for one in generations] == [(1, 1)]
    alone = [run(lambda job=job: answer_to(answerer, job)) for job in (long, short)]
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]


def test_complete_whose_client_left_ends_at_once_and_the_others_are_complete(
    opened: OpenedModel, generations: list[Seen], answerer: Answerer
) -> None:
    jobs = [AnswerJob("id", "chat", ((30, 31 + i),), unending(opened, 900), i, PLAIN) for i in range(2)]

    async def work() -> None:
        left = [asyncio.create_task(answer_to(answerer, job)) for job in jobs]
        while not (generations and all(row.ids for row in generations[0].rows)):
            await asyncio.sleep(0.001)
        for task in left:
            task.cancel()
        answer = await answer_to(answerer, order(opened, (30, 31), limit=4, temperature=0.0))
        assert len(answer.ids) == 4 or answer.finish == "stop"

    run(work)
    assert all(len(row.ids) < 900 for row in generations[0].rows)


def test_stream_that_is_left_ends_its_work_and_others_take_turns(
    opened: OpenedModel, generations: list[Seen], answerer: Answerer
) -> None:
    job = order(opened, (30, 31), limit=400)
    (answer,) = answerer.begin(replace(job, sampling=replace(job.sampling, stop_ids=frozenset())))

    async def work() -> None:
        stream = answerer.stream(answer)
        async for _ in stream:
            if len(answer.ids) == 3:
                await answer_to(answerer, order(opened, (40, 41)))  # a whole answer, in the middle of the stream
            if len(answer.ids) == 5:
                break
        await stream.aclose()
        await answer_to(answerer, order(opened, (40, 41)))

    run(work)
    assert len(answer.ids) == 5
    assert len(generations[0].rows[0].ids) < 400, "nobody reads on"


def test_complete_ends_a_row_at_its_stop_text(opened: OpenedModel, generations: list[Seen], answerer: Answerer) -> None:
    plain = AnswerJob("id", "chat", ((30, 31),), unending(opened, 300), 0, PLAIN)
    whole = run(lambda: answer_to(answerer, plain))
    stop = whole.text[4:7]
    stopped = run(lambda: answer_to(answerer, replace(plain, body=SamplingParams(stop=stop))))
    assert stopped.finish == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert len(generations[-1].rows[-1].ids) < 50, "the engine does not go on"


def test_complete_after_an_error_of_the_engine_answers_the_next(
    opened: OpenedModel, answerer: Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = opened.engine.begin_generation

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("a bug of a model's code")

    monkeypatch.setattr(opened.engine, "begin_generation", fail)
    with pytest.raises(KeyError):
        run(lambda: answer_to(answerer, order(opened, (30, 31))))
    monkeypatch.setattr(opened.engine, "begin_generation", begin)
    assert run(lambda: answer_to(answerer, order(opened, (30, 31)))).finish is not None


def test_complete_waits_for_memory_that_others_hold(
    opened: OpenedModel, generations: list[Seen], answerer: Answerer
) -> None:
    answerer.turns._budget = 1000  # tokens
    jobs = [AnswerJob("id", "chat", ((30, 31 + i),), unending(opened, 400), i, PLAIN) for i in range(4)]

    async def work() -> list[ServedAnswer]:
        working = [asyncio.create_task(answer_to(answerer, job)) for job in jobs]
        most = 0
        while not all(task.done() for task in working):
            most = max(most, sum(row.finish is None for one in generations for row in one.rows))
            await asyncio.sleep(0.001)
        assert 1 <= most <= 2
        return await asyncio.gather(*working)

    assert [len(answer.ids) for answer in run(work)] == [400] * 4


class Bytes:
    """A token is a byte of UTF-8; 256 is the end."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


ENDING = Sampling(99, stop_ids=frozenset({256}))


@given(st.lists(st.sampled_from(["<tool>", "</tool>", "<", "<to", "a", "ool>", "x"]), max_size=8).map("".join))
def test_text_from_a_call_on_is_reported_with_the_last_token(text: str) -> None:
    answer = ServedAnswer(Bytes(), AnswerJob("", "chat", (), ENDING, 0, PLAIN, call_tag="<tool>"))
    tokens = [*text.encode(), 256]
    output = [answer.push(token, 0.0, is_last=i == len(tokens)) for i, token in enumerate(tokens, start=1)]
    assert "".join(output) == answer.text == text
    before = text.partition("<tool>")[0]
    assert "".join(output[:-1]) == before[: len("".join(output[:-1]))]
    held = len(before) - len("".join(output[:-1]))
    assert held < len("<tool>"), "no more is held back than may be the beginning of a call"
    if "<tool>" in text:
        assert held == 0


@settings(max_examples=200)
@given(
    st.text(alphabet="abé🎈 \n", max_size=24),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    st.booleans(),
)
def test_an_answer_ends_before_the_first_stop_text(text: str, stops: list[str], is_cut: bool) -> None:
    ids = list(text.encode())[: -1 if is_cut else None]
    answer = ServedAnswer(Bytes(), AnswerJob("", "chat", (), ENDING, 0, SamplingParams(stop=stops), opening="<"))
    message = []
    tokens = [*ids, 256]
    for place, token in enumerate(tokens):
        message.append(answer.push(token, -0.5, is_last=place == len(tokens) - 1))
        if answer.finish:
            break
    whole = bytes(ids).decode(errors="replace")
    places = [whole.find(stop) for stop in stops if stop in whole]
    wanted = whole[: min(places)] if places else whole
    # of several, the one that is complete first ends it
    assert "".join(message) == answer.text[1:]
    assert whole.startswith(answer.text[1:])
    assert answer.finish == "stop"
    assert not any(stop in answer.text[1:] for stop in stops)
    assert len(answer.text[1:]) >= len(wanted)
    assert answer.ids == tokens[: len(answer.ids)]
    if not places:
        assert (answer.text[1:], answer.ids) == (whole, tokens)


def ask(gate: Access, headers: dict[str, str], method: str = "GET") -> tuple[int, dict[str, Any]]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    run(lambda: gate({"type": "http", "method": method, "path": "/v1/models", "headers": raw}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body or b"{}")


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


HERE = {"host": f"127.0.0.1:{PORT}"}


def test_access_with_a_key_admits_who_sends_it() -> None:
    gate = Access(fine, "0.0.0.0", "a-key-that-nobody-guesses")
    for sent in ("", "Bearer wrong", "a-key-that-nobody-guesses"):
        status, body = ask(gate, HERE | {"authorization": sent})
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    headers = {"host": "my-machine", "authorization": "Bearer a-key-that-nobody-guesses"}
    assert ask(gate, headers)[0] == 200


def test_serve_with_api_key_refuses_who_does_not_send_it_and_does_not_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    key, port, served = "a-key-that-nobody-guesses", free_port(), list[Any]()
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(self.config.app))
    assert main(["serve", "tiny", "--port", str(port), "--api-key", key, "--runs-dir", str(tmp_path)]) == 0
    here = {"host": f"127.0.0.1:{port}"}
    for sent in ({}, {"authorization": "Bearer wrong"}, {"authorization": key}):
        status, body = ask(served[0], here | sent)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert ask(served[0], here | {"authorization": f"Bearer {key}"})[0] == 200
    shown = capsys.readouterr()
    assert f":{port}/v1" in shown.out
    assert key not in shown.out + shown.err, "who gave a key has it"


def test_recorded_answers_are_whole_lines_after_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"id": "first"}\n{"id": "to')
    answer = ServedAnswer(Bytes(), AnswerJob("second", "chat", (), ENDING, 5, PLAIN), (1, 2))
    answer.push(97, -0.5, is_last=True)
    recorder = Recorder(path, "tiny")
    recorder.add(0, answer)
    num_open = len(os.listdir("/proc/self/fd"))
    recorder.close()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["first", "second"]
    assert (lines[1]["ids"], lines[1]["logprobs"], lines[1]["text"], lines[1]["seed"]) == ([97], [-0.5], "a", 5)
