"""`posttrain evaluate RUN` of reward models: files, tables, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from closeness import approx
from posttrain.cli import main
from posttrain.errors import UsageError
from posttrain.evaluation.reward_models.measures import ACCURACIES
from posttrain.evaluation.reward_models.scoring import open_reward_model
from posttrain.runs.models import find_source
from posttrain.store.metric_names import find_metric
from refusing import refuses

pytestmark = pytest.mark.usefixtures("quick_stories", "no_curves")
SMALL = ["--model.name", "tiny", "--task.size", "40", "--data.batch_size", "2", "--train.steps", "2"]
SMALL += ["--eval.every", "0", "--quiet"]
EVERY_STEP = ["--train.save_every", "1"]


@pytest.fixture(scope="module")
def runs(quick_stories, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of each kind of reward model."""
    root = tmp_path_factory.mktemp("runs")
    for recipe in ("tiny/rm", "tiny/orm", "tiny/prm"):
        name = recipe.partition("/")[2]
        assert main(["train", recipe, "--runs-dir", str(root), "--run", name, *SMALL, *EVERY_STEP]) == 0
    return root


def evaluate(runs: Path, *arguments: str) -> int:
    return main(["evaluate", *arguments, "--runs-dir", str(runs), "--limit", "8"])


def read(folder: Path) -> tuple[dict, list[dict]]:
    content = json.loads((folder / "results.json").read_text())
    return content, [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "view", "n", "measured"),
    [
        ("rm", "pairs", 8, {"pair_accuracy", "margin"}),
        ("orm", "judged answers", 16, {"answer_accuracy", "auc", "top_one", "random_one", "oracle"}),
        ("prm", "labelled steps", 16, {"solution_accuracy", "error_f1", "step_auc"}),
    ],
)
def test_a_reward_model_is_measured_on_its_own_task(
    runs: Path, capsys: pytest.CaptureFixture[str], name: str, view: str, n: int, measured: set[str]
) -> None:
    assert evaluate(runs, name) == 0
    shown = capsys.readouterr().out
    folder = runs / name / "evaluation" / "stories-test"
    assert "stories/test" in shown
    assert str(folder) in shown.replace("\n", "")
    content, items = read(folder)
    assert (content["evaluation"], content["measured"]) == ("stories/test", view)
    results = content["results"]
    assert results["n"] == len(items) == n
    assert measured <= results.keys()
    assert [name for name in results if find_metric(name) is None] == []
    assert all(math.isfinite(value) for value in results.values())
    correct = [item["right"] for item in items]
    (name_of,) = measured & {*ACCURACIES.values()}
    assert results[name_of] == approx(sum(correct) / n)
    assert results[f"{name_of}_low"] <= results[name_of] <= results[f"{name_of}_high"]
    assert content["settings"]["task"]["split"] == "test"
    assert content["settings"]["step"] == 2
    page = (folder / "summary.md").read_text()
    assert page.startswith(f"# stories/test: {name}\n")
    assert items[0]["id"] in page


def test_several_models_are_in_one_table(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    given = ["rm", "orm", "--task", "stories", "--task.responses", "judged", "--out", str(out)]
    assert evaluate(runs, *given) == 0
    assert sorted(path.name for path in out.iterdir()) == ["orm-stories-test", "rm-stories-test"]
    assert read(out / "rm-stories-test")[0]["measured"] == "pairs"  # of two answers, a preference
    assert read(out / "orm-stories-test")[0]["measured"] == "judged answers"
    shown = capsys.readouterr().out
    assert shown.count("stories/test, ") == 3


def test_models_of_one_name_are_distinguished(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs in two folders may be called alike; each is measured, not one of them twice."""
    first, last = (str(runs / "rm" / "checkpoints" / f"step-00000{step}") for step in (1, 2))
    copies = [tmp_path / side / "rm" for side in ("one", "two")]
    for copy, checkpoint in zip(copies, (first, last), strict=True):
        shutil.copytree(checkpoint, copy / "checkpoints" / Path(checkpoint).name)
        shutil.copy(runs / "rm" / "recipe.yaml", copy / "recipe.yaml")
    out = tmp_path / "out"
    assert evaluate(runs, *map(str, copies), "--out", str(out)) == 0
    found = [read(folder) for folder in sorted(out.iterdir())]
    assert [content["settings"]["step"] for content, _ in found] == [1, 2]
    assert found[0][1] != found[1][1]
    assert "compared with" in capsys.readouterr().out  # the difference is tested


def test_a_checkpoint_of_the_run_may_be_named(runs: Path, tmp_path: Path) -> None:
    first, last = (runs / "rm" / "checkpoints" / f"step-00000{step}" for step in (1, 2))
    assert [open_reward_model(find_source(str(path), runs)).step for path in (first, last)] == [1, 2]
    for name, request in (("first", first), ("last", last), ("run", runs / "rm")):
        assert evaluate(runs, str(request), "--out", str(tmp_path / name), "--quiet") == 0
    one, other, whole = (read(tmp_path / name) for name in ("first", "last", "run"))
    assert other[1] == whole[1] != one[1]
    assert one[0]["settings"]["label"] == "rm@step-000001"
    assert one[0]["settings"]["step"] == 1
    exported = tmp_path / "runs" / "x" / "checkpoints"
    with refuses(UsageError, "checkpoint inside a run"):
        open_reward_model(find_source(str(exported), runs))
    with refuses(UsageError, "tiny:"):
        open_reward_model(find_source("tiny", runs))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rm", "--samples", "4"], "--samples"),
        (["rm", "--template", "boxed"], "--template"),
        (["rm", "--task", "stories", "--task.responses", "none"], "'stories'"),
        (["rm", "tiny", "--task", "stories"], "cannot share a table"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    runs: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0].startswith("rm/"):
        arguments = [str(runs / arguments[0])]
    assert evaluate(runs, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("models", [["rm"], ["rm", "orm"]])
def test_the_files_of_a_run_are_kept(
    runs: Path, models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "posttrain.evaluation.reward_models.measures.open_reward_model", None
    )  # before a model is loaded
    before = sorted(path.name for path in (runs / "rm").iterdir())
    assert evaluate(runs, *models, "--task", "stories", "--out", str(runs / "rm")) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert sorted(path.name for path in (runs / "rm").iterdir()) == before
