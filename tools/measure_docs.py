"""Measure the documents that were written by hand, and refuse what is too long or too dense.

``python tools/measure_docs.py`` prints words, headings, code blocks, pictures and the mean sentence of every page.
"""

from __future__ import annotations

import re
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = ("decisions",)  # records of decisions
MAX_WORDS = 29_260
MAX_SENTENCE = 17.0  # words, mean over all pages
MIN_HEADINGS, MIN_BLOCKS, MIN_PICTURES = 8.0, 8.0, 1.0  # per 1,000 words
_BLOCK = re.compile(r"^ *```.*?^ *```\s*$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- (\w+) -->.*?<!-- end of \1 -->", re.DOTALL)  # tables that a tool writes into a page
_PICTURE = re.compile(r"!\[|^```mermaid|<img ", re.MULTILINE)


@dataclass
class Measures:
    """Counts of a page, or of all: words and sentences outside of code blocks and tables count as prose."""

    words: int = 0
    headings: int = 0
    blocks: int = 0
    pictures: int = 0
    sentences: int = 0
    sentence_words: int = 0

    def add(self, other: Measures) -> None:
        """Add the counts of another page."""
        sums = (mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        self.__init__(*sums)  # type: ignore[misc]

    def per_thousand(self, count: int) -> float:
        """Return a count per 1,000 words."""
        return 1000 * count / max(1, self.words)

    @property
    def mean_sentence(self) -> float:
        """Mean number of words of a sentence."""
        return self.sentence_words / max(1, self.sentences)


def measure_page(text: str) -> Measures:
    """Return the counts of a Markdown page."""
    prose = _BLOCK.sub("\n", text)
    lines = [line for line in prose.splitlines() if not re.match(r"\s*(#|\||!\[|<)", line)]
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", "\n".join(lines))
    sentences = [s for paragraph in paragraphs for s in re.split(r"(?<=[.!?:])\s+", " ".join(paragraph.split()))]
    lengths = [len(sentence.split()) for sentence in sentences if len(sentence.split()) >= 3]
    return Measures(
        words=len(prose.split()),
        headings=len(re.findall(r"^#{1,4} ", prose, re.MULTILINE)),
        blocks=len(_BLOCK.findall(text)),
        pictures=len(_PICTURE.findall(text)),
        sentences=len(lengths),
        sentence_words=sum(lengths),
    )


def written_pages() -> list[Path]:
    """Return the pages of the site that are not generated."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    own = [page for page in pages if page.relative_to(ROOT / "docs").parts[0] not in SKIPPED]
    return [page for page in own if "<!-- Generated" not in page.read_text(encoding="utf-8")[:400]]


def main() -> int:
    total = Measures()
    print("words headings blocks pictures words/sentence  page")
    for page in written_pages():
        one = measure_page(_GENERATED.sub("", page.read_text(encoding="utf-8")))
        total.add(one)
        row = f"{one.words:5d} {one.headings:8d} {one.blocks:6d} {one.pictures:8d} {one.mean_sentence:14.1f}"
        print(f"{row}  {page.relative_to(ROOT)}")
    rates = [total.per_thousand(count) for count in (total.headings, total.blocks, total.pictures)]
    print(f"all: {total.words} words, {total.mean_sentence:.1f} a sentence; per 1,000 words", end=" ")
    print("{:.1f} headings, {:.1f} blocks, {:.1f} pictures".format(*rates))
    is_long = total.words > MAX_WORDS or total.mean_sentence > MAX_SENTENCE
    is_dense = any(rate < least for rate, least in zip(rates, (MIN_HEADINGS, MIN_BLOCKS, MIN_PICTURES), strict=True))
    return 1 if is_long or is_dense else 0


if __name__ == "__main__":
    sys.exit(main())
