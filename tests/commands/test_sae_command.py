"""``posttrain sae train``: a run directory with a dictionary in it, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from closeness import approx
from posttrain.cli import main
from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.saes.sae import load_sae, read_metadata
from posttrain.store.metrics import MetricsLog

SMALL = [
    "--activations.task.size", "60", "--train.steps", "30", "--train.batch", "64", "--dictionary.expansion", "1",
    "--eval.rows", "300", "--eval.every", "15", "--eval.documents", "2", "--train.save_every", "10", "--track", "[]",
]  # fmt: skip


def test_from_a_recipe_to_a_dictionary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sae", "train", "tiny/sae", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "30 steps" in shown
    assert "held out:   FVU 0." in shown
    assert "in place:   CE 2." in shown
    run = Path("runs/tiny-sae")
    results = json.loads((run / "dictionary.json").read_text())
    assert f"FVU {results['held_out']['fvu']:.4f}" in shown
    last = MetricsLog(run / "metrics.jsonl").read()[-1]
    assert last.metrics["eval/held_out/fvu"] == results["held_out"]["fvu"]
    assert results["recovered"]["ce"] < results["recovered"]["ce_spliced"] < results["recovered"]["ce_zero"]
    metadata = read_metadata(run / "dictionary")
    assert (metadata.model_name, metadata.site) == ("tiny", "resid.2")
    assert metadata.hook_name == "blocks.1.hook_resid_post"
    assert metadata.models is not None
    assert len(metadata.models[0]["weights_hash"]) == 64
    store = ActivationStore(run / "activations")
    rows = store.gather(torch.arange(store.num_rows - 300, store.num_rows))
    dictionary = load_sae(run / "dictionary")
    error = (dictionary(rows) - rows).square().sum() / (rows - rows.mean(0)).square().sum()
    assert float(error) == approx(results["held_out"]["fvu"], rel=0.05)  # one document more is held out
    weights = (run / "dictionary" / "sae_weights.safetensors").read_bytes()

    assert main(["runs"]) == 0
    assert "batchtopk" in capsys.readouterr().out
    assert main(["runs", "show", "tiny-sae"]) == 0
    capsys.readouterr()
    assert main(["runs", "resume", "tiny-sae", "--quiet"]) == 0
    assert (run / "dictionary" / "sae_weights.safetensors").read_bytes() == weights
    assert main(["sae", "train", "tiny/sae", *SMALL, "--run", "tiny-sae"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["sae", "train", "tiny/sae", *SMALL, "--run", "tiny-sae", "--resume", "--dictionary.k", "3"]) == 2
    assert "dictionary.k" in capsys.readouterr().err

    # another run learns the same from what this one has recorded
    folder = ["--activations.folder", f"{run}/activations", "--activations.model", "null"]
    folder += ["--activations.task", "null", "--run", "two", "--quiet"]
    assert main(["sae", "train", "tiny/sae", *SMALL[2:], *folder]) == 0
    assert Path("runs/two/dictionary/sae_weights.safetensors").read_bytes() == weights
    assert not Path("runs/two/activations").exists()
    assert main(["sae", "features", "two", "--features", "1", "--quiet"]) == 0


def test_training_that_is_stopped_while_it_measures_is_not_finished_and_measures_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "it"

    def stop(*about: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.interpret.saes.sae_training._recovered", stop)
        assert main(["sae", "train", "tiny/sae", *SMALL, "--run", "it"]) != 0
    shown = capsys.readouterr()
    assert "finished after step" not in shown.out + shown.err
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
    assert not (run / "dictionary.json").exists()
    assert main(["runs", "resume", "it"]) == 0
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert "recovered" in json.loads((run / "dictionary.json").read_text())
    assert "finished after step" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["difference", "post"])
def test_activations_of_two_models(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    base = torch.randn(1200, 12)
    write_tensors("pair", {"resid.3": [base, base * 1.5 + 1]}, about="made up")
    Path("mine.yaml").write_text(
        f"activations: {{folder: pair, source: {source}}}\n"
        "dictionary: {name: topk, k: 3, expansion: 2}\n"
        "train: {steps: 20, batch: 64, precision: fp32}\n"
        "eval: {rows: 200, documents: 0}\n"
    )
    assert main(["sae", "train", "mine.yaml", "--quiet"]) == 0
    dictionary = load_sae("runs/mine/dictionary")
    assert (dictionary.d, dictionary.features) == (12, 24)
    metadata = read_metadata("runs/mine/dictionary")
    names = [model["name"] for model in metadata.models or []]
    assert names == (["post"] if source == "post" else ["base", "post"])
    assert metadata.source == source
    assert capsys.readouterr().out == f"run:        {Path('runs/mine')}\n"


def test_what_is_reported_of_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["--activations.site", "resid.9"], "tiny has 4"),
        (["--activations.site", "block.2"], "'block.2'"),
        (["--train.batch", "100000", "--activations.task.size", "60"], "batch of 100,000"),
    ):
        assert main(["sae", "train", "tiny/sae", *arguments, "--quiet"]) == 2
        assert message in capsys.readouterr().err
    Path("mine.yaml").write_text("activations: {folder: nowhere}\ndictionary: l1\n")
    assert main(["sae", "train", "mine.yaml", "--quiet"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["train", "tiny/sae"]) == 2
    assert "trains a dictionary" in capsys.readouterr().err
