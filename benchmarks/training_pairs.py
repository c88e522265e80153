"""Reward models and DPO next to TRL's RewardTrainer and DPOTrainer: the same rows, the same tiny model.

    pip install -e '.[bench]'
    python benchmarks/training_pairs.py                       # both parts, stories' pairs
    python benchmarks/training_pairs.py --pairs-file hh.jsonl.gz   # dialogues of HH-RLHF instead

Steps of the two sides alternate in one process; medians of pairs per second. TRL's DPO is timed as it
comes (the reference runs in every step) and with its reference computed before training, as ours is; the
time that computing it takes is not in either figure then. Peak memory is that of a process of its own for
each side, which does nothing else; what each has after loading is given as well.
Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from training import RESULTS, Seconds, StepClock, common_trl_options, our_parts, our_steps, report

PAIRS = 16


def our_recipe(part: str, pairs_file: str | None) -> dict[str, Any]:
    """The recipe of one part: full weights, AdamW, all pairs of a batch in one micro-batch where they fit."""
    stories = {"name": "stories", "responses": "pair", "size": 2048, "min_steps": 1, "max_steps": 6}
    task = stories if pairs_file is None else {"name": "hh_rlhf", "path": pairs_file}
    template = {"name": "r1_zero", "preamble": ""} if pairs_file is None else {"name": "dialogue"}
    return {
        "model": {"name": "tiny"},
        "task": task,
        "prompt": {"template": template},
        "data": {"batch_size": PAIRS, "max_length": 512},
        "objective": {"rm": "bradley_terry", "dpo": "dpo"}[part],
        "aggregate": "unit_mean",
        "eval": {"every": 0},
        "train": {"steps": 10_000, "lr": 1e-6},
    }


def trl_dataset(part: str, source: Any) -> Any:
    """Our rows, already tokenized, in the columns that TRL's collators read."""
    from datasets import Dataset

    if part == "rm":
        return Dataset.from_dict(
            {"chosen_ids": [u[0].ids for u in source.units], "rejected_ids": [u[1].ids for u in source.units]}
        )
    prompts = [u[0].prompt_length for u in source.units]
    return Dataset.from_dict(
        {
            "prompt_ids": [u[0].ids[:p] for u, p in zip(source.units, prompts, strict=True)],
            "chosen_ids": [u[0].ids[p:] for u, p in zip(source.units, prompts, strict=True)],
            "rejected_ids": [u[1].ids[p:] for u, p in zip(source.units, prompts, strict=True)],
        }
    )


def trl_trainer(part: str, dataset: Any, folder: str, steps: int, clock: Any, precompute: bool) -> Any:
    """TRL's trainer on a fresh tiny model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    from posttrain.models.load import load_tokenizer
    from posttrain.models.sources import TINY

    tokenizer = load_tokenizer("tiny")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options = common_trl_options(folder, steps) | {"per_device_train_batch_size": PAIRS, "max_length": None}
    shared = {"train_dataset": dataset, "processing_class": tokenizer, "callbacks": [clock]}
    if part == "rm":
        model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
        model.config.pad_token_id = tokenizer.pad_token_id
        return RewardTrainer(model=model, args=RewardConfig(**options), **shared)

    class OnTokens(DPOTrainer):  # type: ignore[misc]
        """Takes rows that are tokenized already, which TRL's own preparation refuses."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return OnTokens(model=model, args=DPOConfig(**options, precompute_ref_log_probs=precompute), **shared)


def compare(part: str, rounds: int, steps: int, pairs_file: str | None, precompute: bool) -> dict[str, Any]:
    """Steps of both sides in turns."""
    recipe, parts = our_parts(our_recipe(part, pairs_file))
    dataset = trl_dataset(part, parts.source)
    ours: list[Seconds] = []
    theirs: list[Seconds] = []
    plain: list[Seconds] = []
    with tempfile.TemporaryDirectory() as folder:
        our_steps(recipe, parts, 1, 2)
        for index in range(rounds):
            clock = StepClock()
            trl_trainer(part, dataset, folder, steps + 1, clock, precompute).train()
            theirs += clock.seconds[1:]  # the first step warms up
            ours += our_steps(recipe, parts, 10 + index * steps, steps)
            plain += our_steps(recipe, parts, 10 + index * steps, steps, fused_layers=False)
    lengths = [len(row.ids) for unit in parts.source.units for row in unit]
    result = report(f"{part}_precomputed" if precompute else part, ours, theirs, {}, {"plain": plain})
    return result | {
        "our_pairs_per_second": PAIRS / result["our_seconds"],
        "trl_pairs_per_second": PAIRS / result["trl_seconds"],
        "tokens_per_row_mean": sum(lengths) / len(lengths),
        "rows": "stories" if pairs_file is None else "hh_rlhf",
    }


def peak_megabytes() -> float:
    """The most that this process has held; ``getrusage`` would count what its parent held when it started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def one_side(part: str, side: str, steps: int, pairs_file: str | None) -> None:
    """Train one side alone and print its peak memory, before and after."""
    recipe, parts = our_parts(our_recipe(part, pairs_file))
    if side == "trl":
        dataset = trl_dataset(part, parts.source)
        del parts
        with tempfile.TemporaryDirectory() as folder:
            trainer = trl_trainer(part, dataset, folder, steps, StepClock(), False)
            before = peak_megabytes()
            trainer.train()
    else:
        before = peak_megabytes()
        our_steps(recipe, parts, 1, steps)
    print(json.dumps({"loaded_megabytes": before, "peak_megabytes": peak_megabytes()}))


def memory(part: str, steps: int, pairs_file: str | None) -> dict[str, Any]:
    """Peak memory of either side, each in a process of its own."""
    found: dict[str, Any] = {}
    for side in ("ours", "trl"):
        command = [sys.executable, __file__, "--part", part, "--side", side, "--steps", str(steps)]
        command += ["--threads", str(torch.get_num_threads())]
        command += [] if pairs_file is None else ["--pairs-file", pairs_file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"the process for {part}/{side} failed:\n{done.stderr[-2000:]}")
        found |= {f"{side}_{k}": v for k, v in json.loads(done.stdout.strip().splitlines()[-1]).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["rm", "dpo", "all"], default="all")
    parser.add_argument("--side", choices=["ours", "trl"], help="train this side alone and print its peak memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs-file", help="dialogues of HH-RLHF instead of stories' pairs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    if args.side is not None:
        one_side(args.part, args.side, args.steps, args.pairs_file)
        return
    rows = "stories" if args.pairs_file is None else "hh_rlhf"
    RESULTS.mkdir(exist_ok=True)
    for part in ("rm", "dpo") if args.part == "all" else (args.part,):
        result = compare(part, args.rounds, args.steps, args.pairs_file, False)
        result["memory"] = memory(part, 3 * args.steps, args.pairs_file)
        if part == "dpo":
            result["precomputed"] = compare(part, args.rounds, args.steps, args.pairs_file, True)
        print(json.dumps(result, indent=2))
        name = f"training_{part}_{rows}_{args.threads}.json"
        (Path(RESULTS) / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
