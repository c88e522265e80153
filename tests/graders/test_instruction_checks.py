"""Each instruction, about what a response says and what it looks like: followed and not, and at the bounds."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.graders.ifeval import INSTRUCTIONS, follow

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


def test_every_instruction_has_a_response_that_follows_it_and_one_that_does_not() -> None:
    assert {(name, expected) for name, _, _, expected in CASES} == {(n, e) for n in INSTRUCTIONS for e in (True, False)}


# (instruction, arguments, what only seems to follow it): what cannot be seen neither counts nor parts what can.
UNSEEN = [
    ("length_constraints:number_words", {"relation": "at least", "num_words": 4}, "w\u200bo\u200br\u200bd"),
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 3}, "A\u200bB\u200bC"),
    ("keywords:forbidden_words", {"forbidden_words": ["field"]}, "a fi\u00adeld"),
    ("punctuation:no_comma", {}, "yes\u200b, no"),
    ("detectable_format:title", {}, "<<\u200b>> text"),
    ("detectable_format:title", {}, "<<\u2800>> text"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "- one\n- \u200b"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* *\u2060*"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\n\u200b"),
    ("combination:two_responses", {}, "one\n******\none\u200b"),
    ("combination:two_responses", {}, "one\n******\n\u200b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "one"},
        "one\n\n\u200b",
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "A letter. P.S."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "A letter. P.P.S. ..."),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}, "Section 1 Section 2"),
    ("detectable_format:multiple_sections", {"section_spliter": "DAY", "num_sections": 2}, "DAY 1\nrest\nDAY 2\n..."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* .\n* ."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*.* *_*"),
    ("detectable_format:title", {}, "<<.>>"),
    ("startend:quotation", {}, '"."'),
    ("startend:quotation", {}, '""'),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ".\n***\n."),
    ("combination:two_responses", {}, "one\n******\n."),
    ("combination:two_responses", {}, "one\n******\none."),
    ("detectable_format:json_format", {}, "NaN"),
    ("detectable_format:json_format", {}, "[-Infinity]"),
    ("punctuation:no_comma", {}, "yes\uff0c no"),
]


@pytest.mark.parametrize(("identifier", "arguments", "response"), UNSEEN)
def test_what_is_not_seen_follows_nothing(identifier: str, arguments: dict[str, Any], response: str) -> None:
    assert follow([identifier], [arguments], [response]) == [False]


def test_letters_that_join_do_not_part_words() -> None:
    """Persian writes one word with a zero-width non-joiner, and emoji are joined."""
    words = {"relation": "less than", "num_words": 2}
    assert follow(
        ["length_constraints:number_words"], [words], ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"]
    ) == [True]
