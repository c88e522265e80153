"""Recordings: rows are the model's, pairs are matched, what is dropped is counted, a killed one goes on to the byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.errors import UsageError
from posttrain.interpret.activations.record import Recorder, plan_batches, plan_shards, record
from posttrain.interpret.activations.shards import ActivationStore, row_norms
from posttrain.interpret.activations.sites import load_layers, weights_hash
from posttrain.models.load import load_model
from posttrain.models.lora import apply_adapter
from posttrain.models.sources import TINY
from posttrain.recipes.sections import AdapterSection, ModelSection


def some_documents(n: int = 12, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 700, size=size).tolist() for size in generator.integers(1, 30, size=n)]


@pytest.fixture(scope="module")
def tiny():
    return load_model(ModelSection(name="tiny"), seed=0).model


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tiny, with other weights, as a folder."""
    loaded = load_model(ModelSection(name="tiny"), seed=0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.01)
    folder = tmp_path_factory.mktemp("models") / "other"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def states(model, ids: list[int], layer: int) -> torch.Tensor:
    return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_rows_are_the_models_hidden_states_without_first_tokens(tiny, tmp_path: Path) -> None:
    documents = [*some_documents(), [0, 5, 6]]  # 0 is the token that begins a text
    store = record("tiny", documents, ["resid.2", "resid.3"], tmp_path / "s", dtype="fp32", rows_per_shard=40)
    assert len(store.index.shards) > 2
    assert store.index.dropped == {"first_token": 12}
    assert store.num_rows == sum(map(len, documents)) - 12
    rows = torch.arange(store.num_rows)
    for number, ids in enumerate(documents):
        own = rows[store.documents(rows) == number]
        skipped = 0 if ids[0] == 0 else 1
        assert store.tokens(own).tolist() == ids[skipped:]
        assert store.positions(own).tolist() == list(range(skipped, len(ids)))
        for layer in (2, 3):
            found = store.gather(own, f"resid.{layer}")
            torch.testing.assert_close(found, states(tiny, ids, layer)[skipped:], rtol=1e-5, atol=1e-5)
        assert store.document_tokens(number) == ids
    assert torch.equal(rows, store.documents(rows).argsort(stable=True))  # the order of the documents
    assert store.index.sources[0].model == "tiny"
    assert store.index.sources[0].weights_hash == weights_hash("tiny") != ""


def test_only_the_blocks_that_are_needed_are_loaded(tiny) -> None:
    loaded = load_layers(ModelSection(name="tiny"), ["resid.1", "resid.2"])
    assert len(loaded.model.layers) == 2
    whole = {name: p for name, p in tiny.model.named_parameters() if not name.startswith(("layers.2", "layers.3"))}
    assert {name for name, _ in loaded.model.named_parameters()} == set(whole)
    assert all(torch.equal(p, whole[name]) for name, p in loaded.model.named_parameters())
    with pytest.raises(UsageError, match=r"resid\.5: tiny has 4 layers"):
        load_layers(ModelSection(name="tiny"), ["resid.5"])


def test_an_adapters_folder_is_recorded_with_its_adapter(tmp_path: Path) -> None:
    loaded = load_model(ModelSection(name="tiny"), seed=0)
    model = apply_adapter(loaded.model, AdapterSection(rank=2, targets=["q_proj", "up_proj"]), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.05)
    model.save_pretrained(tmp_path / "adapter")
    loaded.tokenizer.save_pretrained(tmp_path / "adapter")
    ids = some_documents()[0]
    store = record(str(tmp_path / "adapter"), [ids], ["resid.2"], tmp_path / "s", dtype="fp32")
    found = store.gather(torch.arange(store.num_rows))
    torch.testing.assert_close(found, states(model, ids, 2)[1:], rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(found, states(model, ids, 2)[1:], rtol=1e-2, atol=1e-2)
    assert store.index.sources[0].weights_hash not in ("", weights_hash("tiny"))


def test_pairs_are_the_same_tokens_in_both_models(tiny, other: str, tmp_path: Path) -> None:
    documents = some_documents()
    both = record(["tiny", other], documents, ["resid.2"], tmp_path / "both", dtype="fp32", rows_per_shard=50)
    alone = record(other, documents, ["resid.2"], tmp_path / "alone", dtype="fp32", rows_per_shard=50)
    assert both.sources == ("base", "post")
    rows = torch.arange(both.num_rows)
    assert torch.equal(both.tokens(rows), alone.tokens(rows))
    assert torch.equal(both.gather(rows, source="post"), alone.gather(rows))
    for row in (0, 17, both.num_rows - 1):
        ids = both.document_tokens(int(both.documents(torch.tensor([row]))))
        expected = states(tiny, ids, 2)[int(both.positions(torch.tensor([row])))]
        torch.testing.assert_close(both.gather(torch.tensor([row]), source="base")[0], expected, rtol=1e-5, atol=1e-5)
    assert both.index.sources[0].weights_hash != both.index.sources[1].weights_hash
    same = record(["tiny", str(TINY)], documents, ["resid.2"], tmp_path / "same", dtype="fp32")
    assert torch.equal(same.gather(rows, source="base"), same.gather(rows, source="post"))


def test_models_of_different_tokenizers_are_no_pair(small_tokenizer, tiny, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path / "m")
    small_tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(UsageError, match="have different tokenizers, so no token stands for the same"):
        Recorder(["tiny", str(tmp_path / "m")], [[1, 2]], ["resid.2"])


def test_outliers_are_rows_above_so_many_medians_in_any_source(other: str, tmp_path: Path) -> None:
    documents = some_documents(30)
    options = {"dtype": "fp32", "rows_per_shard": 10_000}
    whole = record(["tiny", other], documents, ["resid.2", "resid.1"], tmp_path / "all", outliers=0, **options)
    assert whole.index.limits == {}
    rows = torch.arange(whole.num_rows)
    over = torch.zeros(len(rows), dtype=torch.bool)
    for site in whole.sites:
        for source in whole.sources:
            norms = whole.gather(rows, site, source).double().norm(dim=1)
            over |= norms > 1.4 * norms.median()
    assert 3 < int(over.sum()) < 0.5 * len(rows)
    kept = record(["tiny", other], documents, ["resid.2", "resid.1"], tmp_path / "kept", outliers=1.4, **options)
    assert kept.index.dropped == {"first_token": 30, "outlier": int(over.sum())}
    assert kept.num_rows == int((~over).sum())
    assert torch.equal(kept.tokens(torch.arange(kept.num_rows)), whole.tokens(rows[~over]))
    for source in whole.sources:
        found = kept.gather(torch.arange(kept.num_rows), "resid.1", source)
        assert torch.equal(found, whole.gather(rows[~over], "resid.1", source))


def test_the_limit_is_that_of_the_first_shard(tmp_path: Path) -> None:
    documents = some_documents(30)
    whole = record("tiny", documents, ["resid.2"], tmp_path / "all", dtype="fp32", outliers=0)
    kept = record("tiny", documents, ["resid.2"], tmp_path / "kept", dtype="fp32", outliers=1.2, rows_per_shard=60)
    first = plan_shards([len(ids) for ids in documents], 60)[0]
    rows = torch.arange(whole.num_rows)
    norms = row_norms(whole.gather(rows))
    limit = 1.2 * float(norms[whole.documents(rows) < first.stop].median())
    assert kept.index.limits == {"resid.2@model": pytest.approx(limit, rel=1e-6)}
    assert kept.index.dropped["outlier"] == int((norms > limit).sum()) > 3
    assert float(row_norms(kept.gather(torch.arange(kept.num_rows))).max()) <= limit


def test_recorder_num_bytes_are_known_before_anything_is_written(other: str) -> None:
    documents = some_documents()
    recorder = Recorder(["tiny", other], documents, ["resid.2", "resid.3"], dtype="bf16")
    assert recorder.num_bytes == sum(map(len, documents)) * (2 * 2 * 128 * 2 + 4 * 4 + 12)


class Stop(Exception):
    pass


def test_an_interrupted_recording_goes_on_and_is_the_same_to_the_byte(tmp_path: Path) -> None:
    documents = some_documents(40)
    options = {"rows_per_shard": 60, "outliers": 1.5}
    record("tiny", documents, ["resid.2"], tmp_path / "whole", **options)
    expected = files(tmp_path / "whole")
    assert len(expected) > 6

    def stop_at(number: int):
        def observe(done: int, total: int) -> None:
            if done == number:
                raise Stop

        return observe

    folder = tmp_path / "parts"
    for number in (0, 1, 4):
        with pytest.raises(Stop):
            Recorder("tiny", documents, ["resid.2"], **options).write(folder, stop_at(number))
        (folder / f"shard-{number:05d}.safetensors").write_bytes(b"half of a sha")  # a shard that no index names yet
    assert len(ActivationStore.open(tmp_path / "whole").index.shards) == len(expected) - 2
    record("tiny", documents, ["resid.2"], folder, **options)
    assert files(folder) == expected
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    record("tiny", documents, ["resid.2"], folder, **options)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times  # nothing is done twice


def test_other_settings_or_documents_do_not_go_on(other: str, tmp_path: Path) -> None:
    documents = some_documents(5)
    record("tiny", documents, ["resid.2"], tmp_path / "s")
    for changes, key in (
        ({"outliers": 3.0}, "outliers"),
        ({"dtype": "fp32"}, "dtype"),
        ({"batch": 2}, "batch"),
        ({"models": other}, "model"),
        ({"sites": ["resid.1"]}, "sites"),
        ({"documents": documents[:-1]}, "documents"),
    ):
        asked = {"models": "tiny", "documents": documents, "sites": ["resid.2"], **changes}
        with pytest.raises(UsageError, match=f"recorded with another `{key}`"):
            record(folder=tmp_path / "s", **asked)


@pytest.mark.parametrize(
    ("documents", "message"),
    [([], "documents that are not empty"), ([[1], []], "documents that are not empty"), ([[1] * 1025], "1025 tokens")],
)
def test_documents_that_cannot_be_recorded_are_refused(documents: list[list[int]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recorder("tiny", documents, ["resid.2"])


def test_shards_are_consecutive_documents() -> None:
    assert plan_shards([3, 3, 3, 10, 1, 1], 5) == [range(2), range(2, 4), range(4, 6)]
    assert plan_shards([5, 5], 5) == [range(1), range(1, 2)]
    assert plan_shards([1], 100) == [range(1)]


def test_batches_are_documents_of_like_length() -> None:
    assert plan_batches([5, 1, 9, 2], 2, 100) == [[1, 3], [0, 2]]
    assert plan_batches([5, 1, 9, 2], None, 10) == [[1, 3, ], [0], [2]]  # fmt: skip
    assert plan_batches([50], None, 10) == [[0]]
    assert sorted(i for batch in plan_batches([3] * 10, None, 7) for i in batch) == list(range(10))
