"""A trained reward model: scores of answers, probabilities of steps, and the reward that it gives a policy.

Rows of tokens are those of training (``data/render/rows.py``), and a score is read at the same place: the end token of
an answer, the last token of each step.
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
# A step ends with the white space behind a sentence; what follows belongs to the next.
_SENTENCE = re.compile(r"(?<=[.!?])(?=\s)")
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class RewardModel:
    """A reward model with the template that it was trained with.

    ``kind``: its scores are log-odds between answers to one prompt (``preference``), log-odds that the answer is right
    (``outcome``), or of each step the probability that it is good (``process``; that of an answer is then the lowest of
    its steps, Lightman et al. 2023, appendix F). ``max_tokens``: a row that is longer (prompt, answer and end token)
    is not scored.
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
        """The reason why a score is None."""
        long = f"longer than the model's {self.max_tokens} tokens"
        if self.kind == "process":
            missing = "steps"
        else:
            missing = "text"
        return f"{long}, or without {missing}"

    def score(self, examples: Sequence[Example], texts: Sequence[str], finishes: Sequence[str]) -> list[float | None]:
        """Score each text as the answer to its example's messages; higher is better.

        ``texts`` are what a policy wrote, with or without what the prompt has opened. A process model is asked about
        the reasoning alone, cut into steps. None: longer than ``max_tokens``, without any step, or cut off before any
        token. One that ``finishes`` with ``length`` gets no end token and is scored where it stops.
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
        """Like ``score``, of given answers, in the rows that training makes of them, or by a response's own steps."""
        if self.kind == "process":
            steps = [response.steps or split_steps(response.text) for response in responses]
            return _lowest(self.score_steps(examples, steps))
        labelled = [replace(response, score=0.0) for response in responses]
        return _last(self.read(self._rows(examples, labelled, "judged")))

    def score_steps(self, examples: Sequence[Example], steps: Sequence[Sequence[str]]) -> list[list[float] | None]:
        """Return for each solution, given as its steps, the probability that each step is good.

        ``σ(s)``; of three classes one less the probability of the negative one (Lightman et al. 2023). None:
        longer than ``max_tokens``, no steps, or an empty one.
        """
        assert self.kind == "process", "a model of steps alone has probabilities of steps"
        responses = [Response("".join(s), 0.0, tuple(s), (0,) * len(s)) for s in steps]
        probabilities: list[list[float] | None] = []
        for scores in self.read(self._rows(examples, responses, "steps")):
            if scores is None:
                probabilities.append(None)
            else:
                probabilities.append(_good(scores))
        return probabilities

    def probability(self, score: float) -> float | None:
        """The probability of being right that a score states, where it states one."""
        if self.kind == "preference":
            return None
        if self.kind == "process":
            return score
        return sigmoid(score)

    @torch.no_grad()
    def read(self, rows: Sequence[TokenRow | str]) -> list[Tensor | None]:
        """Read the head's scores at the step ends of each row, or at its last token: fp32 ``[N]``, or ``[N, C]`` for C
        classes; None for a row that is too long, or is none. Rows with the same prompt share its computation.

        Raises:
            RunFailure: a score that is no finite number.
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
                raise RunFailure(f"{self.label}: the reward model gave a score that is no finite number")
            for index, part in zip(piece, scores.split(counts), strict=True):
                row_scores[index] = part
        return row_scores

    def _rows(self, examples: Sequence[Example], responses: Sequence[Response], shape: Shape) -> list[TokenRow | str]:
        """The row that training makes of each response, or the reason why it makes none."""
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
    """The score of each solution: the lowest probability of its steps."""
    scores: list[float | None] = []
    for probabilities in steps:
        if probabilities is None:
            scores.append(None)
        else:
            scores.append(min(probabilities))
    return scores


def _last(row_scores: Sequence[Tensor | None]) -> list[float | None]:
    """The score of each answer: the one at its end."""
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
    """Return the reward model that a resolved recipe has trained, from its run's ``checkpoints``.

    ``label``: its name in messages. ``step``: by default the best, else the newest. ``bits``: of a quantized copy.

    Raises:
        UsageError: the recipe trains no reward model, or there is no such checkpoint.
        CheckpointError: the checkpoint does not verify, or holds no head, or another one.
    """
    entry = find("objective", recipe.objective.name, "objective")
    kind = entry.traits.get("scores")
    if entry.traits.get("head") != "score":
        scoring = [name for name, one in entries("objective").items() if one.traits.get("scores") in KINDS]
        raise UsageError(
            f"{label}: this run trained a policy ({recipe.objective.name}), which scores nothing; name the run of a "
            f"reward model, such as one of {', '.join(scoring)}"
        )
    if kind not in KINDS:
        raise UsageError(
            f"{label}: objective {recipe.objective.name!r} does not say what its scores mean; register it with "
            f"scores= one of {', '.join(KINDS)}"
        )
    folder, chosen = _choose_checkpoint(Path(checkpoints), step, label)
    changes: dict[str, object] = {"name": str(folder), "init": None, "adapter": None}
    if bits is not None:
        quantized = folder / QUANTIZED_FOLDERS[bits]
        if not quantized.is_dir():
            raise UsageError(
                f"{label}: no copy in {bits} bits next to the weights of step {chosen}; make it with: "
                f"posttrain quantize {label} --bits {bits}"
            )
        changes["name"] = str(quantized)
        changes["load_bits"] = None
    section = recipe.model.model_copy(update=changes)
    loaded = load_model(section, seed=recipe.train.seed)
    policy = Forward(loaded.model.requires_grad_(False))
    forward, heads = forward_with_head(entry, recipe.objective.options, recipe.head, policy, recipe.train.seed)
    assert isinstance(forward, Forward), "a reward head has one model"
    restore_heads(heads, load_file(folder / HEADS))
    template = build_template(recipe.prompt.template)
    context = context_length(loaded.model.config)
    return RewardModel(label, kind, forward, loaded.tokenizer, template, context, step=chosen)


def open_reward_model(source: ModelSource, *, dtype: str | None = None, device: str | None = None) -> RewardModel:
    """Return the reward model of a run, or of a checkpoint in it, with its own template.

    Raises:
        UsageError: no run, or one that trained a policy.
        CheckpointError: no checkpoint of it can be used.
    """
    if source.run is None or source.recipe is None:
        raise UsageError(
            f"{source.name}: a reward model is named by its run, or by a checkpoint in its run, where its head and its "
            "template are; `posttrain runs` lists the runs"
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
    step = None  # of a whole run, its best
    if path != source.run:
        match = _STEP.fullmatch(checkpoint_of(path).resolve().name)
        if match:
            step = int(match[1])
    return load_reward_model(recipe, source.run / "checkpoints", label=source.label, step=step, bits=bits)


def reasoning_of(template: Template, text: str) -> str:
    """The part of a policy's text that is reasoned in steps: up to where the reasoning's tag is closed, if it is."""
    body = text.removeprefix(template.opening)
    if not template.tags:
        return body
    reasoning = body.partition(f"</{template.tags[0]}>")[0]
    return reasoning.removeprefix(f"<{template.tags[0]}>")


def split_steps(text: str) -> list[str]:
    """Return a solution's steps: its paragraphs, else its lines, else its sentences; together they are the text.

    The first of these that cuts the text is used. White space belongs to the step after it.
    """
    for pattern in (r"(?<=\S)(?=\s*\n\s*\n)", r"(?<=\S)(?=[ \t]*\n)", _SENTENCE):
        parts = [part for part in re.split(pattern, text.rstrip()) if part.strip()]
        if len(parts) > 1:
            break
    return parts


def _good(scores: Tensor) -> list[float]:
    """P(good) of each step: ``[N]`` log-odds, or ``[N, C]`` logits with the lowest class as the error."""
    wide = scores.double()
    if wide.ndim == 1:
        good = wide.sigmoid()
    else:
        good = wide.softmax(dim=-1)[:, 1:].sum(dim=-1)
    return [float(p) for p in good.clamp(0.0, 1.0)]


def _pieces(rows: Sequence[TokenRow | str], max_tokens: int, budget: int) -> list[list[int]]:
    """Indices of the rows that can be scored, shortest first, rows of one prompt side by side.

    A piece's rows, padded to the longest, have at most ``budget`` tokens (one row alone may have more).
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
        raise UsageError(f"{label}: the run has no checkpoint yet")
    best = best_step(root)
    if step is not None:
        chosen = step
    elif best is not None:
        chosen = best
    else:
        chosen = steps[-1]
    if chosen not in steps:
        raise UsageError(f"{label}: there is no checkpoint of step {chosen}; there are: {', '.join(map(str, steps))}")
    folder = step_folder(root, chosen)
    try:
        files = verify(folder, chosen)
    except Unverified as reason:
        others = ", ".join(str(s) for s in steps if s != chosen) or "none"
        raise CheckpointError(
            f"{folder}: this checkpoint does not verify against its manifest: {reason}. Other steps there: {others}"
        ) from None
    if HEADS not in files:
        raise CheckpointError(
            f"{folder}: there is no {HEADS}, where the head of a reward model is kept; name a checkpoint that "
            "training has written, not an export of the model alone"
        )
    return folder, chosen


NUM_CALIBRATED = 256


def prepare_reward_model(*, run: str, normalize: bool = False, **_: object) -> None:
    """Load the model (and its scale) before anything is sampled, so that what is wrong shows at once."""
    open_run(run)
    if normalize:
        held_out_scale(run)


@register("reward", batched=True, model_option="run", asks_a_model=True, prepare=prepare_reward_model)
def reward_model(
    example: Sequence[Example], text: Sequence[str], finish: Sequence[str], *, run: str, normalize: bool = False
) -> list[MeasuredReward]:
    """The score of a trained reward model, with the weights, the template and the tokenizer of its run.

    ``r = s(x, y)``: of a preference model its score, of an outcome model the log-odds of being right, of a process
    model the lowest probability of a step. An answer that was cut off is scored as one, without an end token. An
    answer that cannot be scored (longer than the model's context) gets the lowest score of the batch, and is
    counted as ``unscored``.

    Args:
        run: the folder of its run; the best checkpoint is used.
        normalize: take the mean off and divide by the standard deviation of the model's scores of the given answers
            in its own held-out data (at most 256 examples), computed once: scores of preference models have no
            zero of their own.

    Source: Ziegler et al. 2019, section 2; Ouyang et al. 2022, section 3.5, where the mean is taken off likewise.

    Raises:
        UsageError: no such run, or it trained no reward model.
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
    """The reward model of a run's folder, loaded once in a process.

    Raises:
        UsageError: no such run, or it trained no reward model.
        CheckpointError: its checkpoint does not verify.
    """
    folder = Path(run)
    if not (folder / "recipe.yaml").is_file():
        raise UsageError(
            f"reward_model: {run} is no run's folder (it has no recipe.yaml). Train a reward model first, such as "
            "posttrain train tiny/rm, and give its folder: run: runs/tiny-rm"
        )
    return load_reward_model(_recipe_of(folder), folder / "checkpoints", label=folder.name)


@cache
def held_out_scale(run: str) -> tuple[float, float]:
    """Mean and standard deviation of a run's reward model over the given answers of its held-out data.

    Of at most 256 examples, which are those that every evaluation of that size uses.

    Raises:
        RecipeError: fewer than two answers there, or all have the same score.
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
            f"reward_model: of the held-out answers of {run} {len(scores)} could be scored, and normalize needs two "
            "whose scores differ; leave normalize out"
        )
    return statistics.fmean(scores), statistics.stdev(scores)


def _recipe_of(run: Path) -> Recipe:
    place = str(run / STORED_RECIPE)
    _, text = recipe_text(place)
    content = parse_yaml(text, place)[0]
    return stored_recipe(content, place).resolve(to_read=True)
