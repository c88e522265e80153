"""The teacher of a run: another model, or the trained one as it is, as it began, or averaged."""

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
    """Return the teacher of a run; its candidates and those of all passes of the student are of the same ids.

    ``forward``: the pass that the objective reads.

    Raises:
        UsageError: a teacher of another tokenizer.
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
    """Compare the tokenizers of student and teacher, before a model is loaded.

    Raises:
        UsageError: they are not the same, or one cannot be loaded.
    """
    if teacher.name == OWN_TEACHER or student.init is not None:
        return
    own = load_tokenizer(student.name, trust_remote_code=student.trust_remote_code)
    _compare_tokenizers(teacher.name, load_tokenizer(teacher.name, trust_remote_code=teacher.trust_remote_code), own)


def _compare_tokenizers(name: str, theirs: Tokenizer, own: Tokenizer) -> None:
    if theirs.get_vocab() != own.get_vocab():
        raise UsageError(
            f"teacher.name: {name!r} has another vocabulary than the student; probabilities of tokens "
            "can only be compared within one. Choose a teacher of the same family"
        )


def _shared_ids(models: Sequence[Forward], tokenizer: Tokenizer) -> int:
    """Return the number of ids that the tokenizer and all models have.

    Embeddings are padded to other sizes within one family, and what is beyond the tokenizer means nothing.
    """
    return min(max(tokenizer.get_vocab().values()) + 1, *(one.num_rows for one in models))


def _load_teacher(teacher: TeacherSection, student: ModelSection, models: BuiltModels) -> Forward:
    """Return the forward pass of another model, in the ``dtype`` of the student unless it has one."""
    section = ModelSection(
        name=teacher.name,
        dtype=teacher.dtype or student.dtype,
        device=student.device,
        trust_remote_code=teacher.trust_remote_code,
    )
    loaded = load_model(section, seed=0)
    _compare_tokenizers(teacher.name, loaded.tokenizer, models.tokenizer)
    return models.policy.alike(loaded.model.eval().requires_grad_(False))
