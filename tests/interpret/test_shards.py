"""Stores of activations: what is written comes back row by row, also as .pt files; what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations import shards
from posttrain.interpret.activations.shards import (
    ActivationStore,
    Documents,
    RecordedModel,
    StoreIndex,
    StoreWriter,
    describe_rows,
    export_pt,
    import_pt,
    write_tensors,
)
from refusing import refuses

DOCUMENTS = [[7, 8, 9], [1], [4, 4, 5, 6]]


def rows(n: int = 8, d: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn((n, d), generator=torch.Generator().manual_seed(seed))


def written(folder: Path, **options) -> ActivationStore:
    return write_tensors(folder, {"resid.2": rows()}, documents=DOCUMENTS, rows_per_shard=3, **options)


def index_of(sites: dict[str, int], **settings) -> StoreIndex:
    return StoreIndex(widths=sites, sources=[RecordedModel(name="model", model="m")], dtype="fp32", settings=settings)


def test_store_gives_rows_in_the_order_requested(tmp_path: Path) -> None:
    store = written(tmp_path / "s")
    assert [shard.rows for shard in store.index.shards] == [3, 3, 2]
    assert (store.num_rows, store.num_documents, store.sites, store.sources) == (8, 3, ("resid.2",), ("model",))
    assert store.width() == store.width("resid.2") == 4
    for order in ([0], [7, 0, 3, 3], [2, 3], list(range(8)), []):
        index = torch.tensor(order, dtype=torch.long)
        assert torch.equal(store.gather(index), rows()[index])
    everything = torch.arange(8)
    assert store.tokens(everything).tolist() == [7, 8, 9, 1, 4, 4, 5, 6]
    assert store.documents(everything).tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert store.positions(everything).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert [store.document_tokens(i) for i in range(3)] == DOCUMENTS
    for bad in (torch.tensor([8]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            store.gather(bad)
    assert torch.equal(written(tmp_path / "low", dtype="bf16").gather(everything), rows().bfloat16())


def test_store_two_sites_and_two_sources_have_to_be_named(tmp_path: Path) -> None:
    pairs = {"resid.2": [rows(seed=1), rows(seed=2)], "resid.3": [rows(d=3, seed=3), rows(d=3, seed=4)]}
    store = write_tensors(tmp_path / "s", pairs, documents=DOCUMENTS, rows_per_shard=5)
    index = torch.tensor([6, 1])
    assert torch.equal(store.gather(index, "resid.3", "post"), rows(d=3, seed=4)[index])
    assert torch.equal(store.gather(index, "resid.2", "base"), rows(seed=1)[index])
    with refuses(UsageError, "resid.2", "resid.3"):
        store.gather(index, source="base")
    with refuses(UsageError, "which source Recorded"):
        store.gather(index, "resid.3")
    with refuses(UsageError, "'resid.4'", "resid.2", "resid.3"):
        store.gather(index, "resid.4", "base")


def test_store_files_and_their_size(tmp_path: Path) -> None:
    pairs = {"resid.2": [rows(2000), rows(2000)], "resid.3": [rows(2000, 3), rows(2000, 3)]}
    for dtype, expected in (("fp32", 2 * 7 * 4 + 12), ("bf16", 2 * 7 * 2 + 12)):
        store = write_tensors(tmp_path / dtype, pairs, dtype=dtype)
        assert store.index.row_bytes == expected
        size = (tmp_path / dtype / "shard-00000.safetensors").stat().st_size
        assert 2000 * expected < size < 2000 * expected + 1000  # and the header
    shard = load_file(tmp_path / "fp32" / "shard-00000.safetensors")
    assert sorted(shard) == sorted([*store.index.columns, "document", "position", "tokens"])
    assert torch.equal(shard["resid.2@base"], rows(2000))
    index = json.loads((tmp_path / "fp32" / "index.json").read_text())
    assert index["layer_convention"].startswith("layer L (1 .. num_layers) is the output of block index L - 1")


def test_store_a_changed_or_missing_shard_is_found(tmp_path: Path) -> None:
    written(tmp_path / "s")
    file = tmp_path / "s" / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ActivationStore(tmp_path / "s")
    with refuses(DataError, "shard-00001"):
        ActivationStore(tmp_path / "s", verify=True)
    file.unlink()
    with refuses(DataError, "shard-00001"):
        ActivationStore(tmp_path / "s")


def test_store_that_is_no_finished_recording_is_refused(tmp_path: Path) -> None:
    with refuses(DataError, "index.json"):
        ActivationStore(tmp_path)
    StoreWriter(tmp_path / "begun", index_of({"resid.2": 4}), Documents(DOCUMENTS))
    with refuses(DataError, "repeat the same command to resume"):
        ActivationStore(tmp_path / "begun")
    for content in ('{"format": 1}', "{", "[]", ""):
        (tmp_path / "index.json").write_text(content)
        with refuses(DataError, "index of activations"):
            ActivationStore(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("widths",), {}, "widths: "),
        (("widths", "resid.2"), 5, "shard-00000.safetensors"),
        (("sources",), [], "sources: "),
        (("sources", 0, "dtype"), "int8", "sources.0.dtype: "),
        (("documents",), 2, "documents.safetensors"),
        (("rows",), 9, "rows:"),
        (("shards", 0, "file"), "../s/shard-00000.safetensors", "shards.0.file: "),
        (("documents",), "\x1b[31m", "documents"),
    ],
)
def test_store_an_index_that_no_recording_writes_is_refused(
    place: tuple, value: object, message: str, tmp_path: Path
) -> None:
    written(tmp_path / "s")
    path = tmp_path / "s" / "index.json"
    content = inner = json.loads(path.read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    with refuses(DataError, message) as refused:
        ActivationStore(tmp_path / "s")
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("shard-00000", lambda tensors: tensors.pop("tokens"), "tokens has shape nothing"),
        ("shard-00000", lambda tensors: tensors.update(position=tensors["position"][:1]), "position has shape"),
        ("shard-00000", lambda tensors: tensors.update(document=tensors["document"] + 3), "document outside the"),
        ("documents", lambda tensors: tensors.update(offsets=tensors["offsets"].flip(0)), "offsets are inconsistent"),
    ],
)
def test_store_tensors_that_no_recording_writes_are_refused(file: str, change, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "s").folder / f"{file}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with refuses(DataError, message):
        ActivationStore(tmp_path / "s").documents(torch.arange(8))


def test_store_a_shard_that_holds_no_tensors_is_refused(tmp_path: Path) -> None:
    place = written(tmp_path / "s").folder
    for content in (b"", b"\xff" * 64, b"\x08" + bytes(7) + b"not json", b"\x02" + bytes(7) + b"[]"):
        (place / "shard-00001.safetensors").write_bytes(content)
        with refuses(DataError, "shard-00001.safetensors"):
            ActivationStore(place)


def test_writer_adds_up_what_was_dropped(tmp_path: Path) -> None:
    index = index_of({"resid.2": 4})
    index.dropped = {"empty_documents": 2}
    writer = StoreWriter(tmp_path / "s", index, Documents(DOCUMENTS, [2, 0, 4]))
    for part, dropped in ((rows(3), {"outlier": 1}), (rows(0), {"outlier": 3, "first_token": 1})):
        info = {name: x[: len(part)] for name, x in describe_rows(DOCUMENTS, range(3)).items()}
        writer.add({"resid.2@model": part} | info, dropped)
    store = writer.finish()
    assert store.index.dropped == {"empty_documents": 2, "first_token": 1, "outlier": 4}
    assert store.num_rows == 3
    assert store.prompt_lengths(torch.tensor([2, 0])).tolist() == [4, 2]


def test_pt_files_out_and_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_FILE", 3)
    pair = {"resid.2": [rows(seed=1), rows(seed=2)], "resid.3": [rows(seed=3), rows(seed=4)]}
    store = write_tensors(tmp_path / "s", pair, documents=DOCUMENTS, dtype="bf16", rows_per_shard=5)
    assert len(export_pt(store, tmp_path / "pt")) == 3 * (4 + 3)
    first = torch.load(tmp_path / "pt" / "resid.3@post-00001.pt", weights_only=True)
    assert torch.equal(first, rows(seed=4)[3:6].bfloat16())
    assert (tmp_path / "pt" / "resid.3@post-00001.pt").stat().st_size < 3000  # its own rows, not those of the shard
    again = import_pt(tmp_path / "pt", "resid.3", tmp_path / "again")
    everything = torch.arange(8)
    assert (again.index.dtype, again.sources) == ("bf16", ("base", "post"))
    for source in again.sources:
        assert torch.equal(again.gather(everything, source=source), store.gather(everything, "resid.3", source))
    assert [again.document_tokens(number) for number in range(3)] == DOCUMENTS
    with refuses(UsageError, "is not empty"):
        export_pt(store, tmp_path / "pt")


def test_pt_files_of_others(tmp_path: Path) -> None:
    with refuses(DataError, "in this folder"):
        import_pt(tmp_path, "resid.20", tmp_path / "s")
    for number in (0, 1):
        torch.save(rows(seed=number), tmp_path / f"activations_{number}.pt")
    store = import_pt(tmp_path, "resid.20", tmp_path / "s")
    assert torch.equal(store.gather(torch.arange(16)), torch.cat([rows(seed=0), rows(seed=1)]))
    assert (store.index.dtype, store.num_documents, store.sites) == ("fp32", 1, ("resid.20",))
    for content, message in (
        ({"a": rows()}, "a.pt:"),
        (rows()[0], "got shape [4]"),
        (rows()[:, :3], "different widths: [3"),
    ):
        torch.save(content, tmp_path / "a.pt")
        with refuses(DataError, message):
            import_pt(tmp_path, "resid.20", tmp_path / "other")
    (tmp_path / "a.pt").write_bytes(b"nothing of the kind")
    with refuses(DataError, "a.pt:"):
        import_pt(tmp_path, "resid.20", tmp_path / "other")
