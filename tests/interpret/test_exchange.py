"""Dictionaries as files: what is written is read back, in SAELens's layout and by SAELens itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.errors import DataError
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.exchange import load_dictionary, read_metadata, save_dictionary

D, F = 12, 40
KINDS = ["l1", "topk", "batchtopk", "jumprelu"]


def trained(kind: str, sources: int = 1) -> tuple[Dictionary, torch.Tensor]:
    """A dictionary with weights like those after training, and raw activations that it is used on."""
    torch.manual_seed(2)
    dictionary = Dictionary(D, F, sources, kind, {"k": 5} if "topk" in kind else {})
    x = torch.randn(64, sources, D) * 30 + 5
    dictionary.prepare(x)
    with torch.no_grad():
        dictionary.W_enc.add_(torch.randn_like(dictionary.W_enc) * 0.1)
        dictionary.b_enc.normal_(std=0.5)
        if dictionary.architecture == "jumprelu":
            dictionary.threshold.uniform_(0.2, 1.5)
    return dictionary, x if sources > 1 else x[:, 0]


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(kind: str, sources: int, tmp_path: Path) -> None:
    dictionary, x = trained(kind, sources)
    before = {name: value.clone() for name, value in dictionary.state_dict().items()}
    save_dictionary(dictionary, tmp_path / "new" / "folder", {"model_name": "tiny", "layer": 2})
    loaded = load_dictionary(tmp_path / "new" / "folder")
    assert (loaded.kind, loaded.options, loaded.sources) == (kind, dictionary.options, sources)
    torch.testing.assert_close(loaded(x), dictionary(x), rtol=1e-4, atol=1e-3)
    unit = dictionary.input_scale if sources == 1 else torch.ones(1)
    torch.testing.assert_close(loaded.encode(x) * unit, dictionary.encode(x), rtol=1e-4, atol=1e-4)
    for name, value in dictionary.state_dict().items():
        assert torch.equal(value, before[name]), f"saving changed {name}"
    metadata = read_metadata(tmp_path / "new" / "folder")
    assert (metadata["model_name"], metadata["layer"]) == ("tiny", 2)


def test_the_layout(tmp_path: Path) -> None:
    dictionary, x = trained("batchtopk")
    save_dictionary(dictionary, tmp_path)
    tensors = load_file(tmp_path / "sae_weights.safetensors")
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    assert shapes == {"W_enc": (D, F), "W_dec": (F, D), "b_enc": (F,), "b_dec": (D,), "threshold": (F,)}
    pre = (x - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"]
    torch.testing.assert_close(load_dictionary(tmp_path).encode(x), torch.relu(pre) * (pre > tensors["threshold"]))
    torch.testing.assert_close(tensors["W_dec"].norm(dim=1), torch.ones(F))
    configuration = json.loads((tmp_path / "cfg.json").read_text())
    assert configuration | {"metadata": {}} == {
        "architecture": "jumprelu", "d_in": D, "d_sae": F, "dtype": "float32", "device": "cpu",
        "apply_b_dec_to_input": True, "normalize_activations": "none", "reshape_activations": "none", "metadata": {},
    }  # fmt: skip
    save_dictionary(trained("topk", 2)[0], tmp_path)
    assert load_file(tmp_path / "sae_weights.safetensors")["W_dec"].shape == (2, F, D)
    configuration = json.loads((tmp_path / "cfg.json").read_text())
    assert (configuration["architecture"], configuration["sources"], configuration["k"]) == ("crosscoder", 2, 5)


def change(folder: Path, **changes: Any) -> None:
    path = folder / "cfg.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_dictionary(tmp_path)
    save_dictionary(trained("l1")[0], tmp_path)
    for changes, message in (
        ({"architecture": "gated"}, "architecture 'gated' is not one of standard, topk, jumprelu, crosscoder"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations: 'layer_norm'"),
        ({"d_in": 7}, r"W_enc has the shape \(1, 12, 40\), but cfg.json means \(1, 7, 40\)"),
        ({"d_in": None}, "says nothing of d_in"),
        ({"architecture": "topk"}, "says nothing of k, which a topk dictionary needs"),
        ({"metadata": {"posttrain": {"kind": "topk"}}}, "kind: 'topk' is no dictionary of the architecture 'standard'"),
        ({"d_in": -1}, "not the configuration of a dictionary .d_in: "),
        ({"sources": "two"}, "not the configuration of a dictionary .sources: "),
        ({"k": [4]}, "not the configuration of a dictionary .k: "),
        ({"metadata": "x"}, "not the configuration of a dictionary .metadata: "),
        ({"metadata": {"models": [1]}}, r"not the configuration of a dictionary .metadata\.models\.0\."),
        ({"metadata": {"posttrain": {"options": "k"}}}, r"metadata\.posttrain\.options: "),
        ({"metadata": {"posttrain": {"kind": "topk", "matryoshka": [-1]}}}, r"metadata\.posttrain\.matryoshka\.0: "),
    ):
        save_dictionary(trained("l1")[0], tmp_path)
        change(tmp_path, **changes)
        with pytest.raises(DataError, match=message):
            load_dictionary(tmp_path)
    save_dictionary(trained("l1")[0], tmp_path)
    save_file({"W_enc": torch.zeros(D, F)}, tmp_path / "sae_weights.safetensors")
    with pytest.raises(DataError, match="has no tensor W_dec, b_enc, b_dec; there are: W_enc"):
        load_dictionary(tmp_path)
    (tmp_path / "sae_weights.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match="cannot be read"):
        load_dictionary(tmp_path)


def test_a_bias_that_is_not_taken_from_the_input(tmp_path: Path) -> None:
    dictionary, x = trained("l1")
    save_dictionary(dictionary, tmp_path)
    change(tmp_path, apply_b_dec_to_input=False)
    tensors = load_file(tmp_path / "sae_weights.safetensors")
    expected = torch.relu(x @ tensors["W_enc"] + tensors["b_enc"])
    torch.testing.assert_close(load_dictionary(tmp_path).encode(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_saelens_loads_ours(kind: str, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens", reason="the peer whose layout this is")
    dictionary, x = trained(kind)
    save_dictionary(dictionary, tmp_path, {"model_name": "tiny", "hook_name": "blocks.1.hook_resid_post"})
    theirs, ours = sae_lens.SAE.load_from_disk(tmp_path, device="cpu"), load_dictionary(tmp_path)
    torch.testing.assert_close(theirs.encode(x), ours.encode(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-5, atol=1e-5)
    assert theirs.cfg.metadata.hook_name == "blocks.1.hook_resid_post"


@pytest.mark.parametrize("architecture", ["standard", "topk", "topk rescaled", "jumprelu", "standard without b_dec"])
def test_we_load_those_of_saelens(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("sae_lens", reason="the peer whose layout this is")
    from sae_lens.saes import JumpReLUSAE, JumpReLUSAEConfig, StandardSAE, StandardSAEConfig, TopKSAE, TopKSAEConfig

    torch.manual_seed(0)
    made: Any
    if architecture == "jumprelu":
        made = JumpReLUSAE(JumpReLUSAEConfig(d_in=D, d_sae=F))
        made.threshold.data.uniform_(0, 1)
    elif architecture.startswith("topk"):
        made = TopKSAE(TopKSAEConfig(d_in=D, d_sae=F, k=5, rescale_acts_by_decoder_norm="rescaled" in architecture))
    else:
        made = StandardSAE(StandardSAEConfig(d_in=D, d_sae=F, apply_b_dec_to_input="without" not in architecture))
    for name in ("W_enc", "b_enc", "b_dec"):
        getattr(made, name).data.normal_()
    made.W_dec.data.mul_(torch.linspace(0.5, 2, F)[:, None])
    made.save_model(tmp_path)
    x, loaded = torch.randn(30, D), load_dictionary(tmp_path)
    torch.testing.assert_close(loaded.encode(x), made.encode(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loaded(x), made(x), rtol=1e-5, atol=1e-5)
