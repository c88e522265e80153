"""SmolLM2-135M compared with its peers: a GRPO and an SFT step with TRL, sampling with ``generate``.

    pip install -e '.[bench]'
    python benchmarks/known_model.py                                  # everything, one thread and two
    python benchmarks/known_model.py --rows sft --threads 1 --sides ours

Every figure is of a process of its own, so that peak memory is that of one side; the first step of a process warms up
and is not counted. Seconds are CPU-seconds of all threads, and by the clock. GRPO: 16 prompts × 8 answers of 48 tokens,
one update of all weights, TRL's in two halves. SFT: 16 ragged rows. Sampling: 48 tokens each, with log-probabilities.
Results go to benchmarks/results/known_model.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_pairs import peak_megabytes

from posttrain.randomness import derive_key
from posttrain.sampling.base import Sampling
from training import Seconds, StepClock, common_trl_options, kind_of_cpu, our_parts, our_steps, prompt_ids

RESULTS = Path(__file__).parent / "results" / "known_model.json"
MODEL = "smollm2-135m"
PROMPTS = 16
GROUP = 8
NEW_TOKENS = 48
ROWS = ("grpo", "sft", "sampling-16", "sampling-64")
PEERS = {"grpo": "TRL", "sft": "TRL", "sampling-16": "generate", "sampling-64": "generate"}


def sampled_recipe(model: str, num_prompts: int, group: int) -> dict[str, Any]:
    """Return the recipe of a step whose answers all have ``NEW_TOKENS`` tokens."""
    return {
        "model": {"name": model},
        "task": {"name": "sums", "size": 256},
        "prompt": {"template": {"name": "chat", "system": "Answer with the number alone."}},
        "rewards": ["training_reward:digits"],
        "rollout": {"num_prompts": num_prompts, "group_size": group, "max_tokens": NEW_TOKENS},
        "objective": "grpo",
        "aggregate": "token_mean",
        "train": {"steps": 10_000, "lr": 1e-6},
    }


def supervised_recipe(model: str) -> dict[str, Any]:
    """Return the recipe of an SFT step on ragged rows."""
    return {
        "model": {"name": model},
        "task": {"name": "stories", "size": 512, "min_steps": 1, "max_steps": 6},
        "prompt": {"template": {"name": "chat"}},
        "data": {"batch_size": 16, "train_on": "all"},
        "objective": "cross_entropy",
        "train": {"steps": 10_000, "lr": 1e-6},
    }


def our_grpo(model: str, steps: int) -> tuple[list[Seconds], float]:
    """Return the seconds of our GRPO steps after the first, and the tokens of the answers of one."""
    recipe, parts = our_parts(sampled_recipe(model, PROMPTS, GROUP))
    parts.source.sampling = Sampling(max_tokens=NEW_TOKENS, stop_ids=frozenset())
    return our_steps(recipe, parts, 1, steps + 1)[1:], float(PROMPTS * GROUP * NEW_TOKENS)


def trl_grpo(model: str, steps: int) -> tuple[list[Seconds], float]:
    """Return the seconds of TRL's GRPO steps after the first, on the same prompts."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    _, parts = our_parts(sampled_recipe(model, PROMPTS, GROUP))
    tokenizer = parts.tokenizer
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompt_ids(parts.source.prompts)]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def digits(completions: list[str], **_: Any) -> list[float]:
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **common_trl_options(folder, steps + 1),
            # In two halves: with all rows at once it takes more than 19 GB.
            per_device_train_batch_size=PROMPTS * GROUP // 2,
            gradient_accumulation_steps=2,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            beta=0.0,
            temperature=1.0,
            generation_kwargs={"min_new_tokens": NEW_TOKENS},
        )
        trainer = GRPOTrainer(
            model=parts.model,
            reward_funcs=digits,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    return clock.seconds[1:], float(PROMPTS * GROUP * NEW_TOKENS)


def our_sft(model: str, steps: int) -> tuple[list[Seconds], float]:
    """Return the seconds of our SFT steps after the first, and the mean tokens of one."""
    recipe, parts = our_parts(supervised_recipe(model))
    lengths = [len(row.ids) for unit in parts.source.units for row in unit]
    return our_steps(recipe, parts, 1, steps + 1)[1:], 16 * statistics.fmean(lengths)


def trl_sft(model: str, steps: int) -> tuple[list[Seconds], float]:
    """Return the seconds of TRL's SFT steps after the first, on the same rows."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    _, parts = our_parts(supervised_recipe(model))
    ids = [row.ids for unit in parts.source.units for row in unit]
    parts.tokenizer.pad_token = parts.tokenizer.pad_token or parts.tokenizer.eos_token
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        options = common_trl_options(folder, steps + 1)
        trainer = SFTTrainer(
            model=parts.model,
            args=SFTConfig(**options, per_device_train_batch_size=16, max_length=1024),
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            processing_class=parts.tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    return clock.seconds[1:], 16 * statistics.fmean(len(row) for row in ids)


def our_sampling(model: str, steps: int, rows: int) -> tuple[list[Seconds], float]:
    """Return the seconds of sampling ``rows`` answers in groups of 8, and their tokens."""
    _, parts = our_parts(sampled_recipe(model, rows // GROUP, GROUP))
    sampling = Sampling(max_tokens=NEW_TOKENS, stop_ids=frozenset())
    prompts = prompt_ids(parts.source.prompts)[: rows // GROUP]
    seconds = []
    for repeat in range(steps + 1):
        keys = [[derive_key(repeat, "benchmark", i, j) for j in range(GROUP)] for i in range(len(prompts))]
        started = Seconds.now()
        parts.engine.generate(prompts, keys, sampling)
        seconds.append(Seconds.now().since(started))
    return seconds[1:], float(rows * NEW_TOKENS)


def peer_sampling(model: str, steps: int, rows: int) -> tuple[list[Seconds], float]:
    """Return the seconds of ``generate`` with log-probabilities, on the same prompts padded on the left."""
    _, parts = our_parts(sampled_recipe(model, rows // GROUP, GROUP))
    prompts = prompt_ids(parts.source.prompts)[: rows // GROUP]
    width = max(len(ids) for ids in prompts)
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    real = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    seconds = []
    for repeat in range(steps + 1):
        torch.manual_seed(repeat)
        started = Seconds.now()
        with torch.no_grad():
            output = parts.model.generate(
                padded,
                attention_mask=real,
                do_sample=True,
                top_k=0,
                num_return_sequences=GROUP,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            new = output.sequences[:, width:]
            torch.stack(output.logits, 1).log_softmax(-1).gather(-1, new[..., None])
        seconds.append(Seconds.now().since(started))
    return seconds[1:], float(rows * NEW_TOKENS)


Measure = Callable[[str, int], tuple[list[Seconds], float]]
SIDES: dict[str, dict[str, Measure]] = {
    "ours": {
        "grpo": our_grpo,
        "sft": our_sft,
        "sampling-16": lambda model, steps: our_sampling(model, steps, 16),
        "sampling-64": lambda model, steps: our_sampling(model, steps, 64),
    },
    "peer": {
        "grpo": trl_grpo,
        "sft": trl_sft,
        "sampling-16": lambda model, steps: peer_sampling(model, steps, 16),
        "sampling-64": lambda model, steps: peer_sampling(model, steps, 64),
    },
}


def run_here(row: str, side: str, threads: int, model: str, steps: int) -> dict[str, Any]:
    """Measure one row of one side in this process."""
    torch.set_num_threads(threads)
    seconds, tokens = SIDES[side][row](model, steps)
    cpu = statistics.median(one.cpu for one in seconds)
    return {
        "row": row,
        "side": side,
        "threads": threads,
        "cpu_seconds": cpu,
        "seconds": statistics.median(one.wall for one in seconds),
        "tokens_per_cpu_second": tokens / cpu,
        "peak_megabytes": peak_megabytes(),
        "steps": len(seconds),
    }


def run_apart(row: str, side: str, threads: int, model: str, steps: int) -> dict[str, Any]:
    """Measure one row of one side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "found.json"
        words = ["--rows", row, "--sides", side, "--threads", str(threads), "--model", model, "--steps", str(steps)]
        subprocess.run([sys.executable, __file__, *words, "--to", str(place)], check=True)
        found: dict[str, Any] = json.loads(place.read_text())
        return found


def show(measured: list[dict[str, Any]]) -> None:
    """Print every figure, and how many times fewer CPU-seconds ours takes."""
    by_place = {(one["row"], one["threads"], one["side"]): one for one in measured}
    for (row, threads, side), one in by_place.items():
        line = f"{row}, {threads} thread(s), {side}: {one['cpu_seconds']:.2f} CPU-seconds, {one['seconds']:.2f} s"
        line += f", {one['tokens_per_cpu_second']:.0f} tokens a CPU-second, peak {one['peak_megabytes']:.0f} MB"
        peer = by_place.get((row, threads, "peer"))
        if side == "ours" and peer is not None:
            line += f"; {peer['cpu_seconds'] / one['cpu_seconds']:.2f} times {PEERS[row]}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=ROWS, nargs="+", default=list(ROWS))
    parser.add_argument("--sides", choices=list(SIDES), nargs="+", default=list(SIDES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", default=MODEL, help="another model; writes no result")
    parser.add_argument("--to", type=Path, help="measure one row of one side in this process, and write it there")
    arguments = parser.parse_args()
    model, steps = str(arguments.model), int(arguments.steps)
    if arguments.to is not None:
        found = run_here(arguments.rows[0], arguments.sides[0], arguments.threads[0], model, steps)
        arguments.to.write_text(json.dumps(found))
        return
    measured: list[dict[str, Any]] = []
    is_kept = model == MODEL
    if is_kept and RESULTS.is_file():
        measured = json.loads(RESULTS.read_text())["measured"]
    for threads in arguments.threads:
        for row in arguments.rows:
            for side in arguments.sides:
                found = run_apart(row, side, threads, model, steps)
                same = (found["row"], found["side"], found["threads"])
                measured = [one for one in measured if (one["row"], one["side"], one["threads"]) != same]
                measured.append(found)
                show([found])
                if is_kept:
                    RESULTS.write_text(json.dumps({"machine": kind_of_cpu(), "measured": measured}, indent=1) + "\n")
    print("all:")
    show(measured)


if __name__ == "__main__":
    main()
