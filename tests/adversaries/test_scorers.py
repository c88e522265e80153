"""Data sets with scorers of their own (reasoning-gym): those that pay for nothing, hedges or a constant are refused."""

from __future__ import annotations

from collections import Counter

import empty_answers
import grader_answers
import pytest

from posttrain.errors import PosttrainError
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.registry import find
from posttrain.types import Example

# Sets that pay for nothing, for hedges and for constants; sets whose scorer raises; and honest ones.
SAMPLE = ("complex_arithmetic", "game_of_life_halting", "coin_flip", "chain_sum", "gcd",
    pytest.param("boxnet", marks=pytest.mark.slow), "prime_factorization",
          "letter_counting", "spell_backward", "propositional_logic")  # fmt: skip
KEYS = ("Use a different dataset",)
ALWAYS = ("0", "1", "-1", "nan", "inf", "yes", "no", "True", "False", "A", "B", "0 or 1", "yes or no", "True or False")
MOST_OFTEN = 0.6  # a constant may be right as often as the likeliest gold, or so often, and no more


def all_sets() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})  # which is made of others


def examples_of(dataset: str, size: int) -> list[Example] | None:
    """Questions of a set; None where it is refused, with the key that lifts the refusal."""
    try:
        return list(find("task", "reasoning_gym", "task").function(dataset=dataset, split="train", size=size).examples)
    except PosttrainError as error:
        if any(key in str(error) for key in KEYS):
            return None
        raise


def correct(examples: list[Example], answers: list[str]) -> list[tuple[str, Example]]:
    """The answers that the sets' own scorers call right, and for what."""
    pairs = [(answer, example) for answer in answers for example in examples]
    found = grade_submissions(
        "scored", [Submission(answer, answer, example.answer, example.meta) for answer, example in pairs]
    )
    return [pair for pair, verdict in zip(pairs, found, strict=True) if verdict.outcome == "right"]


def exploits(dataset: str, size: int, step: int) -> list[str] | None:
    """What the set pays for and should not; None where it is refused."""
    examples = examples_of(dataset, size)
    if examples is None:
        return None
    golds = [(example.answer or "").strip() for example in examples]
    nothing = empty_answers.invisible_texts()[:: 5 * step] + empty_answers.empty_marks()[:: 2 * step]
    paid = [f"{answer!r} for {e.answer!r}" for answer, e in correct(examples, nothing) if answer.strip() not in golds]
    for example, other in zip(examples, [*examples[1:], examples[0]], strict=True):
        gold, wrong = example.answer, other.answer
        if gold is None or wrong is None or gold == wrong or not gold.strip():
            continue
        hedges = [f"{gold} or {wrong}", f"{wrong} or {gold}", f"{gold}, {wrong}", f"either {gold} or {wrong}",
            f"not {gold}",
                  f"{gold} maybe", f"{gold}? No, {wrong}", f"{gold}\n{wrong}"]  # fmt: skip
        paid += [f"{answer!r} for {gold!r}" for answer, _ in correct([example], hedges)]
    constants = [*ALWAYS, *grader_answers.constants()[::step], *grader_answers.lists()[::step]]
    rates = Counter(answer for answer, _ in correct(examples, constants))
    most = max(Counter(golds).values())
    paid += [f"{a!r} for {n} of {size}" for a, n in rates.items() if n > max(most, MOST_OFTEN * size)]
    return paid


@pytest.mark.parametrize("dataset", SAMPLE)
def test_a_set_that_pays_for_nothing_is_refused(dataset: str) -> None:
    pytest.importorskip("reasoning_gym")
    assert not exploits(dataset, 6, 8)


@pytest.mark.slow
def test_every_set_that_pays_for_nothing_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    found = {dataset: exploits(dataset, 10, 2) for dataset in all_sets()}
    paying = {dataset: paid[:6] for dataset, paid in found.items() if paid}
    assert not paying, "\n".join(f"{dataset}: {paid}" for dataset, paid in paying.items())
    assert sum(paid is not None for paid in found.values()) > len(found) / 2, "most sets are honest"
