"""IFEval: each instruction followed and not, strict and loose readings, rows in their layout, and every real row."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import empty_answers
import pytest
from ifeval import (
    INSTRUCTIONS,
    _load_factory,
    count_sentences,
    follow,
    ifeval,
    loose_variants,
    read_arguments,
    task,
)

from posttrain import registry
from posttrain.errors import DataError, RecipeError, UnknownComponent, UsageError
from posttrain.graders.grading import Submission, Verdict, grade_submissions
from posttrain.untrusted import declare_code

pytestmark = pytest.mark.slow

GERMAN = "der schnelle braune fuchs springt über den faulen hund und läuft dann zurück."
ENGLISH = "the quick brown fox jumps over the lazy dog, and then it runs back."

CASES: list[tuple[str, dict[str, Any], str, bool]] = [
    ("keywords:existence", {"keywords": ["cat", "Dog"]}, "A DOG chased cats.", True),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A dog.", False),
    ("keywords:frequency", {"keyword": "war", "frequency": 3, "relation": "at least"}, "War, war, warden.", True),
    ("keywords:frequency", {"keyword": "war", "frequency": 4, "relation": "at least"}, "War, war, warden.", False),
    ("keywords:frequency", {"keyword": "war", "frequency": 4, "relation": "less than"}, "War, war, warden.", True),
    ("keywords:frequency", {"keyword": "war", "frequency": 3, "relation": "less than"}, "War, war, warden.", False),
    ("keywords:frequency", {"keyword": "c++", "frequency": 1, "relation": "at least"}, "I like C++.", True),
    ("keywords:forbidden_words", {"forbidden_words": ["can", "ride"]}, "A canoe on a bridge.", True),
    ("keywords:forbidden_words", {"forbidden_words": ["can", "ride"]}, "You CAN.", False),
    ("keywords:forbidden_words", {"forbidden_words": ["a.b"]}, "axb", True),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Quiz, q", True),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 3, "let_relation": "at least"}, "Quiz, q", False),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 3, "let_relation": "less than"}, "Quiz, q", True),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "less than"}, "Quiz, q", False),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "# a #", True),
    ("language:response_language", {"language": "de"}, GERMAN, True),
    ("language:response_language", {"language": "de"}, ENGLISH, False),
    ("language:response_language", {"language": "de"}, "123", False),
    ("change_case:english_capital", {}, ENGLISH.upper(), True),
    ("change_case:english_capital", {}, ENGLISH.upper() + "a", False),
    ("change_case:english_capital", {}, GERMAN.upper(), False),
    ("change_case:english_lowercase", {}, ENGLISH, True),
    ("change_case:english_lowercase", {}, ENGLISH + "A", False),
    ("change_case:english_lowercase", {}, GERMAN, False),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "NO, I do", True),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": "at least"}, "NO, I do", False),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": "less than"}, "NO, I do", True),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "NO, I do",
        False,
    ),
    ("punctuation:no_comma", {}, "One; two.", True),
    ("punctuation:no_comma", {}, "One, two.", False),
    ("startend:end_checker", {"end_phrase": "Is that ALL?"}, 'Yes. "Is that all?" \n', True),
    ("startend:end_checker", {"end_phrase": "Is that all?"}, "Is that all? Yes.", False),
    ("startend:quotation", {}, ' "Quoted." ', True),
    ("startend:quotation", {}, '"Quoted." he said', False),
    ("startend:quotation", {}, '"', False),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say THIS. "}, " say this. And more.", True),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say this."}, "Sure. Say this.", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\n\nP. s. Write soon.", True),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\n\nPS Write soon.", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.P.S. Write soon.", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "It is at app.start", False),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. Write soon.", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.S. Write soon.", False),
    ("detectable_content:postscript", {"postscript_marker": "Note:"}, "Bye.\nnote:write soon.", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "Dear [name], at [your address]", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 3}, "Dear [name], at [your address] [ ] []", False),
]


WORDS, SENTENCES = "length_constraints:number_words", "length_constraints:number_sentences"
FIRST_WORD, PARAGRAPHS = "length_constraints:nth_paragraph_first_word", "length_constraints:number_paragraphs"
BULLETS, HIGHLIGHTS = "detectable_format:number_bullet_lists", "detectable_format:number_highlighted_sections"
SECTIONS, CONSTRAINED = "detectable_format:multiple_sections", "detectable_format:constrained_response"
JSON, TITLE, TWO = "detectable_format:json_format", "detectable_format:title", "combination:two_responses"


def second(word: str, count: int = 2) -> dict[str, Any]:
    return {"num_paragraphs": count, "nth_paragraph": 2, "first_word": word}


CASES += [
    (WORDS, {"num_words": 3, "relation": "at least"}, "one two three", True),
    (WORDS, {"num_words": 4, "relation": "at least"}, "one two three", False),
    (WORDS, {"num_words": 4, "relation": "less than"}, "one two three", True),
    (WORDS, {"num_words": 3, "relation": "less than"}, "one two three", False),
    (SENTENCES, {"num_sentences": 2, "relation": "at least"}, "One. Two.", True),
    (SENTENCES, {"num_sentences": 3, "relation": "at least"}, "One. Two.", False),
    (SENTENCES, {"num_sentences": 3, "relation": "less than"}, "One. Two.", True),
    (SENTENCES, {"num_sentences": 2, "relation": "less than"}, "One. Two.", False),
    (PARAGRAPHS, {"num_paragraphs": 2}, "One\n***\nTwo", True),
    (PARAGRAPHS, {"num_paragraphs": 2}, "***\nOne *** Two\n***\n", True),
    (PARAGRAPHS, {"num_paragraphs": 2}, "One\n\nTwo", False),
    (PARAGRAPHS, {"num_paragraphs": 3}, "One\n***\n***\nTwo", False),
    (PARAGRAPHS, {"num_paragraphs": 1}, "One", True),
    (FIRST_WORD, second("weekend"), 'One.\n\n"Weekend," he said.', True),
    (FIRST_WORD, second("weekend"), "One.\n \n\n\nweekend", True),
    (FIRST_WORD, second("weekend"), "One.\n\nA weekend.", False),
    (FIRST_WORD, second("weekend", 3), "One.\n\nWeekend.", False),
    (FIRST_WORD, second("weekend"), "One.\n\nWeekends.", False),
    (BULLETS, {"num_bullets": 3}, "List:\n* one\n  - two\n- **three**\n* * *\n---", True),
    (BULLETS, {"num_bullets": 1}, "* one\n* two", False),
    (BULLETS, {"num_bullets": 1}, "*one*\n-two\n** three", False),
    (HIGHLIGHTS, {"num_highlights": 2}, "*one part* and **another part**", True),
    (HIGHLIGHTS, {"num_highlights": 3}, "*one part* and **another part**", False),
    (HIGHLIGHTS, {"num_highlights": 1}, "* one\n* two\n** **", False),
    (HIGHLIGHTS, {"num_highlights": 1}, "*over two\nlines*", False),
    (SECTIONS, {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1\nfoo\nSECTION 2\nbar", True),
    (SECTIONS, {"section_spliter": "SECTION", "num_sections": 3}, "SECTION 1\nfoo\nSECTION 2\nbar", False),
    (SECTIONS, {"section_spliter": "Section", "num_sections": 1}, "SECTION 1", False),
    (CONSTRAINED, {}, "I say: My answer is maybe.", True),
    (CONSTRAINED, {}, "Maybe.", False),
    (CONSTRAINED, {}, "My answer is yes. My answer is no.", False),
    (JSON, {}, ' {"a": [1, null]} ', True),
    (JSON, {}, '```json\n{"a": 1}\n```', True),
    (JSON, {}, "```\n[1]\n```", True),
    (JSON, {}, "```[1]```", True),
    (JSON, {}, "```python\n[1]\n```", False),
    (JSON, {}, 'Here: {"a": 1}', False),
    (JSON, {}, "{'a': 1}", False),
    (JSON, {}, "[" * 100_000, False),
    (JSON, {}, "9" * 10_000, False),
    (TITLE, {}, "<<A title>>\ntext", True),
    (TITLE, {}, "<< >> <title>", False),
    (TITLE, {}, "<<over two\nlines>>", False),
    (TWO, {}, "One.\n******\nTwo.", True),
    (TWO, {}, "One.\n******\nOne.", False),
    (TWO, {}, "One.\n******\nTwo.\n******\nThree.", False),
    (TWO, {}, "One.\n******", False),
    (TWO, {}, "One.\n***\nTwo.", False),
]


@pytest.mark.parametrize(("identifier", "arguments", "response", "expected"), CASES)
def test_instructions(identifier: str, arguments: dict[str, Any], response: str, expected: bool) -> None:
    assert follow([identifier], [arguments], [response]) == [expected]


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
    assert found.info == {"instructions_strict": strict, "instructions_loose": loose, "prompt_loose": prompt_loose}


def test_without_instructions_nothing_is_graded() -> None:
    found = verdict("Sea and sea.", {})
    assert found.outcome == "ungraded"
    assert found.info == dict.fromkeys(("instructions_strict", "instructions_loose", "prompt_loose"), 0.0)


def test_eight_variants() -> None:
    assert loose_variants("*a*\nb\n*c*") == ["*a*\nb\n*c*", "b\n*c*", "*a*\nb", "b", "a\nb\nc", "b\nc", "a\nb", "b"]
    assert follow(["punctuation:no_comma"], [{}], ["", " "]) == [False]  # an empty response follows nothing


def test_arguments_are_checked() -> None:
    assert read_arguments("keywords:frequency", {**PROMPT["kwargs"][1], "num_words": None}) == PROMPT["kwargs"][1]
    assert read_arguments("detectable_format:title", None) == {}
    with pytest.raises(UnknownComponent, match=r"'keywords:frequncy'. Did you mean 'keywords:frequency'"):
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


ROW = {
    "key": 7,
    "prompt": "Say it without commas in three words or more.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 3, "num_bullets": None}],
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_row(tmp_path: Path) -> None:
    (example,) = task(path=write(tmp_path / "x.jsonl", [ROW])).examples
    assert (example.id, example.answer, example.grader) == ("ifeval/test/1", None, "ifeval")
    assert example.messages[0].content == ROW["prompt"]
    assert example.meta == {
        "key": 7,
        "num_instructions": 2,
        "instruction_id_list": ("punctuation:no_comma", "length_constraints:number_words"),
        "kwargs": ({}, {"relation": "at least", "num_words": 3}),
    }
    assert ifeval(Submission("One two three", None, None, example.meta)).outcome == "right"
    assert ifeval(Submission("One two", None, None, example.meta)).outcome == "wrong"


def test_rows_that_cannot_be_graded_are_dropped_and_counted(tmp_path: Path) -> None:
    def other(identifier: str, **kwargs: Any) -> dict[str, Any]:
        return {**ROW, "instruction_id_list": [identifier], "kwargs": [kwargs]}

    rows = [
        ROW,
        other("punctuation:no_coma"),
        other("punctuation:no_coma"),
        other("length_constraints:number_words", num_words=3, relation="at most"),
        other("language:response_language", language="tlh"),
        other("language:response_language", language="de"),
    ]
    read = task(path=write(tmp_path / "x.jsonl", rows))
    assert [e.id for e in read.examples] == ["ifeval/test/1", "ifeval/test/6"]
    (unknown, count), (arguments, _), (tongue, _) = read.dropped.items()
    assert unknown == "there is no instruction 'punctuation:no_coma'. Did you mean 'punctuation:no_comma'?"
    assert count == 2
    assert "'length_constraints:number_words'.relation: Input should be 'at least' or 'less than'" in arguments
    assert tongue == "no detector for the language 'tlh'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": [{}]}, "2 instructions need as many 'kwargs'; got 1"),
        ({"kwargs": [{}, 3]}, "'kwargs' mappings"),
        ({"instruction_id_list": []}, "must be a list with one entry for each instruction"),
        ({"instruction_id_list": "punctuation:no_comma"}, "must be a list"),
        ({"prompt": " "}, "'prompt' is empty"),
    ],
)
def test_bad_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl:1: .*{message}"):
        task(path=write(tmp_path / "x.jsonl", [{**ROW, **change}]))
    with pytest.raises(DataError, match="no usable examples"):
        task(path=write(tmp_path / "y.jsonl", []))


def test_the_detector_is_requested_before_anything_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load_factory.cache_clear()
    monkeypatch.setitem(sys.modules, "langdetect.detector_factory", None)
    assert len(task(path=write(tmp_path / "x.jsonl", [ROW])).examples) == 1
    row = {**ROW, "instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]}
    with pytest.raises(UsageError, match="pip install langdetect"):
        task(path=write(tmp_path / "y.jsonl", [row]))
    _load_factory.cache_clear()


needs_data = pytest.mark.skipif(
    "POSTTRAIN_DATA" not in os.environ, reason="POSTTRAIN_DATA names no folder with real rows"
)


@needs_data
def test_real_rows() -> None:
    read = task(path=str(Path(os.environ["POSTTRAIN_DATA"]) / "ifeval" / "ifeval.jsonl.gz"))
    assert (len(read.examples), read.dropped) == (480, {})
    assert {name for e in read.examples for name in e.meta["instruction_id_list"]} == set(INSTRUCTIONS)
    responses = ("Fine.", "* one\n* two\n\nP.S. [name] <<title>>", '{"a": [1]}', "<think>x")
    for example in read.examples:
        for response in responses:
            found = ifeval(Submission(response, None, None, example.meta))
            assert found.outcome in ("right", "wrong") if response != "<think>x" else found.outcome == "no_answer"
            assert 0.0 <= found.info["instructions_strict"] <= found.info["instructions_loose"] <= 1.0


def test_task_named_in_a_recipe_brings_its_grader(tmp_path: Path) -> None:
    declare_code(["ifeval:task"])
    entry = registry.find("task", "ifeval:task")
    (example,) = entry.bind({"path": write(tmp_path / "x.jsonl", [ROW])}, "task")().examples
    assert example.grader == "ifeval"
    submission = Submission("One two three", None, None, example.meta)
    assert [verdict.outcome for verdict in grade_submissions(example.grader, [submission])] == ["right"]


# Instructions that a response of nothing would follow: it contains no comma, no capital and few words.
FOLLOWED_BY_NOTHING = [
    ("punctuation:no_comma", {}),
    ("change_case:english_lowercase", {}),
    ("change_case:english_capital", {}),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 100}),
    ("keywords:forbidden_words", {"forbidden_words": ["field", "thanks"]}),
    ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 10}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}),
]


@pytest.mark.parametrize(("instruction", "arguments"), FOLLOWED_BY_NOTHING)
def test_a_response_of_nothing_follows_no_instruction(instruction: str, arguments: dict[str, object]) -> None:
    meta = {"instruction_id_list": (instruction,), "kwargs": (arguments,)}
    texts = empty_answers.invisible_texts()[:: 3 if instruction.startswith("punctuation") else 12]
    ways = [
        *texts,
        *(f"<think> hm </think> <answer> {text} </answer>" for text in texts),
        *(f"<think>x</think>{text}" for text in texts),
    ]
    found = [ifeval(Submission(text, None, None, meta)) for text in ways]
    paid = [
        text
        for text, verdict in zip(ways, found, strict=True)
        if verdict.outcome == "right" or any(verdict.info.values())
    ]
    assert paid == []
