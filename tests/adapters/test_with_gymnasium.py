"""FrozenLake of gymnasium, drawn by ``render_mode="ansi"``, crossed in the turns of a training batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.data.render import encode_prompt
from posttrain.data.render.template import build_template
from posttrain.models.load import load_tokenizer
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import validate_recipe
from posttrain.sampling.episodes import build_stage
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import RolloutRequest, Sampler, build_grader, collect
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Example, Message

pytestmark = pytest.mark.adapters
LAKE = {"name": "gymnasium_adapter:gymnasium", "id": "FrozenLake-v1", "options": {"is_slippery": False}}
NAMES = ["left", "down", "right", "up"]
WAY = ["down", "down", "right", "right", "down", "right"]
EPISODES = Path(__file__).parents[2] / "contrib" / "episodes.yaml"


def test_the_lake_is_crossed_in_six_turns() -> None:
    import gymnasium

    tokenizer = load_tokenizer(str(TINY))
    recipe = validate_recipe(
        {
            "task": "episodes",
            "environment": {**LAKE, "actions": NAMES},
            "rewards": ["environment", {"name": "turn_rewards", "weight": 0.5}],
            "rollout": {"max_turns": 8},
            "objective": "grpo",
        }
    ).resolve()
    stage = build_stage(recipe, build_template(recipe.prompt.template), tokenizer)
    assert stage is not None
    end = tokenizer.eos_token_id
    script = [[*tokenizer.encode(f" <tool>act: {one}</tool>", add_special_tokens=False), end] for one in WAY]
    engine = FakeEngine(lambda prompt, key: script[prompt.count(end)])
    sampler = Sampler(engine, tokenizer, build_grader(recipe.rewards, stage.template), 2000, stage=stage)
    example = Example("lake", (Message("user", "Cross the lake."),))
    prompts = [encode_prompt(tokenizer, stage.template, example.messages)]
    request = RolloutRequest([example], prompts, sampler.sampling(1000, 1.0), (3, "rollout 0", 1), 2)
    for one in collect(sampler, request)[0][0]:
        assert "Actions: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG" in tokenizer.decode(one.prompt_ids)
        assert (one.completion.finish, one.reward) == ("ended", 1.5)
        assert one.turns[-1].calls[0].result == "  (Right)\nSFFF\nFHFH\nFFFH\nHFF[G]"
        drawn = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
        drawn.reset(seed=0)
        for name, turn in zip(WAY, one.turns, strict=True):
            drawn.step(NAMES.index(name))
            shown = drawn.render().replace("\x1b[41m", "[").replace("\x1b[0m", "]").strip("\n")
            assert turn.calls[0].result == shown


def test_a_model_is_trained_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "lake.yaml"
    recipe.write_text(f"extends: {EPISODES}\nenvironment: {LAKE}\n")
    small = [
        "--rollout.num_prompts",
        "2",
        "--rollout.group_size",
        "4",
        "--train.steps",
        "2",
        "--eval.every",
        "0",
        "--quiet",
    ]
    assert main(["train", str(recipe), "--runs-dir", str(tmp_path), "--run", "x", *small]) == 0, capsys.readouterr().err
    rows = RolloutStore(tmp_path / "x" / "rollouts.db", read_only=True).training()
    assert len(rows) == 16
    assert all("[S]FFF" in row.prompt for row in rows)
