"""``posttrain sae diff`` end to end with little of everything: files, findings, refusals, runs found again."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closeness import approx
from posttrain.cli import main
from posttrain.commands.demo import AFTER_SFT, STORIES, plan_demo
from posttrain.commands.interpret.sae import find_model, find_pair
from posttrain.interpret.differences.changes_recipe import Compared, load_diff_recipe
from posttrain.recipes.recipe import load_recipe
from posttrain.reports.differences import findings, render_diff
from posttrain.runs.directory import RunDirectory, new_status
from posttrain.runs.launch import find_runs

LITTLE = {
    "prompts": "12",
    "samples": "1",
    "max_tokens": "16",
    "seeds": "2",
    "dictionary.features": "64",
    "dictionary.k": "6",
    "train.steps": "6",
    "train.batch": "256",
    "kl_documents": "6",
    "show": "3",
    "min_documents": "3",
    "patching.documents": "2",
    "patching.counts": "[1, 8]",
    "causal.measure": "accuracy",
    "causal.prompts": "2",
    "causal.counts": "[2]",
    "causal.features": "2",
    "causal.steering_factors": "[0.5, 1.0]",
    "causal.factors": "[2.0]",
    "causal.draws": "1",
}


def options(**changed: str) -> list[str]:
    given = LITTLE | changed
    return [word for key, value in given.items() for word in (f"--changes.{key}", value)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def other(root: Path) -> Path:
    """The embedded model with its first block disturbed."""
    import torch

    from posttrain.models.load import load_model
    from posttrain.recipes.sections import ModelSection

    loaded = load_model(ModelSection(name="tiny", device="cpu"), seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        weight = loaded.model.model.layers[0].mlp.down_proj.weight
        weight += 0.1 * torch.randn_like(weight)
    folder = root.parent / "other"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def compared(root: Path, other: Path) -> dict[str, Any]:
    words = ["sae", "diff", "tiny", str(other), "--task", "stories", "--runs-dir", str(root), "--run", "one", "--quiet"]
    assert main([*words, *options()]) == 0
    return dict(json.loads((root / "one" / "diff.json").read_text()))


def test_everything_is_there(compared: dict[str, Any], root: Path) -> None:
    assert compared["activations"]["site"] == "resid.2"  # the middle of four layers
    assert compared["documents"]["documents"] == 12
    assert [d["features"] for d in compared["dictionaries"]] == [64, 64]
    assert len(compared["features"]) <= 3
    assert {"frozen", "lens", "divergence", "patching", "causal"} <= set(compared)
    assert len(compared["patching"]["changed"]) == 2
    assert [len(row) for row in compared["patching"]["random"]] == [2, 2]
    factors = {"given": ("0.5", "1"), "returned": ("1",), "scaled": ("0", "2")}
    points = {f"{test} 2 at {factor}" for test, several in factors.items() for factor in several}
    assert set(compared["causal"]["verdicts"]) == points | {"given, slope", "scaled, slope"}
    assert [len(rows) for rows in (compared["causal"][test] for test in factors)] == [2, 2, 2]
    assert not [p for p in (root / "one").iterdir() if p.name == "recipe.yaml"]  # it is no run of a training


def test_only_the_first_block_differs_so_its_output_recovers_everything(compared: dict[str, Any]) -> None:
    """The residual stream after layer 2 holds all that the models differ in."""
    assert compared["divergence"]["per_token"] > 0.05
    assert compared["patching"]["everything"] == approx(1.0, abs=1e-3)
    assert compared["patching"]["mean_vector"] < 1.0


def test_the_page_states_what_was_found_and_needs_nothing_from_outside(compared: dict[str, Any], root: Path) -> None:
    page = (root / "one" / "report.html").read_text()
    assert page == render_diff(compared)  # the page follows from diff.json alone
    assert re.search(r'<span class="tok[^>]*>·\w', page)  # a space in front of a token is to be seen
    assert not re.search(r'<span class="tok[^>]*> ', page)
    assert "What did training change?" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    lines = findings(compared)
    assert any("separates" in line or "does NOT separate" in line for line in lines)
    assert page.count("<svg") >= 5


def poisoned(value: Any) -> Any:
    """Return the value with hostile text after every text."""
    if isinstance(value, str):
        return value + "</title></p><script>alert(1)</script>\x1b[2J\u202e"
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return {key: poisoned(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_what_a_stranger_wrote_into_the_numbers_is_text_on_the_page(compared: dict[str, Any]) -> None:
    page = render_diff(poisoned(compared))
    assert "<script" not in page
    assert page.count("</title>") == 1 + page.count("<g><title>")  # the page's own, and one for each point of a chart
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J\\u202e") > 100


def test_the_same_command_keeps_what_is_there_and_another_recipe_is_refused(
    compared: dict[str, Any], root: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = root / "one" / "dictionaries" / "seed-0" / "sae_weights.safetensors"
    before = weights.stat().st_mtime_ns
    words = ["sae", "diff", "tiny", str(other), "--task", "stories", "--runs-dir", str(root), "--run", "one", "--quiet"]
    assert main([*words, *options()]) == 0
    again = json.loads((root / "one" / "diff.json").read_text())
    assert weights.stat().st_mtime_ns == before
    assert again | {"seconds": 0} == compared | {"seconds": 0}
    assert main([*words, *options(prompts="25")]) == 2
    assert "changes.prompts" in capsys.readouterr().err


def test_the_features_of_its_dictionaries_are_read_as_those_of_others(compared: dict[str, Any], root: Path) -> None:
    run, page = root / "one", root / "features.html"
    places = [place.parent for place in run.rglob("index.json") if (place.parent / "documents.safetensors").is_file()]
    words = ["sae", "features", str(run / "dictionaries" / "seed-0"), "--activations", str(places[0]), "--no-lens"]
    assert main([*words, "--contexts", "1", "--source", "base", "--out", str(page), "--quiet"]) == 0
    assert json.loads(page.with_suffix(".json").read_text())["about"]["model"] != ""


def test_a_model_next_to_itself_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sae", "diff", "tiny", "tiny", "--runs-dir", str(root), "--run", "same"]
    kept = {key: value for key, value in LITTLE.items() if key.split(".")[0] not in ("causal",)}
    given = [word for key, value in kept.items() for word in (f"--changes.{key}", value)]
    assert main([*words, *given, "--changes.causal", "null"]) == 0
    found = json.loads((root / "same" / "diff.json").read_text())
    assert [d["counts"]["changed"] for d in found["dictionaries"]] == [0, 0]
    assert [d["counts"]["significant"] for d in found["dictionaries"]] == [0, 0]
    assert found["divergence"]["per_token"] == approx(0.0, abs=1e-9)
    assert "feature is flagged" in capsys.readouterr().out


def test_mistakes_are_answered(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["tiny", "tiny", "tiny"], "BASE and POST"),
        (["tiny/sft"], "not a comparison recipe"),
        (["tiny", "tiny", "--layer", "9"], "tiny has 4"),
        (["tiny", "tiny", "--site", "mlp"], "`posttrain sae diff --site`"),
        (["tiny", "tiny", "--changes.prompts", "60000"], "has only 50000 examples"),
    ):
        assert main(["sae", "diff", *words, "--runs-dir", str(root), "--quiet"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_curves")
def test_a_recipe_is_trained_once_and_found_again(tmp_path: Path) -> None:
    recipe = load_recipe("tiny/sft", [("train.steps", "2"), ("task.size", "64"), ("eval.every", "0")])
    path = tmp_path / "little.yaml"
    path.write_text(recipe.to_yaml())
    message: list[str] = []
    runs = tmp_path / "runs"
    first = find_model(Compared(recipe=str(path)), runs, None, True, message.append)
    assert first == str(runs / "little")
    assert find_model(Compared(recipe=str(path)), runs, None, True, message.append) == first
    assert [line.partition(": ")[2].partition(",")[0] for line in message] == [
        "no finished run; training one",
        "found a finished run",
    ]
    # from the base: another start is another recipe
    assert find_runs(load_recipe(str(path), [("model.name", json.dumps(first))]).resolve(), runs) == (None, None)
    status = RunDirectory(first).read_status()
    assert status is not None
    RunDirectory(first).write_status(type(status)(**{**_plain(status), "state": "interrupted"}))
    (runs / "damaged").mkdir()
    (runs / "damaged" / "recipe.yaml").write_text("- : [")
    assert find_runs(recipe.resolve(), runs) == (None, Path(first))


def _plain(status: Any) -> dict[str, Any]:
    return {name: getattr(status, name) for name in status.__slots__}


def test_what_did_rl_change_after_the_demo_takes_the_runs_of_the_demo(tmp_path: Path) -> None:
    """A later run of the same SFT recipe, from which no run of GRPO began, is not taken in place of the demo's."""
    plan = plan_demo(tmp_path, 0, STORIES["reasoning"])
    later = tmp_path / "tiny-sft"
    sft_recipe = plan.recipes[AFTER_SFT]
    for folder, of in ((plan.folders[AFTER_SFT], sft_recipe), (plan.grpo, plan.grpo_recipe), (later, sft_recipe)):
        folder.mkdir()
        run = RunDirectory(folder)
        run.recipe_path.write_text(of.to_yaml(), encoding="utf-8")
        run.write_status(replace(new_status(1, None), state="finished"))
    os.utime(later / "recipe.yaml", (2e9, 2e9))
    recipe = load_diff_recipe(["tiny/what-did-rl-change"]).resolve()
    assert recipe.post.recipe is not None
    assert find_runs(sft_recipe, tmp_path)[0] == later
    base = find_pair(recipe, tmp_path)
    assert base == str(plan.folders[AFTER_SFT])
    message: list[str] = []
    assert find_model(recipe.post, tmp_path, base, True, message.append) == str(plan.grpo)
    assert "found a finished run" in message[0]
    (plan.grpo / "status.json").unlink()
    assert find_pair(recipe, tmp_path) is None
