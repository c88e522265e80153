"""Words and sentences, counted by hand."""

from __future__ import annotations

import time

import pytest

from posttrain.graders.ifeval import count_capital_words, count_sentences, count_words


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("!!! ? .", 0),
        ("No mark", 1),
        ("One.", 1),
        ("One. Two! Three?", 3),
        ("Hello!!! World???", 2),
        ("Wait... what? Yes.", 2),
        ("(One.) (Two.)", 2),
        ("**Bold.** Next.", 2),
        ('"Stop!" he said. "Go!" She went.', 3),
        ("Really? yes.", 2),
        ("A line\nanother line\nlast.", 1),
        ("One.\n\nTwo", 2),
        ("1. First thing.\n2. Second thing.", 2),
        ("Dr. Smith met Mr. J. Jones. They talked.", 2),
        ("In the U.S. Army it is 3.14 today.", 1),
        ("e.g. this one, i.e. that. Done.", 2),
        ("and so on, etc. The end.", 2),
        ("It was I. Then he left.", 2),
        ("No. I do not.", 2),
        ("See example.com for more.", 1),
        ("你好。再见！好吗？", 3),
        ("नमस्ते। यह ठीक है।", 2),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


def test_words() -> None:
    assert count_words("") == 0
    assert count_words("don't, well-known; x_y 3.5") == 7  # don t well known x_y 3 5
    assert count_words("été über 你好") == 3


def test_capital_words() -> None:
    assert count_capital_words("I am A WELL-KNOWN fan of the U.S.A. and of NASA's B2B") == 6
    assert count_capital_words("Title Case, 2020, don't") == 0


@pytest.mark.parametrize(
    "text", ["." * 10**6 + "x", "! " * 10**6, "a. " * 10**5, '"' * 10**6, ".*" * 10**6, "1." * 10**6]
)
def test_hostile_texts_are_counted_at_once(text: str) -> None:
    start = time.process_time()
    assert count_sentences(text) >= 0
    assert time.process_time() - start < 3.0
