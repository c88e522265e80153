"""Thinking is removed from answers whole, or the answer is left out."""

from __future__ import annotations

import pytest

from posttrain.tasks.reader import Dropped, answer_text, remove_thinking


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 5.", "It is 5."),
        ("  It is 5.\n", "It is 5."),
        ("<think>2 + 3</think>It is 5.", "It is 5."),
        ("<think>\n2 + 3\n</think>\n\nIt is 5.\n", "It is 5."),
        ("<think></think>5", "5"),
        ("So: <think>2</think>five<think>3</think>.", "So: five."),
        ("<think>a <think>b</think> c</think>5", "5"),  # what stands behind an inner block is thinking as well
        ("2 + 3 it is</think>5", "5"),  # opened in the prompt
        ("a</think>b</think>5", "5"),
        ("a</think>b <think>c</think>5", "b 5"),
        ("<think>all of it</think>", ""),
        ("<think>cut off", None),
        ("5<think>cut off", None),
        ("<think>a<think>b</think>5", None),
        ("<thinking>a</thinking>5", "<thinking>a</thinking>5"),
        ("< think>a</think >5", "< think>a</think >5"),
    ],
)
def test_remove_thinking(text: str, answer: str | None) -> None:
    assert remove_thinking(text) == answer


def test_answers() -> None:
    assert answer_text(" <think>a</think> 5", strip_thinking=False) == " <think>a</think> 5"
    assert answer_text(" <think>a</think> 5", strip_thinking=True) == "5"
    with pytest.raises(Dropped, match=r"^a <think> that never closes$"):
        answer_text("<think>a", strip_thinking=True)
    with pytest.raises(Dropped, match=r"^an answer of nothing but thinking$"):
        answer_text("<think>a</think> ", strip_thinking=True)


def test_a_long_text_takes_no_longer_than_its_length() -> None:
    assert remove_thinking("<think>x</think>y" * 100_000) == "y" * 100_000
