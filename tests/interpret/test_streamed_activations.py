"""Activations that are computed when they are needed: the rows of a recording, in a bounded memory, exact on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="the extra 'interpret' is not installed")

from posttrain.cli import main
from posttrain.errors import UsageError
from posttrain.interpret.activations.record import KEPT_CHUNKS, ActivationStream, Computed, Recorder
from posttrain.interpret.dictionaries.recipe import load_sae_recipe
from posttrain.interpret.dictionaries.rows import RowBatches, StoreRows, first_held_out
from posttrain.interpret.dictionaries.training import train_dictionary
from posttrain.store.metrics import MetricsLog

DOCUMENTS = [[5 + (7 * i + j) % 600 for j in range(6 + i % 9)] for i in range(60)]
ROWS = 80  # tokens of a chunk


def recorder(**options: Any) -> Recorder:
    return Recorder("tiny", DOCUMENTS, ["resid.2"], dtype="fp32", rows_per_shard=ROWS, **options)


def stream(**options: Any) -> ActivationStream:
    return ActivationStream(recorder(**options))


def test_the_rows_are_those_of_a_recording(tmp_path: Path) -> None:
    store, streamed = recorder(outliers=0).write(tmp_path / "store"), stream(outliers=0)
    rows = torch.arange(store.num_rows)
    assert streamed.num_rows == store.num_rows == sum(len(ids) - 1 for ids in DOCUMENTS)
    for read in ("gather", "tokens", "documents", "positions", "norms"):
        assert torch.equal(getattr(streamed, read)(rows), getattr(store, read)(rows))
    assert streamed.document_tokens(17) == DOCUMENTS[17]
    assert [chunk.stop - chunk.start for chunk in streamed.chunks] == [shard.rows for shard in store.index.shards]
    mixed = torch.tensor([store.num_rows - 1, 0, 3, 3])
    assert torch.equal(streamed.gather(mixed), store.gather(mixed))


def test_an_outlier_gives_its_place_to_another_row_of_its_chunk(tmp_path: Path) -> None:
    factor = 1.1
    store, notices = recorder(outliers=factor).write(tmp_path / "store"), []
    streamed = ActivationStream(recorder(outliers=factor), notices.append)
    assert streamed.index.limits == store.index.limits
    assert store.num_rows < streamed.num_rows == sum(len(ids) - 1 for ids in DOCUMENTS)
    (limit,) = streamed.index.limits.values()
    assert float(streamed.norms(torch.arange(streamed.num_rows)).max()) <= limit
    first = store.index.shards[0]
    assert streamed.index.dropped["replaced in the first chunk"] == first.dropped["outlier"] > 0
    assert f"of which {first.dropped['outlier']} are outliers" in notices[0]
    recorded = {tuple(row) for row in store.gather(torch.arange(first.rows)).tolist()}
    there = {tuple(row) for row in streamed.gather(torch.arange(streamed.chunks[0].stop)).tolist()}
    assert there == recorded


def test_a_chunk_without_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Computed.kept
    monkeypatch.setattr(Computed, "kept", lambda self, limits: (kept(self, limits)[0] & False, {}))
    with pytest.raises(UsageError, match=r"activations.stream_rows: no row of chunk 0 is finite"):
        stream()


def test_an_epoch_goes_through_every_row_chunk_by_chunk_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = Recorder.compute
    monkeypatch.setattr(Recorder, "compute", lambda self, number: computed.append(number) or compute(self, number))
    streamed = stream()
    rows = StoreRows(streamed)
    held_out = first_held_out(rows, 60, 16)
    assert held_out < streamed.num_rows - 59
    num_chunks = sum(chunk.start < held_out for chunk in streamed.chunks)
    assert num_chunks >= 2 * KEPT_CHUNKS
    batches = RowBatches(rows, held_out, 16, 2 * -(-held_out // 16), seed=3)
    order = torch.cat([batches.indices(step) for step in range(len(batches))])
    for epoch in (order[:held_out], order[held_out : 2 * held_out]):
        assert epoch.sort().values.tolist() == list(range(held_out))
        chunk_of = torch.tensor([next(i for i, c in enumerate(streamed.chunks) if r in c) for r in epoch.tolist()])
        assert int((chunk_of.diff() != 0).sum()) == num_chunks - 1  # each chunk is one piece
    assert order[:held_out].tolist() != order[held_out : 2 * held_out].tolist()
    computed.clear()
    for _ in batches:
        assert len(streamed._computed) <= KEPT_CHUNKS
    assert len(computed) <= 2 * num_chunks


SETTINGS = [
    ("activations.dtype", "fp32"),
    ("train.steps", "24"),
    ("train.batch", "32"),
    ("train.save_every", "5"),
    ("train.precision", "fp32"),
    ("dictionary.expansion", "1"),
    ("dictionary.k", "4"),
    ("eval.rows", "60"),
    ("eval.every", "8"),
    ("eval.documents", "0"),
    ("track", "[]"),
]


def test_a_training_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    recipe = load_sae_recipe("tiny/sae", SETTINGS).resolve()

    def train(name: str, resume: bool = False, stop_at: int | None = None) -> tuple[dict[str, torch.Tensor], list[Any]]:
        steps: list[int] = []
        (tmp_path / name).mkdir(exist_ok=True)
        metrics = MetricsLog(tmp_path / name / "metrics.jsonl")

        def stop() -> bool:
            steps.append(1)
            return stop_at is not None and len(steps) >= stop_at

        trained = train_dictionary(
            StoreRows(stream()),
            recipe,
            checkpoints=tmp_path / name / "checkpoints",
            metrics=metrics,
            resume=resume,
            should_stop=stop,
        )
        metrics.close()
        lines = [(row.step, row.metrics) for row in MetricsLog(tmp_path / name / "metrics.jsonl").read()]
        return trained.dictionary.state_dict(), lines

    whole, lines = train("whole")
    train("cut", stop_at=13)
    again, lines_again = train("cut", resume=True)
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert lines_again == lines


def test_a_run_leaves_no_activations_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sae", "train", "tiny/sae", "--activations.task.size", "60", "--activations.stream_rows", "500"]
    for key, value in (dict(SETTINGS) | {"eval.documents": "2"}).items():
        words += [f"--{key}", value]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "activations are computed as they are needed" in shown.out + shown.err
    assert "in place:" in shown.out  # the held-out documents are put into the model, as with a recording
    assert not Path("runs/activations").exists()
    assert not [path for path in Path("runs").rglob("*") if path.name.startswith("shard-")]
    assert main(["sae", "features", "tiny-sae", "--features", "1", "--no-lens"]) == 2
    assert "--activations" in capsys.readouterr().err
    assert main(["runs", "resume", "tiny-sae", "--quiet"]) == 0
    assert main([*words, "--run", "other", "--activations.task.seed", "5", "--quiet"]) == 0
    used = [(Path("runs") / name / "activations.txt").read_text() for name in ("tiny-sae", "other")]
    assert used[0] != used[1]


def test_a_folder_is_no_stream() -> None:
    with pytest.raises(UsageError, match="'stream_rows' is about what a 'model' computes; a 'folder' is read as it is"):
        load_sae_recipe(
            "tiny/sae",
            [
                ("activations.folder", "x"),
                ("activations.model", "null"),
                ("activations.task", "null"),
                ("activations.stream_rows", "5"),
            ],
        ).resolve()
