"""Truncated extraction next to the naive way: a whole forward pass with ``output_hidden_states``.

    python benchmarks/extraction.py
    python benchmarks/extraction.py --repeats 9 --threads 2

One random model of 16 layers with a vocabulary of 32k, the middle layer, the same batch, alternating; the result is the
median of the ratios. The rows of both are compared bit for bit before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.interpret.activations.sites import read_rows

RESULTS = Path(__file__).parent / "results" / "extraction.json"
NUM_LAYERS, LAYER, VOCABULARY, WIDTH, TOKENS, ROWS = 16, 8, 32_000, 256, 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = build_model()
    documents = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    ids, site = documents.tolist(), f"resid.{LAYER}"

    def ours() -> Tensor:
        return read_rows(model, [site], ids)[site]

    @torch.no_grad()
    def naive() -> Tensor:
        states: Tensor = model(input_ids=documents, output_hidden_states=True).hidden_states[LAYER]
        return states.flatten(0, 1)

    assert torch.equal(ours(), naive()), "the rows differ"
    pairs = [(seconds(naive), seconds(ours)) for _ in range(arguments.repeats)]
    ratios = sorted(slow / fast for slow, fast in pairs)
    result = {
        "model": f"qwen3, {NUM_LAYERS} layers, width {WIDTH}, vocabulary {VOCABULARY}, layer {LAYER}",
        "batch": f"{ROWS} x {TOKENS} tokens, float32",
        "bit_equal": True,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "tokens_per_second": round(ROWS * TOKENS / statistics.median(fast for _, fast in pairs)),
        "naive_tokens_per_second": round(ROWS * TOKENS / statistics.median(slow for slow, _ in pairs)),
        "threads": arguments.threads,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def build_model() -> torch.nn.Module:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def seconds(work: Callable[[], Tensor]) -> float:
    """CPU seconds of the process, which other processes on the machine disturb less than wall time."""
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    main()
