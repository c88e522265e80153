"""``posttrain generate``: answers to a prompt, or to an example of a task, and what they are worth."""

from __future__ import annotations

import argparse
import math

from rich.console import Console

from posttrain.commands.console import Text, open_console
from posttrain.commands.interpret.steering import check_steering, steering_of
from posttrain.commands.options import chosen_words
from posttrain.data.base import build_task, choose_task
from posttrain.data.render import decode_response, encode_prompt
from posttrain.errors import UsageError
from posttrain.randomness import derive_key
from posttrain.runs.models import find_source
from posttrain.sampling.models import OpenedModel, complete_template, open_model
from posttrain.sampling.rollout import Attempt
from posttrain.types import Completion, Example, Message


def run_generate(arguments: argparse.Namespace) -> int:
    """Sample answers to a prompt, or to an example of a task, and show what they are worth."""
    words = chosen_words(arguments)
    check_steering(arguments)
    source = find_source(arguments.model, arguments.runs_dir)
    if arguments.prompt is not None:
        if other := "--task" if "task" in words else "--limit" if arguments.limit else "":
            raise UsageError(f"PROMPT and {other}: give one of them; a task says what is asked without PROMPT")
        if not arguments.prompt.strip():
            raise UsageError("PROMPT is empty: give a question, or leave it out for a made-up one")
        examples = [Example("prompt", (Message("user", arguments.prompt),))]
    else:
        task = build_task(choose_task(words.get("task"), arguments.model, source.recipe), "task")
        places = range(arguments.seed, arguments.seed + min(arguments.limit or 1, len(task.examples)))
        examples = [task.examples[place % len(task.examples)] for place in places]
    sampler = open_model(source, complete_template(words.get("template"), source))
    template = sampler.grader.template
    prompts = [encode_prompt(sampler.tokenizer, template, one.messages, one.variables) for one in examples]
    keys = [derive_key(arguments.seed, "generate", i) for i in range(arguments.samples)]
    sampling = sampler.sampling(arguments.max_tokens or source.max_tokens, arguments.temperature)
    steered, change = steering_of(arguments, sampler.model)
    with steered:
        answers = sampler.engine.generate(prompts, [keys] * len(prompts), sampling)
    console = open_console()
    if change:
        console.print(Text(f"steered at {change}", style="dim"))
    for example, prompt, completions in zip(examples, prompts, answers, strict=True):
        console.print(Text("\n".join(message.content for message in example.messages), style="bold"))
        for completion in completions:
            _print_completion(console, sampler, example, completion, prompt)
    return 0


def _print_completion(
    console: Console, sampler: OpenedModel, example: Example, completion: Completion, prompt: list[int]
) -> None:
    template = sampler.grader.template
    text = decode_response(sampler.tokenizer, template, completion.ids, prompt)
    extracted = template.extract(text)
    facts = [f"{len(completion.ids)} tokens", "cut off" if completion.finish == "length" else "ended by itself"]
    if completion.logprobs:
        facts.append(f"mean log-prob {math.fsum(completion.logprobs) / len(completion.logprobs):.3f}")
    facts.append("no answer found" if extracted is None else f"answer {extracted}")
    if example.answer is not None:
        grade = sampler.grader.grade([Attempt(example, "", text, completion)])[0]
        facts.append("right" if grade.outcome == "right" else f"wrong, it is {example.answer}")
    console.print()
    console.print(Text(text))
    console.print(Text(" · ".join(facts), style="dim"))
