"""``report.html`` of a comparison of two models: what did training change? Drawn from ``diff.json`` alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.evals.statistics import student_t_quantile, summarize_seeds
from posttrain.evals.tables import TextTable
from posttrain.reports.charts import Panel, Range, Series
from posttrain.reports.page import decimals, render, visible

# What a comparison found, as sentences that follow from its numbers alone.


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


Facts = Mapping[str, Any]
NUM_RATIOS = 20
NUM_LATENTS = 16


def render_diff(results: Facts) -> str:
    """The whole page as HTML (``templates/differences.jinja``)."""
    about = f"Base: {results['base']}. Post: {results['post']}. Read at {results['activations']['site']}."
    kl = results["divergence"]
    return render(
        "differences.jinja",
        title=results["title"],
        lead=f"{results['description']} {about}" if results["description"] else about,
        results=results,
        findings=findings(results),
        causal_findings=causal_lines(results["causal"]) if "causal" in results else [],
        half_width=_half_width(kl["per_answer_error"], kl["documents"]),
        largest_kl=max([value for shown in kl["shown"] for value in shown["kl"]] + [1e-9]),
        panels=_panels(results),
        tables=_tables(results),
        seconds=[(name, f"{value:g} s") for name, value in results["seconds"].items()],
        command=results["command"],
    )


def _panels(results: Facts) -> dict[str, Any]:
    """Every chart of the page by its place there."""
    return {
        "changes": _change_panels(results["dictionaries"][0]),
        "ratios": _ratio_panels([f for f in results["features"] if f["mean_ratio"] is not None][:NUM_RATIOS]),
        "divergence": _divergence_panels(results["divergence"]["places"]),
        "patching": [_patching_panel(results["patching"])] if "patching" in results else [],
        "causal": _causal_panels(results["causal"]) if "causal" in results else [],
    }


def _change_panels(dictionary: Facts) -> list[Panel]:
    """Every feature's firing rate before and after, and the amplification that latent scaling reads."""
    rates, scaling = dictionary["rates"], dictionary["scaling"]
    tested = [i for i, (before, is_tested) in enumerate(zip(rates["base"], rates["tested"], strict=True))
              if before and is_tested]  # fmt: skip
    fired = [
        (i, rates["base"][i], after, rates["mean_post"][i] > rates["mean_base"][i], f"{after:.3%} of tokens in post")
        for i in tested
        if (after := rates["post"][i])
    ]
    scaled = [
        (i, rates["base"][i], max(-0.5, min(3.0, value)), value > 1, f"{value:.2f} times as much in the post model")
        for i in tested
        if (value := scaling["amplification"][i]) is not None and scaling["energy"][i]
    ]
    panels = []
    where = "share of tokens on which it fires"
    if fired:
        limits = _decades([value for dot in fired for value in dot[1:3]])
        panels.append(
            Panel("How often each feature fires", "on the dotted line: as often as before", _dots(rates, fired),
                  x_label=f"{where}: base", y_label="post", x_range=limits, y_range=limits, log_x=True, log_y=True,
                  has_diagonal=True)
        )  # fmt: skip
    if scaled:
        about = "latent scaling: the factor by which its direction is present in the post model where the base has it"
        panels.append(
            Panel("How much of each feature is left, or more", about, _dots(rates, scaled), x_label=f"{where} (base)",
                  y_label="times as much", x_range=_decades([dot[1] for dot in scaled]), log_x=True,
                  levels=[("as much", 1.0)])
        )  # fmt: skip
    return panels


def _dots(rates: Facts, dots: Iterable[tuple[int, float, float, bool, str]]) -> list[Series]:
    """Features (number, x, y, whether it rose, note) as points: those that did not change, rose, and fell."""
    labels = {"soft": "not changed", "c1": "changed, rose", "c0": "changed, fell"}
    groups = {color: Series(label, [], [], is_points=True, color=color) for color, label in labels.items()}
    for i, x, y, has_risen, note in dots:
        group = groups["soft" if not rates["changed"][i] else "c1" if has_risen else "c0"]
        group.xs.append(x)
        group.ys.append(y)
        group.notes.append(f"feature {i}: {x:.3%} of tokens in the base, {note}")
    return list(groups.values())


def _ratio_panels(features: Sequence[Facts]) -> list[Panel]:
    """Mean activations, post over base, with their intervals, spread as powers of two."""
    values = [f[key] for f in features for key in ("mean_ratio", "mean_low", "mean_high")]
    reach = min(6.0, max([1.0, *(abs(math.log2(v)) for v in values if v and v > 0 and math.isfinite(v))]))
    series = []
    for color, label in (("c1", "more"), ("c0", "less")):
        own = [(i, f) for i, f in enumerate(features) if (f["mean_ratio"] > 1) == (color == "c1")]
        xs, ys = [float(i) for i, _ in own], [f["mean_ratio"] for _, f in own]
        low, high = ([f[key] or math.nan for _, f in own] for key in ("mean_low", "mean_high"))
        notes = [f"feature {f['feature']}: {y:.3g} [{a:.3g}, {b:.3g}]"
                 for (_, f), y, a, b in zip(own, ys, low, high, strict=True)]  # fmt: skip
        series.append(Series(label, xs, ys, low, high, is_points=True, color=color, notes=notes))
    powers = range(-int(reach), int(reach) + 1)
    chart = Panel(
        "Mean activation, post over base", "the most changed; 95 % intervals over documents", series,
        x_label="feature", y_label="times", x_range=(-0.6, len(features) - 0.4), log_y=True,
        y_range=(2.0 ** -(reach + 0.2), 2.0 ** (reach + 0.2)), size="wide",
        x_ticks=[(float(i), f"{f['feature']}") for i, f in enumerate(features)],
        y_ticks=[(2.0**power, f"{2**power}×" if power >= 0 else f"1/{2**-power}") for power in powers],
    )  # fmt: skip
    return [chart] if features else []


def _divergence_panels(places: Sequence[Facts]) -> list[Panel]:
    """KL at each token of an answer."""
    if not places:
        return []
    xs, ys = [place["place"] + 1.0 for place in places], [place["kl"] for place in places]
    halves = [_half_width(place["error"], place["answers"]) for place in places]
    low, high = ([y + sign * half for y, half in zip(ys, halves, strict=True)] for sign in (-1, 1))
    line = Series("KL(post ‖ base)", xs, ys, low, high, has_dots=True)
    return [
        Panel("KL along the answer", "mean over answers; band: 95 %", [line], x_label="token of the answer",
              y_label="KL, nats", x_range=(1, max(2.0, xs[-1])))
    ]  # fmt: skip


def _patching_panel(patching: Facts) -> Panel:
    """The share of KL recovered against the number of features."""
    xs = [float(count) for count in patching["counts"]]
    lines = [
        _over_seeds("most changed features", xs, patching["changed"], "c1"),
        _over_seeds("random features like them", xs, patching["random"], "c0"),
        Series("frozen random dictionary, its most changed", xs, patching["frozen"], has_dots=True, is_dashed=True,
               color="c3"),
    ]  # fmt: skip
    if "difference" in patching:
        lines.append(Series("dictionary of the difference", xs, patching["difference"], has_dots=True, color="c2"))
    levels = [("all of the difference", patching["everything"]), ("mean difference", patching["mean_vector"])]
    return Panel(
        "How much the changed features explain", "band: 95 % over seeds (Student t)", lines, is_share=True,
        x_label="features patched into the base", y_label="share of KL recovered", log_x=True, levels=levels,
        x_range=(xs[0], max(xs[-1], xs[0] + 1)), x_ticks=_named(xs),
    )  # fmt: skip


def _causal_panels(causal: Facts) -> list[Panel]:
    """Outcomes against the number of features and against the dose, for each test."""
    unchanged, everything = causal["unchanged"], causal["everything"]
    base, post = ("base, untouched", unchanged["base"]), ("post, untouched", unchanged["post"])
    all_post, all_base = ("all of post's activations", everything["base"]), ("all of base's", everything["post"])
    tests = (
        ("given", "The base, given the changes", [base, all_post]),
        ("returned", "The post model, changes undone", [post, all_base]),
        ("scaled", "The post model, features scaled", [post]),
    )
    panels = []
    for test, title, levels in tests:
        by_count = [[point for point in row if point["dose"] == 1.0] for row in causal[test]]
        by_dose = [[point for point in row if point["features"] == causal["features"]] for row in causal[test]]
        if len(by_count[0]) > 1 and test != "scaled":
            panels.append(_causal_panel(title, "all the way", "features", by_count, levels, causal["measure"]))
        if len(by_dose[0]) > 1:
            caption = f"{causal['features']} features, by dose"
            panels.append(_causal_panel(title, caption, "dose", by_dose, levels, causal["measure"]))
    return panels


def _causal_panel(
    title: str,
    caption: str,
    key: str,
    rows: Sequence[Sequence[Facts]],
    levels: Sequence[tuple[str, float]],
    measure: str,
) -> Panel:
    xs = [float(point[key]) for point in rows[0]]
    changed = [[point["changed"] for point in row] for row in rows]
    others = [[sum(point["random"]) / len(point["random"]) for point in row] for row in rows]
    lines = [
        _over_seeds("most changed features", xs, changed, "c1"),
        _over_seeds("random features like them", xs, others, "c0"),
    ]
    return Panel(  # a band over few seeds may be wider than anything that can happen
        title, f"{caption}; band: 95 % over seeds", lines, x_label=key, y_label=measure, log_x=key == "features",
        x_range=(xs[0], max(xs[-1], xs[0] + 1e-9)), x_ticks=_named(xs), max_band=0.35, levels=levels,
    )  # fmt: skip


def _tables(results: Facts) -> dict[str, TextTable]:
    """Every table of the page by its place there."""
    answers = [
        [who, f"{x['answers']}", f"{x['accuracy']:.1%}", f"{x['reward']:.3f}", f"{x['tokens']:.1f}"]
        for who in ("base", "post")
        if (x := results["documents"].get(who)) is not None
    ]
    lens = [
        [entry["where"], *(" ".join(visible(token) for token, _ in entry[side]) for side in ("up", "down")),
         f"{entry['norm']:.1%}"]
        for entry in results["lens"]
    ]  # fmt: skip
    seeds = [
        [f"{pair['first']} in {pair['second']}", f"{pair['count']}",
         *(decimals(pair[key]) for key in ("share", "by_chance", "cosine"))]
        for pair in results["overlap"]["pairs"]
    ]  # fmt: skip
    tables = {
        "answers": TextTable("", ["answers of", "number", "right", "reward", "tokens"], answers),
        "tokens_at": _token_table("the token itself", results["divergence"]["tokens_at"]),
        "tokens_after": _token_table("the token before", results["divergence"]["tokens_after"]),
        "lens": TextTable("", ["mean over", "for", "against", "size"], lens, num_labels=3),
        "trust": _trust_table(results),
        "seeds": TextTable("", ["seeds", "changed", "found again", "of all", "mean cosine"], seeds),
    }
    if "difference" in results:
        tables["difference"] = _latent_table(results["difference"])
    return tables | ({"verdicts": _verdict_table(results["causal"])} if "causal" in results else {})


def _token_table(head: str, entries: Sequence[Facts]) -> TextTable:
    lines = [[visible(e["token"]), f"{e['share']:.1%}", f"{e['mean']:.3f}", f"{e['count']:,}"] for e in entries]
    return TextTable("", [head, "share of KL", "mean, nats", "times"], lines)


def _latent_table(dictionary: Facts) -> TextTable:
    lines = [
        [
            *(f"{latent['latent']}", " ".join(visible(token) for token, _ in latent["promotes"]["up"])),
            *(f"{latent['share'] or 0:.1%}", f"{latent['density'] or 0:.2%}"),
            *(decimals(latent[key]) for key in ("beta_base", "beta_post", "nu")),
        ]
        for latent in dictionary["latents"][:NUM_LATENTS]
    ]
    header = ["latent", "speaks for", "share", "fires on", "β base", "β post", "ν"]
    return TextTable("", header, lines, num_labels=2)


def _trust_table(results: Facts) -> TextTable:
    """Null tests, seeds, and the frozen decoder."""
    names = [f"seed {i}" for i in range(len(results["dictionaries"]))] + ["frozen decoder"]
    lines = [
        [
            name,
            *(f"{dictionary['quality'][model]['fvu']:.3f}" for model in ("base", "post")),
            *(f"{dictionary['counts'][key]}" for key in ("tested", "significant", "changed")),
            *(f"{dictionary['null'][key]['changed']}" for key in ("itself", "swapped", "halves")),
        ]
        for name, dictionary in zip(names, [*results["dictionaries"], results["frozen"]], strict=True)
    ]
    header = ["dictionary", "FVU base", "FVU post", "tested", "significant", "changed"]
    return TextTable("", [*header, "null: itself", "swapped", "halves"], lines)


def _verdict_table(causal: Facts) -> TextTable:
    lines = []
    for name, verdict in causal["verdicts"].items():
        mean, half = verdict["mean"], verdict["half_width"]
        interval = "one seed" if half is None else f"{mean - half:+.3f} to {mean + half:+.3f}"
        seeds = ", ".join(f"{value:+.3f}" for value in verdict["values"])
        answer = "—" if verdict["separates"] is None else "yes" if verdict["separates"] else "no"
        lines.append([name, f"{mean:+.4f}", interval, seeds, answer])
    return TextTable("", ["test", "difference", "95 % interval", "seeds", "separates"], lines)


def _over_seeds(label: str, xs: list[float], rows: Sequence[Sequence[float]], color: str) -> Series:
    """The mean over seeds (rows) at each x, with its 95 % Student-t band where there are several."""
    summaries = [s for column in zip(*rows, strict=True) if (s := summarize_seeds(list(column))) is not None]
    means = [s.mean for s in summaries]
    halves = [s.half_width for s in summaries if s.half_width is not None]
    low, high = (
        [mean + sign * half for mean, half in zip(means, halves, strict=True)] if len(halves) == len(means) else []
        for sign in (-1, 1)
    )
    return Series(label, xs, means, low, high, has_dots=True, color=color)


def _half_width(error: float, num_answers: int) -> float:
    """Of the 95 % Student-t interval of a mean over answers, from its standard error."""
    return student_t_quantile(max(1, num_answers - 1)) * error


def _decades(values: Sequence[float]) -> Range:
    """The powers of ten around positive values."""
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)) + 1e-9)


def _named(values: Sequence[float]) -> list[tuple[float, str]]:
    return [(value, f"{value:g}") for value in values]
