"""Evaluation and generation from Python."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.api.arguments import (
    check_flag,
    check_numbers,
    check_whole,
    plain_component,
    plain_counts,
    plain_number,
    plain_path,
    plain_text,
    reading,
)
from posttrain.api.inputs import Data, Model, Place, check_inputs, data_word, model_name
from posttrain.data.messages import read_messages
from posttrain.data.reading import Row
from posttrain.data.render import decode_response, encode_prompt
from posttrain.data.rendered import take_rendered_prompts
from posttrain.errors import UsageError
from posttrain.evaluation import DEFAULT_BATCH
from posttrain.evaluation.files import FinishedEvaluation
from posttrain.evaluation.items import Item
from posttrain.evaluation.plan import (
    Drawing,
    EvaluationPlan,
    EvaluationProgress,
    EvaluationRequest,
    choose_drawing,
    make_plan,
    run_plan,
)
from posttrain.evaluation.reward_models.scoring import open_reward_model
from posttrain.randomness import derive_key
from posttrain.recipes.sections import Component, read_component
from posttrain.registry import stop_import, suggest
from posttrain.reports.evaluation_page import write_page, write_table_page
from posttrain.runs.models import find_source
from posttrain.sampling.base import NO_RULES, DecodingRules, read_rules
from posttrain.sampling.models import ModelSource, OpenedModel, complete_template, open_model
from posttrain.sampling.rollout import Attempt
from posttrain.terminal.console import open_console, say_template
from posttrain.terminal.evaluation_progress import choose_evaluation_progress
from posttrain.types import Example, Message
from posttrain.untrusted import harmless

Prompt = str | Sequence[Mapping[str, Any]]  # a question, or messages with role and content
# Arguments shared by both functions, by command line option.
_ALIKE = {f"--{name.replace('_', '-')}": name for name in (
    "max_tokens", "temperature", "top_p", "top_k", "template", "min_p", "min_tokens", "repetition_penalty", "stop"
)}  # fmt: skip
_OF_EVALUATE = {
    "--task": "data",
    "--limit": "limit",
    "--samples": "samples",
    "--engine": "engine",
    "--out": "out",
    **_ALIKE,
}
_OF_GENERATE = {"--samples": "samples", **_ALIKE}


@dataclass(frozen=True)
class Measure:
    """A result with its 95 % interval (None if unavailable) and the evaluated items."""

    value: float
    interval: tuple[float, float] | None
    items: list[Item]

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class Measured:
    """A finished evaluation. Access results by name: ``measured.accuracy``, ``measured["pass@4"]``."""

    finished: FinishedEvaluation

    @property
    def folder(self) -> Path:
        """The folder of ``summary.md``, ``results.json`` and ``items.jsonl``."""
        return self.finished.folder

    @property
    def results(self) -> dict[str, float]:
        """All results, keyed by name."""
        return self.finished.results

    @property
    def accuracy(self) -> Measure:
        """Fraction of items answered correctly."""
        return self["accuracy"]

    def __getitem__(self, name: str) -> Measure:
        """Look up a result by name.

        Raises:
            UsageError: unknown result. The message lists available names.
        """
        results = self.results
        if name not in results:
            names = [known for known in results if not known.endswith(("_low", "_high"))]
            what = f"{self.folder}: unknown result {name!r}.{suggest(name, names)}"
            raise UsageError(f"{what} Give one of: {', '.join(names)}")
        low = results.get(f"{name}_low")
        high = results.get(f"{name}_high")
        interval = None
        if low is not None and high is not None:
            interval = (low, high)
        return Measure(results[name], interval, self.finished.items())


def _read_components(name: str, given: str | Mapping[str, object] | None) -> list[Component]:
    """Convert an optional component argument to a list; empty if None."""
    if given is None:
        return []
    return [read_component(plain_component(name, given), name)]


def _source_at(name: str, given: Place | None, runs: str) -> ModelSource | None:
    """Resolve an optional run or model argument; None stays None."""
    if given is None:
        return None
    return find_source(plain_path(name, given), runs)


def _path_at(name: str, given: Place | None) -> Path | None:
    if given is None:
        return None
    return Path(plain_path(name, given))


def _rows_to_measure(data: Data | None, runs: str) -> dict[str, object] | None:
    """Convert data to a task. Rows given in Python are all evaluated; a file uses its test split."""
    if data is None:
        return None
    word = data_word(data, runs)
    if not isinstance(data, str | os.PathLike | Mapping) and "path" in word:
        return {"split": "all"} | word
    return word


def evaluate(
    model: Model,
    data: Data | None = None,
    *,
    limit: int = 500,
    samples: int = 1,
    k: int | Sequence[int] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    min_p: float | None = None,
    min_tokens: int | None = None,
    repetition_penalty: float | None = None,
    stop: str | Sequence[str] | None = None,
    seed: int = 0,
    template: str | Mapping[str, object] | None = None,
    engine: str | Mapping[str, object] = "native",
    best_of: Place | None = None,
    out: Place | None = None,
    runs_dir: Place = "runs",
    progress: bool = True,
    **others: object,
) -> Measured:
    """Evaluate a model on held-out data, like ``posttrain evaluate``. Results, report and all answers are saved.

    Args:
        model: a run, a folder, a name, or a loaded ``(model, tokenizer)``.
        data: rows, a Dataset, a DataFrame, a file, a task name, or a task with options. Default: the run's task.
        limit: maximum number of rows. ``samples``: answers per row. ``k``: values for pass@k.
        temperature: 0 means greedy. Default: 0 with ``samples=1``, otherwise 1. For other options see ``eval`` keys.
        max_tokens: maximum tokens per answer. Default, as for ``template``: the run's value, otherwise 256.
        best_of: run with a reward model for best-of-n selection. ``progress``: show a progress bar.
        out: output folder. Default: inside the run, or in ``evaluations`` if the model is not a run.

    Raises:
        UsageError: invalid model, data or option. The message suggests a valid alternative.

    Examples:
        >>> accuracy = pt.evaluate(run, data=held_out).accuracy
        >>> accuracy.value, accuracy.interval, len(accuracy.items)
        (0.82, (0.73, 0.89), 100)
    """
    stop_import()
    counts = {"limit": limit, "samples": samples}
    check_inputs(counts, {"max_tokens": max_tokens, "top_k": top_k}, others, _OF_EVALUATE, "evaluate")
    runs = _check_drawing(temperature, top_p, seed, progress, runs_dir)
    numbers = {"n": limit, "samples": samples, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    numbers |= {"max_tokens": max_tokens, "min_p": min_p, "min_tokens": min_tokens, "seed": seed}
    numbers["repetition_penalty"] = repetition_penalty
    request = EvaluationRequest(
        models=[find_source(model_name(model, runs), runs)],
        drawing=_drawing_of(k, stop, numbers),
        tasks=_read_components("data", _rows_to_measure(data, runs)),
        templates=_read_components("template", template),
        engine=read_component(plain_component("engine", engine), "engine"),
        best_of=_source_at("best_of", best_of, runs),
        out=_path_at("out", out),
    )
    return _measured(request, progress)


def _measured(request: EvaluationRequest, progress: bool) -> Measured:
    """Run an evaluation request for a single model."""
    with choose_evaluation_progress(open_console(), not progress) as view:
        return Measured(evaluate_plan(make_plan(request), view)[0])


def _drawing_of(k: object, stop: str | Sequence[str] | None, numbers: Mapping[str, object]) -> Drawing:
    """Build sampling options from user-provided numbers."""
    plain: dict[str, Any] = {name: plain_number(value) for name, value in numbers.items()}
    return choose_drawing(k=plain_counts("k", k), stop=stop, batch=DEFAULT_BATCH, **plain)


def evaluate_plan(plan: EvaluationPlan, progress: EvaluationProgress) -> list[FinishedEvaluation]:
    """Run an evaluation plan, and write results, records and reports."""
    return run_plan(plan, write_page, write_table_page, open_reward_model, progress)


def _check_drawing(temperature: object, top_p: object, seed: object, progress: object, runs_dir: object) -> str:
    """Check numbers and flags; return ``runs_dir`` as plain text."""
    check_numbers(temperature=temperature, top_p=top_p)
    check_whole("seed", seed)
    check_flag("progress", progress)
    return plain_path("runs_dir", runs_dir)


def _template_for(source: ModelSource, template: str | Mapping[str, object] | None) -> Component | None:
    """Complete the requested template; None selects the model's template."""
    if template is None:
        return None
    return complete_template(read_component(plain_component("template", template), "template"), source)


def _refuse_none(**numbers: object) -> None:
    for name, number in numbers.items():
        if number is None:
            raise UsageError(f"{name}: None is not a number. Omit it to use the default")


@dataclass(frozen=True)
class Answer:
    """A sampled answer.

    ``text``: graded text, including the template's opening. ``answer``: extracted answer, None if not found.
    ``finish``: ``stop``, or ``length`` if truncated. ``logprob``: mean log-probability per token. ``outcome``: grader
    verdict, if the gold answer is known.
    """

    prompt: str
    text: str
    answer: str | None
    num_tokens: int
    finish: str
    logprob: float | None
    outcome: str | None = None

    def __str__(self) -> str:
        return self.text


def generate(
    model: Model,
    prompts: Prompt | Iterable[Prompt],
    *,
    samples: int = 1,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float | None = None,
    min_tokens: int | None = None,
    repetition_penalty: float | None = None,
    stop: str | Sequence[str] | None = None,
    seed: int = 0,
    template: str | Mapping[str, object] | None = None,
    runs_dir: Place = "runs",
    progress: bool = True,
    **others: object,
) -> list[Answer]:
    """Sample answers for each prompt, like ``posttrain generate``, grouped by prompt in input order.

    Args:
        model: a run, a folder, a name, or a loaded ``(model, tokenizer)``.
        prompts: questions, or conversations as lists of messages.
        samples: answers per prompt.
        temperature: 0 means greedy. Other sampling options follow the ``eval`` keys of recipes.
        template: prompt template. Defaults to the run's, as does ``max_tokens``.
        progress: print the prompt template to stderr if neither the arguments nor a run specify one.

    Raises:
        UsageError: an empty prompt, an unusable model, or prompts already rendered with a different template.

    Examples:
        >>> print(pt.generate(run, ["What is 3 plus 4?"], temperature=0)[0].answer)
        7
    """
    stop_import()
    check_inputs({"samples": samples}, {"max_tokens": max_tokens, "top_k": top_k}, others, _OF_GENERATE)
    _refuse_none(temperature=temperature, top_p=top_p)
    runs = _check_drawing(temperature, top_p, seed, progress, runs_dir)
    samples, max_tokens, seed = map(plain_number, (samples, max_tokens, seed))
    temperature, top_p, top_k = map(plain_number, (temperature, top_p, top_k))
    rules = read_rules(plain_number(min_p), plain_number(min_tokens), plain_number(repetition_penalty), stop)
    source = find_source(model_name(model, runs), runs)
    examples = examples_of(prompts)
    word = _template_for(source, template)
    if progress:
        say_template(source, word)
    opened = open_model(source, word)
    return answers_to(
        opened,
        _taken(examples, opened, progress),
        samples=samples,
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        rules=rules,
    )


def _taken(examples: Sequence[Example], model: OpenedModel, progress: bool) -> list[Example]:
    """Mark examples with already rendered prompts; print notes if ``progress`` is set."""
    taken, notes = take_rendered_prompts(examples, model.grader.template, model.tokenizer, "prompts")
    for line in notes if progress else ():
        print(harmless(f"note: {line}"), file=sys.stderr)
    return taken


def answers_to(
    model: OpenedModel,
    examples: Sequence[Example],
    *,
    samples: int,
    seed: int,
    max_tokens: int | None,
    temperature: float,
    top_p: float = 1.0,
    top_k: int | None = None,
    rules: DecodingRules = NO_RULES,
) -> list[Answer]:
    """Sample answers to each example, and grade those with a gold answer."""
    template = model.grader.template
    prompts = [encode_prompt(model.tokenizer, template, one.messages, one.variables) for one in examples]
    keys = []
    for number in range(len(examples)):
        place: tuple[int, ...] = ()  # empty for the first prompt, to match `posttrain generate`
        if number > 0:
            place = (number,)
        keys.append([derive_key(seed, "generate", *place, i) for i in range(samples)])
    sampling = model.sampling(max_tokens or model.source.max_tokens, temperature, top_k, top_p, rules)
    sampled = model.engine.generate(prompts, keys, sampling)
    answers = []
    for example, prompt, completions in zip(examples, prompts, sampled, strict=True):
        request = "\n".join(message.content for message in example.messages)
        for completion in completions:
            text = decode_response(model.tokenizer, template, completion.ids, prompt)
            logprob = None
            if completion.logprobs:
                logprob = math.fsum(completion.logprobs) / len(completion.logprobs)
            outcome = None
            if example.answer is not None:
                outcome = model.grader.grade([Attempt(example, "", text, completion)])[0].outcome
            answers.append(
                Answer(request, text, template.extract(text), len(completion.ids), completion.finish, logprob, outcome)
            )
    return answers


@reading("prompts")
def examples_of(prompts: Prompt | Iterable[Prompt | Example]) -> list[Example]:
    """Convert prompts to examples. A text or a list of messages counts as one prompt.

    Raises:
        UsageError: no prompts, or an empty prompt.
    """
    if not isinstance(prompts, Iterable):
        raise UsageError(f"prompts: {type(prompts).__name__} is not a prompt. Give questions, or lists of messages")
    listed: list[Any] = [prompts]
    if not isinstance(prompts, str | Mapping):
        listed = list(prompts)
    if not listed:
        raise UsageError("prompts: no prompts. Give at least one")
    if isinstance(listed[0], Mapping):
        listed = [listed]  # a single conversation
    examples = []
    for number, prompt in enumerate(listed):
        if not isinstance(prompt, Example):
            prompt = example_of(prompt, number)
        examples.append(prompt)
    return examples


def example_of(prompt: Prompt, number: int) -> Example:
    """Convert a prompt to an example without a gold answer.

    Raises:
        UsageError: an empty prompt, or invalid messages.
    """
    if isinstance(prompt, str):
        prompt = plain_text(f"prompts.{number}", prompt)
        if not prompt.strip():
            raise UsageError(f"prompts.{number}: the prompt is empty. Give a question")
        return Example(f"prompt/{number}", (Message("user", prompt),))
    if not isinstance(prompt, Sequence):
        raise UsageError(
            f"prompts.{number}: {type(prompt).__name__} is not a prompt. Give a string, or a list of messages"
        )
    for message in prompt:
        content = None
        if isinstance(message, Mapping):
            content = message.get("content")
        if isinstance(content, str):
            plain_text(f"prompts.{number}", content)
    row = Row("prompts", number, {"messages": list(prompt)})
    return Example(f"prompt/{number}", read_messages(row, "messages"))
