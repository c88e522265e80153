"""Dictionaries as files: what is written is read back, in SAELens's layout and by SAELens itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from closeness import assert_close
from posttrain.cli import main
from posttrain.errors import DataError
from posttrain.interpret.activations.shards import write_tensors
from posttrain.interpret.saes.sae import SparseAutoencoder, load_sae, read_metadata, save_sae, site_of_hook
from refusing import refuses

D, F = 12, 40
KINDS = ["l1", "topk", "batchtopk"]


def trained(kind: str) -> tuple[SparseAutoencoder, torch.Tensor]:
    """A dictionary with weights like those after training, and raw activations that it is used on."""
    torch.manual_seed(2)
    sae = SparseAutoencoder(D, F, kind, {"k": 5} if "topk" in kind else {})
    x = torch.randn(64, D) * 30 + 5
    sae.prepare(x)
    with torch.no_grad():
        sae.W_enc.add_(torch.randn_like(sae.W_enc) * 0.1)
        sae.b_enc.normal_(std=0.5)
        if sae.architecture == "jumprelu":
            sae.threshold.uniform_(0.2, 1.5)
    return sae, x


@pytest.mark.parametrize("kind", KINDS)
def test_load_dictionary_gives_what_was_saved(kind: str, tmp_path: Path) -> None:
    sae, x = trained(kind)
    before = {name: value.clone() for name, value in sae.state_dict().items()}
    save_sae(sae, tmp_path / "new" / "folder", {"model_name": "tiny", "layer": 2})
    loaded = load_sae(tmp_path / "new" / "folder")
    assert loaded.kind == kind
    assert_close(loaded(x), sae(x), rtol=1e-4, atol=1e-3)
    assert_close(loaded.encode(x) * sae.input_scale, sae.encode(x), rtol=1e-4, atol=1e-4)
    for name, value in sae.state_dict().items():
        assert torch.equal(value, before[name]), f"saving changed {name}"
    assert read_metadata(tmp_path / "new" / "folder").model_name == "tiny"


def change(folder: Path, **changes: Any) -> None:
    path = folder / "cfg.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_load_dictionary_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with refuses(DataError, "missing file"):
        load_sae(tmp_path)
    for changes, message in (
        ({"architecture": "gated"}, "'standard'"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations"),
        ({"activation_fn_str": "topk"}, "activation_fn_str"),
        ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor: "),
        ({"d_in": 7}, "cfg.json"),
        ({"d_in": -1}, "d_in: "),
        ({"k": [4]}, "k: "),
        ({"architecture": "topk"}, "required for topk"),
        ({"metadata": "x"}, "metadata: "),
        ({"metadata": {"models": [1]}}, "metadata.models.0: "),
    ):
        save_sae(trained("l1")[0], tmp_path)
        change(tmp_path, **changes)
        with refuses(DataError, message):
            load_sae(tmp_path)
    (tmp_path / "sae_weights.safetensors").write_bytes(b"no tensors")
    change(tmp_path, metadata={}, architecture="standard")
    with refuses(DataError, "cannot be read"):
        load_sae(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_saelens_loads_ours(kind: str, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens", reason="the peer whose layout this is")
    sae, x = trained(kind)
    save_sae(sae, tmp_path, {"model_name": "tiny", "hook_name": "blocks.1.hook_resid_post"})
    theirs, ours = sae_lens.SAE.load_from_disk(tmp_path, device="cpu"), load_sae(tmp_path)
    assert_close(theirs.encode(x), ours.encode(x), rtol=1e-5, atol=1e-5)
    assert_close(theirs(x), ours(x), rtol=1e-5, atol=1e-5)
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
    x, loaded = torch.randn(30, D), load_sae(tmp_path)
    assert_close(loaded.encode(x), made.encode(x), rtol=1e-5, atol=1e-5)
    assert_close(loaded(x), made(x), rtol=1e-5, atol=1e-5)


# Two numbers at a token, three features. pre = (x - b_dec) @ W_enc + b_enc
WEIGHTS = {
    "W_enc": torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]]),
    "W_dec": torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]),
    "b_enc": torch.tensor([0.0, 1.0, -1.0]),
    "b_dec": torch.tensor([1.0, 1.0]),
}
X = torch.tensor([[2.0, 3.0], [4.0, 1.0], [0.0, 1.0]])
# x - b_dec = [[1, 2], [3, 0], [-1, 0]], so pre = [[1, 3, -1], [3, 1, 5], [-1, 1, -3]]
CONFIG: dict[str, Any] = {
    "d_in": 2,
    "d_sae": 3,
    "dtype": "float32",
    "apply_b_dec_to_input": True,
    "normalize_activations": "none",
    "metadata": {"model_name": "gpt2", "hook_name": "blocks.5.hook_resid_pre", "sae_lens_version": "6.1.0"},
}
THRESHOLD = torch.tensor([2.0, 1.0, 0.5])
FEATURES = {
    "standard": [[1.0, 3, 0], [3, 1, 5], [0, 1, 0]],
    "jumprelu": [[0.0, 3, 0], [3, 0, 5], [0, 0, 0]],
    "topk": [[0.0, 3, 0], [0, 0, 5], [0, 1, 0]],
    "no b_dec": [[2.0, 4, 0], [4, 2, 6], [0, 2, 0]],
}
OUTPUTS = {
    "standard": [[2.0, 4], [14, 12], [1, 2]],
    "jumprelu": [[1.0, 4], [14, 11], [1, 1]],
    "topk": [[1.0, 4], [11, 11], [1, 2]],
    "no b_dec": [[3.0, 5], [17, 15], [1, 3]],
}
CHANGES: dict[str, dict[str, Any]] = {
    "standard": {"architecture": "standard", "activation_fn_str": "relu"},
    "jumprelu": {"architecture": "jumprelu"},
    "topk": {"architecture": "topk", "k": 1},
    "no b_dec": {"architecture": "standard", "apply_b_dec_to_input": False},
}


def published(folder: Path, kind: str, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(WEIGHTS | ({"threshold": THRESHOLD} if kind == "jumprelu" else {}), folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(CONFIG | CHANGES[kind] | changes))
    return folder


@pytest.mark.parametrize("kind", CHANGES)
def test_features_and_outputs_worked_by_hand(kind: str, tmp_path: Path) -> None:
    loaded = load_sae(published(tmp_path, kind))
    assert loaded.encode(X).tolist() == FEATURES[kind]
    assert loaded.decode(torch.tensor(FEATURES[kind])).tolist() == OUTPUTS[kind]
    assert loaded(X).tolist() == OUTPUTS[kind]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("jumprelu", {"threshold": None}, "W_dec"),
        ("standard", {"W_gate": torch.ones(2, 3)}, "W_gate"),
    ],
)
def test_load_dictionary_whose_tensors_do_not_match_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    published(tmp_path, kind)
    path = tmp_path / "sae_weights.safetensors"
    save_file({name: tensor for name, tensor in (load_file(path) | changes).items() if tensor is not None}, path)
    with refuses(DataError, message):
        load_sae(tmp_path)


def test_load_dictionary_with_a_scaling_factor_of_ones_is_used(tmp_path: Path) -> None:
    path = published(tmp_path, "standard") / "sae_weights.safetensors"
    save_file(WEIGHTS | {"scaling_factor": torch.ones(3)}, path)
    assert load_sae(tmp_path)(X).tolist() == OUTPUTS["standard"]


def test_read_metadata_finds_the_site_in_old_files_and_new_ones(tmp_path: Path) -> None:
    hooks = ("blocks.19.hook_resid_post", "blocks.8.hook_resid_pre", "blocks.0.hook_resid_pre", "blocks.3.hook_mlp_out")
    assert [site_of_hook(hook) for hook in (*hooks, None)] == ["resid.20", "resid.8", None, None, None]
    assert read_metadata(published(tmp_path / "new", "standard")).site == "resid.5"
    old = published(tmp_path / "old", "standard", metadata=None, hook_name="blocks.5.hook_resid_post")
    assert read_metadata(old).site == "resid.6"


def test_a_folder_of_others_stands_where_a_dictionary_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    theirs = published(tmp_path / "theirs", "jumprelu")
    write_tensors("rows", {"resid.5": torch.randn(40, 2) * 3, "resid.6": torch.randn(40, 2)})
    assert main(["sae", "features", str(theirs), "--activations", "rows", "--no-lens", "--model", "tiny"]) == 0
    assert "features over 40" in capsys.readouterr().out
    assert json.loads((theirs / "features.json").read_text())["about"]["site"] == "resid.5"
