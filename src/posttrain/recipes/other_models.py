"""Recipe sections for value heads, reward heads and teachers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from posttrain.acting import sections as conditions
from posttrain.option_types import Dtype
from posttrain.recipes.sections import Section


class HeadSection(Section):
    """Linear value or reward head, in fp32.

    Args:
        trunk: attach a value head to a ``separate`` model (initialized from the policy) or to the policy (``shared``).
            Reward heads always use the trained model.
        init_std: standard deviation for weight initialization.
        lr_ratio: learning rate multiplier for the head and a separate trunk.
    """

    trunk: Literal["separate", "shared"] = "separate"
    init_std: float = Field(default=0.02, ge=0)
    lr_ratio: float = Field(default=1.0, gt=0)


class TeacherSection(Section):
    """Teacher for distillation objectives.

    Args:
        name: model name, or ``self`` to teach the trained model with extra information in the prompt.
        sees: extra information with ``self``: a correct answer from the same group (``right_sample``), the dataset's
            ``solution`` and answer, its ``response``, or ``environment`` feedback (``get_feedback``).
        prompt_format: teacher prompt format with ``self``. Must contain ``{question}`` and ``{shown}`` (the extra
            information). By default, the question is repeated after the extra information.
        weights: teacher weights with ``self``: ``live`` (current weights during sampling), ``start`` (initial
            weights), or ``ema`` (exponential moving average).
        ema_decay: EMA decay per update.
        top_k: number of candidate tokens with stored probabilities per position. If the objective follows a truncated
            sampler, they come from the kept set, over which both distributions are normalized.
        support: choose the most likely candidates under the ``teacher`` or the ``student``.
        dtype: weight dtype. Defaults to the student dtype.
        trust_remote_code: run Python code shipped with the teacher. Allowed only on the command line.
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
        raise ValueError(f"it needs {{question}} and {{shown}}, as in {example!r}")
