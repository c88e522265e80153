"""``report.html`` comparing two models. Built from ``diff.json`` only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evaluation.statistics import student_t_quantile, summarize_seeds
from posttrain.reports.charts import Panel, Series, interval_ends
from posttrain.reports.page import render

Info = Mapping[str, Any]


def findings(results: Info) -> list[str]:
    """The findings, one sentence each, from the numbers alone."""
    lines = [_changed_line(results["dictionaries"], results["overlap"]), _divergence_line(results["divergence"])]
    if "patching" in results:
        lines.append(_patching_line(results["patching"]))
    if "causal" in results:
        lines += causal_lines(results["causal"])
    lines.append(_null_line(results["dictionaries"]))
    return lines


def _changed_line(saes: Sequence[Info], overlap: Info) -> str:
    first = saes[0]["counts"]
    share = saes[0]["rate_within_a_fifth"]
    line = (
        f"{first['changed']} of {first['tested']} features changed by more than the least change "
        f"({first['rose']} rose, {first['fell']} fell); {_percent(share)} of all fire within 20 % as often as before."
    )
    if overlap["share"] is not None and overlap["pairs"]:
        chance = sum(pair["by_chance"] for pair in overlap["pairs"]) / len(overlap["pairs"])
        others = ", ".join(str(d["counts"]["changed"]) for d in saes[1:])
        line += (
            f" Other seeds of the dictionary find {others}; {_percent(overlap['share'])} of them are found again by "
            f"another seed ({_percent(chance)} of random ones)."
        )
    return line


def _divergence_line(kl: Info) -> str:
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


def _patching_line(patching: Info) -> str:
    counts = patching["counts"]
    changed = _mean([of_seed[-1] for of_seed in patching["changed"]])
    others = _mean([of_seed[-1] for of_seed in patching["random"]])
    return (
        f"{counts[-1]} changed features, put into the base, recover {_percent(changed)} of the KL; random ones "
        f"that fire as often {_percent(others)}, the mean difference alone {_percent(patching['mean_vector'])}, "
        f"the whole difference at this layer {_percent(patching['everything'])}."
    )


def causal_lines(causal: Info) -> list[str]:
    """The result of the causal test, one sentence a test."""
    base = causal["unchanged"]["base"]
    post = causal["unchanged"]["post"]
    tests = (
        ("given", 1.0, "base", base, "Moved to where the post model has them", "the base's"),
        ("returned", 1.0, "post", post, "Moved back to where the base has them", "the post model's"),
        ("scaled", 0.0, None, post, "Taken away altogether", "the post model's"),
    )
    lines = []
    for test, factor, writer, untouched, what, whose in tests:
        points = causal[test][0]
        count = causal["features"]
        index = next((i for i, p in enumerate(points) if p["dose"] == factor and p["features"] == count), None)
        if index is None:
            continue
        changed = _mean([row[index]["changed"] for row in causal[test]])
        others = _mean([_mean(row[index]["random"]) for row in causal[test]])
        most = ""
        if writer is not None:
            most = f" (all activations there: {causal['everything'][writer]:.3f})"
        line = (
            f"{what}, the {count} most changed features turn {whose} {causal['measure']} from "
            f"{untouched:.3f} into {changed:.3f}, random features like them into {others:.3f}{most}"
        )
        verdict = causal["verdicts"][f"{test} {count} at {factor:g}"]
        if verdict["half_width"] is None:
            lines.append(f"{line}; with one seed there is no interval, so this shows nothing yet.")
            continue
        answer = "does NOT separate"
        if verdict["separates"]:
            answer = "separates"
        low = verdict["mean"] - verdict["half_width"]
        high = verdict["mean"] + verdict["half_width"]
        interval = f"difference {low:+.3f} to {high:+.3f}, 95 % over {verdict['seeds']} seeds"
        lines.append(f"{line}; {interval}: the test {answer} changed from random features.")
    return lines


def _null_line(saes: Sequence[Info]) -> str:
    counts = {name: sum(d["null"][name]["changed"] for d in saes) for name in saes[0]["null"]}
    flagged = sum(counts.values())
    tests = "the base against itself, models swapped in half of the documents, two halves of the documents"
    if flagged == 0:
        return f"Where nothing can have changed ({tests}) no feature is flagged, with any seed."
    return f"Null tests ({tests}) flag {flagged} features: {counts}. Take the changes with that much doubt."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None) -> str:
    if value is None:
        return "an unknown share"
    return f"{value:.1%}"


def render_diff(results: Info) -> str:
    """The whole page as HTML (``templates/differences.jinja``)."""
    lead = f"Base: {results['base']}. Post: {results['post']}. Read at {results['activations']['site']}."
    if results["description"]:
        lead = f"{results['description']} {lead}"
    kl = results["divergence"]
    panels = {
        "changes": _change_panels(results["dictionaries"][0]["rates"]),
        "divergence": _divergence_panels(kl["places"]),
        "patching": [],
        "causal": [],
    }
    if "patching" in results:
        panels["patching"] = [_patching_panel(results["patching"])]
    causal_findings = []
    if "causal" in results:
        panels["causal"] = _causal_panels(results["causal"])
        causal_findings = causal_lines(results["causal"])
    smallest_scale = 1e-9  # avoid dividing by 0 if there is no KL
    shown_kls = [value for shown in kl["shown"] for value in shown["kl"]]
    return render(
        "differences.jinja",
        title=results["title"],
        lead=lead,
        results=results,
        findings=findings(results),
        causal_findings=causal_findings,
        half_width=_half_width(kl["per_answer_error"], kl["documents"]),
        largest_kl=max([*shown_kls, smallest_scale]),
        panels=panels,
        seconds=[(name, f"{value:g} s") for name, value in results["seconds"].items()],
        command=results["command"],
    )


def _change_panels(rates: Info) -> list[Panel]:
    """Firing rates of all features before and after."""
    labels = {"soft": "not changed", "c1": "changed, rose", "c0": "changed, fell"}
    groups = {color: Series(label, [], [], is_points=True, color=color) for color, label in labels.items()}
    columns = [rates[name] for name in ("base", "post", "tested", "changed", "mean_base", "mean_post")]
    for before, after, is_tested, has_changed, mean_before, mean_after in zip(*columns, strict=True):
        if not is_tested or not before or not after:
            continue
        if not has_changed:
            color = "soft"
        elif mean_after > mean_before:
            color = "c1"
        else:
            color = "c0"
        groups[color].xs.append(before)
        groups[color].ys.append(after)
    values = [value for group in groups.values() for value in (*group.xs, *group.ys)]
    if not values:
        return []
    lowest = 10.0 ** math.floor(math.log10(min(values)))
    highest = 10.0 ** math.ceil(math.log10(max(values)) + 1e-9)
    limits = (lowest, highest)
    where = "share of tokens on which it fires"
    about = "on the dotted line: as often as before"
    return [
        Panel("How often each feature fires", about, list(groups.values()), x_label=f"{where}: base", y_label="post",
              x_range=limits, y_range=limits, log_x=True, log_y=True, has_diagonal=True)
    ]  # fmt: skip


def _divergence_panels(places: Sequence[Info]) -> list[Panel]:
    """KL per answer token."""
    if not places:
        return []
    xs = [place["place"] + 1.0 for place in places]
    ys = [place["kl"] for place in places]
    halves = [_half_width(place["error"], place["answers"]) for place in places]
    low = [y - half for y, half in zip(ys, halves, strict=True)]
    high = [y + half for y, half in zip(ys, halves, strict=True)]
    line = Series("KL(post ‖ base)", xs, ys, low, high)
    about = "mean over answers; band: 95 %"
    where = "token of the answer"
    return [Panel("KL along the answer", about, [line], x_label=where, y_label="KL, nats")]


def _patching_panel(patching: Info) -> Panel:
    """The share of KL recovered against the number of features."""
    xs = [float(count) for count in patching["counts"]]
    lines = [
        _over_seeds("most changed features", xs, patching["changed"], "c1"),
        _over_seeds("random features like them", xs, patching["random"], "c0"),
        Series("frozen random dictionary, its most changed", xs, patching["frozen"], is_dashed=True, color="c3"),
    ]
    if "difference" in patching:
        lines.append(Series("dictionary of the difference", xs, patching["difference"], color="c2"))
    levels = [("all of the difference", patching["everything"]), ("mean difference", patching["mean_vector"])]
    return Panel(
        "How much the changed features explain", "band: 95 % over seeds (Student t)", lines, is_share=True,
        x_label="features patched into the base", y_label="share of KL recovered", log_x=True, levels=levels,
        x_ticks=[(x, f"{x:g}") for x in xs],
    )  # fmt: skip


def _causal_panels(causal: Info) -> list[Panel]:
    """Outcomes against the number of features and against the dose, for each test."""
    unchanged = causal["unchanged"]
    everything = causal["everything"]
    base = ("base, untouched", unchanged["base"])
    post = ("post, untouched", unchanged["post"])
    tests = {
        "given": ("The base, given the changes", [base, ("all of post's activations", everything["base"])]),
        "returned": ("The post model, changes undone", [post, ("all of base's", everything["post"])]),
        "scaled": ("The post model, features scaled", [post]),
    }
    varied = (("features", "dose", 1.0), ("dose", "features", causal["features"]))
    panels = []
    for test, (title, levels) in tests.items():
        for key, other, fixed in varied:
            rows = [[point for point in row if point[other] == fixed] for row in causal[test]]
            if len(rows[0]) < 2 or (test, key) == ("scaled", "features"):
                continue
            caption = f"{other} {fixed:g}; band: 95 % over seeds"
            panels.append(_causal_panel(title, caption, key, rows, causal["measure"], levels))
    return panels


def _causal_panel(
    title: str,
    caption: str,
    key: str,
    rows: Sequence[Sequence[Info]],
    measure: str,
    levels: Sequence[tuple[str, float]],
) -> Panel:
    """Outcomes against a point's ``key``. ``rows``: points per seed."""
    xs = [float(point[key]) for point in rows[0]]
    changed = [[point["changed"] for point in row] for row in rows]
    others = [[_mean(point["random"]) for point in row] for row in rows]
    lines = [
        _over_seeds("most changed features", xs, changed, "c1"),
        _over_seeds("random features like them", xs, others, "c0"),
    ]
    ticks = [(x, f"{x:g}") for x in xs]
    return Panel(
        title, caption, lines, x_label=key, y_label=measure, log_x=key == "features", x_ticks=ticks, levels=levels
    )


def _over_seeds(label: str, xs: list[float], rows: Sequence[Sequence[float]], color: str) -> Series:
    """Mean over seeds (rows) per x, with a 95 % Student-t band for multiple seeds."""
    summaries = []
    for column in zip(*rows, strict=True):
        summary = summarize_seeds(list(column))
        if summary is not None:
            summaries.append(summary)
    return Series(label, xs, *interval_ends(summaries), color=color)


def _half_width(error: float, num_answers: int) -> float:
    """Half-width of a 95 % Student-t interval, from the standard error of a mean over answers."""
    return student_t_quantile(max(1, num_answers - 1)) * error
