"""Reward functions under TRL's trainer and here: the same arguments, parts, advantages and logged numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import allclose, approx
from posttrain import registry
from posttrain.algorithms.advantages import normalized
from posttrain.data.render import encode_prompt
from posttrain.data.render.template import build_template
from posttrain.graders.column_rewards import TrainingState
from posttrain.models.sources import TINY
from posttrain.recipes.sections import Component, RewardComponent
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import RolloutRequest, Sampler, build_grader, collect, logged_metrics
from posttrain.training.advantages import AdvantageEstimator, rewards_of
from posttrain.types import Rollout
from posttrain.untrusted import declare_code

pytestmark = pytest.mark.adapters
trl = pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("math_verify", reason="math-verify is not installed")

GROUP = 4
ANSWERS = (
    "<think>\nI add.\n</think>\nIt is \\boxed{4}.",
    "It is \\boxed{5}, so \\boxed{5}.",
    "<think>\nNo end. \\boxed{4}",
    "a a a a a a",
    "<think>\nOne.\n</think>\nI think \\boxed{\\frac{1}{2}}",
    "\\boxed{0.5}",
    "Half.",
    "b",
)
SOLUTIONS = ("\\boxed{4}", "nothing that parses")
KINDS = ("math", "code")
Rewards = list[Callable[..., Any]]
SEEN: list[dict[str, Any]] = []


# --- functions of the shapes that TRL's documentation describes ---


def unique_letters(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(set(text_of(one)))) for one in completions]


def text_of(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    return completion[0]["content"]


def token_count(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def only_math(prompts: list[Any], completions: list[Any], kind: list[str], **kwargs: Any) -> list[float | None]:
    """None for rows of another kind, as for several tasks in one data set."""
    scores: list[float | None] = []
    for prompt, completion, one in zip(prompts, completions, kind, strict=True):
        assert prompt
        scores.append(float("boxed" in text_of(completion)) if one == "math" else None)
    return scores


async def asked_elsewhere(completions: list[Any], **kwargs: Any) -> list[float]:
    async def score(completion: Any) -> float:
        await asyncio.sleep(0.001)
        return len(text_of(completion)) / 100

    return list(await asyncio.gather(*map(score, completions)))


def curriculum(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float]:
    """Worth more with each step."""
    share = trainer_state.global_step / trainer_state.max_steps
    return [share + len(text_of(one)) / 1000 for one in completions]


def watched(completions: list[Any], log_metric: Any = None, log_extra: Any = None, **kwargs: Any) -> list[float]:
    sizes = [len(text_of(one)) for one in completions]
    if log_extra:
        log_extra("letters", sizes)
    if log_metric:
        log_metric("mean_letters", sum(sizes) / len(sizes))
    state = kwargs["trainer_state"]  # which counts on
    SEEN.append({"completions": completions, "steps": (state.global_step, state.max_steps), **kwargs})
    return [0.0] * len(sizes)


def never(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None] * len(completions)


def rows_of(is_conversation: bool) -> list[dict[str, Any]]:
    rows = []
    for number, (solution, kind) in enumerate(zip(SOLUTIONS, KINDS, strict=True)):
        prompt: Any = f"Question {number}"
        if is_conversation:
            prompt = [{"role": "user", "content": prompt}]
        rows.append({"prompt": prompt, "solution": solution, "kind": kind, "level": number})
    return rows


def ids_of(tokenizer: Any) -> list[list[int]]:
    """The tags of thinking are text, as in Qwen3's tokenizer; those of ``tiny`` are special, and TRL skips such."""
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    return [[*tokenizer.encode(text, **plain), tokenizer.eos_token_id] for text in ANSWERS]


@dataclasses.dataclass
class Graded:
    """The rewards by function (NaN: no say), advantages, logged metrics and columns of the eight answers."""

    parts: torch.Tensor
    advantages: list[float]
    metrics: dict[str, float]
    extra: dict[str, list[Any]]
    seen: dict[str, Any]


def by_trl(tokenizer: Any, folder: Path, rewards: Rewards, is_conversation: bool, weights: list[float]) -> Graded:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Scripted(GRPOTrainer):
        """What the model says is given; everything else is TRL's."""

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            return ids_of(tokenizer), None

        def _calculate_rewards(self, *args, **kwargs):
            self.parts = super()._calculate_rewards(*args, **kwargs)
            return self.parts

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            self.advantages = output["advantages"]
            self.kept = {name: list(values) for name, values in self._metrics["train"].items()}
            self.columns = {name: list(values) for name, values in self._logs["extra"].items()}
            return output

    config = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=len(ANSWERS), num_generations=GROUP, max_steps=5,
        max_completion_length=400, use_cpu=True, bf16=False, report_to=[], save_strategy="no", shuffle_dataset=False,
        reward_weights=weights, disable_tqdm=True,
    )  # fmt: skip
    config.max_steps = 1
    trainer = Scripted(
        model=str(TINY), args=config, train_dataset=Dataset.from_list(rows_of(is_conversation)),
        processing_class=tokenizer, reward_funcs=list(rewards),
    )  # fmt: skip
    SEEN.clear()
    trainer.train()
    metrics = {name: values[0] for name, values in trainer.kept.items()}
    return Graded(trainer.parts, trainer.advantages.tolist(), metrics, trainer.columns, dict(SEEN[0]) if SEEN else {})


def by_us(tokenizer: Any, folder: Path, rewards: Rewards, is_conversation: bool, weights: list[float]) -> Graded:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(is_conversation)))
    task = registry.find("task", "jsonl").bind({"path": str(path), "split": "all", "answer_key": ""})()
    template = build_template(Component(name="chat"))
    components = []
    for function, weight in zip(rewards, weights, strict=True):
        name = registry.name_function(function)
        declare_code(name)
        components.append(RewardComponent(name=name, weight=weight))
    grader = build_grader(components, template)
    grader.run_extent.max_steps = 1
    script = ids_of(tokenizer)
    prompts = [encode_prompt(tokenizer, template, one.messages) for one in task.examples]
    engine = FakeEngine(lambda prompt, key: script.pop(0))
    sampler = Sampler(engine, tokenizer, grader, 2000)
    request = RolloutRequest(task.examples, prompts, sampler.sampling(400, 1.0), (3, "rollout 0", 1), GROUP, 1)
    request = dataclasses.replace(request, num_updates=0)
    SEEN.clear()
    groups, _ = collect(sampler, request)
    rollouts = [one for group in groups for one in group]
    advantages = AdvantageEstimator(normalized).from_groups([rewards_of(group) for group in groups])
    assert advantages is not None
    columns = {name: [one.extra[name] for one in rollouts] for name in rollouts[0].extra}
    names = [name for name, _, _ in grader.rewards[: grader.num_rewards]]
    parts = torch.tensor([[parts_of(one, name) for name in names] for one in rollouts])
    values = torch.cat(advantages).tolist()
    return Graded(parts, values, logged_metrics(rollouts), columns, dict(SEEN[0]) if SEEN else {})


def parts_of(rollout: Rollout, name: str) -> float:
    if name in rollout.skipped:
        return math.nan
    return rollout.parts[name]


@pytest.fixture
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    tokenizer.chat_template, tokenizer.eos_token = template.read_text(), "<|im_end|>"
    return tokenizer


def own_rewards() -> Rewards:
    """Every reward that TRL ships."""
    from trl import rewards

    made = [
        rewards.accuracy_reward,
        rewards.reasoning_accuracy_reward,
        rewards.think_format_reward,
        rewards.get_cosine_scaled_reward(max_len=40),
        rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0),
        rewards.get_soft_overlong_punishment(max_completion_len=40, soft_punish_cache=20),
    ]
    there = {name for name in dir(rewards) if name.endswith(("_reward", "_punishment"))}
    assert len(there) == len(made), there
    return made


def agree(ours: Graded, theirs: Graded) -> None:
    assert torch.equal(ours.parts.isnan(), theirs.parts.isnan())
    # fp32 in TRL: its parts are rounded once, and eight of them are summed
    assert allclose(ours.parts.float().nan_to_num(), theirs.parts.nan_to_num(), rtol=2e-7, atol=0)
    rounding = 64 * torch.finfo(torch.float32).eps * float(theirs.parts.nan_to_num().abs().max()) / 1e-4
    assert ours.advantages == approx(theirs.advantages, abs=min(rounding, 1e-3))
    assert {name: theirs.metrics[name] for name in ours.metrics} == approx(ours.metrics, rel=1e-6)
    assert ours.extra == theirs.extra


def test_trls_own_rewards_score_as_under_trl(tokenizer: Any, tmp_path: Path) -> None:
    rewards, weights = own_rewards(), [1.0, 0.5, 0.25, 1.0, 0.5, 1.0]
    theirs = by_trl(tokenizer, tmp_path, rewards, True, weights)
    ours = by_us(tokenizer, tmp_path, rewards, True, weights)
    assert theirs.parts.isnan().any(), "a gold answer that does not parse is no say"
    assert len({round(x, 6) for x in theirs.advantages}) > 4
    agree(ours, theirs)


@pytest.mark.parametrize("is_conversation", [True, False])
def test_rewards_of_every_documented_shape_score_as_under_trl(
    tokenizer: Any, tmp_path: Path, is_conversation: bool
) -> None:
    rewards: Rewards = [unique_letters, token_count, only_math, asked_elsewhere, curriculum, watched, never]
    weights = [1.0, 0.1, 2.0, 1.0, 1.0, 1.0, 1.0]
    theirs = by_trl(tokenizer, tmp_path, rewards, is_conversation, weights)
    ours = by_us(tokenizer, tmp_path, rewards, is_conversation, weights)
    agree(ours, theirs)
    assert "mean_letters" in ours.metrics
    assert ours.extra == {"letters": [len(text) for text in ANSWERS]}
    assert ours.seen["completions"] == theirs.seen["completions"]
    for name in ("completion_ids", "solution", "kind", "level"):
        assert ours.seen[name] == theirs.seen[name]
    if is_conversation:
        assert ours.seen["prompts"] == theirs.seen["prompts"]
    assert {*theirs.seen} <= {*ours.seen}
    assert ours.seen["steps"] == theirs.seen["steps"] == (0, 1)


def test_rows_that_no_reward_scores_have_the_advantages_of_trl(tokenizer: Any, tmp_path: Path) -> None:
    """The second row is of another kind: nothing scores it."""
    rewards: Rewards = [only_math, never]
    theirs = by_trl(tokenizer, tmp_path, rewards, False, [1.0, 1.0])
    ours = by_us(tokenizer, tmp_path, rewards, False, [1.0, 1.0])
    assert theirs.parts[GROUP:].isnan().all()
    agree(ours, theirs)
    assert theirs.advantages[GROUP:] == [0.0] * GROUP
    assert any(theirs.advantages[:GROUP])


def only_some(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [len(text_of(one)) / 10 if "boxed" in text_of(one) else None for one in completions]


def test_unscored_answers_of_a_group_are_left_out_as_in_trl(tokenizer: Any, tmp_path: Path) -> None:
    theirs = by_trl(tokenizer, tmp_path, [only_some], False, [1.0])
    ours = by_us(tokenizer, tmp_path, [only_some], False, [1.0])
    assert theirs.parts.isnan().sum() == 3
    agree(ours, theirs)
    assert [x for x, part in zip(ours.advantages, theirs.parts[:, 0], strict=True) if part.isnan()] == [0.0] * 3


def test_trainer_state_has_the_fields_of_transformers() -> None:
    from transformers import TrainerState

    theirs = {field.name for field in dataclasses.fields(TrainerState)}
    assert {field.name for field in dataclasses.fields(TrainingState)} >= theirs
