"""What a response says: keywords, letters, language, case, first and last words (IFEval, table 4)."""

from __future__ import annotations

import re

from posttrain.graders.ifeval.language import detect_language
from posttrain.graders.ifeval.sentences import count_capital_words
from posttrain.graders.ifeval.table import Count, Relation, Text, Texts, holds, instruction

# Those that need to know the language of a response.
READ_LANGUAGE = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)


@instruction("keywords:existence")
def has_keywords(response: str, *, keywords: Texts) -> bool:
    """Every keyword stands in the response, in any case, also inside of a word."""
    lowered = response.lower()
    return all(keyword.lower() in lowered for keyword in keywords)


@instruction("keywords:frequency")
def keyword_frequency(response: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """The keyword stands there so many times, in any case, also inside of a word."""
    return holds(response.lower().count(keyword.strip().lower()), relation, frequency)


@instruction("keywords:forbidden_words")
def lacks_words(response: str, *, forbidden_words: Texts) -> bool:
    """None of the words stands there as a word of its own, in any case."""
    return not any(_stands_alone(word, response) for word in forbidden_words)


@instruction("keywords:letter_frequency")
def letter_frequency(response: str, *, letter: Text, let_frequency: Count, let_relation: Relation) -> bool:
    """The letter (or another character) stands there so many times, in any case."""
    return holds(response.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("language:response_language")
def in_language(response: str, *, language: Text) -> bool:
    """The response is written in the language, by its code.

    Departure: the reference counts a response without letters as followed; here it is not.
    """
    return detect_language(response) == language


@instruction("change_case:english_capital")
def in_capitals(response: str) -> bool:
    """English, without small letters.

    Departure: the reference's detector reads no word in capitals, so that any language passes; here it reads
    them in lower case.
    """
    return response.isupper() and detect_language(response) == "en"


@instruction("change_case:english_lowercase")
def in_lower_case(response: str) -> bool:
    """English, without capitals."""
    return response.islower() and detect_language(response) == "en"


@instruction("change_case:capital_word_frequency")
def capital_word_frequency(response: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """So many words are written in capitals; "I" and "A" are such words."""
    return holds(count_capital_words(response), capital_relation, capital_frequency)


@instruction("punctuation:no_comma")
def has_no_comma(response: str) -> bool:
    """There is no comma."""
    return "," not in response


@instruction("startend:end_checker")
def ends_with(response: str, *, end_phrase: Text) -> bool:
    """The last words are the phrase, in any case; quotation marks around the response do not count."""
    return response.strip().strip('"').rstrip().lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def is_quoted(response: str) -> bool:
    """The whole response stands in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@instruction("combination:repeat_prompt")
def repeats_prompt(response: str, *, prompt_to_repeat: Text) -> bool:
    """The response begins with the request, word for word, in any case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("detectable_content:postscript")
def has_postscript(response: str, *, postscript_marker: Text) -> bool:
    """A postscript begins with the marker, in any case, also with spaces (``P. S.``).

    ``P.P.S`` is not a postscript that begins with ``P.S.``, as little as letters within a word are.
    """
    letters = postscript_marker.strip().rstrip(".").split(".")
    spelled = r"\.\s?".join(re.escape(letter.strip()) for letter in letters)
    boundary = r"(?!\w)" if letters[-1][-1:].isalnum() else ""
    return re.search(rf"(?<![\w.]){spelled}{boundary}", response, re.IGNORECASE) is not None


@instruction("detectable_content:number_placeholders")
def has_placeholders(response: str, *, num_placeholders: Count) -> bool:
    """At least so many placeholders: words in square brackets, such as ``[address]``."""
    brackets = re.findall(r"\[([^\[\]\n]+)\]", response)
    return sum(bool(re.search(r"\w", inner)) for inner in brackets) >= num_placeholders


def _stands_alone(word: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE) is not None
