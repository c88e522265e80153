"""The sections of a comparison's page, each a function of what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from posttrain.evals.seeds import student_t_quantile
from posttrain.reports.interpret.diff_charts import Axes, Dot, Line, interval_bars, line_chart, scatter_chart, span_of
from posttrain.reports.interpret.diff_parts import decades, draw_chip, draw_table, draw_token, over_seeds, show_number
from posttrain.reports.interpret.diff_sentences import causal_lines


def answers_section(found: Mapping[str, Any]) -> str:
    """What both models read."""
    facts = found["documents"]
    rows = [
        [who, f"{x['answers']}", f"{x['accuracy']:.1%}", f"{x['reward']:.3f}", f"{x['tokens']:.1f}"]
        for who in ("base", "post")
        if (x := facts.get(who)) is not None
    ]
    dropped = found["activations"]["dropped"]
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
    convention = found["activations"]["layer_convention"]
    text = (
        f"Both models read the same {facts['documents']:,} prompts with answers, {facts['tokens']:,} tokens, of which "
        f"{facts['answer_tokens']:,} are answers; {found['activations']['rows']:,} activations of each were kept "
        f"(left out: {left_out}), at {found['activations']['site']}: {convention}."
    )
    if "causal" in found:
        c = found["causal"]
        text += (
            f" Greedily, on {c['prompts']} other prompts, the base's {c['measure']} is {c['unchanged']['base']:.3f}, "
            f"the post model's {c['unchanged']['post']:.3f}."
        )
    table = draw_table(["answers of", "number", "right", "reward", "tokens"], rows)
    return f"<h2>What they read</h2><p>{escape(text)}</p>{table}"


def changes_section(found: Mapping[str, Any]) -> str:
    """Every feature's firing rate before and after, and the amplification that latent scaling reads."""
    first = found["dictionaries"][0]
    rates = first["rates"]
    dots = []
    for i, (before, after) in enumerate(zip(rates["base"], rates["post"], strict=True)):
        if rates["tested"][i] and before and after:
            color = (
                "soft" if not rates["changed"][i] else "c1" if rates["mean_post"][i] > rates["mean_base"][i] else "c0"
            )
            dots.append(Dot(before, after, f"feature {i}: {before:.3%} of tokens, then {after:.3%}", color))
    charts = [_rate_chart(dots)] if dots else []
    energy, amplification = first["scaling"]["energy"], first["scaling"]["amplification"]
    points = [
        Dot(
            before,
            max(-0.5, min(3.0, value)),
            f"feature {i}: {value:.2f} times as much in the post model",
            "soft" if not rates["changed"][i] else "c1" if value > 1 else "c0",
        )
        for i, (before, value) in enumerate(zip(rates["base"], amplification, strict=True))
        if before and value is not None and energy[i] and rates["tested"][i]
    ]
    if points:
        xs, ys = [dot.x for dot in points], span_of([dot.y for dot in points] + [0.0, 2.0])
        charts.append(
            scatter_chart(
                "How much of each feature is left, or more",
                "latent scaling: the factor by which its direction is present in the post model where the base has it",
                Axes("share of tokens on which it fires (base)", "times as much", decades(xs), ys, log_x=True),
                points,
                [("soft", "not changed"), ("c1", "changed, more"), ("c0", "changed, less")],
            )
        )
    ranked = [f for f in found["features"] if f["mean_ratio"] is not None][:20]
    bars = interval_bars(
        [
            (f"feature {f['feature']}", f["mean_ratio"], f["mean_low"] or math.nan, f["mean_high"] or math.nan)
            for f in ranked
        ]
    )
    quality = " · ".join(
        f"seed {i}: FVU {d['quality']['base']['fvu']:.3f} on the base, {d['quality']['post']['fvu']:.3f} on the post "
        f"model; {d['quality']['base']['l0']:.1f} and {d['quality']['post']['l0']:.1f} features a token"
        for i, d in enumerate(found["dictionaries"])
    )
    return (
        "<h2>Which features changed</h2><p>A dictionary of the base's activations is read on both models. A feature "
        "counts as changed if documents, not tokens, say so beyond chance (Holm over all features, 5 %), by more than "
        f'the least change.</p><p class="soft">{escape(quality)}</p>'
        f'<div class="panels">{"".join(charts)}</div>'
        f"<p>Mean activation, post over base, with 95 % intervals over documents: the most changed.</p>{bars}"
    )


def _rate_chart(dots: Sequence[Dot]) -> str:
    limits = decades([v for dot in dots for v in (dot.x, dot.y)])
    axes = Axes("share of tokens on which it fires: base", "post", limits, limits, log_x=True, log_y=True)
    keys = [("soft", "not changed"), ("c1", "changed, rose"), ("c0", "changed, fell")]
    return scatter_chart(
        "How often each feature fires", "on the dotted line: as often as before", axes, dots, keys, True
    )


def features_section(found: Mapping[str, Any]) -> str:
    """The most changed features, what they promote, and where they changed."""
    cards = []
    for f in found["features"]:
        rose = (f["mean_change"] or 0) > 0
        arrow = '<span class="up">▲ rose</span>' if rose else '<span class="down">▼ fell</span>'
        head = (
            f"fires on {f['rate_base'] or 0:.2%} → {f['rate_post'] or 0:.2%} of tokens · mean activation × "
            f"{show_number(f['mean_ratio'])} [{show_number(f['mean_low'])}, {show_number(f['mean_high'])}] · present × "
            f"{show_number(f['amplification'])}"
        )
        where = "".join(draw_chip(f"{token} {share:.0%}") for token, share, _ in f["tokens"])
        promotes = "".join(draw_chip(token) for token, _ in f["promotes"]["up"])
        contexts = "".join(_context(context, "post" if rose else "base") for context in f["contexts"])
        cards.append(
            f'<div class="card feature"><h3>Feature {f["feature"]} {arrow}'
            f'{"" if f["changed"] else " (not sure)"}</h3><p class="soft">{head}</p>'
            f"<div>changed at {where}</div><div>speaks for {promotes}</div>{contexts}</div>"
        )
    first, rest = "".join(cards[:8]), "".join(cards[8:])
    more = f"<details><summary>{len(cards) - 8} more</summary>{rest}</details>" if rest else ""
    return (
        "<h2>What they stand for</h2><p>Where a feature changed most; colour is its activation (in the post model "
        f"where it rose, in the base where it fell), the box the place of the largest change.</p>{first}{more}"
    )


def _context(context: Mapping[str, Any], source: str) -> str:
    top = max(context[source]) or 1.0
    tokens = "".join(
        draw_token(text, value / top, i == context["at"])
        for i, (text, value) in enumerate(zip(context["tokens"], context[source], strict=True))
    )
    return f'<p class="text">{tokens}</p>'


def _half_width(error: float, num_answers: int) -> float:
    """Of the 95 % Student-t interval of a mean over answers, from its standard error."""
    return student_t_quantile(max(1, num_answers - 1)) * error


def divergence_section(found: Mapping[str, Any]) -> str:
    """Where KL sits: whole answers, places, tokens."""
    kl = found["divergence"]
    places = kl["places"]
    xs = [float(p["place"] + 1) for p in places]
    ys = [p["kl"] for p in places]
    low, high = ([p["kl"] + sign * _half_width(p["error"], p["answers"]) for p in places] for sign in (-1, 1))
    charts = ""
    if places:
        axes = Axes("token of the answer", "KL, nats", (1, max(2.0, xs[-1])), span_of([*low, *high], zero=True))
        charts = line_chart(
            "KL along the answer", "mean over answers; band: 95 %", axes, [Line("KL(post ‖ base)", xs, ys, low, high)]
        )
    top = max([v for s in kl["shown"] for v in s["kl"]] + [1e-9])
    shown = "".join(
        f'<div class="card feature"><p class="soft text">{escape(s["prompt"][-220:])}</p><p class="text">'
        + "".join(draw_token(t, v / top, False, f"{v:.3f} nats") for t, v in zip(s["tokens"], s["kl"], strict=True))
        + "</p></div>"
        for s in kl["shown"]
    )
    tables = "".join(
        f"<div>{draw_table([head, 'share of KL', 'mean, nats', 'times'], _token_rows(kl[key]))}</div>"
        for key, head in (("tokens_at", "the token itself"), ("tokens_after", "the token before"))
    )
    gained = "".join(draw_chip(f"{t} {v:+.4f}") for t, v in kl["moved"]["up"])
    lost = "".join(draw_chip(f"{t} {v:+.4f}") for t, v in kl["moved"]["down"])
    half = _half_width(kl["per_answer_error"], kl["documents"])
    text = (
        f"{kl['per_token']:.4f} nats a token of an answer ({kl['per_prompt_token']:.4f} in prompts), "
        f"{kl['per_answer']:.2f} ± {half:.2f} an answer, over {kl['documents']} answers."
    )
    return (
        f"<h2>Where the models disagree</h2><p>{escape(text)} The deeper the colour, the more the two distributions of "
        f'that token differ.</p>{shown}<div class="panels">{charts}</div><div class="panels">{tables}</div>'
        f"<p>Probability a token gained, mean over the answers: {gained}</p><p>Lost: {lost}</p>"
    )


def _token_rows(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [[repr(e["token"])[1:-1], f"{e['share']:.1%}", f"{e['mean']:.3f}", f"{e['count']:,}"] for e in entries]


def patching_section(found: Mapping[str, Any]) -> str:
    """The share of KL recovered against the number of features."""
    if "patching" not in found:
        return ""
    p = found["patching"]
    xs = [float(n) for n in p["counts"]]
    lines = [over_seeds(name, xs, p[key], color) for key, name, color in (
        ("changed", "most changed features", "c1"), ("random", "random features like them", "c0"))]  # fmt: skip
    lines.append(Line("frozen random dictionary, its most changed", xs, p["frozen"], color="c3", dashed=True))
    if "difference" in p:
        lines.append(Line("dictionary of the difference", xs, p["difference"], color="c2"))
    flat = [("all of the difference", p["everything"]), ("mean difference", p["mean_vector"])]
    values = [v for line in lines for v in (*line.ys, *line.low, *line.high)] + [v for _, v in flat]
    axes = Axes(
        "features patched into the base", "share of KL recovered", (xs[0], max(xs[-1], xs[0] + 1)),
        span_of(values, zero=True), log_x=True, percent=True, x_ticks=tuple(xs),
    )  # fmt: skip
    chart = line_chart("How much the changed features explain", "band: 95 % over seeds (Student t)", axes, lines, flat)
    every = sum(p["all_features"]) / len(p["all_features"])
    return (
        "<h2>Do they explain the disagreement?</h2><p>The base reads the answers; at the layer, the change of the "
        "chosen features is added to its activations, and the rest of it runs on from there. All features of the "
        f"dictionary recover {every:.1%}; what the whole difference leaves was learnt above this layer.</p>"
        f'<div class="panels">{chart}</div>'
    )


def causal_section(found: Mapping[str, Any]) -> str:
    """Outcomes against the number of features and against the dose, for each test."""
    if "causal" not in found:
        return ""
    c = found["causal"]
    flat = {
        "given": [("base, untouched", c["unchanged"]["base"]), ("all of post's activations", c["everything"]["base"])],
        "returned": [("post, untouched", c["unchanged"]["post"]), ("all of base's", c["everything"]["post"])],
        "scaled": [("post, untouched", c["unchanged"]["post"])],
    }
    titles = {
        "given": ("The base, given the changes", 1.0),
        "returned": ("The post model, changes undone", 1.0),
        "scaled": ("The post model, features scaled", 0.0),
    }
    charts = []
    for test, (title, whole) in titles.items():
        by_count = [[p for p in row if p["dose"] == whole] for row in c[test]]
        by_dose = [[p for p in row if p["features"] == c["features"]] for row in c[test]]
        if len(by_count[0]) > 1 and test != "scaled":
            charts.append(_causal_chart(title, "all the way", "features", by_count, flat[test], c["measure"]))
        if len(by_dose[0]) > 1:
            caption = f"{c['features']} features, by dose"
            charts.append(_causal_chart(title, caption, "dose", by_dose, flat[test], c["measure"]))
    boxes = "".join(
        f'<div class="verdict-box{" open" if "NOT" in line or "nothing yet" in line else ""}">{escape(line)}</div>'
        for line in causal_lines(c)
    )
    rows = []
    for name, v in c["verdicts"].items():
        half = v["half_width"]
        interval = "one seed" if half is None else f"{v['mean'] - half:+.3f} to {v['mean'] + half:+.3f}"
        answer = "—" if v["separates"] is None else "yes" if v["separates"] else "no"
        rows.append([name, f"{v['mean']:+.4f}", interval, ", ".join(f"{x:+.3f}" for x in v["values"]), answer])
    return (
        "<h2>Do they do anything?</h2><p>The models answer prompts that were not recorded, greedily. Given: the post "
        "model reads along, and the base's features are moved to where it has them. Undone: the other way round. "
        "Scaled: a dose of 0 takes features away, 1 leaves them, 2 doubles them. Always beside random features that "
        f"fire as often and as strongly.</p>{boxes}<div class='panels'>{''.join(charts)}</div>"
        f"<details><summary>Every test: changed features less random ones, {escape(c['measure'])} of "
        f"{c['prompts']} answers</summary>"
        f"{draw_table(['test', 'difference', '95 % interval', 'seeds', 'separates'], rows)}</details>"
    )


def _causal_chart(
    title: str,
    caption: str,
    key: str,
    rows: Sequence[Sequence[Mapping[str, Any]]],
    flat: Sequence[tuple[str, float]],
    measure: str,
) -> str:
    xs = [float(entry[key]) for entry in rows[0]]
    changed = [[entry["changed"] for entry in row] for row in rows]
    others = [[sum(entry["random"]) / len(entry["random"]) for entry in row] for row in rows]
    lines = [
        over_seeds("most changed features", xs, changed, "c1"),
        over_seeds("random features like them", xs, others, "c0"),
    ]
    values = [v for line in lines for v in line.ys] + [v for _, v in flat]
    low, high = span_of(values)
    room = 0.35 * (high - low)  # a band over few seeds may be wider than anything that can happen
    values += [max(low - room, min(high + room, v)) for line in lines for v in (*line.low, *line.high)]
    limits = (xs[0], max(xs[-1], xs[0] + 1e-9))
    axes = Axes(key, measure, limits, span_of(values), log_x=key == "features", x_ticks=tuple(xs))
    return line_chart(title, f"{caption}; band: 95 % over seeds", axes, lines, flat)


def difference_section(found: Mapping[str, Any]) -> str:
    """The mean difference as tokens, and the dictionary of the difference."""
    rows = [
        [
            entry["where"],
            f"{entry['norm']:.1%}",
            " ".join(repr(t)[1:-1] for t, _ in entry["up"]),
            " ".join(repr(t)[1:-1] for t, _ in entry["down"]),
        ]
        for entry in found["lens"]
    ]
    parts = [
        "<h2>The difference itself</h2><p>The mean of post − base, read as if it were the last state: the tokens that "
        "it speaks for and against. Its size is in shares of the median activation.</p>",
        draw_table(["mean over", "size", "for", "against"], rows, text_from=2),
    ]
    for name, title in (
        ("difference", "A dictionary of the difference"),
        ("crosscoder", "A crosscoder of both models"),
    ):
        if name in found:
            parts.append(_latents(found[name], title))
    return "".join(parts)


def _latents(entry: Mapping[str, Any], title: str) -> str:
    rows = [
        [
            str(latent["latent"]),
            f"{latent['share'] or 0:.1%}",
            f"{latent['density'] or 0:.2%}",
            show_number(latent["beta_base"]),
            show_number(latent["beta_post"]),
            show_number(latent["nu"]),
            " ".join(repr(t)[1:-1] for t, _ in latent["promotes"]["up"]),
        ]
        for latent in entry["latents"][:16]
    ]
    text = (
        f"{title}: {entry['features']} latents, FVU {entry['quality']['fvu']:.3f}, {entry['quality']['l0']:.2f} a "
        "token. β is how much of a latent's direction each model has where it fires; ν = β base / β post is 0 for what "
        "only the post model has, 1 for what both have alike."
    )
    head = ["latent", "share", "fires on", "β base", "β post", "ν", "speaks for"]
    return f"<p>{escape(text)}</p>{draw_table(head, rows, text_from=6)}"


def trust_section(found: Mapping[str, Any]) -> str:
    """Null tests, seeds, and the frozen decoder."""
    rows = []
    for i, d in enumerate([*found["dictionaries"], found["frozen"]]):
        label = f"seed {i}" if i < len(found["dictionaries"]) else "frozen decoder"
        c = d["counts"]
        fvu = d["quality"]
        nulls = [str(d["null"][name]["changed"]) for name in ("itself", "swapped", "halves")]
        rows.append([label, f"{fvu['base']['fvu']:.3f}", f"{fvu['post']['fvu']:.3f}", str(c["tested"]),
                     str(c["significant"]), str(c["changed"]), *nulls])  # fmt: skip
    head = [
        "dictionary",
        "FVU base",
        "FVU post",
        "tested",
        "significant",
        "changed",
        "null: itself",
        "swapped",
        "halves",
    ]
    overlap = found["overlap"]
    pairs = [
        [f"{p['first']} in {p['second']}", str(p["count"]), show_number(p["share"]), show_number(p["by_chance"]),
         show_number(p["cosine"])]
        for p in overlap["pairs"]
    ]  # fmt: skip
    seeds = (
        "<p>Changed features of one seed that are found again, by decoder cosine of at least "
        f"{overlap['least_cosine']}, among those of another, with the same sign; beside it the same share of all "
        f"features.</p>{draw_table(['seeds', 'changed', 'found again', 'of all', 'mean cosine'], pairs)}"
        if pairs
        else ""
    )
    return (
        "<h2>Can it be trusted?</h2><p>Null tests ask for changes where there are none: the base beside itself; the "
        "two models swapped in a random half of the documents; the base on two halves of the documents. The frozen "
        "decoder is a dictionary of random directions whose encoder alone was trained: what it finds, any set of "
        f"directions finds.</p>{draw_table(head, rows)}{seeds}"
    )
