"""Environments of verifiers with turns and tools: the conversation, the rubric's parts, training, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain as pt
from closeness import OF_EMBEDDED, approx
from posttrain import registry, untrusted
from posttrain.cli import main
from posttrain.data.base import Task
from posttrain.errors import UnallowedCode, UsageError
from posttrain.models.load import load_model
from posttrain.recipes.sections import Component, ModelSection
from posttrain.sampling.environments.contract import Session, build_toolset
from posttrain.sampling.environments.pool import Pool
from posttrain.sampling.environments.replies import EnvironmentReply, HeardTurn
from posttrain.store.rollouts import RecordedRollout
from posttrain.types import Call
from posttrain.untrusted import declare_code
from refusing import refuses

pytestmark = pytest.mark.adapters
verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed")
if not hasattr(verifiers, "SingleTurnEnv"):
    pytest.skip("this verifiers has no load_environment", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parent))
GAME, TOOLS = "verifiers_games:load_game", "verifiers_games:load_tools"
LOADS = [GAME, TOOLS, *(f"verifiers_games:load_{name}" for name in ("group", "compared", "streaming"))]
ADAPTER = [f"verifiers_adapter:verifiers_{name}" for name in ("episodes", "rubric", "turns")]
CODE = [*ADAPTER, *LOADS, "choosing_engine:choosing"]


@pytest.fixture(autouse=True)
def _allowed() -> None:
    declare_code(CODE)


def rows_of(load: str, **args: Any) -> Task:
    task: Task = registry.find("task", ADAPTER[0]).bind({"load": load, "args": args})()
    return task


class Played:
    """One episode, with the turns of a list."""

    def __init__(self, load: str, turns: list[HeardTurn], seconds: float = 30.0, row: int = 0, **args: Any) -> None:
        example = rows_of(load, **args).examples[row]
        toolset = build_toolset(Component(name=ADAPTER[2], load=load, args=args))
        self.schemas = toolset.schemas
        self.replies: list[EnvironmentReply | None] = []
        with Pool() as pool:
            session = Session(toolset, pool, seconds)
            session.begin(example, 0)
            assert session.opening() == ""
            for turn in turns:
                if not session.failure:
                    self.replies.append(session.replied(turn, session.respond(turn)))
            self.reward = session.reward()
            self.metrics = session.metrics()
            self.failure, self.done = session.failure, session.done
            closing = session.close()
            if closing is not None:
                pool.wait(closing)


def said(*texts: str, finish: Any = "stop") -> list[HeardTurn]:
    return [HeardTurn(text, [], finish) for text in texts]


def test_game_is_played_by_the_environment_and_paid_by_its_rubric() -> None:
    won = Played(GAME, said("5", "It is 3!"))
    assert won.replies == [EnvironmentReply("user", ("Lower.",)), EnvironmentReply("user", ("That is it.",))]
    assert (won.reward, won.done, won.failure) == (approx(1.0 - 0.2), True, "")
    assert won.metrics == approx({"rubric/solved": 1.0, "rubric/few_guesses": -2.0, "rubric/num_turns": 2.0})


def test_game_ends_at_its_own_turns_and_where_no_turn_is_left_here() -> None:
    over = Played(GAME, said("5", "1"), max_turns=2)
    assert over.replies[1] is None, "the environment's own max_turns"
    assert (over.reward, over.done) == (approx(-0.1), True)
    assert over.metrics["rubric/num_turns"] == 2.0
    stopped = Played(GAME, said("5"))  # what rollout.max_turns or rollout.max_tokens does
    assert (stopped.reward, stopped.done, stopped.failure) == (approx(-0.1), False, "")
    cut = Played(GAME, said("3", finish="length"))
    assert (cut.reward, cut.failure) == (approx(0.9), "")


def test_tools_have_their_schemas_results_and_errors() -> None:
    calls = [("add", '{"a": 3, "b": 4}'), ("halve", '{"number": 7}'), ("double", "{}"), ("add", '{"a": 3}')]
    played = Played(TOOLS, [HeardTurn("Let me see.", calls, "stop"), HeardTurn("It is 7.", [], "stop")])
    assert [one["function"]["name"] for one in played.schemas] == ["add", "halve"]
    assert played.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    first = played.replies[0]
    assert first is not None
    assert first.role == "tool"
    assert first.calls[:2] == (Call("add", calls[0][1], "7", "ok"), Call("halve", calls[1][1], "7 is odd", "failed"))
    assert first.calls[2] == Call("double", "{}", "'double'", "failed"), "as verifiers says it"
    assert "missing 1 required positional argument: 'b'" in first.calls[3].result
    assert first.contents == tuple(call.result for call in first.calls)
    assert (played.replies[1], played.done, played.reward) == (None, False, 1.0), "no call: the model has answered"
    counted = {f"rubric/{name}_calls": n for name, n in {"add": 2.0, "halve": 1.0, "total_tool": 4.0}.items()}
    assert played.metrics == approx(counted | {"rubric/says_answer": 1.0, "rubric/num_turns": 2.0})


def test_stateful_tools_and_errors_that_end_the_episode() -> None:
    turn = HeardTurn("", [("turn", '{"word": "now"}')], "stop")
    played = Played(TOOLS, [turn, turn], stateful=True)
    assert list(played.schemas[0]["function"]["parameters"]["properties"]) == ["word"]
    assert [one.contents for one in played.replies if one is not None] == [("now 1",), ("now 2",)]
    stopped = Played(TOOLS, [HeardTurn("", [("halve", '{"number": 7}')], "stop")], stops=True)
    assert (stopped.replies, stopped.done, stopped.failure) == ([None], True, "")
    assert stopped.reward == 0.0, "a mistake of the model's is scored"


def test_group_plays_the_environment_of_the_row() -> None:
    load = "verifiers_games:load_group"
    short = Played(load, said("5"), row=4)
    assert (short.replies, short.done) == ([None], True), "max_turns 1"
    assert Played(load, said("5")).replies == [EnvironmentReply("user", ("Lower.",))]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("forgetful", "a different conversation"),
        ("chatty", "several roles"),
        ("broken", r"ConnectionError: nobody answers \x1b[31m"),
    ],
)
def test_episode_that_cannot_be_trained_fails_and_says_why(kind: str, named: str) -> None:
    played = Played(GAME, said("5", "6"), kind=kind)
    assert named in played.failure
    assert played.reward is None


def test_reply_that_never_comes_fails_its_episode_alone() -> None:
    assert "took longer than 0.5 seconds" in Played(GAME, said("5"), 0.5, kind="slow").failure
    assert Played(GAME, said("3")).reward == approx(0.9), "in another loop"


@pytest.mark.parametrize(
    ("load", "args", "named"),
    [
        ("verifiers_games:load_streaming", {}, ["environment.load", "Streaming", "vf-eval"]),
        ("verifiers_games:load_compared", {}, ["environment.load", "group rewards"]),
        ("verifiers_games:load_group", {"with_tools": True}, ["environment.load", "a group with tools"]),
        (GAME, {"kind": "chess"}, ["environment.load", "chess"]),
        ("owner/game", {}, ["environment.load", "game:load_environment"]),
    ],
)
def test_what_cannot_be_played_is_refused(load: str, args: dict[str, Any], named: list[str]) -> None:
    with refuses(UsageError, *named):
        build_toolset(Component(name=ADAPTER[2], load=load, args=args))
    with refuses(UnallowedCode, "somebody:load_environment"):
        build_toolset(Component(name=ADAPTER[2], load="somebody:load_environment"))


def test_rubric_of_a_game_without_its_turns_is_refused() -> None:
    reward = registry.find("reward", ADAPTER[1]).bind({"load": GAME})
    with refuses(UsageError, "Guess", "verifiers_turns"):
        reward(example=list(rows_of(GAME).examples)[:1], text=["3"], finish=["stop"])


def recipe(load: str, texts: list[str], **args: Any) -> dict[str, Any]:
    named = {"load": load, "args": args}
    return {
        "extends": "tiny/grpo",
        "task": {"name": ADAPTER[0], **named},
        "environment": {"name": ADAPTER[2], **named},
        "rewards": ["environment"],
        "prompt": {"template": "chat"},
        "rollout": {
            "engine": {"name": "choosing_engine:choosing", "texts": texts},
            "num_prompts": 2,
            "group_size": 8,
            "max_tokens": 400,
            "max_turns": 4,
            "max_turn_tokens": None,
        },
        "eval": None,
    }


def check_masks(row: RecordedRollout, replies: list[str]) -> None:
    """What the model said is trained, with the log-probabilities of the model; nothing else is."""
    built = load_model(ModelSection(name="tiny-sft"), seed=0)
    assert row.own is not None
    num_prompt = len(row.token_ids) - len(row.own)
    answer = row.token_ids[num_prompt:]
    with torch.no_grad():
        logits = built.model(torch.tensor([row.token_ids])).logits
    logprobs = logits[0, num_prompt - 1 : -1].log_softmax(-1)
    own = torch.tensor(row.own)
    found = logprobs[range(len(answer)), list(answer)]
    assert row.sampler_logprobs is not None
    assert torch.tensor(row.sampler_logprobs)[own].tolist() == approx(found[own].tolist(), abs=OF_EMBEDDED)
    trained = [token for token, is_own in zip(answer, row.own, strict=True) if is_own]
    others = [token for token, is_own in zip(answer, row.own, strict=True) if not is_own]
    assert built.tokenizer.decode(trained) == "".join(turn.text + built.tokenizer.eos_token for turn in row.turns)
    for reply in replies:
        assert reply in built.tokenizer.decode(others)


def means(run: Any, num_steps: int) -> list[float]:
    rewards = [[row.reward for row in run.rollouts(step=step)] for step in range(1, num_steps + 1)]
    return [sum(one) / len(one) for one in rewards]


def test_game_is_learned_with_exact_masks_and_rewards_by_part(tmp_path: Path) -> None:
    made = recipe(GAME, ["3", "9", "I do not know"], numbers="33")
    options: dict[str, Any] = {"steps": 8, "train__lr": 1e-3, "train__warmup_steps": 0}
    run = pt.train(made, runs_dir=tmp_path, run="game", progress=False, **options)
    first = run.rollouts(step=1)
    assert {len(row.turns) for row in first} > {1}, "some need several turns"
    longest = max(first, key=lambda row: len(row.turns))
    check_masks(longest, [reply for turn in longest.turns[:-1] for reply in turn.replies])
    for row in first:
        parts = row.parts
        assert row.reward == approx(parts["rubric/solved"] + 0.1 * parts["rubric/few_guesses"], abs=1e-12)
        assert parts["rubric/num_turns"] == len(row.turns)
        assert len(row.turns) <= 3, "max_turns of the environment"
        assert row.finish == "ended"
        assert "-> " in row.transcript
    learned = means(run, 8)
    assert sum(learned[-3:]) / 3 > sum(learned[:3]) / 3 + 0.15, learned


def test_tools_train_resume_to_the_bit_and_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ['<tool>add: {"a": 3, "b": 4}</tool>', '<tool>halve: {"number": 7}</tool>', "It is 7.", "It is 8."]
    (tmp_path / "tools.yaml").write_text(json.dumps(recipe(TOOLS, texts)))
    words = ["--quiet", "--runs-dir", "runs", "--train.save_every", "1"]
    assert main(["train", "tools.yaml", "--run", "whole", "--train.steps", "2", *words]) == 0, capsys.readouterr().err
    run = pt.load_run(tmp_path / "runs" / "whole")
    rows = run.rollouts(step=1)
    calls = {call for row in rows for turn in row.turns[:3] for call in turn.calls}
    assert {call.outcome for row in rows for turn in row.turns[3:] for call in turn.calls} == {"failed"}, "max_turns"
    assert calls == {
        Call("add", '{"a": 3, "b": 4}', "7", "ok"),
        Call("halve", '{"number": 7}', "7 is odd", "failed"),
    }
    assert {row.reward for row in rows} == {0.0, 1.0}
    longest = max((row for row in rows if row.finish == "stop"), key=lambda row: len(row.turns))
    check_masks(longest, [call.result for turn in longest.turns for call in turn.calls])
    assert main(["train", "tools.yaml", "--run", "half", "--train.steps", "1", *words]) == 0
    resume = ["runs", "resume", "half", "--runs-dir", "runs", "--steps", "2", "--accept-changes", "--quiet"]
    capsys.readouterr()
    monkeypatch.setattr(untrusted, "_FOLDERS", {})
    assert main(resume) == 2, "another person's code"
    assert "--allow-code" in capsys.readouterr().err
    code = [word for name in (*ADAPTER[::2], TOOLS, "choosing_engine:choosing") for word in ("--allow-code", name)]
    assert main([*resume, *code]) == 0, capsys.readouterr().err
    saved = "checkpoints/step-000002/model.safetensors"
    assert (tmp_path / "runs/whole" / saved).read_bytes() == (tmp_path / "runs/half" / saved).read_bytes()
    asked = ["evaluate", "runs/whole", "--limit", "1", "--engine", "scripted", "--engine.texts", json.dumps(texts[:1])]
    assert main([*asked, "--out", "out", *code]) == 0, capsys.readouterr().err
    item = json.loads((tmp_path / "out" / "items.jsonl").read_text().splitlines()[0])["samples"][0]
    assert item["transcript"].count("-> add (ok): 7") == 3, "max_turns"
