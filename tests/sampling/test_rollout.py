"""From examples to graded completions: rewards, weights, keys, texts."""

from __future__ import annotations

import pytest

from posttrain import registry
from posttrain.data.render import Template, encode_prompt, stop_ids
from posttrain.errors import RewardFailure
from posttrain.randomness import derive_key
from posttrain.recipes.sections import RewardComponent
from posttrain.sampling.base import Sampling
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import Attempt, Grader, RolloutRequest, Sampler, build_grader, collect, encode_prompts
from posttrain.types import Completion, Example, Message
from posttrain.untrusted import declare_code
from refusing import refuses


def template(name: str = "r1_zero", **options) -> Template:
    return registry.find("template", name).bind(options)()


def example(index: int, answer: str | None = "42") -> Example:
    question = Message("user", f"What is {index} plus {42 - index}?")
    return Example(id=f"sum/{index}", messages=(question,), answer=answer)


def grade_one(grader: Grader, given: Example, text: str, completion: Completion) -> tuple[dict[str, float], float]:
    [grade] = grader.grade([Attempt(given, "prompt", text, completion)])
    return grade.parts, grade.reward


declare_code([f"test_rollout:{name}" for name in ("asks_for_everything", "complains", "asks_too_much")])

RIGHT = " 40 and 2. </think> <answer> 42 </answer>"
WRONG = " 40 and 1. </think> <answer> 41 </answer>"
LOOSE = " It is </think> so <answer> 42 </answer>"


def test_weighted_sum_of_unweighted_parts() -> None:
    grader = build_grader(
        [RewardComponent(name="correct", weight=2.0), RewardComponent(name="xml_format", weight=0.25)], template()
    )
    completion = Completion((1, 2, 3), (-1.0,) * 3, "stop")

    def grade(text: str) -> tuple[dict[str, float], float]:
        return grade_one(grader, example(1), "<think>" + text, completion)

    assert grade(RIGHT) == ({"correct": 1.0, "xml_format": 1.0}, 2.25)
    assert grade(WRONG) == ({"correct": 0.0, "xml_format": 1.0}, 0.25)
    assert grade(LOOSE)[0]["xml_format"] == 0.0
    assert grade("no tags 42") == ({"correct": 0.0, "xml_format": 0.0}, 0.0)


@pytest.mark.parametrize(("name", "format_part"), [("r1_zero", "xml_format"), ("boxed", "boxed_format")])
def test_accuracy_and_format_are_always_measured_and_cost_nothing(name: str, format_part: str) -> None:
    grader = build_grader([RewardComponent(name="overlong", weight=1.0, limit=8, cache=2)], template(name))
    assert grader.format_part == format_part
    text = "<think>" + RIGHT if name == "r1_zero" else "so \\boxed{42}"
    parts, reward = grade_one(grader, example(1), text, Completion((1,) * 5, (0.0,) * 5, "stop"))
    assert (parts["correct"], parts[format_part]) == (1.0, 1.0)
    assert reward == parts["overlong"] == 0.0
    assert [weight for _, weight, _ in grader.rewards] == [1.0, 0.0, 0.0]


def test_a_reward_that_stands_twice_is_distinguished() -> None:
    words = [
        RewardComponent(name="correct"),
        RewardComponent(name="correct", weight=0.5, mode={"name": "numeric", "tolerance": 2.0}),
    ]
    grader = build_grader(words, template())
    parts, reward = grade_one(grader, example(1), "<think>" + WRONG, Completion((1,), (0.0,), "stop"))
    assert parts == {"correct": 0.0, "correct_1": 1.0, "xml_format": 1.0}
    assert reward == 0.5


def asks_for_everything(prompt, text, extracted, answer, num_tokens, finish, tags, grader, example, meta) -> float:
    assert prompt.endswith("<think>")
    assert text == "<think>" + RIGHT
    assert (extracted.strip(), answer, finish) == ("42", "42", "stop")
    assert (tags, grader, example.answer, dict(meta)) == (("think", "answer"), "numeric", "42", {})
    return float(num_tokens)


def complains(extracted: str | None) -> float:
    raise KeyError("no such column")


def script(tokenizer, *texts: str) -> FakeEngine:
    end = tokenizer.eos_token_id
    return FakeEngine([[*tokenizer.encode(text), end] for text in texts], logprob=-0.5)


def sample(tokenizer, engine, grader, examples, group: int = 1, **options):
    prompts = [encode_prompt(tokenizer, grader.template, e.messages) for e in examples]
    sampling = Sampling(max_tokens=64, stop_ids=stop_ids(tokenizer, grader.template))
    key = options.pop("key", (0, "rollout 0", 1))
    request = RolloutRequest(examples, prompts, sampling, key, group, step=1, **options)
    return collect(Sampler(engine, tokenizer, grader, 1024), request)[0]


def test_what_a_reward_is_given(tokenizer) -> None:
    grader = build_grader([RewardComponent(name="test_rollout:asks_for_everything")], template())
    [[rollout]] = sample(tokenizer, script(tokenizer, RIGHT), grader, [example(1)])
    ids = tokenizer.encode(RIGHT)
    assert rollout.reward == len(ids) + 1  # the end token counts
    assert rollout.completion.ids == (*ids, tokenizer.eos_token_id)
    assert rollout.completion.logprobs == (-0.5,) * (len(ids) + 1)
    assert rollout.text == "<think>" + RIGHT  # without the end token


def test_a_reward_that_raises_names_itself_and_the_example(tokenizer) -> None:
    grader = build_grader([RewardComponent(name="test_rollout:complains")], template())
    with refuses(RewardFailure, "'test_rollout:complains', example 'sum/1'"):
        sample(tokenizer, script(tokenizer, RIGHT), grader, [example(1)])


def test_groups_keys_and_places(tokenizer) -> None:
    grader = build_grader([], template())
    engine = script(tokenizer, RIGHT, WRONG)
    examples = [example(i) for i in (3, 4, 5)]
    groups = sample(tokenizer, engine, grader, examples, 8, key=(7, "rollout 2", 11), prompt_indices=[30, 40, 50])
    [(prompts, keys, _)] = engine.calls
    assert keys == [tuple(derive_key(7, "rollout 2", 11, slot, g) for g in range(8)) for slot in range(3)]
    assert len({key for row in keys for key in row}) == 24
    for slot, group in enumerate(groups):
        assert [r.rollout_index for r in group] == list(range(8))
        assert {(r.prompt_index, r.example.id, r.prompt_ids) for r in group} == {
            (30 + 10 * slot, examples[slot].id, prompts[slot])
        }
        assert all((r.reward, r.parts["correct"]) == (0.0, float("42" in r.text)) for r in group)
    assert {r.parts["correct"] for group in groups for r in group} == {0.0, 1.0}


def test_prompts_that_do_not_fit_are_left_out_and_counted(tokenizer) -> None:
    r1_zero = template(preamble="")
    examples = [example(1), Example("long", (Message("user", "word " * 50),), "1"), example(2)]
    lengths = [len(encode_prompt(tokenizer, r1_zero, e.messages)) for e in examples]
    kept, encoded, dropped = encode_prompts(tokenizer, r1_zero, examples, lengths[0])
    assert (kept, dropped) == ([0, 2], 1)
    assert encoded == [encode_prompt(tokenizer, r1_zero, examples[i].messages) for i in (0, 2)]
    assert encode_prompts(tokenizer, r1_zero, examples, max(lengths))[2] == 0
    assert encode_prompts(tokenizer, r1_zero, examples, max(lengths) - 1)[2] == 1


def asks_too_much(judge) -> float:
    return 0.0
