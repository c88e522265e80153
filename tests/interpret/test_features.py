"""What is said of features: their numbers, contexts and tokens, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.features.features import FeatureReport, check_features, describe_features, write_features
from posttrain.interpret.features.logit_lens import Lens

DOCUMENTS = [[10, 11, 12, 13, 14], [10, 11, 20], [30, 31]]


class Letters:
    """A tokenizer whose token i is chr(i + 87)."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(i + 87) for i in ids)


@pytest.fixture
def store(tmp_path: Path) -> ActivationStore:
    x = torch.zeros(10, 3)
    x[:, 0] = torch.tensor([0, 2, 0, 4, 1, 0, 2, 3, -1, -1], dtype=torch.float32)
    x[9, 1] = 1.5
    return write_tensors(tmp_path / "store", {"resid.1": x}, documents=DOCUMENTS)


@pytest.fixture
def dictionary() -> Dictionary:
    """Features are the positive parts of three coordinates; the third is silent."""
    made = Dictionary(3, 3, kind="l1")
    with torch.no_grad():
        made.W_dec.copy_(torch.eye(3))
        made.W_enc.copy_(torch.eye(3))
    return made


def describe(dictionary: Dictionary, store: ActivationStore, **options) -> FeatureReport:
    unembedding = torch.zeros(40, 3)
    unembedding[33, 0], unembedding[34, 0], unembedding[35, 1] = 2.0, -1.0, 8.0
    lens = Lens(unembedding, torch.tensor([1.0, 0.5, 1.0]), centres=False)
    return describe_features(dictionary, store, lens=lens, tokenizer=Letters(), tokens=2, **options)


def test_numbers_contexts_and_tokens(dictionary: Dictionary, store: ActivationStore) -> None:
    report = describe(dictionary, store, about={"dictionary": "mine"})
    first, second, third = report.features
    assert (first.number, first.active, first.density, first.mean, first.maximum) == (0, 5, 0.5, 12 / 5, 4.0)
    assert first.bin_width == 8 / 32
    assert [(i, n) for i, n in enumerate(first.counts) if n] == [(4, 1), (8, 2), (12, 1), (16, 1)]
    assert [(c.activation, c.document, c.position, c.start) for c in first.contexts] == [(4, 0, 3, 0), (3, 1, 2, 0)]
    assert first.contexts[0].ids == (10, 11, 12, 13, 14)
    assert first.contexts[0].activations == (0, 2, 0, 4, 1)
    # logits 2 and -1 of the first coordinate, minus their mean over 40 tokens; the second's are halved by the gain
    assert first.promoted[0] == (33, pytest.approx(2 - 1 / 40))
    assert first.suppressed[0] == (34, pytest.approx(-1 - 1 / 40))
    assert second.promoted[0] == (35, pytest.approx(4 - 4 / 40))
    assert (second.density, second.contexts[0].activation, second.contexts[0].ids) == (0.1, 1.5, (30, 31))
    assert (third.active, third.mean, third.contexts, third.counts) == (0, 0.0, (), ())
    assert report.texts[13] == "d"
    about = report.about
    assert (about["rows"], about["documents"], about["silent"], about["dictionary"]) == (10, 3, 1, "mine")
    assert about["active_per_row"] == pytest.approx(0.6)


def test_windows_around_the_strongest_token(dictionary: Dictionary, tmp_path: Path) -> None:
    x = torch.zeros(200, 3)
    x[150, 0], x[3, 1] = 1.0, 1.0
    store = write_tensors(tmp_path / "long", {"resid.1": x}, documents=[list(range(200))])
    first, second, _ = describe_features(dictionary, store).features
    context = first.contexts[0]
    assert (context.position, context.start, context.ids) == (150, 130, tuple(range(130, 161)))
    assert context.activations[20] == 1
    assert (second.contexts[0].start, second.contexts[0].ids) == (0, tuple(range(14)))


def test_only_some_features(dictionary: Dictionary, store: ActivationStore) -> None:
    every, some = describe(dictionary, store), describe(dictionary, store, features=[1, 0, 1], contexts=1)
    assert [feature.number for feature in some.features] == [1, 0]
    assert some.features[0] == every.features[1]
    assert some.features[1].contexts == every.features[0].contexts[:1]
    with pytest.raises(UsageError, match="feature 3: this dictionary has 3, from 0 to 2"):
        check_features(dictionary, [0, 3])


def test_json_has_it_all(dictionary: Dictionary, store: ActivationStore, tmp_path: Path) -> None:
    path = write_features(describe(dictionary, store), tmp_path / "features.json")
    lines = path.read_text().splitlines()
    assert len(lines) == 2 + 3 + 1  # one feature on each line
    found = json.loads(path.read_text())
    first = found["features"][0]
    assert (first["feature"], first["density"], first["mean"], first["max"]) == (0, 0.5, 2.4, 4.0)
    assert first["contexts"][0]["tokens"] == ["a", "b", "c", "d", "e"]
    assert first["contexts"][0]["activations"] == [0, 2, 0, 4, 1]
    assert first["promoted"][0] == ["x", 33, 1.975]
    assert sum(first["histogram"]["counts"]) == 5
    assert found["about"]["rows"] == 10
    assert "W_U" in found["about"]["logit_lens"]


def test_without_a_model_ids_stand_for_tokens(dictionary: Dictionary, store: ActivationStore) -> None:
    report = describe_features(dictionary, store)
    assert report.texts[13] == "<13>"
    assert report.features[0].promoted == ()
    assert report.about["logit_lens"] == ""


def test_rows_of_another_width_are_refused(store: ActivationStore) -> None:
    with pytest.raises(UsageError, match="3 numbers at a token, but the dictionary is for 5"):
        describe_features(Dictionary(5, 4, kind="l1"), store)
