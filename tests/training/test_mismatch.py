"""A run whose sampler is another model than the trainer's stops before the first update, with the cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from closeness import approx
from posttrain.errors import EngineMismatch
from posttrain.models.forward import forward
from posttrain.sampling.native import schedule
from posttrain.store.metrics import MetricsLog
from refusing import refuses
from small_runs import one_layer_recipe, run


def sharpen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample from logits that are half as large."""
    draw = schedule.draw
    monkeypatch.setattr(schedule, "draw", lambda logits, *rest: draw(logits * 0.5, *rest))


def test_train_with_a_sampler_that_is_another_model_stops_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharpen(monkeypatch)
    with pytest.raises(EngineMismatch) as stopped:
        run(tmp_path, one_layer_recipe("grpo"))
    text = str(stopped.value)
    assert text.startswith("update 1: sampler and trained model differ. The KL from sampler to trainer is ")
    found = re.search(r"the engine \(native\) differs from the model's own forward pass by (.+?) nats per", text)
    assert found is not None
    assert float(found[1]) > 0.05
    trainer = re.search(r"token, and the trainer by (.+?); please report this", text)
    assert trainer is not None
    assert float(trainer[1]) == approx(0.0, abs=1e-4)
    assert "effective sample size" in text
    assert text.endswith("The weights were not changed")


def test_train_with_a_forward_pass_that_is_another_model_names_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = forward.score_logits
    monkeypatch.setattr(forward, "score_logits", lambda logits, *rest, **how: scored(logits * 1.5, *rest, **how))
    with refuses(EngineMismatch, "trainer's forward pass"):
        run(tmp_path, one_layer_recipe("grpo"))


def test_train_with_rows_of_older_weights_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second update of a batch, and dropout, are no fault of the sampler."""
    recipe = one_layer_recipe("grpo", train={"steps": 4, "lr": 0.05, "ppo_epochs": 4, "warmup_steps": 0})
    assert run(tmp_path / "epochs", recipe).step == 4
    rows = MetricsLog(tmp_path / "epochs" / "metrics.jsonl").read()
    assert max(row.metrics.get("kl_sampler", 0.0) for row in rows) > 0.05
    adapter = {"rank": 4, "dropout": 0.9}
    recipe = one_layer_recipe("grpo", model={"adapter": adapter}, train={"steps": 2, "lr": 0.05})
    assert run(tmp_path / "dropout", recipe).step == 2
