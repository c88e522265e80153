"""Conversations, and ``posttrain chat`` as a user types it."""

from __future__ import annotations

import io

import pytest

from posttrain.cli import main
from posttrain.commands.chat import conversation as module
from posttrain.commands.chat.command import change_controls
from posttrain.commands.chat.conversation import Controls, Conversation
from posttrain.engines.models import open_model
from posttrain.errors import UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.sections import Word
from posttrain.runs.models import find_source
from posttrain.types import Message
from posttrain.untrusted import harmless

QUESTION = "A cup costs 3 coins. Eva buys 4 cups. How many coins does she pay?"


@pytest.fixture(scope="module")
def sampler():
    return open_model(find_source(str(TINY), "runs"), Word(name="r1_zero", preamble=""))


@pytest.fixture
def conversation(sampler) -> Conversation:
    return Conversation(sampler, Controls(temperature=1.0, max_tokens=12))


def said(conversation: Conversation, content: str) -> str:
    return "".join(token.text for token in conversation.reply(content))


def test_a_reply_is_a_function_of_what_was_said_and_the_seed(sampler) -> None:
    def talk(seed: int) -> list[str]:
        one = Conversation(sampler, Controls(temperature=1.5, max_tokens=12, seed=seed))
        return [said(one, QUESTION), said(one, QUESTION)]

    assert talk(0) == talk(0)
    assert talk(0) != talk(1)
    first, second = talk(0)
    assert first != second  # a second reply draws its own numbers


def test_the_conversation_remembers_both_sides_and_the_prompt_holds_them(conversation, monkeypatch) -> None:
    seen = []
    real = module.encode_prompt
    monkeypatch.setattr(
        module,
        "encode_prompt",
        lambda t, template, messages: seen.append(list(messages)) or real(t, template, messages),
    )
    conversation.set_system("Be brief.")
    reply = said(conversation, QUESTION)
    assert conversation.messages[:2] == [Message("system", "Be brief."), Message("user", QUESTION)]
    answer = conversation.messages[2]
    assert answer.role == "assistant"
    assert answer.content == conversation.answer_of("<think>" + reply)
    said(conversation, "And now?")
    assert seen[1] == [*conversation.messages[:3], Message("user", "And now?")]
    conversation.reset()
    assert conversation.messages == [Message("system", "Be brief.")]
    conversation.set_system(" ")
    assert conversation.messages == []


def test_later_turns_see_the_answer_without_its_reasoning(conversation) -> None:
    assert conversation.answer_of("<think> 3 * 4 = 12. </think> <answer> 12 </answer>") == "12"
    assert conversation.answer_of("<think> 3 * 4") == " 3 * 4"


def test_a_reply_that_is_stopped_is_kept_as_far_as_it_came(conversation) -> None:
    tokens = conversation.reply(QUESTION)
    first = [next(tokens).text, next(tokens).text]
    tokens.close()
    assert conversation.messages[-1].content.strip() == "".join(first).strip()


def test_ctrl_c_keeps_what_was_said_wherever_it_strikes(conversation) -> None:
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
            heard.extend(token.text for token in conversation.reply(QUESTION))
    finally:
        hook.remove()
    assert len(heard) == 3
    assert conversation.num_replies == 1
    assert conversation.messages[-1].content.strip() == "".join(heard).strip()


def test_only_the_last_exchange_is_taken_back(conversation) -> None:
    said(conversation, QUESTION)
    kept = list(conversation.messages)
    with pytest.raises(UsageError):
        said(conversation, "word " * 3000)  # no room: nothing of it was remembered
    conversation.take_back()
    assert conversation.messages == kept
    said(conversation, "And now?")
    conversation.take_back()
    assert conversation.messages == kept


def test_a_blank_message_is_refused_and_nothing_is_remembered(conversation) -> None:
    with pytest.raises(UsageError, match="needs some text"):
        said(conversation, "  ")
    assert conversation.messages == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temprature", "1", "Did you mean 'temperature'"),
        ("temperature", "-1", "temperature must be a number of at least 0, not '-1'"),
        ("temperature", "nan", "temperature must be"),
        ("top_p", "0", "top_p must be a number above 0, at most 1"),
        ("top_k", "1.5", "top_k must be a whole number"),
        ("max_tokens", "", "max_tokens must be"),
    ],
)
def test_settings_are_checked(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        change_controls(Controls(), name, value)


def test_settings_change_one_thing() -> None:
    assert change_controls(Controls(), "top_k", "5") == Controls(top_k=5)
    assert change_controls(Controls(top_k=5), "temperature", "0") == Controls(temperature=0.0, top_k=5)


def test_what_a_model_says_cannot_steer_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x07\n\tc\u202ed") == "a\\x1b[2Jb\\x07\n\tc\\u202ed"
    assert harmless("Grüße 漢字 🙂") == "Grüße 漢字 🙂"


def chat(lines: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", "tiny", "--template", "r1_zero", "--template.preamble", "", "--max-tokens", "6", *options])


def test_a_session(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = f"/help\n/again\n{QUESTION}\n/again\n/set temperature 0\n/set temprature 0\n/what\n/quit\nnever\n"
    assert chat(lines, monkeypatch) == 0
    out = capsys.readouterr().out
    assert "nothing was asked yet" in out
    assert out.count("mean log-probability") == 2
    assert "temperature 0.0, top_p 1.0, top_k None, max_tokens 6, seed 1" in out
    assert "Did you mean 'temperature'" in out
    assert "there is no command /what" in out


def test_two_models_answer_below_one_another_and_the_end_of_the_input_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION))
    assert main(["chat", "tiny", str(TINY), "--temperature", "0", "--max-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("mean log-probability") == 2
    assert out.index("tiny") < out.index(str(TINY))


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "./no-such-model"]) == 2
    assert "no such run or folder" in capsys.readouterr().err
