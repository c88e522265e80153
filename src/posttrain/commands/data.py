"""``posttrain data``: list data sets, or show a data set's contents."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from posttrain import registry
from posttrain.commands.explain import summary
from posttrain.commands.options import chosen_components
from posttrain.data.base import PERCENTILES, Description, Task, build_task, describe_task, percentile, random_examples
from posttrain.data.render import encode_plain
from posttrain.data.rendered import note_rendered
from posttrain.errors import UsageError
from posttrain.reports.charts import PICTURES, draw_png
from posttrain.reports.curves import data_panels
from posttrain.terminal.console import Text, open_console, plain_table, print_rows
from posttrain.types import Example
from posttrain.untrusted import kind_of_file

NUM_COMMONEST = 5
WHOLE_TASK = 10**9


def run_data(arguments: argparse.Namespace) -> int:
    """List tasks, or show a task's contents."""
    console = open_console()
    if arguments.action == "list":
        if arguments.name is not None:
            raise UsageError(f"data list takes no name. Did you mean `posttrain data show {arguments.name}`?")
        _print_tasks(console)
        return 0
    if arguments.name is None:
        known = ", ".join(registry.names("task"))
        raise UsageError(f"give the task's name: posttrain data show NAME. Known: {known}")
    arguments.task = arguments.name
    component = chosen_components(arguments)["task"]
    task = build_task(component, "task")
    tokenizer = None
    if arguments.model is not None:
        from posttrain.models.load import load_tokenizer  # imports PyTorch, which characters do without

        tokenizer = load_tokenizer(arguments.model)
    unit = "characters"
    if tokenizer is not None:
        unit = f"tokens of {arguments.model}"

    def measure(text: str) -> int:
        if tokenizer is None:
            return len(text)
        return len(encode_plain(tokenizer, text))

    stats = describe_task(task, measure, n=arguments.limit or WHOLE_TASK)
    if stats.num_read == 0:
        raise UsageError(f"task {task.name!r}, split {task.split!r}: no examples found")
    if rendered := note_rendered(task, tokenizer):
        task = replace(task, warnings=(*task.warnings, rendered))
    _print_description(console, task, stats, unit, arguments.max_tokens)
    for example in random_examples(task, arguments.examples, arguments.seed):
        _print_example(console, example)
    if arguments.plot is not None:
        title = f"{task.name}/{task.split}: {stats.num_read:,} examples"
        target = Path(arguments.plot or f"data-{component.name.replace(':', '-')}.png")
        if target.suffix and target.suffix.lower() not in PICTURES:
            kinds = ", ".join(PICTURES)
            raise UsageError(f"--plot: {target}: no picture can be written as {target.suffix}; use {kinds}")
        if kind_of_file(target.parent) != "folder" or kind_of_file(target) not in ("file", "nothing"):
            raise UsageError(f"--plot: {target}: cannot write a file here; choose an existing folder")
        print(f"picture: {draw_png(data_panels(stats, unit), title, target, columns=2)}")
    return 0


def _print_tasks(console: Console) -> None:
    table = plain_table("task", "what it is", show_header=False)
    tasks = registry.entries("task").items()
    table.columns[0].no_wrap = True
    print_rows(console, table, [(Text(name, style="bold"), summary(entry.doc)) for name, entry in tasks])
    console.print("\nLook into one: posttrain data show NAME    Its options: posttrain explain NAME")


def _print_description(console: Console, task: Task, stats: Description, unit: str, limit: int | None) -> None:
    """Print counts, lengths and balances as tables."""
    read = ""
    if stats.num_read < stats.num_examples:
        read = f", the first {stats.num_read:,} of which were read"
    console.print(Text.assemble((f"{task.name}/{task.split}", "bold"), f": {stats.num_examples:,} examples{read}"))
    left_out = [f"left out: {count:,} × {reason}" for reason, count in task.dropped.items()]
    for line in (*left_out, *_info(stats, unit, limit), *task.warnings):
        console.print(Text(f"  {line}"))

    def show(table: Table, rows: Sequence[Sequence[str]]) -> None:
        console.print()
        print_rows(console, table, rows)

    if task.keys:
        keys = [(key, done, f"{count:,}") for (key, done), count in sorted(task.keys.items())]
        show(plain_table("key of the rows", "what was done with it", right=("rows",)), keys)
    named = {0.0: "least", 0.5: "median", 1.0: "most"}
    names = [named.get(share, f"{share:.0%}") for share in PERCENTILES]
    lengths = []
    for part, values in stats.lengths.items():
        columns = [f"{percentile(values, share):,.0f}" for share in PERCENTILES]
        lengths.append((part, f"{len(values):,}", *columns, f"{sum(values) / len(values):,.1f}"))
    show(plain_table(unit, right=("texts", *names, "mean")), lengths)
    labels = {f"labels of {name}": counts for name, counts in stats.labels.items()}
    for name, counts in (labels | stats.kinds).items():
        commonest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        rows = [(value, f"{count:,}", f"{count / counts.total():.1%}") for value, count in commonest]
        show(plain_table(name, right=("count", "share")), rows)


def _info(stats: Description, unit: str, limit: int | None) -> list[str]:
    turns = str(min(stats.turns))
    if len(stats.turns) > 1:
        turns = ", ".join(f"{count:,} × {length}" for length, count in sorted(stats.turns.items()))
    lines = [
        f"repeated prompts: {stats.repeated_prompts:,} examples repeat an earlier one",
        f"messages per prompt: {turns}",
    ]
    if limit is not None:
        over = stats.over(limit)
        lines.append(f"longer than {limit:,} {unit}, prompt and answer: {over:,} ({over / stats.num_read:.1%})")
    if stats.answers:
        common = ", ".join(f"{answer[:40]!r} {n:,} ×" for answer, n in stats.answers.most_common(NUM_COMMONEST))
        lines.append(f"answers: {stats.answers.total():,}, {len(stats.answers):,} different; commonest {common}")
    if stats.answers or not stats.lengths.keys() & {"chosen", "response"}:  # given answers are not graded
        lines.append(f"graded by: {', '.join(stats.graders)}")
    if stats.num_pairs:
        margins = stats.margins
        lines += [
            f"pairs: {stats.num_pairs:,}, {stats.identical_pairs:,} identical up to white space",
            f"chosen answers are longer in {stats.longer_chosen / stats.num_pairs:.1%} of pairs",
            f"score differences: median {percentile(margins, 0.5):g}, from {min(margins):g} to {max(margins):g}",
        ]
    return lines


def _print_example(console: Console, example: Example) -> None:
    """Print one example in full."""
    parts: list[tuple[str, str | None]] = [(message.role, message.content) for message in example.messages]
    parts += [("solution", example.solution), ("response", example.demonstration)]
    parts.append((f"answer (grader {example.grader})", example.answer))
    for response in example.responses:
        lines = []
        for step, label in zip(response.steps, response.step_labels, strict=True):
            lines.append(f"  [{label}] {step.strip()}")
        if not lines:
            lines.append(response.text)
        if response.answer is not None:
            lines.append(response.answer)
        parts.append((f"response, score {response.score:g}", "\n".join(lines)))
    meta = []
    for key, value in example.meta.items():
        if isinstance(value, str | int | float | list | tuple):
            meta.append(f"{key} {value}")
    if meta:
        parts.append(("meta", ", ".join(meta)))
    console.print()
    console.print(Rule(Text(example.id), align="left"))
    for name, text in parts:
        if text is not None:
            console.print(Text(name, style="cyan"))
            end = ""
            if text:
                end = "\n"
            console.print(Text(text), end=end)
