"""Tools in ``posttrain chat``: calls are run between the turns of a reply, with the limits of training."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from posttrain.cli import main
from posttrain.commands.chat import conversation as module
from posttrain.commands.chat.conversation import ChatSession, Controls, ToolNotice
from posttrain.commands.chat.tools import ToolUse, offered
from posttrain.errors import RecipeError, UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import Component
from posttrain.runs.models import find_source
from posttrain.sampling.base import turn_key
from posttrain.sampling.environments.contract import build_toolset
from posttrain.sampling.episodes import set_stage
from posttrain.sampling.models import OpenedModel, open_model
from posttrain.sampling.native.stream import StreamedToken
from posttrain.untrusted import declare_code
from refusing import refuses

HOSTILE = "\x1b[31mred\x07"
CALL = '<tool>add: {"a": 3, "b": 4}</tool>'


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def shout(word: str) -> str:
    """Says a word, and what a terminal would obey."""
    return word + HOSTILE


def hang() -> str:
    """Takes its time."""
    time.sleep(2)
    return "late"


class Counter:
    """Counts what it is told; over at two."""

    closed: ClassVar[list[int]] = []
    number = 0

    def reset(self, seed: int) -> str:
        self.number = 0
        self.done = False
        return f"The game {seed}."

    def count(self) -> int:
        """Counts by one."""
        self.number += 1
        self.done = self.number == 2
        return self.number

    def close(self) -> None:
        Counter.closed.append(self.number)


class Rowed(Counter):
    def reset(self, level: int) -> str:  # type: ignore[override]
        return str(level)


class Replying(Counter):
    def respond(self, text: str) -> str:
        return text


NAMES = ("add", "shout", "hang", "Counter", "Rowed", "Replying")


@pytest.fixture(autouse=True)
def _declared() -> None:
    declare_code([f"test_chat_tools:{name}" for name in NAMES])
    Counter.closed.clear()


@pytest.fixture(scope="module", params=["chat", "r1_zero"])
def sampler(request: pytest.FixtureRequest) -> OpenedModel:
    return open_model(find_source(str(TINY), "runs"), Component(name=request.param))


class Script:
    """In place of the model: says these texts in turn, and keeps what it was asked with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sampler: OpenedModel, *texts: str) -> None:
        self.asked: list[tuple[list[int], int, int]] = []
        self.tokenizer = sampler.tokenizer
        self.turns = [[*self.encode(text), sampler.tokenizer.eos_token_id] for text in texts]
        monkeypatch.setattr(module, "stream", self.stream)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def stream(self, model: Any, prompt: Any, key: int, sampling: Any) -> Iterator[StreamedToken]:
        self.asked.append((list(prompt), key, sampling.max_tokens))
        turn = self.turns[len(self.asked) - 1][: sampling.max_tokens]
        for number, token in enumerate(turn):
            is_end = token in sampling.stop_ids
            yield StreamedToken(token, -0.5, number == len(turn) - 1, "stop" if is_end else "length")


def use_of(sampler: OpenedModel, *tools: str, environment: str | None = None, **limits: Any) -> ToolUse:
    named = [Component(name=f"test_chat_tools:{name}") for name in tools]
    played = None
    if environment is not None:
        played = Component(name=f"test_chat_tools:{environment}")
    stage = set_stage(build_toolset(played, named), sampler.grader.template, sampler.tokenizer, limits)
    return ToolUse(stage, sampler)


def say(conversation: ChatSession, content: str) -> tuple[str, list[str]]:
    """What the model wrote, and what was shown of its tools."""
    pieces = list(conversation.reply(content))
    notices = [str(piece) for piece in pieces if isinstance(piece, ToolNotice)]
    return "".join(piece for piece in pieces if not isinstance(piece, ToolNotice)), notices


def test_call_is_run_and_the_answer_goes_on_behind_the_same_tokens(
    sampler: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, sampler, CALL, "It is 7.", "You are welcome.")
    conversation = ChatSession(sampler, Controls(max_tokens=200, seed=5), tools=use_of(sampler, "add"))
    text, notices = say(conversation, "What is 3 + 4?")
    assert text == f"{CALL}It is 7."
    assert notices == ['\n-> add {"a": 3, "b": 4} (ok): 7\n']
    first, second = script.asked
    assert "add" in sampler.tokenizer.decode(first[0]), "the tool is shown"
    told = second[0][len(first[0]) + len(script.turns[0]) :]
    assert second[0][: -len(told)] == first[0] + script.turns[0], "sampled tokens stay"
    assert "7" in sampler.tokenizer.decode(told)
    assert second[1] == turn_key(first[1], 1)
    assert second[2] == 200 - len(script.turns[0]) - len(told), "results count"
    assert (len(conversation.logprobs), conversation.finish) == (len(script.turns[0]) + len(script.turns[1]), "stop")
    say(conversation, "Thank you.")
    following = script.asked[2][0]
    if sampler.grader.template.chat:
        assert following[: len(second[0]) + len(script.turns[1])] == second[0] + script.turns[1]
    assert "Thank you." in sampler.tokenizer.decode(following)
    assert [one.content for one in conversation.messages][-1].endswith("You are welcome.")
    conversation.reset()
    assert conversation.messages == []


def test_limits_of_training_end_a_reply(sampler: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, sampler, CALL, CALL, CALL)
    conversation = ChatSession(sampler, Controls(max_tokens=300), tools=use_of(sampler, "add", max_turns=2))
    assert len(say(conversation, "Add.")[1]) == 2
    assert conversation.finish == "out_of_turns"
    script = Script(monkeypatch, sampler, CALL, "never")
    conversation = ChatSession(sampler, Controls(max_tokens=len(script.turns[0]) + 2), tools=use_of(sampler, "add"))
    say(conversation, "Add.")
    assert (conversation.finish, len(script.asked)) == ("length", 1)
    Script(monkeypatch, sampler, "<tool>hang: {}</tool>", "<tool>no_such: 1</tool>", "Well.")
    conversation = ChatSession(sampler, Controls(max_tokens=400), tools=use_of(sampler, "hang", tool_seconds=0.05))
    _, (late, unknown) = say(conversation, "Wait.")
    assert "-> hang {} (timeout): hang took longer than 0.05 seconds" in late
    assert "-> no_such 1 (unknown): there is no tool 'no_such'" in unknown


def test_environment_is_opened_once_and_again_after_its_end(
    sampler: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = "<tool>count: {}</tool>"
    script = Script(monkeypatch, sampler, count, "One.", count, "Hello.")
    use = use_of(sampler, environment="Counter")
    Counter.closed.clear()  # the one that was made to see what it can
    conversation = ChatSession(sampler, Controls(max_tokens=300, seed=9), tools=use)
    assert say(conversation, "Play.")[1] == ["-> The game 9.\n", "\n-> count {} (ok): 1\n"]
    assert "The game 9." in sampler.tokenizer.decode(script.asked[0][0])
    assert say(conversation, "Go on.")[1] == ["\n-> count {} (ok): 2\n"]
    assert (conversation.finish, Counter.closed) == ("ended", [2])
    assert say(conversation, "Again.")[1] == ["-> The game 9.\n"]
    conversation.reset()
    assert Counter.closed == [2, 0]


def test_environment_that_needs_a_row_or_replies_itself_is_refused(sampler: OpenedModel) -> None:
    conversation = ChatSession(sampler, tools=use_of(sampler, environment="Rowed"))
    with refuses(UsageError, "'level'", "--no-tools"):
        list(conversation.reply("Play."))
    assert conversation.messages == []

    class OnStage(OpenedModel):
        def on_stage(self, template: Component | None) -> Any:
            return type("Staged", (), {"stage": use_of(sampler, environment="Replying").stage})

    parts = [getattr(sampler, name) for name in ("engine", "tokenizer", "grader", "context_tokens", "source", "model")]
    with refuses(UsageError, "'test_chat_tools:Replying'", "--no-tools"), offered(OnStage(*parts), None, []):
        pass


def chat(monkeypatch: pytest.MonkeyPatch, *words: str, lines: str = "What is 3 + 4?\n") -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", "tiny", "--template", "chat", *words])


def test_calls_and_results_are_printed_escaped_unless_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = open_model(find_source("tiny", "runs"), Component(name="chat"))
    Script(monkeypatch, tiny, f"<tool>shout: {HOSTILE}a</tool>", "Done.")
    tools = ["--tools", "[test_chat_tools:shout, test_chat_tools:add]", "--max-tokens", "200"]
    assert chat(monkeypatch, *tools) == 0
    out = capsys.readouterr().out
    assert "tiny may call: shout, add" in out
    assert r"-> shout \x1b[31mred\x07a (ok): \x1b[31mred\x07a\x1b[31mred\x07" in out.replace("\n", "")
    assert "Done." in out
    assert HOSTILE not in out
    Script(monkeypatch, tiny, CALL)
    assert chat(monkeypatch, "--no-tools", *tools) == 2
    assert "--no-tools" in capsys.readouterr().err
    assert chat(monkeypatch, "--no-tools") == 0
    assert "->" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "named"),
    [("{", "--tools"), ("3", "--tools"), ("[3]", "tools.0"), ("nobody", "nobody"), ("[]", "--no-tools")],
)
def test_tools_that_cannot_be_are_refused(
    text: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "--tools", text) == 2
    assert named in capsys.readouterr().err
    with refuses(RecipeError, "--tools"):
        module._read_tools("3")


def test_given_tools_have_the_limits_of_the_run() -> None:
    tiny = open_model(find_source(str(TINY), "runs"), Component(name="chat"))
    limits = {"max_turns": 3, "tool_seconds": 0.5, "max_turn_tokens": 20}
    recipe = validate_recipe(
        {
            "task": "stories",
            "objective": "grpo",
            "tools": ["test_chat_tools:shout"],
            "rewards": ["correct"],
            "rollout": {**limits, "max_tokens": 40},
        }
    ).resolve()
    of_run = replace(tiny, source=replace(tiny.source, recipe=recipe))
    for model, expected in ((of_run, (3, 0.5, 20)), (tiny, (8, 30.0, None))):
        with offered(model, None, [Component(name="test_chat_tools:add")]) as use:
            assert use is not None
            stage = use.stage
            assert (stage.max_turns, stage.tool_seconds, stage.max_turn_tokens) == expected
            assert list(stage.toolset.tools) == ["add"]


@pytest.mark.parametrize("has_tools", [False, True])
def test_conversation_that_fills_the_context_is_refused_until_it_is_reset(
    has_tools: bool, sampler: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = ChatSession(sampler, Controls(seed=1))
    if has_tools:
        talk.tools = use_of(sampler, "add")
    talk.set_system("")
    with refuses(UsageError, "1,024", "/reset"):
        list(talk.reply("What is 3 + 4? " * 400))
    talk.reset()
    Script(monkeypatch, sampler, "Seven.")
    assert "Seven." in "".join(talk.reply("What is 3 + 4?"))
