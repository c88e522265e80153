from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import killing
import pytest
import yaml


@pytest.fixture(scope="module")
def starters() -> Iterator[tuple[killing.Starter, killing.Starter]]:
    """Two, so that the disturbed and the undisturbed run have different hash seeds."""
    pair = killing.Starter(), killing.Starter()
    yield pair
    for starter in pair:
        starter.close()


# The tests with a sandbox and with a game are slow ones.
ENVIRONMENTS = ["calculator", *(pytest.param(name, marks=pytest.mark.slow) for name in ("python", "number_guess"))]
STEPS = 14
LOOP, CHECKPOINT, FILES = "posttrain.training.loop", "posttrain.training.checkpoint", "posttrain.store.checkpoint_files"
# Gaps between two changes of the disk, in which a kill leaves something half done.
GAPS = [
    ("posttrain.runs.launch", "_claim", "before", 1),
    ("posttrain.runs.launch", "_claim", "after", 1),
    ("posttrain.training.held_out", "evaluate_sampler", "after", 1),
    (LOOP, "save_checkpoint", "before", 1),
    (CHECKPOINT, "seal", "before", 1),
    (CHECKPOINT, "seal", "after", 1),
    ("posttrain.store.checkpoint_files", "sync_folder", "before", 1),
    (FILES, "sync_folder", "before", 2),
    (LOOP, "save_checkpoint", "after", 1),
    (LOOP, "mark_best", "before", 2),
    (LOOP, "prune_checkpoints", "before", 3),
    ("shutil", "rmtree", "before", 1),
]
# The last checkpoint is there, and nothing that comes later would mend what was left undone behind it.
LAST_GAPS = [(LOOP, "mark_best", "before", 1), (LOOP, "prune_checkpoints", "before", 1)]


@pytest.fixture(scope="module")
def whole(starters: tuple[killing.Starter, killing.Starter], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs, next to its recipe ``mine.yaml``."""
    folder = tmp_path_factory.mktemp("whole")
    content = killing.grpo_recipe(STEPS, ppo_epochs=2, num_minibatches=2, save_every=2)
    (folder / "mine.yaml").write_text(yaml.safe_dump(content | {"eval": killing.EVALUATION | {"every": 2}}))
    killing.run_undisturbed(starters[0], folder / "mine.yaml", folder / "whole")
    assert (folder / "whole" / "checkpoints" / "best").resolve().name == f"step-{STEPS:06d}"
    norms = [line["metrics"].get("grad_norm") for line in killing._lines(folder / "whole" / "metrics.jsonl")]
    assert min(norm for norm in norms if norm is not None) > 1e-4, "there was something to lose"
    return folder / "whole"


def test_kills_in_every_gap(starters: tuple[killing.Starter, killing.Starter], whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"

    def kill(gap: tuple[str, str, str, int]) -> int:
        starters[1].start(whole.parent / "mine.yaml", cut, gap)
        return starters[1].wait()

    assert [kill(gap) for gap in GAPS] == [-9] * len(GAPS)
    saves_left = (STEPS - (killing.newest_checkpoint(cut) or 0)) // 2
    assert saves_left > 0
    last = (LOOP, "save_checkpoint", "after", saves_left)
    assert [kill(gap) for gap in (last, *LAST_GAPS)] == [-9] * 3
    killing.run_undisturbed(starters[1], whole.parent / "mine.yaml", cut)
    assert killing.differences(whole, cut) == []


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_kills_in_the_middle_of_a_batch_of_several_turns(
    starters: tuple[killing.Starter, killing.Starter], tmp_path: Path, environment: str
) -> None:
    """Some completions are over then, some in their second turn, and some of the calls are running."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump(killing.turns_recipe(environment, 3)))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    killing.run_undisturbed(starters[0], recipe, whole)
    turns = [len(json.loads(row[0])) for row in killing._rows(whole, "rollouts", "turns")]
    assert sum(count > 1 for count in turns) > len(turns) // 4
    codes = []
    for reads, when in ((30, "before"), (9, "after"), (12, "before")):
        starters[1].start(recipe, cut, ("posttrain.sampling.episodes", "read_calls", when, reads))
        codes.append(starters[1].wait())
    killing.run_undisturbed(starters[1], recipe, cut)
    assert codes == [-9] * 3
    assert killing.differences(whole, cut) == []


def test_the_comparison_notices_every_kind_of_difference(whole: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(whole, changed, symlinks=True)
    assert killing.differences(whole, changed) == []
    name = f"step-{STEPS:06d}/optimizer.safetensors"
    (changed / "checkpoints" / name).write_bytes((whole / "checkpoints" / name).read_bytes()[:-1] + b"x")
    lines = (whole / "metrics.jsonl").read_text()
    (changed / "metrics.jsonl").write_text(lines.replace('"step": 2', '"step": 3'))
    with sqlite3.connect(changed / "rollouts.db") as db:
        for table in ("rollouts", "evaluation_rollouts"):
            db.execute(f"UPDATE {table} SET reward = 7 WHERE id = 1")
    found = [f"checkpoints/{name}", "metrics.jsonl", "rollouts.db: rollouts", "rollouts.db: evaluation_rollouts"]
    assert killing.differences(whole, changed) == found


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(killing.RECIPES))
def test_twenty_kills(starters: tuple[killing.Starter, killing.Starter], tmp_path: Path, kind: str) -> None:
    recipe, steps = tmp_path / "mine.yaml", 100
    recipe.write_text(yaml.safe_dump(killing.RECIPES[kind](steps)))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    killing.run_undisturbed(starters[0], recipe, whole)
    kills = killing.run_with_kills(starters[1], recipe, cut, killing.phases_to_aim_at(kind, 20), seed=1)
    assert killing.differences(whole, cut) == []
    assert json.loads((cut / "status.json").read_text())["state"] == "finished"
    assert len(json.loads((cut / "env.json").read_text())["starts"]) == len(kills) + 1
    counts = killing.count_rows(whole)
    assert counts["metrics lines"] == steps + steps // 4 + 1
    assert counts["evaluation rollouts"] == 8 * (steps // 4 + 1)
    assert len(kills) == 20
    assert killing.phases_to_meet(kind) <= {kill.met for kill in kills}
