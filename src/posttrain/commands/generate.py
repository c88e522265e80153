"""``posttrain generate``: sample and grade answers to a prompt or a task example."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from posttrain.api.measure import Answer, answers_to
from posttrain.commands.interpret.steering import check_steering, steering_of
from posttrain.commands.options import chosen_components
from posttrain.data.base import build_task, choose_task
from posttrain.data.rendered import take_rendered_prompts
from posttrain.errors import UsageError
from posttrain.runs.models import find_source
from posttrain.sampling.base import read_rules
from posttrain.sampling.models import complete_template, open_model
from posttrain.terminal.console import Text, open_console, say_template
from posttrain.types import Example, Message
from posttrain.untrusted import harmless, kind_of_file


def run_generate(arguments: argparse.Namespace) -> int:
    """Sample answers to a prompt or a task example, and show grades."""
    components = chosen_components(arguments)
    check_steering(arguments)
    source = find_source(arguments.model, arguments.runs_dir)
    where = "--task"
    notes: tuple[str, ...] = ()
    if arguments.prompt is not None:
        where = "PROMPT"
        if "task" in components:
            raise UsageError("PROMPT and --task: give only one; a task already provides prompts")
        if arguments.limit:
            raise UsageError("PROMPT and --limit: give only one; a prompt is a single example")
        examples = [_read_prompt(arguments.prompt)]
    else:
        task = build_task(choose_task(components.get("task"), arguments.model, source.task), "task")
        notes = task.warnings
        places = range(arguments.seed, arguments.seed + min(arguments.limit or 1, len(task.examples)))
        examples = [task.examples[place % len(task.examples)] for place in places]
    template = complete_template(components.get("template"), source)
    say_template(source, template)
    sampler = open_model(source, template)
    examples, taken = take_rendered_prompts(examples, sampler.grader.template, sampler.tokenizer, where)
    for line in (*notes, *taken):  # stderr, since these notes describe rows
        print(harmless(f"note: {line}"), file=sys.stderr)
    steered, change = steering_of(arguments, sampler.model)
    with steered:
        answers = answers_to(
            sampler,
            examples,
            samples=arguments.samples,
            seed=arguments.seed,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            rules=read_rules(arguments.min_p, arguments.min_tokens, arguments.repetition_penalty, arguments.stop),
        )
    console = open_console()
    if change:
        console.print(Text(f"steered at {change}", style="dim"))
    for number, example in enumerate(examples):
        console.print(Text("\n".join(message.content for message in example.messages), style="bold"))
        for answer in answers[number * arguments.samples : (number + 1) * arguments.samples]:
            _print_answer(console, answer, example)
    return 0


def _read_prompt(prompt: str) -> Example:
    if not prompt.strip():
        raise UsageError("PROMPT is empty: give a question, or omit it to use a task example")
    if kind_of_file(prompt) == "file":
        raise UsageError(f"PROMPT {prompt!r} is a file; rows are --task jsonl --task.path FILE --limit N")
    return Example("prompt", (Message("user", prompt),))


def _print_answer(console: Console, answer: Answer, example: Example) -> None:
    info = [f"{answer.num_tokens} tokens"]
    if answer.finish == "length":
        info.append("cut off")
    else:
        info.append("ended by itself")
    if answer.logprob is not None:
        info.append(f"mean log-prob {answer.logprob:.3f}")
    if answer.answer is None:
        info.append("no answer found")
    else:
        info.append(f"answer {answer.answer}")
    if answer.outcome == "right":
        info.append("right")
    elif answer.outcome is not None:
        info.append(f"wrong, it is {example.answer}")
    console.print()
    console.print(Text(answer.text))
    console.print(Text(" · ".join(info), style="dim"))
