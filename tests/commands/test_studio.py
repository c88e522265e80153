"""The studio's pages without a browser: what they show, and what they refuse."""

from __future__ import annotations

import copy
import os
import re
import shutil
import socket
from dataclasses import fields
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.commands.chat.conversation import Controls, SpokenToken
from posttrain.commands.chat.studio_chat import NOBODY, Session, Stage
from posttrain.commands.chat.studio_records import (
    TRAINING,
    Archive,
    Offers,
    draw_conversation,
    draw_curves,
    draw_problem,
    draw_reply,
    draw_rollouts,
    draw_table,
)
from posttrain.engines.models import open_model
from posttrain.errors import UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import Word
from posttrain.runs.launch import launch
from posttrain.runs.models import find_source
from posttrain.store.rollouts import RecordedRollout, RolloutStore
from posttrain.types import Call, Message, Turn

EVIL = "<script>alert(1)</script>${1+1}{{value}}"
QUESTION = "A cup costs 3 coins. Eva buys 4 cups. How many coins does she pay?"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short runs: rollouts of two steps, and demonstrations without any."""
    root = tmp_path_factory.mktemp("runs")
    task = {"name": "stories", "size": 64, "max_steps": 1}
    template = {"template": {"name": "r1_zero", "preamble": ""}}
    rl = {
        "task": task,
        "prompt": template,
        "rewards": ["correct"],
        "rollout": {"prompts": 3, "group": 2, "max_tokens": 6},
        "objective": "grpo",
        "train": {"steps": 2},
        "eval": {"every": 2, "n": 4},
    }
    launch(validate_recipe(rl), root=root, name="rl")
    sft = {"task": task, "prompt": template, "data": {"batch": 2}, "objective": "cross_entropy", "train": {"steps": 1}}
    launch(validate_recipe(sft), root=root, name="sft")
    return root


@pytest.fixture
def stage() -> Stage:
    loaded: list[str] = []

    def open_named(name: str):
        loaded.append(name)
        return open_model(find_source(str(TINY), "runs"), Word(name="r1_zero", preamble=""))

    def open_judge(name: str):
        raise UsageError(f"no judge {name}")

    made = Stage(open_named, open_judge)
    made.loaded = loaded
    return made


def answer(stage: Stage, session: Session, names: list[str], judge: str = NOBODY, **controls) -> list[list[str]]:
    return list(stage.answer(session, QUESTION, names, Controls(**controls), "", judge, "probability"))


def test_text_of_models_and_data_is_escaped() -> None:
    token = SpokenToken(EVIL, -0.1, 0.3, ((EVIL, -0.1),))
    texts = dict.fromkeys(("example_id", "prompt", "completion", "answer", "extracted", "outcome", "finish"), EVIL)
    numbers = dict.fromkeys((field.name for field in fields(RecordedRollout) if field.name not in texts), 1)
    plain = {"parts": {EVIL: 1.0}, "turns": (), "failures": ()}
    rollout = RecordedRollout(**numbers | texts | plain)
    turns = (Turn(f"one {EVIL}", (Call("add", EVIL, f"sum {EVIL}", "ok"),)), Turn("two"))
    episode = RecordedRollout(**numbers | texts | plain | {"turns": turns})
    for page in (
        draw_conversation([Message("user", EVIL)]),
        draw_reply([token], "entropy", EVIL),
        draw_table([EVIL], [[EVIL]]),
        draw_curves({EVIL: {EVIL: ([1.0, 2.0], [0.5, 0.7])}}),
        draw_rollouts([[rollout]], "alert", EVIL),
    ):
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
    assert '<span class="marked">alert</span>(1)&lt;/script&gt;' in page
    page = draw_rollouts([[episode]])
    assert "<script>" not in page
    assert re.search(r"one &lt;script&gt;.*\n-&gt; add \(ok\): sum &lt;script&gt;.*\ntwo", page)


def test_colours_go_from_red_to_green() -> None:
    sure, unsure = SpokenToken("a", 0.0, 0.0, ()), SpokenToken("b", -9.0, 5.0, ())
    for colouring in ("probability", "entropy"):
        page = draw_reply([sure, unsure], colouring)
        assert "hsl(120 " in page
        assert f"hsl({0 if colouring == 'probability' else 1} " in page
    assert "hsl" not in draw_reply([sure, unsure], "nothing")
    assert 'title="probability 1.000, entropy 0.00 nats' in draw_reply([sure], "nothing")


def test_two_models_answer_side_by_side_and_are_loaded_once(stage: Stage) -> None:
    session = Session()
    pages = answer(stage, session, ["one", "two"], temperature=0.0, max_tokens=6)
    assert all(len(page) == 2 for page in pages)
    assert pages[-1][0] == pages[-1][1]  # the same model, greedy
    assert "6 tokens, mean log-probability" in pages[-1][0] or "tokens, mean" in pages[-1][0]
    answer(stage, session, ["one", "two"], temperature=0.0, max_tokens=6)
    assert stage.loaded == ["one", "two"]
    assert [m.role for m in session.speakers[0].conversation.messages] == ["user", "assistant"] * 2


def test_another_model_begins_a_conversation_of_its_own(stage: Stage) -> None:
    session = Session()
    answer(stage, session, ["one", NOBODY], max_tokens=3)
    answer(stage, session, ["two", NOBODY], max_tokens=3)
    assert len(session.speakers) == 1
    assert len(session.speakers[0].conversation.messages) == 2


def test_stop_ends_the_replies_where_they_are(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.commands.chat.studio_chat.REFRESH_SECONDS", 0.0)
    session = Session()
    pages = stage.answer(session, QUESTION, ["one"], Controls(temperature=1.0, max_tokens=50), "", NOBODY, "nothing")
    next(pages)
    session.is_stopped = True
    list(pages)
    assert len(session.speakers[0].tokens) == 1
    assert session.speakers[0].conversation.num_replies == 1


def test_what_goes_wrong_in_a_reply_stands_in_its_place(stage: Stage) -> None:
    session = Session()
    answer(stage, session, ["one"], max_tokens=2)
    page = list(stage.answer(session, "word " * 3000, ["one"], Controls(max_tokens=2), "", NOBODY, "nothing"))[-1][0]
    assert "turn system" in page
    with pytest.raises(UsageError, match="no judge x"):
        answer(stage, session, ["one"], judge="x", max_tokens=2)


def test_each_visitor_gets_a_session_of_his_own() -> None:
    used = Session(("a",), [], True)
    assert copy.deepcopy(used) == Session()


def test_menus_offer_what_is_there_now(runs: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(runs, root)
    offers = Offers(Archive(root), ["given"], ["folder/of/a/dictionary"])
    assert offers.speakers() == ["given", "sft", "rl", "tiny"]
    assert (offers.judges(), offers.dictionaries()) == ([], ["folder/of/a/dictionary"])
    shutil.copytree(root / "rl", root / "newer")
    for file in ("recipe.yaml", "metrics.jsonl"):
        os.utime(root / "newer" / file)
    assert offers.speakers() == ["given", "newer", "sft", "rl", "tiny"]
    assert offers.archive.newest_with_rollouts() == "newer"
    recipe = root / "newer" / "recipe.yaml"
    recipe.write_text("model: [")
    assert "newer" not in [*offers.speakers(), *offers.judges()]


def test_the_beginning_that_the_template_gives_is_shown(stage: Stage) -> None:
    session = Session()
    page = answer(stage, session, ["one"], max_tokens=3)[-1][0]
    assert session.speakers[0].conversation.sampler.grader.template.opening == "<think>"
    assert '<span class="soft opening">&lt;think&gt;</span><span class="tok"' in page
    assert "opening" not in draw_reply([], "nothing")


def test_what_goes_wrong_is_text_on_the_page() -> None:
    assert 'role="alert">' in draw_problem(EVIL)
    assert EVIL not in draw_problem(EVIL)


def test_a_port_is_refused_in_one_message_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gradio")
    for port in ("99999", "0", "abc", "-1"):
        assert main(["studio", f"--port={port}"]) == 2
        assert capsys.readouterr().err == f"posttrain: --port '{port}': a whole number from 1 to 65535 is needed\n"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["studio", "tiny", "--port", port]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"posttrain: --host 127.0.0.1, port {port}: cannot be served (Address already in use)")
    assert said.count("\n") == 1


def test_curves_and_recipes_of_runs(runs: Path) -> None:
    archive = Archive(runs)
    assert archive.names() == ["sft", "rl"]  # what was written last
    assert archive.newest_with_rollouts() == "rl"
    assert {"reward", "loss"} <= set(archive.metrics(["rl", "sft"]))
    page = archive.draw_curves(["rl", "sft"], ["loss", "reward"])
    assert page.count("<figure") == 2
    assert page.count("<polyline") + page.count("<circle") >= 3
    assert archive.draw_curves([], []).count("<figure") == 0
    assert "name: grpo" in archive.recipe_text("rl")


def test_rollouts_by_step_reward_and_text_with_their_whole_group(runs: Path) -> None:
    archive = Archive(runs)
    kinds = archive.evaluations("rl")
    assert kinds == [TRAINING, "stories/validation"]
    assert archive.steps("rl", TRAINING) == [1, 2]
    assert archive.steps("rl", "stories/validation") == [0, 2]
    page = archive.draw_rollouts("rl", TRAINING, 1, None, None, "")
    assert page.count('class="group"') == 3
    assert page.count('class="answer') == 6 + 3  # six samples; the three rows that hold them
    everything = archive.draw_rollouts("rl", TRAINING, None, None, None, "")
    assert everything.count('class="group"') == 6
    assert everything.index("step 2,") < everything.index("step 1,")
    with RolloutStore(runs / "rl" / "rollouts.db", read_only=True) as store:
        one = store.training(1)[0]
    found = archive.draw_rollouts("rl", TRAINING, 1, None, None, one.prompt[:30])
    assert 1 <= found.count('class="group"') <= 3
    assert "marked" in found
    assert "no rollout fits" in archive.draw_rollouts("rl", TRAINING, 1, 99.0, None, "")
    assert archive.draw_rollouts("rl", "stories/validation", 2, None, None, "").count('class="group"') == 4
    assert (archive.evaluations("sft"), archive.steps("sft", TRAINING)) == ([TRAINING], [])
    (runs / "sft" / "rollouts.db").unlink()
    with pytest.raises(UsageError, match="has no rollouts"):
        archive.evaluations("sft")


def test_what_is_not_drawn_is_said(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"loss": {f"run {i}": ([1.0], [0.5]) for i in range(11)}}
    assert "the first 8 of 11 runs are drawn" in draw_curves(many)
    assert "are drawn" not in draw_curves({"loss": dict(list(many["loss"].items())[:8])})
    archive = Archive(runs)
    assert "more prompts fit" not in archive.draw_rollouts("rl", TRAINING, 1, None, None, "")
    monkeypatch.setattr("posttrain.commands.chat.studio_records.MAX_GROUPS", 2)
    page = archive.draw_rollouts("rl", TRAINING, 1, None, None, "")
    assert "more prompts fit" in page
    assert page.count('class="group"') == 2
