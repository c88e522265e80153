"""Runs whose processes Ray places: the same numbers, what is lost and comes back, what cannot be done."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Machines, end_of, is_alive, machines, node_of, recipe_of, wait_until

from posttrain.runs.directory import RunDirectory
from posttrain.runs.launch import RunStart, launch
from posttrain.store.checkpoint_files import checkpoint_steps
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore
from small_runs import same_bits, saved_tensors

STEPS = 5


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights that the launcher ``local`` comes to with the same recipe."""
    root = tmp_path_factory.mktemp("local")
    recipe = recipe_of("fine", "local")
    launch(recipe, RunStart(root=root, name="it"))
    return saved_tensors(root / "it", STEPS)


def is_whole(run: Path, weights: dict[str, Any]) -> bool:
    """Each step was trained and recorded once, and the weights are those of a run that nothing befell."""
    steps = [row.step for row in MetricsLog(run / "metrics.jsonl").read() if "loss" in row.metrics]
    rollouts = RolloutStore(run / "rollouts.db", read_only=True).count_training()
    assert steps == list(range(1, STEPS + 1))
    assert rollouts == dict.fromkeys(steps, 8)
    return same_bits(weights, saved_tensors(run, STEPS))


def test_the_weights_are_those_of_the_local_launcher(
    two_nodes: Machines, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    code, error = two_nodes.ended(tmp_path, recipe_of("fine"))
    assert code == 0, error
    run = tmp_path / "runs" / "it"
    assert is_whole(run, uninterrupted)
    status = RunDirectory(run).read_status()
    assert status is not None
    assert (status.state, status.step) == ("finished", STEPS)
    assert (run / "report.html").is_file()
    assert not list(run.glob(".tmp-*"))


def test_a_rank_that_is_killed_costs_no_number(
    two_nodes: Machines, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    note = tmp_path / "note"
    code, error = two_nodes.ended(tmp_path, recipe_of("kills_once", rank=1, after=10, note=str(note)))
    assert code == 0, error
    run = tmp_path / "runs" / "it"
    assert is_whole(run, uninterrupted)
    assert "Traceback" not in error
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert "Ray restarted all workers: continuing from the newest checkpoint" in log
    assert "resumed after step 2" in log


def test_it_gives_up_with_the_cause(two_nodes: Machines, tmp_path: Path) -> None:
    code, error = two_nodes.ended(tmp_path, recipe_of("kills_rank_one", after=6, restarts=0))
    assert code == 1
    assert error.strip().splitlines()[-1].startswith("posttrain: rank 1 of 2: "), error
    status = RunDirectory(tmp_path / "runs" / "it").read_status()
    assert status is not None
    assert status.state == "failed"


def test_an_error_of_the_runs_own_is_not_repeated(two_nodes: Machines, tmp_path: Path) -> None:
    code, error = two_nodes.ended(tmp_path, recipe_of("raises_in_rank_one", after=6))
    assert code == 1
    assert "'rank_components:raises_in_rank_one'" in error
    assert "no reward today" in error
    assert "start again" not in error
    assert "Traceback" not in error


def test_what_was_requested_wrongly_leaves_no_run(two_nodes: Machines, tmp_path: Path) -> None:
    recipe = recipe_of("fine")
    code, error = two_nodes.ended(tmp_path, recipe, "--model.name", "/no/such/model")
    assert code == 2
    assert error.startswith("posttrain: rank "), error
    assert "/no/such/model" in error
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_saves_once_and_the_run_goes_on(
    two_nodes: Machines, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    note = tmp_path / "note"
    recipe = recipe_of("waits", after=6, note=str(note))
    process = two_nodes.started(tmp_path, recipe)
    wait_until((tmp_path / "note-1").is_file, process=process)
    process.send_signal(signal.SIGINT)
    code, error = end_of(process)
    assert code == 130, error
    assert error.count("stopping after this step") == 1
    run = tmp_path / "runs" / "it"
    assert checkpoint_steps(run / "checkpoints")[-1] == 2
    (tmp_path / "note-go").touch()
    code, error = two_nodes.ended(tmp_path, recipe, "--resume")
    assert code == 0, error
    assert is_whole(run, uninterrupted)


def test_no_rank_outlives_a_command_that_is_killed(two_nodes: Machines, tmp_path: Path) -> None:
    note = tmp_path / "note"
    process = two_nodes.started(tmp_path, recipe_of("waits", after=6, note=str(note)))
    notes = [tmp_path / f"note-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.is_file() and path.read_text() for path in notes), process=process)
    ranks = [int(path.read_text()) for path in notes]
    assert all(map(is_alive, ranks))
    process.kill()
    end_of(process)
    wait_until(lambda: not any(map(is_alive, ranks)), 60)


@pytest.fixture
def own_nodes(request: pytest.FixtureRequest) -> Iterator[Machines]:
    with machines(request.param) as made:
        yield made


@pytest.mark.parametrize("own_nodes", [3], indirect=True)
def test_a_node_that_is_lost(own_nodes: Machines, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    """With another one in its place the run goes on there."""
    note = tmp_path / "note"
    process = own_nodes.started(tmp_path, recipe_of("waits", after=6, note=str(note), seconds=2.0))
    notes = [tmp_path / f"note-{r}" for r in range(2)]
    wait_until(lambda: all(path.is_file() and path.read_text() for path in notes), process=process)
    pid = int(notes[1].read_text())
    own_nodes.kill(node_of(own_nodes, pid))
    wait_until(lambda: not is_alive(pid), 30)
    (tmp_path / "note-go").touch()
    code, error = end_of(process)
    assert code == 0, error
    assert is_whole(tmp_path / "runs" / "it", uninterrupted)


def test_more_ranks_than_processors(two_nodes: Machines, tmp_path: Path) -> None:
    code, error = two_nodes.ended(tmp_path, recipe_of("fine", processes=3))
    assert code == 2
    assert "scale.processes" in error
    assert error.strip().endswith("has 2"), error
    code, error = two_nodes.ended(tmp_path, recipe_of("fine"), "--model.device", "cuda")
    assert code == 2
    assert "scale.processes" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "RAY_ADDRESS"),
        ("ray://127.0.0.1:10001", "RAY_ADDRESS is 'ray://127.0.0.1:10001'"),
        ("local", "RAY_ADDRESS is 'local'"),
        ("127.0.0.1:1", "127.0.0.1:1: [Errno 111]"),
    ],
)
def test_an_address_where_there_is_no_cluster(address: str, message: str, two_nodes: Machines, tmp_path: Path) -> None:
    code, error = two_nodes.ended(tmp_path, recipe_of("fine"), RAY_ADDRESS=address)
    assert code == 2
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()
