"""Small byte-level BPE tokenizer (Sennrich et al. 2016; GPT-2's byte alphabet).

Digits are always separate tokens, so models learn arithmetic many times faster.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.data.render.chat_template import CHAT_TEMPLATE
from posttrain.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<reasoning>",
    "</reasoning>",
)

# Alternatives: single digits; operators plus spaces; words plus leading space; other symbols; whitespace.
_WORDS = Regex(r"\p{N}| ?[-+*/=] (?=\p{N})| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on ``texts``; equal texts give an equal tokenizer.

    The vocabulary holds the ``SPECIAL_TOKENS``, all 256 bytes, and the most frequent merges up to ``vocab_size``.
    Padding, end and beginning are ``<|endoftext|>``; the chat template writes ChatML turns.

    Raises:
        UsageError: ``vocab_size`` leaves no room for the bytes and the special tokens.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise UsageError(
            f"a byte-level tokenizer needs vocab_size >= {least} "
            f"(256 bytes and {len(SPECIAL_TOKENS)} special tokens), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
