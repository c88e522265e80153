"""Sentences of a comparison follow from its numbers, in either direction."""

from __future__ import annotations

from typing import Any

from posttrain.reports.differences import causal_lines, findings


def counts(changed: int) -> dict[str, int]:
    return {"features": 9, "tested": 8, "significant": changed, "changed": changed, "rose": changed, "fell": 0}


def found(null: int = 0, separates: bool | None = True) -> dict[str, Any]:
    half = None if separates is None else (0.1 if separates else 0.5)
    verdict = {"mean": 0.25, "half_width": half, "seeds": 2, "values": [0.2, 0.3], "separates": separates}
    point = {"features": 4, "dose": 1.0, "changed": 0.5, "random": [0.2, 0.3], "difference": 0.25}
    scaled = point | {"dose": 0.0, "changed": 0.25, "random": [0.75, 0.75]}
    nulls = {name: counts(null if name == "halves" else 0) for name in ("itself", "swapped", "halves")}
    sae = {"counts": counts(3), "rate_within_a_fifth": 0.75, "null": nulls}
    pairs = [{"first": a, "second": 1 - a, "share": 0.5, "by_chance": 0.1, "cosine": 0.9, "count": 3} for a in (0, 1)]
    return {
        "dictionaries": [sae, sae],
        "overlap": {"pairs": pairs, "share": 0.5},
        "divergence": {
            "per_answer": 2.0,
            "per_token": 0.1,
            "tokens": 100,
            "places": [
                {"place": 0, "kl": 0.0, "error": 0.0, "answers": 5},
                {"place": 1, "kl": 1.6, "error": 0.0, "answers": 5},
            ],
            "moved": {"up": [["4", 0.1], ["5", 0.1]], "down": [["</think>", -0.2]]},
        },
        "patching": {
            "counts": [1, 8],
            "changed": [[0.1, 0.5], [0.2, 0.7]],
            "random": [[0.0, 0.0], [0.0, 0.1]],
            "mean_vector": 0.25,
            "everything": 0.95,
        },
        "causal": {
            "measure": "reward",
            "features": 4,
            "unchanged": {"base": 0.25, "post": 1.0},
            "everything": {"base": 0.9, "post": 0.3},
            "given": [[point], [point]],
            "returned": [[point], [point]],
            "scaled": [[scaled], [scaled]],
            "verdicts": {"given 4 at 1": verdict, "returned 4 at 1": verdict, "scaled 4 at 0": verdict},
        },
    }


def test_the_findings_are_the_numbers() -> None:
    lines = findings(found())
    assert "3 of 8 features changed" in lines[0]
    assert "50.0% of them are found again by another seed (10.0% of random ones)" in lines[0]
    assert "80.0% of it sits at token 2 of the answer" in lines[1]
    assert "'4', '5' gained most probability and '</think>' lost most" in lines[1]
    assert "8 changed features, put into the base, recover 60.0% of the KL" in lines[2]
    assert "random ones that fire as often 5.0%" in lines[2]
    assert "no feature is flagged" in lines[-1]


def test_what_separates_and_what_does_not_is_reported_plainly() -> None:
    given, returned, scaled = causal_lines(found()["causal"])
    assert "the base's reward from 0.250 into 0.500, random features like them into 0.250" in given
    assert "(all activations there: 0.900); difference +0.150 to +0.350, 95 % over 2 seeds" in given
    assert given.endswith("the test separates changed from random features.")
    assert "the post model's reward from 1.000 into 0.500" in returned
    assert "from 1.000 into 0.250, random features like them into 0.750;" in scaled
    for line in causal_lines(found(separates=False)["causal"]):
        assert line.endswith("the test does NOT separate changed from random features.")
    for line in causal_lines(found(separates=None)["causal"]):
        assert line.endswith("with one seed there is no interval, so this shows nothing yet.")
