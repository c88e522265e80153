"""Trained reward models: answer scores, step probabilities, and the ``reward_model`` reward.

Token rows match training (``data/render/rows.py``), with scores read at the same positions: the answer's
end-of-sequence token, or each step's final token.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor

from posttrain.activity import each_piece
from posttrain.data.base import build_task
from posttrain.data.render import Template, encode_prompt, end_ids
from posttrain.data.render.assistant import encode_answer
from posttrain.data.render.rows import Shape, TokenRow, rows_of
from posttrain.data.render.template import build_template
from posttrain.data.rendered import take_rendered
from posttrain.errors import CheckpointError, RecipeError, RunFailure, UsageError
from posttrain.evaluation.generation import held_out
from posttrain.evaluation.statistics import sigmoid
from posttrain.graders.grading import MeasuredReward
from posttrain.models.config import context_length
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import split_padded
from posttrain.models.load import QUANTIZED_FOLDERS, load_model
from posttrain.models.trained_heads import forward_with_head, restore_heads
from posttrain.other_names import short_dtype
from posttrain.recipes.document import parse_yaml, recipe_text
from posttrain.recipes.recipe import Recipe, stored_recipe
from posttrain.recipes.sections import Component, map_tasks
from posttrain.registry import entries, find, register
from posttrain.sampling.models import ModelSource, checkpoint_of
from posttrain.store.checkpoint_files import Unverified, best_step, checkpoint_steps, step_folder, verify
from posttrain.types import Example, Response, Sample, collate
from posttrain.untrusted import STORED_RECIPE

Kind = Literal["preference", "outcome", "process"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEADS = "heads.safetensors"
TOKENS_PER_MICRO = 1 << 14
# Steps split after a sentence; whitespace belongs to the following step.
_SENTENCE = re.compile(r"(?<=[.!?])(?=\s)")
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class RewardModel:
    """A reward model with its training template.

    ``kind``: meaning of scores. ``preference``: log-odds between answers to one prompt. ``outcome``: log-odds of a
    correct answer. ``process``: P(good) per step, with the lowest step as answer score (Lightman et al. 2023,
    appendix F). ``max_tokens``: longer rows (prompt, answer, end-of-sequence token) are not scored.
    """

    label: str
    kind: Kind
    forward: Forward
    tokenizer: Any
    template: Template
    max_tokens: int
    step: int | None = None
    tokens_per_micro: int = TOKENS_PER_MICRO

    @property
    def unscored(self) -> str:
        """Reason reported for missing scores."""
        long = f"longer than the model's {self.max_tokens} tokens"
        if self.kind == "process":
            missing = "steps"
        else:
            missing = "text"
        return f"{long}, or without {missing}"

    def score(self, examples: Sequence[Example], texts: Sequence[str], finishes: Sequence[str]) -> list[float | None]:
        """Score texts as answers to their example's messages; higher is better.

        ``texts``: model output, with or without the opening that the template puts into the prompt. A process model
        scores only the reasoning, split into steps. None: exceeds ``max_tokens``, contains no steps, or was truncated
        before any token. If ``finishes`` is ``length``, no end-of-sequence token is added, and scoring uses the final
        token.
        """
        if self.kind == "process":
            steps = [split_steps(reasoning_of(self.template, text)) for text in texts]
            return _lowest(self.score_steps(examples, steps))
        rows: list[TokenRow | str] = []
        for example, text, finish in zip(examples, texts, finishes, strict=True):
            prompt = encode_prompt(self.tokenizer, self.template, example.messages, example.variables)
            body = text.removeprefix(self.template.opening)
            answer = encode_answer(self.tokenizer, self.template, body, prompt, example.variables)
            if finish != "length":
                answer = [*answer, *end_ids(self.tokenizer, self.template)]
            if answer:
                rows.append(TokenRow([*prompt, *answer], len(prompt)))
            else:
                rows.append("cut off before any token")
        return _last(self.read(rows))

    def score_responses(self, examples: Sequence[Example], responses: Sequence[Response]) -> list[float | None]:
        """Score given answers like ``score``, using training rows or the response's ``steps``."""
        if self.kind == "process":
            steps = [response.steps or split_steps(response.text) for response in responses]
            return _lowest(self.score_steps(examples, steps))
        labelled = [replace(response, score=0.0) for response in responses]
        return _last(self.read(self._rows(examples, labelled, "judged")))

    def score_steps(self, examples: Sequence[Example], steps: Sequence[Sequence[str]]) -> list[list[float] | None]:
        """Compute P(good) for every step of each solution, given as lists of steps.

        ``σ(s)``; with three classes, 1 − P(negative) (Lightman et al. 2023). None: exceeds ``max_tokens``, no steps,
        or an empty step.
        """
        assert self.kind == "process", "only process models have step probabilities"
        responses = [Response("".join(s), 0.0, tuple(s), (0,) * len(s)) for s in steps]
        probabilities: list[list[float] | None] = []
        for scores in self.read(self._rows(examples, responses, "steps")):
            if scores is None:
                probabilities.append(None)
            else:
                probabilities.append(_good(scores))
        return probabilities

    def probability(self, score: float) -> float | None:
        """Convert a score to P(correct); None for preference models."""
        if self.kind == "preference":
            return None
        if self.kind == "process":
            return score
        return sigmoid(score)

    @torch.no_grad()
    def read(self, rows: Sequence[TokenRow | str]) -> list[Tensor | None]:
        """Read head scores at each row's step ends, or its final token: fp32 ``[N]``, or ``[N, C]`` for C classes;
        None for rows that are too long or invalid. Rows sharing a prompt share computation.

        Raises:
            RunFailure: a score is not finite.
        """
        row_scores: list[Tensor | None] = [None] * len(rows)
        for piece in each_piece("scoring", _pieces(rows, self.max_tokens, self.tokens_per_micro), "answers"):
            prompts: dict[tuple[int, ...], int] = {}
            samples = []
            counts = []
            for index in piece:
                row = cast(TokenRow, rows[index])
                ends = row.step_labels or {len(row.ids) - 1: 0}
                group = prompts.setdefault(tuple(row.ids[: row.prompt_length]), len(prompts))
                mask = [t in ends for t in range(len(row.ids))]
                samples.append(Sample(row.ids, mask, group=group, prefix=row.prompt_length))
                counts.append(len(ends))
            batch = collate(samples)
            is_scored = batch.mask.to(self.forward.device)
            scores = self.forward.read_scores(batch)[is_scored].float().cpu()
            if not bool(scores.isfinite().all()):
                raise RunFailure(f"{self.label}: the reward model returned a score that is not finite")
            for index, part in zip(piece, scores.split(counts), strict=True):
                row_scores[index] = part
        return row_scores

    def _rows(self, examples: Sequence[Example], responses: Sequence[Response], shape: Shape) -> list[TokenRow | str]:
        """Build each response's training row, or the reason for dropping it."""
        rows: list[TokenRow | str] = []
        for example, response in zip(examples, responses, strict=True):
            alone = replace(example, responses=(response,))
            unit = next(rows_of(self.tokenizer, self.template, alone, shape))
            if isinstance(unit, str):
                rows.append(unit)
            else:
                rows.append(unit[0])
        return rows


def _lowest(steps: Sequence[Sequence[float] | None]) -> list[float | None]:
    """Score each solution by its lowest step probability."""
    scores: list[float | None] = []
    for probabilities in steps:
        if probabilities is None:
            scores.append(None)
        else:
            scores.append(min(probabilities))
    return scores


def _last(row_scores: Sequence[Tensor | None]) -> list[float | None]:
    """Read each answer's final score."""
    scores: list[float | None] = []
    for of_row in row_scores:
        if of_row is None:
            scores.append(None)
        else:
            scores.append(float(of_row[-1]))
    return scores


def load_reward_model(
    recipe: Recipe, checkpoints: str | Path, *, label: str, step: int | None = None, bits: int | None = None
) -> RewardModel:
    """Load a trained reward model from a run's ``checkpoints``.

    ``label``: shown in messages. ``step``: defaults to the best, else the newest. ``bits``: selects a quantized copy.

    Raises:
        UsageError: the recipe trains no reward model, or the step is missing.
        CheckpointError: verification failed, or the head is missing or incompatible.
    """
    entry = find("objective", recipe.objective.name, "objective")
    kind = entry.traits.get("scores")
    if entry.traits.get("head") != "score":
        scoring = [name for name, one in entries("objective").items() if one.traits.get("scores") in KINDS]
        raise UsageError(
            f"{label}: this run trained a policy ({recipe.objective.name}), not a reward model; give a run "
            f"trained with {', '.join(scoring)}"
        )
    if kind not in KINDS:
        raise UsageError(
            f"{label}: objective {recipe.objective.name!r} does not declare its kind of scores; register it with "
            f"scores= set to {', '.join(KINDS)}"
        )
    folder, chosen = _choose_checkpoint(Path(checkpoints), step, label)
    changes: dict[str, object] = {"name": str(folder), "init": None, "adapter": None}
    if bits is not None:
        quantized = folder / QUANTIZED_FOLDERS[bits]
        if not quantized.is_dir():
            raise UsageError(
                f"{label}: step {chosen} has no {bits}-bit copy; create it with: "
                f"posttrain quantize {label} --bits {bits}"
            )
        changes["name"] = str(quantized)
        changes["load_bits"] = None
    section = recipe.model.model_copy(update=changes)
    loaded = load_model(section, seed=recipe.train.seed)
    policy = Forward(loaded.model.requires_grad_(False))
    forward, heads = forward_with_head(entry, recipe.objective.options, recipe.head, policy, recipe.train.seed)
    assert isinstance(forward, Forward), "a reward head has a single trunk"
    restore_heads(heads, load_file(folder / HEADS))
    template = build_template(recipe.prompt.template)
    context = context_length(loaded.model.config)
    return RewardModel(label, kind, forward, loaded.tokenizer, template, context, step=chosen)


def open_reward_model(source: ModelSource, *, dtype: str | None = None, device: str | None = None) -> RewardModel:
    """Load a reward model, with its template, from a run or one of its checkpoints.

    Raises:
        UsageError: not a run, or a policy run.
        CheckpointError: no usable checkpoint.
    """
    if source.run is None or source.recipe is None:
        raise UsageError(
            f"{source.name}: give a reward model as a run or a checkpoint inside a run, which contains head and "
            "template; `posttrain runs` lists them"
        )
    changes: dict[str, object] = {}
    if dtype is not None:
        changes["dtype"] = short_dtype(dtype)
    if device is not None:
        changes["device"] = device
    model = source.recipe.model.model_copy(update=changes)
    recipe = source.recipe.model_copy(update={"model": model})
    path = Path(source.path)
    bits_of = {folder: bits for bits, folder in QUANTIZED_FOLDERS.items()}
    bits = bits_of.get(path.name)
    step = None  # whole run: use the best
    if path != source.run:
        match = _STEP.fullmatch(checkpoint_of(path).resolve().name)
        if match:
            step = int(match[1])
    return load_reward_model(recipe, source.run / "checkpoints", label=source.label, step=step, bits=bits)


def reasoning_of(template: Template, text: str) -> str:
    """Extract the reasoning from policy output: everything before the closing reasoning tag, if present."""
    body = text.removeprefix(template.opening)
    if not template.tags:
        return body
    reasoning = body.partition(f"</{template.tags[0]}>")[0]
    return reasoning.removeprefix(f"<{template.tags[0]}>")


def split_steps(text: str) -> list[str]:
    """Split a solution into paragraphs, else lines, else sentences, losslessly except for trailing whitespace.

    Uses the first separator giving several parts. Whitespace belongs to the following step.
    """
    for pattern in (r"(?<=\S)(?=\s*\n\s*\n)", r"(?<=\S)(?=[ \t]*\n)", _SENTENCE):
        parts = [part for part in re.split(pattern, text.rstrip()) if part.strip()]
        if len(parts) > 1:
            break
    return parts


def _good(scores: Tensor) -> list[float]:
    """Convert step scores to P(good): ``[N]`` log-odds, or ``[N, C]`` logits with class 0 as the error."""
    wide = scores.double()
    if wide.ndim == 1:
        good = wide.sigmoid()
    else:
        good = wide.softmax(dim=-1)[:, 1:].sum(dim=-1)
    return [float(p) for p in good.clamp(0.0, 1.0)]


def _pieces(rows: Sequence[TokenRow | str], max_tokens: int, budget: int) -> list[list[int]]:
    """Batch scorable rows by index, shortest first, keeping rows with the same prompt adjacent.

    A batch, padded to its longest row, holds at most ``budget`` tokens, unless a single row exceeds it.
    """
    lengths = {}
    families: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if isinstance(row, TokenRow) and len(row.ids) <= max_tokens:
            lengths[index] = len(row.ids)
            prompt = tuple(row.ids[: row.prompt_length])
            families.setdefault(prompt, []).append(index)
    ordered = sorted(families.values(), key=lambda family: max(lengths[i] for i in family))
    return split_padded((index for family in ordered for index in family), lengths, budget)


def _choose_checkpoint(root: Path, step: int | None, label: str) -> tuple[Path, int]:
    steps = checkpoint_steps(root)
    if not steps:
        raise UsageError(f"{label}: no checkpoints yet")
    best = best_step(root)
    if step is not None:
        chosen = step
    elif best is not None:
        chosen = best
    else:
        chosen = steps[-1]
    if chosen not in steps:
        raise UsageError(f"{label}: step {chosen} was not saved; available steps: {', '.join(map(str, steps))}")
    folder = step_folder(root, chosen)
    try:
        files = verify(folder, chosen)
    except Unverified as reason:
        others = ", ".join(str(s) for s in steps if s != chosen) or "none"
        raise CheckpointError(
            f"{folder}: checkpoint verification against the manifest failed: {reason}. Other steps: {others}"
        ) from None
    if HEADS not in files:
        raise CheckpointError(
            f"{folder}: {HEADS} with the reward head is missing; give a checkpoint written by training, not an "
            "exported model"
        )
    return folder, chosen


NUM_CALIBRATED = 256


def prepare_reward_model(*, run: str, normalize: bool = False, **_: object) -> None:
    """Load the model (and scale) before sampling, to fail early."""
    open_run(run)
    if normalize:
        held_out_scale(run)


@register("reward", batched=True, model_option="run", asks_a_model=True, prepare=prepare_reward_model)
def reward_model(
    example: Sequence[Example], text: Sequence[str], finish: Sequence[str], *, run: str, normalize: bool = False
) -> list[MeasuredReward]:
    """Score answers with a trained reward model, using its run's weights, template and tokenizer.

    ``r = s(x, y)``: a preference model's score, an outcome model's log-odds of being correct, or a process model's
    lowest step probability. Truncated answers are scored without an end-of-sequence token. If scoring is impossible
    (exceeds the model's context), an answer gets the lowest score in its batch, and counts as ``unscored``.

    Args:
        run: folder of the reward-model run; its best checkpoint is used.
        normalize: subtract the mean and divide by the standard deviation of scores on given answers in the model's
            held-out data (at most 256 examples), computed once: preference scores have an arbitrary zero point.

    Source: Ziegler et al. 2019, section 2; Ouyang et al. 2022, section 3.5, which also subtracts the mean.

    Raises:
        UsageError: no such run, or a run without a reward model.
    """
    mean = 0.0
    std = 1.0
    if normalize:
        mean, std = held_out_scale(run)
    scores = open_run(run).score(example, text, finish)
    lowest = min((score for score in scores if score is not None), default=0.0)
    rewards = []
    for score in scores:
        if score is None:
            rewards.append(MeasuredReward((lowest - mean) / std, {"unscored": 1.0}))
        else:
            rewards.append(MeasuredReward((score - mean) / std, {"unscored": 0.0}))
    return rewards


@cache
def open_run(run: str) -> RewardModel:
    """Load a run's reward model, once per process.

    Raises:
        UsageError: no such run, or a run without a reward model.
        CheckpointError: checkpoint verification failed.
    """
    folder = Path(run)
    if not (folder / "recipe.yaml").is_file():
        raise UsageError(
            f"reward_model: {run} is not a run folder (recipe.yaml is missing). Train a reward model first, such as "
            "posttrain train tiny/rm, and give its folder: run: runs/tiny-rm"
        )
    return load_reward_model(_recipe_of(folder), folder / "checkpoints", label=folder.name)


@cache
def held_out_scale(run: str) -> tuple[float, float]:
    """Compute the mean and standard deviation of a reward model's scores on held-out given answers.

    Uses up to 256 examples, chosen like in evaluation.

    Raises:
        RecipeError: fewer than 2 scored answers, or all scores are equal.
    """
    model = open_run(run)
    recipe = _recipe_of(Path(run))

    def held_out_split(component: Component) -> Component:
        split = find("task", component.name, "task").traits.get("held_out", "validation")
        options = component.options | {"split": split}
        return Component(name=component.name, **options)

    components = recipe.eval.tasks or [map_tasks(recipe.task, held_out_split)]
    task = take_rendered(build_task(components[0], "task"), model.template, model.tokenizer)
    examples = []
    responses = []
    for example in held_out(task, NUM_CALIBRATED, distinct=False):
        for response in example.responses:
            examples.append(example)
            responses.append(response)
    scores = [score for score in model.score_responses(examples, responses) if score is not None]
    if len(scores) < 2 or statistics.pstdev(scores) == 0:
        raise RecipeError(
            f"reward_model: normalize needs at least 2 different held-out scores from {run}, got {len(scores)} scores; "
            "drop normalize"
        )
    return statistics.fmean(scores), statistics.stdev(scores)


def _recipe_of(run: Path) -> Recipe:
    place = str(run / STORED_RECIPE)
    _, text = recipe_text(place)
    content = parse_yaml(text, place)[0]
    return stored_recipe(content, place).resolve(to_read=True)
