"""Evaluation by generation: fixed items, batches, and what counts as wrong."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from closeness import approx
from posttrain import registry
from posttrain.data.base import Task
from posttrain.data.render import encode_prompt, stop_ids
from posttrain.errors import UsageError
from posttrain.evaluation.generation import (
    Evaluation,
    Questions,
    distinct_indices,
    evaluate_sampler,
    held_out,
    held_out_indices,
)
from posttrain.evaluation.statistics import wilson_interval
from posttrain.recipes.sections import RewardComponent
from posttrain.sampling.base import Sampling
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import Sampler, build_grader
from posttrain.types import Example, Message
from refusing import refuses


def test_items_are_fixed_and_spread() -> None:
    chosen = held_out_indices(1000, 50)
    assert chosen == held_out_indices(1000, 50)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 50
    assert max(chosen) > 800 > 200 > min(chosen)  # a sample, not the head of the file
    assert held_out_indices(7, 7) == held_out_indices(7, 100) == list(range(7))
    assert set(held_out_indices(1000, 20)) < set(chosen)  # more items add to the same sample


def test_distinct_items_are_the_fixed_ones_where_nothing_repeats() -> None:
    task = make_task(1000)
    assert distinct_indices(task.examples, 50) == held_out_indices(1000, 50)
    assert distinct_indices(task.examples, 50, seed=3) == held_out_indices(1000, 50, 3)
    assert distinct_indices(task.examples, 2000) == list(range(1000))


def test_repeated_questions_are_drawn_once_and_others_take_their_places() -> None:
    unique = make_task(60).examples
    examples = [replace(unique[i % 60], id=f"sum/{i}") for i in range(5000)]
    drawn = [examples[i].messages for i in distinct_indices(examples, 40)]
    assert len(set(drawn)) == len(drawn) == 40
    assert len(distinct_indices(examples, 128)) == 60  # there are no more
    task = Task("sums", "test", [replace(unique[0], id="a"), replace(unique[0], id="b", meta={"more": 1})])
    assert [one.id for one in held_out(task, 2)] == ["a"]
    assert [one.id for one in held_out(task, 2, distinct=False)] == ["a", "b"]
    other_gold = Task("sums", "test", [unique[0], replace(unique[0], id="b", answer="7")])
    assert len(held_out(other_gold, 2)) == 2


def test_n_and_interval_are_of_distinct_questions(tokenizer, grader) -> None:
    unique = make_task(6)
    examples = [replace(unique.examples[i % 6], id=f"sum/{i}") for i in range(24)]
    answers = {i: GOOD.format(i % 6 + 1 if i % 6 < 2 else 0) for i in range(24)}
    results = measure(tokenizer, grader, Task("sums", "test", examples), answers)[0].results
    alone = measure(tokenizer, grader, unique, answers)[0].results
    assert (results["n"], results["repeated_prompts"]) == (6.0, 18.0)
    assert (alone["n"], alone["repeated_prompts"]) == (6.0, 0.0)
    low, high = wilson_interval(2, 6)
    assert (results["accuracy"], results["accuracy_low"], results["accuracy_high"]) == (2 / 6, low, high)
    assert results["accuracy_low"] == alone["accuracy_low"]


@pytest.fixture(scope="module")
def grader():
    template = registry.find("template", "r1_zero").bind({"preamble": ""})()
    return build_grader([RewardComponent(name="correct"), RewardComponent(name="xml_format", weight=0.5)], template)


GOOD = " so. </think> <answer> {} </answer>"


def make_task(size: int, long: tuple[int, ...] = (), worked=None) -> Task:
    def question(i: int) -> str:
        return "word " * 200 if i in long else f"What is {i} plus 1?"

    examples = [Example(f"sum/{i}", (Message("user", question(i)),), str(i + 1)) for i in range(size)]
    return Task("sums", "test", examples, worked=worked)


def ask(sampler: Sampler, request: Questions, options: dict[str, Any]) -> Evaluation:
    """Evaluate with options of the sampler, of the questions, or of ``evaluate``."""
    options = dict(options)
    sampler, request = (
        replace(one, **{f.name: options.pop(f.name) for f in fields(one) if f.name in options})
        for one in (sampler, request)
    )
    return evaluate_sampler(sampler, request, **options)


def measure(tokenizer, grader, task: Task, answers: dict[int, str], n: int = 100, **options):
    """Evaluate an engine that answers item i with ``answers[i]``, else with the right answer."""
    scripts = {}
    for i, item in enumerate(task.examples):
        ids = tokenizer.encode(answers.get(i, GOOD.format(i + 1)))
        scripts[tuple(encode_prompt(tokenizer, grader.template, item.messages))] = [[*ids, tokenizer.eos_token_id]]
    engine = FakeEngine(scripts, logprob=-1.0)
    sampling = Sampling(max_tokens=40, temperature=0.0, stop_ids=stop_ids(tokenizer, grader.template))
    return ask(Sampler(engine, tokenizer, grader, 128), Questions(task, sampling, n, step=3), options), engine


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
    assert results["parse_failures"] == approx(0.3)
    assert results["truncated"] == 0.1
    assert results["shows_reasoning"] == 0.7
    assert results["reward"] == approx((6 * 1.5 + 0.5) / 10)
    assert results["prompts_too_long"] == 0.0
    lengths = [len(r.completion.ids) for r in evaluation.rollouts]
    assert results["completion_length"] == sum(lengths) / 10
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


def test_an_empty_task_is_refused(tokenizer, grader) -> None:
    with refuses(UsageError, "'sums'", "'test'"):
        measure(tokenizer, grader, make_task(0), {})


def drawn(tokenizer, grader, task: Task, choices: list[str], **options):
    """Evaluate an engine that draws every answer out of ``choices`` by its key."""
    ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in choices]
    engine = FakeEngine(ids, logprob=-1.0)
    sampling = Sampling(max_tokens=40, stop_ids=stop_ids(tokenizer, grader.template))
    return ask(Sampler(engine, tokenizer, grader, 128), Questions(task, sampling, 100), options), engine


CHOICES = [GOOD.format(i) for i in (1, 2, 3)]


def test_answers_do_not_depend_on_batches_nor_on_what_else_is_requested(tokenizer, grader) -> None:
    task = make_task(7)
    whole, engine = drawn(tokenizer, grader, task, CHOICES, samples=3)
    assert len(engine.calls) == 1
    texts = [[s.text for s in item.samples] for item in whole.items]
    assert len({tuple(row) for row in texts}) > 3  # drawn, and not all alike
    parts, engine = drawn(tokenizer, grader, task, CHOICES, samples=3, batch=7)
    assert [len(prompts) for prompts, _, _ in engine.calls] == [2, 2, 2, 1]  # whole items
    assert parts.items == whole.items
    assert {k: v for k, v in parts.results.items() if k != "seconds"} == {
        k: v for k, v in whole.results.items() if k != "seconds"
    }
    other, _ = drawn(tokenizer, grader, task, CHOICES, samples=3, seed=1)
    assert [[s.text for s in item.samples] for item in other.items] != texts
    fewer, _ = drawn(tokenizer, grader, task, CHOICES, samples=2)
    assert [[s.text for s in item.samples] for item in fewer.items] == [row[:2] for row in texts]


def test_batches_are_reported_as_they_come(tokenizer, grader) -> None:
    output = []
    task = make_task(5, long=(4,))
    evaluation, _ = drawn(tokenizer, grader, task, CHOICES, batch=2, observe=output.append)
    assert len(evaluation.rollouts) == 4
    assert [(a.phase, a.num_done, a.num_items) for a in output] == [("sampling", 3, 5), ("sampling", 5, 5)]
    assert output[-1].num_correct == sum(item.share for item in evaluation.items)
    assert output[-1].num_tokens == sum(s.num_tokens for item in evaluation.items for s in item.samples)


class LengthScorer:
    """Longer is better; texts with a 3 cannot be scored."""

    def __init__(self) -> None:
        self.request: list[tuple[str, str]] = []

    def score(self, examples, texts, finishes):
        self.request += [(example.id, text) for example, text in zip(examples, texts, strict=True)]
        return [None if "3" in text else float(len(text)) for text in texts]


def test_a_scorer_is_queried_about_every_answer(tokenizer, grader) -> None:
    scorer = LengthScorer()
    evaluation, _ = drawn(
        tokenizer, grader, make_task(4, long=(1,)), [*CHOICES, "x"], samples=3, ks=(1, 3), scorer=scorer, batch=3
    )
    assert scorer.request == [(item.id, s.text) for item in evaluation.items for s in item.samples]
    for item in evaluation.items:
        for sample in item.samples:
            assert sample.score == (None if "3" in sample.text else float(len(sample.text)))
    unscored = sum("3" in text for _, text in scorer.request)
    assert unscored > 0
    assert evaluation.results["unscored"] == unscored / 12
    assert {"best_of@1", "best_of@3", "best_of@3_low"} <= set(evaluation.results)
    assert "reward_model_seconds" in evaluation.timing
