"""``posttrain new``: create a small project with data, a reward and three working recipes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from posttrain.commands.options import CommandOptions, new_place, option
from posttrain.data.base import build_task
from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.store.durable import storage_errors
from posttrain.types import Example

RowIterator = Iterator[dict[str, str]]
NUM_ROWS = 512

_RECIPE = """\
prompt: {template: {name: r1_zero, preamble: ""}}   # or chat, for a model with a chat template
eval: {tasks: [{name: jsonl, path: data/questions.jsonl, split: validation, validation_share: 0.25}], every: 20, \
num_examples: 128, max_tokens: 96}
"""
_FILES = {
    "sft.yaml": f"""\
description: A base model learns from demonstrations to show intermediate steps before answering.
model: {{name: tiny}}
task: {{name: jsonl, path: data/demonstrations.jsonl}}
objective: cross_entropy
data: {{batch_size: 16}}
train: {{steps: 80, lr: 3.0e-4, warmup_steps: 5, schedule: linear, save_every: 40}}
{_RECIPE}""",
    "grpo.yaml": f"""\
description: After SFT, a model that mostly guesses learns from rewards to show intermediate steps.
model: {{name: tiny-sft}}
task: {{name: jsonl, path: data/questions.jsonl, validation_share: 0.25}}
rewards: [{{name: "my_rewards:near", partial: 0.3}}, {{name: xml_format, weight: 0.2}}]
rollout: {{num_prompts: 16, group_size: 8, max_tokens: 64}}
advantage: centered
objective: grpo
train: {{steps: 40, lr: 6.0e-5, warmup_steps: 5, schedule: linear, save_every: 10}}
{_RECIPE}""",
    "dpo.yaml": f"""\
description: After SFT, a model that mostly guesses learns from pairs to prefer answers with intermediate steps.
model: {{name: tiny-sft}}
task: {{name: preferences, path: data/preferences.jsonl}}
objective: {{name: dpo, beta: 0.1}}
data: {{batch_size: 16}}
train: {{steps: 60, lr: 3.0e-5, warmup_steps: 5, schedule: linear, save_every: 10}}
{_RECIPE}""",
    "my_rewards.py": '''\
"""Reward functions for this project. Argument names select the inputs.

`answer` is the gold answer, `extracted` the answer found in the response (None if missing), `text` the whole
response. Arguments after `*` are recipe keys.
"""


def near(extracted, answer, *, partial: float = 0.3):
    """1 for the correct number, `partial` if off by one, else 0."""
    if extracted is None or not extracted.strip().isdigit():
        return 0.0
    return {0: 1.0, 1: partial}.get(abs(int(extracted) - int(answer)), 0.0)
''',
    "README.md": """\
# A posttrain project

| file | content |
|---|---|
| `data/demonstrations.jsonl` | SFT rows: prompt, solution, answer |
| `data/preferences.jsonl` | DPO rows: prompt, chosen answer, rejected answer |
| `data/questions.jsonl` | RL and evaluation rows: prompt, answer; 25 % held out |
| `my_rewards.py` | reward function for `grpo.yaml` |
| `sft.yaml`, `grpo.yaml`, `dpo.yaml` | recipes, each about a minute on two cores |

Each recipe trains a model with 0.9 million parameters, included in the package:

```bash
posttrain train sft.yaml
posttrain train grpo.yaml
posttrain train dpo.yaml
posttrain runs
posttrain runs compare sft grpo dpo
```

Next, replace the rows in `data/`, edit the reward, and set `model.name`. Command line overrides start a new run:

```bash
posttrain train grpo.yaml --model.name runs/sft --run grpo-after-sft
```

`posttrain explain NAME` explains any recipe key or name.
""",
}


OPTIONS = CommandOptions(option("folder", metavar="DIR", type=new_place, help="a new or empty folder"))


def run_new(arguments: argparse.Namespace) -> int:
    """Write the project.

    Raises:
        UsageError: the folder holds something.
        StorageError: it cannot be written.
    """
    folder = Path(arguments.folder)
    with storage_errors("a project", folder):
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder}: this folder is not empty. Give a new folder")
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for name, text in _FILES.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, rows in _DATA.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows())
            (folder / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"project: {folder}\nnext:    cd {folder} && posttrain train sft.yaml")
    return 0


def _stories(split: str, seed: int, responses: str = "none") -> Iterator[Example]:
    """Generate word problems with up to two steps. Splits share no solutions."""
    options = {"split": split, "seed": seed, "size": NUM_ROWS, "max_steps": 2, "responses": responses}
    return iter(build_task(Component.model_validate({"name": "stories", **options}), "task").examples)


def _demonstrations() -> RowIterator:
    for story in _stories("train", 11):
        yield {"prompt": story.messages[0].content, "solution": str(story.solution), "answer": str(story.answer)}


def _preferences() -> RowIterator:
    """Generate preference pairs: a worked solution and a wrong guess."""
    for story in _stories("train", 12, "pair"):
        chosen = f"{story.solution} The answer is {story.answer}."
        guess = f"The answer is {story.responses[1].answer}."
        yield {"prompt": story.messages[0].content, "chosen": chosen, "rejected": guess}


def _questions() -> RowIterator:
    for story in _stories("validation", 13):
        yield {"prompt": story.messages[0].content, "answer": str(story.answer)}


_DATA = {"demonstrations": _demonstrations, "preferences": _preferences, "questions": _questions}
