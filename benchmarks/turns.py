"""Cost of a rollout of several turns, compared with one turn of as many tokens, and with reading all tokens again.

    python benchmarks/turns.py                       # 64 rows, 6 turns of some 32 tokens, replies of 16
    python benchmarks/turns.py --rows 64 --turns 6 --reply 64 --rounds 7

Model: Qwen3 blocks of the embedded model's size with random weights (``benchmarks/engine.py``). 16 of the 512 ids end
a turn, so turns are geometric with mean 32. Three ways to the same number of tokens:

- ``kept``: the native engine's ``converse``; replies are fed to the cache that it has kept.
- ``one_turn``: every token is drawn, none replied; each row is as long as it came to be in ``kept``.
- ``read_again``: a generation per turn over the whole of what was said before it, as peers do.

One round = one call of each, one after the other, on one thread; the figures are medians over rounds of the CPU-seconds
and of the ratios within a round. Writes results/turns.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from engine import PROMPT_TOKENS, PROMPTS, SHAPE, VOCAB, make_model

from posttrain.randomness import derive_key
from posttrain.sampling.base import Conversation, Engine, Reply, Sampling, begin
from posttrain.sampling.native.engine import NativeEngine, sampling_mode
from posttrain.sampling.native.schedule import Schedule
from posttrain.types import Finish

RESULTS = Path(__file__).parent / "results" / "turns.json"
STOP_IDS = frozenset(range(16))
NEVER = frozenset({VOCAB})  # looked for as an end is, and not there


class Answering:
    """Replies of ``length`` ids at once, until the last of ``turns``."""

    def __init__(self, turns: int, length: int) -> None:
        self.turns, self.ids = turns, tuple(range(20, 20 + length))
        self.heard: dict[tuple[int, int], int] = {}

    def hear(self, prompt: int, sample: int, turn: Sequence[int], finish: Finish) -> None:
        self.heard[prompt, sample] = self.heard.get((prompt, sample), 0) + 1

    def reply(self, prompt: int, sample: int) -> Reply:
        over = self.heard[prompt, sample] == self.turns
        return Reply(finish="out_of_turns") if over else Reply(self.ids)


def draw_in_one_turn(engine: NativeEngine, prompts: list[list[int]], lengths: list[list[int]]) -> int:
    """As many tokens for every row as ``lengths`` says, all of them drawn."""
    keys = keys_of(lengths)
    rows = [
        Conversation(i, g, keys[i][g], length)
        for i, of_prompt in enumerate(lengths)
        for g, length in enumerate(of_prompt)
    ]
    sampling = Sampling(max_tokens=max(row.limit for row in rows), stop_ids=NEVER)
    with sampling_mode(engine.model):
        decoder = engine._bind(engine.path, None, PROMPT_TOKENS + sampling.max_tokens)
        with torch.inference_mode():
            Schedule(decoder, prompts, rows, sampling, engine.slots).run()
    return sum(len(row.ids) for row in rows)


def read_again(engine: NativeEngine, prompts: list[list[int]], keys: list[list[int]], settings: Any) -> int:
    """A generation for every turn; tokens of the rollouts."""
    sampling, respondent = settings
    rows = [row for group in begin(prompts, keys, sampling.max_tokens, engine.context_tokens) for row in group]
    Engine._converse(engine, prompts, rows, sampling, respondent)
    return sum(len(row.ids) for row in rows)


def keys_of(rows: Sequence[Sequence[Any]]) -> list[list[int]]:
    return [[derive_key(0, "turns", i, g) for g in range(len(row))] for i, row in enumerate(rows)]


def seconds(work: Callable[[], int]) -> tuple[float, int]:
    """CPU-seconds, and tokens."""
    started = time.process_time()
    tokens = work()
    return time.process_time() - started, tokens


def measure(turns: int, reply: int, group: int, rounds: int) -> dict[str, Any]:
    """Alternate the three ways ``rounds`` times, after one unmeasured round."""
    model = make_model()
    numbers = np.random.default_rng(0)
    prompts = numbers.integers(len(STOP_IDS), VOCAB, (PROMPTS, PROMPT_TOKENS)).tolist()
    keys = keys_of([range(group)] * PROMPTS)
    sampling = Sampling(max_tokens=SHAPE["max_position_embeddings"] - PROMPT_TOKENS, stop_ids=STOP_IDS)
    engine = NativeEngine(model)
    kept = engine.converse(prompts, keys, sampling, Answering(turns, reply))
    lengths = [[len(c.ids) for c in of_prompt] for of_prompt in kept]

    def converse(one: NativeEngine) -> int:
        groups = one.converse(prompts, keys, sampling, Answering(turns, reply))
        return sum(len(c.ids) for of_prompt in groups for c in of_prompt)

    ways: dict[str, Callable[[], int]] = {
        "kept": lambda: converse(engine),
        "one_turn": lambda: draw_in_one_turn(engine, prompts, lengths),
        "read_again": lambda: read_again(engine, prompts, keys, (sampling, Answering(turns, reply))),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    tokens: dict[str, int] = {}
    for number in range(rounds + 1):
        for way, work in ways.items():
            cpu, tokens[way] = seconds(work)
            if number:
                taken[way].append(cpu)
    of_own = sum(c.num_own for of_prompt in kept for c in of_prompt)
    ratios = {
        f"{way}_to_one_turn": statistics.median(a / b for a, b in zip(taken[way], taken["one_turn"], strict=True))
        for way in ways
        if way != "one_turn"
    }
    return {
        "work": {"rows": PROMPTS * group, "turns": turns, "reply": reply, "prompt_tokens": PROMPT_TOKENS},
        "tokens": {**tokens, "of_the_model_itself": of_own, "longest": max(map(max, lengths))},
        "cpu_seconds": {way: round(statistics.median(values), 2) for way, values in taken.items()},
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
        "path": engine.path,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help=f"a multiple of {PROMPTS}, which is the number of prompts")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--reply", type=int, nargs="+", default=[16, 64], help="ids in a reply")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "what": "CPU-seconds of a rollout of several turns; medians over alternating rounds, one thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rounds": arguments.rounds,
        "load_average_before": round(os.getloadavg()[0], 2),
        "runs": [],
    }
    for reply in arguments.reply:
        run = measure(arguments.turns, reply, arguments.rows // PROMPTS, arguments.rounds)
        results["runs"].append(run)
        print(f"replies of {reply}: {run['cpu_seconds']} {run['ratios']}", flush=True)
    results["load_average_after"] = round(os.getloadavg()[0], 2)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
