"""``report.html`` of a comparison: what did training change? One page, drawn from the content of ``diff.json``."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from posttrain.reports.charts.style import draw_page
from posttrain.reports.interpret.diff_sections import (
    answers_section,
    causal_section,
    changes_section,
    difference_section,
    divergence_section,
    features_section,
    patching_section,
    trust_section,
)
from posttrain.reports.interpret.diff_sentences import findings

_STYLE = """
main { max-width: 1180px; }
.findings { padding-left: 1.2rem; } .findings li { margin: 7px 0; max-width: 60rem; }
.panels { grid-template-columns: repeat(auto-fill, minmax(min(430px, 100%), 1fr)); }
.panel .axis { font-size: 11px; }
.panel .flat { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 4; }
.panel .band { opacity: 0.14; stroke: none; }
.panel circle.soft { fill: var(--soft); opacity: 0.35; } .panel circle.dot { opacity: 0.85; }
.panel polygon.c0 { fill: var(--c0); } .panel polygon.c1 { fill: var(--c1); }
.panel polygon.c2 { fill: var(--c2); } .panel polygon.c3 { fill: var(--c3); }
.key.soft::before { background: var(--soft); }
td.right, th.right { text-align: right; }
code, .tok { font: 0.86rem/1.75 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap; }
.text { overflow-wrap: anywhere; margin: 6px 0; max-width: none; }
.tok { border-radius: 3px; padding: 1px 0; } .tok.at { outline: 1.5px solid var(--ink); }
.chip { display: inline-block; border: 1px solid var(--rule); border-radius: 6px; padding: 0 6px; margin: 2px 4px 2px 0;
  font: 0.84rem/1.6 ui-monospace, Menlo, Consolas, monospace; white-space: pre; }
.feature { margin-top: 14px; } .feature h3 { margin: 0 0 4px; font-size: 1rem; }
.up { color: var(--c1); } .down { color: var(--c0); }
.verdict-box { border-left: 4px solid var(--c2); padding: 8px 14px; background: var(--card); margin: 14px 0; }
.verdict-box.open { border-left-color: var(--bad); }
"""


def render_diff(found: Mapping[str, Any]) -> str:
    """The whole page as HTML."""
    parts = [f"<h1>{escape(found['title'])}</h1>", f'<p class="lead">{_lead(found)}</p>']
    parts.append(f'<ul class="findings">{"".join(f"<li>{escape(line)}</li>" for line in findings(found))}</ul>')
    parts += [
        answers_section(found),
        changes_section(found),
        features_section(found),
        divergence_section(found),
        patching_section(found),
        causal_section(found),
        difference_section(found),
        trust_section(found),
        _again(found),
    ]
    return draw_page(found["title"], "".join(parts), _STYLE)


def _lead(found: Mapping[str, Any]) -> str:
    site = found["activations"]["site"]
    text = f"{found['description']} " if found["description"] else ""
    return escape(f"{text}Base: {found['base']}. Post: {found['post']}. Read at {site}.")


def _again(found: Mapping[str, Any]) -> str:
    seconds = "".join(
        f'<tr><td class="name">{escape(name)}</td><td>{value:g} s</td></tr>' for name, value in found["seconds"].items()
    )
    return (
        f'<h2>Make it again</h2><div class="card commands"><pre>{escape(found["command"])}</pre></div>'
        '<details><summary>Where the time went</summary><div class="card scroll"><table>'
        f"{seconds}</table></div></details>"
    )
