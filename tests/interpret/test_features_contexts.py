"""Top contexts, densities and histograms, against what a plain loop over all rows finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.interpret.activations.shards import (
    ActivationStore,
    Documents,
    Source,
    StoreIndex,
    StoreWriter,
    write_tensors,
)
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.features.features import NUM_BINS, find_contexts, hash_prefixes


def coordinates(d: int) -> Dictionary:
    """Feature i is coordinate i where it is positive."""
    dictionary = Dictionary(d, d, kind="l1")
    with torch.no_grad():
        dictionary.W_dec.copy_(torch.eye(d))
        dictionary.W_enc.copy_(torch.eye(d))
    return dictionary


def store_of(
    folder: Path, documents: list[list[int]], x: Tensor, kept: Tensor, rows_per_shard: int = 50
) -> ActivationStore:
    """All tokens' activations ``x``, of which the rows that are not ``kept`` were dropped."""
    index = StoreIndex({"resid.1": x.shape[1]}, [Source("model", "m", "")], "fp32", "", {}, len(documents))
    writer = StoreWriter(folder, index, Documents(documents))
    columns = {
        "resid.1@model": x,
        "tokens": torch.tensor([token for ids in documents for token in ids]),
        "document": torch.tensor([number for number, ids in enumerate(documents) for _ in ids]),
        "position": torch.tensor([place for ids in documents for place in range(len(ids))]),
    }
    for part in kept.nonzero()[:, 0].split(rows_per_shard):
        writer.add({name: values[part] for name, values in columns.items()}, {})
    return writer.finish()


def test_contexts_that_are_known(tmp_path: Path) -> None:
    documents = [[7, 8, 9], [7, 8, 5, 6], [1], [7, 8, 9, 4]]
    x = torch.zeros(12, 2)
    x[:, 0] = torch.tensor([1, 5, 0, 1, 5, 0, 2, 3, 1, 5, 0, 6], dtype=torch.float32)
    x[4, 1], x[10, 1] = 0.5, -1.0
    store = store_of(tmp_path / "s", documents, x, torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool))
    found = find_contexts(coordinates(2), StoreRows(store), contexts=4, before=2, after=1)
    # 6 in the last document; 5 of "7 8" once, though documents 0 and 1 have it; then 3. Rows count what was kept.
    assert found.top[:, 0].tolist() == [6, 5, 3, 0]
    assert found.top_rows[:, 0].tolist() == [10, 1, 7, -1]
    nan = float("nan")
    expected = torch.tensor([[5, 0, 6, nan], [nan, 1, 5, 0], [nan, nan, 3, nan]])
    torch.testing.assert_close(found.windows[:3, 0], expected, equal_nan=True)
    assert found.top_rows[:, 1].tolist() == [4, -1, -1, -1]
    assert found.rows == 11
    assert found.active.tolist() == [8, 1]
    assert found.total.tolist() == [28, 0.5]
    assert found.maximum.tolist() == [6, 0.5]
    # Bins of 8/32: 1, 5, 1, 5, 2, 3, 5, 6 fall into 4, 20, 4, 20, 8, 12, 20, 24.
    assert found.exponents.tolist() == [3, 0]
    counts = torch.bincount(torch.tensor([4, 20, 4, 20, 8, 12, 20, 24]), minlength=NUM_BINS)
    assert torch.equal(found.counts[0], counts)
    assert found.counts[1].nonzero().tolist() == [[16]]


def make_random(folder: Path, features: Dictionary) -> tuple[ActivationStore, list[list[int]], Tensor]:
    """Documents that often begin alike; their activations depend on the tokens so far, as a model's do."""
    draws = torch.Generator().manual_seed(3)
    documents: list[list[int]] = []
    for _ in range(60):
        ids = torch.randint(0, 3, (int(torch.randint(1, 12, (1,), generator=draws)),), generator=draws).tolist()
        shared = documents[-1][: int(torch.randint(0, 9, (1,), generator=draws))] if documents else []
        documents.append(shared + ids)
    by_prefix: dict[tuple[int, ...], Tensor] = {}
    rows = []
    for ids in documents:
        for end in range(1, len(ids) + 1):
            prefix = tuple(ids[:end])
            if prefix not in by_prefix:
                by_prefix[prefix] = torch.randn(features.d, generator=draws) * 4.0 ** (end % 4)
            rows.append(by_prefix[prefix])
    x = torch.stack(rows)
    kept = torch.rand(len(x), generator=draws) < 0.9
    return store_of(folder, documents, x, kept), documents, x


@pytest.mark.parametrize("kind", ["l1", "topk"])
def test_what_a_plain_loop_finds(kind: str, tmp_path: Path) -> None:
    dictionary = Dictionary(6, 9, kind=kind, options={"k": 3} if kind == "topk" else {})
    store, documents, _ = make_random(tmp_path / "s", dictionary)
    rows = StoreRows(store)
    every = torch.arange(store.num_rows)
    values = dictionary.encode(rows.gather(every)).detach()
    places = list(zip(store.documents(every).tolist(), store.positions(every).tolist(), strict=True))
    row_of = {place: row for row, place in enumerate(places)}
    before, after, wanted = 3, 2, 7
    whole = find_contexts(dictionary, rows, contexts=wanted, before=before, after=after)
    for feature in range(9):
        column = values[:, feature]
        best: dict[int, tuple[float, int]] = {}
        for row, (document, _) in enumerate(places):
            if float(column[row]) > best.get(document, (0.0, 0))[0]:
                best[document] = (float(column[row]), row)
        top: list[tuple[float, int]] = []
        seen = set()
        for value, row in sorted(best.values(), key=lambda pair: (-pair[0], pair[1])):
            document, position = places[row]
            prefix = tuple(documents[document][: position + 1])
            if prefix not in seen:
                seen.add(prefix)
                top.append((value, row))
        top = top[:wanted]
        assert whole.top_rows[: len(top), feature].tolist() == [row for _, row in top]
        assert whole.top[: len(top), feature].tolist() == pytest.approx([value for value, _ in top], rel=1e-5)
        for k, (_, row) in enumerate(top):
            document, position = places[row]
            for w, place in enumerate(range(position - before, position + after + 1)):
                there = row_of.get((document, place))
                got = whole.windows[k, feature, w]
                assert torch.isnan(got) if there is None else torch.isclose(got, column[there], atol=1e-5)
        active = column[column > 0].double()
        assert whole.active[feature] == len(active)
        assert whole.total[feature].item() == pytest.approx(active.sum().item(), rel=1e-5)
        width = 2.0 ** whole.exponents[feature].item() / NUM_BINS
        assert width * NUM_BINS / 2 <= active.max() < width * NUM_BINS
        expected = torch.bincount((active / width).long(), minlength=NUM_BINS)
        assert torch.equal(whole.counts[feature], expected)


def test_the_chunks_do_not_matter(tmp_path: Path) -> None:
    dictionary = Dictionary(6, 9, kind="l1")
    store, _, _ = make_random(tmp_path / "s", dictionary)
    rows, chosen = StoreRows(store), torch.tensor([8, 2])
    told: list[tuple[int, int]] = []
    whole = find_contexts(dictionary, rows, contexts=5)
    for size in (1, 17, 100):
        parts = find_contexts(
            dictionary, rows, features=chosen, contexts=5, chunk_rows=size, observe=lambda *x: told.append(x)
        )
        for name, one in vars(whole).items():
            other = getattr(parts, name)
            if isinstance(one, Tensor) and name != "chosen":
                picked = one[:, chosen] if name in ("top", "top_rows", "windows", "keys") else one[chosen]
                torch.testing.assert_close(other, picked, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert told[-1] == (store.num_rows, store.num_rows)
    assert told[0][0] < told[1][0] < told[2][0]


def test_bins_are_joined_when_activations_grow(tmp_path: Path) -> None:
    x = torch.tensor([[0.3], [0.31], [0.9], [700.0], [5.0], [-1.0]])
    store = write_tensors(tmp_path / "s", {"resid.1": x}, documents=[[1], [2], [3], [4], [5], [6]])
    found = find_contexts(coordinates(1), StoreRows(store), contexts=2, chunk_rows=1)
    assert found.exponents.tolist() == [10]
    assert found.counts[0].nonzero()[:, 0].tolist() == [0, 21]  # bins of 32
    assert found.counts[0, [0, 21]].tolist() == [4, 1]
    assert found.top[:, 0].tolist() == [700, 5]


def test_contexts_of_the_difference_of_two_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, post = torch.randn(40, 3), torch.randn(40, 3)
    store = write_tensors(tmp_path / "s", {"resid.1": [base, post]}, documents=[[i] for i in range(40)])
    difference = find_contexts(coordinates(3), StoreRows(store, None, "difference"), contexts=3)
    expected = (post - base).topk(3, dim=0)
    torch.testing.assert_close(difference.top, expected.values)
    assert torch.equal(difference.top_rows, expected.indices)


def test_prefixes_are_told_apart() -> None:
    one, other = hash_prefixes([5, 6, 7, 5]), hash_prefixes([5, 7, 6, 5])
    assert one[0] == other[0]
    assert not (one[1:] == other[1:]).any()  # the same tokens in another order are another text
    assert len(set(hash_prefixes([0] * 1000).tolist())) == 1000
