"""Transcoders: what an MLP reads is turned into what it gives, by sparse features and perhaps a linear skip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DOCUMENTS, FAMILIES, activations_of, build
from planted import TensorRows
from safetensors.torch import load_file
from torch import Tensor, nn

from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations.shards import write_tensors
from posttrain.interpret.activations.sites import backbone_of, blocks_of
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.exchange import load_dictionary, save_dictionary
from posttrain.interpret.dictionaries.fitting import dictionary_loss, fit_dictionary
from posttrain.interpret.dictionaries.measures import measure
from posttrain.interpret.dictionaries.recipe import DictionaryTrainSection, DictionaryWord, load_sae_recipe
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.features.splice import recover
from posttrain.interpret.features.steering import Change, Steering

D, F, N = 10, 48, 40
OPTIONS: dict[str, dict[str, float]] = {
    "l1": {"coefficient": 0.05},
    "topk": {"k": 4},
    "batchtopk": {"k": 4},
    "jumprelu": {"target": 6, "bandwidth": 1.0, "coefficient": 0.7},
}


def a_transcoder(kind: str, skip: bool, matryoshka: list[int] | None = None) -> Dictionary:
    torch.manual_seed(1)
    made = Dictionary(D, F, 1, kind, OPTIONS[kind], matryoshka, transcoder=True, skip=skip)
    with torch.no_grad():
        for bias in (made.b_enc, made.b_dec):
            bias.normal_(std=0.3)
        if made.W_skip is not None:
            made.W_skip.normal_(std=0.2)
        if made.architecture == "jumprelu":
            made.threshold.uniform_(0.05, 0.3)
    return made


def test_the_loss_of_two_rows_worked_by_hand() -> None:
    """d = 2, two features, L1 with coefficient 1/2: pre, features, output, error and loss are small whole numbers."""
    made = Dictionary(2, 2, kind="l1", options={"coefficient": 0.5, "warmup": 0.0}, transcoder=True, skip=True)
    with torch.no_grad():
        made.W_enc.copy_(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]))
        made.b_enc.copy_(torch.tensor([1.0, -1.0]))
        made.W_dec.copy_(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        made.b_dec.copy_(torch.tensor([[1.0, 1.0]]))
        assert made.W_skip is not None
        made.W_skip.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))  # what is read first is added to the second output
    x, y = torch.tensor([[1.0, 1.0], [-2.0, 0.0]]), torch.tensor([[3.0, 2.0], [1.0, 1.0]])
    # pre = [[2, 1], [-1, -1]], f = [[2, 1], [0, 0]]
    # out = f + 1 + [0, x0] = [[3, 3], [1, -1]]; error = [[0, 1], [0, -2]]
    assert torch.equal(made.encode(x), torch.tensor([[2.0, 1.0], [0.0, 0.0]]))
    assert torch.equal(made(x), torch.tensor([[3.0, 3.0], [1.0, -1.0]]))
    loss, measured = dictionary_loss(made, x, targets=y)
    assert float(measured.squared_error) == pytest.approx(5 / 4)
    assert float(measured.penalty) == pytest.approx(0.5 * 3 / 2)
    assert float(loss.detach()) == pytest.approx(2.0)
    loss.backward()
    # the gradient on the output is 2 · error / 4 = [[0, .5], [0, -1]]
    assert made.b_dec.grad is not None
    assert made.W_skip.grad is not None
    assert made.W_dec.grad is not None
    assert made.b_enc.grad is not None
    torch.testing.assert_close(made.b_dec.grad, torch.tensor([[0.0, -0.5]]))
    torch.testing.assert_close(made.W_skip.grad, torch.tensor([[0.0, 0.5 + 2.0], [0.0, 0.5]]))  # xᵀ · gradient
    torch.testing.assert_close(made.W_dec.grad[:, 0], torch.tensor([[0.0, 1.0], [0.0, 0.5]]))  # fᵀ · gradient
    torch.testing.assert_close(made.b_enc.grad, torch.tensor([0.25, 0.5 + 0.25]))  # and the penalty's 1/4 where active


def plain_loss(made: Dictionary, x: Tensor, y: Tensor) -> Tensor:
    codes = made.codes(x @ made.W_enc[0] + made.b_enc, made.threshold, 1.0)
    decoder, skip = made.W_dec[:, 0], 0.0 if made.W_skip is None else x @ made.W_skip
    outputs = [codes.features[:, :size] @ decoder[:size] + made.b_dec[0] + skip for size in made.prefixes]
    loss = torch.stack([(y - z).square().mean() for z in outputs]).mean()
    return loss if codes.penalty is None else loss + codes.penalty


@pytest.mark.parametrize("matryoshka", [None, [8, 20]])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_gradients_are_those_of_the_formula(kind: str, skip: bool, matryoshka: list[int] | None) -> None:
    made = a_transcoder(kind, skip, matryoshka).double()
    x, y = torch.randn(N, D, dtype=torch.float64), torch.randn(N, D, dtype=torch.float64)
    loss, _ = dictionary_loss(made, x, dtype=torch.float64, targets=y)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    expected = plain_loss(made, x, y)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    assert set(ours) == {name for name, _ in made.named_parameters()}
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-9, atol=1e-14, msg=name)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_what_is_saved_is_loaded_and_folding_changes_nothing(kind: str, skip: bool, tmp_path: Path) -> None:
    made = a_transcoder(kind, skip)
    pairs = torch.stack([torch.randn(64, D) * 30 + 5, torch.randn(64, D) * 0.2 - 1], dim=1)
    made.prepare(pairs)
    read, _ = made.sides(pairs)
    torch.testing.assert_close(made.scaled(read).norm(dim=1).mean(), torch.tensor(D**0.5))
    torch.testing.assert_close(made.scaled_target(pairs[:, 1]).mean(0), made.b_dec.detach()[0])
    torch.testing.assert_close(made.pre_activations(read).mean(0), torch.zeros(F), rtol=0, atol=1e-4)
    save_dictionary(made, tmp_path)
    loaded = load_dictionary(tmp_path)
    x = pairs[:, 0]
    torch.testing.assert_close(loaded(x), made(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loaded.encode(x) * made.output_scale, made.encode(x), rtol=1e-4, atol=1e-5)
    assert (loaded.kind, loaded.transcoder, loaded.W_skip is not None) == (kind, True, skip)
    tensors = load_file(tmp_path / "sae_weights.safetensors")  # used as SAELens uses them
    pre = x @ tensors["W_enc"] + tensors["b_enc"]
    if kind in ("batchtopk", "jumprelu"):
        features = torch.relu(pre) * (pre > tensors["threshold"])
        out = features @ tensors["W_dec"] + tensors["b_dec"]
        torch.testing.assert_close(loaded(x), out + x @ tensors["W_skip"].T if skip else out, rtol=1e-4, atol=1e-5)
    name = {"l1": "", "topk": "topk_"}.get(kind, "jumprelu_") + ("skip_" if skip else "") + "transcoder"
    content = (tmp_path / "cfg.json").read_text()
    assert f'"architecture": "{name}"' in content
    assert '"apply_b_dec_to_input": false' in content
    (tmp_path / "cfg.json").write_text(content.replace('"d_out": 10', '"d_out": 20'))
    with pytest.raises(DataError, match="writes another width"):
        load_dictionary(tmp_path)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"granite"}))  # whose halves are not known
def test_what_an_mlp_reads_gives_what_it_writes(family: str) -> None:
    """The modules of the MLP, asked again: from ``mlp_in`` they compute ``mlp``, with a norm behind or not."""
    model = build(family)
    block = blocks_of(backbone_of(model))[1][2]
    seen = activations_of(model, DOCUMENTS, ["mlp_in.3", "mlp.3"])
    with torch.no_grad():
        given: Any = block.mlp(seen["mlp_in.3"][None])
        given = given[0] if isinstance(given, tuple) else given
        if family in ("gemma2", "gemma3_text", "olmo2"):
            given = block.post_feedforward_layernorm(given)
    torch.testing.assert_close(given.reshape(seen["mlp.3"].shape), seen["mlp.3"], rtol=1e-4, atol=1e-5)


def linear_transcoder(model: Any, layer: int) -> Dictionary:
    """For a model whose MLP is a linear map: the skip alone does what it does."""
    made = Dictionary(64, 8, kind="l1", transcoder=True, skip=True)
    mlp = blocks_of(backbone_of(model))[1][layer - 1].mlp
    with torch.no_grad():
        assert made.W_skip is not None
        made.W_skip.copy_(mlp.weight.T)
        made.b_dec.copy_(mlp.bias[None])
        made.W_enc.zero_()
    return made


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_an_mlp_is_replaced_by_its_transcoder(architecture: str, tiny_random: Callable[..., Any]) -> None:
    model = tiny_random(architecture)
    torch.manual_seed(0)
    blocks_of(backbone_of(model))[1][0].mlp = nn.Linear(64, 64)
    documents = [[5, 9, 30, 2, 77], [4, 4, 100]]
    exact = linear_transcoder(model, 1)
    recovered = recover(model, exact, "mlp_in.1", documents, target="mlp.1").numbers()
    assert recovered["ce_spliced"] == pytest.approx(recovered["ce"], abs=1e-5)
    assert recovered["ce_recovered_zero"] == pytest.approx(1, abs=1e-3)
    assert recovered["kl_recovered_mean"] == pytest.approx(1, abs=1e-3)
    assert recovered["kl_zero"] > 1e-4
    with torch.no_grad():
        assert exact.W_skip is not None
        exact.W_skip.zero_()
        exact.b_dec.zero_()
    nothing = recover(model, exact, "mlp_in.1", documents, target="mlp.1")
    assert nothing.ce_spliced == nothing.ce_zero
    assert nothing.kl_spliced == nothing.kl_zero
    with pytest.raises(UsageError, match="the site that it reads and the target"):
        recover(model, exact, "mlp_in.1", documents)


@pytest.mark.parametrize("skip", [False, True])
def test_a_transcoder_learns_what_it_is_to_write(skip: bool) -> None:
    """y = relu of some directions of x, plus with a skip a linear map, which few features cannot say."""
    torch.manual_seed(3)
    x = torch.randn(6000, 12) + 0.5
    y = torch.relu(x @ torch.randn(12, 16) - 4) @ torch.randn(16, 12) + skip * 3 * (x @ torch.randn(12, 12))
    pairs = TensorRows(torch.stack([x, y], dim=1), has_targets=True)
    settings = DictionaryTrainSection(steps=300, batch=256, lr=5e-3, precision="fp32")
    fvu = {}
    for with_skip in (False, True):
        word = DictionaryWord.model_validate({"name": "topk", "k": 3, "features": 48, "skip": with_skip})
        fitted = fit_dictionary(pairs, 5000, word, settings, seed=0)
        fvu[with_skip] = measure(fitted, [pairs.gather(torch.arange(5000, 6000))]).fvu
    assert fvu[skip] < 0.25
    if skip:
        assert fvu[True] < 0.5 * fvu[False]


def test_pairs_of_a_store_and_what_is_refused(tmp_path: Path, tiny_random: Callable[..., Any]) -> None:
    read, written = torch.randn(30, 4), torch.randn(30, 4)
    store = write_tensors(tmp_path / "one", {"mlp_in.2": read, "mlp.2": written, "resid.2": torch.randn(30, 6)})
    rows = StoreRows(store, "mlp_in.2", None, "mlp.2")
    chosen = torch.tensor([7, 3])
    assert torch.equal(rows.gather(chosen), torch.stack([read, written], dim=1)[chosen])
    assert (rows.sources, rows.has_targets) == (1, True)
    with pytest.raises(UsageError, match=r"activations\.target: resid\.2: .* of the same width"):
        StoreRows(store, "mlp_in.2", None, "resid.2")
    both = write_tensors(tmp_path / "two", {"mlp_in.2": [read, read + 1], "mlp.2": [written, written + 1]})
    with pytest.raises(UsageError, match="a transcoder is of one model"):
        StoreRows(both, "mlp_in.2", "both", "mlp.2")
    for overrides, message in (
        ([("dictionary.skip", "true")], "dictionary.skip is for a transcoder; give activations.target"),
        ([("activations.target", "resid.2")], "it goes with one other 'site', which it reads"),
        ([("activations.site", "resid.1,resid.2"), ("activations.target", "mlp.2")], "it goes with one other 'site'"),
    ):
        with pytest.raises(UsageError, match=message):
            load_sae_recipe("tiny/sae", overrides)
    model = tiny_random("qwen3")
    made = Dictionary(64, 8, kind="l1", transcoder=True)
    with pytest.raises(UsageError, match="can be added but not taken out"):
        Steering(model, made, "mlp.1", Change(values={3: 0.0}))
    steering = Steering(model, made, "mlp.1", Change(strengths={3: 2.0}))
    torch.testing.assert_close(steering.change(torch.zeros(1, 1, 64))[0, 0], 2 * made.W_dec.detach()[3, 0])
