"""The gold answers of the data sets at hand, found through the tasks themselves; and golds of our own."""

from __future__ import annotations

import os
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.data.base import Task
from posttrain.types import Example

# Every task of the registry: the file of its rows below POSTTRAIN_DATA (None: it makes them itself), and its options.
TASKS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "aime24": ("math_evals/aime24", {}),
    "aime25": ("math_evals/aime24", {}),  # the same layout
    "amc": ("math_evals/amc", {}),
    "episodes": (None, {"size": 20}),
    "gsm8k": ("gsm8k/gsm8k_test", {"split": "test"}),
    "hh_rlhf": ("hh_rlhf/test", {"split": "test"}),
    "humaneval": ("code/humaneval", {}),
    "jsonl": ("gsm8k/gsm8k_test", {"split": "all", "prompt_key": "question", "answer_key": "final_answer"}),
    "judged_solutions": ("orm_math/qwen_math_cot_samples", {"split": "test"}),
    "math": ("math/math_test", {"split": "test"}),
    "math500": ("math/math500", {}),
    "math_shepherd": ("prm_format_samples/math_shepherd", {"split": "test"}),
    "mbpp": ("code/mbpp", {"split": "test"}),
    "minerva_math": ("math_evals/minerva", {}),
    "mixture": (None, {"parts": [{"task": {"name": one, "split": "test", "size": 15}} for one in ("stories", "sums")]}),
    "mmlu": ("mmlu/val", {"split": "validation"}),
    "olympiad_bench": ("math_evals/olympiad_bench", {}),
    "preferences": ("preference/politeness_pairs", {"split": "all"}),
    "prm800k": ("prm_format_samples/prm800k", {"split": "test"}),
    "reasoning_gym": (None, {"dataset": "chain_sum", "split": "test", "size": 20}),
    "refusals": (None, {}),
    "stories": (None, {"split": "test"}),
    "sums": (None, {"split": "test"}),
    "svamp": ("math_evals/svamp", {}),
    "ultrafeedback": ("ultrafeedback/test", {"split": "test"}),
}
MATH_TASKS = ("math", "math500", "amc", "aime24", "minerva_math", "olympiad_bench")
NUMBER_TASKS = ("gsm8k", "svamp", "aime24")

# One gold of every kind, for where no data are at hand, and so that each trick finds what it aims at.
PANEL = r"""
-1
0
1
2
17
5
\frac{1}{2}
x
-n
n
|x|
\ln x
x+1
(1,2)
\{1,2\}
1,-2
[0,1)
(-\infty,\infty)
\text{yes}
\text{(B)}
\angle ABC
x=3
y=2x+3
\begin{pmatrix} 1 \\ 2 \end{pmatrix}
101_2
25\%
90^\circ
5\text{ cm}
1 \pm \sqrt{19}
1:2
i
\pi
\frac{3}{7}
(-\infty,1)\cup(3,\infty)
""".strip("\n").splitlines()  # fmt: skip
VALUES = ("-1", "0", "1", "-n", "\\ln x")  # what tricks aim at


def data_folder() -> Path | None:
    folder = os.environ.get("POSTTRAIN_DATA")
    return Path(folder) if folder else None


def load(name: str, path: Path | None = None) -> Task:
    """A task of the table, from its file or from ``path``."""
    file, options = TASKS[name]
    if file is not None:
        folder = data_folder()
        assert path is not None or folder is not None
        options = {"path": str(path or Path(folder or "") / f"{file}.jsonl.gz"), **options}
    found: Task = registry.find("task", name, "task").function(**options)
    return found


def golds_of(example: Example) -> tuple[str, ...]:
    return tuple(example.meta.get("answers") or ()) or (() if example.answer is None else (example.answer,))


@cache
def real_golds(tasks: tuple[str, ...]) -> tuple[str, ...]:
    """The distinct golds of some tasks, in the order of their rows."""
    examples = (example for name in tasks for example in islice(load(name).examples, 10_000))
    found = {gold: None for example in examples for gold in golds_of(example)}
    return tuple(found)
