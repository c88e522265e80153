"""Evaluation by generation: intervals, fixed items, and what counts as wrong."""

from __future__ import annotations

from fractions import Fraction
from math import comb, sqrt

import pytest
from transformers import AutoTokenizer

from posttrain import registry
from posttrain.engines.base import Sampling
from posttrain.engines.scripted import ScriptedEngine
from posttrain.errors import UsageError
from posttrain.evals.generation import Z_95, evaluate, held_out_indices, wilson_interval
from posttrain.models.load import TINY
from posttrain.recipe import RewardWord
from posttrain.render import encode_prompt, stop_ids
from posttrain.rollout import build_grader
from posttrain.tasks.base import Task
from posttrain.types import Example, Message


def test_wilson_by_hand() -> None:
    # 8 of 10 at z = 1.96: (0.8 + 0.19208 ± 1.96 √(0.016 + 0.009604)) / 1.38416
    low, high = wilson_interval(8, 10, z=1.96)
    assert low == pytest.approx((0.99208 - 1.96 * sqrt(0.025604)) / 1.38416, abs=1e-12)
    assert (low, high) == (pytest.approx(0.4901, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (3, 7), (0, 500), (495, 500), (250, 500)])
def test_wilson_bounds_are_where_the_score_test_turns(successes: int, n: int) -> None:
    """By definition: at a bound p the observed share lies exactly z standard errors (of p) away."""
    share = successes / n
    low, high = wilson_interval(successes, n)
    assert 0.0 <= low <= share <= high <= 1.0
    for bound, inside in ((low, successes > 0), (high, successes < n)):
        if inside:
            assert abs(share - bound) == pytest.approx(Z_95 * sqrt(bound * (1 - bound) / n), rel=1e-9)
        else:
            assert bound == share  # 0 of n reaches down to 0, n of n up to 1
    mirrored = wilson_interval(n - successes, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


def test_wilson_covers_near_its_level_exactly() -> None:
    """Exact coverage over all outcomes, averaged over p: near 95 %, where the plain interval falls short."""
    n = 30
    shares = [Fraction(i, 100) for i in range(5, 96, 5)]
    coverage = 0.0
    for p in shares:
        for k in range(n + 1):
            low, high = wilson_interval(k, n)
            if low <= p <= high:
                coverage += float(comb(n, k) * p**k * (1 - p) ** (n - k)) / len(shares)
    assert coverage == pytest.approx(0.95, abs=0.01)


def test_no_interval_for_nothing() -> None:
    with pytest.raises(ValueError, match="a proportion of nothing"):
        wilson_interval(0, 0)


def test_items_are_fixed_and_spread() -> None:
    chosen = held_out_indices(1000, 50)
    assert chosen == held_out_indices(1000, 50)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 50
    assert max(chosen) > 800 > 200 > min(chosen)  # a sample, not the head of the file
    assert held_out_indices(7, 7) == held_out_indices(7, 100) == list(range(7))
    assert set(held_out_indices(1000, 20)) < set(chosen)  # more items add to the same sample


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def grader():
    template = registry.find("template", "r1_zero").bind({"preamble": ""})()
    return build_grader([RewardWord(name="correct"), RewardWord(name="xml_format", weight=0.5)], template)


GOOD = " so. </think> <answer> {} </answer>"


def make_task(size: int, long: tuple[int, ...] = (), worked=None) -> Task:
    def question(i: int) -> str:
        return "word " * 200 if i in long else f"What is {i} plus 1?"

    examples = [Example(f"sum/{i}", (Message("user", question(i)),), str(i + 1)) for i in range(size)]
    return Task("sums", "test", examples, worked=worked)


def measure(tokenizer, grader, task: Task, answers: dict[int, str], n: int = 100, **options):
    """Evaluate an engine that answers item i with ``answers[i]``, else with the right answer."""
    scripts = {}
    for i, item in enumerate(task.examples):
        ids = tokenizer.encode(answers.get(i, GOOD.format(i + 1)))
        scripts[tuple(encode_prompt(tokenizer, grader.template, item.messages))] = [[*ids, tokenizer.eos_token_id]]
    engine = ScriptedEngine(scripts, logprob=-1.0)
    sampling = Sampling(max_tokens=40, temperature=0.0, stop_ids=stop_ids(tokenizer, grader.template))
    settings = {"context_tokens": 128, "step": 3} | options
    return evaluate(engine, tokenizer, grader, task, n=n, sampling=sampling, **settings), engine


def test_shares_by_hand(tokenizer, grader) -> None:
    answers = {0: GOOD.format(7), 1: " 2", 2: " so </think> <answer> 3", 4: "one two " * 40}
    task = make_task(10, worked=lambda text: "so." in text)
    evaluation, engine = measure(tokenizer, grader, task, answers)
    results = evaluation.results
    assert evaluation.name == "sums/test"
    assert results["n"] == 10.0
    assert results["accuracy"] == 0.6
    assert (results["accuracy_low"], results["accuracy_high"]) == wilson_interval(6, 10)
    assert results["format"] == 0.7  # the wrong answer has it too
    assert results["parse_failures"] == pytest.approx(0.3)
    assert results["truncated"] == 0.1
    assert results["worked"] == 0.7
    assert results["reward"] == pytest.approx((6 * 1.5 + 0.5) / 10)
    assert results["prompts_too_long"] == 0.0
    lengths = [len(r.completion.ids) for r in evaluation.rollouts]
    assert results["num_tokens"] == sum(lengths) / 10
    assert lengths[4] == 40
    assert len(engine.calls) == 1  # one batch
    assert [(r.step, r.prompt_index, r.rollout_index) for r in evaluation.rollouts] == [(3, i, 0) for i in range(10)]


def test_prompts_that_are_too_long_count_as_wrong(tokenizer, grader) -> None:
    whole, _ = measure(tokenizer, grader, make_task(8), {})
    assert whole.results["accuracy"] == 1.0
    evaluation, engine = measure(tokenizer, grader, make_task(8, long=(2, 5)), {})
    results = evaluation.results
    assert (results["n"], results["accuracy"], results["format"]) == (8.0, 0.75, 0.75)
    assert (results["accuracy_low"], results["accuracy_high"]) == wilson_interval(6, 8)
    assert results["prompts_too_long"] == 2.0
    assert [r.prompt_index for r in evaluation.rollouts] == [0, 1, 3, 4, 6, 7]
    assert len(engine.calls[0][0]) == 6


def test_a_prompt_needs_room_for_one_token(tokenizer, grader) -> None:
    task = make_task(1)
    length = len(encode_prompt(tokenizer, grader.template, task.examples[0].messages))
    assert measure(tokenizer, grader, task, {}, context_tokens=length + 1)[0].results["prompts_too_long"] == 0.0
    with pytest.raises(UsageError, match=f"no prompt fits into the model's {length} tokens"):
        measure(tokenizer, grader, task, {}, context_tokens=length)


def test_the_items_do_not_depend_on_seed_or_step(tokenizer, grader) -> None:
    asked = []
    for options in ({"seed": 0, "step": 0}, {"seed": 5, "step": 9}):
        _, engine = measure(tokenizer, grader, make_task(40), {}, n=6, **options)
        asked.append(engine.calls[0][0])
    assert asked[0] == asked[1]
    assert len(asked[0]) == 6


def test_an_empty_task_is_refused(tokenizer, grader) -> None:
    with pytest.raises(UsageError, match="task 'sums', split 'test': no example"):
        measure(tokenizer, grader, make_task(0), {})
