"""The studio without a browser: replies, rewards, rollouts, and what it refuses."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain import untrusted
from posttrain.cli import main
from posttrain.commands.chat import studio
from posttrain.commands.chat.conversation import Controls
from posttrain.commands.chat.fields import NOBODY, read_chat, read_number, read_whole
from posttrain.commands.chat.studio import TRAINING, Library, Side, stream_replies
from posttrain.errors import UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.sections import Component
from posttrain.runs.models import find_source
from posttrain.sampling.models import open_model
from posttrain.types import Example, Finish
from refusing import refuses
from serving import Served, serving_here
from studio_runs import make_runs, recorded_posts

QUESTION = "A cup costs 3 coins. Eva buys 4 cups. How many coins does she pay?"
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with serving_here("tiny", "--runs-dir", str(runs), command="studio") as server:
        yield server


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    opened = open_model(find_source(str(TINY), "runs"), Component(name="r1_zero", preamble=""))
    monkeypatch.setattr(studio, "open_model", lambda source: opened)
    monkeypatch.setattr(studio, "say_template", lambda source: None)
    return Library(["one", "two"], tmp_path)


def last(library: Library, sides: Sequence[Side] | None, models: list[str], judge: str = NOBODY, **controls: float):
    *_, sides = stream_replies(library, sides, QUESTION, models, Controls(**controls), judge=judge)
    return sides


def test_two_models_answer_in_steps_and_keep_their_conversations(library: Library) -> None:
    greedy = Controls(temperature=0.0, max_tokens=6)
    lengths = [
        len(sides[0].conversation.logprobs) for sides in stream_replies(library, None, QUESTION, ["one", "two"], greedy)
    ]
    assert lengths == sorted(lengths)
    assert len(lengths) >= 2
    sides = last(library, None, ["one", "two"], temperature=0.0, max_tokens=6)
    first, second = (side.conversation for side in sides)
    assert first.text == second.text
    assert first.text.startswith("<think>")
    assert f"{len(first.logprobs)} tokens, mean log-probability" in sides[1].info
    again = last(library, sides, ["one", "two"], temperature=0.0, max_tokens=6)
    assert again[0] is sides[0]
    assert [m.role for m in again[0].conversation.messages] == ["user", "assistant"] * 2
    (fresh,) = last(library, again, ["one", "(none)"], max_tokens=2)
    assert len(fresh.history) == 2


def test_reply_that_fails_states_why_and_a_reward_stands_in_the_facts(library: Library) -> None:
    *_, (side,) = stream_replies(library, None, "word " * 3000, ["one"], Controls(max_tokens=2))
    assert "no room" in side.info or "context" in side.info

    def score(examples: Sequence[Example], texts: Sequence[str], finishes: Sequence[Finish]) -> list[float]:
        assert examples[0].messages[-1].content == QUESTION
        return [0.25]

    library.reward_model = lambda name: SimpleNamespace(score=score)  # type: ignore[assignment]
    (side,) = last(library, None, ["one"], judge="rm", max_tokens=3)
    assert side.info.endswith(", reward 0.250")
    library.reward_model = lambda name: SimpleNamespace(score=lambda *about: [None])  # type: ignore[assignment]
    (side,) = last(library, None, ["one"], judge="rm", max_tokens=3)
    assert side.info.endswith(", no reward")


@pytest.mark.parametrize(
    ("models", "judge", "steering"),
    [
        (["../secret"], "(none)", ("(none)", "", "left")),
        (["one"], "../secret", ("(none)", "", "left")),
        (["one"], "(none)", ("../secret", "1=2", "left")),
    ],
)
def test_names_that_are_not_offered_are_refused(
    models: list[str], judge: str, steering: tuple[str, str, str], tmp_path: Path
) -> None:
    library = Library([], tmp_path)
    models = models if models != ["one"] else ["tiny"]
    with refuses(UsageError, "on this page"):
        list(stream_replies(library, None, QUESTION, models, Controls(max_tokens=1), judge=judge, steering=steering))


def test_answer_without_a_model_or_a_text_is_refused(library: Library) -> None:
    with refuses(UsageError, "model"):
        list(stream_replies(library, None, QUESTION, [NOBODY], Controls()))
    with refuses(UsageError, "some text"):
        list(stream_replies(library, None, " \n", ["one"], Controls()))


def test_rollouts_are_rows_by_step_kind_and_text(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(["given"], runs)
    steps = {"odd": 2, "rl": 2, "sft": 1}
    places = {f"{run}, step {n}": str(runs / run / "checkpoints" / f"step-{n:06d}") for run, n in steps.items()}
    names = ["given", "odd", "odd, step 2", "rl", "rl, step 2", "sft", "sft, step 1", "tiny", "tiny-sft"]
    assert library.models() == {name: places.get(name, name) for name in names}
    assert set(library.snapshots(trains_scorer=True)) == {"judge", "judge, step 1"}
    rows = library.rollouts("rl", TRAINING, 1, "")
    assert len(rows) == 6
    assert {row[0] for row in rows} == {1}
    assert [row[0] for row in library.rollouts("rl", TRAINING, None, "")] == [2] * 6 + [1] * 6
    assert len(library.rollouts("rl", "evaluation", 2, "")) == 4
    assert 1 <= len(library.rollouts("rl", TRAINING, 1, rows[0][1][:30])) <= 6
    assert library.rollouts("rl", TRAINING, 1, EVIL) == []
    with refuses(UsageError, "unknown run"):
        library.rollouts("../rl", TRAINING, 1, "")
    monkeypatch.setattr(untrusted, "MAX_SHOWN", 40)
    assert "characters are left out here" in library.rollouts("rl", TRAINING, 1, "")[0][1]
    with refuses(UsageError, "has no rollouts"):
        library.rollouts("sft", TRAINING, 1, "")


def test_mistakes_end_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "my-machine"):
        assert main(["studio", "--host", host]) == 2
        assert "--token" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["studio", "--port", port, "--runs-dir", str(tmp_path)]) == 2
    assert f"port {port}: cannot listen" in capsys.readouterr().err


def test_page_is_served_without_api_and_shows_every_control(served: Served) -> None:
    status, config = served.ask("/config")
    assert status == 200
    assert {one["api_visibility"] for one in config["dependencies"]} == {"private"}
    shown = {one["props"].get("label"): one["props"] for one in config["components"]}
    assert {"model", "second model", "reward model", "sparse autoencoder", "run", "left: tiny"} <= set(shown)
    assert not shown["right: (none)"]["visible"]
    assert "How many coins" in shown["your message (Enter sends it)"]["value"]
    assert shown["left: tiny"]["buttons"] == [], "none uploads a conversation"


@pytest.mark.parametrize("path", ["file=/etc/passwd", "file=pyproject.toml", "upload_progress"])
def test_page_gives_no_file(served: Served, path: str) -> None:
    assert served.fetch(f"/gradio_api/{path}")[0] in (403, 404, 422)


def test_page_takes_no_file(served: Served) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nabc\r\n--x--\r\n'
    status, _ = served.fetch("/gradio_api/upload", body, **{"Content-Type": "multipart/form-data; boundary=x"})
    assert status == 413


JSON = {"Content-Type": "application/json"}


def post(served: Served, data: dict[str, Any], session: str) -> list[Any]:
    """Post what a browser posted; returns what its page was told to show at the end."""
    status, _ = served.ask("/gradio_api/queue/join?", data | {"session_hash": session}, **JSON)
    assert status == 200
    _, content = served.fetch(f"/gradio_api/queue/data?session_hash={session}")
    events = [json.loads(line.removeprefix("data: ")) for line in content.decode().splitlines() if line]
    (end,) = [event for event in events if event["msg"] == "process_completed"]
    assert end["success"], end
    shown = [event["output"]["data"] for event in events if event["msg"] == "process_generating"]
    return [*shown, end["output"]["data"]][0]


@pytest.mark.parametrize("part", ["chat", "two models", "rollouts"])
def test_everything_that_a_browser_posts_is_answered(served: Served, part: str) -> None:
    """The posts were recorded in chromium: null for a box that was never shown, and for a number that was cleared."""
    posts = recorded_posts(part)
    assert part != "chat" or sum(None in one["post"]["data"][1:] for one in posts) >= 2
    shown = {one["doing"]: post(served, one["post"], f"session-of-{part[:3]}") for one in posts}  # the last of each
    for doing, wanted in SHOWN.items():
        assert doing not in shown or any(wanted in str(value) for value in shown[doing]), (doing, shown[doing])


SHOWN = {
    "temperature (0: greedy) is -1": "temperature: '-1'",
    "top p is 2": "top p: '2'",
    "seed is 1.5": "seed: '1.5'",
    "nothing to send": "needs some text",
    "features without a dictionary": "select a dictionary",
    "features that are none": "steering:",
    "run chosen": "12 rollouts",
    "step typed": "6 rollouts",
    "step is no number": "step: 'first'",
    "run without rollouts": "has no rollouts",
}


@pytest.mark.parametrize("position", range(12))
@pytest.mark.parametrize("value", [None, "", -1, 1e400, "9" * 400, True, [], {"a": 1}, "\ud800", "\x00"])
def test_a_field_that_holds_anything_is_read_or_refused_by_name(position: int, value: object) -> None:
    fields: list[object] = ["Hello", "tiny", NOBODY, NOBODY, "", 0.7, 1, 0, 0, NOBODY, "", "left"]
    usual = read_chat(fields)
    fields[position] = value
    name = {5: "temperature", 6: "top p", 7: "longest reply", 8: "seed"}.get(position)
    if name is None or value in (None, ""):
        assert read_chat(fields).controls == usual.controls
    else:
        with pytest.raises(UsageError, match=f"^{name}: "):
            read_chat(fields)


def test_numbers_typed_as_text_are_numbers() -> None:
    assert read_whole("12", "step", None) == 12
    assert read_whole(" ", "step", None) is None
    assert read_number("0.5", "top p", 1.0, 0.0, 1.0) == 0.5
    for text in ("1.5", "-1", "1e3x", "inf", "nan"):
        with refuses(UsageError, "step"):
            read_whole(text, "step", None)


@pytest.mark.parametrize(("path", "body"), [
    ("/", None),
    ("/config", None),
    ("/gradio_api/info", None),
    ("/gradio_api/queue/join?", {}),
    ("/gradio_api/queue/data?session_hash=x", None),
    ("/gradio_api/upload", {}),
    ("/gradio_api/file=x", None),
    ("/gradio_api/heartbeat/x", None),
    ("/no/such/page", None),
])  # fmt: skip
def test_every_route_of_the_studio_refuses_other_pages(served: Served, path: str, body: object) -> None:
    here = f"127.0.0.1:{served.port}"
    rebound = {"Host": f"evil.com:{served.port}", "Origin": f"http://evil.com:{served.port}"}
    crossed = {"Host": here, "Origin": "http://evil.example"}
    for headers in (rebound, crossed, {"Host": here, "Sec-Fetch-Site": "cross-site"}):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, headers)
        answer_ = connection.getresponse()
        assert (answer_.status, answer_.getheader("access-control-allow-origin")) == (403, None)
        assert json.loads(answer_.read())["error"]["code"] == "refused"
        connection.close()


def test_wildcard_host_is_served_only_to_who_has_logged_in(runs: Path) -> None:
    token = "a-token-that-nobody-guesses"
    with serving_here("tiny", "--host", "0.0.0.0", "--token", token, "--runs-dir", str(runs), command="studio") as it:
        named = {"Host": f"my-machine:{it.port}"}
        assert it.fetch("/config", **named)[0] == 401
        assert it.fetch("/gradio_api/queue/join?", {"fn_index": 0, "data": []}, **JSON, **named)[0] == 401
        evil = named | {"Origin": "http://evil.example"}
        assert it.fetch("/login", b"username=studio&password=" + token.encode(), **evil)[0] == 403
        assert any(token in line for line in it.lines), "who began it sees the password"
        form = {"Content-Type": "application/x-www-form-urlencoded"} | named
        assert it.fetch("/login", b"username=studio&password=wrong", **form)[0] == 400
        assert it.fetch("/login", b"username=studio&password=" + token.encode(), **form)[0] == 200
