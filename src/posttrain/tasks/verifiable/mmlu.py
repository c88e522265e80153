"""Multiple choice over 57 subjects: MMLU (Hendrycks et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from posttrain.graders.choice import LETTERS
from posttrain.registry import register
from posttrain.tasks.reader import row_task
from posttrain.tasks.reading import Row
from posttrain.types import Example, Message

# The four areas of the paper (table 2 and appendix B) and their subjects.
AREAS: dict[str, tuple[str, ...]] = {
    "stem": (
        "abstract_algebra", "anatomy", "astronomy", "college_biology", "college_chemistry",
        "college_computer_science", "college_mathematics", "college_physics", "computer_security",
        "conceptual_physics", "electrical_engineering", "elementary_mathematics", "high_school_biology",
        "high_school_chemistry", "high_school_computer_science", "high_school_mathematics", "high_school_physics",
        "high_school_statistics", "machine_learning",
    ),
    "humanities": (
        "formal_logic", "high_school_european_history", "high_school_us_history", "high_school_world_history",
        "international_law", "jurisprudence", "logical_fallacies", "moral_disputes", "moral_scenarios", "philosophy",
        "prehistory", "professional_law", "world_religions",
    ),
    "social_sciences": (
        "econometrics", "high_school_geography", "high_school_government_and_politics",
        "high_school_macroeconomics", "high_school_microeconomics", "high_school_psychology", "human_sexuality",
        "professional_psychology", "public_relations", "security_studies", "sociology", "us_foreign_policy",
    ),
    "other": (
        "business_ethics", "clinical_knowledge", "college_medicine", "global_facts", "human_aging", "management",
        "marketing", "medical_genetics", "miscellaneous", "nutrition", "professional_accounting",
        "professional_medicine", "virology",
    ),
}  # fmt: skip
_AREA_OF = {subject: area for area, subjects in AREAS.items() for subject in subjects}


@register("task", held_out="validation")
@row_task("cais/mmlu:all", share=None, splits=Literal["validation", "test"], split="test")
def mmlu(row: Row) -> Example:
    """Questions with choices A to D (MMLU); the answer is a letter, read by the grader ``multiple_choice``.

    Keys: ``subject``, ``question``, ``choices`` (two to ten texts), and ``answer``, a letter or the index of a choice
    (from 0). meta holds ``subject``, ``area`` (stem, humanities, social_sciences, other; none of another subject) and
    ``choices``.

    Args:
        split: for evaluation; a local file is taken whole. There is no training split.

    Source: Hendrycks et al. 2021 (arXiv 2009.03300). Departure: no solved questions come before; the instruction asks
    for the letter and names the subject.
    """
    subject, choices = row.text("subject"), _read_choices(row)
    opening = (
        f"Answer the following multiple-choice question about {subject.replace('_', ' ')} "
        "with the letter of the right choice."
    )
    lines = [row.text("question").strip(), *(f"{m}. {choice}" for m, choice in zip(LETTERS, choices, strict=False))]
    return Example(
        "",
        (Message("user", "\n".join([opening, "", *lines])),),
        answer=_read_letter(row, LETTERS[: len(choices)]),
        meta={"subject": subject, "area": _AREA_OF.get(subject), "choices": choices},
        grader="multiple_choice",
    )


def _read_choices(row: Row) -> tuple[str, ...]:
    if "choices" not in row.data:
        row.text("choices")  # raises with the keys that there are
    value = row.data["choices"]
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= len(LETTERS):
        raise row.fail(f"'choices' must be a list of 2 to {len(LETTERS)} texts; got {value!r}")
    return tuple(row.checked(item, f"choice {LETTERS[i]}").strip() for i, item in enumerate(value))


def _read_letter(row: Row, letters: Sequence[str]) -> str:
    value = row.data.get("answer")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(letters):
        return letters[value]
    if isinstance(value, str) and len(value.strip()) == 1 and value.strip() in letters:
        return value.strip()
    raise row.fail(f"'answer' must be a letter from A to {letters[-1]} or 0 to {len(letters) - 1}; got {value!r}")
