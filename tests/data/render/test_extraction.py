"""Extraction of answers: the rule of each template, on well-formed and on broken texts."""

from __future__ import annotations

import pytest

from posttrain import registry
from posttrain.data.render.templates import boxed, chat, document, plain, r1_zero, xml_reasoning


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think> 1 + 1 </think> <answer> 2 </answer>", "2"),
        ("<think> a </think>\n\n<answer>\n2\n</answer>", "2"),
        ("<think> a </think><answer>2</answer>", "2"),
        ("<think> a </think> <answer> 2 </answer> and 3 <answer> 4 </answer>", "2"),
        ("<think> try <answer> 9 </answer> no </think> <answer> 2 </answer>", "2"),
        ("<think> a </think> <answer> <answer> 2 </answer> </answer>", "2"),
        ("<think> a </think> </answer> <answer> 2 </answer>", "2"),
        ("<think> a </think> so it is <answer> 2 </answer>", "2"),
        ("<answer> 2 </answer> <think> a </think>", None),
        ("</answer> 2 <answer> </think>", None),
        ("<think> a </think> </answer> 2 <answer>", None),
        ("<think> a </think> <answer> 2", None),
        ("<think> a <answer> 2 </answer>", None),
        ("<think> a </think> <answer>  </answer>", None),
        ("<think> a </think> 2", None),
        ("", None),
    ],
)
def test_r1_zero(text: str, answer: str | None) -> None:
    assert r1_zero().extract(text) == answer
    other = text.replace("think>", "reasoning>")
    assert xml_reasoning().extract(other) == answer
    if "</think>" in text:
        assert xml_reasoning().extract(text) is None, "the other template's tags do not count"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 + 7 = 19. The answer is 19.", "19"),
        ("<answer> 7 </answer> out of 20", "7"),
        ("<think> 5 </think> It is 6.", "6"),
        ("<think> <answer> 5 </answer> </think> <answer> 6 </answer> 7", "6"),
        ("<think> 5 and then", None),
        ("thinking <think> 5 </think> 6 <think> 7 </think>", None),
        ("no idea", None),
    ],
)
def test_chat(text: str, answer: str | None) -> None:
    assert chat().extract(text) == answer


def test_boxed_plain_and_document() -> None:
    assert boxed().extract("so \\boxed{1}, no: \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert boxed().extract("the answer is 5") is None
    assert plain().extract("first 3, then $4.50.") == "$4.50"
    assert plain().extract("none") is None
    assert document().extract("2 + 2 = 4") == "4"


def test_a_megabyte_of_answer_tags_is_linear() -> None:
    text = "<think></think>" + "</answer>" * 100_000 + "<answer>" * 100_000
    assert r1_zero().extract(text) is None
    assert r1_zero().extract(text + "5</answer>") == "5"


@pytest.mark.parametrize("name", ["chat", "boxed", "as_is", "plain", "dialogue"])
@pytest.mark.parametrize("text", ["<think>\n41 or \\boxed{40} or", "a <think>1</think> 2 <think> \\boxed{3} or"])
def test_thought_that_never_ends_has_no_answer(name: str, text: str) -> None:
    extract = registry.find("template", name).bind({})().extract
    assert extract(text) is None
    ended = extract(f"{text} so</think> It is \\boxed{{42}}")
    assert ended is not None
    assert ended.endswith("42") or name == "dialogue"
    assert extract("[THINK]41") is None
    assert extract("<|channel|>analysis<|message|>41 \\boxed{41}") is None
