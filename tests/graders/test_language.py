"""Telling languages apart: a function of the text alone, and a clear word where the package is missing."""

from __future__ import annotations

import sys

import pytest

from posttrain.errors import MissingExtra
from posttrain.graders.ifeval import _load_factory, detect_language, known_languages

SENTENCES = {
    "en": "The quick brown fox jumps over the lazy dog, and then it runs back into the forest.",
    "de": "Der schnelle braune Fuchs springt über den faulen Hund und läuft dann in den Wald zurück.",
    "hi": "यह एक छोटा वाक्य है जो केवल परीक्षण के लिए लिखा गया है।",
    "ko": "이것은 시험을 위해 쓰인 짧은 문장입니다.",
    "sw": "Habari za asubuhi, rafiki yangu; leo tutasoma kitabu kipya pamoja shuleni.",
}


@pytest.mark.parametrize("code", SENTENCES)
def test_languages(code: str) -> None:
    assert detect_language(SENTENCES[code]) == code
    assert code in known_languages()


def test_capitals_are_read_like_small_letters() -> None:
    french = "Le renard brun saute par-dessus le chien paresseux et court dans la forêt."
    assert detect_language(french) == detect_language(french.upper()) == "fr"


def test_the_same_text_always_has_the_same_language() -> None:
    """Without the seed either word would be of one language in three draws of four, and of another in the rest."""
    for word in ("radio", "hello"):
        assert len({detect_language(word) for _ in range(30)}) == 1


@pytest.mark.parametrize("text", ["", "12345", "?!", " \n"])
def test_no_letters_no_language(text: str) -> None:
    assert detect_language(text) is None


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _load_factory.cache_clear()
    monkeypatch.setitem(sys.modules, "langdetect.detector_factory", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '.*\[tasks\]'"):
        detect_language("Hello")
    _load_factory.cache_clear()
