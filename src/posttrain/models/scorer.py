"""Reward models in transformers' sequence-classification layout, loadable by other programs.

This layout has a bias-free linear layer ``score``, evaluated at the last non-padding token: here, the answer's end
token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from posttrain.models.config import Model
from posttrain.models.load import ONE_FILE
from posttrain.models.lora import ADAPTER_SCORE, ADAPTER_WEIGHTS, CLASSIFIER_TASK
from posttrain.models.sources import ADAPTER_CONFIG, SCORE

LABEL = "reward"


def classifier_class(model: Model) -> str | None:
    """Find transformers' sequence classifier for this architecture; None if unsupported."""
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    return None if known is None else str(known.__name__)


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
    written = {**(model.state_dict() if weights is None else weights), SCORE: weight.detach().cpu().clone()}
    model.save_pretrained(path, state_dict=written, **({} if weights is None else ONE_FILE))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": [name], "id2label": {"0": LABEL}, "label2id": {LABEL: 0}}
    if config.get("pad_token_id") == end_id:
        config["pad_token_id"] = None
    _write_json(path / "config.json", config)
    return True


def save_adapter_scorer(path: Path, model: Model, weight: Tensor) -> bool:
    """Convert a saved peft adapter to peft's sequence-classifier form: task type, plus head tensors.

    Returns False, changing nothing, if the layout cannot fit.
    """
    if classifier_class(model.get_base_model()) is None or weight.shape[0] != 1:
        return False
    settings = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    whole = [*(settings.get("modules_to_save") or []), SCORE.removesuffix(".weight")]
    _write_json(path / ADAPTER_CONFIG, settings | {"task_type": CLASSIFIER_TASK, "modules_to_save": whole})
    tensors = load_file(path / ADAPTER_WEIGHTS) | {ADAPTER_SCORE: weight.detach().cpu().clone()}
    save_file(tensors, path / ADAPTER_WEIGHTS, {"format": "pt"})
    return True


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
