"""Run teacher: a separate model, or the trained model in its current, initial or averaged state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from posttrain.errors import UsageError
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward
from posttrain.models.load import load_model, load_tokenizer
from posttrain.recipes.other_models import TeacherSection
from posttrain.recipes.sections import ModelSection
from posttrain.training.checks import OWN_TEACHER
from posttrain.training.parts.averages import Teacher, WeightAverage
from posttrain.training.parts.built_models import BuiltModels
from posttrain.types import Tokenizer


def build_teacher(
    section: TeacherSection, student: ModelSection, models: BuiltModels, forward: Forward | ActorCritic
) -> Teacher:
    """Build the teacher. Candidates from the teacher and all student passes share a vocabulary.

    ``forward``: forward pass used by the objective.

    Raises:
        UsageError: incompatible teacher tokenizer.
    """
    learners: list[Forward | ActorCritic] = [models.policy, forward]
    if models.shards is not None:
        learners.append(models.shards.forward)
    students = [one.policy if isinstance(one, ActorCritic) else one for one in learners]
    if section.name != OWN_TEACHER:
        other = _load_teacher(section, student, models)
        num_ids = _shared_ids([other, *students], models.tokenizer)
        other.restrict(num_ids, targets=True)
        for own in students:
            own.restrict(num_ids)
        return Teacher(lambda: nullcontext(other))
    reference = models.start
    if section.weights == "start":
        assert reference is not None, "built for its teacher"
        with reference.open() as start:
            students.append(start)
    num_ids = _shared_ids(students, models.tokenizer)
    for own in students:
        own.restrict(num_ids)
    if section.weights == "start":
        assert reference is not None, "built for its teacher"
        return Teacher(reference.open)
    if section.weights == "live":
        return Teacher(lambda: nullcontext(models.policy))
    trained = [(name, p) for name, p in models.policy.model.named_parameters() if p.requires_grad]
    average = WeightAverage(models.policy, trained, section.ema_decay)
    return Teacher(average.open, average)


def refuse_other_tokenizer(teacher: TeacherSection, student: ModelSection) -> None:
    """Compare student and teacher tokenizers before loading models.

    Raises:
        UsageError: different tokenizers, or a tokenizer that cannot be loaded.
    """
    if teacher.name == OWN_TEACHER or student.init is not None:
        return
    own = load_tokenizer(student.name, trust_remote_code=student.trust_remote_code)
    _compare_tokenizers(teacher.name, load_tokenizer(teacher.name, trust_remote_code=teacher.trust_remote_code), own)


def _compare_tokenizers(name: str, theirs: Tokenizer, own: Tokenizer) -> None:
    if theirs.get_vocab() != own.get_vocab():
        raise UsageError(
            f"teacher.name: {name!r} uses a different vocabulary than the student, so token probabilities "
            "cannot be compared. Choose a teacher from the same model family"
        )


def _shared_ids(models: Sequence[Forward], tokenizer: Tokenizer) -> int:
    """Count token ids shared by the tokenizer and all models.

    Models in a family may pad embeddings differently; ids beyond the tokenizer are meaningless.
    """
    return min(max(tokenizer.get_vocab().values()) + 1, *(one.num_rows for one in models))


def _load_teacher(teacher: TeacherSection, student: ModelSection, models: BuiltModels) -> Forward:
    """Build the forward pass for a separate teacher, using the student's ``dtype`` by default."""
    section = ModelSection(
        name=teacher.name,
        dtype=teacher.dtype or student.dtype,
        device=student.device,
        trust_remote_code=teacher.trust_remote_code,
    )
    loaded = load_model(section, seed=0)
    _compare_tokenizers(teacher.name, loaded.tokenizer, models.tokenizer)
    return models.policy.alike(loaded.model.eval().requires_grad_(False))
