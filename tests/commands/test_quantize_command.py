"""``posttrain quantize`` from the command line: what it writes, what it says, what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from closeness import approx
from posttrain.cli import main
from posttrain.errors import install_command
from posttrain.models.load import load_model, quantized_bits
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection
from posttrain.runs.models import find_source

pytestmark = pytest.mark.usefixtures("no_curves", "quick_stories")

pytest.importorskip("bitsandbytes", reason="the extra 'quantize' is not installed")

SMALL = ["--task.size", "64", "--task.max_steps", "1"]
LEARNING = ["--train.lr", "0.05", "--train.warmup_steps", "0", "--train.schedule", "constant", *SMALL]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(recipe: str, name: str, *keys: str) -> Path:
    """A short run in ``runs``; its checkpoint."""
    assert main(["train", recipe, "--run", name, "--quiet", "--train.steps", "2", "--eval.every", "0", *keys]) == 0
    return Path("runs") / name / "checkpoints" / "step-000002"


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 1e-5, 5e-3), (4, 5e-3, 0.3)])
def test_the_embedded_model(capsys: Any, bits: int, least: float, most: float) -> None:
    arguments = ["quantize", "tiny", "--bits", str(bits), "--limit", "12", "--max-tokens", "8", *SMALL]
    assert main(arguments) == 0
    folder = Path("quantized") / f"tiny-int{bits}"
    report = json.loads((folder / "quantization.json").read_text())
    assert quantized_bits(load_model(ModelSection(name=str(folder), device="cpu"), seed=0).model) == bits
    assert report["disk_bytes_before"] == (TINY / "model.safetensors").stat().st_size
    assert report["disk_bytes_after"] == (folder / "model.safetensors").stat().st_size
    assert report["num_parameters"] == 886_144
    assert report["memory_bytes_before"] == 4 * 886_144
    assert report["memory_bytes_after"] < (0.36 if bits == 8 else 0.25) * report["memory_bytes_before"]
    results = report["results"]
    assert least < results["kl_per_token"] < most
    assert results["kl_low"] <= results["kl"] <= results["kl_high"]
    assert results["num_answers"] == 12
    shown = capsys.readouterr().out
    assert f"{report['disk_bytes_after'] / 1e6:.2f} MB" in shown
    assert f"{results['kl']:.4g} (95 % interval" in shown
    assert main(["generate", str(folder), "What is 1 plus 1?", "--max-tokens", "3"]) == 0
    # once more, over what is there
    assert main([*arguments, "--quiet"]) == 0
    assert json.loads((folder / "quantization.json").read_text()) == report
    assert capsys.readouterr().out.count("MB") == 0
    assert sorted(p.name for p in Path("quantized").iterdir()) == [folder.name]


def test_a_run_with_an_adapter_is_quantized_with_the_adapter_in_it(capsys: Any) -> None:
    checkpoint = train("tiny/sft", "lora", "--model.adapter.rank", "2", *LEARNING)
    assert main(["quantize", "lora", "--bits", "8", "--limit", "4", "--max-tokens", "4", "--quiet"]) == 0
    folder = checkpoint / "quantized_int8"
    report = json.loads((folder / "quantization.json").read_text())
    assert report["task"]["name"] == "stories"
    adapter = (checkpoint / "adapter_model.safetensors").stat().st_size
    assert report["disk_bytes_before"] == adapter + (TINY / "model.safetensors").stat().st_size
    ids = torch.arange(5, 30)[None]
    trained, found, base = (
        load_model(ModelSection(name=str(name), device="cpu"), seed=0).model for name in (checkpoint, folder, TINY)
    )
    with torch.no_grad():
        trained, found, base = (m(input_ids=ids).logits.log_softmax(-1) for m in (trained, found, base))
    divergence, from_base = ((a.exp() * (a - found)).sum(-1).mean() for a in (trained, base))
    assert 0 < float(divergence) < 0.02 < float(from_base)
    assert report["results"]["kl_per_token"] < 0.02
    # asked for by its folder, it is asked in its run's template
    assert find_source(str(folder), "runs").recipe is not None
    assert find_source(str(folder), "runs").label == "lora@step-000002/quantized_int8"
    # a checkpoint with a quantized copy in it is still one: the run goes on, and the copy goes with it
    assert main(["train", "tiny/sft", "--run", "lora", "--resume", "--quiet", "--train.steps", "3", "--eval.every", "0",
                 "--model.adapter.rank", "2", *LEARNING]) == 0  # fmt: skip


def test_a_reward_model(capsys: Any) -> None:
    checkpoint = train("tiny/rm", "rm", "--data.batch_size", "4", "--task.size", "64")
    (checkpoint.parent / "best").symlink_to(checkpoint.name)
    assert main(["quantize", str(checkpoint.parent / "best"), "--bits", "4", "--limit", "20"]) == 0
    folder = checkpoint / "quantized_int4"
    results = json.loads((folder / "quantization.json").read_text())["results"]
    assert results["num_items"] == 20
    assert results["change"] == approx(results["accuracy_after"] - results["accuracy_before"])
    assert "accuracy before: " in capsys.readouterr().out
    # evaluated as any reward model, it is the one that was measured
    assert main(["evaluate", str(folder), "--limit", "20", "--out", "found", "--quiet"]) == 0
    (found,) = (json.loads(path.read_text()) for path in Path("found").rglob("results.json"))
    assert found["results"]["pair_accuracy"] == approx(results["accuracy_after"])
    # the head, and the layout that other programs load
    assert (folder / "heads.safetensors").read_bytes() == (checkpoint / "heads.safetensors").read_bytes()
    (head,) = load_file(folder / "heads.safetensors").values()
    other = AutoModelForSequenceClassification.from_pretrained(folder, device_map={"": "cpu"})
    assert torch.equal(other.score.weight, head)
    assert {type(m).__name__ for m in other.modules()} >= {"Linear4bit"}


def test_what_is_refused(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    assert main(["quantize", "tiny", "--bits", "8", "--limit", "0", "--out", "full"]) == 2
    assert "full contains something" in capsys.readouterr().err
    assert (tmp_path / "full" / "thesis.txt").read_text() == "all of it"
    assert main(["quantize", "tiny", "--bits", "8", "--limit", "0", "--dtype", "bfloat16"]) == 0
    assert "was not measured" in capsys.readouterr().out
    stored = load_file(Path("quantized/tiny-int8/model.safetensors"))
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert main(["quantize", "quantized/tiny-int8", "--bits", "8", "--limit", "0"]) == 2
    assert "quantized to 8" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "posttrain.models.quantize")
    assert main(["quantize", "tiny", "--bits", "4"]) == 2
    assert install_command("quantize") in capsys.readouterr().err


def test_quantize_that_does_not_save_the_quantized_model_is_refused(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.evaluation import quantization

    save = quantization._save

    def change(quantized: Any, *rest: Any) -> None:
        save(quantized, *rest)
        with torch.no_grad():
            quantized.model.model.norm.weight.mul_(1.1)

    monkeypatch.setattr(quantization, "_save", change)
    assert main(["quantize", "tiny", "--bits", "8", "--limit", "0"]) == 1
    assert "log-probabilities differ from" in capsys.readouterr().err
    assert not Path("quantized/tiny-int8").exists()
