"""The parts of a training step, for loops of one's own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain import registry
from posttrain.algorithms.objectives.surrogate import with_regularizers
from posttrain.api.arguments import check_numbers, plain_number, plain_path, reading
from posttrain.api.config_objects import read_config_objects
from posttrain.api.inputs import (
    Data,
    Model,
    Place,
    Rewards,
    check_inputs,
    overrides_of,
    plain_recipe,
    without_command_line,
)
from posttrain.api.measure import Prompt, examples_of
from posttrain.api.training import given, read_recipe
from posttrain.data.render import encode_prompt
from posttrain.data.rendered import take_rendered_prompts
from posttrain.errors import UsageError
from posttrain.models.answer_end import write_ends
from posttrain.models.written.older_readers import write_older_keys
from posttrain.option_types import shorten
from posttrain.randomness import derive_key
from posttrain.recipes.sections import read_component
from posttrain.registry import stop_import
from posttrain.sampling.rollout import RolloutRequest, collect
from posttrain.store.durable import storage_errors
from posttrain.training.batch_fields import needed_fields
from posttrain.training.build import TrainerState, prepare
from posttrain.training.checkpoint import write_model
from posttrain.training.idle_rows import choose_idle_rows
from posttrain.training.sources.rollouts import RolloutSource
from posttrain.training.step import Method, accumulate, apply_update, learning_rate
from posttrain.types import Batch, Example, Loss, Outputs, Rollout

# Of a trainer without a recipe; its prompts come from the loop.
BASE: Mapping[str, Any] = {"task": {"name": "sums", "size": 1}, "objective": "grpo", "rollout": {}}
Objective = str | Mapping[str, Any] | Callable[[Outputs, Batch], Loss]
Groups = Sequence[Sequence[Rollout]]
# Arguments of ``sample``, by command line option.
_OF_SAMPLE = {"--samples": "samples", "--max-tokens": "max_tokens"}


@dataclass(frozen=True)
class Gradients:
    """The result of ``forward_backward``: the loss, and the means of the objective's metrics."""

    loss: float
    metrics: dict[str, float]


class Trainer:
    """Model, sampler, objective and optimizer in a single process, for custom training loops.

    Random numbers in step k match step k in ``pt.train`` with the same seed.

    Args:
        model: same as in ``pt.train``.
        recipe: method and options. Default: GRPO.
        data: same as in ``pt.train``; source for ``prompts``.
        rewards: same as in ``pt.train``; used to grade samples.
        keys: same as in ``pt.train``.

    Raises:
        UsageError: an unusable model or option.

    Examples:
        >>> trainer = pt.Trainer("tiny-sft", data=rows, rewards=["correct"], lr=1e-5, group_size=8)
        >>> groups = trainer.sample(trainer.prompts(1))
    """

    def __init__(
        self,
        model: Model | Mapping[str, object],
        recipe: str | os.PathLike[str] | Mapping[str, object] = BASE,
        *,
        data: Data | None = None,
        rewards: Rewards | None = None,
        runs_dir: Place = "runs",
        **keys: object,
    ) -> None:
        stop_import()
        with without_command_line():
            keys, _ = read_config_objects(keys)
            overrides = dict(overrides_of(keys)) | {"eval.every": "0", "eval.num_kl_prompts": "0"}
            words = given(runs_dir, data, None, rewards, model)
            self.recipe, _ = read_recipe(plain_recipe(recipe), list(overrides.items()), words)
        if self.recipe.rollout is None:
            raise UsageError("recipe: 'rollout' is missing, so nothing is sampled. Give a recipe with 'rollout'")
        if self.recipe.scale.processes > 1:
            raise UsageError("scale.processes: a trainer runs in a single process. Remove it")
        self.parts: TrainerState = prepare(self.recipe)
        assert isinstance(self.parts.source, RolloutSource), "of a recipe with rollout"
        self.source = self.parts.source
        self.step = 0  # number of updates
        self._calls = 0
        self._loss = 0.0

    @property
    def model(self) -> Any:
        """The trained transformers model."""
        return self.parts.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.parts.tokenizer

    def prompts(self, step: int) -> list[Example]:
        """Draw the examples for a step, counted from 1, in the same order as ``pt.train``.

        Examples:
            >>> [example.answer for example in trainer.prompts(1)]
            ['34', '8']
        """
        check_inputs({"step": step}, {})
        return [self.source.prompts.draw(place).example for place in self.source.order.round_of(step - 1).places]

    def sample(
        self,
        prompts: Prompt | Iterable[Prompt | Example],
        *,
        samples: int | None = None,
        max_tokens: int | None = None,
        **others: object,
    ) -> list[list[Rollout]]:
        """Sample and grade completions with the current weights.

        Args:
            prompts: questions, lists of messages, or examples from ``prompts``, which include gold answers.
            samples: completions per prompt. Default: ``rollout.group_size``.
            max_tokens: default ``rollout.max_tokens``.

        Returns:
            A list per prompt. Each ``Rollout`` has ``text``, ``reward`` and reward ``parts``. Set ``advantage`` before
            training.

        Examples:
            >>> groups = trainer.sample(["What is 3 plus 4?"], samples=2)
            >>> [rollout.text for rollout in groups[0]]
        """
        check_inputs({}, {"samples": samples, "max_tokens": max_tokens}, others, _OF_SAMPLE)
        source = self.source
        step = self.step + 1
        template = source.grader.template
        sampling = source.sampling
        examples, _ = take_rendered_prompts(examples_of(prompts), template, self.tokenizer, "prompts")
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        request = RolloutRequest(
            examples,
            [encode_prompt(self.tokenizer, template, one.messages, one.variables) for one in examples],
            sampling,
            key=(self.recipe.train.seed, f"rollout {self._calls}", step),
            group=samples or source.options.group_size,
            step=step,
            num_updates=self.step,
        )
        self._calls += 1
        source.engine.sync(self.step)
        groups, _ = collect(source.sampler, request)
        source.engine.rest()
        return groups

    def batch(self, groups: Groups) -> Batch:
        """Collate sampled completions into a batch with all fields required by the objective (``old_logprobs``, ...).

        If the objective reads advantages, ``advantage`` must be set on every completion.

        Raises:
            UsageError: a missing advantage, or an objective on pairs.

        Examples:
            >>> trainer.batch(groups).tokens.shape
            torch.Size([16, 61])
        """
        if self.source.rows_per_unit != 1:
            raise UsageError("batch: the objective reads pairs. Make them with posttrain.types.collate")
        if not _is_sampled(groups):
            raise UsageError("batch: not sampled completions. Give the result of sample: a non-empty list per prompt")
        units: list[tuple[tuple[int, int], ...]] = [
            ((n, g),) for n, group in enumerate(groups) for g in range(len(group))
        ]
        if "advantages" in self.source.batch_fields.needs:
            for one in (one for group in groups for one in group):
                if one.advantage is None:
                    raise UsageError(
                        "batch: a completion has no advantage. Set rollout.advantage for every completion, such as 0.0"
                    )
                one.advantage = _read_advantage(one.advantage)
        return self.source.batch_fields(self.source.batch_of(groups, units))

    def forward_backward(self, batch: Batch | Groups, objective: Objective | None = None) -> Gradients:
        """Compute the loss and accumulate gradients.

        Args:
            batch: a batch from ``batch``, or groups from ``sample`` with advantages set.
            objective: a name, a mapping with name and options, or a function ``(outputs, batch) -> Loss``. Default:
                set in the recipe.

        Raises:
            UsageError: the objective reads a field missing from the batch.

        Examples:
            >>> trainer.forward_backward(groups, "grpo").loss
            -0.0021
        """
        rows = batch
        if not isinstance(rows, Batch):
            rows = self.batch(rows)
        rows = self.source.batch_fields.before_step(rows)
        method = self.parts.learning()
        if objective is not None:
            method = self._with_objective(method, objective, rows)
        torch.manual_seed(derive_key(self.recipe.train.seed, "dropout", self.step + 1) % (1 << 63))
        idle_rows = choose_idle_rows(self.recipe.train, self.step + 1, self.recipe.train.steps)
        loss, metrics = accumulate(method, rows, self.recipe.train, idle_rows=idle_rows)
        self._loss += loss
        return Gradients(loss, metrics)

    def _with_objective(self, method: Method, objective: Objective, batch: Batch) -> Method:
        if not isinstance(objective, str | Mapping):
            return replace(method, objective=objective, vanishes=None)
        word = read_component(objective, "objective")
        entry = registry.find("objective", word.name, "objective")
        missing = sorted(needed_fields(entry, word.options, True) - batch.fields.keys())
        if missing or entry.traits.get("level", "token") != method.level:
            lacks = "has a different unit"
            if missing:
                lacks = f"reads {', '.join(missing)}"
            raise UsageError(
                f"objective: {word.name!r} {lacks}, which this trainer did not prepare. Pass it to the constructor"
                f": pt.Trainer(..., objective={word.name!r})"
            )
        function: Callable[[Outputs, Batch], Loss] = entry.bind(word.options, "objective")
        own = self.recipe.objective
        if word.name == own.name and entry.options_model(**word.options) == entry.options_model(**own.options):
            return method  # skips rows that cannot contribute, as ``train`` does
        regularize = self.recipe.regularize
        if regularize is not None and entry.traits.get("policy_term"):
            function = with_regularizers(function, **regularize.model_dump())
        return replace(method, objective=function, vanishes=None)

    def optim_step(self, lr: float | None = None) -> float:
        """Clip gradients, update weights, and zero gradients.

        Args:
            lr: learning rate. Default: current value in the recipe's schedule.

        Returns:
            Gradient norm before clipping.

        Raises:
            UsageError: no gradients, or a negative or infinite ``lr``.
            NonFiniteLoss: non-finite loss or norm; weights are unchanged.

        Examples:
            >>> trainer.optim_step(lr=1e-5)
            0.73
        """
        options = self.recipe.train
        step = self.step + 1
        loss = self._loss
        own, apart = self.parts.split_parameters()
        if lr is None:
            lr = learning_rate(options, step)
        check_numbers(lr=lr)
        lr = float(lr)
        if all(parameter.grad is None for parameter in (*own, *apart)):
            raise UsageError("optim_step: no gradients. Call forward_backward first")
        if not 0 <= lr < math.inf:
            raise UsageError(f"optim_step: lr is {lr}. Give a finite number, 0 or more")
        self._loss = 0.0
        norm = apply_update(self.parts.optimizer, own, lr, options.max_grad_norm, loss, step, apart)
        self.step = step
        self._calls = 0
        return norm

    def save(self, path: Place) -> Path:
        """Save model and tokenizer to a folder that transformers and every posttrain command can load.

        Examples:
            >>> pt.generate(trainer.save("out"), ["What is 3 plus 4?"])
        """
        folder = Path(plain_path("path", path))
        with storage_errors("the model", folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_model(folder, self.model, self.parts.score_head(), None)
            self.tokenizer.save_pretrained(folder)
            write_ends(folder, self.tokenizer, self.parts.answer_ends())
            write_older_keys(folder)
        return folder

    def close(self) -> None:
        """End what samples in other processes.

        Examples:
            >>> trainer.close()
        """
        self.parts.close()


def _is_sampled(groups: object) -> bool:
    """Check if the value is a list of non-empty lists of rollouts."""
    if not isinstance(groups, Sequence) or not groups:
        return False
    return all(
        isinstance(group, Sequence) and group and all(isinstance(one, Rollout) for one in group) for group in groups
    )


def _read_advantage(value: object) -> float:
    """Convert an advantage to float; tensors and arrays must have one element.

    Raises:
        UsageError: not a finite number.
    """
    with reading("batch: advantage"):
        number = plain_number(value.item() if hasattr(value, "item") else value)
    if type(number) not in (int, float) or not math.isfinite(number):
        raise UsageError(
            f"batch: the advantage {shorten(value)} is not finite. Set rollout.advantage to a finite number"
        )
    return float(number)
