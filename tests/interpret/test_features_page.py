"""The page of features: one file, and nothing that a text in it could do."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from made_up_features import EVIL, report_of
from posttrain.interpret.features.lens import show_token, show_tokens
from posttrain.reports.features_page import render_features


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_no_text_becomes_markup() -> None:
    page = render_features(report_of(5))
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert "<b>" not in page
    assert "<h1>Features of &lt;b&gt;mine&lt;/b&gt;</h1>" in page
    data = data_of(page)
    assert {text for text in data["texts"] if text in EVIL} == set(EVIL)
    number, active, density, mean, largest, width, counts, promoted, suppressed, contexts = data["features"][3]
    assert (number, active, density, mean, largest, width, counts) == (3, 4, 0.0004, 1.0, 2.0, 0.25, [0, 3, 5])
    assert data["texts"][promoted[0][0]] == "word3"
    assert (data["texts"][suppressed[0][0]], suppressed[0][1]) == (" left\n", -1.0)
    activation, document, position, peak, tokens, levels = contexts[0]
    assert (activation, document, position, peak, levels) == (2.0, 3, 1, 1, [0, 255, -1])
    assert [data["texts"][token] for token in tokens] == [" left\n", EVIL[3], "right"]


def test_only_its_own_script_runs_and_nothing_is_loaded() -> None:
    page = render_features(report_of(2))
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert html.unescape(policy[1]).startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}';" in html.unescape(policy[1])
    assert "innerHTML" not in script[1]
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []
    assert "src=" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_show_tokens_puts_a_character_of_several_tokens_with_the_last_of_them() -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    plain = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(letters))}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    ids = tokenizer("a é—").input_ids
    assert [show_token(tokenizer, token) for token in ids[:4]] == ["a", " ", r"\xc3", r"\xa9"]
    assert show_tokens(tokenizer, ids) == ["a", " ", r"\xc3", "é", r"\xe2", r"\x80", "—"]
    assert show_tokens(tokenizer, ids[3:]) == [r"\xa9", r"\xe2", r"\x80", "—"]
