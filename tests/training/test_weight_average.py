"""The average of the weights: its formula, its own evaluation, its export, and exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from closeness import approx, assert_close
from posttrain.cli import main
from posttrain.errors import CheckpointError, UsageError
from posttrain.recipes.recipe import validate_recipe
from posttrain.runs.export import export_run
from posttrain.runs.launch import RunStart, launch
from posttrain.store.metrics import MetricsLog, evaluation_points
from posttrain.training.checkpoint import load_checkpoint
from refusing import refuses
from small_runs import BASE, make_recipe, run, same_bits, saved_tensors, shallow

DECAY = 0.6
EVALUATED = {"every": 2, "num_examples": 4, "max_tokens": 6}


def sft(**changes: Any) -> Any:
    train = {"ema_decay": DECAY, "save_every": 1, "keep_checkpoints": 9, "steps": 4, "lr": 1e-3}
    return make_recipe("sft", model={"name": shallow(1)}, train=train | changes.pop("train", {}), **changes)


def test_average_is_worked_from_the_weights_after_each_update(tmp_path: Path) -> None:
    run(tmp_path, sft())
    start = dict(AutoModelForCausalLM.from_pretrained(shallow(1)).named_parameters())
    weights = [start, *(load_file(tmp_path / f"checkpoints/step-{k:06d}/model.safetensors") for k in range(1, 5))]
    averaged = load_file(tmp_path / "checkpoints/step-000004/averages.safetensors")
    assert len(averaged) > 5
    for name, found in averaged.items():
        own = name.removeprefix("ema.")
        expected = weights[0][own].detach().double()
        for of_step in weights[1:]:
            expected = DECAY * expected + (1 - DECAY) * of_step[own].double()
        assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(averaged["ema.model.norm.weight"], weights[4]["model.norm.weight"])


def test_training_is_that_without_an_average(tmp_path: Path) -> None:
    run(tmp_path / "with", sft(eval=EVALUATED))
    run(tmp_path / "without", sft(eval=EVALUATED, train={"ema_decay": None}))
    left = {name: x for name, x in saved_tensors(tmp_path / "with", 4).items() if not name.startswith("averages")}
    assert same_bits(left, saved_tensors(tmp_path / "without", 4))


def test_average_is_evaluated_next_to_the_weights(tmp_path: Path) -> None:
    """Its loss on held-out demonstrations is that of a plain model with the averaged weights."""
    recipe = sft(eval=EVALUATED | {"loss": True})
    run(tmp_path, recipe)
    points = {(p.step, p.name): p.results for p in evaluation_points(MetricsLog(tmp_path / "metrics.jsonl").read())}
    assert {step for step, name in points if name.startswith("ema/")} == {2, 4}
    (name,) = {name for _, name in points if not name.startswith("ema/")}
    assert points[4, name]["loss"] != points[4, f"ema/{name}"]["loss"]
    exported = tmp_path / "averaged"
    checkpoint = tmp_path / "checkpoints/step-000004"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    named = dict(model.named_parameters())
    for key, value in load_file(checkpoint / "averages.safetensors").items():
        named[key.removeprefix("ema.")].data.copy_(value)
    model.save_pretrained(exported)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(exported)
    alone = sft(eval=EVALUATED | {"loss": True, "every": 1}, train={"ema_decay": None, "steps": 1})
    alone.model.name = str(exported)
    run(tmp_path / "again", alone)
    again = evaluation_points(MetricsLog(tmp_path / "again/metrics.jsonl").read())
    (first,) = [p.results for p in again if p.step == 0]
    assert first["loss"] == approx(points[4, f"ema/{name}"]["loss"], rel=1e-6)


@pytest.mark.parametrize("adapter", [None, {"rank": 4}])
def test_average_resumes_to_the_bit(adapter: Any, tmp_path: Path) -> None:
    recipe = make_recipe(
        "grpo", model={"name": shallow(1), "adapter": adapter}, rewards=["small_runs:vowel_share"],
        train={"ema_decay": DECAY, "steps": 3, "lr": 1e-2}, eval=EVALUATED,
    )  # fmt: skip
    run(tmp_path / "whole", recipe)
    run(tmp_path / "cut", recipe, stop_after=2)
    run(tmp_path / "cut", recipe, resume=True)
    ours = saved_tensors(tmp_path / "whole", 3)
    assert any(name.startswith("averages.safetensors:ema.") for name in ours)
    assert same_bits(ours, saved_tensors(tmp_path / "cut", 3))
    read = [MetricsLog(tmp_path / which / "metrics.jsonl").read() for which in ("whole", "cut")]
    assert [row.metrics for row in read[0]] == [row.metrics for row in read[1]]


def launched(root: Path, **train: Any) -> Path:
    data = BASE["sft"] | {"model": {"name": shallow(1)}, "train": {"steps": 2, "lr": 1e-3} | train}
    return launch(validate_recipe(data), RunStart(root=root, name="it")).folder


def test_export_of_the_average(tmp_path: Path) -> None:
    folder = launched(tmp_path / "runs", ema_decay=DECAY)
    done = export_run(tmp_path / "runs", folder, tmp_path / "out", weights="ema")
    assert done.step == 2
    averaged = load_file(folder / "checkpoints/step-000002/averages.safetensors")
    named = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert {f"ema.{name}" for name in named} == set(averaged)
    assert all(torch.equal(named[name.removeprefix("ema.")].detach(), value) for name, value in averaged.items())
    assert not (tmp_path / "out" / "averages.safetensors").exists()
    plain = export_run(tmp_path / "runs", folder, tmp_path / "plain")
    assert not (plain.target / "averages.safetensors").exists()


def test_export_of_an_averaged_adapter_is_merged_if_asked(tmp_path: Path) -> None:
    """W + (alpha / rank) B A, with the averaged A and B, in every adapted matrix."""
    adapter = {"rank": 2, "alpha": 6, "targets": ["q_proj"]}
    data = BASE["sft"] | {"model": {"name": shallow(1), "adapter": adapter}}
    data["train"] = {"steps": 2, "lr": 1e-2, "ema_decay": DECAY}
    folder = launch(validate_recipe(data), RunStart(root=tmp_path / "runs", name="it")).folder
    done = export_run(tmp_path / "runs", folder, tmp_path / "out", weights="ema", merge=True)
    assert sorted(path.name for path in done.target.iterdir() if path.is_dir()) == []
    assert not any("adapter" in path.name for path in done.target.iterdir())
    averaged = load_file(folder / "checkpoints/step-000002/averages.safetensors")
    base = dict(AutoModelForCausalLM.from_pretrained(shallow(1)).named_parameters())
    merged = dict(AutoModelForCausalLM.from_pretrained(done.target).named_parameters())
    (down,) = (value for name, value in averaged.items() if "lora_A" in name)
    (up,) = (value for name, value in averaged.items() if "lora_B" in name)
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = base[name].detach().double() + 3.0 * (up.double() @ down.double())
    assert_close(merged[name].detach().double(), expected, rtol=1e-6, atol=1e-6)
    assert float((expected - base[name].detach().double()).abs().max()) > 1e-4
    plain = export_run(tmp_path / "runs", folder, tmp_path / "plain", merge=True)
    last = dict(AutoModelForCausalLM.from_pretrained(plain.target).named_parameters())
    assert not torch.equal(last[name], merged[name]), "the average is not the last checkpoint"


def test_merge_of_weights_that_are_not_exported_or_have_no_adapter_is_refused(tmp_path: Path) -> None:
    folder = launched(tmp_path / "runs", ema_decay=DECAY)
    for weights in ("ema", "none", "last"):
        with refuses(UsageError, "--merge"):
            export_run(tmp_path / "runs", folder, tmp_path / "out", weights=weights, merge=True)
    assert not (tmp_path / "out").exists()


def test_export_of_an_average_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = launched(tmp_path / "runs")
    with refuses(UsageError, "--weights ema", "train.ema_decay"):
        export_run(tmp_path / "runs", folder, tmp_path / "out", weights="ema")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_its_average_is_refused(tmp_path: Path) -> None:
    run(tmp_path, sft(train={"ema_decay": None}), stop_after=2)
    checkpoint = load_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.averages == {}
    with refuses(CheckpointError, "averages.safetensors"):
        run(tmp_path, sft(), resume=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--train.ema_decay", "1"], "train.ema_decay"),
        (["--train.ema_decay", "0"], "train.ema_decay"),
        (["--train.ema_decay", "0.9", "--scale.sharding", "fsdp2"], "train.ema_decay"),
        (["--train.router_aux_loss_coef", "-1"], "train.router_aux_loss_coef"),
        (["--train.router_aux_loss_coef", "0.1", "--scale.sharding", "fsdp2"], "train.router_aux_loss_coef"),
    ],
)
def test_values_that_mean_nothing_are_refused(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "tiny/sft", *options, "--runs-dir", str(tmp_path), "--quiet"]) == 2
    text = capsys.readouterr().err
    assert named in text
    assert "Traceback" not in text
