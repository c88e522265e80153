"""Words that do not belong together are refused by name, through the command line, before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from test_refusals import GOOD_ROWS, REWARDS, RL, SFT, Command, contents, write_rows


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe of either kind, and what they name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bad_input_rewards", raising=False)
    for name, recipe in (("rl", RL), ("sft", SFT)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "bad_input_rewards.py").write_text(REWARDS)
    write_rows(GOOD_ROWS)
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


APART = [
    ("--advantage gae", "advantage"),
    ("--objective ppo --advantage centered", "'centered'"),
    ("--objective dpo --advantage centered", "advantage"),
    ("--advantage leave_one_out --rollout.group_size 1", "rollout.group_size=1: advantage 'leave_one_out'"),
    (
        "--advantage batch_normalized --advantage.center group --rollout.group_size 1",
        "rollout.group_size=1: advantage 'batch_normalized'"
    ),
    ("--aggregate unit_mean", "'unit_mean'"),
    ("--objective dpo --aggregate token_mean", "'token_mean'"),
    ("--rollout.select right_and_wrong", "'grpo'"),
    ("--objective dpo --rollout.select every", "'every'"),
    ("--objective dpo --rollout.group_size 1", "rollout.select"),
    ("--advantage return_to_go --rollout.select best_of", "rollout.select"),
    ("--objective dpo --kl_in_reward.weight 0.1", "kl_in_reward"),
    (
        "--kl_in_reward.weight 0.1 --kl_in_reward.target 6 --kl_in_reward.horizon 1",
        "kl_in_reward.horizon"
    ),
    (
        "--objective dpo --correction token_tis --rollout.old_logprobs trainer",
        "correction"
    ),
    ("--head.trunk shared", "head:"),
    ("--objective bradley_terry --head.trunk shared", "head.trunk"),
    ("--objective bradley_terry --eval.num_kl_prompts 4", "'bradley_terry'"),
    ("--objective bradley_terry --eval.samples 2 --eval.temperature 1", "eval.samples"),
    ("--eval.samples 2", "'temperature'"),
    ("--eval.items first --eval.items_seed 1", "'items_seed'"),
    ("--objective process", "objective"),
    ("--objective distillation", "'distillation'"),
    ("--teacher.name self", "'grpo'"),
    ("--objective sdpo --teacher.name tiny", "teacher.name"),
    ("--objective distillation --teacher.name tiny --teacher.sees solution", "teacher.sees"),
    ("--objective distillation --teacher.name tiny --teacher.weights ema", "teacher.weights"),
    ("--objective sdpo --teacher.name self --teacher.sees environment", "teacher.sees"),
    ("--objective sdpo --teacher.name self --teacher.sees answers", "teacher.sees"),
    ("--objective sdpo --teacher.name self --teacher.weights ema --teacher.ema_decay 1", "teacher.ema_decay"),
    ("--objective sdpo --teacher.name self --teacher.weights ema --scale.sharding fsdp2", "teacher.weights"),
    ("--objective sdpo --teacher.name self --advantage null --rollout.group_size 1", "rollout.group_size"),
    ("--advantage raw --rollout.group_size 1 --rollout.drop_uniform_groups true", "with one completion"),
    ("--objective dpo --objective.beta 0", "objective.beta"),
    ("--rollout.select above", "rollout.select.threshold"),
    ("--rollout.select {}", "rollout.select.name: "),
    ("--rollout.engine native --rollout.engine.slots 0", "rollout.engine.slots"),
    ("--rollout.engine native --rollout.engine.cache_tokens 100", "'cache_tokens'"),
    (
        "--rollout.engine vllm --rollout.engine.colocate true",
        "rollout.engine.colocate"
    ),
    ("--rollout.engine vllm --rollout.engine.url ftp://there", "rollout.engine.url"),
    (
        "--objective mpo --objective.preference_weight 0 --objective.quality_weight 0 --objective.nll_weight 0",
        "preference_weight, quality_weight, nll_weight"
    ),
    (
        "--objective kto --objective.desirable_weight 0 --objective.undesirable_weight 0",
        "desirable_weight, undesirable_weight"
    ),
    ("--rewards.0.weight 0", "rewards: all weights are 0"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), APART)
def test_words_that_do_not_belong_together(arguments: str, message: str, command: Command) -> None:
    text = command.fails(2, "train", "rl.yaml", *arguments.split())
    assert message in text
    if (arguments, message) in APART[::4]:
        assert command.fails(2, "train", "rl.yaml", *arguments.split(), "--dry-run") == text
    assert contents("runs") == {}


def test_a_measure_that_no_evaluation_has_is_known_behind_the_first_one(command: Command) -> None:
    options = ("--eval.every", "1", "--eval.num_examples", "2", "--eval.best", "ftness")
    assert "eval.best: no evaluation measures 'ftness'" in command.fails(2, "train", "rl.yaml", *options)
    assert contents("runs") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--objective grpo", "objective 'grpo' needs ['advantages', 'old_logprobs'], which come from rollouts"),
        ("--objective dpo", "task 'jsonl': no rows left to train on; dropped: 30 × no given responses"),
        ("--objective distillation --teacher.name self", "teacher.name: 'self' needs sampled answers"),
    ],
)  # fmt: skip
def test_what_given_data_cannot_do(arguments: str, message: str, command: Command) -> None:
    task = ["--task", "{name: jsonl, path: rows.jsonl, split: all}"]
    assert message in command.fails(2, "train", "sft.yaml", *task, *arguments.split())
    assert contents("runs") == {}
