"""Each instruction about what a response says: followed and not, and at the bounds of its relation."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.graders.ifeval.grader import follow
from posttrain.graders.ifeval.table import INSTRUCTIONS

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


@pytest.mark.parametrize(("identifier", "arguments", "response", "expected"), CASES)
def test_instructions(identifier: str, arguments: dict[str, Any], response: str, expected: bool) -> None:
    assert follow([identifier], [arguments], [response]) == [expected]


def test_every_instruction_of_the_module_has_a_response_that_follows_it_and_one_that_does_not() -> None:
    own = {name for name, check in INSTRUCTIONS.items() if check.__module__.endswith("ifeval.content")}
    assert {(name, expected) for name, _, _, expected in CASES} == {(n, e) for n in own for e in (True, False)}
