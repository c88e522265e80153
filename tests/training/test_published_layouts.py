"""From the rows of published data sets to what an objective reads: units, labels, margins, and what they leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.training.sources.dataset import SupervisedSource
from small_runs import make_recipe


def test_every_rated_step_is_trained_once(tokenizer: Any, template: Any, tmp_path: Path) -> None:
    """A tree of candidates becomes rows; each rated candidate stands at exactly one trained position of them all."""
    steps = [
        {"completions": [{"text": "a b", "rating": 1}, {"text": "c", "rating": -1}], "chosen_completion": 0},
        {"completions": [{"text": "d", "rating": 0}, {"text": "e", "rating": None}], "human_completion": {"text": "f"}},
        {"completions": [{"text": "g", "rating": -1}, {"text": "h", "rating": 1}]},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"question": {"problem": "q?"}, "label": {"steps": steps}}) + "\n", encoding="utf-8")
    options = {"path": str(path), "split": "test", "num_classes": 3}
    task = registry.find("task", "prm800k").bind(options, "task")()
    recipe = make_recipe("judged", data={"batch_size": 2, "max_length": 512})
    source = SupervisedSource(recipe, task, template, tokenizer, 512, shape="steps")
    batch = source.batch_of(range(source.num_examples))
    assert task.dropped == source.dropped == {"a candidate step without a rating": 1}
    trained = [
        (tokenizer.decode([int(batch.tokens[b, t])]).strip(), int(batch.field("step_labels")[b, t]))
        for b, t in batch.mask.nonzero().tolist()
    ]
    assert sorted(trained) == [("b", 2), ("c", 0), ("d", 1), ("g", 0), ("h", 2)]
