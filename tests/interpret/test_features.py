"""What is said of features: their numbers, contexts and tokens, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.features.features import Report, check_features, describe_features, write_features
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


def describe(dictionary: Dictionary, store: ActivationStore, **options) -> Report:
    unembedding = torch.zeros(40, 3)
    unembedding[33, 0], unembedding[34, 0], unembedding[35, 1] = 2.0, -1.0, 8.0
    lens = Lens(unembedding, torch.tensor([1.0, 0.5, 1.0]), centres=False)
    return describe_features(dictionary, store, lens=lens, tokenizer=Letters(), tokens=2, **options)


def test_numbers_contexts_and_tokens(dictionary: Dictionary, store: ActivationStore) -> None:
    report = describe(dictionary, store, about={"dictionary": "mine"})
    first, second, third = report["features"]
    assert [first[key] for key in ("feature", "active", "density", "mean", "max")] == [0, 5, 0.5, 12 / 5, 4.0]
    assert first["histogram"]["bin_width"] == 8 / 32
    assert [(i, n) for i, n in enumerate(first["histogram"]["counts"]) if n] == [(4, 1), (8, 2), (12, 1), (16, 1)]
    places = [[c[key] for key in ("activation", "document", "position", "start")] for c in first["contexts"]]
    assert places == [[4, 0, 3, 0], [3, 1, 2, 0]]
    assert first["contexts"][0]["tokens"] == ["a", "b", "c", "d", "e"]
    assert first["contexts"][0]["activations"] == [0, 2, 0, 4, 1]
    # logits 2 and -1 of the first coordinate, minus their mean over 40 tokens; the second's are halved by the gain
    assert first["promoted"][0] == ["x", 33, 2 - 1 / 40]
    assert first["suppressed"][0] == ["y", 34, -1 - 1 / 40]
    assert second["promoted"][0] == ["z", 35, 4 - 4 / 40]
    assert (second["density"], second["contexts"][0]["activation"]) == (0.1, 1.5)
    assert second["contexts"][0]["tokens"] == ["u", "v"]
    assert (third["active"], third["mean"], third["contexts"], third["histogram"]["counts"]) == (0, 0.0, [], [])
    about = report["about"]
    assert (about["rows"], about["documents"], about["silent"], about["dictionary"]) == (10, 3, 1, "mine")
    assert about["active_per_row"] == pytest.approx(0.6)


def test_windows_around_the_strongest_token(dictionary: Dictionary, tmp_path: Path) -> None:
    x = torch.zeros(200, 3)
    x[150, 0], x[3, 1] = 1.0, 1.0
    store = write_tensors(tmp_path / "long", {"resid.1": x}, documents=[list(range(200))])
    first, second, _ = describe_features(dictionary, store)["features"]
    context = first["contexts"][0]
    assert (context["position"], context["start"]) == (150, 130)
    assert context["tokens"] == [f"<{i}>" for i in range(130, 161)]  # without a model ids stand for tokens
    assert (context["activations"][20], first["promoted"]) == (1, [])
    assert (second["contexts"][0]["start"], len(second["contexts"][0]["tokens"])) == (0, 14)


def test_only_some_features(dictionary: Dictionary, store: ActivationStore) -> None:
    every = describe(dictionary, store)["features"]
    some = describe(dictionary, store, features=[1, 0, 1], contexts=1)["features"]
    assert [feature["feature"] for feature in some] == [1, 0]
    assert some[0] == every[1]
    assert some[1]["contexts"] == every[0]["contexts"][:1]
    with pytest.raises(UsageError, match="feature 3: this dictionary has 3, from 0 to 2"):
        check_features(dictionary, [0, 3])


def test_write_features_has_one_feature_on_each_line(
    dictionary: Dictionary, store: ActivationStore, tmp_path: Path
) -> None:
    report = describe(dictionary, store)
    path = write_features(report, tmp_path / "features.json")
    assert len(path.read_text().splitlines()) == 2 + 3 + 1
    found = json.loads(path.read_text())
    assert found["features"][1] == {"address": "features.html#feature-1"} | report["features"][1]
    assert found["about"]["rows"] == 10
    assert "W_U" in found["about"]["logit_lens"]


def test_rows_of_another_width_are_refused(store: ActivationStore) -> None:
    with pytest.raises(UsageError, match="3 numbers at a token, but the dictionary is for 5"):
        describe_features(Dictionary(5, 4, kind="l1"), store)
