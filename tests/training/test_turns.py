"""Training on completions of several turns: what was told is no part of it, and a failed episode is no reward of 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from closeness import OF_EMBEDDED, allclose, approx
from posttrain.commands.runs import _last_episode
from posttrain.errors import RunFailure
from posttrain.sampling.environments.contract import EnvironmentFailed
from posttrain.training.build import prepare
from posttrain.training.sources.stored import read_drawn, write_drawn
from posttrain.training.step import accumulate
from posttrain.types import Rollout
from posttrain.untrusted import declare_code
from refusing import refuses
from small_runs import one_layer_recipe, recorded, run, steps_of

TEXTS = [
    " <tool>guess: 4</tool>",
    " <tool>guess: 2</tool>",
    " it is <tool>guess: 6</tool>",
    " I see </think> <answer> 7 </answer>",
]
GAME = {"name": "number_guess", "high": 7, "guesses": 3}


class Unsure:
    """Fails by itself for some seeds and texts, as often as it is asked to."""

    broken: ClassVar[set[str]] = set()

    def reset(self, seed: int) -> str:
        self.score = 0.0
        return f"Say {seed % 7}."

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: the guess.
        """
        if str(number) in Unsure.broken:
            raise EnvironmentFailed(f"no {number} today")
        self.score += number
        return "go on"

    def get_reward(self) -> float:
        return self.score


def game_recipe(environment: Any = GAME, **changes: Any) -> Any:
    declare_code(["choosing_engine:choosing", "test_turns:Unsure"])
    rollout = {
        "engine": {"name": "choosing_engine:choosing", "texts": TEXTS},
        "num_prompts": 3,
        "group_size": 4,
        "max_tokens": 200,
        "temperature": 1.0,
        "max_turns": 4,
        "show_tools": False,
    }
    changes = dict(changes)
    return one_layer_recipe(
        "grpo",
        task={"name": "episodes", "size": 16},
        environment=environment,
        rewards=["environment", {"name": "tool_calls", "weight": -0.01}],
        rollout=rollout | changes.pop("rollout", {}),
        **changes,
    )


def test_the_gradient_is_that_of_the_model_s_own_tokens_worked_by_hand() -> None:
    words = {"objective": "reinforce", "advantage": "centered", "aggregate": "token_mean"}
    recipe = game_recipe(**words)
    parts = prepare(recipe)
    drawn = parts.source(1)
    assert drawn.batch is not None
    loss, _ = accumulate(parts.method, drawn.batch, recipe.train)
    ours = [None if p.grad is None else p.grad.clone() for p in parts.model.parameters()]
    parts.model.zero_grad()

    groups: dict[int, list[Rollout]] = {}
    for rollout in drawn.rollouts:
        groups.setdefault(rollout.prompt_index, []).append(rollout)
    assert sum(len(r.turns) > 1 for r in drawn.rollouts) > 3
    assert any(not all(r.completion.own) for r in drawn.rollouts)
    total = sum(r.completion.num_own for r in drawn.rollouts)
    by_hand, largest = torch.zeros(()), 0.0
    for group in groups.values():
        mean = sum(r.reward for r in group) / len(group)
        for rollout in group:
            largest = max(largest, abs(rollout.reward - mean))
            ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion.ids]])
            logits = parts.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
            logprobs = logits.log_softmax(-1)[range(len(rollout.completion.ids)), list(rollout.completion.ids)]
            for logprob, own in zip(logprobs, rollout.completion.own, strict=True):
                if own:
                    by_hand = by_hand - (rollout.reward - mean) * logprob / total
    by_hand.backward()
    # a mean of log-probabilities with these weights: of one sign within a rollout, of either between them
    bound = largest * OF_EMBEDDED / len(drawn.rollouts) ** 0.5
    assert loss == approx(float(by_hand.detach()), abs=bound)
    assert abs(loss) > max(1e-3, 20 * bound)
    for grad, parameter in zip(ours, parts.model.parameters(), strict=True):
        assert allclose(grad, parameter.grad, atol=1e-6)
    assert int(drawn.batch.mask.sum()) == total


def test_ratios_are_one_on_the_first_pass_and_lengths_are_the_models_own(tmp_path: Path) -> None:
    run(tmp_path, game_recipe(train={"steps": 2, "lr": 1e-4}))
    first = steps_of(tmp_path)[0]
    assert first["ratio"] == approx(1.0, abs=1e-4)
    assert first["kl_sampler"] == approx(0.0, abs=1e-6)
    rows = [row for row in recorded(tmp_path)[0] if row.step == 1]
    assert first["completion_length"] == approx(sum(row.num_own for row in rows) / len(rows))
    assert first["trained_tokens"] == sum(row.num_own for row in rows)
    assert first["num_turns"] == approx(sum(len(row.turns) for row in rows) / len(rows))
    for row in rows:
        assert row.token_ids is not None
        assert row.own is not None
        assert len(row.own) == row.num_tokens
        assert row.turns[-1].text == row.completion
        assert row.parts["tool_calls"] == sum(len(turn.calls) for turn in row.turns)
    newest = recorded(tmp_path)[0][-1]
    shown = _last_episode(tmp_path)
    assert shown[0].startswith(f"\nthe last of step 2: {len(newest.turns)} turn")
    assert shown[1:3] == ["Let's play.", ""]
    assert shown[3] == "Find a number from 1 to 7 with 3 guesses."
    assert "\n".join(shown[4:]) == newest.transcript


def test_a_failed_completion_is_left_out_and_the_rest_of_its_group_compared() -> None:
    Unsure.broken = {"6"}
    recipe = game_recipe("test_turns:Unsure", advantage="leave_one_out", rollout={"retries": 1, "num_prompts": 8})
    drawn = prepare(recipe).source(1)
    failed = [r for r in drawn.rollouts if r.has_failed]
    assert 0 < len(failed) < len(drawn.rollouts)
    assert all(r.failures == ("tool 'guess': no 6 today",) * 2 for r in failed)
    groups: dict[int, list[Rollout]] = {}
    for rollout in drawn.rollouts:
        groups.setdefault(rollout.prompt_index, []).append(rollout)
    trained = []
    for group in groups.values():
        played = [r for r in group if not r.has_failed]
        if len(played) < 2:
            message = f"left out: {len(played)} of 4 completions in this group finished"
            assert all(r.failures[-1] == message and r.advantage is None for r in played)
            continue
        rewards = torch.tensor([r.reward for r in played], dtype=torch.float64)
        expected = (rewards - rewards.mean()) * (len(played) / (len(played) - 1))
        assert [r.advantage for r in played] == approx(expected.tolist())
        trained += played
    assert all(r.advantage is None for r in failed)
    assert drawn.batch is not None
    rows = [tuple(drawn.batch.tokens[b, :n].tolist()) for b, n in enumerate(drawn.batch.lengths.tolist())]
    assert rows == [(*r.prompt_ids, *r.completion.ids) for r in trained]
    assert len({len([r for r in g if not r.has_failed]) for g in groups.values()}) > 1, "groups of several sizes"
    share = len(failed) / len(drawn.rollouts)
    assert drawn.metrics["environment_failures"] == drawn.metrics["played_again"] == approx(share)
    assert drawn.metrics["reward"] == approx(
        sum(r.reward for r in drawn.rollouts if not r.has_failed) / (len(drawn.rollouts) - len(failed))
    )


def test_an_environment_that_never_works_stops_the_run_with_its_reason() -> None:
    Unsure.broken = {"2", "4", "6"}
    recipe = game_recipe(
        "test_turns:Unsure", rollout={"retries": 0, "engine": {"name": "choosing_engine:choosing", "texts": TEXTS[:3]}}
    )
    with refuses(RunFailure, "environment", "retries: 0)"):
        prepare(recipe).source(1)


def test_a_drawn_batch_comes_back_whole_from_another_process() -> None:
    Unsure.broken = {"6"}
    source = prepare(game_recipe("test_turns:Unsure")).source
    drawn = source.draw(1, 0)
    again = read_drawn(write_drawn(drawn), source)
    assert [r for g in again.sampled for r in g] == [r for g in drawn.sampled for r in g]
    assert any(r.failures for g in again.sampled for r in g)
