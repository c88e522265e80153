"""Dictionaries of others: their files used as they mean it, worked by hand; their sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.cli import main
from posttrain.errors import DataError
from posttrain.interpret.dictionaries.exchange import (
    load_dictionary,
    read_metadata,
    site_of_hook,
)

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
    "old topk": [[0.0, 3, 0], [0, 0, 5], [0, 1, 0]],
    "no b_dec": [[2.0, 4, 0], [4, 2, 6], [0, 2, 0]],
}
OUTPUTS = {
    "standard": [[2.0, 4], [14, 12], [1, 2]],
    "jumprelu": [[1.0, 4], [14, 11], [1, 1]],
    "topk": [[1.0, 4], [11, 11], [1, 2]],
    "old topk": [[1.0, 4], [11, 11], [1, 2]],
    "no b_dec": [[3.0, 5], [17, 15], [1, 3]],
}
CHANGES: dict[str, dict[str, Any]] = {
    "standard": {"architecture": "standard", "activation_fn_str": "relu"},
    "jumprelu": {"architecture": "jumprelu"},
    "topk": {"architecture": "topk", "k": 1},
    "old topk": {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 1}},
    "no b_dec": {"architecture": "standard", "apply_b_dec_to_input": False},
}


def published(folder: Path, kind: str, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(WEIGHTS | ({"threshold": THRESHOLD} if kind == "jumprelu" else {}), folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(CONFIG | CHANGES[kind] | changes))
    return folder


@pytest.mark.parametrize("kind", CHANGES)
def test_features_and_outputs_worked_by_hand(kind: str, tmp_path: Path) -> None:
    loaded = load_dictionary(published(tmp_path, kind))
    assert loaded.encode(X).tolist() == FEATURES[kind]
    assert loaded.decode(torch.tensor(FEATURES[kind])).tolist() == OUTPUTS[kind]
    assert loaded(X).tolist() == OUTPUTS[kind]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_fn_str": "tanh-relu"}, "activation function 'tanh-relu'; here are relu, topk"),
        ({"activation_fn_str": "topk"}, "activation function 'topk'; here are relu, topk .with k."),
        ({"finetuning_scaling_factor": True}, "a finetuning_scaling_factor cannot be used here"),
        ({"normalize_activations": "expected_average_only_in"}, "normalize_activations: 'expected_average_only_in'"),
        ({"architecture": "gated"}, "architecture 'gated' is not one of standard, topk, jumprelu"),
    ],
)
def test_what_would_be_used_wrongly_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    published(tmp_path, "standard")
    content = CONFIG | changes
    (tmp_path / "cfg.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        load_dictionary(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("jumprelu", {"threshold": None}, "has no tensor threshold, which a jumprelu dictionary needs"),
        ("standard", {"W_gate": torch.ones(2, 3)}, "has tensors that a standard dictionary does not use: W_gate"),
        ("standard", {"threshold": THRESHOLD}, "a standard dictionary does not use: threshold"),
        ("standard", {"b_mag": THRESHOLD, "r_mag": THRESHOLD + 1}, "does not use: b_mag, r_mag"),
        ("topk", {"scaling_factor": 2 * torch.ones(3)}, "a topk dictionary does not use: scaling_factor"),
        ("jumprelu", {"b_enc": None}, "has no tensor b_enc; there are: W_dec, W_enc, b_dec, threshold"),
    ],
)
def test_load_dictionary_whose_tensors_do_not_match_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    published(tmp_path, kind)
    path = tmp_path / "sae_weights.safetensors"
    save_file({name: tensor for name, tensor in (load_file(path) | changes).items() if tensor is not None}, path)
    with pytest.raises(DataError, match=message):
        load_dictionary(tmp_path)


def test_load_dictionary_with_a_scaling_factor_of_ones_is_used(tmp_path: Path) -> None:
    path = published(tmp_path, "standard") / "sae_weights.safetensors"
    save_file(WEIGHTS | {"scaling_factor": torch.ones(3)}, path)
    assert load_dictionary(tmp_path)(X).tolist() == OUTPUTS["standard"]


@pytest.mark.parametrize(
    ("hook", "site"),
    [
        ("blocks.19.hook_resid_post", "resid.20"),
        ("blocks.0.hook_resid_pre", "resid.0"),
        ("blocks.8.hook_resid_pre", "resid.8"),
        ("blocks.3.hook_mlp_out", "mlp.4"),
        ("blocks.3.hook_attn_out", "attn.4"),
        ("blocks.3.ln2.hook_normalized", "mlp_in.4"),
        ("model.layers.19", "resid.20"),
        ("transformer.h.0.output", "resid.1"),
        ("blocks.3.attn.hook_z", None),
        ("blocks.x.hook_resid_post", None),
        (None, None),
    ],
)
def test_the_site_that_a_hook_means(hook: str | None, site: str | None) -> None:
    assert site_of_hook(hook) == site


def test_the_place_in_the_model_is_found_in_old_files_and_new_ones(tmp_path: Path) -> None:
    assert read_metadata(published(tmp_path / "new", "standard"))["site"] == "resid.5"
    old = published(
        tmp_path / "old", "standard", metadata=None, model_name="gpt2-small", hook_name="blocks.5.hook_mlp_out"
    )
    metadata = read_metadata(old)
    assert (metadata["model_name"], metadata["site"]) == ("gpt2-small", "mlp.6")
    older = published(tmp_path / "older", "standard", metadata=None, hook_point="blocks.5.hook_resid_post")
    assert read_metadata(older)["site"] == "resid.6"


def test_find_dictionary_name_on_the_hub_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sae", "features", "org/repo/layer_5"]) == 2
    said = capsys.readouterr().err
    assert "org/repo/layer_5: neither a folder with a dictionary (cfg.json and weights) nor a run in runs" in said
    assert "`hf download` gets the folder of one on the hub" in said


def test_a_folder_of_others_stands_where_a_dictionary_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    from posttrain.interpret.activations.shards import write_tensors

    theirs = published(tmp_path / "theirs", "jumprelu")
    write_tensors("rows", {"resid.5": torch.randn(40, 2) * 3, "resid.6": torch.randn(40, 2)})
    assert main(["sae", "features", str(theirs), "--activations", "rows", "--no-lens", "--model", "tiny"]) == 0
    assert "3 features over 40 rows" in capsys.readouterr().out
    about = json.loads((theirs / "features.json").read_text())["about"]
    assert about["site"] == "resid.5"
