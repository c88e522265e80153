"""``posttrain data``: which data there are, and what is in them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from posttrain import registry
from posttrain.commands.console import Text, open_console, plain_table
from posttrain.commands.explain import summary
from posttrain.commands.options import chosen_words
from posttrain.errors import UsageError
from posttrain.models.load import load_tokenizer
from posttrain.recipes.sections import Word
from posttrain.render import encode_plain
from posttrain.reports.charts import PICTURES, draw_png
from posttrain.reports.curves import data_panels
from posttrain.tasks.base import Task, build_task
from posttrain.tasks.description import PERCENTILES, Description, describe_task, percentile, random_examples
from posttrain.types import Example
from posttrain.untrusted import kind_of_file

NUM_COMMONEST = 5
WHOLE_TASK = 10**9


def run_data(arguments: argparse.Namespace) -> int:
    """List the tasks, or show what one of them holds."""
    console = open_console()
    if arguments.action == "list":
        _print_tasks(console)
        return 0
    if arguments.name is None:
        known = ", ".join(registry.names("task"))
        raise UsageError(f"give the task's name: posttrain data show NAME. Known: {known}")
    arguments.task = arguments.name
    word = chosen_words(arguments)["task"]
    task = build_task(word, "task")
    measure, unit = _choose_measure(arguments.model)
    stats = describe_task(task, measure, n=arguments.n or WHOLE_TASK)
    if stats.num_read == 0:
        raise UsageError(f"task {task.name!r}, split {task.split!r}: there is no example in it")
    print_description(console, task, stats, unit, arguments.max_tokens)
    for example in random_examples(task, arguments.examples, arguments.seed):
        print_example(console, example)
    if arguments.plot is not None:
        title = f"{task.name}/{task.split}: {stats.num_read:,} examples"
        target = Path(arguments.plot or _picture_name(word))
        if target.suffix and target.suffix.lower() not in PICTURES:
            kinds = ", ".join(PICTURES)
            raise UsageError(f"--plot: {target}: no picture can be written as {target.suffix}; use {kinds}")
        if kind_of_file(target.parent) != "folder" or kind_of_file(target) not in ("file", "nothing"):
            raise UsageError(f"--plot: {target}: no file can be written there; give one in a folder that is there")
        print(f"picture: {draw_png(data_panels(stats, unit), title, target, columns=2)}")
    return 0


def _picture_name(word: Word) -> str:
    return f"data-{word.name.replace(':', '-')}.png"


def _choose_measure(model: str | None) -> tuple[Callable[[str], int], str]:
    if model is None:
        return len, "characters"
    tokenizer = load_tokenizer(model)
    return lambda text: len(encode_plain(tokenizer, text)), f"tokens of {model}"


def _print_tasks(console: Console) -> None:
    table = plain_table(show_header=False)
    table.add_column("task", no_wrap=True)
    table.add_column("what it is")
    for name, entry in registry.entries("task").items():
        table.add_row(Text(name, style="bold"), Text(summary(entry.doc)))
    console.print(table)
    console.print("\nLook into one: posttrain data show NAME    Its options: posttrain explain NAME")


def print_description(console: Console, task: Task, stats: Description, unit: str, limit: int | None) -> None:
    """Counts, lengths and balances as tables."""
    read = "" if stats.num_read == stats.num_examples else f", the first {stats.num_read:,} of which were read"
    console.print(Text.assemble((f"{task.name}/{task.split}", "bold"), f": {stats.num_examples:,} examples{read}"))
    for reason, count in task.dropped.items():
        console.print(Text(f"  left out: {count:,} × {reason}"))
    for line in _facts(stats, unit, limit):
        console.print(Text(f"  {line}"))
    for line in task.notices:
        console.print(Text(f"  {line}"))
    if task.keys:
        console.print()
        console.print(_key_table(task.keys))
    console.print()
    console.print(_length_table(stats, unit))
    for name, counts in _counted(stats):
        console.print()
        console.print(_count_table(name, counts))


def _facts(stats: Description, unit: str, limit: int | None) -> list[str]:
    turns = ", ".join(f"{n:,} × {length}" for length, n in sorted(stats.turns.items()))
    lines = [
        f"prompts that stand there more than once: {stats.repeated_prompts:,} examples repeat an earlier one",
        f"messages of a prompt: {turns}" if len(stats.turns) > 1 else f"messages of a prompt: {min(stats.turns)}",
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
            f"pairs: {stats.num_pairs:,}, of which {stats.identical_pairs:,} differ in white space at most",
            f"the chosen answer is the longer one in {stats.longer_chosen / stats.num_pairs:.1%} of the pairs",
            f"score differences: median {percentile(margins, 0.5):g}, from {min(margins):g} to {max(margins):g}",
        ]
    return lines


def _counted(stats: Description) -> list[tuple[str, Counter[str]]]:
    return [(f"labels of {name}", counts) for name, counts in stats.labels.items()] + list(stats.kinds.items())


def _key_table(keys: Mapping[tuple[str, str], int]) -> Table:
    """Keys of the rows, those inside of messages too, each with its use."""
    table = plain_table("key of the rows", "what was done with it", right=("rows",))
    for (key, done), count in sorted(keys.items()):
        table.add_row(Text(key), Text(done), f"{count:,}")
    return table


def _length_table(stats: Description, unit: str) -> Table:
    names = [{0.0: "least", 0.5: "median", 1.0: "most"}.get(share, f"{share:.0%}") for share in PERCENTILES]
    table = plain_table(unit, right=("texts", *names, "mean"))
    for part, values in stats.lengths.items():
        cells = [f"{percentile(values, share):,.0f}" for share in PERCENTILES]
        table.add_row(part, f"{len(values):,}", *cells, f"{sum(values) / len(values):,.1f}")
    return table


def _count_table(name: str, counts: Counter[str]) -> Table:
    table = plain_table(name, right=("count", "share"))
    for value, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(Text(value), f"{count:,}", f"{count / counts.total():.1%}")
    return table


def print_example(console: Console, example: Example) -> None:
    """One example in full."""
    console.print()
    console.print(Rule(Text(example.id), align="left"))
    for message in example.messages:
        _print_part(console, message.role, message.content)
    if example.solution is not None:
        _print_part(console, "solution", example.solution)
    if example.demonstration is not None:
        _print_part(console, "response", example.demonstration)
    if example.answer is not None:
        _print_part(console, f"answer (grader {example.grader})", example.answer)
    for response in example.responses:
        _print_part(console, f"response, score {response.score:g}", "" if response.steps else response.text)
        for step, label in zip(response.steps, response.step_labels, strict=True):
            console.print(Text(f"  [{label}] {step.strip()}"))
        if response.answer is not None:
            console.print(Text(response.answer))
    shown = {key: value for key, value in example.meta.items() if isinstance(value, str | int | float | list | tuple)}
    if shown:
        _print_part(console, "meta", ", ".join(f"{key} {value}" for key, value in shown.items()))


def _print_part(console: Console, name: str, text: str) -> None:
    console.print(Text(name, style="cyan"))
    if text:
        console.print(Text(text))
