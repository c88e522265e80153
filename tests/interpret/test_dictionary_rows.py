"""The order of rows is a function of seed and step; documents are not on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planted import TensorRows

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.dictionaries.rows import RowBatches, StoreRows, first_held_out, sample_rows

X = torch.arange(60.0).view(30, 2)


@pytest.fixture
def paired(tmp_path: Path) -> ActivationStore:
    documents = [[1] * 12, [2] * 11, [3] * 7]
    return write_tensors(tmp_path / "store", {"resid.2": [X, X * 3]}, documents=documents)


def test_every_epoch_has_every_row_once() -> None:
    batches = list(RowBatches(TensorRows(X), 20, 8, steps=10, seed=1))
    assert [tuple(batch.shape) for batch in batches] == [(8, 2)] * 10
    rows = torch.cat(batches)[:, 0].long().tolist()
    epochs = [rows[start : start + 20] for start in range(0, 80, 20)]
    assert all(sorted(epoch) == list(range(0, 40, 2)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = list(RowBatches(TensorRows(X), 20, 8, steps=10, seed=2))
    assert not torch.equal(torch.cat(other), torch.cat(batches))


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
def test_reading_goes_on_where_it_stopped(stop: int) -> None:
    whole = list(RowBatches(TensorRows(X), 20, 8, steps=10, seed=1))
    first = RowBatches(TensorRows(X), 20, 8, steps=10, seed=1)
    begun = [batch for batch, _ in zip(first, range(stop), strict=False)]
    state = {"step": len(begun), "seed": 1}
    assert stop == 0 or first.state_dict()["step"] in (stop, stop + 1)  # one more may have been asked for
    second = RowBatches(TensorRows(X), 20, 8, steps=10, seed=1)
    second.load_state_dict(state)
    assert torch.equal(torch.cat([*begun, *second]), torch.cat(whole))
    assert len(second) == 10


def test_held_out_rows_begin_with_a_document(paired: ActivationStore) -> None:
    rows = StoreRows(paired, source="base")
    assert [first_held_out(rows, held_out, 4) for held_out in (1, 7, 8, 18, 19)] == [23, 23, 12, 12, 11]
    assert first_held_out(TensorRows(X), 7, 4) == 23
    with pytest.raises(UsageError, match=r"30 rows of activations, of which 28 .* do not make one batch of 4"):
        first_held_out(TensorRows(X), 28, 4)


def test_the_sources_of_a_paired_store(paired: ActivationStore) -> None:
    chosen = torch.tensor([7, 3])
    read = {s: StoreRows(paired, "resid.2", s).gather(chosen) for s in ("base", "post", "difference")}
    assert torch.equal(read["base"], X[chosen])
    assert torch.equal(read["difference"], (X * 2)[chosen])
    with pytest.raises(UsageError, match="say which; these activations have base, post, difference"):
        StoreRows(paired)
    with pytest.raises(UsageError, match="there is no 'model'; these activations have base"):
        StoreRows(paired, None, "model")


def test_a_store_of_one_model_needs_no_name(tmp_path: Path) -> None:
    store = write_tensors(tmp_path / "store", {"resid.2": X}, dtype="bf16")
    rows = StoreRows(store)
    assert (rows.source, rows.d, rows.num_rows) == ("model", 2, 30)
    assert rows.gather(torch.tensor([1])).dtype == torch.float32
    with pytest.raises(UsageError, match="there is no 'difference'; these activations have model"):
        StoreRows(store, None, "difference")


def test_a_sample_is_of_the_rows_that_are_trained_on() -> None:
    sample = sample_rows(TensorRows(X), 5, seed=0)
    assert len(sample) == 5
    assert set(sample[:, 0].tolist()) <= {0.0, 2.0, 4.0, 6.0, 8.0}


def test_whole_documents_are_not_cut(tmp_path: Path) -> None:
    documents = [[0] * n for n in (3, 1, 9, 2, 2)]
    rows = StoreRows(write_tensors(tmp_path / "s", {"resid.1": torch.randn(17, 2)}, documents=documents))
    assert list(rows.whole_documents(4)) == [(0, 4), (4, 15), (15, 17)]
    assert list(rows.whole_documents(1)) == [(0, 3), (3, 4), (4, 13), (13, 15), (15, 17)]
    assert list(rows.whole_documents(100)) == [(0, 17)]
