"""An environment of verifiers as a task: rows, rewards by its rubric, and training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from closeness import approx
from posttrain import registry
from posttrain.errors import UnallowedCode, UsageError
from posttrain.untrusted import declare_code
from refusing import refuses

pytestmark = pytest.mark.adapters
verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed")
if not hasattr(verifiers, "SingleTurnEnv"):
    pytest.skip("this verifiers has no load_environment", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parent))
LOAD = "verifiers_shouting:load_environment"


@pytest.fixture(autouse=True)
def _allowed() -> None:
    declare_code(["verifiers_adapter:verifiers_rows", "verifiers_adapter:verifiers_rubric", LOAD])


def task(**options: Any) -> Any:
    return registry.find("task", "verifiers_adapter:verifiers_rows").bind({"load": LOAD, **options})()


def test_rows_have_the_prompt_and_the_answer_of_the_environment() -> None:
    train, held_out = task(), task(split="validation", args={"size": 4})
    assert (len(train.examples), len(held_out.examples)) == (8, 3)
    first = train.examples[1]
    assert [(one.role, one.content) for one in first.messages] == [("system", "Be loud."), ("user", "Say 1.")]
    assert (first.answer, first.meta["verifiers"]["info"]) == ("1", {"n": 1})


def test_rubric_gives_the_reward_of_verifiers_with_its_parts() -> None:
    examples = list(task().examples)[:2]
    texts = ["IT IS 0", "it is 7"]
    reward = registry.find("reward", "verifiers_adapter:verifiers_rubric").bind({"load": LOAD})
    found = reward(example=examples, text=texts, finish=["stop", "length"])
    assert [one.value for one in found] == approx([4 / 7 + 2.0, 0.0])
    assert found[0].info == approx(
        {"rubric/shouts": 4 / 7, "rubric/is_answered": 1.0, "rubric/brief": -0.07, "rubric/num_turns": 1.0}
    )


def test_environment_that_answers_the_model_and_a_package_without_function_are_refused() -> None:
    with refuses(UsageError, "task.load", "ToolEnv", "verifiers_episodes"):
        task(args={"turns": 3})
    with refuses(UsageError, "task.load", "my_env:load_environment"):
        task(load="owner/my-env")
    with refuses(UsageError, "task.load", "no_such_option"):
        task(args={"no_such_option": 1})
    with refuses(UnallowedCode, "somebody:load_environment"):
        task(load="somebody:load_environment")


def test_training_records_the_rubric(tmp_path: Path) -> None:
    run = pt.train(
        {"extends": "tiny/grpo", "task": {"name": "verifiers_adapter:verifiers_rows", "load": LOAD},
         "rewards": [{"name": "verifiers_adapter:verifiers_rubric", "load": LOAD}], "prompt": {"template": "chat"}},
        steps=2, eval__every=0, rollout={"num_prompts": 2, "group_size": 2, "max_tokens": 8},
        runs_dir=tmp_path, run="mine", progress=False,
    )  # fmt: skip
    rows = [row for step in (1, 2) for row in run.rollouts(step=step)]
    assert len(rows) == 8
    for row in rows:
        parts = row.parts
        assert row.reward == approx(parts["rubric/shouts"] + 2 * parts["rubric/is_answered"], abs=1e-12)
        assert parts["rubric/num_turns"] == 1.0
        assert row.own is None, "one turn: all that was sampled is trained, and nothing else"
    assert all("reward/rubric/shouts" in metrics for metrics in run.metrics)
