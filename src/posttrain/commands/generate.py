"""Models that can be asked: by name, with a template and an engine; and ``posttrain generate``."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from posttrain import registry
from posttrain.commands.console import Text, open_console
from posttrain.commands.interpret.steering import check_steering, steering_of
from posttrain.commands.summary import read_run_recipe
from posttrain.engines.base import Engine, Sampling
from posttrain.engines.rollout import Attempt, Grader, build_grader
from posttrain.errors import UsageError
from posttrain.file_kinds import kind_of_file
from posttrain.models.load import QUANTIZED_FOLDERS, load_model, load_tokenizer
from posttrain.models.sources import resolve_model_name
from posttrain.models.stated_sizes import context_length
from posttrain.randomness import derive_key
from posttrain.recipes.document import apply_override
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import ModelSection, RewardWord, Word, read_word
from posttrain.render import decode_response, encode_prompt, stop_ids
from posttrain.render.template import build_template
from posttrain.runs.directory import find_run, run_names
from posttrain.tasks.base import build_task, held_out_task
from posttrain.types import Completion, Example, Message

DEFAULT_MAX_TOKENS = 256
DEFAULT_TEMPLATE = Word(name="r1_zero")
NATIVE = Word(name="native")


@dataclass(frozen=True)
class ModelSource:
    """What a name on the command line stands for.

    ``label`` is what tables call it, ``path`` what is loaded. ``run`` and ``recipe`` are there when it came out of
    a run, whole or one of its checkpoints.
    """

    name: str
    label: str
    path: str
    run: Path | None = None
    recipe: Recipe | None = None

    @property
    def template(self) -> Word:
        """The template that it was trained with."""
        return self.recipe.prompt.template if self.recipe is not None else DEFAULT_TEMPLATE

    @property
    def max_tokens(self) -> int:
        """How long its answers may be, as its run says."""
        if self.recipe is None:
            return DEFAULT_MAX_TOKENS
        trained = self.recipe.rollout.max_tokens if self.recipe.rollout is not None else None
        return self.recipe.eval.max_tokens or trained or DEFAULT_MAX_TOKENS

    def refuse_scorer(self) -> None:
        """Raises ``UsageError`` if the run trained a reward model."""
        if self.recipe is not None and not writes_answers(self.recipe):
            raise UsageError(
                f"{self.name}: this run trained a reward model ({self.recipe.objective.name}); it scores answers and "
                f"writes none. Measure it with: posttrain evaluate {self.name}"
            )


def find_source(name: str, runs_dir: str | Path) -> ModelSource:
    """A model by the name of a run, the path of a run or of one of its checkpoints, or any name of a model.

    Raises:
        UsageError: a run without a recipe that can be read, or without that checkpoint.
    """
    path = Path(name)
    if kind_of_file(path / "recipe.yaml") == "file" or name in run_names(runs_dir):
        run = find_run(runs_dir, name)
        return ModelSource(name, run.name, str(run), run, read_run_recipe(run))
    checkpoint = path.parent if path.name in QUANTIZED_FOLDERS.values() else path
    run = checkpoint.parent.parent
    if checkpoint.parent.name == "checkpoints" and (run / "recipe.yaml").is_file():
        if not path.is_dir():
            there = ", ".join(sorted(p.name for p in checkpoint.parent.iterdir() if p.is_dir())) or "none"
            raise UsageError(f"{name}: the run {run} has no such checkpoint. There: {there}")
        label = f"{run.resolve().name}@{path.relative_to(checkpoint.parent)}"
        return ModelSource(name, label, str(path), run, read_run_recipe(run))
    return ModelSource(name, name, name)


@dataclass(frozen=True)
class Sampler:
    """A model that can be asked. ``model`` is None where the engine samples in another process."""

    source: ModelSource
    model: Any
    tokenizer: Any
    engine: Engine
    grader: Grader
    context_tokens: int

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def run(self) -> Path | None:
        return self.source.run

    @property
    def max_tokens(self) -> int:
        return self.source.max_tokens

    def sampling(
        self, max_tokens: int | None, temperature: float, top_k: int | None = None, top_p: float = 1.0
    ) -> Sampling:
        """How tokens are drawn; ``max_tokens`` None: as long as the run's answers may be."""
        stops = stop_ids(self.tokenizer, self.grader.template)
        return Sampling(max_tokens or self.source.max_tokens, temperature, top_k, top_p, stops)

    def with_template(self, template: Word | None) -> Sampler:
        """The same model, asked and graded by another template (None: its own, with its run's rewards)."""
        return replace(self, grader=grader_for(self.source, template))


def grader_for(source: ModelSource, template: Word | None) -> Grader:
    """The grader under a template; with a run's own template, its rewards count too.

    But for those that are models: a policy can be asked where its judge is gone, and ``evaluate --best-of`` names one;
    and for code that a stored recipe names and nobody allowed (see ``check_rewards``).
    """
    word = template or source.template
    own = source.recipe is not None and word.name == source.template.name
    rewards = source.recipe.rewards if own and source.recipe is not None else [RewardWord(name="correct")]
    known = [(reward, registry.traits_of("reward", reward.name)) for reward in rewards]
    plain = [reward for reward, traits in known if traits is not None and "model_option" not in traits]
    return build_grader(plain, build_template(word, "template"))


def check_rewards(source: ModelSource, template: Word | None) -> None:
    """Before a run's rewards are measured, and none may be missing.

    Raises:
        UnallowedCode: one is code that the run's recipe names, and nobody allowed it.
    """
    if source.recipe is not None and (template is None or template.name == source.template.name):
        for index, reward in enumerate(source.recipe.rewards):
            registry.find("reward", reward.name, f"rewards.{index}")


def open_sampler(
    name: str | ModelSource,
    runs_dir: str | Path,
    template: Word | None = None,
    *,
    engine: Word = NATIVE,
    dtype: Literal["float32", "bfloat16"] | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
) -> Sampler:
    """Load a model by name, directory, or run, with the template that it was trained with.

    An engine that samples elsewhere gets no model here: its tokenizer alone is loaded, and where the engine has an
    option ``checkpoint``, it is told which model is meant.

    Raises:
        UsageError: no such model or run, or one that cannot be loaded.
    """
    source = find_source(name, runs_dir) if isinstance(name, str) else name
    source.refuse_scorer()
    section = ModelSection(name=source.path)
    if source.recipe is not None:
        trained = source.recipe.model
        kept = {"dtype": trained.dtype, "device": trained.device, "trust_remote_code": trained.trust_remote_code}
        section = section.model_copy(update=kept)
    section = section.model_copy(update={k: v for k, v in (("dtype", dtype), ("device", device)) if v is not None})
    grader = grader_for(source, template)
    entry = registry.find("engine", engine.name, "--engine")
    options = dict(engine.options)
    if "checkpoint" in entry.options_model().model_fields:
        options.setdefault("checkpoint", resolve_model_name(source.path))
    build = entry.bind(options, "--engine")
    if entry.traits.get("needs_model", True):
        loaded = load_model(section, seed=0)
        built = build(loaded.model, loaded.tokenizer)
        return Sampler(source, loaded.model, loaded.tokenizer, built, grader, context_length(loaded.model.config))
    tokenizer = load_tokenizer(source.path, trust_remote_code=section.runs_remote_code)
    built = build(None, tokenizer)
    return Sampler(source, None, tokenizer, built, grader, built.context_tokens)


def writes_answers(recipe: Recipe) -> bool:
    """Whether what a recipe trains is a policy, and not a reward model."""
    return not recipe.trains_scorer


def chosen_words(arguments: argparse.Namespace) -> dict[str, Word]:
    """The words ``task`` and ``template`` of the command line, each with its options."""
    data: dict[str, Any] = {}
    for key in ("task", "template"):
        if getattr(arguments, key, None) is not None:
            apply_override(data, key, json.dumps(getattr(arguments, key)))
    for key, value in arguments.overrides:
        apply_override(data, key, value)
    for value in data.values():
        if isinstance(value, dict):
            value.setdefault("name", "")  # options of a word that is not named here
    return {key: read_word(value, f"--{key}") for key, value in data.items()}


def choose_task(given: Word | None, model: str, recipe: Recipe | None) -> Word:
    """What to measure on: the task named, else the run's own, else stories for ``tiny``.

    The split is ``test`` unless given. Of a run's own local file, which was trained on, and of a run that learnt
    from test prompts too, it is the part that was held out.

    Raises:
        UsageError: a model that is no run, and no task named.
    """
    options: dict[str, Any] = dict(given.options) if given is not None else {}
    split = "test"
    if given is not None and given.name:
        name = given.name
    elif recipe is not None:
        name = recipe.task.name
        own = {key: value for key, value in recipe.task.options.items() if key != "split"}
        mixes = own.get(registry.find("task", name, "--task").traits.get("learns_from_test", ""))
        if (own.get("path") is not None and "path" not in options) or mixes:
            split = held_out_task(recipe.task).options["split"]
        options = own | options
    elif model == "tiny":
        name = "stories"
    else:
        known = ", ".join(registry.entries("task"))
        raise UsageError(f"--task is needed: {model!r} is no run that would tell its own. Known tasks: {known}")
    if "split" in registry.find("task", name, "--task").options_model().model_fields:
        options.setdefault("split", split)
    return Word(name=name, **options)


def complete_template(given: Word | None, source: ModelSource) -> Word | None:
    """Options alone (``--template.preamble``), or the name of the run's own template, add to what the run had."""
    own = source.template
    if given is None or given.name not in ("", own.name):
        return given
    return Word(name=own.name, **(own.options | given.options))


def run_generate(arguments: argparse.Namespace) -> int:
    """Sample answers to a prompt, or to a made-up problem, and show what they are worth."""
    words = chosen_words(arguments)
    check_steering(arguments)
    source = find_source(arguments.model, arguments.runs_dir)
    if arguments.prompt is not None:
        if not arguments.prompt.strip():
            raise UsageError("PROMPT is empty: give a question, or leave it out for a made-up one")
        example = Example("prompt", (Message("user", arguments.prompt),))
    else:
        task = build_task(choose_task(None, arguments.model, source.recipe), "task")
        example = task.examples[arguments.seed % len(task.examples)]
    sampler = open_sampler(source, arguments.runs_dir, complete_template(words.get("template"), source))
    prompt = encode_prompt(sampler.tokenizer, sampler.grader.template, example.messages)
    keys = [derive_key(arguments.seed, "generate", i) for i in range(arguments.n)]
    sampling = sampler.sampling(arguments.max_tokens, arguments.temperature)
    steered, change = steering_of(arguments, sampler.model)
    with steered:
        completions = sampler.engine.generate([prompt], [keys], sampling)[0]
    console = open_console()
    if change:
        console.print(Text(f"steered at {change}", style="dim"))
    console.print(Text("\n".join(message.content for message in example.messages), style="bold"))
    for completion in completions:
        _print_completion(console, sampler, example, completion)
    return 0


def _print_completion(console: Console, sampler: Sampler, example: Example, completion: Completion) -> None:
    template = sampler.grader.template
    text = decode_response(sampler.tokenizer, template, completion.ids)
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
