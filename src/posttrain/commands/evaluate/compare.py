"""``posttrain evaluate --compare A B``: one evaluation beside another, item by item."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.commands.console import Text, open_console
from posttrain.commands.evaluate.command import print_table, run_plan, show
from posttrain.commands.evaluate.files import Finished, is_evaluation, read_finished
from posttrain.commands.evaluate.plan import EVALUATIONS, make_plan, slug
from posttrain.errors import UsageError
from posttrain.evals.items import Item
from posttrain.evals.paired import Paired, compare_items, settings_apart, show_p
from posttrain.evals.tables import TextTable
from posttrain.store.durable import replace_file, storage_errors
from posttrain.untrusted import harmless

COMPARISON = "comparison.json"
MAX_QUESTION_CHARS = 200
TABLE_WORDS = {
    "both": "both right",
    "only_a": "only A right",
    "only_b": "only B right",
    "neither": "neither right",
    "a_higher": "A right more often",
    "b_higher": "B right more often",
    "alike": "equally often",
}


def run_comparison(arguments: argparse.Namespace) -> int:
    """Evaluate both with the same settings, or read what was evaluated before; then test the difference."""
    if len(arguments.models) != 2:
        raise UsageError(f"--compare takes two models or two folders of evaluations, not {len(arguments.models)}")
    folders = [name for name in arguments.models if is_evaluation(name)]
    if len(folders) == 1:
        other = next(name for name in arguments.models if name not in folders)
        raise UsageError(
            f"--compare: {folders[0]} is the folder of an evaluation, {other} is not; give two folders, or two models"
        )
    console = open_console()
    if folders:
        a, b = (read_finished(folder) for folder in arguments.models)
        out = Path(arguments.out or Path(EVALUATIONS) / slug(f"compare-{a.folder.name}-{b.folder.name}"))
    else:
        plan = make_plan(arguments)
        if len(plan.cells) != 2 or plan.cells[0].task_word != plan.cells[1].task_word:
            raise UsageError(
                "--compare takes two models on one task, under one template each; name --task, and compare the folders "
                "of a table with one another afterwards"
            )
        a, b = run_plan(plan, arguments.runs_dir, arguments.quiet)
        out = plan.folder
        if not arguments.quiet:
            show(console, plan, [a, b])
    paired, apart = compare_finished(a, b, seed=arguments.seed)
    write_comparison(out, a, b, paired, apart)
    if not arguments.quiet:
        print_comparison(console, paired, apart)
        console.print(Text(f"comparison: {out / COMPARISON}"), soft_wrap=True)
    return 0


def compare_finished(a: Finished, b: Finished, seed: int = 0) -> tuple[Paired, dict[str, tuple[Any, Any]]]:
    """The comparison of two evaluations on the disk, and the settings in which they differ.

    Raises:
        UsageError: they were not measured alike, or on other items.
    """
    if a.evaluation != b.evaluation:
        raise UsageError(f"{a.folder} is of {a.evaluation} and {b.folder} of {b.evaluation}: not the same task")
    apart = settings_apart(a.settings, b.settings)
    labels = _labels(a, b)
    ks = [k for k in a.settings.get("ks", ()) if k in b.settings.get("ks", ())]
    samples = int(a.settings.get("samples", 1))
    return compare_items(a.items(), b.items(), labels=labels, samples=samples, ks=ks, seed=seed), apart


def _labels(a: Finished, b: Finished) -> tuple[str, str]:
    """What the two are called: by their models, their templates, or else their folders."""
    for left, right in ((a.label, b.label), (a.template, b.template)):
        if left != right:
            return left, right
    return str(a.folder), str(b.folder)


def write_comparison(out: Path, a: Finished, b: Finished, paired: Paired, apart: Mapping[str, tuple[Any, Any]]) -> None:
    """``comparison.json``.

    Raises:
        StorageError: the disk is full or not writable.
    """
    content = {
        "evaluation": a.evaluation,
        "a": {"name": paired.a, "folder": str(a.folder)},
        "b": {"name": paired.b, "folder": str(b.folder)},
        "outcome": paired.in_words(),
        "cautions": paired.cautions(),
        "n": paired.n,
        "differences": {name: asdict(found) for name, found in paired.differences.items()},
        "table": paired.table,
        "mcnemar_p": paired.mcnemar,
        "settings_apart": {name: list(values) for name, values in apart.items()},
        "gained": [x.id for x, _ in paired.gained],
        "lost": [x.id for x, _ in paired.lost],
    }
    with storage_errors("comparison", out):
        out.mkdir(parents=True, exist_ok=True)
    replace_file(out / COMPARISON, json.dumps(content, indent=1).encode() + b"\n")


def print_comparison(console: Console, paired: Paired, apart: Mapping[str, tuple[Any, Any]]) -> None:
    """What differs, the differences with their intervals, the items on which the two part."""
    console.print(Text(f"A: {paired.a}   B: {paired.b}"), soft_wrap=True)
    for name, (left, right) in apart.items():
        if name not in ("model", "checkpoint"):
            console.print(Text(f"they also differ in {name}: A {_plain(left)}, B {_plain(right)}", style="dim"))
    print_table(console, differences_table(paired))
    counts = " · ".join(f"{TABLE_WORDS[name]} {count}" for name, count in paired.table.items())
    exact = f" · McNemar's exact test: {show_p(paired.mcnemar)}" if paired.mcnemar is not None else ""
    console.print(Text(counts + exact), soft_wrap=True)
    for title, pairs in (("B gained", paired.gained), ("B lost", paired.lost)):
        if pairs:
            console.print(Text(f"\n{title}, the first {len(pairs)}:", style="bold"))
            _print_flips(console, pairs)
    console.print(Text(f"\n{paired.in_words()}", style="bold"), soft_wrap=True)
    for caution in paired.cautions():
        console.print(Text(caution, style="dim"), soft_wrap=True)


def differences_table(paired: Paired) -> TextTable:
    """Each measure of both, and what lies between them."""
    lines = []
    for name, found in paired.differences.items():
        is_share = name != "num_tokens"
        unit, form = (100.0, ".1f") if is_share else (1.0, ".1f")
        percent = "%" if is_share else ""
        label = {"accuracy": "right", "num_tokens": "tokens"}.get(name, name.replace("_", " "))
        lines.append(
            [
                label if found.n == paired.n else f"{label}, of {found.n} items that both answered",
                f"{found.a * unit:{form}}{percent}",
                f"{found.b * unit:{form}}{percent}",
                f"{found.difference * unit:+{form}}",
                f"{found.low * unit:+{form}} to {found.high * unit:+{form}}",
                f"{found.p:.2g}" if found.p >= 0.001 else "< 0.001",
            ]
        )
    return TextTable(f"n = {paired.n}", ["", "A", "B", "B − A", "95 % interval", "p"], lines)


def _print_flips(console: Console, pairs: Sequence[tuple[Item, Item]]) -> None:
    for left, right in pairs:
        question = " ".join(harmless(left.question).split())
        shown = question if len(question) <= MAX_QUESTION_CHARS else f"{question[:MAX_QUESTION_CHARS]} …"
        console.print(Text(f"{left.id}: {shown}"), soft_wrap=True)
        console.print(
            Text(f"  gold {left.answer} · A {_answers(left)} · B {_answers(right)}", style="dim"), soft_wrap=True
        )


def _answers(item: Item) -> str:
    if not item.samples:
        return "was not asked (the prompt does not fit)"
    if len(item.samples) > 1:
        return f"{item.num_right} of {len(item.samples)} right"
    extracted = item.samples[0].extracted
    return "gives no answer" if extracted is None else f"says {harmless(extracted)[:80]}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={inner}" for key, inner in value.items())
    return str(value)
