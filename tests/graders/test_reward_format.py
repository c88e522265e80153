"""Format rewards, by hand: strict, soft and counting, with the tags of the template."""

from __future__ import annotations

import pytest

from closeness import approx
from posttrain.errors import UsageError
from posttrain.graders.rewards import xml_count, xml_format, xml_soft
from refusing import refuses

THINK = ("think", "answer")
XML = ("reasoning", "answer")
GOOD = "<think> 1 + 1 = 2 </think> <answer> 2 </answer>"


@pytest.mark.parametrize(
    ("text", "strict", "soft"),
    [
        (GOOD, 1, 1),
        (GOOD.replace("</think> <answer>", "</think>\n\n<answer>"), 1, 1),
        (GOOD.replace("</think> <answer>", "</think><answer>"), 1, 1),
        (f"\n{GOOD}\n", 1, 1),
        ("<think></think> <answer>2</answer>", 1, 1),
        ("<think> a </think> <answer>  </answer>", 0, 0),
        ("<think> a </think> <answer>\u200b</answer>", 0, 0),
        ("<think> a </think> <answer> </answer> <think> b </think> <answer> 2 </answer>", 0, 1),
        ("<think> a </think> <answer> </answer> 2 <answer> 2 </answer>", 0, 0),
        (f"{GOOD} so there", 0, 1),
        (f"Well. {GOOD}", 0, 1),
        ("<think> a </think> hence <answer> 2 </answer>", 0, 0),
        ("<answer> 2 </answer> <think> a </think>", 0, 0),
        ("</think> a <think> </answer> 2 <answer>", 0, 0),
        ("<think> a </think> </answer> 2 <answer>", 0, 0),
        ("<think> a </think> <answer> 2", 0, 0),
        ("<think> a <answer> 2 </answer>", 0, 0),
        ("a </think> <answer> 2 </answer>", 0, 0),
        (f"{GOOD} <answer> 3 </answer>", 0, 1),
        ("<think> <think> a </think> <answer> 2 </answer>", 0, 1),
        ("<think> a </think> <answer> <answer> 2 </answer> </answer>", 0, 1),
        ("<think> a </think> b </think> <answer> 2 </answer>", 0, 1),
        ("<THINK> a </THINK> <ANSWER> 2 </ANSWER>", 0, 0),
        ("", 0, 0),
    ],
)
def test_strict_and_soft(text: str, strict: int, soft: int) -> None:
    assert xml_format(text, THINK) == strict
    assert xml_soft(text, THINK) == soft


def test_the_tags_come_from_the_template() -> None:
    text = "<reasoning>\na\n</reasoning>\n<answer>\n2\n</answer>\n"
    assert (xml_format(text, XML), xml_soft(text, XML)) == (1.0, 1.0)
    assert (xml_format(text, THINK), xml_soft(text, THINK)) == (0.0, 0.0)


def test_count_gives_a_quarter_for_each_mark_that_stands_once() -> None:
    assert xml_count(GOOD, THINK) == 1.0
    assert xml_count("<think> a </think>", THINK) == 0.5
    assert xml_count("<think> a", THINK) == 0.25
    assert xml_count("<think> a <think> </think>", THINK) == 0.25
    assert xml_count("", THINK) == 0.0


def test_count_looks_at_marks_alone() -> None:
    assert xml_count("<think></think><answer>\u200b</answer>", THINK) == 1.0


def test_count_deducts_what_trails() -> None:
    assert xml_count(f"{GOOD} \n", THINK) == 1.0
    assert xml_count(GOOD + "x" * 100, THINK) == approx(0.8)
    assert xml_count(GOOD + "x" * 100, THINK, trailing=0.001) == approx(0.9)
    assert xml_count(GOOD + "x" * 10_000, THINK) == 0.0


@pytest.mark.parametrize("reward", [xml_format, xml_soft, xml_count])
def test_a_template_without_tags_is_refused(reward: object) -> None:
    with refuses(UsageError, "r1_zero or xml_reasoning"):
        reward("text", ())  # type: ignore[operator]


def test_a_megabyte_of_tags_is_linear() -> None:
    text = "<think>" * 150_000 + "</think> " * 150_000
    assert (xml_format(text, THINK), xml_soft(text, THINK)) == (0.0, 0.0)
    assert xml_soft(text + "<answer> 1 </answer>", THINK) == 1.0
    assert xml_soft("<think>" + "</think><answer> </answer>" * 50_000, THINK) == 0.0
