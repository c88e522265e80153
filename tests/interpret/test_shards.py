"""Stores of activations: what is written comes back row by row, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations.shards import (
    ActivationStore,
    Documents,
    Source,
    StoreIndex,
    StoreWriter,
    row_norms,
    write_tensors,
)

DOCUMENTS = [[7, 8, 9], [1], [4, 4, 5, 6]]


def rows(n: int = 8, d: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn((n, d), generator=torch.Generator().manual_seed(seed))


def written(folder: Path, **options) -> ActivationStore:
    return write_tensors(folder, {"resid.2": rows()}, documents=DOCUMENTS, rows_per_shard=3, **options)


def index_of(sites: dict[str, int], **settings) -> StoreIndex:
    return StoreIndex(sites, [Source("model", "m", "h")], "fp32", "t", {}, 0, settings=settings)


def test_rows_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
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
    assert store.tokens(everything).dtype == torch.int64
    assert [store.document_tokens(i) for i in range(3)] == DOCUMENTS
    for bad in (torch.tensor([8]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            store.gather(bad)
    with pytest.raises(IndexError):
        store.document_tokens(3)


def test_what_is_stored_in_bf16_is_rounded_and_norms_are_not(tmp_path: Path) -> None:
    store = written(tmp_path / "s", dtype="bf16")
    everything = torch.arange(8)
    assert torch.equal(store.gather(everything), rows().bfloat16())
    norms = np.linalg.norm(rows().numpy().astype(np.float64), axis=1)
    np.testing.assert_allclose(
        load_file(tmp_path / "s" / "shard-00000.safetensors")["norm.resid.2@model"].numpy(), norms[:3], rtol=1e-6
    )
    found = store.index.norms["resid.2@model"]
    assert found.median == pytest.approx(sorted(norms)[3], rel=1e-6)  # the lower one of the two in the middle
    assert found.mean == pytest.approx(norms.mean(), rel=1e-6)
    assert found.rms == pytest.approx(np.sqrt((norms**2).mean()), rel=1e-6)
    assert row_norms(torch.full((1, 4096), 3.0, dtype=torch.bfloat16)).item() == 192.0  # summed in fp32


def test_two_sites_and_two_sources_have_to_be_named(tmp_path: Path) -> None:
    pairs = {"resid.2": [rows(seed=1), rows(seed=2)], "resid.3": [rows(d=3, seed=3), rows(d=3, seed=4)]}
    store = write_tensors(tmp_path / "s", pairs, documents=DOCUMENTS, rows_per_shard=5)
    assert store.sources == ("base", "post")
    index = torch.tensor([6, 1])
    assert torch.equal(store.gather(index, "resid.3", "post"), rows(d=3, seed=4)[index])
    assert torch.equal(store.gather(index, "resid.2", "base"), rows(seed=1)[index])
    with pytest.raises(UsageError, match=r"say which site Recorded: resid\.2, resid\.3"):
        store.gather(index, source="base")
    with pytest.raises(UsageError, match="say which source Recorded: base, post"):
        store.gather(index, "resid.3")
    with pytest.raises(UsageError, match=r"there is no site 'resid\.4'\. Did you mean 'resid\.[23]'\?"):
        store.gather(index, "resid.4", "base")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted where Linux lists them")
def test_thousands_of_shards_need_no_open_files(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = write_tensors(tmp_path / "s", {"resid.2": rows(60)}, rows_per_shard=1)
    assert torch.equal(store.gather(torch.arange(60)), rows(60))
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 5
    store.gather(torch.tensor([3])).zero_()  # what is handed out is a copy
    assert torch.equal(store.gather(torch.arange(60)), rows(60))


def test_other_programs_read_the_shards(tmp_path: Path) -> None:
    written(tmp_path / "s")
    shard = load_file(tmp_path / "s" / "shard-00001.safetensors")
    assert sorted(shard) == ["document", "norm.resid.2@model", "position", "resid.2@model", "tokens"]
    assert torch.equal(shard["resid.2@model"], rows()[3:6])
    assert shard["tokens"].dtype == torch.int32
    index = json.loads((tmp_path / "s" / "index.json").read_text())
    assert index["layer_convention"].startswith("layer L (1 .. num_layers) is the output of block index L - 1")
    assert (index["rows"], index["widths"], index["dtype"]) == (8, {"resid.2": 4}, "fp32")


def test_row_bytes_are_what_the_files_grow_by(tmp_path: Path) -> None:
    pairs = {"resid.2": [rows(2000), rows(2000)], "resid.3": [rows(2000, 3), rows(2000, 3)]}
    for dtype, expected in (("fp32", 2 * 7 * 4 + 4 * 4 + 12), ("bf16", 2 * 7 * 2 + 4 * 4 + 12)):
        store = write_tensors(tmp_path / dtype, pairs, dtype=dtype)
        assert store.index.row_bytes == expected
        size = (tmp_path / dtype / "shard-00000.safetensors").stat().st_size
        assert 2000 * expected < size < 2000 * expected + 1000  # and the header


def test_a_changed_or_missing_shard_is_found(tmp_path: Path) -> None:
    written(tmp_path / "s")
    file = tmp_path / "s" / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ActivationStore.open(tmp_path / "s")
    with pytest.raises(DataError, match=r"shard-00001.*was changed after it was recorded"):
        ActivationStore.open(tmp_path / "s", verify=True)
    file.unlink()
    with pytest.raises(DataError, match=r"shard-00001.*is missing"):
        ActivationStore.open(tmp_path / "s")


def test_what_is_no_finished_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no recorded activations here \(no index\.json\)"):
        ActivationStore.open(tmp_path)
    StoreWriter(tmp_path / "begun", index_of({"resid.2": 4}), Documents(DOCUMENTS))
    with pytest.raises(DataError, match="was interrupted; the same command again goes on"):
        ActivationStore.open(tmp_path / "begun")
    (tmp_path / "index.json").write_text('{"format": 2}')
    with pytest.raises(DataError, match="format 2; this posttrain reads 1"):
        ActivationStore.open(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match="no index of activations that can be read"):
        ActivationStore.open(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("widths",), "x", "widths: "),
        (("widths",), {}, "widths: "),
        (("widths", "resid.2"), 0, r"widths\.resid\.2: "),
        (("widths", "resid.2"), 5, r"shard-00000\.safetensors: resid\.2@model has the shape \(3, 4\), but"),
        (("sources",), [], "sources: "),
        (("sources", 0, "name"), 7, r"sources\.0\.name: "),
        (("sources", 0, "weights_hash"), [1], r"sources\.0\.weights_hash: "),
        (("dtype",), "int8", "dtype: "),
        (("documents",), -1, "documents: "),
        (("documents",), 2, r"documents\.safetensors: offsets has the shape \(4,\), but index.json means \(3,\)"),
        (("rows",), 9, "rows: not those of the shards"),
        (("rows",), "8", "rows: "),
        (("norms",), {}, "norms: not those of the sites"),
        (("settings",), "x", "settings: "),
        (("settings",), {"weights": -1}, r"settings\.weights: no dtypes"),
        (("shards", 0, "file"), "../s/shard-00000.safetensors", r"shards\.0\.file: "),
        (("shards", 0, "rows"), 4, "rows: not those of the shards"),
        (("documents",), "\x1b[31m", "documents: Input should be a valid integer"),
    ],
)
def test_an_index_that_no_recording_writes(place: tuple, value: object, says: str, tmp_path: Path) -> None:
    written(tmp_path / "s")
    path = tmp_path / "s" / "index.json"
    content = inner = json.loads(path.read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=says) as refused:
        ActivationStore.open(tmp_path / "s")
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("tokens"), "tokens has the shape nothing"),
        (lambda tensors: tensors.update(position=tensors["position"][:1]), r"position has the shape \(1,\)"),
        (lambda tensors: tensors.update(document=tensors["document"] + 3), "a row says that it is of another document"),
    ],
)
def test_a_shard_that_no_recording_writes(change, says: str, tmp_path: Path) -> None:
    path = written(tmp_path / "s").folder / "shard-00000.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(DataError, match=says):
        ActivationStore.open(tmp_path / "s").documents(torch.arange(8))


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08" + bytes(7) + b"not json", b"\x02" + bytes(7) + b"[]"])
def test_a_shard_that_is_no_file_of_tensors(content: bytes, tmp_path: Path) -> None:
    (written(tmp_path / "s").folder / "shard-00001.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00001\.safetensors: holds no tensors that can be read"):
        ActivationStore.open(tmp_path / "s")


def test_documents_that_do_not_follow_one_another(tmp_path: Path) -> None:
    path = written(tmp_path / "s").folder / "documents.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"offsets": tensors["offsets"].flip(0)}, path)
    with pytest.raises(DataError, match="its documents do not follow one another"):
        ActivationStore.open(tmp_path / "s")


def test_settings_that_changed_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    StoreWriter(folder, index_of({"resid.2": 4}, outliers=10.0), Documents(DOCUMENTS))
    StoreWriter(folder, index_of({"resid.2": 4}, outliers=10.0), Documents(DOCUMENTS))
    with pytest.raises(UsageError, match=r"with another `outliers`: 10\.0 there, 5\.0 now"):
        StoreWriter(folder, index_of({"resid.2": 4}, outliers=5.0), Documents(DOCUMENTS))
    with pytest.raises(UsageError, match="with another `sites`"):
        StoreWriter(folder, index_of({"resid.3": 4}, outliers=10.0), Documents(DOCUMENTS))
    with pytest.raises(UsageError, match="with another `documents`"):
        StoreWriter(folder, index_of({"resid.2": 4}, outliers=10.0), Documents(DOCUMENTS[:2]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("Dear")
    with pytest.raises(UsageError, match="holds something else than activations"):
        StoreWriter(tmp_path / "other", index_of({"resid.2": 4}), Documents(DOCUMENTS))


def test_counts_of_what_was_dropped_are_added_up(tmp_path: Path) -> None:
    index = index_of({"resid.2": 4})
    index.dropped = {"empty_documents": 2}
    writer = StoreWriter(tmp_path / "s", index, Documents(DOCUMENTS, [2, 0, 4]))
    for part, dropped in ((rows(2), {"outlier": 1}), (rows(0), {"outlier": 3, "first_token": 1})):
        facts = {name: torch.arange(len(part)) for name in ("tokens", "document", "position")}
        writer.add({"resid.2@model": part} | facts, dropped)
    store = writer.finish()
    assert store.index.dropped == {"empty_documents": 2, "first_token": 1, "outlier": 4}
    assert store.num_rows == 2
    assert store.prompt_lengths(torch.tensor([2, 0])).tolist() == [4, 2]
    assert torch.equal(store.gather(torch.tensor([1, 0])), rows(2)[[1, 0]])


def test_tensors_of_different_lengths_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as many rows as there are tokens"):
        write_tensors(tmp_path / "s", {"resid.2": rows(7)}, documents=DOCUMENTS)
