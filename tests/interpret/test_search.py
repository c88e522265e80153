"""Features found in ``features.json``, in the order of how much a hit says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.errors import DataError
from posttrain.interpret.features.features import Context, Feature, FeatureReport, write_features
from posttrain.interpret.features.search import search_features

TEXTS = {1: " Eva", 2: " has", 3: " shells", 4: " apples"}


def feature(number: int, ids: tuple[int, ...], fired: tuple[float | None, ...], density: float = 0.1) -> Feature:
    context = Context(2.0, 0, 0, 0, ids, fired)
    return Feature(number, 3, density, 1.0, 2.0, 0.1, (), (context,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    features = [
        feature(0, (1, 2, 3), (2.0, 0.0, None)),  # shells in its context
        feature(1, (1, 3), (0.0, 2.0), density=0.1),  # active on shells
        feature(2, (1, 3), (0.0, 2.0), density=0.2),
        replace(feature(3, (1, 2), (2.0, 0.0)), promoted=((3, 1.5), (4, 1.0))),  # speaks for shells
        feature(4, (1, 2), (2.0, 0.0)),
        Feature(5, 0, 0.0, 0.0, 0.0, 0.1, (), ()),
    ]
    return write_features(FeatureReport(features, TEXTS), tmp_path / "features.json")


def test_what_says_most_comes_first(path: Path) -> None:
    hits, count = search_features(path, "shells ".strip().upper())
    assert [hit.number for hit in hits] == [3, 2, 1, 0]
    assert count == 4
    assert (hits[0].largest, hits[0].address) == (2.0, "features.html#feature-3")
    assert hits[0].speaks_for == (" shells", " apples")
    assert [hit.context for hit in hits[1:]] == [" Eva<< shells>>"] * 2 + ["<< Eva>> has shells"]
    assert [hit.number for hit in search_features(path, "shells", limit=2)[0]] == [3, 2]
    assert search_features(path, "eva has")[1] == 3  # a text over several tokens
    assert search_features(path, "nothing") == ([], 0)
    assert search_features(path, "  ") == ([], 0)


def test_numbers(path: Path) -> None:
    assert [hit.number for hit in search_features(path, "#5 #1 #77")[0]] == [1, 5]


def test_a_file_that_was_made_anew_is_read_anew(path: Path) -> None:
    assert search_features(path, "#5")[1] == 1
    write_features(FeatureReport([feature(7, (1,), (1.0,))], TEXTS), path)
    os.utime(path, ns=(0, 0))
    assert search_features(path, "#5")[1] == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"features": [{}]}', '{"features": 3}', "[" * 100_000])
def test_what_is_no_file_of_features_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "features.json"
    with pytest.raises(DataError, match="there is no such file; `posttrain sae features` makes it"):
        search_features(path, "x")
    path.write_text(content)
    with pytest.raises(DataError, match="this is no file of features"):
        search_features(path, "x")
