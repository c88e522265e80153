"""The reward that a trained reward model gives: the step from preferences to policies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError, UsageError
from posttrain.evals.generation import held_out_indices
from posttrain.graders.grading import Measured
from posttrain.recipes.document import parse_yaml, recipe_text
from posttrain.recipes.recipe import Recipe, stored_recipe
from posttrain.recipes.sections import Word, map_tasks
from posttrain.registry import find, register
from posttrain.reward_models.scoring import RewardModel, load_reward_model
from posttrain.tasks.base import build_task
from posttrain.types import Example
from posttrain.untrusted import STORED_RECIPE

NUM_CALIBRATED = 256


@dataclass(frozen=True, slots=True)
class Scale:
    """``(score − mean) / std``."""

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, score: float) -> float:
        return (score - self.mean) / self.std


def prepare(*, run: str, normalize: bool = False, **_: Any) -> None:
    """Load the model (and its scale) before anything is sampled, so that what is wrong shows at once."""
    open_run(run)
    if normalize:
        held_out_scale(run)


@register("reward", batched=True, model_option="run", asks_a_model=True, prepare=prepare)
def reward_model(
    example: Sequence[Example],
    text: Sequence[str],
    finish: Sequence[str],
    *,
    run: str,
    normalize: bool = False,
) -> list[Measured]:
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
    scale = held_out_scale(run) if normalize else Scale()
    scores = open_run(run).score(example, text, finish)
    lowest = min((score for score in scores if score is not None), default=0.0)
    return [Measured(scale(lowest if score is None else score), {"unscored": float(score is None)}) for score in scores]


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
    recipe = _recipe_of(folder)
    return load_reward_model(recipe, folder / "checkpoints", label=folder.name)


@cache
def held_out_scale(run: str) -> Scale:
    """Mean and standard deviation of a run's reward model over the given answers of its held-out data.

    Of at most 256 examples, which are those that every evaluation of that size uses.

    Raises:
        RecipeError: fewer than two answers there, or all have the same score.
    """
    model = open_run(run)
    recipe = _recipe_of(Path(run))

    def held_out(word: Word) -> Word:
        split = find("task", word.name, "task").traits.get("held_out", "validation")
        return Word(name=word.name, **(word.options | {"split": split}))

    words = recipe.eval.tasks or [map_tasks(recipe.task, held_out)]
    task = build_task(words[0], "task")
    examples = [task.examples[i] for i in held_out_indices(len(task.examples), NUM_CALIBRATED)]
    pairs = [(example, response) for example in examples for response in example.responses]
    scores = [s for s in model.score_responses([e for e, _ in pairs], [r for _, r in pairs]) if s is not None]
    if len(scores) < 2 or statistics.pstdev(scores) == 0:
        raise RecipeError(
            f"reward_model: of the held-out answers of {run} {len(scores)} could be scored, and normalize needs two "
            "whose scores differ; leave normalize out"
        )
    return Scale(statistics.fmean(scores), statistics.stdev(scores))


def _recipe_of(run: Path) -> Recipe:
    place = str(run / STORED_RECIPE)
    return stored_recipe(parse_yaml(recipe_text(place)[1], place)[0], place).resolve(to_read=True)
