"""``features.html``: all features on one page that needs nothing else, neither a network nor a server.

Texts are what models and data wrote, so none of them can become markup: they travel as JSON without a single ``<``, the
script (``templates/features.js``) puts them on the page as text only, and the page's policy runs no other script.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from posttrain.interpret.features.features import Context, Feature, FeatureReport, rounded
from posttrain.reports.page import render

NUM_LEVELS = 255  # shades of an activation, from 0 to the largest of its feature
_DROPPED = -1


def render_features(report: FeatureReport) -> str:
    """The whole page as HTML."""
    title = f"Features of {report.about.get('dictionary') or 'a dictionary'}"
    return render("features.jinja", title=title, about=report.about, content=_compact(report))


def _compact(report: FeatureReport) -> dict[str, Any]:
    """What the script reads: every text once, tokens by their place in that list, activations as levels."""
    places = {index: place for place, index in enumerate(report.texts)}

    def likely(pairs: Iterable[tuple[int, float]]) -> list[list[float]]:
        return [[places[index], rounded(logit)] for index, logit in pairs]

    def shown(feature: Feature, context: Context) -> list[Any]:
        scale = NUM_LEVELS / feature.maximum
        levels = [_DROPPED if x is None else round(x * scale) for x in context.activations]
        peak = context.position - context.start
        tokens = [places[i] for i in context.ids]
        return [rounded(context.activation), context.document, context.position, peak, tokens, levels]

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
            [shown(feature, context) for context in feature.contexts],
        ]
        for feature in report.features
    ]
    return {"rows": report.about.get("rows", 0), "texts": list(report.texts.values()), "features": rows}
