"""Servers that Ray places beside the processes that train: the stand-in of the engine's tests in vLLM's place."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import TESTS, Machines, end_of, is_alive, machines, node_of, recipe_of, wait_until

from posttrain.recipes.sections import EvalSection, Word
from posttrain.runs.launch import launch
from small_runs import recorded

STEPS = 5


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What POSTTRAIN_VLLM names."""
    program, python = TESTS / "engines" / "fake_server_process.py", tmp_path_factory.mktemp("python") / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={os.environ["PYTHONPATH"]} exec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    return str(python)


def asking(recipe: Any, servers: int, **options: Any) -> Any:
    """The recipe with rollouts of servers that the run starts."""
    recipe.rollout.engine = Word(name="vllm", servers=servers, retries=0, timeout_seconds=120, **options)
    return recipe


def said(run: Path) -> list[tuple[int, int, Any, Any]]:
    """(step, prompt, version, ids) of every answer, in order."""
    return [(row.step, row.prompt_index, row.version, row.token_ids) for row in recorded(run)[0]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, python: str) -> list[Any]:
    """What a fleet on this machine answers."""
    root = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_VLLM", python)
        launch(asking(recipe_of("fine", "local", 1), 2), root=root, name="it")
    return said(root / "it")


def pid_of(run: Path, server: int) -> int:
    return int((run / f"server-{server}" / "pid").read_text())


def test_a_fleet_on_several_nodes_answers_as_one_on_this_machine(
    three_nodes: Machines, tmp_path: Path, python: str, undisturbed: list[Any]
) -> None:
    note = tmp_path / "note"
    recipe = asking(recipe_of("waits", processes=1, after=6, note=str(note)), 2)
    process = three_nodes.started(tmp_path, recipe, POSTTRAIN_VLLM=python)
    run = tmp_path / "runs" / "it"
    wait_until((tmp_path / "note-0").is_file, process=process)
    pids = [pid_of(run, number) for number in (1, 2)]
    nodes = [node_of(three_nodes, pid) for pid in (*pids, int((tmp_path / "note-0").read_text()))]
    assert len({id(node) for node in nodes}) == 3, "a processor each, and a node has one"
    (tmp_path / "note-go").touch()
    code, error = end_of(process)
    assert code == 0, error
    assert said(run) == undisturbed
    assert len(undisturbed) == 8 * STEPS
    wait_until(lambda: not any(map(is_alive, pids)), 30)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_that_is_killed_is_started_again(
    processes: int, three_nodes: Machines, tmp_path: Path, python: str, undisturbed: list[Any]
) -> None:
    """One process and two servers, or two processes and one; nothing but that server begins again."""
    note, run = tmp_path / "note", tmp_path / "runs" / "it"
    recipe = asking(recipe_of("waits", processes=processes, after=6, note=str(note)), 3 - processes)
    process = three_nodes.started(tmp_path, recipe, POSTTRAIN_VLLM=python)
    wait_until((tmp_path / f"note-{processes - 1}").is_file, process=process)
    first = pid_of(run, 1)
    os.kill(first, signal.SIGKILL)
    (tmp_path / "note-go").touch()
    code, error = end_of(process)
    assert code == 0, error
    assert ("vLLM server 1 of 2 failed: " if processes == 1 else "the vLLM server failed: ") in error
    assert "All processes start again" not in error
    assert said(run) == undisturbed
    last = pid_of(run, 1)
    assert last != first
    wait_until(lambda: not is_alive(last), 30)


def test_it_gives_up_with_the_cause(three_nodes: Machines, tmp_path: Path, python: str) -> None:
    note, run = tmp_path / "note", tmp_path / "runs" / "it"
    recipe = asking(recipe_of("waits", processes=1, after=6, note=str(note)), 2, restarts=0)
    process = three_nodes.started(tmp_path, recipe, POSTTRAIN_VLLM=python)
    wait_until((tmp_path / "note-0").is_file, process=process)
    os.kill(pid_of(run, 2), signal.SIGKILL)
    (tmp_path / "note-go").touch()
    code, error = end_of(process)
    assert code == 1
    assert "vLLM server 2 of 2 failed: " in error
    assert "Servers were started again 0 times already (rollout.engine.restarts)" in error
    assert "Traceback" not in error


def test_no_server_outlives_the_command(three_nodes: Machines, tmp_path: Path, python: str) -> None:
    note, run = tmp_path / "note", tmp_path / "runs" / "it"
    recipe = asking(recipe_of("waits", processes=1, after=6, note=str(note)), 2)
    process = three_nodes.started(tmp_path, recipe, POSTTRAIN_VLLM=python)
    wait_until((tmp_path / "note-0").is_file, process=process)
    pids = [pid_of(run, number) for number in (1, 2)]
    assert all(map(is_alive, pids))
    process.send_signal(signal.SIGKILL)
    end_of(process)
    wait_until(lambda: not any(map(is_alive, pids)), 60)


def test_servers_outlive_a_rank_and_those_of_evaluations_are_placed_too(
    three_nodes: Machines, tmp_path: Path, python: str, undisturbed: list[Any]
) -> None:
    """The rank starts again from its checkpoint, with the servers that were there, each on a node of its own."""
    note, run = tmp_path / "note", tmp_path / "runs" / "it"
    recipe = asking(recipe_of("waits", processes=1, after=6, note=str(note)), 1)
    recipe.eval = EvalSection(every=1, n=2, engine=Word(name="vllm", retries=0, timeout_seconds=110))
    process = three_nodes.started(tmp_path, recipe, POSTTRAIN_VLLM=python)
    wait_until((tmp_path / "note-0").is_file, process=process)
    rank = int((tmp_path / "note-0").read_text())
    servers = [int((run / name / "pid").read_text()) for name in ("server-1", "eval-server-1")]
    assert len({id(node_of(three_nodes, pid)) for pid in (rank, *servers)}) == 3
    os.kill(rank, signal.SIGKILL)
    (tmp_path / "note-go").touch()
    killed = time.time()
    code, error = end_of(process)
    assert code == 0, error
    assert "All processes start again from " in error
    assert "vLLM server" not in error
    assert said(run) == undisturbed
    assert servers == [int((run / name / "pid").read_text()) for name in ("server-1", "eval-server-1")]
    print(f"\nrank of two servers killed: the run was over {time.time() - killed:.1f} s later, they were kept")
    wait_until(lambda: not any(map(is_alive, servers)), 30)


@pytest.fixture
def own_nodes() -> Iterator[Machines]:
    with machines(4) as made:
        yield made


def test_a_node_of_a_server_that_is_lost(
    own_nodes: Machines, tmp_path: Path, python: str, undisturbed: list[Any]
) -> None:
    """The server is started on the fourth node; the process that trains goes on."""
    note, run = tmp_path / "note", tmp_path / "runs" / "it"
    recipe = asking(recipe_of("waits", processes=1, after=6, note=str(note), seconds=2.0), 2)
    process = own_nodes.started(tmp_path, recipe, POSTTRAIN_VLLM=python)
    wait_until((tmp_path / "note-0").is_file, process=process)
    first = pid_of(run, 2)
    own_nodes.kill(node_of(own_nodes, first))
    killed = time.time()
    wait_until(lambda: not is_alive(first), 30)
    (tmp_path / "note-go").touch()
    code, error = end_of(process)
    assert code == 0, error
    assert "vLLM server 2 of 2 failed: " in error
    assert "All processes start again" not in error
    assert said(run) == undisturbed
    assert pid_of(run, 2) != first
    seconds = (run / "server-2" / "pid").stat().st_mtime - killed
    print(f"\nnode of a server lost, one to spare: another server was there {seconds:.1f} s later")
    assert seconds < 60


def test_no_room_for_servers(three_nodes: Machines, tmp_path: Path, python: str) -> None:
    code, error = three_nodes.ended(tmp_path, asking(recipe_of("fine"), 2), POSTTRAIN_VLLM=python)
    assert code == 2
    assert re.search(
        r"scale\.processes: 2 of them and 2 servers \(vLLM\) need 4 CPUs, and the cluster at .* has 3 ",
        error,
    ), error
    assert "Give fewer processes or servers" in error
    code, error = three_nodes.ended(tmp_path, asking(recipe_of("fine"), 1, gpus=[0, 1]), POSTTRAIN_VLLM=python)
    assert code == 2
    assert re.search(r"need 2 CPUs and 2 GPUs, and the cluster at .* has 0 GPUs \(0 free", error), error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": [0, 1, 2]}, r"rollout\.engine\.gpus: 3 GPUs cannot be shared out among 2 servers"),
        ({"url": ["http://127.0.0.1:9", "http://127.0.0.1:9/"]}, r"engine\.servers: 2 are started by a run"),
    ],
)
def test_what_is_refused(options: Any, message: str, three_nodes: Machines, tmp_path: Path, python: str) -> None:
    recipe = asking(recipe_of("fine", processes=1), 2, **options)
    code, error = three_nodes.ended(tmp_path, recipe, POSTTRAIN_VLLM=python)
    assert code == 2
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_a_node_without_vllm(three_nodes: Machines, tmp_path: Path) -> None:
    recipe = asking(recipe_of("fine", processes=1), 1)
    code, error = three_nodes.ended(tmp_path, recipe, POSTTRAIN_VLLM="/no/such/python")
    assert code == 2
    assert re.search(r"node [0-9.]+ of the cluster: a run that starts a vLLM server .* '/no/such/python'", error), error
    assert not (tmp_path / "runs").exists()
