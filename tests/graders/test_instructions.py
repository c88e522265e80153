"""Instructions of a prompt taken together: strict and loose, arguments, and what counts as the response."""

from __future__ import annotations

import time
from typing import Any

import pytest

from posttrain.errors import RecipeError, UnknownWord
from posttrain.graders.grading import Submission, Verdict
from posttrain.graders.ifeval import INSTRUCTIONS, follow, ifeval, loose_variants, read_arguments

PROMPT: dict[str, Any] = {
    "instruction_id_list": ("punctuation:no_comma", "keywords:frequency"),
    "kwargs": ({}, {"keyword": "sea", "frequency": 2, "relation": "at least"}),
}


def verdict(text: str, meta: dict[str, Any] = PROMPT) -> Verdict:
    return ifeval(Submission(text, None, None, meta))


def test_all_instructions_of_the_paper_are_there() -> None:
    assert len(INSTRUCTIONS) == 25
    assert all(check.__doc__ for check in INSTRUCTIONS.values())


@pytest.mark.parametrize(
    ("text", "outcome", "strict", "loose", "prompt_loose"),
    [
        ("Sea and sea.", "right", 1.0, 1.0, 1.0),
        ("Sea, sea.", "wrong", 0.5, 0.5, 0.0),
        ("Sea, sun.", "wrong", 0.0, 0.0, 0.0),
        ("Sure, gladly!\nSea and sea.", "wrong", 0.5, 1.0, 1.0),  # without its first line
        ("Sea and sea.\nEnjoy, friend!", "wrong", 0.5, 1.0, 1.0),  # without its last line
        ("Sure, gladly!\nSea and sea.\nEnjoy, friend!", "wrong", 0.5, 1.0, 1.0),
        ("Sea and s*e*a.", "wrong", 0.5, 1.0, 1.0),  # without asterisks
        ("Sea,\nsea", "wrong", 0.5, 1.0, 1.0),  # each instruction may need another variant
        ("<think>a, b</think> <answer> Sea and sea. </answer>", "right", 1.0, 1.0, 1.0),
        ("<think>sea sea</think> Sea, sun.", "wrong", 0.0, 0.0, 0.0),
        ("<think>Sea and sea.", "no_answer", 0.0, 0.0, 0.0),
        ("<think>Sea and sea.</think> \n", "no_answer", 0.0, 0.0, 0.0),
        ("", "no_answer", 0.0, 0.0, 0.0),
    ],
)
def test_strict_and_loose(text: str, outcome: str, strict: float, loose: float, prompt_loose: float) -> None:
    found = verdict(text)
    assert found.outcome == outcome
    assert found.facts == {"instructions_strict": strict, "instructions_loose": loose, "prompt_loose": prompt_loose}


def test_without_instructions_nothing_is_graded() -> None:
    found = verdict("Sea and sea.", {})
    assert found.outcome == "ungraded"
    assert found.facts == dict.fromkeys(("instructions_strict", "instructions_loose", "prompt_loose"), 0.0)


def test_eight_variants() -> None:
    assert loose_variants("*a*\nb\n*c*") == ["*a*\nb\n*c*", "b\n*c*", "*a*\nb", "b", "a\nb\nc", "b\nc", "a\nb", "b"]
    assert follow(["punctuation:no_comma"], [{}], ["", " "]) == [False]  # an empty response follows nothing


def test_arguments_are_checked() -> None:
    assert read_arguments("keywords:frequency", {**PROMPT["kwargs"][1], "num_words": None}) == PROMPT["kwargs"][1]
    assert read_arguments("detectable_format:title", None) == {}
    with pytest.raises(UnknownWord, match=r"'keywords:frequncy'. Did you mean 'keywords:frequency'"):
        read_arguments("keywords:frequncy", {})
    for arguments, message in (
        ({"keyword": "sea", "frequency": 2}, "relation: .*needs this key"),
        ({"keyword": "sea", "frequency": 2, "relation": "at most"}, "'at least' or 'less than'"),
        ({"keyword": " ", "frequency": 2, "relation": "at least"}, "keyword"),
        ({"keyword": "sea", "frequency": -1, "relation": "at least"}, "frequency"),
        ({"keyword": "sea", "frequency": 2, "relation": "at least", "keywrd": "x"}, "has no key 'keywrd'"),
    ):
        with pytest.raises(RecipeError, match=message):
            read_arguments("keywords:frequency", arguments)
    with pytest.raises(RecipeError, match="relation"):
        verdict("x", {"instruction_id_list": ["keywords:frequency"], "kwargs": [{"keyword": "x", "frequency": 1}]})


ALL: dict[str, dict[str, Any]] = {
    "keywords:existence": {"keywords": ["x"]},
    "keywords:frequency": {"keyword": "x", "frequency": 1, "relation": "at least"},
    "keywords:forbidden_words": {"forbidden_words": ["x"]},
    "keywords:letter_frequency": {"letter": "x", "let_frequency": 1, "let_relation": "at least"},
    "language:response_language": {"language": "de"},
    "change_case:capital_word_frequency": {"capital_frequency": 1, "capital_relation": "less than"},
    "startend:end_checker": {"end_phrase": "x"},
    "combination:repeat_prompt": {"prompt_to_repeat": "x"},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_content:number_placeholders": {"num_placeholders": 1},
    "length_constraints:number_words": {"num_words": 1, "relation": "less than"},
    "length_constraints:number_sentences": {"num_sentences": 1, "relation": "less than"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 1},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "x"},
    "detectable_format:number_bullet_lists": {"num_bullets": 1},
    "detectable_format:number_highlighted_sections": {"num_highlights": 1},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 1},
}


@pytest.mark.parametrize(
    "text",
    ["* " * 10**5, "- \n" * 10**5, "<<" * 10**5, "[" * 10**5, "***" * 10**5, "```" + " " * 10**5 + "`", "*a" * 10**5,
     "P." * 10**5, "Section " * 10**5, " " * 10**5 + "-", "\n" * 10**5 + "-", "\x00" * 10**5, "[1," * 10**5,
     "." * 10**5],
)  # fmt: skip
def test_hostile_responses_are_checked_at_once(text: str) -> None:
    start = time.process_time()
    followed = follow(list(INSTRUCTIONS), [ALL.get(name, {}) for name in INSTRUCTIONS], [text])
    assert len(followed) == 25
    assert time.process_time() - start < 3.0
