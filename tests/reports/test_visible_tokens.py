"""Tokens on pages: where one ends and the next begins, and what of them is space, is to be seen."""

from __future__ import annotations

import re

from posttrain.reports.page import MARKS, render, visible


def test_spaces_and_line_ends_have_a_mark() -> None:
    assert visible(" a\n\t\r") == "·a↵⇥␍"
    assert visible("\x07é\u202e") == r"\x07é\u202e"


def test_the_features_page_has_the_same_marks() -> None:
    script = render("features.js")
    line = next(line for line in script.splitlines() if line.startswith("const visible"))
    found = dict(re.findall(r'replace\(/(.+?)/g, "\\u([0-9a-f]{4})"\)', line))
    assert {mark.encode().decode("unicode_escape"): chr(int(code, 16)) for mark, code in found.items()} == MARKS


def test_tokens_are_distinguished() -> None:
    assert ".text .tok, .tokens span { border-left: 1px" in render("style.css")
