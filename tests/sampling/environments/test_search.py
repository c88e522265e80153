"""Search in a folder of texts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from posttrain.errors import DataError
from posttrain.sampling.environments.built_in import search


def test_search_ranks_by_bm25(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The cat sat.\n\nA dog barked at the cat and the cat ran.")
    (tmp_path / "b.md").write_text("Dogs and cats.")
    (tmp_path / "c.bin").write_bytes(b"cat cat cat")
    found = search(path=str(tmp_path), passage_chars=100, results=2)
    assert found.search("dog") == "[a.txt] The cat sat.\nA dog barked at the cat and the cat ran."
    assert found.search("zebra") == "nothing fits"
    assert [sum(words.values()) for words in found._words] == [13, 3]
    assert (found._mean, found._idf["cat"]) == (8, math.log(1 + 1.5 / 1.5)), "in one passage of two"
    with pytest.raises(DataError, match="no such folder"):
        search(path=str(tmp_path / "none"))
