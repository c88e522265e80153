"""Dictionaries of a comparison: training, the frozen decoder, planted differences, and how seeds agree."""

from __future__ import annotations

import math

import pytest
import torch
from planted import Planted, PlantedChange, TensorRows, plant, plant_change

from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.fitting import fit_dictionary
from posttrain.interpret.dictionaries.measures import measure
from posttrain.interpret.dictionaries.recipe import DictionaryTrainSection, DictionaryWord
from posttrain.interpret.differences.findings import overlap

ROWS = 24_000


def word(name: str, k: float, features: int) -> DictionaryWord:
    return DictionaryWord.model_validate({"name": name, "k": k, "features": features})


def settings(steps: int, batch: int = 1024) -> DictionaryTrainSection:
    return DictionaryTrainSection(steps=steps, batch=batch, lr=3e-3, precision="fp32")


@pytest.fixture(scope="module")
def planted() -> tuple[Planted, PlantedChange]:
    made = plant(d=64, features=96, l0=4.0, noise=0.02, seed=0)
    return made, plant_change(made, ROWS)


def test_a_dictionary_of_the_difference_finds_what_was_changed(planted: tuple[Planted, PlantedChange]) -> None:
    made, change = planted
    rows = TensorRows(change.post - change.base)
    fitted = fit_dictionary(rows, ROWS, word("topk", 1, 48), settings(300), seed=0)
    changed = torch.cat([(change.factors != 1).nonzero()[:, 0], change.added])
    assert len(changed) == 24
    cosine = (made.directions[changed] @ fitted.W_dec.T).abs().max(1).values
    assert int((cosine > 0.9).sum()) >= 21


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(planted: tuple[Planted, PlantedChange]) -> None:
    rows = TensorRows(planted[1].base)
    one, same, other = (
        fit_dictionary(rows, ROWS, word("batchtopk", 4, 32), settings(5), seed=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(one.W_dec, same.W_dec)
    assert not torch.equal(one.W_dec, other.W_dec)
    assert float(one.input_scale) == 1.0  # it takes raw activations


def test_a_frozen_decoder_stays_random_and_explains_less(planted: tuple[Planted, PlantedChange]) -> None:
    rows = TensorRows(planted[1].base)
    kind = word("batchtopk", 6, 96)
    frozen = fit_dictionary(rows, ROWS, kind, settings(120), seed=1, frozen_decoder=True)
    start = Dictionary(64, 96, kind="batchtopk", options={"k": 6}, seed=1)
    assert torch.allclose(frozen.W_dec, start.W_dec, atol=1e-6)
    assert not torch.allclose(frozen.W_enc, start.W_enc, atol=1e-2)
    learnt = fit_dictionary(rows, ROWS, kind, settings(120), seed=1)
    x = rows.gather(torch.arange(4000))
    assert measure(learnt, [x]).fvu < 0.6 * measure(frozen, [x]).fvu


def test_overlap_by_hand() -> None:
    """Features 0..3 of the second are 3, 2, 1, 0 of the first; feature 4 of each is unlike all others."""
    first = torch.eye(5, 8)
    second = torch.stack([first[3], first[2], first[1], first[0], torch.eye(8)[7]])
    rose = torch.ones(5)
    signs = torch.tensor([-1.0, 1, 1, 1, 1])  # what is feature 0 of the second, 3 of the first, went the other way
    chosen = torch.tensor([0, 3, 4])
    found = overlap((first, second), (chosen, torch.tensor([3, 0])), (rose, signs))
    assert found["count"] == 3
    assert found["share"] == pytest.approx(1 / 3)  # 0 alone: 3 has another sign, 4 no partner
    assert found["by_chance"] == pytest.approx(1 / 5)
    assert found["cosine"] == pytest.approx(2 / 3)
    nothing = overlap((first, second), (torch.tensor([], dtype=torch.long), torch.tensor([3])), (rose, signs))
    assert math.isnan(nothing["share"])
