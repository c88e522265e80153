"""Cost of training and sampling on a CPU, compared with other implementations, in one table.

    make bench-cpu                                # all rows, one thread
    python benchmarks/cpu.py --rows sft,rm --rounds 1 --steps 4

Each row is a process of its own, in which ours and the peer's take turns on the same work (``training.py``,
``training_pairs.py``, ``engine.py``, ``saes.py`` and ``extraction.py`` hold the work). Figures are CPU-seconds
of all threads, medians; ``plain`` is ours without the layers whose backward passes are written by hand. A row whose
peer is not installed says so and has no ratio. Writes results/cpu-KIND.json, KIND being what the processor calls
itself; docs/reference/results.md has a table of each such file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import engine
import extraction
import saes
import torch
import training_pairs

import training
from posttrain.models.load import load_tokenizer
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Completion, Example, Message, Rollout
from training import Seconds, is_installed, kind_of_cpu

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
VARIANTS = {"plain_cpu_seconds": "plain"}


def training_row(work: str, result: dict[str, Any]) -> Row:
    """A row of what a script about training reports."""
    return {
        "work": work,
        "peer": "trl",
        "our_cpu_seconds": result["our_cpu_seconds"],
        "plain_cpu_seconds": result.get("our_plain_cpu_seconds"),
        "peer_cpu_seconds": result.get("trl_cpu_seconds"),
    }


def grpo(rounds: int, steps: int, prompt_tokens: int | None = None) -> Row:
    prompts = "the stories' prompts" if prompt_tokens is None else f"prompts of {prompt_tokens} tokens"
    work = f"GRPO step, 8 × 8 × 64 tokens, {prompts}"
    return training_row(work, training.grpo(rounds, steps, prompt_tokens, not is_installed("trl")))


def sft(rounds: int, steps: int) -> Row:
    return training_row("SFT step, 16 ragged rows", training.sft(rounds, steps, not is_installed("trl")))


def half_billion_sft(rounds: int, _steps: int, lora_rank: int | None = None) -> Row:
    """Both sides hold model, gradients and Adam: 16 GB. One step of each a round, behind one to warm up."""
    model = engine.make_model(shape=engine.HALF_BILLION)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        load_tokenizer("tiny").save_pretrained(folder)
        del model
        result = training.sft(rounds, 1, not is_installed("trl"), folder, rows=4, lora_rank=lora_rank)
    adapter = "" if lora_rank is None else f", LoRA of rank {lora_rank} on all layers"
    return training_row(f"SFT step, 4 ragged rows, 494 million parameters{adapter}", result)


def pairs(rounds: int, steps: int, part: str, work: str, precompute: bool = False) -> Row:
    if not is_installed("trl"):
        recipe, parts = training.our_parts(training_pairs.our_recipe(part, None))
        return training_row(work, training.report(part, training.our_steps(recipe, parts, 1, rounds * steps), [], {}))
    return training_row(work, training_pairs.compare(part, rounds, steps, None, precompute))


def ppo(rounds: int, steps: int) -> Row:
    """Ours alone: TRL's PPO trainer is an experiment of theirs, and does other work per step."""
    settings = {
        "model": {"name": "tiny"},
        "task": {"name": "stories", "size": 512},
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
        "rewards": ["training_reward:digits"],
        "rollout": {"num_prompts": 64, "group_size": 1, "max_tokens": 64},
        "objective": "ppo",
        "train": {"steps": 10_000, "lr": 1e-6},
    }
    recipe, parts = training.our_parts(settings)
    training.our_steps(recipe, parts, 1, 2)
    ours = training.our_steps(recipe, parts, 3, rounds * steps)
    variants = {"plain": training.our_steps(recipe, parts, 3, rounds * steps, fused_layers=False)}
    return training_row("PPO step with its critic, 64 × 64 tokens", training.report("ppo", ours, [], {}, variants)) | {
        "peer": None
    }


def sampling(
    rounds: int,
    _steps: int,
    new_tokens: int = 128,
    group: int = 8,
    ragged: bool = False,
    large: bool = False,
) -> Row:
    """Tokens of completions with their log-probabilities, next to ``generate``; ``large``: of the model of 0.5b."""
    engine.NEW_TOKENS, engine.GROUP = new_tokens, group
    shape, size = (engine.HALF_BILLION, ", 494 million parameters") if large else (engine.SHAPE, "")
    model = engine.make_model(shape=shape | {"max_position_embeddings": max(1024, 2 * new_tokens)})
    ways = {name: options for name, options in engine.WAYS.items() if name == "native"}
    rates = engine.compare(model, engine.STOP_IDS if ragged else (), rounds, ways)
    ours, baseline = rates["native"], rates["transformers_generate"]
    ends = ", answers that end at random" if ragged else ""
    return {
        "work": f"sampling, {8 * group} rows, 64 + {new_tokens} tokens{ends}{size}; per 1,000 tokens",
        "peer": "transformers",
        "our_cpu_seconds": 1e3 / ours["tokens_per_cpu_second"],
        "peer_cpu_seconds": 1e3 / baseline["tokens_per_cpu_second"],
        "ratio": ours["ratio_cpu"],
    }


def dictionary(rounds: int, steps: int, kind: str) -> Row:
    x = torch.randn(65_536, saes.D, generator=torch.Generator().manual_seed(0))
    ours, baseline = [], []
    for _ in range(rounds):
        ours.append(saes.our_step(kind, "fp32", x, steps))
        if is_installed("sae-lens"):
            baseline.append(saes.their_step(kind, x, steps))
    return {
        "work": f"step of a sparse dictionary, {kind}, d = 128, F = 1024, 4,096 rows",
        "peer": "sae-lens",
        "our_cpu_seconds": statistics.median(ours),
        "peer_cpu_seconds": statistics.median(baseline) if baseline else None,
    }


def extract(rounds: int, _steps: int) -> Row:
    """Activations in the middle of a model, next to a whole pass that keeps every layer's."""
    with tempfile.TemporaryDirectory() as folder:
        extraction.RESULTS = Path(folder) / "extraction.json"
        sys.argv = ["extraction.py", "--repeats", str(rounds)]
        extraction.main()
        result = json.loads(extraction.RESULTS.read_text())
    return {
        "work": "activations of layer 8 of 16; per 1,000 tokens",
        "peer": "transformers",
        "our_cpu_seconds": 1e3 / result["tokens_per_second"],
        "peer_cpu_seconds": 1e3 / result["naive_tokens_per_second"],
    }


def grading(rounds: int, _steps: int) -> Row:
    """Numbers in boxes, right and wrong ones, next to math-verify."""
    from posttrain.graders.grading import Submission
    from posttrain.graders.math.grader import math

    texts = [f"So {i} + {i + 1} is $\\boxed{{{2 * i + 1 + i % 2}}}$." for i in range(2_000)]
    submissions = [Submission(text, str(2 * i + 1 + i % 2), str(2 * i + 1)) for i, text in enumerate(texts)]
    ours, baseline = [], []
    for _ in range(rounds):
        ours.append(cpu_seconds(lambda: math(submissions)))
        if is_installed("math-verify"):
            from math_verify import parse, verify

            baseline.append(
                cpu_seconds(lambda: [verify(parse(f"${s.answer}$"), parse(s.text)) for s in submissions[:200]]) * 10
            )
    return {
        "work": "grading 1,000 answers that are numbers",
        "peer": "math-verify",
        "our_cpu_seconds": statistics.median(ours) / 2,
        "peer_cpu_seconds": statistics.median(baseline) / 2 if baseline else None,
    }


def records(rounds: int, _steps: int) -> Row:
    """Rollouts into their database, until they are on the disk."""
    example = Example("sums/train/0", (Message("user", "What is 2 + 3?"),), answer="5")
    completion = Completion(tuple(range(100)), tuple([-0.5] * 100), "stop")
    ours = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, RolloutStore(Path(folder) / "rollouts.db") as store:
            rows = [
                Rollout(example, tuple(range(50)), completion, "It is 5. " * 20, {"correct": 1.0}, 1.0, 1, 0, 0, i)
                for i in range(2_000)
            ]
            before = Seconds.now()
            store.record(rows)
            store.flush()
            ours.append(Seconds.now().since(before).cpu / 2)
    return {
        "work": "recording 1,000 rollouts of 150 tokens",
        "peer": None,
        "our_cpu_seconds": statistics.median(ours),
    }


def start(rounds: int, _steps: int, words: tuple[str, ...]) -> Row:
    """The command line from nothing."""
    command = [sys.executable, "-m", "posttrain", *words]
    ours = []
    for _ in range(rounds + 1):
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        ours.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {"work": f"`posttrain {' '.join(words)}`", "peer": None, "our_cpu_seconds": statistics.median(ours[1:])}


def cpu_seconds(work: Callable[[], Any]) -> float:
    began = Seconds.now()
    work()
    return Seconds.now().since(began).cpu


ROWS: dict[str, Callable[[int, int], Row]] = {
    "grpo": grpo,
    "grpo-32": partial(grpo, prompt_tokens=32),
    "sft": sft,
    "rm": partial(pairs, part="rm", work="reward model step, 16 pairs of ragged rows"),
    "dpo": partial(pairs, part="dpo", work="DPO step, the same pairs"),
    "dpo-precomputed": partial(
        pairs, part="dpo", precompute=True, work="DPO step, the reference computed before on both sides"
    ),
    "ppo": ppo,
    "sampling": sampling,
    "sampling-ragged": partial(sampling, ragged=True),
    "sampling-512-rows": partial(sampling, group=64, new_tokens=64),
    "sampling-1024-tokens": partial(sampling, new_tokens=1024),
    "sampling-0.5b": partial(sampling, new_tokens=16, group=2, large=True),
    "sft-0.5b": half_billion_sft,
    "sft-0.5b-lora": partial(half_billion_sft, lora_rank=16),
    "batchtopk": partial(dictionary, kind="batchtopk"),
    "l1": partial(dictionary, kind="l1"),
    "extraction": extract,
    "grading": grading,
    "records": records,
    "help": partial(start, words=("--help",)),
    "dry-run": partial(start, words=("train", "tiny/grpo", "--dry-run")),
}


def measure(name: str, rounds: int, steps: int, threads: int) -> Row:
    """A row in a process of its own."""
    words = ["--row", name, "--rounds", str(rounds), "--steps", str(steps), "--threads", str(threads)]
    settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=False, env=os.environ | settings
    )
    if done.returncode != 0:
        raise SystemExit(f"row {name} failed:\n{done.stderr[-3000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    if row.get("ratio") is None and row.get("peer_cpu_seconds"):
        row["ratio"] = row["peer_cpu_seconds"] / row["our_cpu_seconds"]
    return row


def line(row: Row) -> str:
    baseline, ratio = row.get("peer_cpu_seconds"), row.get("ratio")
    theirs = "no peer" if row["peer"] is None else f"{row['peer']} is not installed"
    if baseline:
        theirs = f"{row['peer']} {baseline:.4g} s, {ratio:.2f} times as fast"
    costs = [f"{row['our_cpu_seconds']:.4g} s"]
    costs += [f"{what} {row[key]:.4g} s" for key, what in VARIANTS.items() if row.get(key)]
    return f"{row['work']}: {', '.join(costs)}; {theirs}"


def write(target: Path, kind: str, table: dict[str, Row]) -> None:
    """Keep the rows that there are, in the order of ``ROWS``."""
    packages = ("torch", "transformers", "trl", "sae-lens", "math-verify")
    result = {
        "cpu": kind,
        "unit": "CPU-seconds",
        "versions": {name: version(name) for name in packages if is_installed(name)},
        "rows": {name: table[name] for name in ROWS if name in table},
    }
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="some of " + ", ".join(ROWS))
    parser.add_argument("--row", choices=list(ROWS), help="this row in this process; its figures as a line of JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.row:
        torch.set_num_threads(arguments.threads)
        logging.disable(logging.WARNING)
        with redirect_stdout(sys.stderr):
            row = ROWS[arguments.row](arguments.rounds, arguments.steps)
        print(json.dumps(row))
        return
    names = arguments.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise SystemExit(f"--rows: there is no {unknown[0]!r}; there are {', '.join(ROWS)}")
    kind = kind_of_cpu()
    target = RESULTS / f"cpu-{re.sub(r'[^a-z0-9]+', '-', kind.lower()).strip('-')}.json"
    table = json.loads(target.read_text())["rows"] if target.is_file() else {}
    about = {"rounds": arguments.rounds, "threads": arguments.threads}
    for name in names:
        table[name] = measure(name, arguments.rounds, arguments.steps, arguments.threads) | about
        print(line(table[name]), flush=True)
        write(target, kind, table)  # at once: all rows take long


if __name__ == "__main__":
    main()
