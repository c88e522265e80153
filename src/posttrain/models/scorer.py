"""A reward model in the layout of transformers' sequence classification, so that other programs load it.

There a model has a linear layer ``score`` without bias; its score of a text is read at the last token that is no
padding, which here is the end token of the answer.
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
    """The name of transformers' sequence classifier of this architecture, or None where there is none."""
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    return None if known is None else str(known.__name__)


def save_scorer(
    path: Path, model: Model, weight: Tensor, end_id: int, weights: Mapping[str, Tensor] | None = None
) -> bool:
    """Save a plain transformers model with a score head; False (and nothing saved) where the layout does not fit.

    The folder also loads as the language model that it was trained from: an LM head of its own stays in the file.

    Args:
        path: the folder.
        model: a causal language model.
        weight: ``float32 [1, d]`` of the head; one with more outputs does not fit.
        end_id: the token at which scores are read. If padding is the same token, the configuration names no padding,
            with which transformers would read the score one token early.
        weights: of the model, what is written here in one file; by default all.
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
    """Make of a saved peft adapter what peft writes of a sequence classifier: its task, and the head among its tensors.

    False (and nothing changed) where the layout does not fit.
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
