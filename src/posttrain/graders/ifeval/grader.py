"""Verifiable instructions: whether a response does what its prompt asks of its form (IFEval, Zhou et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.graders.blank import is_blank
from posttrain.graders.grading import Submission, Verdict
from posttrain.graders.ifeval import content, shape
from posttrain.graders.ifeval.table import INSTRUCTIONS, read_arguments
from posttrain.graders.responses import tagged_response
from posttrain.registry import register

MODULES = (content, shape)  # whose import enters their checks into the table
NOTHING = {"instructions_strict": 0.0, "instructions_loose": 0.0, "prompt_loose": 0.0}


@register("grader")
def ifeval(submission: Submission) -> Verdict:
    """Right if the response follows every instruction of its prompt, taken strictly.

    The response is what stands behind the thinking, inside of its answer tags where it has some. It is checked as a
    whole: no gold answer is needed, the instructions are in ``meta``: ``instruction_id_list``, and ``kwargs`` with the
    arguments of each.

    Facts: ``instructions_strict`` and ``instructions_loose``, the share of instructions followed; ``prompt_loose``,
    1 if all are, loosely: one of eight variants follows an instruction, with or without the first line, the last line,
    and asterisks. (``correct`` is the strict accuracy by prompt.)

    Source: IFEval (Zhou et al. 2023, arXiv 2311.07911), sections 2 and 3. Departures are named at the checks.

    Raises:
        UnknownWord: no such instruction.
        RecipeError: an instruction whose arguments do not fit.
        MissingExtra: an instruction about languages, and ``langdetect`` is not installed.
    """
    identifiers = submission.meta.get("instruction_id_list")
    if not identifiers:
        return Verdict("ungraded", facts=NOTHING)
    arguments = submission.meta.get("kwargs") or [{}] * len(identifiers)
    response = tagged_response(submission.text)
    if response is None or is_blank(response):
        return Verdict("no_answer", facts=NOTHING)
    strict = follow(identifiers, arguments, [response])
    loose = follow(identifiers, arguments, loose_variants(response))
    facts = {
        "instructions_strict": sum(strict) / len(strict),
        "instructions_loose": sum(loose) / len(loose),
        "prompt_loose": float(all(loose)),
    }
    return Verdict("right" if all(strict) else "wrong", response.strip(), facts)


def follow(
    identifiers: Sequence[str], arguments: Sequence[Mapping[str, Any] | None], variants: Sequence[str]
) -> list[bool]:
    """For each instruction, whether any of the variants follows it. Blank variants follow none.

    Raises:
        UnknownWord: no such instruction.
        RecipeError: an instruction whose arguments do not fit.
    """
    written = [variant for variant in dict.fromkeys(variants) if not is_blank(variant)]
    followed = []
    for identifier, kwargs in zip(identifiers, arguments, strict=True):
        options = read_arguments(identifier, kwargs)
        followed.append(any(INSTRUCTIONS[identifier](variant, **options) for variant in written))
    return followed


def loose_variants(response: str) -> list[str]:
    """The response with and without its first line, its last line, both, and each of these without asterisks."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return cut + [text.replace("*", "") for text in cut]
