"""Changes that were planted, found again: 24 of 512 features amplified 1.8 times, removed or added between two models.

    python benchmarks/differences.py [--rows 60000] [--steps 1500]

One dictionary of the base's activations, trained here, is read on both:

amplified   by what factor, read by latent scaling and by the mean activation (planted: 1.8).
removed     what is left (planted: 0).
changed     how many of the 16 that the base has are flagged, how many of them are the 16 most changed, and how many of
            the others are flagged: directions are not at right angles, so a feature hears of its neighbours' changes.
difference  how many of the 24 a dictionary of post - base with k = 1 finds, for three seeds (cosine above 0.9).
null        features flagged in the base next to itself, with the models swapped in half of the documents, and in two
            halves of the documents.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from planted import Planted, PlantedChange, TensorRows, match, plant, plant_change
from torch import Tensor

from posttrain.interpret.activations.shards import write_tensors
from posttrain.interpret.differences.changes import DictionaryChanges, measure_changes
from posttrain.interpret.saes.fitting import fit_sae
from posttrain.interpret.saes.sae import SparseAutoencoder
from posttrain.interpret.saes.sae_recipe import SaeComponent, SaeTrainSection

RESULTS = Path(__file__).parent / "results" / "differences.json"
D, FEATURES, L0, NOISE = 128, 512, 12.0, 0.02
DOCUMENT = 50  # rows; what is planted is independent from row to row


def fit(x: Tensor, kind: str, k: float, features: int, settings: dict[str, Any], seed: int) -> SparseAutoencoder:
    word = SaeComponent.model_validate({"name": kind, "k": k, "features": features})
    return fit_sae(TensorRows(x), len(x), word, SaeTrainSection(**settings), seed=seed)


def read(change: PlantedChange, dictionary: SparseAutoencoder, folder: Path) -> DictionaryChanges:
    documents = [[0] * len(part) for part in change.base.split(DOCUMENT)]
    store = write_tensors(folder, {"resid.1": [change.base, change.post]}, documents=documents)
    start = max(0, len(change.base) - DOCUMENT * 100)  # of few rows all are measured on
    return measure_changes(store, "resid.1", dictionary, held_out_start=start, seed=0, min_documents=12, min_change=0.2)


def partners(planted: Planted, dictionary: SparseAutoencoder) -> tuple[Tensor, Tensor]:
    """For each planted feature the most similar one of the dictionary, and how similar it is."""
    cosine, where = (planted.directions @ dictionary.W_dec.T).max(dim=1)
    return where, cosine


def spread(values: Tensor) -> dict[str, float]:
    return {
        "median": round(float(values.median()), 3),
        "lowest": round(float(values.min()), 3),
        "highest": round(float(values.max()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    planted = plant(D, FEATURES, L0, noise=NOISE)
    change = plant_change(planted, arguments.rows)
    changed = torch.cat([(change.factors != 1).nonzero()[:, 0], change.added])
    difference = {}
    for seed in range(3):
        settings = {"steps": 600, "batch": 1024, "lr": 3e-3, "precision": "fp32"}
        found = fit(change.post - change.base, "topk", 1, 64, settings, seed)
        difference[f"seed {seed}"] = int((match(found.W_dec, planted.directions[changed])[1] > 0.9).sum())
    started = time.process_time()
    settings = {"steps": arguments.steps, "batch": 2048, "lr": 3e-3}
    dictionary = fit(change.base, "batchtopk", L0, FEATURES, settings, 0)
    seconds = time.process_time() - started
    with tempfile.TemporaryDirectory() as folder:
        seen = read(change, dictionary, Path(folder) / "planted")
    where, cosine = partners(planted, dictionary)
    amplified, removed = change.factors == 1.8, change.factors == 0
    untouched = change.factors == 1
    untouched[change.added] = False
    results = {
        "rows": arguments.rows,
        "mean_cosine": round(float(cosine.mean()), 3),
        "dictionary_cpu_seconds": round(seconds),
        "amplified": {
            "planted": 1.8,
            "by_latent_scaling": spread(seen.amplification[where[amplified]]),
            "by_mean_activation": spread(seen.changes.ratio[1][where[amplified]]),
        },
        "removed": {
            "planted": 0.0,
            "by_latent_scaling": spread(seen.amplification[where[removed]]),
            "by_mean_activation": spread(seen.changes.ratio[1][where[removed]]),
        },
        "changed": {
            "of_16_that_the_base_has": int(seen.changes.changed[where[amplified | removed]].sum()),
            "of_them_among_the_16_most_changed": len(
                set(seen.changes.ranking()[:16].tolist()) & set(where[amplified | removed].tolist())
            ),
            f"of_{int(untouched.sum())}_others": int(seen.changes.changed[where[untouched]].sum()),
        },
        "difference_k1_of_24": difference,
        "null": {name: null.num_changed for name, null in seen.nulls.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
