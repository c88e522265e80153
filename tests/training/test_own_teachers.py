"""A model that teaches itself: what its teacher sees, and with which weights, against plain modules in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_turns import GAME, game_recipe
from torch import Tensor
from transformers import AutoModelForCausalLM

from closeness import approx, assert_close, rounding
from posttrain.data.render import encode_prompt
from posttrain.errors import UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.training.build import TrainerState, prepare
from posttrain.training.parts.averages import WeightAverage
from posttrain.training.sources.feedback import Feedback, response_of, solution_of
from posttrain.training.sources.rollouts import NOTHING_SHOWN
from posttrain.training.step import accumulate, apply_update
from posttrain.types import Batch, Completion, Example, Message, Response, Rollout
from posttrain.untrusted import declare_code
from refusing import refuses
from small_runs import Events, one_layer_recipe, run, same_bits, saved_tensors, shallow, steps_of, watched

# Batch fields are kept in fp32: a log-probability down to -44 is rounded to this.
KEPT = rounding(torch.float32, size=44.0)
FP64 = {"name": shallow(1), "dtype": "fp64"}
QUESTION = (Message("user", "What is 2 plus 2?"),)


def own_teacher(objective: Any = "sdpo", **teacher: Any) -> Recipe:
    return one_layer_recipe(
        "grpo",
        model=FP64,
        objective=objective,
        teacher={"name": "self", "top_k": 5} | teacher,
        rollout={"num_prompts": 3, "group_size": 3, "max_tokens": 6, "label_above": 0.25},
        train={"micro_batch_rows": 4, "lr": 1e-2},
    )


def update(parts: TrainerState, recipe: Recipe, step: int) -> Batch:
    """One optimizer step as the loop makes it; returns its batch."""
    batch = parts.source(step).batch
    assert batch is not None
    loss, _ = accumulate(parts.method, batch, recipe.train)
    apply_update(parts.optimizer, [p for _, p in parts.parameters], recipe.train.lr, 1.0, loss, step)
    parts.follow_update()
    return batch


def teacher_tables(parts: TrainerState, model: Any, batch: Batch, rollouts: list[Rollout]) -> list[Tensor]:
    """Each answer behind the question, its row's solution and the question again, through a model alone: ``[N, V]``."""
    tables = []
    for rollout in rollouts:
        question = rollout.example.messages[-1].content
        shown = f"{rollout.example.solution}\nAnswer: {rollout.example.answer}"
        text = f"{question}\n\nCorrect solution:\n\n{shown}\n\nCorrectly solve the original question.\n\n{question}"
        prompt = encode_prompt(parts.tokenizer, parts.grader.template, [Message("user", text)])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *rollout.completion.ids]])).logits[0]
        tables.append((logits / parts.policy.temperature).log_softmax(-1)[len(prompt) - 1 : -1])
    return tables


def test_what_a_row_gives_to_see() -> None:
    bare = Example("e", QUESTION)
    assert solution_of(bare) is None
    assert response_of(bare) is None
    assert solution_of(Example("e", QUESTION, "4")) == "Answer: 4"
    assert solution_of(Example("e", QUESTION, "4", solution="2 + 2 = 4")) == "2 + 2 = 4\nAnswer: 4"
    given = (Response("five", 0.0), Response("It is", 1.0, answer="4"))
    assert response_of(Example("e", QUESTION, responses=given)) == "It is\nAnswer: 4"
    assert response_of(Example("e", QUESTION, demonstration="Four.", responses=given)) == "Four."


@pytest.mark.parametrize(
    ("sees", "start", "shown"),
    [
        ("solution", "Correct solution:", "2 + 2 = 4\nAnswer: 4"),
        ("response", "An example of a response:", "Four {it} is."),
        ("environment", "Feedback on an earlier attempt:", "too low"),
    ],
)
def test_the_teacher_reads_it_between_the_question_and_its_repetition(
    sees: Any, start: str, shown: str, tokenizer: Any, template: Any
) -> None:
    example = Example("e", QUESTION, "4", solution="2 + 2 = 4", demonstration="Four {it} is.")
    prompt = tuple(encode_prompt(tokenizer, template, QUESTION))
    ids = tuple(tokenizer.encode("it is 3", add_special_tokens=False))
    completion = Completion(ids, (-1.0,) * len(ids), "length")
    heard = Rollout(example, prompt, completion, "it is 3", {}, 0.0, 1, 0, 0, 0, feedback="too low")
    silent = Rollout(Example("f", QUESTION), prompt, completion, "it is 3", {}, 0.0, 1, 0, 0, 1)
    batch, has_feedback = Feedback(tokenizer, template, 0.5, 1024, sees).rewrite([[heard, silent]], [(0, 0), (0, 1)])
    assert has_feedback.tolist() == [1.0, 0.0]
    text = tokenizer.decode(batch.tokens[0, : int(batch.prefix[0])])
    asked = QUESTION[0].content
    assert text.index(asked) < text.index(start) < text.index(shown) < text.rindex(asked)
    assert batch.tokens[1, : int(batch.prefix[1])].tolist() == list(prompt)


@pytest.mark.parametrize("weights", ["live", "start", "ema"])
def test_the_teachers_weights_are_those_of_the_recipe(weights: str) -> None:
    """After three updates; the average is worked from the weights after each."""
    recipe = own_teacher("on_policy_distillation", sees="solution", weights=weights, ema_decay=0.7)
    parts = prepare(recipe)
    kept = [copy.deepcopy(parts.model.state_dict())]
    for step in (1, 2, 3):
        update(parts, recipe, step)
        kept.append(copy.deepcopy(parts.model.state_dict()))
    model = AutoModelForCausalLM.from_pretrained(shallow(1), dtype=torch.float64).eval()
    expected = {"live": kept[3], "start": kept[0]}
    shares = (0.7**3, 0.3 * 0.7**2, 0.3 * 0.7, 0.3)
    expected["ema"] = {name: sum(s * w[name] for s, w in zip(shares, kept, strict=True)) for name in kept[0]}
    model.load_state_dict(expected[weights])
    draw = parts.source(4)
    assert draw.batch is not None
    for b, table in enumerate(teacher_tables(parts, model, draw.batch, list(draw.rollouts))):
        ids = torch.tensor(draw.rollouts[b].completion.ids)
        found = draw.batch.fields["teacher_logprobs"][b, draw.batch.mask[b]].double()
        assert_close(found, table.gather(1, ids[:, None])[:, 0], atol=KEPT, rtol=0)
    after = parts.model.state_dict()
    assert all(torch.equal(after[name], kept[3][name]) for name in kept[3]), "the student's weights are back"


@pytest.mark.parametrize("support", ["teacher", "student"])
def test_loss_and_gradient_are_those_of_a_plain_model_in_float64(support: str) -> None:
    """SDFT on the row's solution: reverse KL over five candidates of either side, renormalized.

    (With a tail the rest of a teacher that is sure, 1 − Σ p, has no digit left in fp32.)
    """
    objective = {"name": "distillation", "tail": False}
    recipe = own_teacher(objective, sees="solution", weights="start", support=support)
    parts = prepare(recipe)
    update(parts, recipe, 1)
    draw = parts.source(2)
    batch = draw.batch
    assert batch is not None
    loss, _ = accumulate(parts.method, batch, recipe.train)
    start = AutoModelForCausalLM.from_pretrained(shallow(1), dtype=torch.float64).eval()
    student = AutoModelForCausalLM.from_pretrained(shallow(1), dtype=torch.float64).eval()
    student.load_state_dict(parts.model.state_dict())
    total = torch.zeros((), dtype=torch.float64)
    tables = teacher_tables(parts, start, batch, list(draw.rollouts))
    for table, rollout in zip(tables, draw.rollouts, strict=True):
        logits = student(torch.tensor([[*rollout.prompt_ids, *rollout.completion.ids]])).logits[0]
        own = (logits / parts.policy.temperature).log_softmax(-1)[len(rollout.prompt_ids) - 1 : -1]
        chosen = (table if support == "teacher" else own).topk(5).indices
        q, p = (logprobs.gather(1, chosen).softmax(-1) for logprobs in (own, table))
        total = total + (q * (q / p).log()).sum()
    expected = total / int(batch.mask.sum())
    expected.backward()
    assert float(expected.detach()) > 1e-4
    # a teacher's log-probability moves a term by at most its own rounding, and so the mean
    assert loss == approx(float(expected.detach()), abs=KEPT)
    named = dict(student.named_parameters())
    for name, parameter in parts.parameters:
        assert parameter.grad is not None
        own = named[name].grad
        assert own is not None
        # what fp32 does to the teacher's log-probabilities, through log-probabilities whose slopes add up to norms
        assert float((parameter.grad - own).norm()) < 100 * KEPT * float(own.norm())
        assert float(own.norm()) > 0


def test_no_split_into_micro_batches_changes_what_the_teacher_says() -> None:
    fields = []
    for rows in (1, 9):
        recipe = own_teacher(sees="solution", support="student")
        recipe.train.micro_batch_rows = rows
        batch = prepare(recipe).source(1).batch
        assert batch is not None
        fields.append(batch.fields)
    assert torch.equal(fields[0]["teacher_ids"], fields[1]["teacher_ids"])
    names = "teacher_candidate_logprobs"
    assert_close(fields[0][names], fields[1][names], atol=KEPT, rtol=0)


def test_averages_resume_to_the_bit(tmp_path: Path) -> None:
    recipe = own_teacher(sees="solution", weights="ema", ema_decay=0.9)
    recipe.train.num_minibatches = 3  # the checkpoint lies within a batch
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, recipe)
    run(cut, recipe, stop_after=2)
    run(cut, recipe, resume=True)
    ours, theirs = saved_tensors(whole, 4), saved_tensors(cut, 4)
    assert same_bits(ours, theirs)
    averaged = [name for name in ours if name.startswith("averages.safetensors:teacher.")]
    assert len(averaged) > 5
    name = averaged[0].removeprefix("averages.safetensors:teacher.")
    assert not torch.equal(ours[averaged[0]], ours[f"model.safetensors:{name}"])


def test_average_is_that_of_torch_from_its_second_update_on() -> None:
    """torch's first update takes the weights over; from there both are ``d a + (1 − d) w``."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    module = torch.nn.Linear(3, 2).double()
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    theirs.update_parameters(module)
    ours = WeightAverage(None, list(module.named_parameters()), 0.8)  # type: ignore[arg-type]
    for step in range(3):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(step + 1.0)
        theirs.update_parameters(module)
        ours.update()
    for name, parameter in theirs.module.named_parameters():
        assert_close(ours.values[name], parameter.detach(), rtol=1e-14, atol=1e-14)


def test_an_environment_tells_the_teacher_and_not_the_student(tmp_path: Path) -> None:
    teacher = {"name": "self", "sees": "environment", "top_k": 3}
    recipe = game_recipe(objective="sdpo", teacher=teacher)
    draw = prepare(recipe).source(1)
    assert draw.batch is not None
    assert [r.feedback is not None for r in draw.rollouts] == [True] * 12
    assert all(str(r.feedback).startswith("The number was ") for r in draw.rollouts)
    assert draw.batch.fields["has_feedback"].tolist() == [1.0] * draw.batch.num_rows


class Mute:
    """Says nothing of an answer."""

    def reset(self, seed: int) -> str:
        return "Guess."

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: the guess.
        """
        return "no"

    def get_reward(self) -> float:
        return 0.0


def test_an_environment_without_feedback_is_refused() -> None:
    declare_code(["test_own_teachers:Mute"])
    recipe = game_recipe("test_own_teachers:Mute", objective="sdpo", teacher={"name": "self", "sees": "environment"})
    with refuses(UsageError, "teacher.sees", "get_feedback"):
        prepare(recipe)
    assert GAME["name"] == "number_guess"


def test_rows_with_nothing_to_see_are_said(tmp_path: Path) -> None:
    recipe = own_teacher(sees="response")
    events = Events()
    watched(tmp_path, recipe, events)
    assert NOTHING_SHOWN in [info["message"] for info in events.of("notice")]
    assert [step["feedback_share"] for step in steps_of(tmp_path)] == [0.0] * 4


def test_a_teacher_of_another_tokenizer_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.models import load
    from posttrain.models.tokenizer import train_tokenizer
    from posttrain.training.parts import built_models as build

    other = tmp_path / "other"
    train_tokenizer(iter(["some other words entirely"]), 300).save_pretrained(other)
    (other / "config.json").write_text('{"model_type": "qwen3"}')
    loaded: list[object] = []
    for module in (load, build):
        monkeypatch.setattr(module, "load_model", lambda *a, **o: loaded.append(a))
    recipe = one_layer_recipe("grpo", objective="on_policy_distillation", teacher={"name": str(other)})
    with refuses(UsageError, "teacher.name", "vocabulary"):
        prepare(recipe)
    assert loaded == []
