"""An engine that follows the policy: versions, a copy that is filled, and the comparison that ends every sync."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from models.small_models import random_model
from posttrain.engines.base import Sampling
from posttrain.engines.native.copied import TOLERANCE, CopiedEngine
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.native.lean import LeanDecoder
from posttrain.engines.weights import checkpoint_weights
from posttrain.errors import EngineMismatch
from posttrain.models.load import LoadedModel
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection
from small_runs import make_recipe, recorded, run, same_bits, saved_tensors, untimed

SAMPLING = Sampling(max_tokens=6)


def update(model: Any, seed: int = 0) -> None:
    """What an optimizer step does: every trained weight moves a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1e-4 * torch.randn(parameter.shape, generator=generator)


def test_a_completion_carries_the_version_of_its_weights(tiny: LoadedModel) -> None:
    for engine in (NativeEngine(tiny.model), CopiedEngine(tiny.model)):
        for version in (0, 7):
            engine.sync(version)
            (group,) = engine.generate([[9, 10]], [[1, 2]], SAMPLING)
            assert [completion.version for completion in group] == [version, version]


def test_the_copy_follows_only_when_it_is_told(tiny: LoadedModel) -> None:
    own, copied = NativeEngine(tiny.model), CopiedEngine(tiny.model)
    ask = ([[9, 10, 11]], [[1, 2, 3, 4]], Sampling(max_tokens=12))
    copied.sync(0)
    first = own.generate(*ask)
    assert copied.generate(*ask) == first
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            parameter.mul_(1.05)
    assert [c.logprobs for c in copied.generate(*ask)[0]] == [c.logprobs for c in first[0]]
    own.sync(1)
    copied.sync(1)
    assert copied.generate(*ask) == own.generate(*ask) != first


def test_clean_syncs_raise_no_alarm(tiny: LoadedModel) -> None:
    engine, worst = CopiedEngine(tiny.model), 0.0
    for version in range(20):
        engine.sync(version)
        worst = max(worst, engine.score())
        update(tiny.model, version)
    assert worst < TOLERANCE / 4
    assert engine.score() > TOLERANCE, "an update that the copy has not seen would not be noticed"


class OneTensorScaled(CopiedEngine):
    def fill(self) -> None:
        super().fill()
        with torch.no_grad():
            self.model.model.layers[2].mlp.up_proj.weight.mul_(1.01)


class OneLayerLeftOld(CopiedEngine):
    def fill(self) -> None:
        old = copy.deepcopy(self.model.model.layers[1].state_dict())
        super().fill()
        self.model.model.layers[1].load_state_dict(old)


class TiedHeadLeftOld(CopiedEngine):
    """The copy's head is untied from its embedding, as in an engine that packs it: the sync reaches one of them."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone(), requires_grad=False)

    def fill(self) -> None:
        old = self.model.lm_head.weight.detach().clone()
        super().fill()
        with torch.no_grad():
            self.model.lm_head.weight.copy_(old)


class PrefixesKept(CopiedEngine):
    """Keys and values of a prompt that was computed once are not computed again."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.kept: dict[Any, Any] = {}

    def _bind(self, reach: int) -> Any:
        decoder: Any = super()._bind(reach)
        assert isinstance(decoder, LeanDecoder)
        compute = decoder.prefill

        def prefill(prompts: Any) -> Any:
            if repr(prompts) not in self.kept:
                self.kept[repr(prompts)] = compute(prompts)
            return self.kept[repr(prompts)]

        decoder.prefill = prefill  # type: ignore[method-assign]
        return decoder


FAULTS = [OneTensorScaled, OneLayerLeftOld, TiedHeadLeftOld, PrefixesKept]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sync_with_a_fault_is_caught(tiny: LoadedModel, fault: type[CopiedEngine]) -> None:
    engine = fault(tiny.model)
    if fault is not OneTensorScaled:
        engine.sync(0)  # nothing has changed yet: what is old is the same
    update(tiny.model)
    with pytest.raises(EngineMismatch, match=r"is not the trained model after 1 updates: .* differ by [0-9.e-]+ nats"):
        engine.sync(1)
    sound = CopiedEngine(tiny.model)
    sound.sync(1)


@pytest.mark.parametrize("fault", [OneLayerLeftOld, PrefixesKept])
def test_training_stops_before_the_next_update(
    fault: type[CopiedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch is sampled with the right weights; the second one is never trained on."""
    monkeypatch.setattr("posttrain.engines.native.copied.CopiedEngine", lambda model, **options: fault(model))
    recipe = make_recipe("grpo", rollout={"engine": {"name": "native", "weights": "copy"}})
    with pytest.raises(EngineMismatch, match="after 1 updates"):
        run(tmp_path / "run", recipe)
    assert [step for step, _ in untimed(tmp_path / "run")] == [1]
    assert saved_tensors(tmp_path / "run", 1), "the last step that was sound is kept"


def test_training_with_a_copy_is_training_by_reference(tmp_path: Path) -> None:
    """And every record says which weights sampled: of two updates a batch, those before the first of them."""
    for name in ("own", "copy"):
        engine = {"engine": {"name": "native", **({"weights": "copy"} if name == "copy" else {})}}
        evaluation = {"every": 3, "n": 2, "max_tokens": 4}
        run(tmp_path / name, make_recipe("grpo", rollout=engine, eval=evaluation, train={"epochs": 2, "steps": 4}))
        training, evaluations = recorded(tmp_path / name)
        assert {(row.step, row.version) for row in training} == {(1, 0), (3, 2)}
        assert {(row.step, row.version) for row in evaluations} == {(0, 0), (3, 3), (4, 4)}
    assert same_bits(saved_tensors(tmp_path / "own", 4), saved_tensors(tmp_path / "copy", 4))
    assert untimed(tmp_path / "own") == untimed(tmp_path / "copy")


def named(model: Any) -> dict[str, torch.Tensor]:
    return dict(checkpoint_weights(model))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_weights_have_the_names_and_order_of_a_checkpoint(family: str) -> None:
    """An adapter is merged: a plain model that is given these weights computes what the wrapped one does."""
    plain = random_model(family)
    assert list(named(plain)) == [name for name, _ in plain.named_parameters()]
    wrapped = apply_adapter(random_model(family), AdapterSection(rank=2, alpha=8.0), 0)
    update(wrapped)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    weights = named(wrapped)
    assert list(weights) == list(named(plain))
    ids = torch.tensor([[3, 5, 7, 9]])
    before = plain(input_ids=ids).logits
    missing = plain.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    with torch.no_grad():
        difference = (plain(input_ids=ids).logits - wrapped(input_ids=ids).logits).abs().max()
        assert difference < 1e-5 < (plain(input_ids=ids).logits - before).abs().max()
