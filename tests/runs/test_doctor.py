"""``posttrain doctor`` and ``pt.diagnose``: faults, levels, explanations, and runs that cannot be read."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from balances.test_records_of_updates import recipe_of
from closeness import approx
from faults.patches import STUDY
from old_runs import copy_old_run
from posttrain.cli import main
from posttrain.recipes.recipe import Recipe
from posttrain.runs.diagnosis.diagnose import diagnose_run
from posttrain.runs.diagnosis.findings import RunFinding
from posttrain.runs.diagnosis.metric_curves import curves_of
from posttrain.runs.directory import RunDirectory, RunStatus, lock_run
from posttrain.store.metrics import MetricsLog, MetricsRow
from small_runs import one_layer_recipe, run

RECIPE = "model: {name: tiny}\ntask: {name: stories}\nobjective: {name: grpo}\ntrain: {steps: 8}\n"


def status_of(step: int, state: Any = "finished", message: str | None = None) -> RunStatus:
    return RunStatus(state, step, step, os.getpid(), "here", 5.0, message, "accuracy")


def trained(folder: Path, recipe: Recipe) -> Path:
    """A run with the files that a launcher writes."""
    folder.mkdir(parents=True)
    steps = run(folder, recipe).step
    directory = RunDirectory(folder)
    directory.write_recipe(recipe)
    directory.write_status(status_of(steps))
    return folder


def made(folder: Path, series: Mapping[str, Sequence[float]], evaluations: Mapping[int, float] | None = None) -> Path:
    """A run with these metrics, one value a step, and held-out accuracies by step."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    log = MetricsLog(folder / "metrics.jsonl")
    length = max(map(len, series.values()))
    for step in range(length):
        log.append(step + 1, {name: values[step] for name, values in series.items() if step < len(values)})
    for step, accuracy in (evaluations or {}).items():
        log.append(step, {"eval/sums/accuracy": accuracy, "eval/sums/n": 400.0})
    log.close()
    RunDirectory(folder).write_status(status_of(length))
    return folder


def of(findings: Sequence[RunFinding], kind: str) -> dict[str, RunFinding]:
    return {one.check: one for one in findings if one.kind == kind}


@pytest.mark.parametrize("kind", ["grpo", "returns", "dpo", "sft"])
def test_diagnose_a_clean_run_has_no_fault(kind: str, tmp_path: Path) -> None:
    folder = trained(tmp_path / "clean", recipe_of(kind))
    done = diagnose_run(folder)
    assert of(done.findings, "fault") == {}
    assert done.num_records == done.step
    assert "records" not in of(done.findings, "explanation")


@pytest.mark.parametrize(
    "changes",
    [
        {"regularize": {"kl_coef": 0.1, "kl_estimator": "k1"}},
        {"regularize": {"kl_coef": 0.1, "kl_estimator": "k2"}},
        {"model": {"adapter": {"rank": 2}, "dtype": "bf16"}, "regularize": {"kl_coef": 0.1}},
    ],
)
def test_diagnose_a_clean_run_whose_loss_is_hard_to_sum_has_no_fault(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = trained(tmp_path / "clean", one_layer_recipe("grpo", **changes, train={"steps": 3}))
    assert of(pt.diagnose(folder), "fault") == {}


@pytest.mark.parametrize(("number", "check"), [(14, "advantage"), (17, "tokens"), (26, "reward"), (32, "leftover")])
def test_diagnose_a_run_with_a_fault_names_it(
    number: int, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        STUDY[number].patch(patched)
        folder = trained(tmp_path / "faulty", recipe_of("reinforce"))
    fault = of(pt.diagnose(folder), "fault")[check]
    assert fault.step is not None
    assert fault.step <= 3
    assert fault.causes
    assert main(["doctor", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert f"{check}, step {fault.step}" in shown
    assert fault.decided_by in shown


def test_doctor_and_diagnose_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "runs" / "it", {"loss": [0.1] * 8, "truncated": [0.5] * 8, "kl_ref": [0.0] + [0.1] * 7})
    assert main(["doctor", "it", "--runs-dir", str(tmp_path / "runs"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    found = pt.diagnose("it", runs_dir=tmp_path / "runs")
    assert found == pt.diagnose(folder)
    assert content["findings"] == json.loads(json.dumps([asdict(one) for one in found]))
    assert (content["state"], content["step"], content["updates"]) == ("finished", 8, 0)
    assert {one.kind for one in found} == {"level", "explanation"}


UP, DOWN, FLAT = [0.1, 0.1, 0.1, 0.5, 0.8, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.5, 0.3, 0.1, 0.1, 0.1], [0.5] * 8
LEVELS: list[tuple[str, dict[str, list[float]]]] = [
    ("entropy", {"entropy": [1.0, 1.0, 1.0, 0.5, 0.2, 0.1, 0.1, 0.1]}),
    ("entropy", {"entropy": [1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 4.0, 4.0]}),
    ("truncated", {"truncated": [0.0, 0.0, 0.0, 0.2, 0.4, 0.5, 0.5, 0.5]}),
    ("uniform_groups", {"uniform_groups": [0.6] * 8}),
    ("format", {"format": DOWN}),
    ("format against accuracy", {"format": UP, "accuracy": FLAT}),
    ("completion_length_wrong", {"completion_length_wrong": [10 * x for x in UP], "completion_length_correct": FLAT}),
    ("reward", {"reward": DOWN}),
    ("kl_ref", {"kl_ref": [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]}),
    ("kl_sampler", {"kl_sampler": [0.1] * 8}),
    ("effective_sample_size", {"effective_sample_size": [0.4] * 8}),
    ("clip_fraction", {"clip_fraction": [0.4] * 8}),
    ("pair_accuracy", {"pair_accuracy": [0.5] * 8}),
    ("pair_accuracy", {"pair_accuracy": [1.0] * 8}),
    ("loss", {"loss": UP}),
    ("grad_norm", {"grad_norm": [0.0] * 8, "trained_tokens": [9.0] * 8}),
    ("weights_moved", {"weights_moved": [0.0] * 10, "lr": [1e-12] * 10}),
]


@pytest.mark.parametrize(("check", "series"), LEVELS)
def test_diagnose_names_a_level_and_no_fault(check: str, series: dict[str, list[float]], tmp_path: Path) -> None:
    found = pt.diagnose(made(tmp_path / "it", series))
    assert list(of(found, "level")) == [check]
    assert of(found, "fault") == {}
    assert of(found, "level")[check].decided_by


def test_diagnose_healthy_metrics_have_no_level(tmp_path: Path) -> None:
    healthy = {
        "reward": UP,
        "accuracy": UP,
        "format": UP,
        "entropy": [1.0, 0.9, 0.9, 0.8, 0.8, 0.7, 0.7, 0.7],
        "truncated": [0.05] * 8,
        "uniform_groups": [0.3] * 8,
        "completion_length_wrong": [10.0, 11.0, 10.0, 12.0, 12.0, 12.0, 12.0, 12.0],
        "completion_length_correct": [10.0, 11.0, 10.0, 12.0, 12.0, 12.0, 12.0, 12.0],
        "clip_fraction": [0.02] * 8,
        "loss": [0.01, -0.02, 0.0, 0.01, -0.01, 0.02, 0.0, -0.01],
        "grad_norm": [0.5] * 8,
    }
    found = pt.diagnose(made(tmp_path / "it", healthy, {0: 0.1, 8: 0.9}))
    assert of(found, "level") == {}
    assert list(of(found, "explanation")) == ["records"]


def test_diagnose_held_out_results_that_fall_are_levels(tmp_path: Path) -> None:
    """400 rows: the difference of 0.60 and 0.50 has a standard error of √(0.24/400 + 0.25/400) = 0.035."""
    found = pt.diagnose(made(tmp_path / "it", {"reward": UP, "loss": FLAT}, {0: 0.55, 4: 0.6, 8: 0.5}))
    levels = of(found, "level")
    assert levels["held-out accuracy"].found == "sums: 60.0% after step 4, 50.0% after step 8"
    assert "training reward 0.1, then 0.9" in levels["held-out against reward"].found
    near = pt.diagnose(made(tmp_path / "near", {"reward": UP, "loss": FLAT}, {0: 0.5, 4: 0.6, 8: 0.55}))
    assert of(near, "level") == {}


def test_curves_of_compare_first_and_last_values_by_their_scatter() -> None:
    rows = [MetricsRow(step, {"a": value}) for step, value in enumerate([1.0, 2.0, 3.0, 9.0, 4.0, 5.0, 6.0], start=1)]
    curves = curves_of([*rows, MetricsRow(8, {"a": float("nan")})])
    ends = curves.ends("a")
    assert ends is not None
    early, late = ends
    assert (early.mean, late.mean, late.step) == (2.0, 5.0, 5)
    assert early.error == approx((1.0 / 3) ** 0.5)
    assert curves.rises("a")  # 3 > 2 √(2/3) = 1.63
    assert not curves.falls("a")
    assert curves.late("a") == late
    assert curves_of(rows[:5]).ends("a") is None


def test_diagnose_explains_what_is_no_fault(tmp_path: Path) -> None:
    series = {"loss": UP, "reward": UP, "kl_ref": [0.0, *UP[1:]], "entropy": FLAT, "uniform_groups": [1.0] + [0.0] * 7}
    found = pt.diagnose(made(tmp_path / "rl", series | {"grad_norm": [0.0] + [0.5] * 7}))
    explained = of(found, "explanation")
    assert "loss 0.1, then 0.9; reward 0.1, then 0.9" in explained["loss"].found
    assert explained["kl_ref"].step == 1
    assert (explained["grad_norm"].step, explained["grad_norm"].num_updates) == (1, 1)
    series = {"loss": [0.6931, *DOWN[1:]], "margin": UP, "chosen_logprob": DOWN, "chosen_reward": FLAT}
    explained = of(pt.diagnose(made(tmp_path / "dpo", series)), "explanation")
    assert "0.6931" in explained["loss"].found
    assert "chosen_logprob" in explained


def test_diagnose_a_surrogate_with_a_loss_of_0_is_explained(tmp_path: Path) -> None:
    folder = trained(tmp_path / "clean", recipe_of("grpo", ppo_epochs=1, num_minibatches=1))
    found = pt.diagnose(folder)
    explained = [one for one in found if one.kind == "explanation" and one.check == "loss"]
    assert any("the ratio is 1 there" in one.decided_by for one in explained)
    assert "clip_fraction" in of(found, "explanation")


def test_diagnose_small_steps_are_a_level(tmp_path: Path) -> None:
    folder = trained(tmp_path / "slow", recipe_of("reinforce", lr=1e-7))
    assert "with a learning rate up to 1e-07" in of(pt.diagnose(folder), "level")["moved"].found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("doctor") / "clean", recipe_of("reinforce"))


def changed(clean: Path, folder: Path, *statements: str) -> Path:
    shutil.copytree(clean, folder)
    db = sqlite3.connect(folder / "rollouts.db", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()
    return folder


def test_diagnose_a_violation_that_the_run_alone_could_see_is_a_fault(clean: Path, tmp_path: Path) -> None:
    folder = changed(clean, tmp_path / "it", "UPDATE updates SET violated = 'gradient' WHERE step >= 2")
    fault = of(pt.diagnose(folder), "fault")["gradient"]
    assert (fault.step, fault.num_updates) == (2, 2)
    assert fault.causes
    folder = changed(clean, tmp_path / "newer", "UPDATE updates SET violated = 'of tomorrow' WHERE step = 1")
    assert of(pt.diagnose(folder), "fault")["of tomorrow"].step == 1


def test_diagnose_changed_records_are_faults(clean: Path, tmp_path: Path) -> None:
    folder = changed(clean, tmp_path / "it", "UPDATE rollouts SET reward = reward + 1 WHERE step = 2")
    found = of(pt.diagnose(folder), "fault")
    assert found["reward"].step == 2
    assert found["reward"].num_updates == 1


DAMAGED = [
    "UPDATE about SET value = '{}' WHERE key = 'balances'",
    "UPDATE about SET value = json_replace(value, '$.sampling.group_size', 0) WHERE key = 'balances'",
    "UPDATE about SET value = json_replace(value, '$.sampling.group_size', 1000000000) WHERE key = 'balances'",
    "UPDATE about SET value = json_replace(value, '$.updates', 0) WHERE key = 'balances'",
    "UPDATE about SET value = json_replace(value, '$.advantage.options.epsilon', 'x') WHERE key = 'balances'",
    "UPDATE updates SET facts = 'nothing'",
    "UPDATE updates SET rows = x'00'",
    "UPDATE rollouts SET token_ids = x'0000'",
    "DELETE FROM rollouts WHERE step = 2 AND rollout_index > 0",
    "DELETE FROM rollouts WHERE step = 2",
    "ALTER TABLE rollouts RENAME COLUMN reward TO something",
    "DROP TABLE updates",
]


@pytest.mark.parametrize("statement", DAMAGED)
def test_doctor_damaged_records_are_one_line_or_a_fault(
    statement: str, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(clean, tmp_path / "it", statement)
    code = main(["doctor", str(folder)])
    out, err = capsys.readouterr()
    assert code in (1, 2), out
    assert "Traceback" not in err
    if code == 2:
        assert str(folder) in err
        assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["recipe.yaml", "status.json", "metrics.jsonl", "rollouts.db"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\n", b"[1]\n", b"[" * 100_000 + b"\n"])
def test_doctor_a_damaged_file_is_named(
    name: str, content: bytes, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(clean, tmp_path / "it"))
    (folder / name).write_bytes(content)
    code = main(["doctor", str(folder)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if content == b"" and name == "metrics.jsonl":
        assert code == 0
        assert "missing: all metrics" in out
    else:
        assert code == 2
        assert name in err


def test_doctor_missing_files_and_columns_are_named(clean: Path, tmp_path: Path) -> None:
    without = Path(shutil.copytree(clean, tmp_path / "without"))
    (without / "rollouts.db").unlink()
    assert "no rollouts.db" in of(pt.diagnose(without), "explanation")["records"].found
    made(tmp_path / "few", {"reward": FLAT, "entropy": FLAT})
    missing = of(pt.diagnose(tmp_path / "few"), "explanation")["metrics"].found
    assert missing == "missing: truncated, uniform_groups, loss, grad_norm"


def test_doctor_a_run_that_has_nothing_or_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "runs" / "empty"
    empty.mkdir(parents=True)
    (empty / "recipe.yaml").write_text(RECIPE)
    assert main(["doctor", str(empty)]) == 2
    assert "no training step is recorded" in capsys.readouterr().err
    (empty / "recipe.yaml").write_text("dictionary: {name: topk}\n")
    assert main(["doctor", str(empty)]) == 2
    assert "sparse autoencoder" in capsys.readouterr().err
    assert main(["doctor", "emty", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "empty" in capsys.readouterr().err
    with pytest.raises(pt_errors(), match="no run"):
        pt.diagnose("emty", runs_dir=tmp_path / "runs")
    with pytest.raises(pt_errors(), match="run: int is not a path"):
        pt.diagnose(3)  # type: ignore[arg-type]


def pt_errors() -> type[Exception]:
    from posttrain.errors import UsageError

    return UsageError


def test_doctor_an_older_a_running_and_an_interrupted_run_are_read(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = copy_old_run(tmp_path)
    assert main(["doctor", str(old)]) == 0
    assert "0.2.0" in capsys.readouterr().out
    folder = Path(shutil.copytree(clean, tmp_path / "it"))
    RunDirectory(folder).write_status(status_of(3, "interrupted"))
    assert "interrupted: 3 of 3 steps" in of(pt.diagnose(folder), "explanation")["run"].found
    RunDirectory(folder).write_status(status_of(3, "running"))
    assert "dead" in of(pt.diagnose(folder), "explanation")["run"].found
    with lock_run(folder):
        assert main(["doctor", str(folder)]) == 0
        assert "still running: 3 of 3 steps" in capsys.readouterr().out


def test_doctor_a_run_that_failed_says_why(clean: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(clean, tmp_path / "it"))
    RunDirectory(folder).write_status(status_of(3, "failed", "the loss is NaN"))
    assert main(["doctor", str(folder)]) == 1
    assert of(pt.diagnose(folder), "fault")["run"].found == "the loss is NaN"


def test_diagnose_a_number_that_is_not_finite_is_a_fault(tmp_path: Path) -> None:
    found = of(pt.diagnose(made(tmp_path / "it", {"loss": [0.1, float("nan"), float("inf")]})), "fault")
    assert (found["loss"].step, found["loss"].num_updates) == (2, 2)
