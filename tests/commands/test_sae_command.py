"""``posttrain sae train``: a run directory with a dictionary in it, as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="the extra 'interpret' is not installed")

from posttrain.cli import main
from posttrain.interpret.activations.shards import ActivationStore, write_tensors
from posttrain.interpret.dictionaries.exchange import load_dictionary, read_metadata
from posttrain.interpret.dictionaries.recording import recorded_for
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
    assert (metadata["model_name"], metadata["site"], metadata["layer"]) == ("tiny", "resid.2", 2)
    assert metadata["hook_name"] == "blocks.1.hook_resid_post"
    assert len(metadata["models"][0]["weights_hash"]) == 64
    store = ActivationStore.open(recorded_for(run) or "")
    rows = store.gather(torch.arange(store.num_rows - 300, store.num_rows))
    dictionary = load_dictionary(run / "dictionary")
    error = (dictionary(rows) - rows).square().sum() / (rows - rows.mean(0)).square().sum()
    assert float(error) == pytest.approx(results["held_out"]["fvu"], rel=0.05)  # one document more is held out
    weights = (run / "dictionary" / "sae_weights.safetensors").read_bytes()

    assert main(["runs"]) == 0
    assert "batchtopk" in capsys.readouterr().out
    assert main(["runs", "show", "tiny-sae"]) == 0
    capsys.readouterr()
    assert main(["runs", "resume", "tiny-sae", "--quiet"]) == 0
    assert (run / "dictionary" / "sae_weights.safetensors").read_bytes() == weights
    assert main(["sae", "train", "tiny/sae", *SMALL, "--run", "tiny-sae"]) == 2
    assert "Continue it with --resume" in capsys.readouterr().err
    assert main(["sae", "train", "tiny/sae", *SMALL, "--run", "tiny-sae", "--resume", "--dictionary.k", "3"]) == 2
    assert "dictionary.k: 16.0 in the run, 3.0 now" in capsys.readouterr().err


@pytest.mark.parametrize(("source", "sources"), [("difference", 1), ("both", 2), ("post", 1)])
def test_activations_of_two_models(
    source: str, sources: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    dictionary = load_dictionary("runs/mine/dictionary")
    assert (dictionary.sources, dictionary.d, dictionary.features) == (sources, 12, 24)
    metadata = read_metadata("runs/mine/dictionary")
    names = [model["name"] for model in metadata["models"]]
    assert names == (["post"] if source == "post" else ["base", "post"])
    assert metadata["source"] == source
    assert capsys.readouterr().out == f"run:        {Path('runs/mine')}\n"


def test_what_is_said_of_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["--activations.site", "resid.9"], "tiny has 4 layers"),
        (["--activations.site", "block.2"], "'block.2' is no site"),
        (["--train.batch", "100000", "--activations.task.size", "60"], "do not make one batch of 100,000"),
    ):
        assert main(["sae", "train", "tiny/sae", *arguments, "--quiet"]) == 2
        assert message in capsys.readouterr().err
    Path("mine.yaml").write_text("activations: {folder: nowhere}\ndictionary: l1\n")
    assert main(["sae", "train", "mine.yaml", "--quiet"]) == 2
    assert "nowhere: no recorded activations here" in capsys.readouterr().err
    assert main(["train", "tiny/sae"]) == 2
    assert "this trains a dictionary; run it with: posttrain sae train tiny/sae" in capsys.readouterr().err


def test_too_few_rows_are_refused_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--activations.max_rows", "1000"]
    for shown in (few, [*few, "--activations.stream_rows", "400"]):
        assert main(["sae", "train", "tiny/sae", *shown]) == 2
        told = capsys.readouterr()
        assert re.search(
            r"at most (9\d\d|1,000) rows of activations, of which 16,384 are held out .* batch of 2,048", told.err
        )
        assert "recording" not in told.out + told.err
        assert not list(Path().glob("runs/activations/*/*.safetensors"))
        assert not Path("runs/tiny-sae").exists()


def test_a_transcoder_from_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sae", "train", "tiny/transcoder", *SMALL, "--dictionary.k", "4"]) == 0
    assert "in place:   CE 2." in capsys.readouterr().out
    run = Path("runs/tiny-transcoder")
    results = json.loads((run / "dictionary.json").read_text())
    metadata = read_metadata(run / "dictionary")
    assert [metadata[key] for key in ("site", "target")] == ["mlp_in.2", "mlp.2"]
    assert metadata["hook_name_out"] == "blocks.1.hook_mlp_out"
    store = ActivationStore.open(recorded_for(run) or "")
    chosen = torch.arange(store.num_rows - 300, store.num_rows)
    written, dictionary = store.gather(chosen, "mlp.2"), load_dictionary(run / "dictionary")
    error = (dictionary(store.gather(chosen, "mlp_in.2")) - written).square().sum()
    fvu = float(error / (written - written.mean(0)).square().sum())
    assert fvu == pytest.approx(results["held_out"]["fvu"], rel=0.05)
    assert fvu < 1
    assert results["recovered"]["ce"] < results["recovered"]["ce_spliced"] < results["recovered"]["ce_zero"]
    assert main(["sae", "features", "tiny-transcoder", "--features", "1,2", "--quiet"]) == 0
    assert main(["generate", "tiny", "Eva has", "--sae", "tiny-transcoder", "--steer", "1=2", "--max-tokens", "2"]) == 0
    assert "mlp.2: 1 +2" in "".join(capsys.readouterr())


def test_a_dry_run_prints_what_would_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sae", "train", "sae-qwen3-14b-layer20", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "coefficient: 0.0003" in shown
    assert "site: resid.20" in shown


def test_several_layers_are_recorded_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [*SMALL, "--activations.outliers", "0"]
    small[small.index("--eval.documents") + 1] = "0"
    several = ["sae", "train", "tiny/sae", *small, "--run", "both", "--activations.site", "resid.1,resid.3"]
    assert main(several) == 0
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("activations recorded before") == 1
    assert len(list(Path("runs/activations").glob("resid*"))) == 1
    places = {recorded_for(Path("runs") / f"both-{site}") for site in ("resid.1", "resid.3")}
    assert [ActivationStore.open(place or "").sites for place in places] == [("resid.1", "resid.3")]
    assert read_metadata("runs/both-resid.3/dictionary")["hook_name"] == "blocks.2.hook_resid_post"
    assert main(["sae", "train", "tiny/sae", *small, "--run", "one", "--activations.site", "resid.3", "--quiet"]) == 0
    weights = [Path("runs") / name / "dictionary" / "sae_weights.safetensors" for name in ("one", "both-resid.3")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not torch.equal(
        load_dictionary("runs/both-resid.1/dictionary").W_dec, load_dictionary("runs/one/dictionary").W_dec
    )

    capsys.readouterr()
    assert main(several) == 2
    assert "Continue it with --resume" in capsys.readouterr().err
    (Path("runs") / "both-resid.3").rename("elsewhere")
    assert main([*several, "--resume", "--quiet"]) == 0
    assert weights[1].read_bytes() == weights[0].read_bytes()
    assert main(["runs", "resume", "both-resid.1", "--quiet"]) == 0
