"""Dictionaries measured: the time of a training step next to SAELens's own trainer, and planted features found.

    python benchmarks/saes.py
    python benchmarks/saes.py --only speed --steps 30 --repeats 5
    python benchmarks/saes.py --peer FOLDER      # where sae-lens is installed, if not here

speed    one thread, d = 128, F = 1024, batches of 4096 rows of the same fp32 tensor in random order. Ours is
         ``train_sae`` as a run has it (row order, clipping, fused Adam, schedule, normalized decoder,
         AuxK's bookkeeping), theirs ``SAETrainer.fit``. Seconds of CPU time per step, the machine being shared; ours
         and theirs take turns, and medians are compared.
planted  512 features in 256 dimensions, with rates as in Zipf's law, 12 active in a row on average; what a dictionary
         of 1024 features finds: MCC by one-to-one matching (``measures.match``), FVU and L0 on rows held out.
change   24 of 512 features, in 128 dimensions, amplified 1.8 times, removed or added: what a difference dictionary
         finds of them (cosine above 0.9).

Writes results/dictionaries.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from planted import TensorRows, match, plant, plant_change
from torch import Tensor

from posttrain.interpret.saes.sae_recipe import SaeRecipe
from posttrain.interpret.saes.sae_training import TrainedDictionary, train_sae
from posttrain.store.metrics import MetricsLog

RESULTS = Path(__file__).parent / "results" / "dictionaries.json"
D, F, BATCH, K = 128, 1024, 4096, 32
PLANTED_D, PLANTED_ROWS, HELD_OUT = 256, 262_144, 16_384


def train(x: Tensor, dictionary: dict[str, Any], settings: dict[str, Any], observer: Any = None) -> TrainedDictionary:
    """A training as a run has it, in a folder that is thrown away."""
    data = {
        "activations": {"folder": "unused"},
        "dictionary": dictionary,
        "train": settings,
        "eval": {"rows": min(HELD_OUT, len(x) // 16)},
    }
    recipe = SaeRecipe.model_validate(data).resolve()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "checkpoints").mkdir()
        return train_sae(
            TensorRows(x),
            recipe,
            checkpoints=place / "checkpoints",
            metrics=MetricsLog(place / "metrics.jsonl"),
            observer=observer or (lambda event, info: None),
        )


def our_step(kind: str, precision: str, x: Tensor, steps: int) -> float:
    """Seconds of CPU time per step, between the marks after a warm-up and at the end."""
    marks: list[float] = []

    def observe(event: str, info: dict[str, Any]) -> None:
        if event == "step":
            marks.append(time.process_time())

    options = {"k": K} if "topk" in kind else {}
    settings = {"steps": 2 * steps, "batch": BATCH, "precision": precision, "log_every": steps, "device": "cpu"}
    train(x, {"name": kind, "features": F, **options}, settings, observe)
    return (marks[-1] - marks[-2]) / steps


def their_step(kind: str, x: Tensor, steps: int) -> float:
    """The same of SAELens's trainer, which is asked for the same architecture."""
    from sae_lens.config import SAETrainerConfig
    from sae_lens.saes import (
        BatchTopKTrainingSAE,
        BatchTopKTrainingSAEConfig,
        StandardTrainingSAE,
        StandardTrainingSAEConfig,
    )
    from sae_lens.training.sae_trainer import SAETrainer

    marks: list[float] = []
    made: Any
    if kind == "batchtopk":
        made = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(d_in=D, d_sae=F, k=K))
    else:
        made = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=D, d_sae=F, l1_coefficient=1.0))

    def batches() -> Iterator[Tensor]:
        while True:
            marks.append(time.process_time())
            yield x[torch.randint(len(x), (BATCH,))]

    total = 2 * steps + 1
    config = SAETrainerConfig(total_training_samples=total * BATCH, train_batch_size_samples=BATCH, lr=1e-3)
    config.lr_end = config.lr_end or config.lr / 10
    SAETrainer(config, made, batches()).fit()
    return (marks[-1] - marks[-1 - steps]) / steps


def measure_speed(steps: int, repeats: int, baseline: bool) -> dict[str, Any]:
    x = torch.randn(65_536, D, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}
    for kind in ("batchtopk", "l1"):
        runs: dict[str, list[float]] = {"ours fp32": [], "ours bf16": [], "sae-lens fp32": []}
        for _ in range(repeats):
            runs["ours fp32"].append(our_step(kind, "fp32", x, steps))
            if baseline:
                runs["sae-lens fp32"].append(their_step(kind, x, steps))
            runs["ours bf16"].append(our_step(kind, "bf16", x, steps))
        medians = {name: statistics.median(values) for name, values in runs.items() if values}
        found[kind] = {
            "seconds_per_step": {name: round(value, 5) for name, value in medians.items()},
            "rows_per_cpu_second": {name: round(BATCH / value) for name, value in medians.items()},
            "all_runs": {name: [round(value, 5) for value in values] for name, values in runs.items()},
        }
        if baseline:
            theirs = medians["sae-lens fp32"]
            found[kind]["times_as_fast"] = {n: round(theirs / medians[n], 2) for n in ("ours fp32", "ours bf16")}
        print(kind, json.dumps(found[kind]), flush=True)
    return found


def measure_planted(scale: float) -> dict[str, Any]:
    planted = plant(PLANTED_D, 512, 12.0, noise=0.02)
    codes = torch.cat([planted.codes(65_536, part) for part in range(PLANTED_ROWS // 65_536)])
    x = planted.rows(codes)
    found: dict[str, Any] = {"true_l0": round(float((codes > 0).sum() / len(codes)), 3)}
    kinds: tuple[tuple[str, dict[str, float], float, int], ...] = (
        ("l1", {"coefficient": 0.006}, 1e-2, 4000),
        ("batchtopk", {"k": 12}, 3e-3, 2000),
    )
    for kind, options, lr, steps in kinds:
        settings = {"steps": round(steps * scale), "batch": BATCH, "lr": lr, "log_every": 250, "device": "cpu"}
        started = time.process_time()
        trained = train(x, {"name": kind, "features": F, **options}, settings)
        mcc, each = match(trained.dictionary.W_dec.detach(), planted.directions)
        found[kind] = {
            "mcc": round(mcc, 4),
            "mcc_by_quarter_of_rates": [round(float(part.mean()), 3) for part in each.chunk(4)],
            **{name: round(value, 4) for name, value in trained.quality.numbers().items()},
            **options,
            "lr": lr,
            "steps": settings["steps"],
            "cpu_seconds": round(time.process_time() - started),
        }
        print(kind, json.dumps(found[kind]), flush=True)
    return found


def measure_change() -> dict[str, Any]:
    planted = plant(D, 512, 12.0, noise=0.02)
    change = plant_change(planted, 100_000)
    changed = torch.cat([(change.factors != 1).nonzero()[:, 0], change.added])
    found = {}
    for kind, k in (("topk", 1), ("topk", 2), ("batchtopk", 1), ("batchtopk", 2)):
        settings = {"steps": 800, "batch": 1024, "precision": "fp32", "log_every": 200, "device": "cpu"}
        trained = train(change.post - change.base, {"name": kind, "k": k, "features": 64}, settings)
        _, each = match(trained.dictionary.W_dec.detach(), planted.directions[changed])
        found[f"{kind}, k = {k}"] = {
            "found": int((each > 0.9).sum()),
            "of": len(changed),
            "fvu": round(trained.quality.fvu, 4),
        }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("speed", "planted", "change"), action="append")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed, after as many that are not")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps of the planted dictionaries")
    parser.add_argument("--peer", metavar="FOLDER", help="where sae-lens is, if it is not installed here")
    arguments = parser.parse_args()
    if arguments.baseline:
        sys.path.append(arguments.baseline)
    torch.set_num_threads(1)
    try:
        baseline = version("sae-lens")
    except PackageNotFoundError:
        baseline = None
        print("sae-lens is not installed: ours alone is timed (pip install sae-lens, or --peer FOLDER)", flush=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    wanted = arguments.only or ("speed", "planted", "change")
    if "speed" in wanted:
        results["speed"] = measure_speed(arguments.steps, arguments.repeats, baseline is not None)
    if "change" in wanted:
        results["change"] = measure_change()
    if "planted" in wanted:
        results["planted"] = measure_planted(arguments.scale)
    results["versions"] = {"torch": version("torch"), "sae-lens": baseline}
    results["machine"] = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
