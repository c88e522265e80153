"""``features.html``: all features on one page that needs nothing else, neither a network nor a server.

Texts are what models and data wrote, so none of them can become markup: they travel as JSON without a single ``<``, the
script (``templates/features.js``) puts them on the page as text only, and the page's policy runs no other script.
"""

from __future__ import annotations

from typing import Any

from posttrain.interpret.features.features import FeatureReport
from posttrain.reports.page import render

NUM_LEVELS = 255  # shades of an activation, from 0 to the largest of its feature
_DROPPED = -1


def render_features(report: FeatureReport) -> str:
    """Return the whole page as HTML."""
    title = f"Features of {report['about'].get('dictionary') or 'a dictionary'}"
    return render("features.jinja", title=title, about=report["about"], content=_compact(report))


def _compact(report: FeatureReport) -> dict[str, Any]:
    """The data of the script: every text once, tokens by their place in that list, activations as levels."""
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    def level(activation: float | None, largest: float) -> int:
        if activation is None:
            return _DROPPED
        return round(activation * NUM_LEVELS / largest)

    def context(shown: dict[str, Any], largest: float) -> list[Any]:
        levels = [level(activation, largest) for activation in shown["activations"]]
        where = [shown["document"], shown["position"], shown["position"] - shown["start"]]
        return [shown["activation"], *where, [place(text) for text in shown["tokens"]], levels]

    rows = []
    for feature in report["features"]:
        row = [feature[key] for key in ("feature", "active", "density", "mean", "max")]
        row += feature["histogram"].values()
        for side in ("promoted", "suppressed"):
            row.append([[place(text), logit] for text, _, logit in feature[side]])
        row.append([context(shown, feature["max"]) for shown in feature["contexts"]])
        rows.append(row)
    return {"rows": report["about"].get("rows", 0), "texts": list(places), "features": rows}
