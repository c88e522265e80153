"""Values of ``compare --over KEY=A,B``: what the command line reads as YAML keeps its commas."""

from __future__ import annotations

import argparse

import pytest

from posttrain.commands.sweeps.command import read_over


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("train.lr=1e-4, 3e-4", ["1e-4", "3e-4"]),
        ("""x.y='a,b',"c,d" """, ["'a,b'", '"c,d"']),
        ("x.y=[1,2],[3]", ["[1,2]", "[3]"]),
        ("x.y={a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
    ],
)
def test_read_over_commas_in_quotes_and_brackets_part_nothing(text: str, values: list[str]) -> None:
    assert read_over(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize("text", ["train.lr=1e-4", "=1,2", "train.lr", "x.y='a,b'"])
def test_read_over_without_two_values_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="with two values or more"):
        read_over(text)
