"""Text as it comes, token by token, against the whole decoded at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.render.encoding import TextStream


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_a_character_of_several_tokens_comes_whole(chatml_at_rest: Any) -> None:
    ids = chatml_at_rest.encode("a🙂b", add_special_tokens=False)
    assert len(ids) == 6  # four bytes, each a token of its own
    assert pieces_of(chatml_at_rest, ids) == ["a", "", "", "", "🙂", "b", ""]


def test_bytes_that_never_become_a_character_are_shown_in_the_end(chatml_at_rest: Any) -> None:
    ids = chatml_at_rest.encode("🙂", add_special_tokens=False)[:2]
    parts = pieces_of(chatml_at_rest, [*chatml_at_rest.encode("x", add_special_tokens=False), *ids])
    assert parts[:3] == ["x", "", ""]
    assert parts[3] == chatml_at_rest.decode(ids)
    endless = pieces_of(chatml_at_rest, ids[1:] * 9)  # continuation bytes without a beginning
    assert "".join(endless) == chatml_at_rest.decode(ids[1:] * 9)
    assert endless[:4] == ["", "", "", "\ufffd" * 4]


@pytest.mark.parametrize("name", ["chatml_at_rest", "with_bos", "plain_words"])
@given(text=st.text(alphabet="aé漢🙂 \nTheanswer12+", max_size=24))
@settings(deadline=None, max_examples=60)
def test_the_pieces_are_the_text(name: str, text: str, request_fixtures: dict[str, Any]) -> None:
    tokenizer = request_fixtures[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def request_fixtures(chatml_at_rest: Any, with_bos: Any, plain_words: Any) -> dict[str, Any]:
    return {"chatml_at_rest": chatml_at_rest, "with_bos": with_bos, "plain_words": plain_words}
