"""Rules as principles: what each says of an answer, and the answer put right, by hand."""

from __future__ import annotations

import pytest

from posttrain.errors import RecipeError
from posttrain.graders.behaviour import Objection, at_most_words, closes_tags, shows_working, without_phrases
from posttrain.registry import entries, find
from posttrain.types import Example, Message

ASKED = Example("a/1", (Message("user", "How many?"),))
WORKED = Example("a/2", (Message("user", "How many?"),), "7", solution="3 + 4 = 7.")


def test_every_rule_is_tried_here() -> None:
    assert set(entries("principle")) == {"at_most_words", "closes_tags", "shows_working", "without_phrases"}


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("One two. Three four five.", "One two."),  # whole sentences that fit
        ("One two three four five.", "One two three four"),  # none fits
        ('"Go." He  went. And\nthen some more.', '"Go." He  went.'),
        (" One two three four.", None),
        ("", None),
    ],
)
def test_at_most_words(text: str, revision: str | None) -> None:
    found = at_most_words(text, ASKED, limit=4)
    assert (found and found.revision) == revision
    if found is not None:
        assert found.critique == f"It has {len(text.split())} words, and at most 4 are asked for."
        assert found.revision is not None
        assert at_most_words(found.revision, ASKED, limit=4) is None


def test_without_phrases() -> None:
    text = "So  the answer is 4. Basso the Answer is, so THE answer\nis 5."
    found = without_phrases(text, ASKED, phrases=["so the answer is"], instead="Answer:")
    assert found == Objection(
        "It says 'So the answer is', 'so THE answer is'.", "Answer: 4. Basso the Answer is, Answer: 5."
    )
    assert without_phrases("well, well!", ASKED, phrases=["well"]) == Objection("It says 'well'.", ", !")
    assert without_phrases("well  then", ASKED, phrases=["well"]) == Objection("It says 'well'.", "then")
    assert without_phrases("farewell", ASKED, phrases=["well"]) is None
    # the longer phrase first, and what stands in its place is text, no pattern
    assert without_phrases("ab cd", ASKED, phrases=["ab", "ab cd"], instead=r"\1") == Objection(
        "It says 'ab cd'.", r"\1"
    )


def test_closes_tags() -> None:
    def told(text: str) -> Objection | None:
        return closes_tags(text, ASKED, tags=["a", "b"])

    assert told("<a> x <b> y") == Objection("It does not close <a>, <b>.", "<a> x <b> y</b></a>")
    assert told("<a> x </a> <c> y") is None
    assert told("<a> <b> </a>") == Objection("It closes <a> where that is not what is open.", None)
    assert told("x </b>") == Objection("It closes <b> where that is not what is open.", None)


def test_shows_working() -> None:
    assert shows_working("3 + 4 = 7. So 7.", ASKED) is None
    assert shows_working("12 × 2 / 4 = 6", ASKED) is None
    complaint = "It does not say how it comes to its answer."
    assert shows_working("x = 7.", WORKED) == Objection(complaint, "3 + 4 = 7. x = 7.")
    assert shows_working("It is 7.", ASKED) == Objection(complaint, None)


def test_options_are_checked() -> None:
    with pytest.raises(RecipeError, match=r"limit: Input should be greater than or equal to 1"):
        find("principle", "at_most_words").bind({"limit": 0})
    with pytest.raises(RecipeError, match=r"has no key 'phrase'.*Did you mean 'phrases'"):
        find("principle", "without_phrases").bind({"phrase": ["a"]})
