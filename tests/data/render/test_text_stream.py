"""Text as it comes, token by token, against the whole decoded at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.data.render import decode_response, encode_prompt
from posttrain.data.render.assistant import encode_answer
from posttrain.data.render.encoding import TextStream
from posttrain.data.render.template import build_template
from posttrain.interpret.features.lens import show_token, show_tokens
from posttrain.recipes.sections import Component
from posttrain.types import Message


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


CHATS = {  # what stands before an answer: a line break, a bracket, a marker, and a template that writes a space itself
    "line": "{% for m in messages %}{{ m.role + '\n' + m.content + '</s>' }}{% endfor %}"
    "{{ 'assistant\n' if add_generation_prompt }}",
    "marker": "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>' }}{% endfor %}"
    "{{ '<s>' if add_generation_prompt }}",
    "brackets": "{% for m in messages %}{{ '[INST] ' + m.content.strip() + ' [/INST]' if m.role == 'user' "
    "else ' ' + m.content.strip() + '</s>' }}{% endfor %}",
}


def sentencepiece(kind: str, chat_template: str) -> Any:
    """As Llama 2, Mistral 7B, CodeLlama and Phi-3: a space is put before a text, and taken away by the decoder."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"returnx+1", "▁x", "▁▁"]
    merges = [("▁", "x"), ("▁", "▁")]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    if kind == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(strip)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )


@pytest.mark.parametrize("kind", ["first", "always", "legacy"])
@pytest.mark.parametrize("name", ["as_is", "plain", "boxed", "line", "marker"])
def test_completion_keeps_the_space_that_a_decoder_strips(kind: str, name: str) -> None:
    """The body of a function is graded as it was written: ``    return x+1`` was three spaces."""
    tokenizer = sentencepiece(kind, CHATS.get(name, CHATS["line"]))
    template = build_template(Component(name="chat" if name in CHATS else name))
    prompt = encode_prompt(tokenizer, template, (Message("user", "def f(x):"),))
    for text in ("    return x+1", "  x\n    return", "\n    return x", " é", "\treturn"):
        ids = encode_answer(tokenizer, template, text, prompt, {})
        decoded = decode_response(tokenizer, template, [*ids, tokenizer.eos_token_id], prompt)
        if name == "marker" and kind == "always" and text[0] != " ":
            assert decoded.removeprefix(" ") == text, "behind a marker this tokenizer writes both alike"
        else:
            assert decoded == text
        stream = TextStream(tokenizer, prompt)
        assert "".join([*(stream.push(token) for token in ids), stream.flush()]) == decoded
        alone = tokenizer.decode(ids)
        assert alone != decoded or name == "marker" or text[0] != " ", "the decoder strips it"


def test_completion_has_the_space_that_the_template_writes_before_it() -> None:
    tokenizer, template = sentencepiece("legacy", CHATS["brackets"]), build_template(Component(name="chat"))
    prompt = encode_prompt(tokenizer, template, (Message("user", "x"),))
    ids = encode_answer(tokenizer, template, "return", prompt, {})
    assert decode_response(tokenizer, template, ids, prompt) == " return"
    assert encode_answer(tokenizer, template, " return", prompt, {}) == ids


def test_tokens_are_shown_with_the_space_in_front_of_them() -> None:
    tokenizer = sentencepiece("first", CHATS["line"])
    ids = tokenizer.encode("x x  return", add_special_tokens=False)
    assert "".join(show_tokens(tokenizer, ids[1:])) == " x  return"
    assert show_token(tokenizer, tokenizer.convert_tokens_to_ids("▁x")) == " x"


def test_text_that_leads_to_the_end_is_held_back_and_not_shown(chatml_at_rest: Any) -> None:
    end, ids = chatml_at_rest.eos_token_id, chatml_at_rest.encode("ab<|im_end|>", add_special_tokens=False)
    stream = TextStream(chatml_at_rest, lead="<|im_end|>")
    assert [stream.push(token) for token in ids] == ["a", "b", ""]
    assert stream.end() == ""
    assert decode_alike(chatml_at_rest, [*ids, end]) == "ab<|im_end|>"
    again = TextStream(chatml_at_rest, lead="<|im_end|>")
    assert "".join([*(again.push(token) for token in (*ids, *ids[:2])), again.flush()]) == "ab<|im_end|>ab"


def decode_alike(tokenizer: Any, ids: list[int]) -> str:
    """Without a lead nothing is held back."""
    stream = TextStream(tokenizer)
    return "".join(stream.push(token) for token in ids[:-1])
