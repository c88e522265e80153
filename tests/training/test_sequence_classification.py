"""Reward models as transformers and peft load them: the same scores, and still the language model underneath."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from closeness import assert_close, logprob_rounding
from posttrain.models.forward.forward import Forward
from posttrain.models.heads import ScalarHead, hidden_size
from posttrain.models.load import load_model
from posttrain.models.scorer import classifier_class, save_scorer
from posttrain.recipes.sections import ModelSection
from posttrain.training.build import prepare
from posttrain.types import Sample, collate
from refusing import refuses
from small_runs import one_layer_recipe, run, shallow

# A head of norm 0.5 · √64 reads states of norm √64 · 1.15: two layers, scores of at most 37.
SCORES = logprob_rounding(2, size=37.0)
ROWS = [[5, 9, 31, 7, 2], [5, 9, 8, 2], [11, 2]]
END = 2


def our_scores(model: Any, head: ScalarHead, rows: list[list[int]]) -> torch.Tensor:
    """The score at the last token of each row, by the forward pass that trains."""
    masks = [[False] * (len(row) - 1) + [True] for row in rows]
    batch = collate([Sample(row, mask, group=i) for i, (row, mask) in enumerate(zip(rows, masks, strict=True))])
    scores = Forward(model, head=head, reads="at", scores_only=True)(batch, "none").scores
    assert scores is not None
    return torch.stack([scores[i, len(row) - 1] for i, row in enumerate(rows)])


def head_of(weight: torch.Tensor) -> ScalarHead:
    head = ScalarHead(weight.shape[1])
    head.load_state_dict({"weight": weight})
    return head.requires_grad_(False)


@pytest.mark.parametrize(
    ("architecture", "tied"), [("qwen3", True), ("qwen2", False), ("llama", False), ("gpt2", True)]
)
@torch.no_grad()
def test_transformers_reads_the_same_scores_and_the_same_language_model(
    architecture: str, tied: bool, tiny_random: Any, tmp_path: Path
) -> None:
    model = tiny_random(architecture, pad_token_id=0, tie_word_embeddings=tied)
    head = ScalarHead(hidden_size(model), init_std=0.5, seed=3)
    assert save_scorer(tmp_path, model, head.weight, END)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(theirs).__name__ == classifier_class(model)
    assert (theirs.config.num_labels, theirs.config.id2label) == (1, {0: "reward"})
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ROWS])
    ours = our_scores(model, head, ROWS)
    assert_close(theirs(input_ids=ids, attention_mask=mask).logits[:, 0], ours, atol=SCORES, rtol=0)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@torch.no_grad()
def test_where_padding_is_the_end_token_batches_are_refused_rather_than_misread(
    tiny_random: Any, tmp_path: Path
) -> None:
    model = tiny_random("qwen3", pad_token_id=END)
    head = ScalarHead(hidden_size(model), init_std=0.5)
    assert save_scorer(tmp_path, model, head.weight, END)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.tensor([ROWS[0], [0, *ROWS[1]]])
    with refuses(ValueError, "padding token"):
        theirs(input_ids=ids)
    ours = our_scores(model, head, ROWS[:1])
    assert_close(theirs(input_ids=ids[:1]).logits[:, 0], ours, atol=SCORES, rtol=0)


def test_a_head_with_three_classes_does_not_fit(tiny_random: Any, tmp_path: Path) -> None:
    model = tiny_random("qwen3")
    assert not save_scorer(tmp_path, model, ScalarHead(hidden_size(model), 3).weight, END)
    assert list(tmp_path.iterdir()) == []


def test_a_trained_run_is_a_sequence_classifier_and_resumes(tmp_path: Path) -> None:
    recipe = one_layer_recipe("judged", train={"steps": 2, "save_every": 1})
    run(tmp_path, recipe)
    folder = tmp_path / "checkpoints" / "step-000002"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    head = load_file(folder / "heads.safetensors")["head.weight"]
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).requires_grad_(False)
    assert torch.equal(classifier.score.weight, head)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = [*tokenizer("User: 1 + 1? Assistant: 2")["input_ids"], tokenizer.eos_token_id]
    own = head_of(head)
    loaded = load_model(ModelSection(name=str(folder)), seed=0).model.requires_grad_(False)
    ours = our_scores(loaded, own, [row])
    assert_close(classifier(input_ids=torch.tensor([row])).logits[:, 0], ours, atol=SCORES, rtol=0)
    longer = one_layer_recipe("judged", train={"steps": 3, "save_every": 1})
    assert run(tmp_path, longer, resume=True).step == 3
    notes = prepare(one_layer_recipe("grpo", model={"name": str(folder)})).warnings
    (note,) = [line for line in notes if "reward model" in line]
    assert "is a reward model (Qwen3ForSequenceClassification); its head (score.weight) is left out" in note


def test_a_reward_models_adapter_is_one_that_peft_loads_on_a_classifier(tmp_path: Path) -> None:
    from peft import PeftModel

    recipe = one_layer_recipe("judged", train={"steps": 2}, model={"adapter": {"rank": 4}})
    run(tmp_path, recipe)
    folder = tmp_path / "checkpoints" / "step-000002"
    head = load_file(folder / "heads.safetensors")["head.weight"]
    base = AutoModelForSequenceClassification.from_pretrained(shallow(1), num_labels=1)
    base.config.pad_token_id = None
    theirs = PeftModel.from_pretrained(base, folder).eval().requires_grad_(False)
    own = head_of(head)
    loaded = load_model(ModelSection(name=str(folder)), seed=0).model.requires_grad_(False)
    ours = our_scores(loaded, own, ROWS[:1])
    assert_close(theirs(input_ids=torch.tensor(ROWS[:1])).logits[:, 0], ours, atol=SCORES, rtol=0)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
