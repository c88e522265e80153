"""The tokenizer: any text survives, digits stand alone, markers cannot be forged, training is deterministic."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from posttrain.data.stories.task import stories
from posttrain.errors import UsageError
from posttrain.models.tokenizer import SPECIAL_TOKENS, train_tokenizer
from refusing import refuses


def train(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    texts = (example.solution or "" for example in stories(style="document", size=1500).examples)
    return train_tokenizer(texts, vocab_size)


TOKENIZER = train()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives(written: str) -> None:
    ids = TOKENIZER(written, split_special_tokens=True)["input_ids"]
    assert TOKENIZER.decode(ids) == written
    assert min(ids, default=9) >= len(SPECIAL_TOKENS)


def test_every_digit_is_a_token_of_its_own() -> None:
    ids = TOKENIZER("Tom has 1904 shells: 19 + 12 = 31.")["input_ids"]
    pieces = [TOKENIZER.decode([i]) for i in ids]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("1904" + "19" + "12" + "31")
    vocabulary = TOKENIZER.get_vocab()
    assert not [token for token in vocabulary if len(token) > 1 and any(c.isdigit() for c in token)]


def test_special_tokens_have_the_first_ids_and_are_never_made_of_plain_text() -> None:
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(9))
    assert TOKENIZER("<think> a </think>")["input_ids"][0] == 3
    assert 3 not in TOKENIZER("<think> a </think>", split_special_tokens=True)["input_ids"]
    assert TOKENIZER.eos_token_id == TOKENIZER.bos_token_id == TOKENIZER.pad_token_id == 0
    assert TOKENIZER("a")["input_ids"] == TOKENIZER("a", add_special_tokens=False)["input_ids"]  # nothing is added


def test_equal_texts_give_an_equal_tokenizer_and_it_comes_back_from_disk(tmp_path: Path) -> None:
    again = train()
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = stories().examples[0].messages[0].content + " <think> 1 + 2 = 3. </think>"
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.all_special_tokens == TOKENIZER.all_special_tokens
    assert len(loaded) == 400


def test_a_vocabulary_too_small_is_refused() -> None:
    with refuses(UsageError, "265"):
        train_tokenizer(iter(["a"]), 264)
