"""Runs in several processes, as the command line starts them: how they end, and how they go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from other_processes import is_alive
from posttrain.errors import PeerFailure, UsageError
from posttrain.recipes.recipe import validate_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.launch import RunStart, launch
from posttrain.store.checkpoint_files import checkpoint_steps
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore
from refusing import refuses
from small_runs import (
    MOST_SECONDS,
    Events,
    end_of,
    make_recipe,
    same_bits,
    saved_tensors,
    shallow,
    start,
    train_command,
)

TESTS = Path(__file__).parent
SHORT = {"num_prompts": 4, "group_size": 2, "max_tokens": 6, "temperature": 1.5}


def recipe_of(reward: str, processes: int = 2, **options: Any) -> Any:
    return make_recipe(
        "grpo",
        rewards=[{"name": f"rank_components:{reward}", **options}],
        rollout=SHORT,
        train={"steps": 4, "lr": 1e-4, "save_every": 1, "keep_checkpoints": 9},
        scale={"processes": processes},
        model={"name": shallow(1), "dtype": "float64"},
    )


def environment() -> dict[str, str]:
    places = [str(TESTS), str(TESTS.parent), *(p for p in sys.path if p)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}


def started(folder: Path, recipe: Any, *options: str) -> subprocess.Popen[str]:
    return start(train_command(folder, recipe, *options), environment())


def ended(folder: Path, recipe: Any, *options: str) -> tuple[int, str]:
    """(exit code, what it said on the standard error) of a command."""
    return end_of(started(folder, recipe, *options))


def test_a_run_in_two_processes_is_stopped_and_goes_on_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS)
    events = Events()
    recipe = recipe_of("asks_to_stop", after=3)
    launched = launch(recipe, RunStart(root=tmp_path, name="it"), observer=events)
    assert (launched.step, launched.reason) == (1, "interrupted")
    assert not list((tmp_path / "it").glob("log-*.txt")), "nobody said anything"
    assert "LOCAL_WORLD_SIZE" not in os.environ
    alone = recipe.model_copy(update={"scale": recipe.scale.model_copy(update={"processes": 1})})
    again = launch(alone, RunStart(root=tmp_path, name="it", resume=True), observer=events)
    assert (again.step, again.reason) == (4, "finished")
    warnings = [info["message"] for info in events.of("notice")]
    assert any("scale.processes: 2 in the run, 1 now" in text for text in warnings)
    assert any("resuming with 1 process, but the checkpoint was saved with 2 processes" in text for text in warnings)


@pytest.mark.slow
def test_what_fails_in_another_process_ends_all_with_its_message(tmp_path: Path) -> None:
    code, error = ended(tmp_path, recipe_of("raises_in_rank_one", after=6))
    assert code == 1
    assert "'rank_components:raises_in_rank_one'" in error
    assert "no reward today" in error
    assert "Traceback" not in error
    run = RunDirectory(tmp_path / "runs" / "it")
    status = run.read_status()
    assert status is not None
    assert status.state == "failed"
    assert "no reward today" in status.message
    assert checkpoint_steps(run.folder / "checkpoints")[-1] == 1


@pytest.mark.slow
def test_a_process_that_is_killed_ends_all_and_the_run_goes_on(tmp_path: Path) -> None:
    code, error = ended(tmp_path, recipe_of("kills_rank_one", after=6))
    assert code == 1
    assert "2: the process" in error
    assert "Traceback" not in error
    run = tmp_path / "runs" / "it"
    assert checkpoint_steps(run / "checkpoints")[-1] == 1
    code, error = ended(tmp_path, recipe_of("kills_rank_one", 1, after=6), "--resume")
    assert (code, checkpoint_steps(run / "checkpoints")[-1]) == (0, 4), error
    steps = [row.step for row in MetricsLog(run / "metrics.jsonl").read() if "loss" in row.metrics]
    assert steps == [1, 2, 3, 4], "none is doubled, none skipped"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_while_it_writes_its_share_leaves_the_checkpoint_before(
    killed: int, tmp_path: Path
) -> None:
    """And the run goes on from that, to the bits of one that nobody killed."""
    scale = {"processes": 2, "sharding": "fsdp2", "checkpoint": "sharded"}
    train = {"steps": 3, "save_every": 1, "keep": 9, "lr": 1e-4}
    objective = {"name": "rank_components:dies_while_saving", "rank": killed}
    mortal = make_recipe("sft", objective=objective, scale=scale, train=train)
    code, error = ended(tmp_path, mortal)
    assert code in (1, -signal.SIGKILL), error
    assert "Traceback" not in error
    checkpoints = tmp_path / "runs" / "it" / "checkpoints"
    assert checkpoint_steps(checkpoints) == [1]
    healthy = {**objective, "rank": 9}
    recipe = make_recipe("sft", objective=healthy, scale=scale, train=train)
    code, error = ended(tmp_path, recipe, "--resume", "--accept-changes")
    assert (code, checkpoint_steps(checkpoints)) == (0, [1, 2, 3]), error
    assert [item.name for item in checkpoints.iterdir() if item.name.startswith(".")] == []
    (tmp_path / "whole").mkdir()
    assert ended(tmp_path / "whole", recipe)[0] == 0
    ours, theirs = (saved_tensors(folder / "runs" / "it", 3) for folder in (tmp_path, tmp_path / "whole"))
    assert same_bits(ours, theirs)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize("killed", ["the first", "the other"])
def test_no_process_outlives_one_that_is_killed(killed: str, tmp_path: Path) -> None:
    """Rank 1 hangs in a reward; rank 0 waits for it in an exchange."""
    note = tmp_path / "note"
    process = started(tmp_path, recipe_of("stops_in_rank_one", after=6, note=str(note)))
    deadline = time.monotonic() + MOST_SECONDS
    while not (note.is_file() and note.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    other = int(note.read_text())
    os.kill(process.pid if killed == "the first" else other, signal.SIGKILL)
    code = process.wait(MOST_SECONDS)
    while is_alive(other) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(other)
    assert code == (-signal.SIGKILL if killed == "the first" else 1)
    code, error = ended(tmp_path, recipe_of("stops_in_rank_one", 1, after=6, note=str(note)), "--resume")
    assert code == 0, error


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path: Path) -> None:
    command = train_command(tmp_path, recipe_of("fine", 1))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", *command[2:]]
    done = subprocess.run(torchrun, env=environment(), capture_output=True, text=True, timeout=MOST_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run:") == 1, "only the first process reports"
    launch(recipe_of("fine"), RunStart(root=tmp_path / "runs", name="launched"))
    assert same_bits(saved_tensors(tmp_path / "runs" / "launched", 4), saved_tensors(tmp_path / "runs" / "it", 4))


@pytest.mark.slow
def test_ctrl_c_saves_once(tmp_path: Path) -> None:
    code, error = ended(tmp_path, recipe_of("asks_to_stop", after=3))
    assert code == 130
    assert error.count("stopping after this step") == 1
    assert checkpoint_steps(tmp_path / "runs" / "it" / "checkpoints") == [1]


def test_a_process_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with refuses(PeerFailure, "2: the process"):
        launch(recipe_of("fine"), RunStart(root=tmp_path, name="two"))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({"processes": 0}, "scale.processes"),
        ({"process": 2}, "'processes'"),
        ({"sharding": "fsdp"}, "scale.sharding"),
    ],
)
def test_a_scale_that_there_is_not_is_refused(scale: dict[str, Any], message: str) -> None:
    with refuses(UsageError, message):
        make_recipe("sft", scale=scale)


def test_what_torchrun_has_started_is_compared_with_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_recipe("sft")
    with refuses(UsageError, "start this process"):
        launch(make_recipe("sft", scale={"launcher": "torchrun"}), RunStart(root=tmp_path))
    with refuses(UsageError, "scale.sharding"):
        launch(make_recipe("sft", scale={"sharding": "fsdp2"}), RunStart(root=tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with refuses(UsageError, "scale.processes"):
        launch(make_recipe("sft", scale={"processes": 2}), RunStart(root=tmp_path))
    with refuses(UsageError, "MASTER_ADDR, MASTER_PORT missing"):
        launch(plain, RunStart(root=tmp_path))
    monkeypatch.setenv("RANK", "1")
    with refuses(UsageError, "`posttrain train`", "`posttrain runs resume`"):
        launch(plain, RunStart(root=tmp_path))
    assert not list(tmp_path.iterdir()), "nothing was left behind"


def test_a_port_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        about = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (about | {"MASTER_PORT": str(taken.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        with refuses(UsageError, "port is in"):
            launch(make_recipe("sft"), RunStart(root=tmp_path))


def test_the_scale_is_no_part_of_what_a_run_is() -> None:
    one, two = make_recipe("sft"), make_recipe("sft", scale={"processes": 2, "timeout_seconds": 9})
    assert one.fingerprint() == two.fingerprint()
    assert validate_recipe(two.dump()).scale.processes == 2


END_SECONDS = 60.0  # in which a run of which one process is killed is over, to its last process


def _children_of(process: int) -> list[int]:
    listed: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            listed += map(int, path.read_text().split())
    return listed


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize("seed", range(30))
def test_killed_at_any_moment_it_ends_and_goes_on_without_loss(seed: int, tmp_path: Path) -> None:
    """Whichever process is killed, whenever: no process stays, and each step is trained and recorded once."""
    chance = random.Random(seed)
    process = started(tmp_path, recipe_of("fine", chance.choice((2, 3))))
    time.sleep(chance.uniform(1.0, 25.0))
    others = _children_of(process.pid)
    victim = chance.choice([process.pid, *others])
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    code = process.wait(MOST_SECONDS)
    while any(map(is_alive, others)) and time.monotonic() < killed + MOST_SECONDS:
        time.sleep(0.1)
    assert not any(map(is_alive, others))
    assert code in (0, 1, -signal.SIGKILL)
    assert code == 0 or time.monotonic() < killed + END_SECONDS  # 0: it was over, or none that the run needs
    run = tmp_path / "runs" / "it"
    is_there = (run / "recipe.yaml").is_file()
    code, error = ended(tmp_path, recipe_of("fine", 1), *(["--resume"] if is_there else []))
    assert code == 0, error
    assert [row.step for row in MetricsLog(run / "metrics.jsonl").read() if "loss" in row.metrics] == [1, 2, 3, 4]
    assert RolloutStore(run / "rollouts.db", read_only=True).count_training() == dict.fromkeys(range(1, 5), 8)
