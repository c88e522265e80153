"""Multiple choice over 57 subjects: MMLU (Hendrycks et al. 2021)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.errors import DataError, UsageError
from posttrain.graders.choice import LETTERS
from posttrain.registry import register, suggest
from posttrain.tasks.base import Task
from posttrain.tasks.reader import reads_rows
from posttrain.tasks.reading import Row, read_file, read_hub, read_source
from posttrain.types import Example, Message

MAX_SHOTS = 5  # as many as the development split has of each subject

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
@reads_rows
def mmlu(
    *,
    split: Literal["validation", "test"] = "test",
    path: str | None = None,
    hub: str = "cais/mmlu",
    subjects: list[str] | None = None,
    shots: Annotated[int, Field(ge=0, le=MAX_SHOTS)] = 0,
    dev_path: str | None = None,
) -> Task:
    """Questions with choices A to D; the answer is a letter, read by the grader ``multiple_choice``.

    Keys: ``subject``, ``question``, ``choices`` (two to ten texts), and ``answer``, a letter or the index of a choice
    (from 0). meta holds ``subject``, ``area`` (stem, humanities, social_sciences, other; none of another subject) and
    ``choices``.

    Args:
        split: for evaluation; a local file is taken whole. There is no training split.
        hub: name of the data set on the hub (its configuration ``all``).
        subjects: only these subjects, or areas such as ``stem``; none: all.
        shots: solved questions of the same subject in front of each question, the first ones of the development split.
            The paper uses 5, without reasoning.
        dev_path: the development split as a local file; needed for ``shots`` with a local ``path``.

    Raises:
        DataError: a missing or malformed file or row, with its line, or too few solved questions of a subject.
        UsageError: an unknown subject, or ``shots`` without a development split.

    Source: Hendrycks et al. 2021 (arXiv 2009.03300). Departure: the instruction asks for the letter, and names the
    subject even of a single question.
    """
    source, place = read_source(path, hub, "all", split)
    rows = list(source)
    wanted = _chosen_subjects(subjects, {row.text("subject") for row in rows})
    solved = _read_solved(_dev_rows(path, hub, dev_path)) if shots else {}
    examples = []
    for row in rows:
        subject = row.text("subject")
        if subject not in wanted:
            continue
        own = solved.get(subject, [])[:shots]
        if len(own) < shots:
            raise DataError(
                dev_path or f"hub:{hub}/all/dev",
                f"{shots} solved questions of {subject!r} are needed, and there are {len(own)}; lower task.shots",
            )
        examples.append(read_example(row, split, own))
    if not examples:
        raise DataError(place, "no usable examples in it; give a file with rows")
    return Task("mmlu", split, examples)


def read_example(row: Row, split: str, solved: Sequence[str] = ()) -> Example:
    """One row as an example, behind the questions that are ``solved``.

    Raises:
        DataError: a key is missing or of the wrong type, or the answer is none of the choices.
    """
    choices, letter = read_choices(row), read_letter(row)
    subject = row.text("subject")
    title = subject.replace("_", " ")
    opening = (
        f"Answer the following multiple-choice question{'s' if solved else ''} about {title} "
        "with the letter of the right choice."
    )
    question = write_question(row.text("question").strip(), choices)
    meta: dict[str, Any] = {"subject": subject, "area": _AREA_OF.get(subject), "choices": choices}
    return Example(
        id=f"mmlu/{split}/{row.line}",
        messages=(Message("user", "\n\n".join((opening, *solved, question))),),
        answer=letter,
        meta=meta,
        grader="multiple_choice",
    )


def read_choices(row: Row) -> tuple[str, ...]:
    """The texts of the choices.

    Raises:
        DataError: not two to ten of them.
    """
    if "choices" not in row.data:
        row.text("choices")  # raises with the keys that there are
    value = row.data["choices"]
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= len(LETTERS):
        raise row.fail(f"'choices' must be a list of 2 to {len(LETTERS)} texts; got {value!r}")
    return tuple(row.checked(item, f"choice {LETTERS[i]}").strip() for i, item in enumerate(value))


def read_letter(row: Row) -> str:
    """The letter of the right choice.

    Raises:
        DataError: neither a letter of a choice nor the index of one.
    """
    letters = LETTERS[: len(read_choices(row))]
    value = row.data.get("answer")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(letters):
        return letters[value]
    if isinstance(value, str) and len(value.strip()) == 1 and value.strip() in letters:
        return value.strip()
    raise row.fail(f"'answer' must be a letter from A to {letters[-1]} or 0 to {len(letters) - 1}; got {value!r}")


def write_question(question: str, choices: Sequence[str], letter: str | None = None) -> str:
    """The question, a line for each choice and, if it is solved, the answer."""
    lines = [question, *(f"{mark}. {choice}" for mark, choice in zip(LETTERS, choices, strict=False))]
    return "\n".join(lines if letter is None else [*lines, f"Answer: {letter}"])


def _dev_rows(path: str | None, hub: str, dev_path: str | None) -> Iterable[Row]:
    if dev_path is not None:
        return read_file(dev_path)
    if path is not None:
        raise UsageError("task mmlu: task.shots with a local file needs solved questions; give them as task.dev_path")
    return read_hub(hub, "all", "dev")


def _read_solved(rows: Iterable[Row]) -> dict[str, list[str]]:
    solved = defaultdict(list)
    for row in rows:
        written = write_question(row.text("question").strip(), read_choices(row), read_letter(row))
        solved[row.text("subject")].append(written)
    return solved


def _chosen_subjects(chosen: Sequence[str] | None, there: Collection[str]) -> Collection[str]:
    """The subjects meant by names of subjects and areas.

    Raises:
        UsageError: a name that is neither, or nothing of it is there.
    """
    if not chosen:
        return there
    subjects: set[str] = set()
    for name in chosen:
        meant = set(AREAS.get(name, (name,))) & set(there)
        if not meant:
            known = sorted({*there, *AREAS})
            raise UsageError(
                f"task mmlu: there is no subject or area {name!r}.{suggest(name, known)} "
                f"Areas: {', '.join(AREAS)}; subjects: {', '.join(sorted(there))}"
            )
        subjects |= meant
    return subjects
