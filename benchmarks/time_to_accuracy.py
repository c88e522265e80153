"""CPU-seconds of training until a model answers a share of held-out questions, ours and TRL's GRPOTrainer.

    pip install -e '.[bench]'
    python benchmarks/time_to_accuracy.py                          # both tasks, both sides, three seeds
    python benchmarks/time_to_accuracy.py --task stories --side ours --seeds 0

Both sides have the same initial weights, prompts (token for token), rewards, groups, learning rates, optimizer, number
of threads and held-out questions; each runs in a process of its own. Seconds are those of all threads, of the steps
alone: sampling, grading and update. Start and evaluation are not counted; evaluation is the same code on both sides.
Results go to benchmarks/results/time_to_accuracy.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import posttrain
from posttrain.data.render import decode_response
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.sampling.rollout import Attempt
from posttrain.training.build import TrainerState, prepare
from posttrain.training.step import learning_rate
from posttrain.types import Completion
from training import common_trl_options, kind_of_cpu, prompt_ids

RESULTS = Path(__file__).parent / "results" / "time_to_accuracy.json"
# By task: its recipe, the share of right answers that ends it, and after how many steps it ends without.
TASKS: dict[str, tuple[dict[str, Any], float, int]] = {
    "stories": (
        {
            "extends": "tiny/grpo-demo",
            "train": {"save_every": 1000},
            "eval": {"every": 2},
        },
        0.90,
        60,
    ),
    "sums": (
        {
            "model": {"name": "smollm2-135m", "adapter": {"kind": "lora", "rank": 16}},
            "task": {"name": "sums", "max_value": 20, "size": 4096},
            "prompt": {"template": {"name": "chat", "system": "Answer with the number alone."}},
            "rewards": ["correct"],
            "rollout": {"num_prompts": 8, "group_size": 8, "max_tokens": 12},
            "advantage": "normalized",
            "objective": "grpo",
            "aggregate": "token_mean",
            "train": {"steps": 40, "lr": 5e-4, "warmup_steps": 3, "schedule": "constant", "save_every": 1000},
            "eval": {"tasks": [{"name": "sums", "max_value": 20, "split": "validation"}], "every": 2},
        },
        0.60,
        40,
    ),
}
EVALUATED = {"sums": 128, "stories": 300}  # held-out questions


class Clock:
    """Adds up the CPU-seconds of steps; a step lies between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.total = 0.0
        self.started = time.process_time()

    def start(self) -> None:
        self.started = time.process_time()

    def stop(self) -> None:
        self.total += time.process_time() - self.started


class Curve:
    """Held-out accuracy over the steps of a run, with what was spent until then."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.points: list[dict[str, float]] = []
        self.tokens = 0.0

    def add(self, step: int, accuracy: float, seconds: float) -> bool:
        """Add a point; return whether it is at the target."""
        self.points.append({"step": step, "accuracy": accuracy, "cpu_seconds": seconds, "tokens": self.tokens})
        print(f"  step {step}: {accuracy:.1%}, {seconds:.1f} CPU-seconds, {self.tokens:.0f} tokens", flush=True)
        return accuracy >= self.target


def settings_of(task: str, seed: int) -> dict[str, Any]:
    """Return the recipe of a task as a mapping."""
    settings, _, steps = TASKS[task]
    copied: dict[str, Any] = json.loads(json.dumps(settings))
    copied["train"].setdefault("steps", steps)
    copied["train"]["seed"] = seed
    copied["eval"]["num_examples"] = EVALUATED[task]
    return copied


def read_recipe(task: str, seed: int) -> Recipe:
    """Return the recipe of a task, resolved."""
    return load_recipe(settings_of(task, seed)).resolve()


def run_ours(task: str, seed: int, most_steps: int, target: float) -> Curve:
    """Train as ``posttrain train`` does, records included, and stop at the target."""
    clock = Clock()
    curve = Curve(target)
    rows = read_recipe(task, seed).rollout
    assert rows is not None
    num_rows = rows.num_prompts * rows.group_size

    def on_step(event: Any) -> None:
        clock.stop()
        curve.tokens += event.metrics["completion_length"] * num_rows
        if event.step >= most_steps:
            event.stop()
        clock.start()

    def on_evaluation(event: Any) -> None:
        if curve.add(event.step, event.metrics["accuracy"], clock.total):
            event.stop()
        clock.start()

    with tempfile.TemporaryDirectory() as folder:
        posttrain.train(
            settings_of(task, seed),
            runs_dir=folder,
            run="ours",
            progress=False,
            on_step=on_step,
            on_evaluation=on_evaluation,
        )
    return curve


def reward_of(parts: TrainerState, examples: Sequence[Any], count: Any) -> Any:
    """Return the recipe's rewards in TRL's form; ``count`` gets the number of sampled tokens."""

    def reward(
        prompts: list[str], completion_ids: list[list[int]], item: list[int], ids_of_prompt: list[list[int]], **_: Any
    ) -> list[float]:
        count(sum(len(ids) for ids in completion_ids))
        attempts = []
        for prompt, ids, index, before in zip(prompts, completion_ids, item, ids_of_prompt, strict=True):
            ended = bool(ids) and ids[-1] in parts.answer_ends()
            finish = "stop" if ended else "length"
            completion = Completion(tuple(ids), (0.0,) * len(ids), finish)
            text = decode_response(parts.tokenizer, parts.grader.template, ids, before)
            attempts.append(Attempt(examples[index], prompt, text, completion))
        return [grade.reward for grade in parts.grader.grade(attempts)]

    return reward


def run_trl(task: str, seed: int, most_steps: int, target: float) -> Curve:
    """Train the same weights on the same prompts with TRL, and stop at the target."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    recipe = read_recipe(task, seed)
    parts = prepare(recipe)
    evaluator = parts.evaluator
    assert evaluator is not None
    assert recipe.rollout is not None
    clock = Clock()
    curve = Curve(target)

    def evaluate(step: int) -> bool:
        parts.model.eval()
        with torch.no_grad():
            done = evaluator(step)
        parts.model.train()
        return curve.add(step, done[0].results["accuracy"], clock.total)

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.stop()
            due = state.global_step % recipe.eval.every == 0
            if due and evaluate(state.global_step):
                control.should_training_stop = True

    def count(tokens: int) -> None:
        curve.tokens += tokens

    tokenizer = parts.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    parts.model.generation_config.eos_token_id = sorted(parts.answer_ends())
    source = parts.source
    texts = []
    all_ids = prompt_ids(source.prompts)
    for ids in all_ids:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert tokenizer(text)["input_ids"] == list(ids), f"TRL would read other tokens: {text!r}"
        texts.append(text)
    examples = [source.prompts.task.examples[index] for index in source.prompts.indices]
    columns = {"prompt": texts, "item": list(range(len(texts))), "ids_of_prompt": all_ids}
    rows = recipe.rollout.num_prompts * recipe.rollout.group_size
    scaling = {"centered": "none", "normalized": "group"}[recipe.advantage.name]
    base_lr = recipe.train.lr
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        parts.optimizer, lambda done: learning_rate(recipe.train, min(done + 1, recipe.train.steps)) / base_lr
    )
    with tempfile.TemporaryDirectory() as folder:
        options = common_trl_options(folder, most_steps) | {"learning_rate": base_lr, "seed": seed}
        config = GRPOConfig(
            **options,
            per_device_train_batch_size=rows,
            num_generations=recipe.rollout.group_size,
            max_completion_length=recipe.rollout.max_tokens,
            max_grad_norm=recipe.train.max_grad_norm,
            beta=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            loss_type="dapo",  # the mean over all tokens of the batch
            scale_rewards=scaling,
        )
        trainer = GRPOTrainer(
            model=parts.model,
            reward_funcs=reward_of(parts, examples, count),
            args=config,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            callbacks=[Watch()],
            optimizers=(parts.optimizer, scheduler),
        )
        if not evaluate(0):
            trainer.train()
    return curve


SIDES = {"ours": run_ours, "trl": run_trl}


def run_apart(task: str, side: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a process of its own, and return its curve."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "curve.json"
        command = [sys.executable, __file__, "--task", task, "--side", side, "--seeds", str(seed), "--to", str(place)]
        command += ["--threads", str(arguments.threads)]
        if arguments.steps is not None:
            command += ["--steps", str(arguments.steps)]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(place.read_text())
        return found


def at_target(run: dict[str, Any]) -> dict[str, float] | None:
    """Return the first point at the target, or None."""
    for point in run["points"]:
        if point["accuracy"] >= run["target"]:
            return dict(point)
    return None


def show(task: str, runs: list[dict[str, Any]]) -> None:
    """Print the medians of both sides, and how many times fewer seconds ours took."""
    medians: dict[str, float] = {}
    for side in SIDES:
        reached = [at_target(run) for run in runs if run["task"] == task and run["side"] == side]
        if not reached:
            continue
        if None in reached:
            print(f"{task}, {side}: {reached.count(None)} of {len(reached)} did not reach the target")
            continue
        points = [point for point in reached if point is not None]
        medians[side] = statistics.median(point["cpu_seconds"] for point in points)
        steps = [f"{point['step']:.0f}" for point in points]
        print(f"{task}, {side}: median {medians[side]:.1f} CPU-seconds, after {', '.join(steps)} steps")
    if len(medians) == len(SIDES):
        print(f"{task}: {medians['trl'] / medians['ours']:.1f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), nargs="+", default=list(TASKS))
    parser.add_argument("--side", choices=list(SIDES), nargs="+", default=list(SIDES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, help="end after so many, at the target or not")
    parser.add_argument("--to", type=Path, help="write the curve of one run there, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.to is not None:
        task, side, seed = arguments.task[0], arguments.side[0], arguments.seeds[0]
        _, target, most_steps = TASKS[task]
        if arguments.steps is not None:
            most_steps = arguments.steps
        curve = SIDES[side](task, seed, most_steps, target)
        content = {"task": task, "side": side, "seed": seed, "target": target, "points": curve.points}
        arguments.to.write_text(json.dumps(content))
        return
    runs = []
    if RESULTS.is_file() and arguments.steps is None:
        runs = json.loads(RESULTS.read_text())["runs"]
    for task in arguments.task:
        for seed in arguments.seeds:
            for side in arguments.side:
                print(f"{task}, {side}, seed {seed}", flush=True)
                others = [run for run in runs if (run["task"], run["side"], run["seed"]) != (task, side, seed)]
                runs = [*others, run_apart(task, side, seed, arguments)]
                if arguments.steps is None:
                    about = {"machine": kind_of_cpu(), "threads": arguments.threads}
                    RESULTS.write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n")
        show(task, runs)


if __name__ == "__main__":
    main()
