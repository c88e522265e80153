"""Faults of a training step, as patches of a few lines: the 32 of the study, and relatives of them.

Each is a class of errors that published post-training code really had (`notes/development-log.md`). A patch changes the
program and not the recipe, unless the recipe is a part of the fault.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.objectives import surrogate
from posttrain.models.forward.micro import MicroBatching
from posttrain.models.reference import Reference
from posttrain.sampling import rollout as graded
from posttrain.sampling.native.engine import NativeEngine
from posttrain.training import advantages, batch_fields, loop, step
from posttrain.training.batch_fields import BatchFields
from posttrain.training.parts import built_models
from posttrain.training.sources import RowOrder, rollouts
from posttrain.types import Loss

Patch = Callable[[pytest.MonkeyPatch], None]
FROM_TRAINER = {"rollout": {"old_logprobs": "trainer"}}
SMALL_MICRO = {"train": {"micro_batch_rows": 4}}


@dataclass(frozen=True)
class Fault:
    """A fault: ``names`` are balances of which one must name it, by update ``by``.

    changes: of the recipe's sections. refused: what the program says that ends the run by itself.
    """

    label: str
    patch: Patch
    names: tuple[str, ...]
    by: int = 2
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: str = ""


def of_generate(change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Patch:
    """Sample from other prompts, or with other options: ``change(engine, prompts, sampling)``."""

    def patch(m: pytest.MonkeyPatch) -> None:
        generate = NativeEngine.generate

        def changed(self: NativeEngine, prompts: Any, keys: Any, sampling: Any) -> Any:
            prompts, sampling = change(self, prompts, sampling)
            return generate(self, prompts, keys, sampling)

        m.setattr(NativeEngine, "generate", changed)

    return patch


@contextmanager
def weights_of(model: Any, other: dict[str, Tensor]) -> Iterator[None]:
    """Compute with other weights inside the block."""
    own = {name: p.detach().clone() for name, p in model.named_parameters() if name in other}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in other:
                p.copy_(other[name])
    yield
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in own:
                p.copy_(own[name])


def of_sampled_weights(choose: Callable[[Any, list[dict[str, Tensor]]], dict[str, Tensor]]) -> Patch:
    """Sample with other weights, chosen from the model and from those of all batches so far."""

    def patch(m: pytest.MonkeyPatch) -> None:
        generate, history = NativeEngine.generate, list[dict[str, Tensor]]()

        def changed(self: NativeEngine, prompts: Any, keys: Any, sampling: Any) -> Any:
            history.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
            with weights_of(self.model, choose(self.model, history)):
                return generate(self, prompts, keys, sampling)

        m.setattr(NativeEngine, "generate", changed)

    return patch


def rounded(levels: int) -> Patch:
    """Sample with weights of so many whole numbers on either side of 0, scaled by the largest of a row."""

    def choose(model: Any, history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        matrices = {name: w for name, w in history[-1].items() if w.ndim == 2}
        scales = {name: w.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels for name, w in matrices.items()}
        return {name: (w / scales[name]).round() * scales[name] for name, w in matrices.items()}

    return of_sampled_weights(choose)


def in_bf16(model: Any, history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: w.bfloat16().float() for name, w in history[-1].items()}


def frozen_layers(model: Any, history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: w for name, w in history[0].items() if ".layers.1." in name or ".layers.2." in name}


def of_attribute(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Patch:
    """Replace an attribute by ``wrap`` of it."""
    return lambda m: m.setattr(owner, name, wrap(getattr(owner, name)))


def of_advantages(change: Callable[[list[Tensor]], list[Tensor]]) -> Patch:
    """Change the advantages of the groups of a batch."""

    def wrap(compute: Any) -> Any:
        return lambda self, groups: change(compute(self, groups))

    return of_attribute(advantages.AdvantageEstimator, "from_groups", wrap)


def batch_baseline(compute: Any) -> Any:
    def changed(self: Any, groups: list[Tensor]) -> list[Tensor]:
        mean = torch.cat(groups).mean()
        return [group - mean for group in groups]

    return changed


def of_mask(change: Callable[[list[bool], int], None]) -> Patch:
    """Change the mask of a row in place: ``change(mask, length of the prompt)``."""

    def wrap(sample_of: Any) -> Any:
        def changed(rollout: Any, group: int) -> Any:
            sample = sample_of(rollout, group)
            change(sample.mask, sample.prefix)
            if any(sample.mask[: sample.prefix]):
                sample.prefix = sample.mask.index(True)  # a shared prompt is not trained on
            return sample

        return changed

    return of_attribute(rollouts, "_sample_of", wrap)


def untrain_end(mask: list[bool], prefix: int) -> None:
    mask[-1] = False


def train_prompt(mask: list[bool], prefix: int) -> None:
    mask[prefix - 8 : prefix] = [True] * 8


def shift_mask(mask: list[bool], prefix: int) -> None:
    mask[:] = [False, *mask[prefix:], *[False] * (len(mask) - 1 - len(mask[prefix:]))]


def of_pieces(divide: bool) -> Patch:
    """Weigh each micro-batch by its own number of tokens; ``divide`` by their number."""

    def wrap(over: Any) -> Any:
        def changed(self: MicroBatching, batch: Any, forward: Any) -> Iterator[Any]:
            pieces = list(over(self, batch, forward))
            for micro in pieces:
                own = micro.part.weights
                if own is None:  # rows that are only scored
                    continue
                micro.part.weights = own / own.sum() / (len(pieces) if divide else 1)
            yield from pieces

        return changed

    return of_attribute(MicroBatching, "over", wrap)


def count_padding(weigh: Any) -> Any:
    return lambda aggregate, batch, level: batch.mask.double() / batch.mask.numel()


def of_rewards(change: Callable[[Any], float]) -> Patch:
    """Change the reward of an answer behind its grader."""

    def wrap(rollout_of: Any) -> Any:
        def changed(*arguments: Any) -> Any:
            answer = rollout_of(*arguments)
            answer.reward = change(answer)
            return answer

        return changed

    return of_attribute(graded, "_rollout_of", wrap)


def of_update(change: Callable[..., tuple[Any, ...]]) -> Patch:
    """Change what an optimizer step is given."""

    def wrap(apply: Any) -> Any:
        return lambda *arguments: apply(*change(*arguments))

    return of_attribute(loop, "apply_update", wrap)


def scaled_rate(factor: float) -> Patch:
    return of_update(lambda optimizer, own, lr, *rest: (optimizer, own, lr * factor, *rest))


def lost_state(optimizer: Any, own: Any, lr: float, most: Any, loss: float, number: int, *rest: Any) -> tuple[Any, ...]:
    if number % 2 == 0:
        optimizer.state.clear()
    return optimizer, own, lr, most, loss, number, *rest


def kept_gradients(optimizer: Any, *rest: Any) -> tuple[Any, ...]:
    optimizer.zero_grad = types.MethodType(lambda self, **how: None, optimizer)
    return optimizer, *rest


def old_of_older_weights(m: pytest.MonkeyPatch) -> None:
    fill, history = BatchFields._fill, list[dict[str, Tensor]]()

    def changed(self: BatchFields, entry: Any, *rest: Any) -> None:
        if entry.name != "old_logprobs":
            fill(self, entry, *rest)
            return
        model = self.forward.model
        history.append({name: p.detach().clone() for name, p in model.named_parameters()})
        with weights_of(model, history[max(0, len(history) - 3)]):
            fill(self, entry, *rest)

    m.setattr(BatchFields, "_fill", changed)


def own_weights(open_reference: Any) -> Any:
    @contextmanager
    def opened(self: Reference) -> Iterator[Any]:
        yield self._live

    return opened


def repeated_turns(turn: Any) -> Any:
    return lambda self, batch, attempt=0: turn(self, batch % 2, attempt)


def hot(engine: Any, prompts: Any, sampling: Any) -> tuple[Any, Any]:
    return prompts, replace(sampling, temperature=0.7)


def shorter(engine: Any, prompts: Any, sampling: Any) -> tuple[Any, Any]:
    return [prompt[:-1] for prompt in prompts], sampling


def behind(model: Any, history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return history[max(0, len(history) - 3)]


COLD_RECIPE = {"rollout": {"temperature": 0.7}}
UNSCALED = of_attribute(built_models, "scoring_temperature", lambda compute: lambda recipe, needs: 1.0)
NEGATIVE_KL = of_attribute(
    surrogate, "KL_ESTIMATORS", lambda known: {name: (lambda r, f=f: -f(r)) for name, f in known.items()}
)

STUDY = {
    1: Fault("the sampler's prompt lacks a token", of_generate(shorter), ("sampler",)),
    2: Fault("the same with the trainer's log-probabilities", of_generate(shorter), ("sampler",), 2, FROM_TRAINER),
    3: Fault("sampler at temperature 0.7, trainer at 1", of_generate(hot), ("sampler",)),
    4: Fault("recipe says 0.7, trainer scores at 1", UNSCALED, ("sampler",), 2, COLD_RECIPE),
    5: Fault(
        "the same with the trainer's log-probabilities",
        UNSCALED,
        ("sampler",),
        2,
        {"rollout": {"temperature": 0.7, "old_logprobs": "trainer"}},
    ),
    6: Fault("sampler four updates behind", of_sampled_weights(behind), ("sampler",), 4),
    7: Fault(
        "the same with the trainer's log-probabilities", of_sampled_weights(behind), ("sampler",), 4, FROM_TRAINER
    ),
    8: Fault("two layers of the sampler never updated", of_sampled_weights(frozen_layers), ("sampler",), 4),
    9: Fault("old log-probabilities of weights four updates old", old_of_older_weights, ("ratio",), 4, FROM_TRAINER),
    10: Fault("sampler in bf16", of_sampled_weights(in_bf16), ("sampler",)),
    11: Fault("sampler in int8", rounded(127), ("sampler",)),
    12: Fault("sampler in int4", rounded(7), ("sampler",)),
    13: Fault(
        "top-p 0.7 in the sampler alone",
        of_generate(lambda engine, prompts, sampling: (prompts, replace(sampling, top_p=0.7))),
        ("draws",),
        14,  # it shows in many draws only; a recipe that says it is refused
    ),
    14: Fault("advantages of the next group", of_advantages(lambda a: [*a[1:], a[0]]), ("advantage",)),
    15: Fault("advantages with the wrong sign", of_advantages(lambda a: [-x for x in a]), ("advantage",)),
    16: Fault(
        "baseline of the batch in place of the group's",
        of_attribute(advantages.AdvantageEstimator, "from_groups", batch_baseline),
        ("advantage",),
    ),
    17: Fault("end token not trained", of_mask(untrain_end), ("tokens",)),
    18: Fault("eight prompt tokens in the loss", of_mask(train_prompt), ("tokens",)),
    19: Fault("mean of the micro-batches' means", of_pieces(True), ("weights", "loss"), 2, SMALL_MICRO),
    20: Fault("sum of the micro-batches' means", of_pieces(False), ("weights", "loss"), 2, SMALL_MICRO),
    21: Fault("padding in the mean", of_attribute(step, "_weigh", count_padding), ("weights", "loss")),
    22: Fault("KL with the wrong sign", NEGATIVE_KL, ("loss", "gradient"), 4),
    23: Fault("reference = policy", of_attribute(Reference, "open", own_weights), ("reference",), 5),
    24: Fault("a reward is NaN behind the grader", of_rewards(lambda a: float("nan")), (), 1, refused="reward"),
    25: Fault(
        "30 % of rewards are 0",
        of_rewards(lambda a: 0.0 if (7 * a.rollout_index + a.prompt_index) % 10 < 3 else a.reward),
        ("reward",),
    ),
    26: Fault("the reward pays length", of_rewards(lambda a: a.reward + 0.01 * len(a.completion.ids)), ("reward",)),
    27: Fault("two batches of prompts repeated", of_attribute(RowOrder, "round_of", repeated_turns), ("prompts",), 5),
    28: Fault(
        "answers cut at 24 tokens",
        of_generate(lambda engine, prompts, sampling: (prompts, replace(sampling, max_tokens=24))),
        ("finish",),
        6,
    ),
    29: Fault("learning rate × 10", scaled_rate(10.0), ("update",)),
    30: Fault("learning rate / 1000", scaled_rate(1e-3), ("update",)),
    31: Fault("Adam's state lost at every second step", of_update(lost_state), ("update",), 4),
    32: Fault("gradients not zeroed", of_update(kept_gradients), ("leftover",), 4),
}


def of_registered(name: str, change: Callable[[Any], Any]) -> Patch:
    """Change what a batch field's function returns."""

    def patch(m: pytest.MonkeyPatch) -> None:
        fill = BatchFields._fill

        def changed(self: BatchFields, entry: Any, batch: Any, *rest: Any) -> None:
            fill(self, entry, batch, *rest)
            if entry.name == name:
                batch.fields[name] = change(batch.fields[name])

        m.setattr(BatchFields, "_fill", changed)

    return patch


def of_values(change: Callable[[Loss, Any, Any], Loss]) -> Patch:
    """Change what the objective returns: ``change(loss, outputs, batch)``."""

    def wrap(apply: Any) -> Any:
        def changed(objective: Any, outputs: Any, batch: Any, level: str) -> Loss:
            return change(apply(objective, outputs, batch, level), outputs, batch)

        return changed

    return of_attribute(step, "_apply", wrap)


__all__ = ["FROM_TRAINER", "SMALL_MICRO", "STUDY", "Fault", "batch_fields", "of_registered", "of_values"]
