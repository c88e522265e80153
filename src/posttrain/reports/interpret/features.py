"""``features.html``: all features on one page that needs nothing else, neither a network nor a server.

Texts are what models and data wrote, so none of them can become markup: they travel as JSON without a single ``<``, the
script puts them on the page as text only, and the page's policy runs no other script and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from posttrain.interpret.features.features import Context, Feature, FeatureReport, rounded
from posttrain.reports.charts.style import STYLE
from posttrain.reports.interpret.features_script import SCRIPT
from posttrain.store.durable import replace_file

NUM_LEVELS = 255  # shades of an activation, from 0 to the largest of its feature
_DROPPED = -1

_STYLE = """
main { max-width: 1180px; padding-top: 32px; }
.bar-top { position: sticky; top: 0; z-index: 2; background: var(--paper); border-bottom: 1px solid var(--rule);
  padding: 10px 0; display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; margin-top: 18px; }
.bar-top input, .bar-top select { font: inherit; color: inherit; background: var(--card); border-radius: 8px;
  border: 1px solid var(--rule); padding: 5px 9px; }
#query { flex: 1 1 220px; min-width: 160px; } .bar-top input[type="number"] { width: 7.2em; }
.bar-top label { color: var(--soft); font-size: 0.85rem; } #shown { color: var(--soft); font-size: 0.85rem; }
.overview { width: 100%; height: 92px; display: block; margin-top: 10px; }
.overview rect { fill: var(--c0); cursor: pointer; } .overview rect:hover { fill: var(--c1); }
.overview text, .counts text { font-size: 11px; fill: var(--soft); }
.feature { margin-top: 14px; content-visibility: auto; contain-intrinsic-size: auto 320px; }
.feature header { display: flex; flex-wrap: wrap; gap: 4px 18px; align-items: baseline; }
.feature h2 { margin: 0; font-size: 1.1rem; } .feature h2 a { color: inherit; text-decoration: none; }
.feature header span { color: var(--soft); font-size: 0.88rem; font-variant-numeric: tabular-nums; }
.sides { display: grid; grid-template-columns: 250px 1fr; gap: 4px 22px; margin-top: 8px; }
@media (max-width: 760px) { .sides { grid-template-columns: 1fr; } }
.counts { width: 250px; height: 96px; display: block; } .counts rect { fill: var(--c2); }
.lens { font-size: 0.85rem; margin: 0; } .lens dt { color: var(--soft); margin-top: 4px; } .lens dd { margin: 0; }
.chip { display: inline-block; background: var(--track); border-radius: 5px; padding: 0 5px; margin: 2px 4px 2px 0;
  white-space: pre; unicode-bidi: isolate; max-width: 100%; overflow: hidden; vertical-align: top;
  font: 0.82rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.chip i { color: var(--soft); font-style: normal; margin-left: 6px; }
.context { display: grid; grid-template-columns: 4.2em 1fr; gap: 8px; border-top: 1px solid var(--rule);
  padding: 5px 0; } .context:first-child { border-top: 0; }
.context b { font-weight: 500; color: var(--soft); font-variant-numeric: tabular-nums; font-size: 0.88rem; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.92rem; }
.tokens span { unicode-bidi: isolate; border-radius: 3px; } .tokens .peak { outline: 1.5px solid var(--c1); }
.more { font: inherit; font-size: 0.85rem; color: var(--c0); background: none; border: 0; padding: 4px 0;
  cursor: pointer; }
.notes { color: var(--soft); font-size: 0.9rem; padding-left: 1.2rem; } .notes li { max-width: 60rem; }
#features { scroll-margin-top: 70px; } #sentinel { height: 1px; }
"""


def render_features(report: FeatureReport) -> str:
    """The whole page as HTML."""
    about = report.about
    title = f"Features of {about.get('dictionary') or 'a dictionary'}"
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=False)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(_lead(about))}</p>'
        "<noscript><p>This page draws its features with a script of its own; the same numbers are in the file .json "
        "beside it.</p></noscript>"
        f"{_CONTROLS}{_notes(about)}"
        '<section id="features"></section><div id="sentinel"></div></main>'
        f'<script type="application/json" id="data">{_embedded(_compact(report))}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def write_page(report: FeatureReport, path: str | Path) -> Path:
    """The page as a file, replaced in one step.

    Raises:
        StorageError: the disk is full or not writable.
    """
    place = Path(path)
    replace_file(place, render_features(report).encode("utf-8", "backslashreplace"))
    return place


_CONTROLS = """
<svg class="overview" id="overview" role="img" aria-label="how many features have which density"></svg>
<div class="bar-top">
<input id="query" type="search" placeholder="a text, a token, or #12" aria-label="search" autocomplete="off">
<select id="where" aria-label="where to search"><option value="any">anywhere</option>
<option value="active">tokens it is active on</option><option value="lens">tokens it speaks for</option></select>
<label>density from <input id="low" type="number" min="0" max="1" step="any"></label>
<label>to <input id="high" type="number" min="0" max="1" step="any"></label>
<label>by <select id="sort"><option value="density">density, falling</option>
<option value="rare">density, rising</option><option value="mean">mean activation</option>
<option value="max">largest activation</option><option value="logit">largest logit</option>
<option value="number">number</option></select></label><span id="shown" role="status"></span></div>
"""


def _lead(about: Mapping[str, Any]) -> str:
    parts = [
        str(about[key]) if key != "source" else f"source {about[key]}"
        for key in ("model", "site", "source")
        if about.get(key) and about[key] != "model"
    ]
    parts.append(f"{about.get('rows', 0):,} rows of {about.get('documents', 0):,} documents")
    parts.append(f"{about.get('active_per_row', 0.0):.3g} active at a token")
    parts.append(f"{about.get('silent', 0):,} of {about.get('features_shown', 0):,} features silent")
    return " · ".join(parts)


def _notes(about: Mapping[str, Any]) -> str:
    lines = [
        "Density: the share of the rows at which a feature is active. Mean: of its activations there. The histogram "
        "has these activations alone.",
        f"Contexts: {about.get('contexts', '')}. The outlined token is the strongest.",
        "Colours: from nothing to the feature's largest activation. A token in grey has no row (it was left out).",
    ]
    if about.get("logit_lens"):
        lines.append(f"Speaks for: {about['logit_lens']}.")
    if about.get("layer_convention"):
        lines.append(f"Layers: {about['layer_convention']}.")
    lines += [f"Mind: {note}." for note in about.get("notices", ())]
    body = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<details><summary>How to read it</summary><ul class="notes">{body}</ul></details>'


def _embedded(data: Any) -> str:
    """JSON that ends no script element and begins no comment: ASCII without ``<``, ``>`` and ``&``."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _compact(report: FeatureReport) -> dict[str, Any]:
    """What the script reads: every text once, tokens by their place in that list, activations as levels."""
    places = {index: place for place, index in enumerate(report.texts)}

    def likely(pairs: Iterable[tuple[int, float]]) -> list[list[float]]:
        return [[places[index], rounded(logit)] for index, logit in pairs]

    def context(feature: Feature, given: Context) -> list[Any]:
        scale = NUM_LEVELS / feature.maximum
        levels = [_DROPPED if x is None else round(x * scale) for x in given.activations]
        peak = given.position - given.start
        return [
            rounded(given.activation), given.document, given.position, peak, [places[i] for i in given.ids], levels,
        ]  # fmt: skip

    rows = [
        [
            feature.number,
            feature.active,
            rounded(feature.density),
            rounded(feature.mean),
            rounded(feature.maximum),
            feature.bin_width,
            list(feature.counts),
            likely(feature.promoted),
            likely(feature.suppressed),
            [context(feature, given) for given in feature.contexts],
        ]
        for feature in report.features
    ]
    return {"rows": report.about.get("rows", 0), "texts": list(report.texts.values()), "features": rows}
