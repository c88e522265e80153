"""Reward models in transformers' sequence-classification layout, loadable by other programs.

This layout has a bias-free linear layer ``score``, evaluated at the last non-padding token: here, the answer's end
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from posttrain.models.config import read_object, write_object
from posttrain.models.load import ONE_FILE
from posttrain.models.lora import ADAPTER_SCORE, ADAPTER_WEIGHTS, CLASSIFIER_TASK
from posttrain.models.sources import ADAPTER_CONFIG, SCORE
from posttrain.types import Model
from posttrain.untrusted import entries_of

LABEL = "reward"


def classifier_class(model: Model) -> str | None:
    """Find transformers' sequence classifier for this architecture; None if unsupported."""
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    if known is None:
        return None
    return str(known.__name__)


def save_scorer(
    path: Path, model: Model, weight: Tensor, end_id: int, weights: Mapping[str, Tensor] | None = None
) -> bool:
    """Save a plain transformers model with its score head; returns False, saving nothing, if the layout cannot fit.

    The folder also still loads as a language model: separate LM heads stay in the file.

    Args:
        path: output folder.
        model: causal language model.
        weight: head weights, ``float32 [1, d]``. Multiple outputs do not fit.
        end_id: token whose state is scored. If it equals the padding token, padding is removed from the configuration;
            transformers would otherwise read scores one token early.
        weights: model tensors to write here in a single file; defaults to all.
    """
    name = classifier_class(model)
    if name is None or weight.shape[0] != 1:
        return False
    score = {SCORE: weight.detach().cpu().clone()}
    if weights is None:
        model.save_pretrained(path, state_dict={**model.state_dict(), **score})
    else:
        model.save_pretrained(path, state_dict={**weights, **score}, **ONE_FILE)
    config = read_object(path / "config.json")
    config |= {"architectures": [name], "id2label": {"0": LABEL}, "label2id": {LABEL: 0}}
    if config.get("pad_token_id") == end_id:
        config["pad_token_id"] = None
    write_object(path / "config.json", config)
    return True


def save_adapter_scorer(path: Path, model: Model, weight: Tensor) -> bool:
    """Convert a saved peft adapter to peft's sequence-classifier form: task type, plus head tensors.

    Returns False, changing nothing, if the layout cannot fit.
    """
    if classifier_class(model.get_base_model()) is None or weight.shape[0] != 1:
        return False
    settings = read_object(path / ADAPTER_CONFIG)
    whole = [*entries_of(settings.get("modules_to_save")), SCORE.removesuffix(".weight")]
    write_object(path / ADAPTER_CONFIG, settings | {"task_type": CLASSIFIER_TASK, "modules_to_save": whole})
    tensors = load_file(path / ADAPTER_WEIGHTS) | {ADAPTER_SCORE: weight.detach().cpu().clone()}
    save_file(tensors, path / ADAPTER_WEIGHTS, {"format": "pt"})
    return True
