"""SmolLM2-135M on a CPU: what the recipes ``smollm2/*`` come to, seed by seed.

    python benchmarks/smollm2.py --part grpo-sums --seeds 0 1 2
    python benchmarks/smollm2.py --part sft --data FILE          # a file of instructions
    python benchmarks/smollm2.py --part sae --data FILE          # a file of text

    python benchmarks/smollm2.py --part dpo --data FILE          # a file of pairs

A part is a recipe. ``rm`` reads HH-RLHF from the folder POSTTRAIN_DATA. ``dpo`` asks a reward model which answers are
better: recipe ``smollm2/rm`` trained on the same training pairs, whose agreement with the held-out pairs is recorded
too. ``first-answer`` is the first use of the model with an empty cache, the download
not counted. Every figure is that of a command of `posttrain`, run in a process of its own with one thread; seconds are
CPU-seconds of that process. The model was dequantized from 4 bits, and held-out questions are distinct. A run that
exists is not made again. Writes results/smollm2-PART.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from training import kind_of_cpu

RESULTS = Path(__file__).resolve().parent / "results"
MODEL = "smollm2-135m"
PROMPT = ["--template", "chat", "--template.system", "Answer with the number alone."]
HELD_OUT = {
    "grpo-sums": ["--task", "sums", "--task.split", "test"],
    "grpo-chain-sum": [
        *("--task", "reasoning_gym", "--task.dataset", "chain_sum", "--task.split", "test"),
        *("--task.options", "{min_terms: 2, max_terms: 4, min_digits: 1, max_digits: 1}"),
    ],
}
MAX_TOKENS = {"grpo-sums": "16", "grpo-chain-sum": "24"}
QUESTION = "What is 47 + 38?"
NUM_ANSWERS = 5
ROOM = "48"
# As in the recipe: the same pairs are held out.
SHARES = ["--task.validation_share", "0.2", "--task.test_share", "0.3"]
# Of the reward model that compares the answers of part dpo.
JUDGE = [
    *("--data.batch_size", "8", "--train.steps", "24", "--train.lr", "5e-4", "--eval.every", "24"),
    *("--eval.num_examples", "60"),
]
# For a test: the parts with next to no work.
SMALLEST = ["--train.steps", "2", "--eval.every", "2", "--eval.num_examples", "4"]
SMALLEST_ROLLOUT = ["--rollout.num_prompts", "2", "--rollout.group_size", "2", "--rollout.max_tokens", "4"]
SMALLEST_SAE = [
    *("--train.steps", "4", "--train.batch", "16", "--eval.rows", "64", "--activations.max_rows", "600"),
    *("--activations.site", "resid.1", "--dictionary.k", "4"),
]


@dataclass(frozen=True)
class Cost:
    """The cost of a command: CPU-seconds of its process, and the memory that it had at most, in bytes."""

    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Settings:
    """Settings of every part: the model, where runs are, how many questions are held out, the file of a part's data."""

    model: str
    runs_dir: Path
    limit: int
    data: Path | None
    smallest: bool

    def run(self, name: str) -> Path:
        return self.runs_dir / f"smollm2-{name}"


def posttrain(words: Sequence[str], settings: Settings) -> Cost:
    """Run a command in a process and return its cost.

    Raises:
        SystemExit: the command failed.
    """
    command = [sys.executable, "-m", "posttrain", *words, "--runs-dir", str(settings.runs_dir)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    print("$ posttrain " + " ".join(words), flush=True)
    process = subprocess.Popen(command, env=os.environ | threads, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"posttrain {' '.join(words)} failed")
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def train(part: str, seed: int, settings: Settings, changes: Sequence[str] = ()) -> Path:
    """Train a recipe, unless its run is finished; ``cost.json`` in the run holds what it took."""
    folder = settings.run(f"{part}-seed{seed}")
    if (folder / "cost.json").is_file():
        return folder
    words = ["train", f"smollm2/{part}", "--run", folder.name, "--quiet", "--train.seed", str(seed)]
    words += ["--model.name", settings.model]
    changed = dict(zip(changes[::2], changes[1::2], strict=True))
    if settings.smallest:
        smallest = [*SMALLEST]
        if part.startswith("grpo"):
            smallest += [*SMALLEST_ROLLOUT, "--model.adapter.rank", "2"]
        changed |= dict(zip(smallest[::2], smallest[1::2], strict=True))
    words += [word for option in changed.items() for word in option]
    if (folder / "recipe.yaml").is_file():
        words.append("--resume")
    cost = posttrain(words, settings)
    (folder / "cost.json").write_text(json.dumps(asdict(cost)))
    return folder


def evaluate(
    model: str, words: Sequence[str], settings: Settings
) -> tuple[dict[str, Any], list[dict[str, Any]], float]:
    """Return results and items of `posttrain evaluate`, and its CPU-seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "evaluation"
        limit = ["--limit", str(settings.limit)]
        cost = posttrain(["evaluate", model, *words, *limit, "--out", str(out), "--quiet"], settings)
        (results_path,) = sorted(out.rglob("results.json"))
        results = json.loads(results_path.read_text())["results"]
        lines = (results_path.parent / "items.jsonl").read_text().splitlines()
    return results, [json.loads(line) for line in lines], cost.cpu_seconds


def chosen(results: dict[str, Any], keys: Sequence[str]) -> dict[str, float]:
    """Return the results of these names, with their intervals."""
    wanted = [name for key in keys for name in (key, f"{key}_low", f"{key}_high")]
    return {name: results[name] for name in wanted if name in results}


def metrics_of(folder: Path, wanted: str) -> list[tuple[int, float]]:
    """Return (step, value) of the held-out metric whose name ends so, from a run's ``metrics.jsonl``."""
    found = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = [name for name in row["metrics"] if name.startswith("eval/") and name.endswith(f"/{wanted}")]
        found += [(row["step"], row["metrics"][name]) for name in names if name.count("=") == 0]
    return found


def grpo(part: str, seeds: Sequence[int], settings: Settings) -> dict[str, Any]:
    """GRPO, seed by seed: the model before and after on the same distinct questions of the test split."""
    questions = [*HELD_OUT[part], *PROMPT]
    asked = [*questions, "--max-tokens", MAX_TOKENS[part]]
    base, base_items, base_seconds = evaluate(settings.model, asked, settings)
    # How much is form: the same model with room to come to an answer.
    roomy, _, _ = evaluate(settings.model, [*questions, "--max-tokens", ROOM], settings)
    rows = []
    for seed in seeds:
        folder = train(part, seed, settings)
        results, items, seconds = evaluate(str(folder), asked, settings)
        pairs = list(zip(base_items, items, strict=True))
        rows.append(
            {
                "seed": seed,
                "trained": chosen(results, ["accuracy", "truncated"]) | {"n": results["n"]},
                "cpu_seconds": json.loads((folder / "cost.json").read_text())["cpu_seconds"],
                "peak_bytes": json.loads((folder / "cost.json").read_text())["peak_bytes"],
                "evaluation_cpu_seconds": seconds,
                "curve": metrics_of(folder, "accuracy"),
                "gained": sum(not is_right(before) and is_right(after) for before, after in pairs),
                "lost": sum(is_right(before) and not is_right(after) for before, after in pairs),
                "answers": [answers_of(before, after) for before, after in pairs[:NUM_ANSWERS]],
            }
        )
        print(f"seed {seed}: {base['accuracy']:.1%} -> {results['accuracy']:.1%}, n {results['n']:.0f}", flush=True)
    before = chosen(base, ["accuracy", "truncated"]) | {"n": base["n"], "cpu_seconds": base_seconds}
    return {
        "base": before,
        "base_with_room": chosen(roomy, ["accuracy", "truncated"]) | {"max_tokens": ROOM},
        "seeds": rows,
    }


def is_right(item: dict[str, Any]) -> bool:
    return item["samples"][0]["outcome"] == "right"


def answers_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return a question with the answers of both models."""
    assert before["question"] == after["question"]
    named = {"base": before, "trained": after}
    shown = {key: {"text": item["samples"][0]["text"], "right": is_right(item)} for key, item in named.items()}
    return {"question": before["question"], "answer": before["answer"], **shown}


def sft(seeds: Sequence[int], settings: Settings) -> dict[str, Any]:
    """SFT: the loss of held-out demonstrations over the steps."""
    rows = []
    for seed in seeds:
        folder = train("sft", seed, settings, ["--task.path", str(settings.data)])
        cost = json.loads((folder / "cost.json").read_text())
        curves = {name: metrics_of(folder, name) for name in ("loss", "token_accuracy", "n")}
        rows.append({"seed": seed, "curves": curves, **cost})
        print(f"seed {seed}: {curves}", flush=True)
    return {"data": data_name(settings), "seeds": rows}


def reward_model(seeds: Sequence[int], settings: Settings) -> dict[str, Any]:
    """The reward model: agreement on the pairs of the test split that are no longer than those of training."""
    rows = []
    for seed in seeds:
        folder = train("rm", seed, settings)
        task = ["--task", "hh_rlhf", "--task.split", "test"]
        results, _, seconds = evaluate(str(folder), task, settings)
        cost = json.loads((folder / "cost.json").read_text())
        shown = chosen(results, ["pair_accuracy", "length_baseline"]) | {"n": results["n"]}
        rows.append({"seed": seed, "trained": shown, "evaluation_cpu_seconds": seconds, **cost})
        print(f"seed {seed}: {shown}", flush=True)
    return {"seeds": rows}


def dpo(seeds: Sequence[int], settings: Settings) -> dict[str, Any]:
    """DPO: held-out pair accuracy, and which answers a reward model of the same pairs prefers."""
    rows = []
    pairs = ["--task", "preferences", "--task.path", str(settings.data), *SHARES]
    held_out = [*pairs, "--task.split", "test"]
    judge = train("rm", 0, replace(settings, runs_dir=settings.runs_dir / "judge"), [*pairs, *JUDGE])
    agreement, _, judge_seconds = evaluate(str(judge), held_out, settings)
    judged = chosen(agreement, ["pair_accuracy", "length_baseline"]) | {"n": agreement["n"]}
    judged |= json.loads((judge / "cost.json").read_text()) | {"evaluation_cpu_seconds": judge_seconds}
    print(f"the judge: {judged}", flush=True)
    for seed in seeds:
        folder = train("dpo", seed, settings, ["--task.path", str(settings.data)])
        against = ["--against", settings.model, "--judge", str(judge), "--max-tokens", "48"]
        results, items, seconds = evaluate(str(folder), [*held_out, *against], settings)
        cost = json.loads((folder / "cost.json").read_text())
        names = ["win_rate", "win_rate_similar", "characters_a", "characters_b", "kl_a"]
        shown = chosen(results, names) | {"n": float(len(items))}
        keys = ("pair_accuracy", "pair_accuracy_low", "pair_accuracy_high", "n")
        curves = {name: metrics_of(folder, name) for name in keys}
        answers = [
            {"question": item["question"], "base": item["b"][0]["text"], "trained": item["a"][0]["text"]}
            for item in items[:NUM_ANSWERS]
        ]
        row = {"seed": seed, "curves": curves, "against_base": shown, "answers": answers}
        rows.append(row | {"evaluation_cpu_seconds": seconds, **cost})
        print(f"seed {seed}: {curves} {shown}", flush=True)
    return {"data": data_name(settings), "judge": judged, "seeds": rows}


def data_name(settings: Settings) -> str | None:
    """Return the name of the file of a part's data."""
    if settings.data is None:
        return None
    return settings.data.name


def sae(settings: Settings) -> dict[str, Any]:
    """A dictionary of layer 15 over a text."""
    run = settings.run("sae")
    if not (run / "cost.json").is_file():
        words = ["sae", "train", "smollm2/sae", "--run", run.name, "--quiet", "--activations.text", str(settings.data)]
        words += ["--activations.model.name", settings.model, *(SMALLEST_SAE if settings.smallest else [])]
        cost = posttrain(words, settings)
        (run / "cost.json").write_text(json.dumps(asdict(cost)))
    found = json.loads((run / "dictionary.json").read_text())
    print(found, flush=True)
    return {"results": found["held_out"] | found["recovered"], **json.loads((run / "cost.json").read_text())}


def first_answer(settings: Settings) -> dict[str, Any]:
    """Seconds to the first answer with an empty cache and to the next one; the file of the model is at hand."""
    seconds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in ("first", "second"):
            started = time.monotonic()
            cost = posttrain(["generate", settings.model, QUESTION, "--max-tokens", "16"], settings)
            seconds[name] = {**asdict(cost), "wall_seconds": time.monotonic() - started}
    print(seconds, flush=True)
    return seconds


def measure(part: str, seeds: Sequence[int], settings: Settings) -> dict[str, Any]:
    if part in HELD_OUT:
        return grpo(part, seeds, settings)
    if part == "sft":
        return sft(seeds, settings)
    if part == "rm":
        return reward_model(seeds, settings)
    if part == "dpo":
        return dpo(seeds, settings)
    if part == "sae":
        return sae(settings)
    return first_answer(settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*HELD_OUT, "sft", "rm", "dpo", "sae", "first-answer"], required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default=MODEL, help="another file or folder of the model")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--limit", type=int, default=300, help="held-out questions or pairs")
    parser.add_argument("--data", type=Path, help="the file of part sft, dpo or sae")
    parser.add_argument("--smallest", action="store_true", help="next to no work, for a test")
    arguments = parser.parse_args()
    settings = Settings(
        arguments.model, arguments.runs_dir, arguments.limit, arguments.data, smallest=arguments.smallest
    )
    found = measure(arguments.part, arguments.seeds, settings)
    about = {
        "part": arguments.part,
        "model": "SmolLM2-135M-Instruct, dequantized from 4 bits",
        "cpu": kind_of_cpu(),
        "threads": 1,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"smollm2-{arguments.part}.json"
    path.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
