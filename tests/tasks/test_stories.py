"""The stories task: right answers, disjoint splits, purity, the mix of steps."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import pytest

from posttrain import registry
from posttrain.errors import RecipeError, UsageError
from posttrain.tasks.stories.families import Equation, is_worked
from posttrain.tasks.stories.task import split_of, stories
from posttrain.untrusted import declare_code

FROZEN = (
    "Tom picks 11 carrots every day for 4 days. How many carrots are there now?",
    "11 * 4 = 44.",
    "44",
)
WORDS_FOR_NUMBERS = {
    "2": r"doubles?\b|twice|half\b",
    "3": r"triples?\b|three times|third\b",
}


def evaluate(working: str) -> list[int]:
    """Every result of a working, recomputed apart from the package; fails on a wrong equation."""
    results = []
    for part in working.rstrip(".").split(". "):
        left_side, right_side = part.split(" = ")
        first, sign, second = left_side.split(" ")
        a, b = Fraction(first), Fraction(second)
        value = {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a / b
        assert value == int(right_side), part
        results.append(int(value))
    return results


def test_answers_are_what_the_working_gives() -> None:
    task = stories(max_steps=6, size=6000)
    for example in task.examples:
        assert example.solution is not None
        results = evaluate(example.solution)
        assert example.answer == str(results[-1])
        assert len(results) == example.meta["steps"] == example.meta["level"]
        assert all(0 <= value <= 99 for value in results)


def test_every_number_of_the_working_stands_in_the_story_or_was_just_worked_out() -> None:
    for example in stories(max_steps=6, size=3000).examples:
        story, known = example.messages[0].content, set()
        said = set(re.findall(r"\d+", story))
        for part, result in zip(example.solution.split(". "), evaluate(example.solution), strict=True):
            for number in re.findall(r"\d+", part.split(" = ")[0]):
                spoken = number in WORDS_FOR_NUMBERS and re.search(WORDS_FOR_NUMBERS[number], story, re.IGNORECASE)
                assert number in said or number in known or spoken, (story, example.solution)
            known.add(str(result))


def test_splits_share_no_working_even_with_other_seeds_and_other_words() -> None:
    seen: dict[str, set[tuple[tuple[object, ...], ...]]] = {}
    for split, size in (("train", 30_000), ("validation", 6000), ("test", 6000)):
        found = set()
        for seed in (0, 1):
            for example in stories(split=split, seed=seed, size=size // 2, max_steps=6).examples:
                steps = re.findall(r"(\d+) ([-+*/]) (\d+) =", example.solution)
                found.add(tuple((s, *(sorted((a, b)) if s in "+*" else (a, b))) for a, s, b in steps))
        seen[split] = found
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    assert len(seen["train"]) > 20_000  # the test would be empty if few stories were different


def test_facts_of_training_documents_are_never_whole_held_out_workings() -> None:
    facts = 0
    for example in stories(style="document", size=3000).examples:
        if example.meta["kind"] == "facts":
            for a, sign, b in re.findall(r"(\d+) ([-+*/]) (\d+) =", example.solution):
                assert split_of(Equation(int(a), sign, int(b)).key) == "train"
                facts += 1
    assert facts > 3000


def test_an_item_is_a_function_of_seed_split_and_index() -> None:
    one, other = stories(size=100), stories(size=50_000, worked=0.0)
    forwards = [one.examples[i] for i in range(100)]
    backwards = [one.examples[i] for i in reversed(range(100))][::-1]
    assert forwards == backwards == list(one.examples) == one.examples[:100]
    assert [e.messages for e in forwards] == [other.examples[i].messages for i in range(100)]
    assert one.examples[-1] == forwards[99]
    assert forwards[17].id == "stories/train/17"
    assert stories(seed=1).examples[0].messages != forwards[0].messages
    assert len({e.messages for e in forwards}) == 100
    with pytest.raises(IndexError):
        one.examples[100]


def test_stories_do_not_change_from_one_version_to_the_next() -> None:
    """The weights that ship were trained on these; a change here is a change of the task."""
    example = stories(seed=0).examples[3]
    assert (example.messages[0].content, example.solution, example.answer) == FROZEN


def test_steps_and_families_are_uniform() -> None:
    task = stories(split="validation", min_steps=2, max_steps=5, size=4000)
    steps = Counter(e.meta["steps"] for e in task.examples)
    families = Counter(e.meta["family"] for e in task.examples)
    assert set(steps) == {2, 3, 4, 5}
    assert all(abs(n - 1000) < 150 for n in steps.values())  # more than five standard deviations
    assert all(abs(n - 800) < 150 for n in families.values())


def test_share_of_worked_solutions() -> None:
    examples = list(stories(worked=0.1, size=5000).examples)
    share = sum(e.solution is not None for e in examples) / 5000
    assert abs(share - 0.1) < 0.02
    assert all(e.solution is None for e in stories(worked=0.0, size=300).examples)


def test_documents_have_the_mix_that_is_promised_and_only_true_equations() -> None:
    documents = list(stories(style="document", size=6000).examples)
    shares = {kind: n / 6000 for kind, n in Counter(e.meta["kind"] for e in documents).items()}
    expected = {"worked": 0.40, "told": 0.15, "facts": 0.25, "scraps": 0.20}
    assert all(abs(shares[kind] - share) < 0.03 for kind, share in expected.items())
    for example in documents:
        assert example.messages == ()
        assert is_worked(example.solution) or example.meta["kind"] in ("told", "scraps")
        for a, sign, b, c in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", example.solution):
            evaluate(f"{a} {sign} {b} = {c}.")
    scraps = " ".join(e.solution for e in documents if e.meta["kind"] == "scraps")
    for token in ("<think>", "</think>", "<answer>", "</answer>", "<reasoning>", "<|im_start|>", "<|im_end|>"):
        assert scraps.count(token) > 50
    assert "</think> <answer>" not in scraps  # the format itself is left to be learnt


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("19 + 12 = 31. 31 - 4 = 27.", True),
        ("Well: 7*3=21", True),
        ("19 + 12 = 32. 8 / 2 = 4.", True),
        ("19 + 12 = 32.", False),
        ("9 / 2 = 4.", False),
        ("The answer is 31.", False),
        ("119 + 12 = 31", False),
        ("1 + 1 = 23", False),
        ("9" * 50 + " + 1 = 2", False),
    ],
)
def test_is_worked_wants_a_true_equation(written: str, expected: bool) -> None:
    assert is_worked(written) is expected
    assert stories().worked is is_worked


def test_summands_may_swap_places_and_nothing_else() -> None:
    assert Equation(12, "+", 19).key == Equation(19, "+", 12).key == "12+19"
    assert Equation(9, "*", 2).key == Equation(2, "*", 9).key == "2*9"
    assert Equation(9, "-", 2).key != Equation(2, "-", 9).key


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match="min_steps"):
        stories(min_steps=4, max_steps=2)
    declare_code("posttrain.tasks.stories.task:stories")
    entry = registry.find("task", "posttrain.tasks.stories.task:stories")
    assert entry.traits["held_out"] == "validation"
    with pytest.raises(RecipeError, match="max_steps"):
        entry.options({"max_steps": 7})
    with pytest.raises(RecipeError, match="Did you mean 'worked'"):
        entry.options({"worket": 0.5})
