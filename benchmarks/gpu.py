"""Cost of training and sampling on one GPU: tokens per second, model FLOPs use, memory, launches.

    python benchmarks/gpu.py                      # all rows
    python benchmarks/gpu.py --rows sft-0.6b,decode-64
    python benchmarks/gpu.py --smallest           # the same code on a model of 0.1 million parameters, on any machine

Models have random weights and the shapes of Qwen3 (0.6B, 8B, 14B) and Qwen2.5 (1.5B). ``sft`` and ``rl`` are
optimizer steps alone, over batches made before: rows of 2,048 tokens; groups of 8 answers of 1,024 tokens after one
prompt of 512. What ends in ``-8k`` or ``-16k`` has rows of that length, as prime-rl's published figures have (26.0k
tokens/s for SFT, 11.9k for RL and 13.3k with LoRA on one H100, February 2026). Products in bf16 over fp32 weights;
``-lora`` trains an adapter over bf16 weights. ``grpo`` is a whole step: sample, grade, score, update. ``decode``
samples 256 tokens a row, and the same by vLLM where that is installed; ``generate`` by transformers; a step draws one
token for every row.

``model_flops`` are those of Chowdhery et al. 2022 (arXiv 2204.02311, appendix B): forward 2 for each weight of a
product and token, and attention; backward twice that, with an adapter once, for the base gets no gradient. What is
computed again does not count, a shared prompt counts once, and so do the pairs of tokens that causal attention has.
Their share is of the rate that this device reaches with products of 8,192 x 8,192 matrices, measured first in every
row, and of 989 TFLOP/s, the data sheet's number for an H100 or H200, by which others divide.

Each row is a process of its own; one that fails is kept with its error. Writes
results/gpu-KIND.json (or $OUT), of which docs/reference/results.md has a table; ``--smallest`` writes
smallest-gpu.json, which has none.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.errors import UsageError
from posttrain.models.forward.predictions import gpu_memory_of
from posttrain.models.load import load_tokenizer
from posttrain.randomness import derive_key
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.training.build import TrainerState
from posttrain.training.memory import memory_of
from posttrain.training.step import accumulate, apply_update
from posttrain.types import Batch, Sample, collate
from training import is_installed, our_parts

RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
Row = dict[str, Any]
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
VOCABULARY, GROUP = 151_936, 8
DATA_SHEET_RATE = 989e12  # dense bf16 products of an H100 or H200, FLOP/s
PROFILED_TOKENS = 64  # of each row
# Architecture, the numbers of KEYS, the size of a head, and whether the LM head is the embedding.
SHAPES: dict[str, tuple[str, tuple[int, ...], int, bool]] = {
    "0.6b": ("qwen3", (1024, 28, 16, 8, 3072), 128, True),
    "1.5b": ("qwen2", (1536, 28, 12, 2, 8960), 128, True),
    "8b": ("qwen3", (4096, 36, 32, 8, 12_288), 128, False),
    "14b": ("qwen3", (5120, 40, 40, 8, 17_408), 128, False),
    "smallest": ("qwen3", (64, 2, 4, 2, 96), 16, True),
}
# What a launch, a graph's launch and a wait of the host are called in a profile of CUDA.
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def config_of(size: str) -> Any:
    """The configuration of a model of ``SHAPES`` (``smallest``: a vocabulary of 768)."""
    architecture, numbers, head, tied = SHAPES[size]
    vocabulary = 768 if size == "smallest" else VOCABULARY
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(
        architecture, **dict(zip(KEYS, numbers, strict=True)), **ends, head_dim=head, vocab_size=vocabulary,
        tie_word_embeddings=tied, max_position_embeddings=32_768,
    )  # fmt: skip


def make_model(size: str) -> Any:
    """Random weights in bf16."""
    torch.manual_seed(0)
    with device():
        return AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16).eval()


def seconds_of(work: Callable[[], Any]) -> float:
    """By the clock, until the device is done."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def measured_rate(width: int = 8192) -> float:
    """FLOP/s of bf16 products of square matrices, the median of 9."""
    width = width if torch.cuda.is_available() else 256
    a, b = (torch.randn(width, width, device=device()).bfloat16() for _ in range(2))
    torch.mm(a, b)
    return 2 * width**3 / statistics.median(seconds_of(lambda: torch.mm(a, b)) for _ in range(9))


def make_batch(vocabulary: int, groups: int, group: int, prompt: int, answer: int) -> Batch:
    """``groups`` of ``group`` rows that share a prompt, or rows without prompts, whose tokens are all trained on."""
    draw = torch.Generator().manual_seed(0)
    samples = []
    for index in range(groups):
        shared = torch.randint(0, 512, (prompt,), generator=draw).tolist()
        for member in range(group):
            own = torch.randint(0, 512, (answer,), generator=draw).tolist()
            mask = [False] * max(1, prompt) + [True] * (answer - (prompt == 0))
            fields = {
                "advantages": [0.0] * prompt + [1.0 if member % 2 else -1.0] * answer,
                "old_logprobs": [0.0] * prompt + [-math.log(vocabulary)] * answer,
            }
            of_group = (index, prompt, fields) if prompt else ()
            samples.append(Sample(shared + own, mask, *of_group))
    return collate(samples)


def model_flops(config: Any, groups: int, group: int, prompt: int, answer: int, backward: float) -> float:
    """Return the FLOPs of one step; ``backward``: FLOPs of the backward pass as a multiple of the forward pass's."""
    width, heads, pairs = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head = config.head_dim if getattr(config, "head_dim", None) else width // heads
    block = 2 * width * head * (heads + pairs) + 3 * width * config.intermediate_size
    per_token = 2 * config.num_hidden_layers * block
    trained = group * answer
    seen = prompt * (prompt + 1) / 2 + group * (answer * prompt + answer * (answer + 1) / 2)  # pairs of tokens
    attention = 4 * config.num_hidden_layers * heads * head * seen
    forward = per_token * (prompt + trained) + 2 * width * config.vocab_size * trained + attention
    return groups * forward * (1 + backward)


# Rows of a batch: groups, rows of a group, tokens of their prompt, tokens of each answer.
Shape = tuple[int, int, int, int]
SHORT_ROWS: dict[str, Shape] = {"sft": (8, 1, 0, 2048), "rl": (2, GROUP, 512, 1024)}
ROWS_OF_8K: Shape = (2, 1, 0, 8192)
ROWS_OF_16K: Shape = (2, 1, 512, 15_872)


def recipe_of(kind: str, folder: str, lora: bool, checkpointing: bool, shape: Shape) -> Row:
    """Return a recipe whose batches have this shape; its tokens are never read."""
    groups, group, prompt, answer = shape
    settings: Row = {
        "model": {"name": folder} | ({"dtype": "bf16", "adapter": {"rank": 32}} if lora else {}),
        "task": {"name": "stories", "size": 64},
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}, "max_prompt_tokens": max(prompt, 64)},
        "train": {"steps": 100, "lr": 1e-6, "precision": "bf16", "gradient_checkpointing": checkpointing},
    }
    if kind == "sft":
        data = {"batch_size": groups, "train_on": "all", "max_length": max(answer, 512)}
        return settings | {"objective": "cross_entropy", "data": data}
    groups, group = (groups, group) if group > 1 else (groups // 2, 2)  # the fewest answers that GRPO compares
    rollout = {"num_prompts": groups, "group_size": group, "max_tokens": answer, "old_logprobs": "trainer"}
    return settings | {"objective": "grpo", "rewards": ["training_reward:digits"], "rollout": rollout}


def planned_gib(recipe: Any, config: Any) -> float | None:
    """Return what ``--dry-run --memory`` says of an update on this device; None on a CPU."""
    device_memory = gpu_memory_of(device())
    return None if device_memory is None else memory_of(recipe, config, device_memory).update / 2**30


def update(
    steps: int,
    smallest: bool,
    kind: str,
    size: str,
    lora: bool = False,
    shape: Shape | None = None,
    checkpointing: bool = False,
) -> Row:
    """Optimizer steps over a batch that was made before."""
    groups, group, prompt, answer = shape or SHORT_ROWS[kind]
    if smallest:
        size, groups, prompt, answer = "smallest", 2, min(prompt, 8), 16
    rate = measured_rate()
    shape = groups, group, prompt, answer
    recipe, parts, config = parts_of(size, lambda folder: recipe_of(kind, folder, lora, checkpointing, shape))
    batch = make_batch(config.vocab_size, groups, group, prompt, answer)
    step = partial(one_step, recipe, parts, batch)
    reset_peak()
    step(1)
    seconds = statistics.median(seconds_of(partial(step, 2 + i)) for i in range(steps))
    flops = model_flops(config, groups, group, prompt, answer, 1.0 if lora else 2.0) / seconds
    rows = f"{groups} rows of {answer}" if kind == "sft" else f"{groups} × {group} answers of {answer} after {prompt}"
    return {
        "work": f"{kind} step, {size}{', LoRA of rank 32' if lora else ''}, {rows} tokens",
        "seconds": seconds,
        "tokens_per_second": groups * group * (prompt + answer) / seconds,
        "model_flops_per_second": flops,
        "share_of_measured_rate": flops / rate,
        "share_of_data_sheet": flops / DATA_SHEET_RATE,
        "peak_gib": peak_gib(),
        "planned_gib": planned_gib(recipe, config),
    }


def grpo_step(steps: int, smallest: bool, size: str) -> Row:
    """A GRPO step as a run makes it: 64 answers of 256 tokens are sampled, graded, scored and learned from."""
    size, tokens = ("smallest", 16) if smallest else (size, 256)
    recipe, parts, _ = parts_of(size, lambda folder: recipe_of("rl", folder, False, False, (8, GROUP, 64, tokens)))
    source = parts.source
    source.sampling = Sampling(max_tokens=tokens, stop_ids=frozenset())
    reset_peak()
    sampled, whole, answered = [], [], 0

    def step(number: int) -> None:
        nonlocal answered
        started = time.perf_counter()
        batch = source(number).batch
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        sampled.append(time.perf_counter() - started)
        answered = int(batch.mask.sum())
        one_step(recipe, parts, batch, number)

    for number in range(1, 2 + steps):
        whole.append(seconds_of(partial(step, number)))
    seconds, sampling = (statistics.median(taken[1:]) for taken in (whole, sampled))
    return {
        "work": f"GRPO step, {size}, 8 × {GROUP} answers of {tokens} tokens",
        "seconds": seconds,
        "seconds_until_batch": sampling,
        "tokens_per_second": answered / seconds,
        "peak_gib": peak_gib(),
    }


def parts_of(size: str, recipe: Callable[[str], Row]) -> tuple[Any, TrainerState, Any]:
    """Return a resolved recipe, what trains by it, and the configuration, with random weights made on the device.

    ``recipe`` gets the name of the model's folder, which has no weights: 28 GB would be written and read again.
    """
    model = make_model(size)

    def load(_: str, dtype: torch.dtype, **__: Any) -> tuple[Any, dict[str, set[str]]]:
        return model.to(dtype), {name: set() for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}

    with tempfile.TemporaryDirectory() as folder, patch.object(AutoModelForCausalLM, "from_pretrained", load):
        model.config.save_pretrained(folder)
        load_tokenizer("tiny").save_pretrained(folder)
        return *our_parts(recipe(folder)), model.config


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def one_step(recipe: Any, parts: TrainerState, batch: Batch, step: int) -> None:
    loss, _ = accumulate(parts.method, batch, recipe.train)
    apply_update(parts.optimizer, [p for _, p in parts.parameters], 1e-6, 1.0, loss, step)


def profiled(work: Callable[[], Any]) -> dict[str, int]:
    """Count each operation, kernel and call of CUDA by name."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=kinds) as profile:
        seconds_of(work)
    return {event.key: event.count for event in profile.key_averages()}


def decode(steps: int, smallest: bool, rows: int) -> Row:
    """``rows`` answers of 256 tokens after prompts of 128, eight to a prompt, with their log-probabilities."""
    size, rows, new_tokens, model, prompts = decoded(smallest, rows)
    baseline = vllm_rate(model, prompts, new_tokens, steps)
    engine = NativeEngine(model, slots=rows)

    def sample(tokens: int, repeat: int) -> None:
        keys = [[derive_key(repeat, "benchmark", i, j) for j in range(GROUP)] for i in range(len(prompts))]
        made = engine.generate(prompts, keys, Sampling(max_tokens=tokens, stop_ids=frozenset()))
        assert all(len(one.ids) == tokens for group in made for one in group)

    reset_peak()
    sample(new_tokens, 0)
    seconds = statistics.median(seconds_of(partial(sample, new_tokens, 1 + i)) for i in range(steps))
    peak = peak_gib()
    calls = profiled(partial(sample, PROFILED_TOKENS, 1 + steps))
    return {
        "work": f"decode, {size}, {rows} rows of {new_tokens} tokens",
        "seconds": seconds,
        "tokens_per_second": rows * new_tokens / seconds,
        "vllm_tokens_per_second": baseline,
        "ratio": None if baseline is None else rows * new_tokens / seconds / baseline,
        "launches_per_step": sum(calls.get(name, 0) for name in LAUNCHES) / PROFILED_TOKENS,
        "waits_per_step": sum(calls.get(name, 0) for name in WAITS) / PROFILED_TOKENS,
        "peak_gib": peak,
    }


def generate(steps: int, smallest: bool, rows: int) -> Row:
    """The same answers by transformers' ``generate``, without their log-probabilities."""
    size, rows, new_tokens, model, prompts = decoded(smallest, rows)
    ids = torch.tensor([prompt for prompt in prompts for _ in range(GROUP)], device=device())
    options = {"do_sample": True, "top_k": 0, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}

    def sample() -> None:
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)

    reset_peak()
    sample()
    seconds = statistics.median(seconds_of(sample) for _ in range(steps))
    return {
        "work": f"transformers' generate, {size}, {rows} rows of {new_tokens} tokens",
        "seconds": seconds,
        "tokens_per_second": rows * new_tokens / seconds,
        "peak_gib": peak_gib(),
    }


def decoded(smallest: bool, rows: int) -> tuple[str, int, int, Any, list[list[int]]]:
    """Size, rows, new tokens, model and prompts of a row that decodes."""
    size, prompt_tokens, new_tokens = ("smallest", 8, 16) if smallest else ("0.6b", 128, 256)
    rows = GROUP if smallest else rows
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 512, (prompt_tokens,), generator=draw).tolist() for _ in range(rows // GROUP)]
    return size, rows, new_tokens, make_model(size), prompts


def vllm_rate(model: Any, prompts: list[list[int]], new_tokens: int, steps: int) -> float | None:
    """Tokens per second of vLLM on the same weights and prompts with half of the memory; None where it is not there."""
    if not is_installed("vllm") or not torch.cuda.is_available():
        return None
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        baseline = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.5, seed=0)
    options = SamplingParams(
        n=GROUP, max_tokens=new_tokens, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    baseline.generate(inputs, options, use_tqdm=False)
    taken = [seconds_of(lambda: baseline.generate(inputs, options, use_tqdm=False)) for _ in range(steps)]
    return len(prompts) * GROUP * new_tokens / statistics.median(taken)


ROWS: dict[str, Callable[[int, bool], Row]] = {
    "decode-64": partial(decode, rows=64),
    "decode-256": partial(decode, rows=256),
    "decode-512": partial(decode, rows=512),
    "generate-64": partial(generate, rows=64),
    "generate-512": partial(generate, rows=512),
    "grpo-0.6b": partial(grpo_step, size="0.6b"),
    "sft-0.6b": partial(update, kind="sft", size="0.6b"),
    "sft-0.6b-8k": partial(update, kind="sft", size="0.6b", shape=ROWS_OF_8K),
    "sft-1.5b": partial(update, kind="sft", size="1.5b"),
    "sft-8b-lora": partial(update, kind="sft", size="8b", lora=True, checkpointing=True),
    "rl-0.6b": partial(update, kind="rl", size="0.6b"),
    "rl-0.6b-16k": partial(update, kind="rl", size="0.6b", shape=ROWS_OF_16K),
    "rl-0.6b-lora-16k": partial(update, kind="rl", size="0.6b", lora=True, shape=ROWS_OF_16K),
    "rl-1.5b": partial(update, kind="rl", size="1.5b"),
    "rl-8b-lora": partial(update, kind="rl", size="8b", lora=True, checkpointing=True),
    "rl-14b-lora": partial(update, kind="rl", size="14b", lora=True, shape=(1, GROUP, 512, 3584), checkpointing=True),
}


def measure(name: str, steps: int, smallest: bool) -> Row:
    """A row in a process of its own; ``failed``: the last line of the error of one that ends badly."""
    command = [sys.executable, __file__, "--row", name, "--steps", str(steps), *(["--smallest"] if smallest else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"work": name, "failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measure_here(name: str, steps: int, smallest: bool) -> Row:
    """A row in this process, which saves some 10 seconds of imports; what it took is given back first."""
    try:
        with redirect_stdout(sys.stderr):
            return ROWS[name](steps, smallest)
    except (RuntimeError, UsageError, AssertionError) as error:
        return {"work": name, "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def line(row: Row) -> str:
    if "failed" in row:
        return f"{row['work']}: failed: {row['failed']}"
    written = [f"{row['tokens_per_second']:,.0f} tokens/s"]
    if (share := row.get("share_of_measured_rate")) is not None:
        rate = row["model_flops_per_second"] / 1e12
        written.append(f"{rate:.3g} TFLOP/s, {share:.0%} of the measured rate, {row['share_of_data_sheet']:.0%} of 989")
    if "seconds_until_batch" in row:
        written.append(
            f"{row['seconds']:.2f} s a step, of which {row['seconds_until_batch']:.2f} until the batch is there"
        )
    if "launches_per_step" in row:
        written.append(f"{row['launches_per_step']:.2f} launches and {row['waits_per_step']:.2f} waits a step")
        if (baseline := row["vllm_tokens_per_second"]) is not None:
            written.append(f"vLLM {baseline:,.0f}, {row['ratio']:.2f} of it")
    if row["peak_gib"] is not None:
        planned = "" if row.get("planned_gib") is None else f" ({row['planned_gib']:.1f} planned)"
        written.append(f"{row['peak_gib']:.1f} GiB at most{planned}")
    return f"{row['work']}: {', '.join(written)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="some of " + ", ".join(ROWS))
    parser.add_argument("--row", choices=list(ROWS), help="this row in this process; its figures as a line of JSON")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--smallest", action="store_true", help="of a model of 0.1 million parameters, here")
    parser.add_argument("--one-process", action="store_true", help="measure all rows in this process")
    arguments = parser.parse_args()
    if arguments.row:
        logging.disable(logging.WARNING)
        with redirect_stdout(sys.stderr):
            row = ROWS[arguments.row](arguments.steps, arguments.smallest)
        print(json.dumps(row))
        return
    if arguments.steps < 1:
        raise SystemExit(f"--steps: at least 1, not {arguments.steps}")
    names = arguments.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise SystemExit(f"--rows: there is no {unknown[0]!r}; there are {', '.join(ROWS)}")
    if not torch.cuda.is_available() and not arguments.smallest:
        print("no GPU here, so nothing was measured; --smallest runs the same code without one")
        return
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    stem = "smallest-gpu" if arguments.smallest else "gpu-" + re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    target = RESULTS / f"{stem}.json"
    table = json.loads(target.read_text())["rows"] if target.is_file() else {}
    for name in names:
        table[name] = (measure_here if arguments.one_process else measure)(name, arguments.steps, arguments.smallest)
        print(line(table[name]), flush=True)
        packages = [package for package in ("torch", "transformers", "vllm") if is_installed(package)]
        result = {"gpu": kind, "versions": {package: version(package) for package in packages}}
        result["rows"] = {each: table[each] for each in ROWS if each in table}
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if failed := [name for name in names if "failed" in table[name]]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
