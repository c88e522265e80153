"""Runs whose processes Ray places: the same numbers, what is lost and comes back, what cannot be done."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Machines, end_of, is_alive, machines, node_of, recipe_of, wait_until

from posttrain.runs.directory import RunDirectory
from posttrain.runs.launch import launch
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
    launch(recipe, root=root, name="it")
    return saved_tensors(root / "it", STEPS)


def is_whole(run: Path, weights: dict[str, Any]) -> bool:
    """Each step was trained and recorded once, and the weights are those of a run that nothing befell."""
    steps = [row.step for row in MetricsLog(run / "metrics.jsonl").read() if "loss" in row.metrics]
    rollouts = RolloutStore(run / "rollouts.db", read_only=True).count_training()
    assert steps == list(range(1, STEPS + 1))
    assert rollouts == dict.fromkeys(steps, 8)
    return same_bits(weights, saved_tensors(run, STEPS))


def seconds_until_recovered(run: Path, error: str, since: float) -> float:
    """From ``since`` until the first step behind the checkpoint that it started again from was saved."""
    stated = re.search(r"start again from (?:the checkpoint of step ([0-9]+)|the beginning) \(1 of 3 times\)", error)
    assert stated, error
    return (run / "checkpoints" / f"step-{int(stated[1] or 0) + 1:06d}").stat().st_mtime - since


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
    assert not list(run.glob("log-*.txt")), "nobody said anything"
    assert not list(run.glob(".tmp-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_costs_seconds_and_no_number(
    rank: int, two_nodes: Machines, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    note = tmp_path / "note"
    process = two_nodes.started(tmp_path, recipe_of("kills_once", rank=rank, after=10, note=str(note)))
    wait_until(note.is_file, process=process)
    killed = time.time()
    code, error = end_of(process)
    assert code == 0, error
    run = tmp_path / "runs" / "it"
    assert is_whole(run, uninterrupted)
    assert f"rank {rank} of 2: its process was ended by SIGKILL" in error
    assert "start again from the checkpoint of step 2 (1 of 3 times)" in error
    assert "Traceback" not in error
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert "resumed after step 2" in log
    seconds = seconds_until_recovered(run, error, killed)
    print(f"\nrank {rank} killed: the next step was trained {seconds:.1f} s later")
    assert seconds < 60


def test_it_gives_up_with_the_cause(two_nodes: Machines, tmp_path: Path) -> None:
    code, error = two_nodes.ended(tmp_path, recipe_of("kills_rank_one", after=6, restarts=1))
    assert code == 1
    last = error.strip().splitlines()[-1]
    assert last.startswith("posttrain: rank 1 of 2: its process was ended by SIGKILL"), error
    assert last.endswith("It was started again 1 time (scale.restarts)")
    status = RunDirectory(tmp_path / "runs" / "it").read_status()
    assert status is not None
    assert status.state == "failed"
    assert "scale.restarts" in str(status.message)


def test_an_error_of_the_runs_own_is_not_repeated(two_nodes: Machines, tmp_path: Path) -> None:
    code, error = two_nodes.ended(tmp_path, recipe_of("raises_in_rank_one", after=6))
    assert code == 1
    assert "rank 1 of 2: reward 'rank_words:raises_in_rank_one'" in error
    assert "no reward today" in error
    assert "start again" not in error
    assert "Traceback" not in error


def test_what_was_asked_wrongly_leaves_no_run(two_nodes: Machines, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_the_command(number: signal.Signals, two_nodes: Machines, tmp_path: Path) -> None:
    note = tmp_path / "note"
    process = two_nodes.started(tmp_path, recipe_of("waits", after=6, note=str(note)))
    notes = [tmp_path / f"note-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.is_file() and path.read_text() for path in notes), process=process)
    ranks = [int(path.read_text()) for path in notes]
    assert all(map(is_alive, ranks))
    process.send_signal(number)
    code, error = end_of(process)
    assert code == (130 if number == signal.SIGTERM else -number), error
    wait_until(lambda: not any(map(is_alive, ranks)), 60)


@pytest.fixture
def own_nodes(request: pytest.FixtureRequest) -> Iterator[Machines]:
    with machines(request.param) as made:
        yield made


@pytest.mark.parametrize("own_nodes", [3, 2], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_lost(rank: int, own_nodes: Machines, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    """With another one in its place the run goes on there; without, it ends and says so."""
    has_spare, note = len(own_nodes.nodes) == 3, tmp_path / "note"
    process = own_nodes.started(tmp_path, recipe_of("waits", after=6, note=str(note), seconds=2.0))
    notes = [tmp_path / f"note-{r}" for r in range(2)]
    wait_until(lambda: all(path.is_file() and path.read_text() for path in notes), process=process)
    lost = node_of(own_nodes, pid := int(notes[rank].read_text()))
    killed = time.time()
    own_nodes.kill(lost)
    wait_until(lambda: not is_alive(pid), 30)  # Ray's worker notices after a second or two: the run may be over then
    (tmp_path / "note-go").touch()
    code, error = end_of(process)
    run = tmp_path / "runs" / "it"
    assert re.search(rf"rank {rank} of 2: its node [0-9.]+, or Ray's worker there, is gone", error), error
    assert "Traceback" not in error
    if has_spare:
        assert code == 0, error
        assert is_whole(run, uninterrupted)
        seconds = seconds_until_recovered(run, error, killed)
    else:
        assert code == 1
        assert "It cannot start again: scale.processes: 2 of them need 2 CPUs, and the cluster at" in error
        seconds = time.time() - killed
    print(f"\nnode of rank {rank} lost, {'one to spare' if has_spare else 'none to spare'}: {seconds:.1f} s")
    assert seconds < 60


def test_a_process_that_hangs_is_started_again(
    two_nodes: Machines, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    note = tmp_path / "note"
    recipe = recipe_of("waits", after=6, note=str(note))
    process = two_nodes.started(tmp_path, recipe, "--scale.timeout_seconds", "5")
    wait_until(lambda: (tmp_path / "note-1").is_file() and (tmp_path / "note-1").read_text(), process=process)
    stopped = time.time()
    os.kill(int((tmp_path / "note-1").read_text()), signal.SIGSTOP)
    (tmp_path / "note-go").touch()
    code, error = end_of(process)
    assert code == 0, error
    assert "did not come about in 5 s; not there: rank 1" in error
    run = tmp_path / "runs" / "it"
    assert is_whole(run, uninterrupted)
    seconds = seconds_until_recovered(run, error, stopped)
    print(f"\nrank 1 stopped: the next step was trained {seconds:.1f} s later, 5 of them the time-out")
    assert seconds < 65


def test_one_process(two_nodes: Machines, tmp_path: Path) -> None:
    launch(recipe_of("fine", "local", 1), root=tmp_path / "local", name="it")
    code, error = two_nodes.ended(tmp_path, recipe_of("fine", processes=1))
    assert code == 0, error
    assert is_whole(tmp_path / "runs" / "it", saved_tensors(tmp_path / "local" / "it", STEPS))


def test_more_ranks_than_processors(two_nodes: Machines, tmp_path: Path) -> None:
    code, error = two_nodes.ended(tmp_path, recipe_of("fine", processes=3))
    assert code == 2
    assert "scale.processes: 3 of them need 3 CPUs, and the cluster at" in error
    assert "has 2 (2 free; by node:" in error
    code, error = two_nodes.ended(tmp_path, recipe_of("fine"), "--model.device", "cuda")
    assert code == 2
    assert "scale.processes: 2 of them need 2 GPUs" in error
    assert not (tmp_path / "runs").exists()


def test_processors_that_others_use(two_nodes: Machines, tmp_path: Path) -> None:
    note = tmp_path / "note"
    other = tmp_path / "other"
    other.mkdir()
    process = two_nodes.started(other, recipe_of("waits", after=6, note=str(note), seconds=60.0))
    wait_until((tmp_path / "note-1").is_file, process=process)
    started = time.monotonic()
    code, error = two_nodes.ended(tmp_path, recipe_of("fine"))
    assert code == 2
    assert time.monotonic() - started < 60
    assert "has 2 (0 free; by node:" in error
    assert "In 30 s they did not become free" in error
    (tmp_path / "note-go").touch()
    assert end_of(process)[0] == 0


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "RAY_ADDRESS is not set"),
        ("ray://127.0.0.1:10001", "RAY_ADDRESS is 'ray://127.0.0.1:10001'"),
        ("local", "RAY_ADDRESS is 'local'"),
        ("127.0.0.1:1", "no Ray cluster can be joined at 127.0.0.1:1: [Errno 111] Connection refused"),
        ("SILENT", "no answer of Ray's in 20 s"),
    ],
)
def test_an_address_where_there_is_no_cluster(address: str, message: str, two_nodes: Machines, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = address.replace("SILENT", f"127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        code, error = two_nodes.ended(tmp_path, recipe_of("fine"), RAY_ADDRESS=address)
    assert code == 2
    assert message in error
    assert "Traceback" not in error
    assert time.monotonic() - started < 60
    assert not (tmp_path / "runs").exists()
