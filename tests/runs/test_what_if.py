"""Futures of a run: exact without a change, and with one what an independent computation gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain as pt
from closeness import approx, rounding
from posttrain.api.what_if import WhatIf
from posttrain.errors import UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.launch import RunStart, launch
from posttrain.runs.what_if.changes import parse_changes
from posttrain.runs.what_if.plan import plan_futures
from posttrain.store.metrics import MetricsLog, is_evaluation
from posttrain.store.rollouts import RolloutStore
from posttrain.training.checkpoint import load_checkpoint
from posttrain.training.files import RunFiles
from posttrain.training.loop import open_loop
from posttrain.training.step import accumulate, apply_update, learning_rate
from posttrain.untrusted import declare_code
from small_runs import one_layer_recipe, run, same_bits, saved_tensors

STEPS = 6
# A schedule that depends on the number of steps, and a checkpoint after every second one.
TRAIN = {"steps": STEPS, "schedule": "linear", "save_every": 2, "keep_checkpoints": 3}
EVALUATION = {"every": 2, "num_examples": 4, "max_tokens": 10}


def grpo(**changes: Any) -> Recipe:
    train = TRAIN | changes.pop("train", {})
    return one_layer_recipe("grpo", **{"eval": EVALUATION, **changes, "train": train})


@contextmanager
def run_of(folder: Path, recipe: Recipe, **options: Any) -> Iterator[Path]:
    declare_code(recipe.dump(), Path(__file__).parent.parent)
    yield launch(recipe, RunStart(root=folder, name="run"), **options).folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with run_of(tmp_path_factory.mktemp("runs"), grpo()) as folder:
        yield folder


def play(run: Path, folder: Path, at: int, *changes: str, **options: Any) -> WhatIf:
    return pt.what_if(run, at=at, changes=changes, runs_dir=folder, jobs=1, progress=False, **options)


def step_metrics(folder: Path, first: int) -> list[tuple[int, str]]:
    rows = MetricsLog(folder / "metrics.jsonl").read()
    return [(row.step, json.dumps(row.metrics, sort_keys=True)) for row in rows if row.step > first]


def lrs(folder: Path) -> dict[int, float]:
    rows = MetricsLog(folder / "metrics.jsonl").read()
    return {row.step: row.metrics["lr"] for row in rows if not is_evaluation(row)}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("at", [2, 3])  # at a checkpoint, and replayed from one
def test_unchanged_future_of_a_finished_run_equals_it_to_the_bit(at: int, finished: Path, tmp_path: Path) -> None:
    before = files_of(finished)
    done = play(finished, tmp_path, at)
    future = done.run_of("unchanged")
    assert same_bits(saved_tensors(finished, STEPS), saved_tensors(future.folder, STEPS))
    assert step_metrics(future.folder, at) == step_metrics(finished, at)
    assert done.results.equality.weights
    assert done.results.equality.difference is None
    assert done.results.equality.num_steps == STEPS - at
    assert files_of(finished) == before


def test_shorter_future_has_the_schedule_of_the_run(finished: Path, tmp_path: Path) -> None:
    done = play(finished, tmp_path, 3, "train.lr=0.002", steps=2)
    assert lrs(done.run_of("unchanged").folder) == {4: lrs(finished)[4], 5: lrs(finished)[5]}
    # linear, without a warm-up: step k of 6 has lr * (1 - (k - 1) / 6)
    assert lrs(done.run_of("train.lr=0.002").folder) == {4: 0.002 * (1 - 3 / 6), 5: 0.002 * (1 - 4 / 6)}


def test_unchanged_future_of_an_interrupted_run_equals_the_undisturbed_one(finished: Path, tmp_path: Path) -> None:
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    with run_of(tmp_path / "cut", grpo(), should_stop=should_stop) as cut:
        status = RunDirectory(cut).read_status()
        assert status is not None
        assert (status.state, status.step) == ("stopped", 3)
        done = play(cut, tmp_path, 4)  # a step that the run has not reached
    assert done.results.equality.describe(done.results.plan).startswith("run did not record these steps")
    assert same_bits(saved_tensors(finished, STEPS), saved_tensors(done.run_of("unchanged").folder, STEPS))


def test_changed_key_equals_the_run_that_is_resumed_with_it(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=True)
    for step in (4, 6):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:06d}")
    changed = grpo(
        train={"lr": 0.01}, rollout={"num_prompts": 4, "group_size": 4, "max_tokens": 10, "temperature": 0.7}
    )
    run(copy, changed, resume=True)
    done = play(finished, tmp_path, 2, "train.lr=0.01 & rollout.temperature=0.7")
    (label,) = [label for label in done.results.labels() if label != "unchanged"]
    assert same_bits(saved_tensors(copy, STEPS), saved_tensors(done.run_of(label).folder, STEPS))
    assert step_metrics(done.run_of(label).folder, 2) == step_metrics(copy, 2)


def test_dropped_prompt_leaves_the_rows_of_the_others(finished: Path, tmp_path: Path) -> None:
    """The update of step 3 from the whole batch, of which the rows of prompt 1 are taken out by hand."""
    done = play(finished, tmp_path, 2, "drop prompt:1", steps=1)
    future = done.run_of("drop prompt:1").folder
    recipe = grpo()
    with open_loop(recipe, RunFiles.within(tmp_path / "by hand"), lambda event, info: None) as (loop, _):
        checkpoint = load_checkpoint(finished / "checkpoints", 2)
        assert checkpoint is not None
        loop.restore(checkpoint)
        whole = loop.parts.source(3).batch
        assert whole is not None
        batch = whole.select([row for row, group in enumerate(whole.group.tolist()) if group != 1])
        assert (whole.num_rows, batch.num_rows) == (16, 12)
        accumulate(loop.parts.method, batch, recipe.train, idle_rows="skip")
        own, _ = loop.parts.split_parameters()
        apply_update(loop.parts.optimizer, own, learning_rate(recipe.train, 3), 1.0, 0.0, 3)
        expected = {name: p.detach() for name, p in loop.parts.parameters}
        stored = saved_tensors(future, 3)
        for name, parameter in expected.items():
            assert torch.equal(stored[f"model.safetensors:{name}"], parameter), name
    rows = RolloutStore(future / "rollouts.db", read_only=True).training(3)
    untrained = [place for place, row in enumerate(rows) if row.advantage is None]
    assert (len(rows), untrained) == (16, [4, 5, 6, 7])  # sampled and recorded as before, and not trained on


def test_reward_that_is_set_changes_the_advantages_of_its_group_alone(finished: Path, tmp_path: Path) -> None:
    done = play(finished, tmp_path, 2, "reward 3.2=5", steps=1)
    before = RolloutStore(finished / "rollouts.db", read_only=True).training(3)
    after = RolloutStore(done.run_of("reward 3.2=5").folder / "rollouts.db", read_only=True).training(3)
    place = 3 * 4 + 2
    assert after[place].reward == 5.0
    assert [row.reward for row in after[:place]] == [row.reward for row in before[:place]]
    assert [row.advantage for row in after[:12]] == [row.advantage for row in before[:12]]
    rewards = torch.tensor([row.reward for row in before[12:]], dtype=torch.float64)
    rewards[2] = 5.0
    ours = torch.tensor([row.advantage for row in after[12:]], dtype=torch.float64)
    assert ours.argmax() == 2  # the answer that is praised
    assert torch.equal(ours.sign(), (rewards - rewards.mean()).sign())


def test_further_seeds_share_the_first_batch(finished: Path, tmp_path: Path) -> None:
    done = play(finished, tmp_path, 2, "train.lr=0.01", steps=2, seeds=2)
    rewards = {}
    for one in done.results.futures:
        rewards[one.future.label, one.future.seed] = [row.metrics["reward"] for row in one.steps]
    assert {values[0] for values in rewards.values()} == {
        MetricsLog(finished / "metrics.jsonl").read()[4].metrics["reward"]
    }
    assert rewards["unchanged", 0][1] != rewards["unchanged", 1][1]
    own = [sum(rewards["train.lr=0.01", seed]) / 2 - sum(rewards["unchanged", seed]) / 2 for seed in (0, 1)]
    difference = done.results.difference("train.lr=0.01", "reward")
    assert difference is not None
    assert difference.mean == approx(sum(own) / 2, abs=rounding(torch.float64, terms=4))
    assert difference.n == 2


def test_two_processes_play_what_one_does(tmp_path: Path) -> None:
    rewards = ["correct", "xml_format"]
    recipe = grpo(rewards=rewards, train={"steps": 4}, eval={"every": 0})
    with run_of(tmp_path, recipe) as folder:
        changes = ["train.lr=0.01", "drop prompt:0"]
        one = pt.what_if(folder, at=2, changes=changes, jobs=1, runs_dir=tmp_path, progress=False)
        two = pt.what_if(folder, at=2, changes=changes, jobs=2, runs_dir=tmp_path, progress=False)
    assert two.folder.name == "what-if-run-at-2-2"
    assert one.results.equality.holds
    assert two.results.equality.holds
    for label in one.results.labels():
        left, right = one.run_of(label).folder, two.run_of(label).folder
        assert same_bits(saved_tensors(left, 4), saved_tensors(right, 4))
        assert step_metrics(left, 2) == step_metrics(right, 2)


def test_futures_of_a_supervised_run(tmp_path: Path) -> None:
    # a quarter of a pass over 64 examples, 4 at a time: 4 steps
    train = {"steps": None, "num_epochs": 0.25, "lr": 1e-3, "save_every": 2}
    with run_of(tmp_path, one_layer_recipe("sft", train=train)) as folder:
        done = play(folder, tmp_path, 2, "drop prompt:1", "drop prompt:0+2")
        assert done.results.equality.holds
        tokens = {
            label: done.results.of(label)[0].steps[0].metrics["trained_tokens"] for label in done.results.labels()
        }
        assert tokens["drop prompt:1"] < tokens["unchanged"]
        assert done.results.training.name == "loss"
        with pytest.raises(UsageError, match=r"reward 0\.0=1: .*rewards"):
            play(folder, tmp_path, 2, "reward 0.0=1")


def test_futures_from_within_a_rollout_batch(tmp_path: Path) -> None:
    recipe = grpo(train={"steps": 6, "num_minibatches": 2, "save_every": 1, "keep_checkpoints": 6})
    with run_of(tmp_path, recipe) as folder:
        done = play(folder, tmp_path, 3, "train.lr=0.01")
        assert done.results.equality.holds
        with pytest.raises(UsageError, match=r"drop prompt:0: step 4 .* step 3\. Give --at 2, or --at 4"):
            play(folder, tmp_path, 3, "drop prompt:0")
        with pytest.raises(UsageError, match=r"train.num_minibatches=1: .*--at"):
            play(folder, tmp_path, 3, "train.num_minibatches=1")


def test_futures_of_batches_that_were_sampled_ahead(tmp_path: Path) -> None:
    sampled = {"num_prompts": 4, "group_size": 4, "max_tokens": 10, "temperature": 1.5, "staleness": 1}
    with run_of(tmp_path, grpo(rollout=sampled, eval={"every": 0})) as folder:
        done = play(folder, tmp_path, 3, "drop prompt:1", "reward 2.0=7", steps=1)
    assert done.results.equality.holds
    assert done.results.equality.num_steps == 1
    rows = RolloutStore(done.run_of("reward 2.0=7").folder / "rollouts.db", read_only=True).training(4)
    assert rows[8].reward == 7.0
    dropped = RolloutStore(done.run_of("drop prompt:1").folder / "rollouts.db", read_only=True).training(4)
    assert [row.advantage is None for row in dropped] == [False] * 4 + [True] * 4 + [False] * 8


def test_change_without_effect_is_named(finished: Path, tmp_path: Path) -> None:
    done = play(finished, tmp_path, 4, "train.warmup_steps=1", steps=1)
    assert done.results.idle() == []  # the schedule falls from there, so the rate is another
    done = play(finished, tmp_path, 4, "eval.every=3", steps=1)
    assert done.results.idle() == ["eval.every=3"]
    assert any("no effect" in note for note in done.results.notes())


def test_results_can_be_read_again(finished: Path, tmp_path: Path) -> None:
    done = play(finished, tmp_path, 4, "train.lr=0.01,0.002", steps=1, name="mine")
    again = pt.load_what_if(tmp_path / "mine")
    assert again.results == done.results
    table = again.results.table()
    assert [line[0] for line in table.lines] == ["unchanged", "train.lr=0.01", "train.lr=0.002"]
    assert (again.picture, list(again.runs)) == (
        tmp_path / "mine" / "futures.png",
        ["unchanged", "train.lr-0.01", "train.lr-0.002"],
    )
    content = json.loads((tmp_path / "mine" / "results.json").read_text())
    assert content["equality"]["holds"]
    with pytest.raises(UsageError, match=r"what-if\.json"):
        pt.load_what_if(finished)


def test_future_that_fails_leaves_the_others(finished: Path, tmp_path: Path) -> None:
    done = play(finished, tmp_path, 4, "train.lr=1e30", steps=2)
    assert list(done.results.failures) == ["train.lr=1e30"]
    assert "NonFiniteLoss" in done.results.failures["train.lr=1e30"]
    assert done.results.equality.holds
    with pytest.raises(UsageError, match="unchanged"):
        done.run_of("train.lr=1e30")


def test_a_run_that_differs_is_reported(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=True)
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    place = next(place for place, row in enumerate(rows) if row["step"] == 5)
    rows[place]["metrics"]["reward"] += 1e-12
    (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    equality = play(copy, tmp_path, 4, steps=1).results.equality
    assert not equality.holds
    assert equality.difference is not None
    assert equality.difference.startswith("reward at step 5")


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["train.lr=1e-4,3e-4"], ["train.lr=1e-4", "train.lr=3e-4"]),
        (["drop", "prompt:3", "reward", "3.2=0"], ["drop prompt:3", "reward 3.2=0"]),
        (["drop prompt:0-2,5+6"], ["drop prompt:0", "drop prompt:1", "drop prompt:2", "drop prompt:5+6"]),
        (["reward 1.0=0,-1.5"], ["reward 1.0=0", "reward 1.0=-1.5"]),
        (["eval.tasks=[{name: a, size: 3}, b]"], ["eval.tasks=[{name: a, size: 3}, b]"]),
        (["a.b=1 & c=[1, 2]"], ["a.b=1 & c=[1, 2]"]),
    ],
)
def test_read_changes_makes_a_future_of_each_value(words: list[str], labels: list[str]) -> None:
    assert [change.label for change in parse_changes(words)] == labels


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train.lr"], "KEY=VALUE"),
        (["train.lr="], "train.lr="),
        (["train.lr=1,,2"], "train.lr"),
        (["dorp prompt:3"], "Did you mean drop"),
        (["drop"], "drop"),
        (["drop", "3"], "drop prompt:3"),
        (["drop prompt:x"], "'x'"),
        (["drop prompt:5-2"], "2-5"),
        (["drop prompt:1+1"], "duplicate"),
        (["reward 3=0"], "reward 3.2=0"),
        (["reward 3.2=nan"], "'nan'"),
        (["train.lr=1", "train.lr=1"], "twice"),
    ],
)
def test_read_changes_refuses_by_name(words: list[str], named: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_changes(words)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("at", "words", "steps", "seeds", "named"),
    [
        (0, [], None, 1, "the first is at step 2"),
        (1, [], None, 1, "Give --at 2"),
        (6, [], None, 1, "below 6"),
        (4, [], 3, 1, "Give 2 or fewer"),
        (2, ["model.name=tiny"], None, 1, "model.name cannot change"),
        (2, ["optimizer=muon"], None, 1, "optimizer.name cannot change"),
        (2, ["train.ema_decay=0.9"], None, 1, "train.ema_decay cannot change"),
        (2, ['train.lr_ratios={"*embed*": 0}'], None, 1, "train.lr_ratios cannot change"),
        (2, ["train.save_every=1"], None, 1, "train.save_every"),
        (2, ["scale.processes=2"], None, 1, "scale.processes=2"),
        (2, ["train.lr=0.001"], None, 1, "already"),
        (2, ["train.lrr=0.1"], None, 1, "train.lr"),
        (2, ["train.lr=fast"], None, 1, "train.lr"),
        (2, ["train.steps=3"], None, 1, "Give 6 or more"),
        (2, ["drop prompt:4"], None, 1, "from 0 to 3"),
        (2, ["drop prompt:0+1+2+3"], None, 1, "Keep at least one"),
        (2, ["reward 0.4=1"], None, 1, "from 0 to 3"),
        (2, ["train.seed=3"], None, 2, "--seeds"),
        (2, [], 1, 2, "--steps"),
    ],
)
def test_plan_refuses_by_name(
    at: int, words: list[str], steps: int | None, seeds: int, named: str, finished: Path
) -> None:
    with pytest.raises(UsageError) as refusal:
        plan_futures(finished, at, words, steps, seeds)
    assert named in str(refusal.value)


def test_run_without_a_whole_checkpoint_is_refused_by_name(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=True)
    weights = copy / "checkpoints" / "step-000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert plan_futures(copy, 4, [], None, 1).plan.checkpoint == 2  # the one before, replayed
    shutil.rmtree(copy / "checkpoints" / "step-000002")
    with pytest.raises(UsageError, match=r"step-000004: model\.safetensors"):
        plan_futures(copy, 5, [], None, 1)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UsageError, match="has no checkpoint"):
        plan_futures(copy, 5, [], None, 1)


def test_run_that_went_on_with_another_recipe_is_refused_before_it(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=True)
    stored = RunDirectory(copy)
    recipe = grpo(train={"lr": 0.5})
    stored.write_recipe(recipe)
    with pytest.raises(UsageError, match=r"train\.lr"):
        plan_futures(copy, 4, [], None, 1)


def test_plan_of_a_run_keeps_its_recipe(finished: Path) -> None:
    planned = plan_futures(finished, 2, ["train.lr=0.01"], None, 2)
    names = [future.name for future in planned.plan.futures]
    assert names == ["unchanged", "unchanged-seed1", "train.lr-0.01", "train.lr-0.01-seed1"]
    assert planned.recipes["unchanged"].dump() == planned.recipe.dump()
    changed = replace(planned).recipes["train.lr-0.01-seed1"].train
    assert (changed.lr, changed.seed, changed.steps) == (0.01, 1, STEPS)
