"""Recordings as .pt files: out, and in again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations import pt_shards
from posttrain.interpret.activations.pt_shards import export_pt, import_pt
from posttrain.interpret.activations.shards import write_tensors

DOCUMENTS = [[7, 8, 9], [1], [4, 4, 5, 6]]


def rows(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((8, 4), generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_out_and_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pt_shards, "ROWS_AT_A_TIME", 3)
    pair = {"resid.2": [rows(1), rows(2)], "resid.3": [rows(3), rows(4)]}
    store = write_tensors(tmp_path / "s", pair, documents=DOCUMENTS, dtype="bf16", rows_per_shard=5)
    written = export_pt(store, tmp_path / "pt")
    assert len(written) == 3 * (4 + 3)
    first = torch.load(tmp_path / "pt" / "resid.3@post-00001.pt", weights_only=True)
    assert torch.equal(first, rows(4)[3:6].bfloat16())
    assert (tmp_path / "pt" / "resid.3@post-00001.pt").stat().st_size < 3000  # its own rows, not those of the shard
    again = import_pt(tmp_path / "pt", "resid.3", tmp_path / "again")
    everything = torch.arange(8)
    assert again.index.dtype == "bf16"
    assert again.sources == ("base", "post")
    for source in again.sources:
        assert torch.equal(again.gather(everything, source=source), store.gather(everything, "resid.3", source))
    assert [again.document_tokens(number) for number in range(3)] == DOCUMENTS
    with pytest.raises(UsageError, match="is not empty"):
        export_pt(store, tmp_path / "pt")


def test_files_of_others(tmp_path: Path) -> None:
    for number in (0, 1):
        torch.save(rows(number), tmp_path / f"activations_{number}.pt")
    store = import_pt(tmp_path, "resid.20", tmp_path / "s")
    assert torch.equal(store.gather(torch.arange(16)), torch.cat([rows(0), rows(1)]))
    assert (store.index.dtype, store.num_documents, store.sites) == ("fp32", 1, ("resid.20",))


def test_what_is_no_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.pt files in this folder"):
        import_pt(tmp_path, "resid.20", tmp_path / "s")
    torch.save({"a": rows()}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt: a tensor with 2 dimensions is needed; got dict"):
        import_pt(tmp_path, "resid.20", tmp_path / "s")
    torch.save(rows()[0], tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"got shape \[4\]"):
        import_pt(tmp_path, "resid.20", tmp_path / "s")
    (tmp_path / "a.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=r"a\.pt: this \.pt file cannot be read as a plain tensor"):
        import_pt(tmp_path, "resid.20", tmp_path / "s")
    torch.save(rows(), tmp_path / "a.pt")
    torch.save(rows()[:, :3], tmp_path / "b.pt")
    with pytest.raises(DataError, match=r"different widths: \[3, 4\]"):
        import_pt(tmp_path, "resid.20", tmp_path / "s")
