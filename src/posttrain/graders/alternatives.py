"""Several gold answers, each of which is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.graders.grading import FAILURES, Submission, Verdict, grade
from posttrain.registry import register


@register("grader", batched=True)
def any_answer(submissions: Sequence[Submission], *, mode: str = "math") -> list[Verdict]:
    """Right if the answer equals any of the gold answers in ``meta["answers"]``.

    ``right = max_k 1[mode(completion, gold_k) = right]``. Where none is equal, a grading that had to be stopped is
    what is reported, so that it is counted. Without ``meta["answers"]`` the one gold answer counts.

    Args:
        mode: the grader that compares with each of them.
    """
    golds = [tuple(s.meta.get("answers") or ()) or (s.answer,) for s in submissions]
    asked = [
        replace(submission, answer=gold) for submission, own in zip(submissions, golds, strict=True) for gold in own
    ]
    verdicts = iter(grade(mode, asked))
    return [_combine([next(verdicts) for _ in own]) for own in golds]


def _combine(verdicts: Sequence[Verdict]) -> Verdict:
    right = [verdict for verdict in verdicts if verdict.outcome == "right"]
    failed = [verdict for verdict in verdicts if verdict.outcome in FAILURES]
    return (right or failed or verdicts)[0]
