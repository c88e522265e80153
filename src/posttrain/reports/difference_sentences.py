"""What a comparison found, as sentences that follow from its numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def findings(results: Mapping[str, Any]) -> list[str]:
    """What was found, one sentence each, from the numbers alone."""
    lines = [_changed_line(results["dictionaries"], results["overlap"])]
    lines.append(_divergence_line(results["divergence"]))
    if "patching" in results:
        lines.append(_patching_line(results["patching"]))
    if "causal" in results:
        lines += causal_lines(results["causal"])
    lines.append(_null_line(results["dictionaries"]))
    return lines


def _changed_line(dictionaries: Sequence[Mapping[str, Any]], overlap: Mapping[str, Any]) -> str:
    first = dictionaries[0]["counts"]
    share = dictionaries[0]["rate_within_a_fifth"]
    line = (
        f"{first['changed']} of {first['tested']} features changed by more than the least change "
        f"({first['rose']} rose, {first['fell']} fell); {_percent(share)} of all fire within 20 % as often as before."
    )
    if overlap["share"] is not None and overlap["pairs"]:
        chance = sum(pair["by_chance"] for pair in overlap["pairs"]) / len(overlap["pairs"])
        others = ", ".join(str(d["counts"]["changed"]) for d in dictionaries[1:])
        line += (
            f" Other seeds of the dictionary find {others}; {_percent(overlap['share'])} of them are found again by "
            f"another seed ({_percent(chance)} of random ones)."
        )
    return line


def _divergence_line(kl: Mapping[str, Any]) -> str:
    line = f"The post model's answers are {kl['per_answer']:.2f} nats from the base ({kl['per_token']:.3f} a token)"
    total = kl["per_token"] * kl["tokens"]
    if not kl["places"] or total <= 0:
        return f"{line}."
    peak = max(kl["places"], key=lambda place: place["kl"] * place["answers"])
    share = peak["kl"] * peak["answers"] / total
    gained = ", ".join(repr(text) for text, _ in kl["moved"]["up"][:3])
    lost = ", ".join(repr(text) for text, _ in kl["moved"]["down"][:3])
    return (
        f"{line}; {_percent(share)} of it sits at token {peak['place'] + 1} of the answer. Over the answers {gained} "
        f"gained most probability and {lost} lost most."
    )


def _patching_line(patching: Mapping[str, Any]) -> str:
    counts = patching["counts"]
    changed, others = (
        [_mean(column) for column in zip(*patching[name], strict=True)] for name in ("changed", "random")
    )
    return (
        f"{counts[-1]} changed features, put into the base, recover {_percent(changed[-1])} of the KL; random ones "
        f"that fire as often {_percent(others[-1])}, the mean difference alone {_percent(patching['mean_vector'])}, "
        f"the whole difference at this layer {_percent(patching['everything'])}."
    )


def causal_lines(causal: Mapping[str, Any]) -> list[str]:
    """What the causal test says, plainly: one sentence a test."""
    base, post = causal["unchanged"]["base"], causal["unchanged"]["post"]
    told = (
        ("given", 1.0, "base", base, "Moved to where the post model has them", "the base's"),
        ("returned", 1.0, "post", post, "Moved back to where the base has them", "the post model's"),
        ("scaled", 0.0, "post", post, "Taken away altogether", "the post model's"),
    )
    lines = []
    for test, dose, writer, untouched, what, whose in told:
        index = next(
            (i for i, p in enumerate(causal[test][0]) if p["dose"] == dose and p["features"] == causal["features"]),
            None,
        )
        if index is None:
            continue
        point = causal[test][0][index]
        changed = _mean([row[index]["changed"] for row in causal[test]])
        others = _mean([_mean(row[index]["random"]) for row in causal[test]])
        verdict = causal["verdicts"][f"{test} {point['features']} at {dose:g}"]
        whole = causal["everything"][writer] if test != "scaled" else None
        most = f" (all activations there: {whole:.3f})" if whole is not None else ""
        line = (
            f"{what}, the {point['features']} most changed features turn {whose} {causal['measure']} from "
            f"{untouched:.3f} into {changed:.3f}, random features like them into {others:.3f}{most}"
        )
        lines.append(line + _judgement(verdict))
    return lines


def _judgement(verdict: Mapping[str, Any]) -> str:
    if verdict["half_width"] is None:
        return "; with one seed there is no interval, so this shows nothing yet."
    low, high = verdict["mean"] - verdict["half_width"], verdict["mean"] + verdict["half_width"]
    answer = (
        "the test separates changed from random features"
        if verdict["separates"]
        else "the test does NOT separate changed from random features"
    )
    return f"; difference {low:+.3f} to {high:+.3f}, 95 % over {verdict['seeds']} seeds: {answer}."


def _null_line(dictionaries: Sequence[Mapping[str, Any]]) -> str:
    counts = {name: sum(d["null"][name]["changed"] for d in dictionaries) for name in dictionaries[0]["null"]}
    flagged = sum(counts.values())
    tests = "the base beside itself, models swapped in half of the documents, two halves of the documents"
    if flagged == 0:
        return f"Where nothing can have changed ({tests}) no feature is flagged, with any seed."
    return f"Null tests ({tests}) flag {flagged} features: {counts}. Take the changes with that much doubt."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None) -> str:
    return "an unknown share" if value is None else f"{value:.1%}"
