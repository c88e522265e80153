"""Rewards per turn: what an environment pays for a turn is the credit of that turn and of those before it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_turns import game_recipe

from closeness import approx
from posttrain import registry
from posttrain.algorithms.advantages import normalized, turn_normalized
from posttrain.recipes.reference_sections import KLInRewardSection
from posttrain.training.advantages import AdvantageEstimator, number_turns
from posttrain.training.build import prepare
from posttrain.training.sources.rollouts import pay_turns
from posttrain.training.sources.stored import read_drawn, write_drawn
from posttrain.types import Batch, Completion, Example, Rollout, Sample, Turn, collate
from posttrain.untrusted import declare_code
from small_runs import one_layer_recipe, recorded, run

A = "■"  # a token of the model; all others it was told


class Paying:
    """Pays a tenth of each number that is said, and at the end 1 if the last was even."""

    wrong: Any = None

    def reset(self, seed: int) -> str:
        self.said = 0
        return f"Say {seed % 7}."

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: the guess.
        """
        self.said = number
        return "go on"

    def get_turn_reward(self) -> float:
        return self.said / 10 if Paying.wrong is None else Paying.wrong

    def get_reward(self) -> float:
        return float(self.said % 2 == 0)


def batch_of(*rows: str) -> Batch:
    """Rows behind a prompt of one token: in order, tokens of the model and tokens that it was told."""
    samples = [
        Sample(
            [1] * (1 + len(row)), [False, *(c == A for c in row)], 0, 1, {"sampler_logprobs": [0.0] * (1 + len(row))}
        )
        for row in rows
    ]
    return collate(samples)


def paid(batch: Batch, *turns: tuple[float | None, ...], weight: float = 1.0) -> torch.Tensor:
    nothing = Completion((), (), "stop")
    rollouts = [
        Rollout(Example("e", ()), (), nothing, "", {}, 0.0, 1, 0, 0, 0, turns=tuple(Turn("", (), r) for r in row))
        for row in turns
    ]
    return pay_turns(batch, rollouts, weight)


def advantage_estimator(word: str, kl: float | None = None, **options: Any) -> AdvantageEstimator:
    entry = registry.find("advantage", word)
    level = entry.traits.get("level")
    section = None if kl is None else KLInRewardSection(weight=kl)
    return AdvantageEstimator(entry.bind(options), per_token=level == "token", per_turn=level == "turn", kl=section)


def test_turns_are_runs_of_the_models_own_tokens() -> None:
    batch = batch_of("■■·■··■", "■·")
    assert number_turns(batch.mask).tolist() == [[-1, 0, 0, 0, 1, 1, 1, 2], [-1, 0, 0, 0, 0, 0, 0, 0]]
    assert paid(batch, (0.5, None, 2.0), (4.0,), weight=0.5).tolist() == [
        [0, 0, 0.25, 0, 0, 0, 0, 1.0], [0, 2.0, 0, 0, 0, 0, 0, 0],
    ]  # fmt: skip


def test_each_turn_is_compared_with_those_who_came_to_it() -> None:
    """Returns (3, 2, 1), (2, 1) and (1): of turn 3 there is one alone."""
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    taken = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    root = math.sqrt(0.5)
    expected = [[1.0, 0.5 / root, 0.0], [0.0, -0.5 / root, 0.0], [-1.0, 0.0, 0.0]]
    found = turn_normalized(rewards, taken, epsilon=0.0)
    assert [row.tolist() for row in found] == [approx(row) for row in expected]
    halved = turn_normalized(rewards, taken, gamma=0.5, epsilon=0.0)  # returns 1.75, 1.5, 1 and 1.5, 1
    mean, std = 4.25 / 3, math.sqrt(((1.75 - 4.25 / 3) ** 2 + (1.5 - 4.25 / 3) ** 2 + (1 - 4.25 / 3) ** 2) / 2)
    assert halved[:, 0].tolist() == approx([(r - mean) / std for r in (1.75, 1.5, 1.0)])


def test_with_one_turn_it_is_that_of_the_group() -> None:
    rewards = torch.tensor([[0.3], [1.0], [0.1]], dtype=torch.float64)
    assert torch.equal(turn_normalized(rewards, rewards > 0)[:, 0], normalized(rewards.T)[0])


def test_turns_of_two_groups_worked_by_hand() -> None:
    """The reward is all that was paid; what no turn was paid is paid at the end."""
    batch = batch_of("■·■■", "■■·■", "■", "■·■")
    turns = paid(batch, (0.2, None), (0.0, None), (None,), (0.5, None))
    rewards = [torch.tensor([1.2, 0.0], dtype=torch.float64), torch.tensor([2.0, 1.5], dtype=torch.float64)]
    word = advantage_estimator("turn_normalized", epsilon=0.0)
    assert word.needs_batch
    advantages, _ = word.from_batch(batch, rewards, torch.zeros(4, dtype=torch.bool), (), turns)
    up = math.sqrt(0.5)  # of two, each is half of their distance from the mean, and the deviation is √½ of it
    # group 1: returns 1.2, 1 and 0, 0; group 2: 2 and 1.5, 1, where the second turn is compared with nobody
    expected = [[up, 0, up, up], [-up, -up, 0, -up], [up, 0, 0, 0], [-up, 0, 0, 0]]
    assert [row[1:].tolist() for row in advantages] == [approx(row) for row in expected]
    assert not bool(advantages[:, 0].any())
    assert torch.equal(batch.field("advantages"), advantages.float())


def test_tokens_see_the_reward_of_a_turn_at_its_end() -> None:
    batch = batch_of("■■·■", "■·■■")
    turns = paid(batch, (0.25, None), (1.0, -2.0))
    rewards = [torch.tensor([3.25, 0.5], dtype=torch.float64)]  # 3 and 1.5 at the end
    word = advantage_estimator("return_to_go", whiten=False)
    advantages, _ = word.from_batch(batch, rewards, torch.zeros(2, dtype=torch.bool), (), turns)
    assert advantages[:, 1:].tolist() == [[3.25, 3.25, 0, 3.0], [0.5, 0, -0.5, -0.5]]


def test_a_penalty_is_paid_in_the_turn_in_which_it_arises() -> None:
    batch = batch_of("■·■", "■·■")
    batch.fields["ref_logprobs"] = torch.tensor([[0.0, 0.0, 0.0, -2.0], [0.0, 0.0, 0.0, 0.0]])  # k1: 2 in turn 2
    rewards = [torch.tensor([1.0, 1.0], dtype=torch.float64)]
    word = advantage_estimator("turn_normalized", 0.5, epsilon=0.0)
    advantages, _ = word.from_batch(batch, rewards, torch.zeros(2, dtype=torch.bool), ())
    up = math.sqrt(0.5)
    assert advantages[:, 1:].tolist() == [approx([-up, 0, -up]), approx([up, 0, up])]
    batch.fields["ref_logprobs"] = torch.tensor([[0.0, -2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])  # and now in turn 1
    advantages, _ = word.from_batch(batch, rewards, torch.zeros(2, dtype=torch.bool), ())
    assert advantages[:, 1:].tolist() == [approx([-up, 0, 0]), approx([up, 0, 0])]


# --- of an environment ---


@pytest.fixture(autouse=True)
def pays_numbers() -> None:
    declare_code("test_turn_advantages:Paying")
    Paying.wrong = None


def paying_recipe(**changes: Any) -> Any:
    recipe = game_recipe("test_turn_advantages:Paying", **changes)
    rewards = ["environment", {"name": "turn_rewards", "weight": 0.5}]
    recipe.rewards[:] = one_layer_recipe("grpo", rewards=rewards).rewards
    return recipe


def test_an_environment_pays_turns_and_the_credit_is_that_of_the_recipe(tmp_path: Path) -> None:
    recipe = paying_recipe(advantage="turn_normalized", objective="reinforce", train={"steps": 1})
    source = prepare(recipe).source
    drawn = source.draw(1, 0)
    again = read_drawn(write_drawn(drawn), source)
    assert [r.turns for g in again.sampled for r in g] == [r.turns for g in drawn.sampled for r in g]
    draw = source(1)
    assert draw.batch is not None
    for b, rollout in enumerate(draw.rollouts):
        message = [turn.reward for turn in rollout.turns]
        numbers = [int(turn.calls[0].raw_arguments) if turn.calls else None for turn in rollout.turns]
        assert message == [None if n is None else n / 10 for n in numbers]
        assert rollout.parts["turn_rewards"] == approx(sum(n / 10 for n in numbers if n is not None))
        assert rollout.reward == approx(rollout.parts["environment"] + 0.5 * rollout.parts["turn_rewards"])
        turns = number_turns(draw.batch.mask)[b][draw.batch.mask[b]].tolist()
        assert len(set(turns)) == len(rollout.turns)
        advantages = draw.batch.field("advantages")[b][draw.batch.mask[b]].tolist()
        for k in set(turns):
            mine = return_from(rollout, k)
            others = [return_from(r, k) for r in group_of(draw.rollouts, rollout) if len(r.turns) > k]
            expected = 0.0
            if len(others) > 1:
                values = torch.tensor(others, dtype=torch.float64)
                expected = float((mine - values.mean()) / (values.std() + 1e-4))
            found = [a for a, turn in zip(advantages, turns, strict=True) if turn == k]
            assert found == approx([expected] * len(found), abs=1e-6)
    run(tmp_path, recipe)
    assert [r.turns for r in recorded(tmp_path)[0]] == [r.turns for r in draw.rollouts]


def group_of(rollouts: list[Rollout], one: Rollout) -> list[Rollout]:
    return [r for r in rollouts if r.prompt_index == one.prompt_index]


def return_from(rollout: Rollout, k: int) -> float:
    return rollout.parts["environment"] + 0.5 * sum(turn.reward or 0.0 for turn in rollout.turns[k:])


@pytest.mark.parametrize("wrong", [float("nan"), "much"])
def test_a_reward_of_a_turn_that_is_no_number_is_a_failure_of_the_environment(wrong: Any) -> None:
    Paying.wrong = wrong
    recipe = paying_recipe(rollout={"retries": 0, "num_prompts": 8})
    drawn = prepare(recipe).source.draw(1, 0)
    failed = [r for g in drawn.sampled for r in g if r.has_failed]
    assert failed
    for rollout in failed:
        assert rollout.failures == (f"get_turn_reward returned {wrong!r}, not a finite number",)
