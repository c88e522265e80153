"""The studio without a browser: replies, rewards, rollouts, and what it refuses."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain import untrusted
from posttrain.cli import main
from posttrain.commands.chat import studio
from posttrain.commands.chat.conversation import Controls
from posttrain.commands.chat.studio import TRAINING, Library, Side, answer, build_studio
from posttrain.errors import UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import Component
from posttrain.runs.launch import launch
from posttrain.runs.models import find_source
from posttrain.sampling.models import open_model
from posttrain.types import Example, Finish

QUESTION = "A cup costs 3 coins. Eva buys 4 cups. How many coins does she pay?"
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short runs: rollouts of two steps, and demonstrations without any."""
    root = tmp_path_factory.mktemp("runs")
    common = {"task": {"name": "stories", "size": 64, "max_steps": 1}}
    common |= {"prompt": {"template": {"name": "r1_zero", "preamble": ""}}}
    rollout = {"rollout": {"num_prompts": 3, "group_size": 2, "max_tokens": 6}, "eval": {"every": 2, "num_examples": 4}}
    rl = {**common, **rollout, "rewards": ["correct"], "objective": "grpo", "train": {"steps": 2}}
    launch(validate_recipe(rl), root=root, name="rl")
    sft = {**common, "data": {"batch_size": 2}, "objective": "cross_entropy", "train": {"steps": 1}}
    launch(validate_recipe(sft), root=root, name="sft")
    return root


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    opened = open_model(find_source(str(TINY), "runs"), Component(name="r1_zero", preamble=""))
    monkeypatch.setattr(studio, "open_model", lambda source: opened)
    return Library(["one", "two"], tmp_path)


def last(library: Library, sides: Sequence[Side] | None, models: list[str], judge: str = "(none)", **controls: float):
    *_, sides = answer(library, sides, QUESTION, models, Controls(**controls), judge=judge)
    return sides


def test_two_models_answer_in_steps_and_keep_their_conversations(library: Library) -> None:
    greedy = Controls(temperature=0.0, max_tokens=6)
    lengths = [len(sides[0].conversation.logprobs) for sides in answer(library, None, QUESTION, ["one", "two"], greedy)]
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
    *_, (side,) = answer(library, None, "word " * 3000, ["one"], Controls(max_tokens=2))
    assert "no room" in side.info or "context" in side.info

    def score(examples: Sequence[Example], texts: Sequence[str], finishes: Sequence[Finish]) -> list[float]:
        assert examples[0].messages[-1].content == QUESTION
        return [0.25]

    library.reward_model = lambda name: SimpleNamespace(score=score)  # type: ignore[assignment]
    (side,) = last(library, None, ["one"], judge="rm", max_tokens=3)
    assert side.info.endswith(", reward 0.250")


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
    with pytest.raises(UsageError, match="this page offers no"):
        list(answer(library, None, QUESTION, models, Controls(max_tokens=1), judge=judge, steering=steering))


def test_rollouts_are_rows_by_step_kind_and_text(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(["given"], runs)
    places = {
        f"{run}, step {n}": str(runs / run / "checkpoints" / f"step-{n:06d}") for run, n in (("rl", 2), ("sft", 1))
    }
    names = ["given", "rl", "rl, step 2", "sft", "sft, step 1", "tiny", "tiny-sft"]
    assert library.models() == {name: places.get(name, name) for name in names}
    assert library.snapshots(trains_scorer=True) == {}
    rows = library.rollouts("rl", TRAINING, 1, "")
    assert len(rows) == 6
    assert {row[0] for row in rows} == {1}
    assert [row[0] for row in library.rollouts("rl", TRAINING, None, "")] == [2] * 6 + [1] * 6
    assert len(library.rollouts("rl", "evaluation", 2, "")) == 4
    assert 1 <= len(library.rollouts("rl", TRAINING, 1, rows[0][1][:30])) <= 6
    assert library.rollouts("rl", TRAINING, 1, EVIL) == []
    with pytest.raises(UsageError, match="offers no run"):
        library.rollouts("../rl", TRAINING, 1, "")
    monkeypatch.setattr(untrusted, "MAX_SHOWN", 40)
    assert "characters are left out here" in library.rollouts("rl", TRAINING, 1, "")[0][1]
    (runs / "sft" / "rollouts.db").unlink()
    with pytest.raises(UsageError, match="has no rollouts"):
        library.rollouts("sft", TRAINING, 1, "")


def test_mistakes_end_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gradio", reason="the extra `studio` is not installed")
    assert main(["studio", "--host", "0.0.0.0"]) == 2
    assert "add --token, or leave --host out" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["studio", "--port", port]) == 2
    assert f"port {port}: cannot be served" in capsys.readouterr().err


def test_page_is_served_without_api_files_or_other_origins(tmp_path: Path) -> None:
    gradio = pytest.importorskip("gradio", reason="the extra `studio` is not installed")
    page = build_studio([], tmp_path)
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, max_file_size=0, ssr_mode=False)
    try:
        with urllib.request.urlopen(f"{address}config") as served:
            config = json.loads(served.read())
        assert {one["api_visibility"] for one in config["dependencies"]} == {"private"}
        labels = [one["props"].get("label") for one in config["components"]]
        assert {"model", "second model", "reward model", "sparse autoencoder", "run", "left: tiny"} <= set(labels)
        shown = {one["props"].get("label"): one["props"] for one in config["components"]}
        assert not shown["right: (none)"]["visible"]
        assert "How many coins" in shown["your message (Enter sends it)"]["value"]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{address}gradio_api/file=/etc/passwd")
        request = urllib.request.Request(f"{address}config", headers={"Origin": "http://evil.example"})
        with urllib.request.urlopen(request) as foreign:
            assert foreign.headers["access-control-allow-origin"] is None
    finally:
        gradio.close_all()
