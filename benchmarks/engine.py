"""The native engine next to transformers' ``generate``: same model, same work, alternating.

    python benchmarks/engine.py                    # both workloads on 1 and on 2 threads
    python benchmarks/engine.py --threads 1 --pairs 9

Model: Qwen3 blocks of the embedded model's size with random weights. Work: 8 prompts × 8 completions,
64-token prompts, up to 128 new tokens at temperature 1, with the log-probability of every token on
both sides. ``full``: no end token, every row runs to 128. ``ragged``: 11 of the 512 ids end a row, and
as the model's distribution is nearly uniform, lengths are geometric with mean 47 (42 after the cut at
128). Rates count the tokens that belong to a completion: what ``generate`` computes for rows that have
ended is not output.

One pair = one call of each side, one after the other; the figure is the median of the pairs' ratios.
Wall time and CPU time are both given, since the machine may be shared. Writes results/engine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from posttrain.randomness import derive_key
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine

RESULTS = Path(__file__).parent / "results" / "engine.json"
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, VOCAB = 8, 8, 64, 128, 512
STOP_IDS = tuple(range(11))  # 11 / 512 = 1 / 46.5 per token
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


# The shape of a model that people train: 494 million parameters.
HALF_BILLION: dict[str, Any] = SHAPE | {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "head_dim": 64,
    "intermediate_size": 4864,
}


def make_model(architecture: str = "qwen3", shape: Mapping[str, Any] = SHAPE) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture, **shape)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def make_prompts() -> list[list[int]]:
    numbers = np.random.default_rng(0)
    return numbers.integers(len(STOP_IDS), VOCAB, (PROMPTS, PROMPT_TOKENS)).tolist()


def run_baseline(model: Any, prompts: list[list[int]], stop_ids: tuple[int, ...]) -> int:
    """``generate`` with log-probabilities; tokens that belong to a completion."""
    ids = torch.tensor(prompts)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        num_return_sequences=GROUP,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = output.sequences[:, PROMPT_TOKENS:]
    torch.stack(output.logits, 1).log_softmax(-1).gather(-1, new[..., None])
    ends = new < len(stop_ids)
    return int((ends.cumsum(1) - ends.long() == 0).sum())


def run_ours(engine: NativeEngine, prompts: list[list[int]], stop_ids: tuple[int, ...], repeat: int) -> int:
    keys = [[derive_key(repeat, "benchmark", i, j) for j in range(GROUP)] for i in range(PROMPTS)]
    sampling = Sampling(max_tokens=NEW_TOKENS, stop_ids=frozenset(stop_ids))
    return sum(len(c.ids) for group in engine.generate(prompts, keys, sampling) for c in group)


def measure(work: Callable[[], int]) -> tuple[float, float]:
    """Tokens per wall second and per CPU second."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "native_modules_path": {"path": "modules"},
}


def compare(
    model: Any, stop_ids: tuple[int, ...], pairs: int, ways: Mapping[str, dict[str, Any]] = WAYS
) -> dict[str, Any]:
    """Alternate the sides ``pairs`` times, after one unmeasured call of each; ``ways``: the engine's options."""
    prompts = make_prompts()
    engines = {name: NativeEngine(model, **options) for name, options in ways.items()}
    found: dict[str, list[tuple[float, float]]] = {"transformers_generate": [], **{name: [] for name in engines}}
    for repeat in range(pairs + 1):
        torch.manual_seed(repeat)
        rates = {"transformers_generate": measure(partial(run_baseline, model, prompts, stop_ids))}
        for name, engine in engines.items():
            rates[name] = measure(partial(run_ours, engine, prompts, stop_ids, repeat))
        if repeat:
            for name, rate in rates.items():
                found[name].append(rate)
    baseline = found["transformers_generate"]
    return {
        name: {
            "tokens_per_second": round(statistics.median(wall for wall, _ in values)),
            "tokens_per_cpu_second": round(statistics.median(cpu for _, cpu in values), 1),
            "ratio_wall": round(statistics.median(v[0] / p[0] for v, p in zip(values, baseline, strict=True)), 2),
            "ratio_cpu": round(statistics.median(v[1] / p[1] for v, p in zip(values, baseline, strict=True)), 2),
        }
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = make_model()
    results: dict[str, Any] = {
        "what": "tokens of completions per second, log-probabilities on; medians over alternating pairs",
        "shape": SHAPE | {"parameters": sum(p.numel() for p in model.parameters())},
        "work": {"num_prompts": PROMPTS, "group_size": GROUP, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS},
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {"transformers": transformers.__version__},
        "pairs": arguments.pairs,
        "load_average_before": round(os.getloadavg()[0], 2),
        "path": NativeEngine(model).path,
        "runs": [],
    }
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for work, stop_ids in (("full", ()), ("ragged", STOP_IDS)):
            rates = compare(model, stop_ids, arguments.pairs)
            results["runs"].append({"threads": threads, "work": work, "rates": rates})
            for name, rate in rates.items():
                print(f"{threads} thread(s)  {work:7s} {name:22s} {rate}", flush=True)
    results["load_average_after"] = round(os.getloadavg()[0], 2)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
