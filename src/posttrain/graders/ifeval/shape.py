"""What a response looks like: lengths, paragraphs, lists, sections, formats (IFEval, table 4)."""

from __future__ import annotations

import json
import re

from posttrain.graders.ifeval.sentences import count_sentences, count_words
from posttrain.graders.ifeval.table import Count, Relation, Text, holds, instruction

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_BULLET = re.compile(r"^[ \t]*[*-][ \t]++(?![*\- \t]*$)", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*(?=[^\s*])[^*\n]*(?<=\S)\*\*|\*(?=[^\s*])[^*\n]*(?<=\S)\*")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


@instruction("length_constraints:number_words")
def number_words(response: str, *, num_words: Count, relation: Relation) -> bool:
    """So many words, which are runs of letters and digits."""
    return holds(count_words(response), relation, num_words)


@instruction("length_constraints:number_sentences")
def number_sentences(response: str, *, num_sentences: Count, relation: Relation) -> bool:
    """So many sentences (see ``count_sentences``).

    Departure: the reference asks a trained tokenizer (Punkt); here it is rules, which agree on plain prose.
    """
    return holds(count_sentences(response), relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def number_paragraphs(response: str, *, num_paragraphs: Count) -> bool:
    """Exactly so many paragraphs with the divider ``***`` between them; none is blank."""
    parts = _split_at(response, "***")
    return len(parts) == num_paragraphs and all(parts)


@instruction("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(response: str, *, num_paragraphs: Count, nth_paragraph: Count, first_word: Text) -> bool:
    """Exactly so many paragraphs, parted by blank lines, and the n-th (from 1) begins with the word, in any case."""
    paragraphs = [part.strip() for part in _BLANK_LINE.split(response) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    match = re.match(r"[^\w]*([\w-]+)", paragraphs[nth_paragraph - 1])
    return match is not None and match[1].lower() == first_word.strip().lower()


@instruction("detectable_format:number_bullet_lists")
def number_bullets(response: str, *, num_bullets: Count) -> bool:
    """Exactly so many bullet points: lines that begin with ``*`` or ``-`` and a space. Rulers (``* * *``) are none.

    Departure: the reference also counts ``*`` and ``-`` without the space, which Markdown does not.
    """
    return len(_BULLET.findall(response)) == num_bullets


@instruction("detectable_format:number_highlighted_sections")
def number_highlights(response: str, *, num_highlights: Count) -> bool:
    """At least so many highlighted sections, ``*so*`` or ``**so**``, each on one line.

    Departure: as in Markdown the stars stand directly at the words, so that two bullets on a line are no highlight.
    """
    return len(_HIGHLIGHT.findall(response)) >= num_highlights


@instruction("detectable_format:multiple_sections")
def number_sections(response: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """At least so many sections, each of which begins with the word and a number (``Section 1``)."""
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


@instruction("detectable_format:constrained_response")
def is_constrained(response: str) -> bool:
    """One of the three answers that the prompt offers stands in the response, and no other of them."""
    return sum(option in response for option in CONSTRAINED_RESPONSES) == 1


@instruction("detectable_format:json_format")
def is_json(response: str) -> bool:
    """The whole response is JSON, with or without a Markdown fence around it."""
    text = response.strip()
    if text.startswith("```") and text.endswith("```") and len(text) > 6:
        opening, _, text = text[3:-3].partition("\n") if "\n" in text else ("", "", text[3:-3])
        if opening.strip().lower() not in ("", "json"):
            return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits; very deep nesting
        return False
    return True


@instruction("detectable_format:title")
def has_title(response: str) -> bool:
    """A title in double angular brackets on one line, ``<<so>>``, which is not blank."""
    return any(title.strip(" <>") for title in _TITLE.findall(response))


@instruction("combination:two_responses")
def gives_two_responses(response: str) -> bool:
    """Exactly two different responses with six asterisks between them."""
    parts = _split_at(response, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _split_at(text: str, divider: str) -> list[str]:
    """What stands between dividers; a divider at the very start or end of the text parts nothing."""
    return [part.strip() for part in text.strip().removeprefix(divider).removesuffix(divider).split(divider)]
