"""A run goes on only as what it was: changed recipes and missing records are named, and need an explicit flag."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli import main
from posttrain.recipes.document import decisive
from posttrain.recipes.recipe import load_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore

pytestmark = pytest.mark.usefixtures("no_curves")

RECIPE: dict[str, Any] = {
    "model": {"name": "tiny-sft"},
    "task": {"name": "stories", "size": 16, "max_steps": 1},
    "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
    "rollout": {"num_prompts": 2, "group_size": 4, "max_tokens": 16, "temperature": 1.5},
    "rewards": [{"name": "xml_format"}],
    "objective": "grpo",
    "train": {"steps": 4, "lr": 1.0e-5, "save_every": 2, "keep_checkpoints": 5},
    "eval": {
        "tasks": [{"name": "stories", "split": "validation", "size": 8}],
        "every": 4,
        "num_examples": 2,
        "max_tokens": 4,
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps with checkpoints of the steps 2 and 4."""
    root = tmp_path_factory.mktemp("made")
    (root / "mine.yaml").write_text(yaml.safe_dump(RECIPE))
    assert main(["train", str(root / "mine.yaml"), "--run", "a", "--runs-dir", str(root / "runs"), "--quiet"]) == 0
    rows = [row for row in MetricsLog(root / "runs" / "a" / "metrics.jsonl").read() if "grad_norm" in row.metrics]
    assert sum(row.metrics["grad_norm"] > 0 for row in rows) >= 3, "there is nothing to resume"
    return root


@pytest.fixture
def home(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that stands at step 2, as if it had been interrupted there; the working directory is its home."""
    shutil.copytree(finished, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    (folder / "checkpoints" / "best").unlink(missing_ok=True)
    MetricsLog(folder / "metrics.jsonl").trim(2)
    with RolloutStore(folder / "rollouts.db") as store:
        store.trim(2)
    return tmp_path


def resume(*more: str) -> int:
    return main(["runs", "resume", "a", "--quiet", *more])


def everything(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".db-wal", ".db-shm"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.name != ".lock"}


def edit_recipe(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = yaml.safe_load((folder / "recipe.yaml").read_text())
    change(content)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def set_lr(content: dict[str, Any]) -> None:
    content["train"]["lr"] = 2e-5


def cut_metrics(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))


def cut_rollouts(folder: Path) -> None:
    with RolloutStore(folder / "rollouts.db") as store:
        store.trim(1)


DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "recipe, metrics and rollouts": (
        lambda f: [edit_recipe(f, set_lr), cut_metrics(f), cut_rollouts(f)],
        [
            "train.lr: 1e-05 in the run, 2e-05 now",
            "metrics.jsonl: 1 of 3 lines up to step 2 are missing",
            "rollouts.db: 8 of 16 rollouts up to step 2 are missing",
        ],
    ),
    "no metrics": (
        lambda f: (f / "metrics.jsonl").unlink(),
        ["metrics.jsonl: 3 of 3 lines up to step 2 are missing"],
    ),
    "empty checkpoints": (
        lambda f: [shutil.rmtree(f / "checkpoints"), (f / "checkpoints").mkdir(), (f / "log.txt").unlink()],
        ["checkpoints: none found after 4 steps; is the disk with"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_as_the_checkpoint_left_it_is_named_and_nothing_changes(
    home: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "runs" / "a"
    make, expected = DAMAGE[damage]
    make(folder)
    before = everything(folder)
    assert resume() == 2
    message = " ".join(capsys.readouterr().err.split())
    assert [line for line in expected if line not in message] == []
    assert "--accept-changes" in message
    assert "Nothing was changed" in message
    assert everything(folder) == before
    assert resume("--accept-changes") == 0
    log = " ".join((folder / "log.txt").read_text().split())
    assert [line for line in expected if line not in log] == []
    status = RunDirectory(folder).read_status()
    assert status is not None
    assert (status.state, status.step) == ("finished", 4)
    if damage == "recipe, metrics and rollouts":
        assert resume() == 0  # the newest checkpoint remembers what it was accepted with


def test_untouched_it_goes_on_bit_for_bit_without_a_flag(home: Path, finished: Path) -> None:
    assert resume() == 0
    left, right = home / "runs" / "a", finished / "runs" / "a"
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        path = f"checkpoints/step-000004/{name}"
        assert (left / path).read_bytes() == (right / path).read_bytes()
    assert "accept" not in (left / "log.txt").read_text()


def test_place_may_change_and_the_original_recipe_puts_an_edited_one_back(home: Path) -> None:
    folder = home / "runs" / "a"
    edit_recipe(folder, set_lr)
    arguments = ["train", "mine.yaml", "--run", "a", "--resume", "--quiet", "--model.device", "cpu"]
    assert main(arguments) == 0
    log = (folder / "log.txt").read_text()
    assert "locations differ from the last start: model.device: 'auto' in the run, 'cpu' now" in log
    assert "recipe.yaml was edited; restored the recipe used for training: train.lr: 2e-05 in the run, 1e-05" in log
    recipe = RunDirectory(folder).read_recipe()
    assert (recipe["model"]["device"], recipe["train"]["lr"]) == ("cpu", 1e-5)
    (first, second) = json.loads((folder / "env.json").read_text())["starts"]
    assert first["fingerprint"] == second["fingerprint"]


def test_place_is_no_part_of_the_fingerprint_and_everything_else_is(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(RECIPE))
    base = load_recipe(str(tmp_path / "mine.yaml")).resolve()
    moved = [("model.device", "cpu"), ("description", "mine"), ("track", "[tensorboard]")]
    assert load_recipe(str(tmp_path / "mine.yaml"), moved).resolve().fingerprint() == base.fingerprint()
    for key, value in [
        ("model.dtype", "bfloat16"),
        ("train.seed", "1"),
        ("rewards.0.weight", "2"),
        ("eval.num_examples", "3"),
    ]:
        other = load_recipe(str(tmp_path / "mine.yaml"), [(key, value)]).resolve()
        assert other.fingerprint() != base.fingerprint(), key
    assert decisive(settings := decisive(base.dump())) == settings
