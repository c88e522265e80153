"""The shell of every report: one style sheet, light and dark, no outside resource, and no script."""

from __future__ import annotations

from html import escape

STYLE = """
:root {
  --paper: #fbfaf7; --card: #ffffff; --ink: #1d2129; --soft: #626a76; --rule: #e3e1da; --track: #eceae3;
  --c0: #2f6fde; --c1: #d9662b; --c2: #2a9d6f; --c3: #9a55c4; --good: #1f8a5b; --bad: #c2452d; --tag: #9a55c4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --card: #1c2027; --ink: #e7e9ed; --soft: #9aa3b0; --rule: #2d333d; --track: #2a2f38;
    --c0: #6ea1ff; --c1: #ff9a5e; --c2: #5fd0a1; --c3: #c78cf0; --good: #5fd0a1; --bad: #ff8a73; --tag: #c78cf0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 80px; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.02em; }
h2 { font-size: 1.3rem; margin: 56px 0 6px; letter-spacing: -0.01em; }
p { margin: 6px 0 14px; max-width: 46rem; }
.soft, figcaption span { color: var(--soft); }
.lead { font-size: 1.1rem; color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 18px 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; font-size: 0.82rem; color: var(--soft); padding: 6px 14px 8px 0;
  white-space: nowrap; }
td { border-top: 1px solid var(--rule); padding: 11px 14px 11px 0; vertical-align: top; }
table > tr:first-child > td, tbody:first-child > tr:first-child > td { border-top: 0; }
td.name { width: 1%; white-space: nowrap; color: var(--soft); padding-right: 32px; }
td.number { white-space: nowrap; }
td .soft { font-size: 0.88rem; }
td strong { font-size: 1.1rem; }
.bar { width: 180px; height: 16px; display: block; margin-top: 4px; }
.bar .track { fill: var(--track); }
.bar .fill { fill: var(--c0); }
.bar .whisker { stroke: var(--ink); stroke-width: 2; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 16px; margin-top: 14px; }
.panel { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 14px 14px 10px; }
.panel svg { width: 100%; height: auto; display: block; margin-top: 6px; }
.panel text { font-size: 11px; fill: var(--soft); }
.panel .grid { stroke: var(--rule); stroke-width: 1; }
.panel .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.panel .whisker { stroke-width: 1.6; opacity: 0.75; }
figcaption { font-size: 0.9rem; line-height: 1.35; }
.panel polyline.c0, .panel line.c0 { stroke: var(--c0); } .panel circle.c0 { fill: var(--c0); }
.panel polyline.c1, .panel line.c1 { stroke: var(--c1); } .panel circle.c1 { fill: var(--c1); }
.panel polyline.c2, .panel line.c2 { stroke: var(--c2); } .panel circle.c2 { fill: var(--c2); }
.panel polyline.c3, .panel line.c3 { stroke: var(--c3); } .panel circle.c3 { fill: var(--c3); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 0.82rem; color: var(--soft); margin-top: 2px; }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px;
  margin-right: 6px; vertical-align: middle; }
.key.dot::before { width: 8px; height: 8px; border-radius: 50%; }
.key.c0::before { background: var(--c0); } .key.c1::before { background: var(--c1); }
.key.c2::before { background: var(--c2); } .key.c3::before { background: var(--c3); }
.transcript { margin-top: 18px; }
.question { font-size: 1.02rem; margin: 0 0 12px; max-width: none; }
.question b { white-space: nowrap; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 12px; }
.answer { border: 1px solid var(--rule); border-top: 3px solid var(--bad); border-radius: 8px;
  padding: 10px 12px; background: var(--paper); }
.answer.right { border-top-color: var(--good); }
.answer h3 { margin: 0 0 6px; font-size: 0.9rem; display: flex; justify-content: space-between; gap: 8px; }
.verdict { font-weight: 600; color: var(--bad); } .right .verdict { color: var(--good); }
.answer .soft { font-size: 0.82rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 0.88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.tag { color: var(--tag); }
.cut { color: var(--bad); font-style: italic; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 600; } details pre { margin-top: 10px; }
.commands pre { padding: 3px 0; }
"""


def draw_page(title: str, body: str, style: str = "") -> str:
    """A whole page as HTML. ``body`` is HTML already; the policy holds even if something in it was not escaped."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )
