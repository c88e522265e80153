"""An export is what is worth keeping of a run, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_runs import WEIGHTS, make_run, snapshot
from safetensors.torch import load_file, save_file

from closeness import allclose, assert_close
from posttrain.errors import CheckpointError, RunFailure, UsageError
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.sections import Component
from posttrain.runs import export
from posttrain.runs.export import export_run
from posttrain.runs.models import find_source
from posttrain.store.checkpoint_files import seal, step_folder
from refusing import refuses


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    run = make_run(folder, "a", best=2, accuracies={0: 0.1, 2: 0.75, 3: 0.5})
    (run / "results.json").write_text('{"run": "a"}')
    (run / "rollouts.db").write_bytes(b"large")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_folder_with_weights_recipe_and_results(root: Path, tmp_path: Path) -> None:
    before = snapshot(root)
    done = export_run(root, root / "a", tmp_path / "out" / "mine")
    assert (done.target, done.step, done.warnings) == (tmp_path / "out" / "mine", 2, ())
    kept = ["README.md", "config.json", "metrics.jsonl", "model.safetensors", "recipe.yaml", "results.json"]
    assert names_in(done.target) == kept
    assert (done.num_files, done.num_bytes) == (6, sum(p.stat().st_size for p in done.target.iterdir()))
    assert (done.target / "model.safetensors").read_bytes() == WEIGHTS
    assert (done.target / "recipe.yaml").read_bytes() == (root / "a" / "recipe.yaml").read_bytes()
    assert snapshot(root) == before
    assert os.listdir(tmp_path / "out") == ["mine"]
    (tmp_path / "secret").write_text("mine alone")
    (root / "a" / "report.html").symlink_to(tmp_path / "secret")
    assert "report.html" not in names_in(export_run(root, root / "a", tmp_path / "again").target)


def test_exported_folder_keeps_the_template_of_its_training(root: Path, tmp_path: Path) -> None:
    template = {"name": "r1_zero", "preamble": ""}
    make_run(root, "b", recipe={"rollout": {"num_prompts": 2}, "prompt": {"template": template}})
    export_run(root, root / "b", tmp_path / "out")
    source = find_source(str(tmp_path / "out"), tmp_path / "none")
    assert source.template == Component.model_validate(template)
    assert resolve_model_name(source.path) == str(tmp_path / "out")


def test_the_card_states_what_it_is(root: Path, tmp_path: Path) -> None:
    card = (export_run(root, root / "a", tmp_path / "out").target / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- posttrain\n---\n")
    assert "- weights: after step 2 of 10\n" in card
    assert "- last held-out evaluation: accuracy 50.0%\n" in card
    assert "posttrain 0.1.0, recipe `tiny/grpo`" in card


def test_which_weights(root: Path, tmp_path: Path) -> None:
    make_run(root, "b")
    make_run(root, "c", steps=())
    chosen = [("a", None, 2), ("a", "best", 2), ("a", "last", 3), ("a", "none", None), ("b", None, 3)]
    for number, (name, weights, step) in enumerate([*chosen, ("c", "none", None)]):
        done = export_run(root, root / name, tmp_path / f"out-{number}", weights=weights)
        assert done.step == step
        assert (done.target / "model.safetensors").exists() == (step is not None)
    with refuses(UsageError, "b has no checkpoint"):
        export_run(root, root / "b", tmp_path / "x", weights="best")
    with refuses(UsageError, "--weights"):
        export_run(root, root / "c", tmp_path / "x")


def test_a_target_that_does_not_fit_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    os.symlink("nowhere", tmp_path / "dangling")
    os.symlink(root, tmp_path / "way-in")
    before = snapshot(tmp_path)
    for name, why in [
        ("taken", "already exists"),
        ("dangling", "already exists"),
        ("runs/new", "the runs folder"),
        ("taken/../runs/a/new", "the runs folder"),
        ("way-in/new", "the runs folder"),
        ("mine.zip", "export is a"),
    ]:
        with refuses(UsageError, why):
            export_run(root, root / "a", tmp_path / name)
    assert snapshot(tmp_path) == before


def test_damaged_weights_are_not_exported(root: Path, tmp_path: Path) -> None:
    path = step_folder(root / "a" / "checkpoints", 2) / "model.safetensors"
    path.write_bytes(b"v" + WEIGHTS[1:])
    with refuses(CheckpointError, "from its SHA-256", "not exported"):
        export_run(root, root / "a", tmp_path / "out")
    assert os.listdir(tmp_path) == ["runs"]
    assert export_run(root, root / "a", tmp_path / "out", weights="last").step == 3


def reseal(folder: Path, step: int) -> None:
    (folder / "manifest.json").unlink()
    seal(folder, step)


@pytest.mark.parametrize("name", ["tokenizer.json", "../outside.bin", "../../recipe.yaml", "{tmp}/secret"])
def test_a_manifest_that_names_files_elsewhere_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    """A run of unknown origin must not draw a file of this machine into an export, nor write one next to it."""
    (tmp_path / "secret").write_text("mine alone")
    folder = step_folder(root / "a" / "checkpoints", 2)
    os.symlink(tmp_path / "secret", folder / "tokenizer.json")
    (folder.parent / "outside.bin").write_text("x")
    reseal(folder, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    full = name.replace("{tmp}", str(tmp_path))
    target = (folder / full).read_bytes()
    entry = {"bytes": len(target), "sha256": hashlib.sha256(target).hexdigest()}
    del manifest["files"]["tokenizer.json"]
    manifest["files"][full] = entry
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    before = snapshot(tmp_path)
    with refuses(CheckpointError, "the checkpoint"):
        export_run(root, root / "a", tmp_path / "out")
    assert snapshot(tmp_path) == before


def test_a_failure_leaves_nothing_behind(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "model_card", stop)
    with pytest.raises(KeyboardInterrupt):
        export_run(root, root / "a", tmp_path / "out" / "mine")
    assert os.listdir(tmp_path / "out") == []


def make_adapter_run(
    root: Path, name: str, change: Callable[[torch.Tensor], object], base: str = "tiny", **adapter: Any
) -> tuple[Path, torch.Tensor]:
    """A run with a LoRA adapter whose weights were changed so, and the logits of its model."""
    from posttrain.models.load import load_model
    from posttrain.models.lora import apply_adapter
    from posttrain.recipes.sections import AdapterSection, ModelSection
    from posttrain.training.checkpoint import save_checkpoint

    run = make_run(root, name, recipe={"model": {"name": base, "dtype": "float32"}}, steps=())
    section = ModelSection(name=base, device="cpu", adapter=AdapterSection(**adapter))
    loaded = load_model(section, seed=0)
    model = apply_adapter(loaded.model, section.adapter, seed=0)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            change(parameter)
        logits = model(torch.arange(40)[None]).logits
    save_checkpoint(run / "checkpoints", step=1, model=model, tokenizer=loaded.tokenizer, optimizer={}, state={})
    return run, logits


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a LoRA adapter on the embedded model whose weights were made up."""
    generator = torch.Generator().manual_seed(0)

    def draw(parameter: torch.Tensor) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)

    return make_adapter_run(tmp_path_factory.mktemp("adapter") / "runs", "lora", draw, rank=4)[0]


def logits_of(folder: Path) -> torch.Tensor:
    from posttrain.models.load import load_model
    from posttrain.recipes.sections import ModelSection

    loaded = load_model(ModelSection(name=str(folder), device="cpu"), seed=0)
    with torch.no_grad():
        return loaded.model(torch.arange(40)[None]).logits


def test_an_adapter_stays_one_and_names_its_base(adapter_run: Path, tmp_path: Path) -> None:
    done = export_run(adapter_run.parent, adapter_run, tmp_path / "out")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names_in(done.target))
    assert "model.safetensors" not in names_in(done.target)
    base = json.loads((done.target / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert f"an adapter for {base}" in done.warnings[0]
    assert "--merge" in done.warnings[0]
    assert "LoRA adapter in peft's layout" in (done.target / "README.md").read_text()


def test_a_merged_adapter_is_the_same_model_without_peft(adapter_run: Path, tmp_path: Path) -> None:
    from posttrain.models.sources import TINY

    done = export_run(adapter_run.parent, adapter_run, tmp_path / "out", merge=True)
    assert not any("adapter" in name for name in names_in(done.target))
    assert "LoRA" not in (done.target / "README.md").read_text()
    merged, adapted = logits_of(done.target), logits_of(step_folder(adapter_run / "checkpoints", 1))
    assert allclose(merged, adapted, atol=1e-4)
    assert (merged - logits_of(TINY)).abs().max() > 0.1
    assert load_file(done.target / "model.safetensors").keys() == load_file(TINY / "model.safetensors").keys()


def test_export_run_with_an_adapter_on_a_tied_matrix_unties_it_when_merged(tmp_path: Path) -> None:
    """Merged into both places, the embedded model with an adapter on its embedding was 79 nats off."""
    targets = ["lm_head", "q_proj"]
    run, expected = make_adapter_run(tmp_path / "runs", "tied", lambda p: p.add_(0.1), rank=4, targets=targets)
    merged = export_run(run.parent, run, tmp_path / "out", merge=True).target
    assert_close(logits_of(merged).log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False


def test_export_run_that_is_not_the_trained_model_is_refused(
    adapter_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.models import lora

    compare = export._compare_with_trained

    def lose(model: Any) -> Any:
        return model.unload()

    monkeypatch.setattr(lora, "merge_adapter", lose)
    with refuses(RunFailure, "--merge"):
        export_run(adapter_run.parent, adapter_run, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()

    def damage(folder: Path) -> bool:
        path = folder / "adapter_model.safetensors"
        if "checkpoints" not in folder.parts and path.is_file():
            save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, path)
        return False

    monkeypatch.setattr(export, "_compare_with_trained", lambda *args: damage(args[2]) or compare(*args))
    with refuses(RunFailure, "adapter: its log-probabilities"):
        export_run(adapter_run.parent, adapter_run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_an_adapter_is_exported_merged_or_not_at_all(adapter_run: Path, tmp_path: Path) -> None:
    """peft would attach the upper one to the model below both, without a word."""
    lower = str(step_folder(adapter_run / "checkpoints", 1))
    run, expected = make_adapter_run(tmp_path / "runs", "upper", lambda p: p.fill_(0.02), lower, rank=2)
    with pytest.raises(
        UsageError, match=f"upper: the adapter is stacked on another adapter, {lower}, .*; --merge exports"
    ):
        export_run(run.parent, run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merged = export_run(run.parent, run, tmp_path / "out", merge=True).target
    assert_close(logits_of(merged), expected, atol=1e-4, rtol=0)
    assert (logits_of(Path(lower)) - expected).abs().max() > 0.1
    shutil.copytree(adapter_run, tmp_path / "runs" / "lower")  # its base by a relative path, exported from elsewhere
    settings = step_folder(run / "checkpoints", 1) / "adapter_config.json"
    relative = f"runs/lower/checkpoints/{Path(lower).name}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"base_model_name_or_path": relative}))
    reseal(settings.parent, 1)
    with refuses(UsageError, "stacked on another"):
        export_run(run.parent, run, tmp_path / "other")


def test_a_reward_models_adapter_comes_with_how_to_ask_it(adapter_run: Path, tmp_path: Path) -> None:
    from posttrain.models.load import load_model
    from posttrain.models.scorer import save_adapter_scorer
    from posttrain.recipes.sections import ModelSection

    run = Path(shutil.copytree(adapter_run, tmp_path / "runs" / "rm", symlinks=True))
    folder = step_folder(run / "checkpoints", 1)
    model = load_model(ModelSection(name=str(folder), device="cpu"), seed=0).model
    assert save_adapter_scorer(folder, model, torch.ones(1, 128))
    reseal(folder, 1)
    done = export_run(run.parent, run, tmp_path / "out")
    assert "config.pad_token_id = None" in done.warnings[1]
    assert done.warnings[1][1:] in (done.target / "README.md").read_text()
