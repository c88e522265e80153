"""The teacher of a run: another model, or the trained one as it is, as it began, or averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.errors import UsageError
from posttrain.models.forward.forward import ActorCritic, Forward
from posttrain.models.load import load_model, load_tokenizer
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import ModelSection
from posttrain.training.checks import OWN_TEACHER
from posttrain.training.other_weights.averages import WeightAverage
from posttrain.types import Tokenizer

if TYPE_CHECKING:
    from posttrain.models.reference import Reference


@dataclass(frozen=True, slots=True)
class Teacher:
    """The forward pass of a teacher, inside the block of ``open``; ``average``: its weights, if they are averaged."""

    open: Callable[[], AbstractContextManager[Forward]]
    average: WeightAverage | None = None


def build_teacher(
    recipe: Recipe,
    tokenizer: Tokenizer,
    policy: Forward,
    learners: Sequence[Forward | ActorCritic],
    reference: Reference | None,
) -> Teacher:
    """Return the recipe's teacher; ``learners`` are all passes whose candidates are compared with its own.

    ``reference``: the model as it began, which teaches with ``teacher.weights: start``.

    Raises:
        UsageError: a teacher of another tokenizer.
    """
    section = recipe.teacher
    assert section is not None, "the recipe has a teacher"
    students = [one.policy if isinstance(one, ActorCritic) else one for one in learners]
    if section.name != OWN_TEACHER:
        other = _load_teacher(recipe, tokenizer, policy)
        num_ids = _shared_ids([other, *students], tokenizer)
        other.restrict(num_ids, targets=True)
        for student in students:
            student.restrict(num_ids)
        return Teacher(lambda: nullcontext(other))
    if section.weights == "start":
        assert reference is not None, "built for its teacher"
        with reference.open() as start:
            students.append(start)
    num_ids = _shared_ids(students, tokenizer)
    for student in students:
        student.restrict(num_ids)
    if section.weights == "start":
        return Teacher(reference.open)  # type: ignore[union-attr]
    if section.weights == "live":
        return Teacher(lambda: nullcontext(policy))
    trained = [(name, p) for name, p in policy.model.named_parameters() if p.requires_grad]
    average = WeightAverage(policy, trained, section.ema_decay)
    return Teacher(average.open, average)


def refuse_other_tokenizer(recipe: Recipe) -> None:
    """Compare the tokenizers of student and teacher, before a model is loaded.

    Raises:
        UsageError: they are not the same, or one cannot be loaded.
    """
    teacher = recipe.teacher
    if teacher is None or teacher.name == OWN_TEACHER or recipe.model.init is not None:
        return
    own = load_tokenizer(recipe.model.name, trust_remote_code=recipe.model.trust_remote_code)
    _compare_tokenizers(teacher.name, load_tokenizer(teacher.name, trust_remote_code=teacher.trust_remote_code), own)


def _compare_tokenizers(name: str, theirs: Tokenizer, own: Tokenizer) -> None:
    if theirs.get_vocab() != own.get_vocab():
        raise UsageError(
            f"teacher.name: {name!r} has another vocabulary than the student; probabilities of tokens "
            "can only be compared within one. Choose a teacher of the same family"
        )


def _shared_ids(passes: Sequence[Forward], tokenizer: Tokenizer) -> int:
    """Return the number of ids that the tokenizer and all models have.

    Embeddings are padded to other sizes within one family, and what is beyond the tokenizer means nothing.
    """
    return min(max(tokenizer.get_vocab().values()) + 1, *(one.num_rows for one in passes))


def _load_teacher(recipe: Recipe, tokenizer: Tokenizer, policy: Forward) -> Forward:
    assert recipe.teacher is not None
    section = ModelSection(
        name=recipe.teacher.name,
        dtype=recipe.teacher.dtype or recipe.model.dtype,
        device=recipe.model.device,
        trust_remote_code=recipe.teacher.trust_remote_code,
    )
    loaded = load_model(section, seed=0)
    _compare_tokenizers(recipe.teacher.name, loaded.tokenizer, tokenizer)
    return policy.alike(loaded.model.eval().requires_grad_(False))
