"""Small runs of the embedded model, and what they leave behind, for the tests of the loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from posttrain.data.base import Task
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.registry import register
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RecordedRollout, RolloutStore
from posttrain.training.files import RunFiles
from posttrain.training.loop import TrainResult, run_training
from posttrain.types import Batch, Example, Loss, Message, Outputs, Response

MOST_SECONDS = 300.0  # that a command may take: a bound for the slowest of machines
TASK = {"name": "stories", "size": 64, "max_steps": 1}
BASE: dict[str, dict[str, Any]] = {
    "grpo": {
        "task": TASK,
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
        "rewards": ["small_runs:digit_share"],
        # a temperature at which answers differ, however sure the embedded model is of what it says
        "rollout": {"num_prompts": 4, "group_size": 4, "max_tokens": 10, "temperature": 1.5},
        "objective": {"name": "grpo"},
        "train": {"steps": 4, "lr": 1e-3},
    },
    "sft": {
        "task": TASK,
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
        "data": {"batch_size": 4, "max_length": 256},
        "objective": {"name": "cross_entropy"},
        "train": {"steps": 4, "lr": 1e-3},
    },
    "judged": {
        "task": "small_runs:judged_sums",
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
        "data": {"batch_size": 4, "max_length": 256},
        "objective": {"name": "bradley_terry"},
        "train": {"steps": 4, "lr": 1e-3},
    },
}


def judged_sums(*, size: int = 10, best_class: int = 1) -> Task:
    """Sums with a right and a wrong answer each, both in two labelled steps."""
    return Task("judged sums", "train", [_judged_sum(i, best_class) for i in range(size)])


def _judged_sum(i: int, best_class: int) -> Example:
    total = 3 * i + 2
    working = f"{i} + {2 * i + 2} = {total}. "
    correct, wrong = (working, f"It is {total}."), (working, f"It is {total + 1}, or more.")
    responses = (
        Response("".join(correct), 1.0, correct, (best_class, best_class)),
        Response("".join(wrong), 0.0, wrong, (best_class, 0)),
    )
    question = Message("user", f"What is {i} plus {2 * i + 2}?")
    return Example(f"judged/{i}", (question,), str(total), responses=responses)


def vowel_share(text: str) -> float:
    """A reward that varies whatever a model says: the share of vowels in an answer."""
    return sum(c in "aeiou" for c in text) / max(1, len(text))


def many_vowels(text: str) -> float:
    """A reward by which some groups are uniform and some are not."""
    return float(vowel_share(text) > 0.25)


def digit_share(text: str) -> float:
    """A reward that varies in what the embedded model says: the share of digits in an answer."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


def silent_of_some(completions: list[str], **kwargs: object) -> list[float | None]:
    """A reward in TRL's form that says nothing of answers without an ``a``: their share of vowels."""
    return [vowel_share(text) if "a" in text else None for text in completions]


def always_one(text: str) -> float:
    """A reward by which every group is uniform."""
    return 1.0


def never_finite(text: str) -> float:
    """A reward that is broken."""
    return float("nan")


def no_value(outputs: Outputs, batch: Batch) -> Loss:
    """An objective that is NaN everywhere."""
    return Loss(outputs.logprobs * float("nan"))


def plain_reinforce(outputs: Outputs, batch: Batch) -> Loss:
    """An objective that says nothing of where it vanishes."""
    return Loss(-batch.field("advantages") * outputs.logprobs)


@register("objective", level="token", needs=("advantages",), vanishes=("advantages",))
def says_that_it_vanishes(outputs: Outputs, batch: Batch) -> Loss:
    """An objective whose registration is wrong: where the advantage is 0 it is the likelihood."""
    return Loss(-(batch.field("advantages") + 0.1) * outputs.logprobs)


@register("objective", level="token", needs=("advantages",), vanishes="advantages")
def text_vanishes(outputs: Outputs, batch: Batch) -> Loss:
    """An objective that names the field as a text."""
    return Loss(-batch.field("advantages") * outputs.logprobs)


@register("objective", level="token", needs=("advantages",), vanishes=("returns",))
def unread_vanishes(outputs: Outputs, batch: Batch) -> Loss:
    """An objective that names a field that it does not need."""
    return Loss(-batch.field("advantages") * outputs.logprobs)


def already_summed(outputs: Outputs, batch: Batch) -> Loss:
    """An objective that reduces, which is the loop's business."""
    return Loss(-outputs.logprobs.sum())


def make_recipe(kind: str, **changes: Any) -> Recipe:
    """A resolved recipe; each keyword is a section whose keys are changed (a dict) or replaced."""
    data = json.loads(json.dumps(BASE[kind]))
    for section, value in changes.items():
        merges = isinstance(value, dict) and isinstance(data.get(section), dict) and "name" not in value
        data[section] = data[section] | value if merges else value
    return validate_recipe(data).resolve()


def one_layer_recipe(kind: str, **changes: Any) -> Recipe:
    """``make_recipe`` for the first layer of the embedded model, with a reward that varies in what that one says."""
    usual: dict[str, Any] = {"rewards": ["small_runs:vowel_share"]} if kind == "grpo" else {}
    model = {"name": shallow(1)} | changes.get("model", {})
    return make_recipe(kind, **(usual | changes | {"model": model}))


class Events(list):
    """An observer that keeps (event, facts)."""

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        self.append((event, info))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [info for name, info in self if name == event]


def run(folder: Path, recipe: Recipe, *, resume: bool = False, stop_after: int | None = None) -> TrainResult:
    """Train in ``folder``; ``stop_after`` asks it to stop once so many updates were made in this process."""
    return watched(folder, recipe, Events(), resume=resume, stop_after=stop_after)


def watched(
    folder: Path, recipe: Recipe, events: Events, *, resume: bool = False, stop_after: int | None = None
) -> TrainResult:
    """Like ``run``, with the events kept."""
    stop: Callable[[], bool] = lambda: stop_after is not None and len(events.of("step")) >= stop_after  # noqa: E731
    return run_training(recipe, RunFiles.within(folder), resume=resume, observer=events, should_stop=stop)


def train_command(folder: Path, recipe: Recipe, *options: str) -> list[str]:
    """The command that trains a recipe as the run ``it`` below ``folder``."""
    path = folder / "asked.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    where = ["--runs-dir", str(folder / "runs"), "--run", "it", "--quiet"]
    return [sys.executable, "-m", "posttrain", "train", str(path), *where, *options]


def start(command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    """A process in a session of its own, whose output is read at its end."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **options)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, what it said on the standard error); a process that hangs is killed with all that it started."""
    try:
        _, error = process.communicate(timeout=MOST_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, error


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of every update."""
    return [row.metrics for row in MetricsLog(folder / "metrics.jsonl").read() if "loss" in row.metrics]


def untimed(folder: Path) -> list[tuple[int, str]]:
    """Every line of the metrics without its times, floats as exact text."""
    rows = MetricsLog(folder / "metrics.jsonl").read()
    return [(row.step, json.dumps(row.metrics, sort_keys=True)) for row in rows]


def recorded(folder: Path) -> tuple[list[RecordedRollout], list[RecordedRollout]]:
    """The rows of both tables of ``rollouts.db``, in the order of writing."""
    store = RolloutStore(folder / "rollouts.db", read_only=True)
    return list(store.training()), list(store.evaluations())


def save_perturbed(folder: Path, noise: float = 0.05) -> str:
    """The embedded model with noise on its weights, saved with its tokenizer; returns where."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise * parameter.std())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


@cache
def shallow(num_layers: int) -> str:
    """Return the folder of the embedded model without its upper layers, which lives as long as this process.

    For runs that are compared with runs: of what they show the most is shown by one layer, and each layer costs.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _kept_folders.append(folder := tempfile.TemporaryDirectory(prefix=f"tiny-{num_layers}-"))
    fewer: dict[str, Any] = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    AutoModelForCausalLM.from_pretrained(TINY, **fewer).save_pretrained(folder.name)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder.name)
    return folder.name


_kept_folders: list[tempfile.TemporaryDirectory[str]] = []  # each is removed with its object


def saved_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint: weights or adapter, optimizer, rollout buffer."""
    place, found = folder / "checkpoints" / f"step-{step:06d}", dict[str, Tensor]()
    for file in sorted(place.glob("*.safetensors")):
        found |= {f"{file.name}:{name}": tensor for name, tensor in load_file(file).items()}
    if (place / "optimizer").is_dir():
        from posttrain.training.distributed import StoredShards

        found |= {f"optimizer.safetensors:{name}": tensor for name, tensor in StoredShards(place / "optimizer").items()}
    return found


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal names, and every tensor equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
