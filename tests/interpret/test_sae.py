"""Recipes of dictionaries, and their training: a run that was cut goes on bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import TensorRows, match, plant

from closeness import approx, assert_close
from posttrain.errors import CheckpointError, DataError, NonFiniteLoss, PosttrainError, RecipeError, UsageError
from posttrain.interpret.activations import record
from posttrain.interpret.activations.shards import ActivationStore, StoreWriter
from posttrain.interpret.saes.fitting import first_held_out, fit_sae
from posttrain.interpret.saes.sae_recipe import SaeRecipe, load_sae_recipe
from posttrain.interpret.saes.sae_training import TrainedDictionary, open_or_record, train_sae
from posttrain.recipes.document import interpretation_names
from posttrain.recipes.recipe import load_recipe
from posttrain.store.checkpoint_files import seal
from posttrain.store.metrics import MetricsLog
from refusing import refuses

KINDS: dict[str, dict[str, Any]] = {"batchtopk": {"k": 4}, "topk": {"k": 4}, "l1": {"coefficient": 0.02}}


def recipe(kind: str = "batchtopk", evaluation: dict[str, Any] | None = None, **train: Any) -> SaeRecipe:
    settings = {"steps": 24, "batch": 64, "save_every": 5, "log_every": 4, "precision": "fp32", "dead_after": 0.1}
    data = {
        "activations": {"folder": "unused"},
        "dictionary": {"name": kind, "expansion": 4, **KINDS[kind]},
        "train": settings | train,
        "eval": {"rows": 256, "every": 8} | (evaluation or {}),
    }
    return SaeRecipe.model_validate(data).resolve()


def rows(d: int = 16, count: int = 1500) -> TensorRows:
    planted = plant(d, 32, 3.0, seed=5)
    return TensorRows(planted.rows(planted.codes(count)))


def train(folder: Path, given: SaeRecipe, data: TensorRows | None = None, **options: Any) -> TrainedDictionary:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return train_sae(
        data or rows(),
        given,
        checkpoints=folder / "checkpoints",
        metrics=MetricsLog(folder / "metrics.jsonl"),
        **options,
    )


def state_of(trained: TrainedDictionary) -> list[bytes]:
    return [value.numpy().tobytes() for value in trained.dictionary.state_dict().values()]


def metrics_of(folder: Path) -> list[Any]:
    return [(row.step, row.metrics) for row in MetricsLog(folder / "metrics.jsonl").read()]


def stop_after(step: int) -> Callable[[], bool]:
    request = 0

    def should_stop() -> bool:
        nonlocal request
        request += 1
        return request >= step

    return should_stop


def test_a_run_that_was_cut_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """23 batches of 64 rows are an epoch of less than 20: the cuts are in the first and in the second."""
    data, kind = rows(), "l1"
    whole = train(tmp_path / "whole", recipe(kind), data)
    stops = []
    for stop in (7, 13):
        cut = train(tmp_path / "cut", recipe(kind), data, resume=bool(stops), should_stop=stop_after(stop))
        stops.append(cut.step)
        assert cut.reason == "interrupted"
    again = train(tmp_path / "cut", recipe(kind), data, resume=True)
    assert stops == [7, 20]
    assert (again.step, again.reason) == (24, "finished")
    assert state_of(again) == state_of(whole)
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
    assert again.quality.fvu == whole.quality.fvu
    assert sorted(x.name for x in (tmp_path / "cut" / "checkpoints").iterdir()) == ["step-000020", "step-000024"]
    finished = train(tmp_path / "cut", recipe(kind), data, resume=True)  # nothing is left to do
    assert state_of(finished) == state_of(whole)
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")


def test_a_training_in_memory_is_the_same_training(tmp_path: Path) -> None:
    given, data = recipe(steps=12), rows()
    trained = train(tmp_path, given, data).dictionary.requires_grad_(False).fold()
    start = first_held_out(data, given.eval.rows, given.train.batch)
    fitted = fit_sae(data, start, given.dictionary, given.train, seed=given.train.seed)
    assert all(torch.equal(value, fitted.state_dict()[name]) for name, value in trained.state_dict().items())


def test_what_is_recorded(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    trained = train(tmp_path, recipe(), observer=lambda event, info: events.append((event, info)))
    recorded = metrics_of(tmp_path)
    assert [step for step, metrics in recorded if "loss" in metrics] == [1, 4, 8, 12, 16, 20, 24]
    evaluated = [(step, metrics) for step, metrics in recorded if "loss" not in metrics]
    assert [step for step, _ in evaluated] == [8, 16, 24]
    assert evaluated[-1][1]["eval/held_out/fvu"] == trained.quality.fvu
    last = recorded[-2][1]
    assert last["loss"] == approx(last["squared_error"] + last["auxk"])  # no penalty
    assert last["l0"] == approx(4, abs=1.5)
    assert events[0] == ("start", {"steps": 24, "num_examples": 1244, "resumed_from": None, "dropped": {}})
    assert events[-1] == ("finish", {"step": 24, "reason": "finished"})
    assert [info["step"] for event, info in events if event == "checkpoint"] == [5, 10, 15, 20, 24]


def test_the_learning_rate_rises_and_falls(tmp_path: Path) -> None:
    train(tmp_path, recipe(lr=0.01, log_every=1, steps=20, warmup=0.2, decay=0.5))
    rates = [metrics["lr"] for _, metrics in metrics_of(tmp_path) if "lr" in metrics]
    # the rate that the next step has: warm-up over 4 steps, decay over the last 10
    expected = [0.01 * min(1, (step + 1) / 4, (20 - step) / 10) for step in range(1, 21)]
    assert rates == approx(expected)
    assert recipe().train.learning_rate(2**16) == approx(1.5e-4)
    assert recipe().train.learning_rate(64) == 1e-3


def test_decoder_rows_keep_norm_one_and_dead_features_are_counted(tmp_path: Path) -> None:
    trained = train(tmp_path, recipe(dead_after=1e-9))
    decoder = trained.dictionary.W_dec.detach()
    assert_close(decoder.norm(dim=1), torch.ones(64))
    since = trained.dictionary.since_fired
    assert set(since.tolist()) <= set(range(0, 24 * 64 + 1, 64))
    last = [metrics for _, metrics in metrics_of(tmp_path) if "dead" in metrics][-1]
    assert last["dead"] == approx(float((since > 1).double().mean()))


def test_a_checkpoint_that_was_damaged_is_passed_over(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", recipe())
    train(tmp_path / "cut", recipe(), should_stop=stop_after(12))
    state = tmp_path / "cut" / "checkpoints" / "step-000012" / "state.ckpt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(bytes(content))
    warnings: list[str] = []
    again = train(
        tmp_path / "cut",
        recipe(),
        resume=True,
        observer=lambda e, f: warnings.append(str(f)) if e == "notice" else None,
    )
    assert "step-000012" in warnings[0]
    assert state_of(again) == state_of(whole)
    for folder in (tmp_path / "cut" / "checkpoints").glob("step-*"):
        (folder / "state.ckpt").write_bytes(b"")
    with refuses(CheckpointError, "all checkpoints failed verification"):
        train(tmp_path / "cut", recipe(), resume=True)


def seal_again(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    seal(folder, int(folder.name.removeprefix("step-")))


def test_a_checkpoint_that_lightning_wrote_goes_on(tmp_path: Path) -> None:
    """Runs of 0.2.0 have its state: the same names, and its own loops and schedules besides."""
    whole = train(tmp_path / "whole", recipe())
    train(tmp_path / "cut", recipe(), should_stop=stop_after(12))
    folder = tmp_path / "cut" / "checkpoints" / "step-000012"
    state = torch.load(folder / "state.ckpt", weights_only=True)
    (settings,) = state["optimizer_states"][0]["param_groups"]
    settings["initial_lr"] = settings["lr"]
    state |= {"epoch": 0, "pytorch-lightning_version": "2.6.6", "loops": {}, "callbacks": {}}
    state["lr_schedulers"] = [{"last_epoch": 12, "_step_count": 13, "lr_lambdas": [None]}]
    torch.save(state, folder / "state.ckpt")
    seal_again(folder)
    events: list[dict[str, Any]] = []
    again = train(tmp_path / "cut", recipe(), resume=True, observer=lambda _, info: events.append(info))
    assert events[0]["resumed_from"] == 12
    assert state_of(again) == state_of(whole)


@pytest.mark.parametrize("content", [b"no state", b"", [1, 2], {"global_step": 12}])
def test_a_state_that_is_none_is_refused(content: object, tmp_path: Path) -> None:
    train(tmp_path, recipe(), should_stop=stop_after(12))
    for folder in sorted((tmp_path / "checkpoints").iterdir()):
        if isinstance(content, bytes):
            (folder / "state.ckpt").write_bytes(content)
        else:
            torch.save(content, folder / "state.ckpt")
        seal_again(folder)
    with pytest.raises(CheckpointError, match=r"state.ckpt: not a training state"):
        train(tmp_path, recipe(), resume=True)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    data = rows()
    data.x[400:420] = float("inf")
    with pytest.raises((NonFiniteLoss, UsageError), match=r"not finite|the loss is"):
        train(tmp_path, recipe(log_every=1), data)
    data = rows()
    with refuses(NonFiniteLoss, "A smaller train.lr"):
        train(tmp_path / "lr", recipe("l1", lr=1e30, log_every=1, max_grad_norm=None), data)


def test_planted_directions_are_found(tmp_path: Path) -> None:
    planted = plant(32, 48, 3.0, noise=0.02, seed=1)
    data = TensorRows(planted.rows(planted.codes(20_000)))
    given = recipe(evaluation={"rows": 2000, "every": 0}, steps=400, batch=256, lr=5e-3, log_every=100, save_every=0)
    given = given.model_copy(update={"dictionary": given.dictionary.model_copy(update={"k": 3, "expansion": 2.0})})
    trained = train(tmp_path, given.resolve(), data)
    mean, _ = match(trained.dictionary.W_dec.detach(), planted.directions)
    assert mean > 0.85
    assert trained.quality.fvu < 0.12
    assert trained.quality.l0 == approx(3, abs=0.3)


def test_kill_9_and_resume_gives_identical_weights(tmp_path: Path) -> None:
    given = recipe(steps=90, save_every=7, log_every=3)
    whole = train(tmp_path / "whole", given)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    fork = multiprocessing.get_context("fork")  # a new interpreter takes seconds to import everything
    killed_at: list[int] = []
    for wanted in (16, 40):
        process = fork.Process(target=train, args=(tmp_path / "cut", given), kwargs={"resume": bool(killed_at)})
        process.start()
        deadline = time.monotonic() + 120
        while _last_step(metrics) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        killed_at.append(_last_step(metrics))
    assert 16 <= killed_at[0] < 90
    assert 40 <= killed_at[1] < 90
    resumed = train(tmp_path / "cut", given, resume=True)
    assert state_of(resumed) == state_of(whole)
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")


def _last_step(path: Path) -> int:
    if not path.is_file():
        return 0
    lines = path.read_text().split("\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


# Activations of a recipe.

STORIES = {"name": "stories", "split": "train", "seed": 1, "size": 30}


def made(run: Path, folder: str | None = None, **changes: Any) -> tuple[ActivationStore, list[str]]:
    run.mkdir(exist_ok=True)
    warnings: list[str] = []
    section = {"model": {"name": "tiny"}, "site": "resid.1", "task": STORIES, "dtype": "fp32"} | changes
    data = {"activations": {"folder": folder} if folder else section, "dictionary": "topk"}
    data |= {"train": {"batch": 64}, "eval": {"rows": 64}}
    return open_or_record(SaeRecipe.model_validate(data), run, warnings.append), warnings


def test_open_or_record_twice_records_once_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, warnings = made(tmp_path / "one")
    assert first.folder == tmp_path / "one" / "activations"
    assert "recording activations: " in warnings[0]
    monkeypatch.setattr(record, "read_rows", None)
    again, warnings = made(tmp_path / "one")
    assert warnings == []
    rows = torch.arange(first.num_rows)
    assert torch.equal(first.gather(rows), again.gather(rows))
    named, _ = made(tmp_path / "two", str(first.folder))
    assert torch.equal(first.gather(rows), named.gather(rows))


def test_open_or_record_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    first, _ = made(tmp_path / "one")
    shard = first.folder / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + b"\0\0\1\0")
    with refuses(DataError, "was changed after"):
        made(tmp_path / "one")


def test_open_or_record_an_interrupted_recording_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MIN_SHARD_ROWS", 600)
    monkeypatch.setattr(record, "SHARD_BYTES", 1)
    whole, _ = made(tmp_path / "whole")
    assert len(whole.index.shards) > 2
    add = StoreWriter.add

    def stop(self: Any, tensors: Any, dropped: Any) -> None:
        if len(self.index.shards) == 2:
            raise KeyboardInterrupt
        add(self, tensors, dropped)

    with monkeypatch.context() as patched:
        patched.setattr(StoreWriter, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "one")
    with refuses(UsageError, "`outliers`"):
        made(tmp_path / "one", outliers=3)
    again, _ = made(tmp_path / "one")
    assert [shard.sha256 for shard in again.index.shards] == [shard.sha256 for shard in whole.index.shards]


# Recipes.

NAMES = interpretation_names("dictionary")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_resolves_and_its_dump_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    resolved = load_sae_recipe(name).resolve()
    path = tmp_path / "again.yaml"
    path.write_text(resolved.to_yaml())
    again = load_sae_recipe(str(path)).resolve()
    assert again.dump() == resolved.dump()
    assert again.fingerprint() == resolved.fingerprint()
    with pytest.raises(RecipeError, match=f"this trains a dictionary; run it with: posttrain sae train {name}"):
        load_recipe(name)


REFUSED: list[tuple[list[tuple[str, str]], str]] = [
    ([("dictionary.kk", "3")], "dictionary.kk"),
    ([("dictionary", "topp")], "'topp'"),
    ([("activations.folder", "x")], "'folder'"),
    ([("activations.sites", "[resid.1]")], "activations.sites"),
    ([("activations.source", "difference")], "eval.documents"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_is_refused(overrides: list[tuple[str, str]], message: str) -> None:
    with refuses(PosttrainError, message):
        load_sae_recipe("tiny/sae", overrides).resolve()
