"""``features.html``: all features on a self-contained page, no network or server required.

Model and data texts never become markup: they are embedded as JSON without any ``<``, inserted as text by
``templates/features.js``, and the page's policy blocks every other script.
"""

from __future__ import annotations

from typing import Any

from posttrain.interpret.features.features import FeatureReport
from posttrain.reports.page import render

NUM_LEVELS = 255  # shades per activation, from 0 to the feature's maximum
_DROPPED = -1


def render_features(report: FeatureReport) -> str:
    """Render the page as HTML."""
    title = f"Features of {report['about'].get('dictionary') or 'a dictionary'}"
    return render("features.jinja", title=title, about=report["about"], content=_compact(report))


def _compact(report: FeatureReport) -> dict[str, Any]:
    """Script data: deduplicated texts, tokens as indices into that list, activations as levels."""
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
