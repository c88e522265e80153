"""Patterns of published tokenizers, compared letter by letter: texts are split by them here, without a trial."""

from __future__ import annotations

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _o200k(digits: str, contractions: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


PUBLISHED = frozenset(
    (
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # cl100k: GPT-4, as tiktoken writes it; Llama 3, GLM 4 and OLMo 2; Qwen 2, 2.5 and 3; Qwen 3.5
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
        r"|\s+(?!\S)|\s+",
        _cl100k(r"\p{N}{1,3}"),
        _cl100k(r"\p{N}"),
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # o200k: gpt-oss, Llama 4; Mistral's Tekken
        _o200k(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),
        _o200k(r"\p{N}", ""),
        # DeepSeek V3 and R1
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}".replace(r"\"", '"'),
        # BLOOM
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
        # CLIP
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        r"\s+",
        # of converted SentencePiece models
        r" {2,}",
        # of new models, ``models/tokenizer.py``
        r"\p{N}| ?[-+*/=] (?=\p{N})| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+",
    )
)
