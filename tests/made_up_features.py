"""Made-up features of a dictionary, with texts that a page must not run."""

from __future__ import annotations

from posttrain.interpret.features.features import FeatureReport

EVIL = [
    "</script><script>document.title='taken'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "&lt;b&gt;\u2028'\"\\",
    "\ud800",
]


def report_of(count: int) -> FeatureReport:
    """Features 0 … count − 1; feature i is active on token i % 5 and has density (i + 1) / 10000."""
    context = {"activation": 2.0, "position": 1, "start": 0, "activations": [0.0, 2.0, None]}
    features = [
        {
            "feature": i,
            "active": i + 1,
            "density": (i + 1) / 10_000,
            "mean": 1.0,
            "max": 2.0,
            "histogram": {"bin_width": 0.25, "counts": [0, 3, 5]},
            "promoted": [[f"word{i}", 100 + i, 1.5]],
            "suppressed": [[" left\n", 7, -1.0]],
            "contexts": [context | {"document": i, "tokens": [" left\n", EVIL[i % 5], "right"]}] * 9,
        }
        for i in range(count)
    ]
    return {"about": {"dictionary": "<b>mine</b>", "rows": 10_000, "documents": 3}, "features": features}
