"""Small tokenizers, trained here: tags as special tokens, as ordinary added tokens, and as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<answer>", "</answer>"]
TEXTS = [
    "User: Eva has 12 shells and finds 7 more. How many shells does Eva have now?",
    "Assistant: 12 + 7 = 19. The answer is 19.",
    "Work the problem out step by step, then give the final answer.",
] * 4
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}"
)


def byte_level(specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def chatml_at_rest() -> Any:
    """Byte-level BPE; turn markers and tags are special tokens; a ChatML template; nothing in front of a text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(SPECIALS),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )


@pytest.fixture
def chatml(chatml_at_rest: Any) -> Iterator[Any]:
    """The same, for a test that may give it another chat template."""
    yield chatml_at_rest
    chatml_at_rest.chat_template = CHATML


@pytest.fixture(scope="session")
def added_tags() -> Any:
    """Tags are added tokens that are not flagged as special, as in Qwen3; a plain word is added too."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(SPECIALS[:3]), eos_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in SPECIALS[3:]])
    tokenizer.add_tokens([AddedToken("zebra", special=False, normalized=False)])
    return tokenizer


@pytest.fixture(scope="session")
def with_bos() -> Any:
    """Puts ``<s>`` in front of every text, as Llama does; its turn marker swallows the white space behind it."""
    backend = byte_level(["<s>", "</s>"])
    backend.add_special_tokens([AddedToken("<|user|>", rstrip=True, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def plain_words() -> Any:
    """Whole words; the tags are words like any other, and most words are unknown."""
    words = "[UNK] [EOS] User: Assistant: <think> </think> <answer> </answer> Eva has 12 + 7 = 19 The answer is 19."
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words.split()))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[EOS]")
