"""Two models against one another as a table, and ``summary.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evals.tables import NOTHING, TextTable, show_interval, show_share, to_markdown
from posttrain.reports.evaluation import first_items, quoted, settings_list
from posttrain.untrusted import bullets, plain

Results = Mapping[str, float]


DRAWN_BY = (
    ("whoever stood first wins (50% without a bias)", "judge_first"),
    ("both orders say the same", "judge_consistent"),
    ("the longer answer wins", "judge_longer"),
    ("not judged", "judge_failed"),
)


def contest_table(name: str, a: str, b: str, results: Results, others: Mapping[str, Results]) -> TextTable:
    """What came out, line by line; lines without a number are left out. ``others``: of further judges, by name."""
    shares = (
        (f"{a} wins", "win_rate"),
        (f"{a} wins, lengths alike (n = {results.get('n_similar', 0):.0f})", "win_rate_similar"),
        (f"right: {a}", "accuracy_a"),
        (f"right: {b}", "accuracy_b"),
    )
    lines = [[label, show_share(results, key), show_interval(results, key)] for label, key in shares if key in results]
    parts = [show_share(results, key) for key in ("wins", "ties", "losses")]
    lines.insert(1, ["better / equally good / worse", " / ".join(parts), NOTHING])
    for label, key in DRAWN_BY:
        if key in results:
            lines.append([label, show_share(results, key), NOTHING])
    for judge, told in others.items():
        lines.append([f"{a} wins, by {judge}", show_share(told, "win_rate"), show_interval(told, "win_rate")])
    for label, side in ((a, "a"), (b, "b")):
        lines.append([f"characters: {label}", f"{results[f'characters_{side}']:.0f}", NOTHING])
    for label, key in ((f"KL({a} ‖ {b})", "kl_ab"), (f"KL({b} ‖ {a})", "kl_ba")):
        if key in results:
            interval = f"{results[f'{key}_low']:.3g} – {results[f'{key}_high']:.3g}"
            lines.append([f"{label}, nats per answer", f"{results[key]:.3g}", interval])
            lines.append([f"{label}, nats per token", f"{results[f'{key}_per_token']:.3g}", NOTHING])
    return TextTable(f"{name}: {a} against {b}, n = {results['n']:.0f}", ["", "value", "95 % interval"], lines)


def write_contest_page(
    table: TextTable, notes: Sequence[str], settings: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
) -> str:
    """The page, as Markdown, with the first items in full; nothing is picked."""
    parts = [f"# {plain(table.title)}\n", to_markdown(table), bullets(notes), settings_list(settings)]
    parts.append(first_items(items, _shown))
    return "\n".join(part for part in parts if part)


def _shown(item: Mapping[str, Any]) -> tuple[str, str]:
    parts = [f"{quoted(item['question'])}\n"]
    for side in ("a", "b"):
        answer = item[side][0]
        score = "" if answer["score"] is None else f", score {answer['score']:.3g}"
        parts.append(f"{side.upper()}: {answer['outcome']}{score}\n\n{quoted(answer['text'])}\n")
    return item["id"], "\n".join(parts)
