"""Reference log-probabilities of given data: computed once, kept in the run, used only for the same data."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from test_batch_fields import CLOSE, LORA, difference, initial_model, plain_logprobs, update

from closeness import approx
from posttrain.activity import Phase, describe_activity
from posttrain.training.batch_fields import Scorer
from posttrain.training.build import TrainerState, prepare
from posttrain.training.checkpoint import load_checkpoint, restore_model
from posttrain.training.sources import unit_batches as sources
from posttrain.types import Batch
from small_runs import one_layer_recipe, run, save_perturbed

KEPT = "ref_logprobs.safetensors"
DPO = {"objective": {"name": "dpo"}, "data": {"batch_size": 3}}


def batches(parts: TrainerState, steps: int = 4) -> list[Batch]:
    found = [parts.source(step).batch for step in range(1, steps + 1)]
    return [batch for batch in found if batch is not None]


def same_reference(left: list[Batch], right: list[Batch]) -> bool:
    return all(
        torch.equal(a.fields["ref_logprobs"], b.fields["ref_logprobs"]) for a, b in zip(left, right, strict=True)
    )


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of rows that the reference computes."""
    request: list[int] = []
    original = Scorer.logprobs

    def counting(self: Scorer, batch: Batch) -> Any:
        request.append(batch.num_rows)
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "logprobs", counting)
        yield request


def test_they_are_those_of_the_start_model_also_after_updates() -> None:
    recipe = one_layer_recipe("judged", **DPO, model=LORA)
    parts = prepare(recipe)
    for step in (1, 2, 3):
        batch = update(parts, recipe, step)
        expected = plain_logprobs(initial_model(), batch, 1.0)
        assert difference(batch.fields["ref_logprobs"], expected) == approx(0.0, abs=CLOSE)
        assert not bool(batch.fields["ref_logprobs"][~batch.mask].any())
    assert difference(batch.fields["ref_logprobs"], plain_logprobs(parts.model, batch, 1.0)) > 0.1


def test_they_are_computed_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FIXED_CHUNK", 4)  # ten pairs, in three parts
    recipe = one_layer_recipe("judged", **DPO)
    with counted(monkeypatch) as request:
        first = batches(prepare(recipe, tmp_path))
    assert request == [8, 8, 4]
    with counted(monkeypatch) as request:
        again = batches(prepare(recipe, tmp_path))
    assert request == []
    assert same_reference(first, again)
    monkeypatch.undo()
    alone = batches(prepare(recipe))  # without a folder, in one part
    for one, other in zip(first, alone, strict=True):
        assert difference(one.fields["ref_logprobs"], other.fields["ref_logprobs"]) == approx(0.0, abs=CLOSE)


@pytest.mark.parametrize("change", ["rows", "model", "adapter"])
def test_they_are_not_trusted_for_anything_else(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, dict[str, Any]] = {
        "rows": {"task": {"name": "small_runs:judged_sums", "size": 9}},
        "model": {"model": {"name": save_perturbed(tmp_path / "other")}},
        "adapter": {"model": LORA},
    }
    folder = tmp_path / "run"
    folder.mkdir()
    batches(prepare(one_layer_recipe("judged", **DPO), folder))
    other = one_layer_recipe("judged", **DPO, **changes[change])
    with counted(monkeypatch) as request:
        found = batches(prepare(other, folder))
    assert sum(request) == (18 if change == "rows" else 20)
    assert same_reference(found, batches(prepare(other)))
    with counted(monkeypatch) as request:  # now these are the ones that are kept
        prepare(other, folder)
    assert request == []


def test_a_resumed_run_keeps_the_reference_of_its_beginning(tmp_path: Path) -> None:
    """With and without what was kept: the checkpoint is restored into the model, not into the reference."""
    recipe = one_layer_recipe("judged", **DPO, train={"steps": 2, "lr": 1e-2})
    run(tmp_path, recipe)
    kept = load_file(tmp_path / KEPT)
    assert kept["values"].dtype == torch.float32
    found = load_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    for folder in (tmp_path, None):
        parts = prepare(recipe, folder)
        restore_model(parts.model, found.path)
        batch = parts.source(3).batch
        assert batch is not None
        expected = plain_logprobs(initial_model(), batch, 1.0)
        assert difference(batch.fields["ref_logprobs"], expected) == approx(0.0, abs=CLOSE)
        assert difference(batch.fields["ref_logprobs"], plain_logprobs(parts.model, batch, 1.0)) > 0.1


def test_they_are_computed_for_the_pairs_that_the_run_will_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of three pairs of ten; a run that goes on to four sees all ten, and computes the other four."""
    short, long = (one_layer_recipe("judged", **DPO, train={"steps": steps}) for steps in (2, 4))
    with counted(monkeypatch) as request:
        first = batches(prepare(short, tmp_path), 2)
    assert request == [12]
    with counted(monkeypatch) as request:
        longer = batches(prepare(long, tmp_path))
    assert request == [8]
    assert same_reference(first, longer[:2])
    with counted(monkeypatch) as request:
        prepare(long, tmp_path)
        prepare(short, tmp_path)
    assert request == []
    alone = batches(prepare(long))
    for one, other in zip(longer, alone, strict=True):
        assert difference(one.fields["ref_logprobs"], other.fields["ref_logprobs"]) == approx(0.0, abs=CLOSE)


def test_they_are_computed_for_the_held_out_units_that_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """KTO reads an answer at a time: ten examples have twenty, of which ten are evaluated."""
    recipe = one_layer_recipe(
        "judged",
        objective="kto",
        data={"batch_size": 3},
        train={"steps": 1},
        eval={"every": 1, "num_examples": 10, "tasks": ["small_runs:judged_sums"]},
    )
    with counted(monkeypatch) as request:
        prepare(recipe)
    assert request == [3, 10]


def test_they_are_followed_while_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    original = Scorer.logprobs

    def watching(self: Scorer, batch: Batch) -> Any:
        lines.append(describe_activity(Phase("training")))
        return original(self, batch)

    monkeypatch.setattr(sources, "FIXED_CHUNK", 4)
    monkeypatch.setattr(Scorer, "logprobs", watching)
    prepare(one_layer_recipe("judged", **DPO, train={"steps": 2}))
    assert [re.search(r"ref_logprobs.*?(\d+) of (\d+) pairs", line).groups() for line in lines] == [
        ("0", "6"),
        ("4", "6"),
    ]


def test_unit_with_other_tokens_alone_is_computed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = one_layer_recipe("judged", **DPO)
    first = batches(prepare(recipe, tmp_path))
    digest = sources._digest
    unit = prepare(recipe).source.units[0]  # type: ignore[union-attr]

    def changed(of: Any) -> bytes:
        if of == unit:
            return b"x" * 16
        return digest(of)

    monkeypatch.setattr(sources, "_digest", changed)
    with counted(monkeypatch) as request:
        again = batches(prepare(recipe, tmp_path))
    assert request == [2]
    assert all(
        difference(a.fields["ref_logprobs"], b.fields["ref_logprobs"]) == approx(0.0, abs=CLOSE)
        for a, b in zip(first, again, strict=True)
    )


@pytest.mark.parametrize("damage", ["empty", "values", "lengths", "digests", "places"])
def test_damaged_reference_cache_is_computed_again(
    damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = one_layer_recipe("judged", **DPO)
    batches(prepare(recipe, tmp_path))
    stored = load_file(tmp_path / KEPT)
    (key,) = (name for name in stored if name.startswith("units-"))
    name = {"places": key}.get(damage, damage)
    if damage == "empty":
        (tmp_path / KEPT).write_bytes(b"")
    else:
        stored[name] = stored[name][:-1].clone()
        save_file(stored, tmp_path / KEPT)
    with counted(monkeypatch) as request:
        prepare(recipe, tmp_path)
    assert sum(request) == 20


def test_cached_reference_is_sent_to_other_processes_once(tmp_path: Path) -> None:
    """Rows that share memory would each be sent with the memory of all."""
    lengths = [50] * 200
    known = sources.FixedField(
        {place: (torch.zeros(length), torch.ones(length)) for place, length in enumerate(lengths)},
        dict.fromkeys(range(len(lengths)), b"d" * 16),
    )
    (tmp_path / KEPT).write_bytes(save(sources._tensors_of(known, "units-of")))
    found = sources._read_cache(tmp_path / KEPT, "units-of", 2)
    assert found is not None
    assert found.digests == known.digests
    assert all(torch.equal(found.values[n][k], known.values[n][k]) for n in known.values for k in (0, 1))
    num_bytes = 4 * 2 * sum(lengths)
    overhead = 1000 * 2 * len(lengths)  # of 400 tensors; sharing memory, they take 400 times the bytes
    assert len(pickle.dumps(found)) < num_bytes + overhead
