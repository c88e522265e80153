"""Conversations, and ``posttrain chat`` as a user types it."""

from __future__ import annotations

import io

import pytest

from posttrain.cli import main
from posttrain.commands.chat import conversation as module
from posttrain.commands.chat.conversation import ChatSession, Controls
from posttrain.models.sources import TINY
from posttrain.recipes.sections import Component
from posttrain.runs.models import find_source
from posttrain.sampling.models import open_model
from posttrain.types import Message

QUESTION = "A cup costs 3 coins. Eva buys 4 cups. How many coins does she pay?"


@pytest.fixture(scope="module")
def sampler():
    return open_model(find_source(str(TINY), "runs"), Component(name="r1_zero", preamble=""))


@pytest.fixture
def conversation(sampler) -> ChatSession:
    return ChatSession(sampler, Controls(temperature=1.0, max_tokens=12))


def message(conversation: ChatSession, content: str) -> str:
    return "".join(conversation.reply(content))


def test_the_conversation_remembers_both_sides_and_the_prompt_holds_them(conversation, monkeypatch) -> None:
    seen = []
    real = module.encode_prompt
    monkeypatch.setattr(
        module,
        "encode_prompt",
        lambda t, template, messages: seen.append(list(messages)) or real(t, template, messages),
    )
    conversation.set_system("Be brief.")
    reply = message(conversation, QUESTION)
    assert conversation.messages[:2] == [Message("system", "Be brief."), Message("user", QUESTION)]
    answer = conversation.messages[2]
    assert answer.role == "assistant"
    assert answer.content == conversation.answer_of("<think>" + reply)
    message(conversation, "And now?")
    assert seen[1] == [*conversation.messages[:3], Message("user", "And now?")]
    conversation.reset()
    assert conversation.messages == [Message("system", "Be brief.")]
    conversation.set_system(" ")
    assert conversation.messages == []


def test_ctrl_c_keeps_what_was_written_wherever_it_strikes(conversation) -> None:
    """Mostly while the model computes, which is inside of the iterator."""
    model = conversation.sampler.model
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(interrupt)
    heard = []
    try:
        with pytest.raises(KeyboardInterrupt):
            heard.extend(conversation.reply(QUESTION))
    finally:
        hook.remove()
    assert len(heard) == 3
    assert conversation.num_replies == 1
    assert conversation.messages[-1].content.strip() == "".join(heard).strip()


def test_chat_answers_with_every_model_until_it_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/help\n{QUESTION}\n/reset\n{QUESTION}\n/quit\nnever\n"))
    assert main(["chat", "tiny", str(TINY), "--temperature", "0", "--max-tokens", "4", "--system", "Be brief."]) == 0
    out = capsys.readouterr().out
    assert out.startswith("/reset clears")
    assert out.count("mean log-probability") == 4
    first, second = out[out.index("\n") :].split("\ntiny\n")[1:]
    assert first.strip() == second.strip(), "nothing is left of the conversation"
    assert first.index("4 tokens") < first.index(str(TINY))
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 9000))  # the end of the input ends it, too
    assert main(["chat", "tiny"]) == 0
    assert "tiny: " in capsys.readouterr().out
