"""Search in a folder of texts by BM25, as a tool."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from posttrain.errors import DataError
from posttrain.registry import register

MAX_BYTES = 1 << 30
_WORD = re.compile(r"\w+")
_SUFFIXES = (".txt", ".md")


@register("environment")
def search(
    *,
    path: str,
    results: Annotated[int, Field(ge=1, le=20)] = 3,
    passage_chars: Annotated[int, Field(ge=100, le=20_000)] = 800,
    k1: Annotated[float, Field(ge=0)] = 1.2,
    b: Annotated[float, Field(ge=0, le=1)] = 0.75,
) -> Search:
    """A tool ``search`` over the ``.txt`` and ``.md`` files of a folder, which returns the best passages.

    ``score(q, d) = Σ_w idf(w) · f(w, d) (k1 + 1) / (f(w, d) + k1 (1 − b + b |d| / mean |d|))`` over the words of the
    query, with ``idf(w) = ln(1 + (N − n(w) + 0.5) / (n(w) + 0.5))``. Equal scores come in the order of the files.

    Args:
        path: the folder.
        results: passages at most.
        passage_chars: paragraphs of a file are joined up to this length.
        k1, b: as in the formula.

    Source: Robertson and Zaragoza (2009), "The probabilistic relevance framework", section 3.

    Raises:
        DataError: no such folder, none of whose files is text, or too many.
    """
    return Search(read_index(path, passage_chars), results, k1, b)


Index = tuple[list[tuple[str, str]], list[Counter[str]]]  # (file, passage), and the words of each passage


@lru_cache(maxsize=4)
def read_index(path: str, passage_chars: int) -> Index:
    """Return the passages of a folder; read once in a process."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(path, "no such folder; give one with .txt or .md files as environment.path")
    passages: list[tuple[str, str]] = []
    size = 0
    for file in sorted(one for one in folder.rglob("*") if one.suffix in _SUFFIXES and one.is_file()):
        size += file.stat().st_size
        if size > MAX_BYTES:
            raise DataError(path, f"more than {MAX_BYTES} bytes of text; give a part of it")
        name = file.relative_to(folder).as_posix()
        passages += [(name, part) for part in _split(file.read_text(encoding="utf-8", errors="replace"), passage_chars)]
    if not passages:
        raise DataError(path, "there is no .txt or .md file with text in it")
    return passages, [Counter(_WORD.findall(text.lower())) for _, text in passages]


class Search:
    """The environment; it has no state."""

    def __init__(self, index: Index, results: int, k1: float, b: float) -> None:
        self._passages, self._words = index
        self._results, self._k1, self._b = results, k1, b
        self._mean = sum(counts.total() for counts in self._words) / len(self._words)
        containing = Counter(word for counts in self._words for word in counts)
        count = len(self._words)
        self._idf = {word: math.log(1 + (count - n + 0.5) / (n + 0.5)) for word, n in containing.items()}

    def reset(self) -> None:
        """Prepare nothing."""

    def search(self, query: str) -> str:
        """Searches the texts and returns the passages that fit best.

        Args:
            query: words to look for.
        """
        words = list(dict.fromkeys(_WORD.findall(query.lower())))
        scores = []
        for number, counts in enumerate(self._words):
            norm = self._k1 * (1 - self._b + self._b * counts.total() / self._mean)
            found = (word for word in words if word in counts)
            score = sum(self._idf[word] * counts[word] * (self._k1 + 1) / (counts[word] + norm) for word in found)
            if score > 0:
                scores.append((-score, number))
        best = [self._passages[number] for _, number in sorted(scores)[: self._results]]
        return "\n\n".join(f"[{name}] {text}" for name, text in best) or "nothing fits"


def _split(text: str, limit: int) -> list[str]:
    passages: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        rest = paragraph.strip()
        if rest and passages and len(passages[-1]) + len(rest) + 1 <= limit:
            passages[-1] += f"\n{rest}"
            continue
        while rest:
            passages.append(rest[:limit])
            rest = rest[limit:].strip()
    return passages
