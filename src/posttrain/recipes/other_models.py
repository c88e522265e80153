"""The sections of models next to the one that is trained: heads and teachers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from posttrain.acting import sections as conditions
from posttrain.option_types import Dtype
from posttrain.recipes.sections import Section


class HeadSection(Section):
    """The head of a value or reward model: one linear layer, fp32.

    Args:
        trunk: a value head is on a model of its own (``separate``, which starts as a copy of the policy) or on
            the policy's (``shared``); a reward head is always on the model that is trained.
        init_std: standard deviation of its initial weights.
        lr_ratio: multiplies the learning rate of the head and of a separate trunk.
    """

    trunk: Literal["separate", "shared"] = "separate"
    init_std: float = Field(default=0.02, ge=0)
    lr_ratio: float = Field(default=1.0, gt=0)


class TeacherSection(Section):
    """The teacher of objectives that read one.

    Args:
        name: a model, or ``self``: the model that is trained, whose prompt has something that the student does not see.
        sees: with ``self``, what the teacher's prompt has in addition: a right answer of another sample of the group
            (``right_sample``), the row's ``solution`` and answer, the ``response`` that the row gives, or what the
            ``environment`` says of the answer (its ``get_feedback``).
        prompt_format: with ``self``, its prompt, in which ``{question}`` and ``{shown}`` stand for the question and for
            what it sees; by default the question, this and the question again.
        weights: with ``self``, those of the teacher: ``live`` (as they are when answers are sampled), of the ``start``,
            or their exponential moving average (``ema``).
        ema_decay: the share of the average that an update keeps.
        top_k: candidates whose probabilities are kept for each token.
        support: whose likeliest tokens the candidates are, the teacher's or the student's.
        dtype: type of its weights; by default the student's.
        trust_remote_code: run Python code that comes with the teacher; allowed on the command line only.
    """

    name: str
    sees: Annotated[Literal["right_sample", "solution", "response", "environment"], conditions.IF_TEACHES_ITSELF] = (
        "right_sample"
    )
    prompt_format: Annotated[str | None, conditions.IF_TEACHES_ITSELF] = None
    weights: Annotated[Literal["live", "start", "ema"], conditions.IF_TEACHES_ITSELF] = "live"
    ema_decay: Annotated[float, conditions.IF_TEACHER_IS_AVERAGED] = Field(default=0.95, ge=0, lt=1)
    top_k: Annotated[int, conditions.IF_CANDIDATES_ARE_READ] = Field(default=64, ge=1)
    support: Annotated[Literal["teacher", "student"], conditions.IF_CANDIDATES_ARE_READ] = "teacher"
    dtype: Dtype | None = None
    trust_remote_code: bool = False

    @field_validator("prompt_format")
    @classmethod
    def _shows_something(cls, value: str | None) -> str | None:
        if value is None or ("{shown}" in value and "{question}" in value):
            return value
        example = "{question}\n\n{shown}"
        raise ValueError(f"it needs {{question}} and {{shown}}, as in {example!r}; got {value[:80]!r}")
