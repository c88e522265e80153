"""Rows and their order, trainings in memory, and the quality of a dictionary by hand and inside its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Planted, PlantedChange, TensorRows, plant, plant_change
from torch import Tensor

from closeness import allclose, approx
from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.activations.sites import replaced
from posttrain.interpret.saes.fitting import (
    RowBatches,
    StoreRows,
    first_held_out,
    fit_sae,
    measure_quality,
    median_norm,
    recover,
)
from posttrain.interpret.saes.sae import SparseAutoencoder
from posttrain.interpret.saes.sae_recipe import SaeComponent, SaeTrainSection
from refusing import refuses

X = torch.arange(60.0).view(30, 2)


@pytest.fixture
def paired(tmp_path: Path) -> ActivationStore:
    documents = [[1] * 12, [2] * 11, [3] * 7]
    return write_tensors(tmp_path / "store", {"resid.2": [X, X * 3]}, documents=documents)


def batches_of(seed: int) -> list[torch.Tensor]:
    batches = RowBatches(TensorRows(X), 20, 8, seed)
    return [batches.of_step(step) for step in range(10)]


def test_every_epoch_has_every_row_once() -> None:
    batches = batches_of(seed=1)
    assert [tuple(batch.shape) for batch in batches] == [(8, 2)] * 10
    rows = torch.cat(batches)[:, 0].long().tolist()
    epochs = [rows[start : start + 20] for start in range(0, 80, 20)]
    assert all(sorted(epoch) == list(range(0, 40, 2)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not torch.equal(torch.cat(batches_of(seed=2)), torch.cat(batches))


def test_the_batch_of_a_step_needs_none_before_it() -> None:
    """Step 4 has places 32 to 40 of the sequence of epochs, of 20 rows each: the second epoch's last eight."""
    assert torch.equal(RowBatches(TensorRows(X), 20, 8, seed=1).of_step(4), batches_of(seed=1)[4])


def test_held_out_rows_begin_with_a_document(paired: ActivationStore) -> None:
    rows = StoreRows(paired, source="base")
    assert [first_held_out(rows, held_out, 4) for held_out in (1, 7, 8, 18, 19)] == [23, 23, 12, 12, 11]
    assert first_held_out(TensorRows(X), 7, 4) == 23
    with refuses(UsageError, "held out (eval.rows)", "batch of 4"):
        first_held_out(TensorRows(X), 28, 4)


def test_the_sources_of_a_paired_store(paired: ActivationStore) -> None:
    chosen = torch.tensor([7, 3])
    read = {s: StoreRows(paired, "resid.2", s).gather(chosen) for s in ("base", "post", "difference")}
    assert torch.equal(read["base"], X[chosen])
    assert torch.equal(read["difference"], (X * 2)[chosen])
    with refuses(UsageError, "required; available"):
        StoreRows(paired)
    with refuses(UsageError, "'model'"):
        StoreRows(paired, None, "model")


def test_a_store_of_one_model_needs_no_name(tmp_path: Path) -> None:
    store = write_tensors(tmp_path / "store", {"resid.2": X}, dtype="bf16")
    rows = StoreRows(store)
    assert (rows.source, rows.d, rows.num_rows) == ("model", 2, 30)
    assert rows.gather(torch.tensor([1])).dtype == torch.float32
    assert median_norm(rows) == approx(float(X.bfloat16().float().norm(dim=1).sort().values[14]))
    with refuses(UsageError, "'difference'"):
        StoreRows(store, None, "difference")


def test_whole_documents_are_not_cut(tmp_path: Path) -> None:
    documents = [[0] * n for n in (3, 1, 9, 2, 2)]
    rows = StoreRows(write_tensors(tmp_path / "s", {"resid.1": torch.randn(17, 2)}, documents=documents))
    assert list(rows.whole_documents(4)) == [(0, 4), (4, 15), (15, 17)]
    assert list(rows.whole_documents(1)) == [(0, 3), (3, 4), (4, 13), (13, 15), (15, 17)]
    assert list(rows.whole_documents(100)) == [(0, 17)]


# Trainings in memory.

ROWS = 12_000


def word(name: str, k: float, features: int) -> SaeComponent:
    return SaeComponent.model_validate({"name": name, "k": k, "features": features})


def settings(steps: int, batch: int = 1024) -> SaeTrainSection:
    return SaeTrainSection(steps=steps, batch=batch, lr=3e-3, precision="fp32")


@pytest.fixture(scope="module")
def planted() -> tuple[Planted, PlantedChange]:
    made = plant(d=64, features=96, l0=4.0, noise=0.02, seed=0)
    return made, plant_change(made, ROWS)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(planted: tuple[Planted, PlantedChange]) -> None:
    rows = TensorRows(planted[1].base)
    one, same, other = (fit_sae(rows, ROWS, word("batchtopk", 4, 32), settings(5), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.W_dec, same.W_dec)
    assert not torch.equal(one.W_dec, other.W_dec)
    assert float(one.input_scale) == 1.0  # it takes raw activations


def test_a_frozen_decoder_stays_random_and_explains_less(planted: tuple[Planted, PlantedChange]) -> None:
    rows = TensorRows(planted[1].base)
    kind = word("batchtopk", 6, 96)
    frozen = fit_sae(rows, ROWS, kind, settings(120), seed=1, frozen_decoder=True)
    start = SparseAutoencoder(64, 96, kind="batchtopk", options={"k": 6}, seed=1)
    assert allclose(frozen.W_dec, start.W_dec, atol=1e-6)
    assert not allclose(frozen.W_enc, start.W_enc, atol=1e-2)
    learnt = fit_sae(rows, ROWS, kind, settings(120), seed=1)
    x = rows.gather(torch.arange(4000))
    assert measure_quality(learnt, [x]).fvu < 0.6 * measure_quality(frozen, [x]).fvu


# Quality.


def test_fvu_has_one_mean_for_all_rows() -> None:
    """A dictionary that keeps the first coordinate (when positive) and gives the mean of the second."""
    sae = SparseAutoencoder(2, 1, kind="l1")
    with torch.no_grad():
        sae.W_enc.copy_(torch.tensor([[1.0], [0.0]]))
        sae.W_dec.copy_(torch.tensor([[1.0, 0.0]]))
        sae.b_dec.copy_(torch.tensor([0.0, 3.0]))
    x = torch.tensor([[2.0, 3.0], [4.0, 5.0], [0.0, 1.0], [-2.0, 3.0]])
    # errors: 0, 2² (second), 2² (second), 2² (first) = 12; about the mean (1, 3): 1+9+1+9 and 0+4+4+0 = 28
    quality = measure_quality(sae, [x[:1], x[1:]])
    assert quality.fvu == approx(12 / 28)
    assert quality.l0 == 0.5
    assert quality.dense == 1.0
    assert quality.silent == 0.0
    assert quality.rows == 4
    assert measure_quality(sae, [x]).fvu == approx(quality.fvu)


def test_fvu_far_from_the_origin_keeps_its_digits() -> None:
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)).double() + 1e4
    sae = SparseAutoencoder(8, 4, kind="l1")
    with torch.no_grad():
        sae.b_dec.copy_(x.float().double().mean(0))
        sae.W_dec.zero_()
    assert measure_quality(sae, x.float().split(100)).fvu == approx(1.0, rel=1e-4)


DOCUMENTS = [[5, 9, 30, 2, 77], [4, 4, 100], [8]]


def exact(d: int) -> SparseAutoencoder:
    """Features ± each coordinate: it gives back what it is given."""
    sae = SparseAutoencoder(d, 2 * d, kind="l1")
    with torch.no_grad():
        both = torch.cat([torch.eye(d), -torch.eye(d)])
        sae.W_dec.copy_(both)
        sae.W_enc.copy_(both.T)
    return sae


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_recover_a_dictionary_that_loses_nothing_recovers_all(
    architecture: str, tiny_random: Callable[..., Any]
) -> None:
    model = tiny_random(architecture)
    numbers = recover(model, exact(64), "resid.1", DOCUMENTS)
    assert numbers["tokens"] == 4 + 2
    assert numbers["ce_spliced"] == approx(numbers["ce"], abs=1e-4)
    assert numbers["ce_recovered"] == approx(1, abs=1e-3)
    expected = 0.0
    for ids in DOCUMENTS[:2]:
        log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        expected -= sum(log_probs[i, token].item() for i, token in enumerate(ids[1:]))
    assert numbers["ce"] == approx(expected / 6, rel=1e-5)
    nothing = exact(64)
    with torch.no_grad():
        nothing.W_dec.zero_()
    found = recover(model, nothing, "resid.1", DOCUMENTS)
    assert found["ce_spliced"] == found["ce_zero"]
    assert found["ce_recovered"] == 0


def test_recover_first_tokens_and_outliers_stay(tiny_random: Callable[..., Any]) -> None:
    model = tiny_random("qwen3")

    def erase(values: Tensor) -> Tensor:
        return torch.cat([values[:, :1], torch.zeros_like(values[:, 1:])], dim=1)

    with replaced(model, "resid.1", erase):
        log_probs = model(input_ids=torch.tensor([DOCUMENTS[0]])).logits[0].log_softmax(-1)
    expected = -sum(log_probs[i, token].item() for i, token in enumerate(DOCUMENTS[0][1:])) / 4
    assert recover(model, exact(64), "resid.1", DOCUMENTS[:1])["ce_zero"] == approx(expected, rel=1e-5)
    found = recover(model, exact(64), "resid.1", DOCUMENTS, limit=1e-6)
    assert found["ce_zero"] == found["ce"]
    with refuses(UsageError, "at least 2 tokens"):
        recover(model, exact(64), "resid.1", [[3]])
