"""The logit lens of a direction, against what the model's own final norm and head say of it."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch

from posttrain.errors import UsageError
from posttrain.interpret.features import logit_lens
from posttrain.interpret.features.logit_lens import build_lens, show_token
from posttrain.recipes.sections import ModelSection


@pytest.mark.parametrize(
    ("family", "offset", "centres"), [("qwen3", 0, False), ("gpt2", 0, True), ("gemma2", 1, False)]
)
def test_the_gain_of_the_final_norm(family: str, offset: float, centres: bool) -> None:
    model = families.build(family)
    lens = build_lens(model)
    norm = model.transformer.ln_f if family == "gpt2" else model.model.norm
    torch.testing.assert_close(lens.gain, norm.weight.detach() + offset, rtol=1e-4, atol=1e-5)
    assert lens.centres is centres


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "olmo2", "gpt_neox"])
@torch.no_grad()
def test_it_is_what_norm_and_head_say(family: str) -> None:
    """norm(u) = gain * (u, centred or not) / size, so the head's logits are the lens's divided by that size."""
    model = families.build(family)
    lens, head = build_lens(model), model.get_output_embeddings()
    backbone = model.transformer if family == "gpt2" else model.gpt_neox if family == "gpt_neox" else model.model
    norm = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm"}.get(family, "norm")
    u = torch.randn(3, 32)
    unit = u / u.norm(dim=1, keepdim=True)
    inner = unit - unit.mean(1, keepdim=True) if lens.centres else unit
    size = inner.square().mean(1, keepdim=True).sqrt()
    normed = getattr(backbone, norm)
    # far above the norm's epsilon, so that it does not matter
    said = (head(normed(1e4 * unit)) - head(normed(-1e4 * unit))) / 2 * size
    torch.testing.assert_close(lens.logits(5 * u), said - said.mean(1, keepdim=True), rtol=1e-3, atol=1e-4)


def test_extremes_are_sorted_from_the_ends() -> None:
    model = families.build("qwen3")
    lens = build_lens(model)
    directions = torch.randn(4, 32)
    logits = lens.logits(directions)
    assert logits.mean(1).abs().max() < 1e-6
    promoted, suppressed = lens.extremes(directions, 3)
    for row in range(4):
        order = logits[row].argsort(descending=True).tolist()
        assert [token for token, _ in promoted[row]] == order[:3]
        assert [token for token, _ in suppressed[row]] == order[::-1][:3]
        assert promoted[row][0][1] == pytest.approx(logits[row].max().item())
    assert len(lens.extremes(directions, 1000)[0][0]) == 100


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_of_a_model_on_the_disk_only_both_ends_are_loaded(
    family: str, small_tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build(family, vocab_size=len(small_tokenizer))
    model.save_pretrained(tmp_path / "m")
    small_tokenizer.save_pretrained(tmp_path / "m")
    monkeypatch.setattr(logit_lens, "load_model", None)
    lens, tokenizer = logit_lens.load_lens(ModelSection(name=str(tmp_path / "m")))
    expected = build_lens(model)
    assert torch.equal(lens.unembedding, expected.unembedding)
    assert torch.equal(lens.gain, expected.gain)
    assert len(tokenizer) == len(small_tokenizer)


def test_a_backbone_has_no_lens() -> None:
    with pytest.raises(UsageError, match="no LM head"):
        build_lens(families.build("qwen3").model)


def test_show_token_of_part_of_a_character_is_its_name(small_tokenizer) -> None:
    ids = small_tokenizer.encode("Eva é")
    texts = [show_token(small_tokenizer, token) for token in ids]
    assert texts[0] in ("E", "Ev", "Eva")
    assert all("\ufffd" not in text and text for text in texts)
    assert show_token(small_tokenizer, 10_000) == "<10000>"
