"""Responses to stories: right workings and consistent slips, that nothing but arithmetic tells apart."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from posttrain import registry
from posttrain.data.render import encode_prompt, encode_response
from posttrain.data.render.rows import rows_of
from posttrain.data.stories.families import Equation, Story
from posttrain.data.stories.task import carry_on, stories
from posttrain.errors import RecipeError, UsageError
from posttrain.models.sources import TINY
from refusing import refuses

pytestmark = pytest.mark.usefixtures("quick_stories")
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")
APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


def parse(working: str) -> list[tuple[int, str, int, int]]:
    """Equations with the stated results, apart from the package's own code; the whole text must be equations."""
    found = [(int(a), sign, int(b), int(c)) for a, sign, b, c in STEP.findall(working)]
    assert working == " ".join(f"{a} {sign} {b} = {c}." for a, sign, b, c in found)
    return found


def first_wrong(steps: list[tuple[int, str, int, int]]) -> list[int]:
    return [i for i, (a, sign, b, c) in enumerate(steps) if APPLY[sign](a, b) != c]


PURSE = Story(  # three pens at 4, a purse of 20, 5 coins found: 4*3=12, 20-12=8, 8+5=13
    "shop", "", (Equation(4, "*", 3), Equation(20, "-", 12), Equation(8, "+", 5)), ((None, None), (None, 0), (1, None))
)
TOGETHER = Story(  # 12; 5 more: 17; half of nothing; both together
    "compare",
    "",
    (Equation(12, "+", 5), Equation(17, "+", 3), Equation(17, "+", 20)),
    ((None, None), (0, None), (0, 1)),
)


@pytest.mark.parametrize(
    ("story", "step", "given_arguments", "written"),
    [
        (PURSE, 0, 14, "4 * 3 = 14. 20 - 14 = 6. 6 + 5 = 11."),
        (PURSE, 1, 7, "4 * 3 = 12. 20 - 12 = 7. 7 + 5 = 12."),
        (PURSE, 2, 12, "4 * 3 = 12. 20 - 12 = 8. 8 + 5 = 12."),
        (TOGETHER, 0, 19, "12 + 5 = 19. 19 + 3 = 22. 19 + 22 = 41."),  # both operands of the last step follow
        (TOGETHER, 1, 21, "12 + 5 = 17. 17 + 3 = 21. 17 + 21 = 38."),
    ],
)
def test_a_slip_is_carried_on_by_hand(story: Story, step: int, given_arguments: int, written: str) -> None:
    working = carry_on(story, step, given_arguments)
    assert " ".join(map(str, working)) == written
    assert [number for number, equation in enumerate(working) if equation.claimed is not None] == [step]
    assert str(working[-1].result) == written.rstrip(".").split(" ")[-1]


@pytest.mark.parametrize("options", [{}, {"max_steps": 6}, {"max_value": 30}, {"max_value": 9999, "min_steps": 2}])
def test_only_arithmetic_tells_a_pair_apart(options: dict[str, Any]) -> None:
    places: Counter[tuple[int, int]] = Counter()
    limit = options.get("max_value", 99)
    for example in stories(responses="pair", size=800, **options).examples:
        correct, wrong = example.responses
        assert (correct.score, wrong.score) == (1.0, 0.0)
        assert correct.text == example.solution
        assert correct.answer == example.answer != wrong.answer
        good, bad = parse(correct.text), parse(wrong.text)
        assert first_wrong(good) == []
        slip = first_wrong(bad)
        assert len(slip) == 1, wrong.text  # one wrong result, and everything behind it follows
        assert good[: slip[0]] == bad[: slip[0]]
        assert [sign for _, sign, _, _ in good] == [sign for _, sign, _, _ in bad]
        assert [len(word) for word in correct.text.split()] == [len(word) for word in wrong.text.split()]
        assert len(correct.answer) == len(wrong.answer)
        assert all(0 <= number <= limit for a, _, b, c in bad for number in (a, b, c))
        assert wrong.answer == str(bad[-1][3])
        # operands are the story's own numbers, or stated results in place of the right ones
        for (a, _, b, _), (c, _, d, _) in zip(good, bad, strict=True):
            assert c == a or c in [r for *_, r in bad]
            assert d == b or d in [r for *_, r in bad]
        places[len(bad), slip[0]] += 1
    most = options.get("max_steps", 4)
    assert set(places) == {(n, k) for n in range(options.get("min_steps", 1), most + 1) for k in range(n)}
    assert min(places[most, k] for k in range(most)) > 0.3 * places[most, most - 1]


def test_judged_and_steps_are_the_pair_in_random_order() -> None:
    pairs, judged, steps = (stories(responses=kind, size=400).examples for kind in ("pair", "judged", "steps"))
    first_is_correct = Counter()
    for pair, single, labelled in zip(pairs, judged, steps, strict=True):
        assert pair.messages == single.messages == labelled.messages
        assert sorted(pair.responses, key=lambda r: r.score) == sorted(single.responses, key=lambda r: r.score)
        assert [f" {r.text}" for r in single.responses] == [r.text for r in labelled.responses]
        first_is_correct[single.responses[0].score] += 1
        for response in labelled.responses:
            assert response.text == "".join(response.steps)
            assert all(step.startswith(" ") and step.endswith(".") for step in response.steps)
            wrong = first_wrong(parse(response.text.strip()))
            k = wrong[0] if wrong else len(response.steps)
            assert response.step_labels == (1,) * k + (0,) * (len(response.steps) - k)
            assert response.score == float(not wrong)
    assert abs(first_is_correct[1.0] - 200) < 50  # five standard deviations


def test_responses_are_a_function_of_seed_split_and_index() -> None:
    one, other = stories(responses="pair", size=50), stories(responses="pair", size=9000)
    backwards = [one.examples[i] for i in reversed(range(50))][::-1]
    assert list(one.examples) == backwards == other.examples[:50]
    assert one.examples[0].responses != stories(responses="pair", seed=1).examples[0].responses
    plain = stories(size=50).examples
    assert [(e.messages, e.answer, e.solution) for e in plain] == [
        (e.messages, e.answer, e.solution) for e in backwards
    ]
    assert all(e.responses == () for e in plain)
    hidden = stories(responses="pair", worked=0.0, size=5).examples  # what is shown as solution is another matter
    assert [e.responses for e in hidden] == [e.responses for e in one.examples[:5]]
    assert all(e.solution is None for e in hidden)


@pytest.mark.parametrize("template", ["r1_zero", "boxed", "plain"])
def test_a_reward_model_sees_the_tokens_that_a_policy_would_write(template: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    built = registry.find("template", template).bind({}, "")()
    for example in stories(responses="pair", size=5).examples:
        ((chosen, rejected),) = rows_of(tokenizer, built, example, "pair")
        prompt = encode_prompt(tokenizer, built, example.messages)
        assert chosen.ids == prompt + encode_response(tokenizer, built, example)
        assert chosen.prompt_length == rejected.prompt_length == len(prompt)
        assert len(chosen.ids) == len(rejected.ids)  # digits are tokens: equal in tokens, too
    if template == "r1_zero":
        assert tokenizer.convert_tokens_to_ids("</think>") in rejected.ids[len(prompt) :]
        (labelled,) = stories(responses="steps", size=1).examples
        ((row,), _) = rows_of(tokenizer, built, labelled, "steps")
        written = encode_response(tokenizer, built, labelled) if labelled.responses[0].score == 1.0 else None
        ends = sorted(row.step_labels)
        assert [tokenizer.decode([row.ids[t]]) for t in ends] == ["."] * len(labelled.responses[0].steps)
        if written is not None:
            assert row.ids[row.prompt_length : ends[-1] + 1] == written[: ends[-1] + 1 - row.prompt_length]


def test_wrong_options_are_refused() -> None:
    with refuses(UsageError, "documents ask no question"):
        stories(style="document", responses="pair")
    with refuses(RecipeError, "responses"):
        registry.find("task", "stories").options({"responses": "pairs"}, "task")
