"""Dialogues as text: where a turn begins, and what becomes one message."""

from __future__ import annotations

import pytest

from posttrain.tasks.preferences.hh_rlhf import merge_turns, parse_turns
from posttrain.tasks.reader import Dropped
from posttrain.types import Message


def said(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message({"H": "user", "A": "assistant"}[who], text) for who, text in turns)


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("\n\nHuman: Hi\n\nAssistant: Hello.", said(("H", "Hi"), ("A", "Hello."))),
        ("Human: Hi\n\nAssistant:Hello. ", said(("H", "Hi"), ("A", "Hello."))),
        (" \n Human: Hi", said(("H", "Hi"))),
        ("\n\nAssistant: Yes?\n\nHuman: Hi", said(("A", "Yes?"), ("H", "Hi"))),
        # paragraphs belong to their turn, and so does everything that only looks like a marker
        ("\n\nHuman: a\n\nb\n\nAssistant: c\n\n\n\nd", said(("H", "a\n\nb"), ("A", "c\n\n\n\nd"))),
        ("\n\nHuman: Who is Human: he?\n\nAssistant: x", said(("H", "Who is Human: he?"), ("A", "x"))),
        ("\n\nHuman: a\nAssistant: b\n\nAssistant: c", said(("H", "a\nAssistant: b"), ("A", "c"))),
        ("\n\nHuman: a\n\n Human: b", said(("H", "a\n\n Human: b"))),
        ("\n\nHuman: a\n\nAssistant: Human: b", said(("H", "a"), ("A", "Human: b"))),
        ("\n\nHuman: a\n\nHappier Human: b", said(("H", "a\n\nHappier Human: b"))),
        ("\n\nHuman: a\n\nhuman: b", said(("H", "a\n\nhuman: b"))),
        # turns are kept as they stand: blank ones, and those of one role that follow one another
        ("\n\nHuman: a\n\nAssistant: \n\nAssistant: b", said(("H", "a"), ("A", ""), ("A", "b"))),
        ("\n\nHuman:\n\nAssistant:", said(("H", ""), ("A", ""))),
    ],
)
def test_parse_turns(text: str, turns: tuple[Message, ...]) -> None:
    assert parse_turns(text) == turns


@pytest.mark.parametrize("text", ["", "Hello", "Title\n\nHuman: a\n\nAssistant: b", "User: a"])
def test_a_text_that_begins_with_no_turn(text: str) -> None:
    with pytest.raises(Dropped, match="the text does not begin with a turn"):
        parse_turns(text)


def test_turns_of_one_role_become_one_message() -> None:
    turns = said(("H", "a"), ("H", "b"), ("A", "c"), ("A", ""), ("A", "d"), ("H", "e"))
    assert merge_turns(turns) == said(("H", "a\n\nb"), ("A", "c\n\nd"), ("H", "e"))
    assert merge_turns(said(("H", ""), ("H", "a"))) == said(("H", "a"))
    with pytest.raises(Dropped, match=r"^a blank turn$"):
        merge_turns(said(("H", "a"), ("A", ""), ("A", ""), ("H", "b")))
