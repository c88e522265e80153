"""Training steps next to TRL's trainers, on the same work, alternating in one process.

    pip install -e '.[bench]'
    python benchmarks/training.py            # both parts; --part grpo or --part sft for one

GRPO: 8 prompts × 8 completions × 64 new tokens on the embedded model (random answers do not end, so
both sides pay for every token), one optimizer step. SFT: rows of ragged length. Medians over steps, by the
clock and in CPU-seconds; ratios are what counts, since the machine's speed drifts. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posttrain.models.forward import fused
from posttrain.models.load import load_model
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.recipes.sections import ModelSection
from posttrain.training.build import TrainerState, prepare
from posttrain.training.step import accumulate, apply_update

RESULTS = Path(__file__).parent / "results"
PROMPTS, GROUP, NEW_TOKENS = 8, 8, 64


def our_parts(recipe: dict[str, Any]) -> tuple[Recipe, TrainerState]:
    resolved = validate_recipe(recipe).resolve()
    return resolved, prepare(resolved)


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


class Seconds(NamedTuple):
    """Seconds of a step: by the clock, and of all threads of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Seconds) -> Seconds:
        return Seconds(self.wall - start.wall, self.cpu - start.cpu)


def our_steps(
    recipe: Recipe, parts: TrainerState, first: int, count: int, *, fused_layers: bool = True
) -> list[Seconds]:
    """Return the seconds of each optimizer step, sampling and grading included; ``fused_layers`` False: plain ones."""
    seconds = []
    fused.ENABLED = fused_layers
    for step in range(first, first + count):
        started = Seconds.now()
        draw = parts.source(step)
        loss, _ = accumulate(parts.method, draw.batch, recipe.train)
        apply_update(parts.optimizer, [p for _, p in parts.parameters], 1e-6, 1.0, loss, step)
        seconds.append(Seconds.now().since(started))
    fused.ENABLED = True
    return seconds


class StepClock:
    """Notes what every TRL step took (added to a trainer as a callback)."""

    def __new__(cls) -> Any:
        from transformers import TrainerCallback

        class Clock(TrainerCallback):
            def __init__(self) -> None:
                self.seconds: list[Seconds] = []

            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                self.started = Seconds.now()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                self.seconds.append(Seconds.now().since(self.started))

        return Clock()


def common_trl_options(folder: str, steps: int) -> dict[str, Any]:
    """Return the options with which TRL is fastest on a CPU: fp32, no gradient checkpointing, no reports."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1000,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def prompt_ids(prompts: Any) -> list[list[int]]:
    """Return the ids of all prompts of a source, which encodes them when they are drawn."""
    return [list(prompts.draw(place).ids) for place in range(len(prompts.indices))]


class CutPrompts:
    """The prompts of a source that are long enough, cut to ``length`` tokens, in turn."""

    def __init__(self, prompts: Any, length: int) -> None:
        self.whole = [prompts.draw(place) for place in range(len(prompts.indices))]
        self.long = [drawn for drawn in self.whole if len(drawn.ids) >= length]
        self.length = length
        self.limit = prompts.limit
        self.indices = prompts.indices
        self.replaced: set[int] = set()

    def draw(self, place: int) -> Any:
        """Return the prompt at ``place``, cut."""
        drawn = self.long[place % len(self.long)]
        return replace(drawn, ids=drawn.ids[: self.length])


def grpo_parts(prompt_tokens: int | None) -> tuple[Recipe, TrainerState]:
    """Return the recipe and components of GRPO's step; with ``prompt_tokens`` all prompts have that length."""
    recipe, parts = our_parts(
        {
            "model": {"name": "tiny"},
            "task": {"name": "stories", "size": 512},
            "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
            "rewards": ["training_reward:digits"],
            "rollout": {"num_prompts": PROMPTS, "group_size": GROUP, "max_tokens": NEW_TOKENS},
            "objective": "grpo",
            "aggregate": "token_mean",
            "train": {"steps": 10_000, "lr": 1e-6},
        }
    )
    source = parts.source
    if prompt_tokens is not None:  # the same prompts on both sides
        source.prompts = CutPrompts(source.prompts, prompt_tokens)
    source.sampling = type(source.sampling)(max_tokens=NEW_TOKENS, stop_ids=frozenset())
    return recipe, parts


def grpo(rounds: int, steps: int, prompt_tokens: int | None, ours_alone: bool = False) -> dict[str, Any]:
    """One GRPO step: generate, grade, update."""
    recipe, parts = grpo_parts(prompt_tokens)
    source = parts.source
    info = {"prompt_tokens_mean": statistics.fmean(len(ids) for ids in prompt_ids(source.prompts))}
    if ours_alone:
        return report("grpo", our_steps(recipe, parts, 1, rounds * steps), [], info)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    loaded = load_model(ModelSection(name="tiny"), seed=0)
    tokenizer = loaded.tokenizer
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompt_ids(source.prompts)]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def digits(completions: list[str], **_: Any) -> list[float]:
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    ours: list[Seconds] = []
    theirs: list[Seconds] = []
    plain: list[Seconds] = []
    with tempfile.TemporaryDirectory() as folder:
        options = common_trl_options(folder, steps + 1)
        config = GRPOConfig(
            **options,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            beta=0.0,
            temperature=1.0,
            generation_kwargs={"min_new_tokens": NEW_TOKENS},
        )
        our_steps(recipe, parts, 1, 2)
        for round_index in range(rounds):
            clock = StepClock()
            trainer = GRPOTrainer(
                model=loaded.model,
                reward_funcs=digits,
                args=config,
                train_dataset=Dataset.from_dict({"prompt": texts}),
                processing_class=tokenizer,
                callbacks=[clock],
            )
            trainer.train()
            theirs += clock.seconds[1:]  # the first step warms up
            ours += our_steps(recipe, parts, 10 + round_index * steps, steps)
            plain += our_steps(recipe, parts, 10 + round_index * steps, steps, fused_layers=False)
    return report("grpo", ours, theirs, info, {"plain": plain})


def sft(
    rounds: int,
    steps: int,
    ours_alone: bool = False,
    model: str = "tiny",
    rows: int = 16,
    lora_rank: int | None = None,
) -> dict[str, Any]:
    """One SFT step on ragged rows; ``lora_rank``: of an adapter on every linear layer, which alone is trained."""
    adapter = {} if lora_rank is None else {"adapter": {"rank": lora_rank}}
    settings = {
        "model": {"name": model} | adapter,
        "task": {"name": "stories", "size": 2048, "min_steps": 1, "max_steps": 6},
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
        "data": {"batch_size": rows, "train_on": "all"},
        "objective": "cross_entropy",
        "train": {"steps": 10_000, "lr": 1e-6},
    }
    recipe, parts = our_parts(settings)
    ids = [row.ids for unit in parts.source.units for row in unit]
    lengths = [len(row) for row in ids]
    info = {"tokens_per_row_mean": statistics.fmean(lengths), "tokens_per_row_stdev": statistics.stdev(lengths)}
    if ours_alone:
        return report("sft", our_steps(recipe, parts, 1, rounds * steps), [], info)
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    lora = None if lora_rank is None else LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules="all-linear")
    loaded = load_model(ModelSection(name=model), seed=0)
    model_of_baseline = loaded.model
    loaded.tokenizer.pad_token = loaded.tokenizer.pad_token or loaded.tokenizer.eos_token
    dataset = Dataset.from_dict({"input_ids": ids})
    ours: list[Seconds] = []
    theirs: list[Seconds] = []
    plain: list[Seconds] = []
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(**common_trl_options(folder, steps + 1), per_device_train_batch_size=rows, max_length=1024)
        our_steps(recipe, parts, 1, 2)
        for round_index in range(rounds):
            clock = StepClock()
            trainer = SFTTrainer(
                model=model_of_baseline,
                args=config,
                train_dataset=dataset,
                processing_class=loaded.tokenizer,
                callbacks=[clock],
                peft_config=lora if round_index == 0 else None,  # afterwards the model has it
            )
            trainer.train()
            model_of_baseline = trainer.model
            theirs += clock.seconds[1:]
            ours += our_steps(recipe, parts, 10 + round_index * steps, steps)
            plain += our_steps(recipe, parts, 10 + round_index * steps, steps, fused_layers=False)
    tokens = rows * statistics.fmean(lengths)
    info |= {
        "our_tokens_per_second": tokens / median(ours).wall,
        "trl_tokens_per_second": tokens / median(theirs).wall,
    }
    return report("sft", ours, theirs, info, {"plain": plain})


def median(steps: Sequence[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(one) for one in zip(*steps, strict=True)))


def kind_of_cpu() -> str:
    """Return the name of the processor, and the widest vectors that torch uses on it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def report(
    name: str,
    ours: list[Seconds],
    theirs: list[Seconds],
    info: dict[str, float],
    variants: Mapping[str, Sequence[Seconds]] | None = None,
) -> dict[str, Any]:
    """The medians, and their ratios; ``variants`` of our steps: ``plain`` without the hand-written layers."""
    our, baseline = median(ours), median(theirs) if theirs else None
    extra: dict[str, Any] = {}
    if baseline is not None:
        extra = {"trl_seconds": baseline.wall, "trl_cpu_seconds": baseline.cpu}
        extra |= {"ratio": baseline.wall / our.wall, "ratio_cpu": baseline.cpu / our.cpu}
    extra |= {f"our_{what}_cpu_seconds": median(steps).cpu for what, steps in (variants or {}).items() if steps}
    result = {
        "part": name,
        "our_seconds": our.wall,
        "our_cpu_seconds": our.cpu,
        **extra,
        "num_steps": len(ours),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", *(("trl",) if theirs else ()))},
        "machine": kind_of_cpu(),
        **info,
    }
    print(json.dumps(result, indent=2))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["grpo", "sft", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=None)
    parser.add_argument("--ours", action="store_true", help="time our side alone, without TRL; writes no result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    results = []
    if args.part in ("grpo", "all"):
        results.append(grpo(args.rounds, args.steps, args.prompt_tokens, args.ours))
    if args.part in ("sft", "all"):
        results.append(sft(args.rounds, args.steps, args.ours))
    if args.ours:
        return
    RESULTS.mkdir(exist_ok=True)
    for result in results:
        (RESULTS / f"training_{result['part']}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
