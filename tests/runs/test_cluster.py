"""The launcher ``ray`` without Ray: what is refused, what is reported, which end is whose, how often it starts again.

``tests/ray_cluster`` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from posttrain.engines.vllm.placed import placed_servers
from posttrain.runs.cluster import launcher
from posttrain.runs.cluster.reports import Reading, reporting
from posttrain.runs.cluster.servers import Servers
from torch import distributed as dist

from posttrain.errors import MissingExtra, PeerFailure, RecipeError, UsageError
from posttrain.runs.children import End
from posttrain.runs.launch import launch
from posttrain.store.headline import ACCURACY
from posttrain.train.distributed import LOOPBACK, Attending, Meeting
from small_runs import Events, make_recipe

KILLED = End(-9, "its process was ended by SIGKILL")
GONE = End(None, "its node is gone")
FAILED = End(1, "its process ended with exit code 1: posttrain: it failed")
LOST, OWN, ASKED = (PeerFailure, True), (PeerFailure, False), (UsageError, False)
RAY = {"processes": 2, "launcher": "ray"}


def test_ray_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"scale\.launcher: ray needs the package 'ray'.*\[ray\]"):
        launch(make_recipe("sft", scale=RAY), root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_process_of_torchruns_places_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"scale\.launcher: ray places all processes of a run itself"):
        launch(make_recipe("sft", scale=RAY), root=tmp_path / "runs")


def test_restarts_are_rays() -> None:
    assert make_recipe("sft", scale=RAY | {"restarts": 0}).scale.restarts == 0
    with pytest.raises(UsageError, match="'restarts' is for 'launcher: ray'"):
        make_recipe("sft", scale={"processes": 2, "restarts": 3})
    with pytest.raises(UsageError, match=r"scale\.restarts"):
        make_recipe("sft", scale=RAY | {"restarts": -1})


def test_what_rank_0_reports_is_what_the_loop_has_told() -> None:
    recipe, events, here = make_recipe("sft", scale=RAY), Events(), Meeting.open(2)
    report = reporting(Meeting(0, 2, here.store))
    reading = Reading(here, recipe, events)
    told: list[tuple[str, dict[str, Any]]] = [
        ("start", {"recipe": recipe, "steps": 3, "dropped": {"too long": 2}, "resumed_from": None}),
        ("evaluation", {"step": 0, "name": "held out", "headline": ACCURACY, "results": {"accuracy": 0.25}}),
        ("evaluation", {"step": 0, "name": "loss", "headline": None, "results": {}}),
        ("step", {"step": 1, "metrics": {"loss": 0.1 + 0.2}, "timing": {"update_seconds": 1e-3}}),
    ]
    for event, facts in told[:1]:
        report(event, facts)
    reading.read()
    assert (reading.started, [*events]) == (True, told[:1])
    for event, facts in told[1:]:
        report(event, facts)
    reading.read()
    reading.read()
    assert [*events] == told
    assert reading.result is None
    Meeting(0, 2, here.store, num_reports=4).report("result", {"step": 3, "reason": "finished", "evaluations": {}})
    reading.read()
    assert (reading.result, len(events)) == ({"step": 3, "reason": "finished", "evaluations": {}}, 4)


@pytest.mark.parametrize(
    ("said", "ended", "started", "kind", "message"),
    [
        (None, {1: KILLED}, True, LOST, "rank 1 of 2: its process was ended by SIGKILL"),
        (None, {0: FAILED, 1: GONE}, True, LOST, "rank 1 of 2: its node is gone"),
        # what a rank makes of the loss of another is not why the run ended
        ((0, "RuntimeError: connection closed", 1), {0: FAILED, 1: GONE}, True, LOST, "rank 1 of 2: its node is gone"),
        # an error, and the process dies of it
        ((1, "ValueError: no", 1), {1: KILLED, 0: FAILED}, True, OWN, "rank 1 of 2: ValueError: no"),
        ((1, "ValueError: no", 1), {1: FAILED, 0: FAILED}, True, OWN, "rank 1 of 2: ValueError: no"),
        ((0, "no such model", 2), {0: End(2, "..."), 1: FAILED}, False, ASKED, "rank 0 of 2: no such model"),
        # an exchange that did not come about; a program that cannot be started
        (None, {0: FAILED}, True, LOST, f"rank 0 of 2: {FAILED.how}"),
        (None, {0: FAILED}, False, OWN, f"rank 0 of 2: {FAILED.how}"),
    ],
)
def test_whose_end_it_was(
    said: tuple[Any, ...] | None, ended: dict[int, End], started: bool, kind: tuple[type, bool], message: str
) -> None:
    meeting = Meeting.open(2)
    if said is not None:
        meeting.fail(*said)
    failure = launcher._failure(meeting, ended, started)
    assert (type(failure), getattr(failure, "is_loss", False)) == kind
    assert str(failure) == message
    assert failure.exit_code == (2 if kind == ASKED else 1)


class FakeRanks:
    """Two processes that end as they are told to; the first reports that it has finished if both end well."""

    def __init__(self, ends: dict[int, End], tasks: list[dict[str, Any]]) -> None:
        self.working, self.ended, self.ends, self.tasks = {0, 1}, dict[int, End](), ends, tasks

    @property
    def failed(self) -> bool:
        return any(end.code != 0 for end in self.ended.values())

    def start(self, folder: Path, port: int) -> None:
        meeting = Meeting(0, 2, dist.TCPStore(LOOPBACK, port, 2, is_master=False))
        self.tasks.append(meeting.take())
        meeting.report("start", {"steps": 4})
        if all(end.code == 0 for end in self.ends.values()):
            meeting.report("result", {"step": 4, "reason": "finished", "evaluations": {}})

    def look(self, seconds: float, stop: bool) -> None:
        rank = max(self.working)
        self.working.discard(rank)
        self.ended[rank] = self.ends[rank]


class FakeCluster:
    host = LOOPBACK
    cause = ""

    def __init__(self, *attempts: dict[int, End]) -> None:
        self.attempts, self.tasks = list(attempts), list[dict[str, Any]]()

    @contextmanager
    def room(
        self, size: int, device: str, should_stop: Callable[[], bool], servers: dict[str, int]
    ) -> Iterator[FakeCluster]:
        assert size == 2
        assert servers == {}
        yield self

    @property
    def cluster(self) -> FakeCluster:
        """Of the room, which this is, too."""
        return self

    def start_server(self, name: str, order: Any) -> Any:
        raise AssertionError("no server was ordered")

    @contextmanager
    def ranks(self, should_stop: Callable[[], bool]) -> Iterator[FakeRanks]:
        yield FakeRanks(self.attempts.pop(0), self.tasks)


WELL = {0: End(0, ""), 1: End(0, "")}
LOSS = {0: FAILED, 1: KILLED}


@pytest.mark.parametrize("restarts", [None, 2])
def test_it_starts_again_from_what_is_saved(restarts: int | None, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    cluster, events = FakeCluster(LOSS, LOSS, WELL), Events()
    recipe = make_recipe("sft", scale=RAY | {"restarts": restarts})
    task = {"folder": str(tmp_path), "resume": False}
    result = launcher.train_on_cluster(cluster, task, recipe, events, lambda: False)  # type: ignore[arg-type]
    assert (result.step, result.reason) == (4, "finished")
    assert [told["resume"] for told in cluster.tasks] == [False, True, True]
    allowed = 3 if restarts is None else restarts
    cause = "rank 1 of 2: its process was ended by SIGKILL. All processes start again from the checkpoint of step 2"
    assert [facts["message"] for facts in events.of("notice")] == [f"{cause} ({n} of {allowed} times)" for n in (1, 2)]


def test_it_gives_up(tmp_path: Path) -> None:
    task = {"folder": str(tmp_path), "resume": False}
    for restarts, times in ((0, "0 times"), (1, "1 time")):
        cluster = FakeCluster(*[LOSS] * (restarts + 1))
        recipe = make_recipe("sft", scale=RAY | {"restarts": restarts})
        with pytest.raises(PeerFailure, match=rf"ended by SIGKILL\. It was started again {times} \(scale\.restarts\)"):
            launcher.train_on_cluster(cluster, task, recipe, Events(), lambda: False)  # type: ignore[arg-type]
        assert cluster.attempts == []
    stopping = FakeCluster(LOSS)
    with pytest.raises(PeerFailure, match=r"ended by SIGKILL$"):
        launcher.train_on_cluster(stopping, task, make_recipe("sft", scale=RAY), Events(), lambda: True)  # type: ignore[arg-type]
    assert len(stopping.tasks) == 1


@pytest.mark.parametrize(("restarts", "is_loss", "attempts"), [(2, True, 3), (0, True, 1), (2, False, 1)])
def test_what_is_lost_starts_again_so_often_and_an_error_of_its_own_never(
    restarts: int, is_loss: bool, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[dict[str, Any]] = []
    lines: list[str] = []

    def attempt(task: dict[str, Any], *_: Any) -> None:
        tasks.append(task)
        raise PeerFailure("rank 1 of 2: killed", is_loss=is_loss)

    scale = {"processes": 2, "launcher": "ray", "restarts": restarts}
    recipe = SimpleNamespace(scale=SimpleNamespace(**scale))
    cluster = SimpleNamespace(cause="")
    task = {"folder": str(tmp_path), "resume": False}
    with pytest.raises(PeerFailure, match="rank 1 of 2: killed") as failure:
        launcher._until_trained(
            attempt, cluster, task, recipe, lambda _, facts: lines.append(facts["message"]), lambda: False
        )
    assert [task["resume"] for task in tasks] == [False, *[True] * (attempts - 1)]
    often = f"It was started again {restarts} time{'s' * (restarts != 1)} (scale.restarts)"
    assert (often in str(failure.value)) == is_loss
    assert [line[-len("(1 of 2 times)") :] for line in lines] == [f"({n} of 2 times)" for n in range(1, attempts)]


class FakePlaced:
    """A server of which ``told`` is known, one thing a look."""

    def __init__(self, *told: dict[str, Any] | None) -> None:
        self.told, self.has_ended = list(told), False

    def look(self) -> dict[str, Any] | None:
        return self.told.pop(0) if self.told else None

    def end(self) -> None:
        self.has_ended = True


@dataclass
class Placing:
    """Starts the servers that are ordered: ``servers``, one after the other."""

    servers: list[FakePlaced]
    orders: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, name: str, order: Any) -> Any:
        self.orders.append((name, order["mark"]))
        return self.servers.pop(0)


def ordered(meeting: Meeting, mark: str, anew: bool = False, port: int = 0) -> None:
    """What a process leaves that wants the server ``server-3``."""
    facts = {"mark": mark, "anew": anew, "model": "there", "options": {"port": port}}
    Attending(meeting).order("server-3", facts)


def test_a_server_is_started_as_ordered_and_said_where_all_look() -> None:
    """The second order ends the first server, whose end nobody is told of any more."""
    meeting = Meeting.open(1)
    first, second = FakePlaced({"url": "http://a:1"}), FakePlaced({"url": "http://b:2"}, None, {"why": "gone"})
    placing = Placing([first, second])
    servers = Servers(["server-3"], placing)
    servers.look(meeting)
    assert placing.orders == []
    ordered(meeting, "m")
    servers.look(meeting)
    assert meeting.said("server server-3/m") is None
    servers.look(meeting)
    assert meeting.said("server server-3/m") == {"url": "http://a:1"}
    ordered(meeting, "n", anew=True)
    servers.look(meeting)
    assert first.has_ended
    for _ in range(3):
        assert meeting.said("lost server-3/n") is None
        servers.look(meeting)
    assert meeting.said("server server-3/n") == {"url": "http://b:2"}
    assert meeting.said("lost server-3/n") == {"why": "gone"}
    assert meeting.said("lost server-3/m") is None
    assert second.has_ended
    servers.look(meeting)
    assert placing.orders == [("server-3", "m"), ("server-3", "n")]


def test_a_server_that_lives_is_given_back_to_processes_that_start_again() -> None:
    """They meet elsewhere; one that is still being started is waited for, and one that was started otherwise ends."""
    before, after = Meeting.open(1), Meeting.open(1)
    lives, other = FakePlaced(None, {"url": "http://a:1"}), FakePlaced()
    placing = Placing([lives, other])
    servers = Servers(["server-3"], placing)
    ordered(before, "m")
    servers.look(before)
    ordered(after, "n")
    servers.look(after)
    assert meeting_has(after, "n") is None
    servers.look(after)
    assert meeting_has(after, "n") == {"url": "http://a:1"}
    ordered(after, "o")
    servers.look(after)
    assert meeting_has(after, "o") == {"url": "http://a:1", "is_kept": True}
    assert not lives.has_ended
    ordered(after, "p", port=7000)
    servers.look(after)
    assert lives.has_ended
    assert placing.orders == [("server-3", "m"), ("server-3", "p")]


def meeting_has(meeting: Meeting, mark: str) -> Any:
    return meeting.said(f"server server-3/{mark}")


OWN_SERVER = {"name": "vllm"}
THEIRS = {"name": "vllm", "url": "http://127.0.0.1:9"}
ROLLOUTS, EVALUATIONS = {"server-1": 0}, {"eval-server-1": 0}


@pytest.mark.parametrize(
    ("engine", "rollout", "evaluation", "expected"),
    [
        (OWN_SERVER, {}, {}, ROLLOUTS),
        (OWN_SERVER | {"servers": 3}, {}, {}, {"server-1": 0, "server-2": 0, "server-3": 0}),
        (OWN_SERVER | {"servers": 2, "gpus": [0, 1, 2, 3]}, {}, {}, {"server-1": 2, "server-2": 2}),
        (THEIRS, {}, {}, {}),
        ({"name": "vllm", "colocate": True}, {}, {}, {}),
        (OWN_SERVER, {"staleness": 1}, {}, ROLLOUTS),
        # evaluations: by the rollouts' server, by one of their own, in another process than the one that samples
        (OWN_SERVER, {}, {"every": 1}, ROLLOUTS),
        (OWN_SERVER, {}, {"every": 1, "engine": OWN_SERVER}, ROLLOUTS),
        (OWN_SERVER, {}, {"every": 1, "engine": OWN_SERVER | {"gpus": [4]}}, ROLLOUTS | {"eval-server-1": 1}),
        (OWN_SERVER, {}, {"every": 1, "engine": "native"}, ROLLOUTS),
        (OWN_SERVER, {"staleness": 1}, {"every": 1, "engine": OWN_SERVER}, ROLLOUTS),
        ({"name": "native"}, {}, {"every": 1, "engine": OWN_SERVER}, EVALUATIONS),
        ({"name": "native"}, {}, {"every": 0, "engine": OWN_SERVER}, {}),
    ],
)
def test_the_servers_that_are_placed(
    engine: dict[str, Any], rollout: dict[str, Any], evaluation: dict[str, Any], expected: dict[str, int]
) -> None:
    """By name, with the number of GPUs that each has."""
    recipe = make_recipe("grpo", rollout={"engine": engine, **rollout}, eval=evaluation)
    assert placed_servers(recipe) == expected


def test_servers_of_evaluations_alone() -> None:
    assert placed_servers(make_recipe("sft", eval={"every": 1, "engine": OWN_SERVER})) == EVALUATIONS
    assert placed_servers(make_recipe("sft")) == placed_servers(make_recipe("grpo")) == {}


def test_gpus_that_cannot_be_shared_out() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.engine\.gpus: 1 GPUs cannot be shared out among 2 servers"):
        placed_servers(make_recipe("grpo", rollout={"engine": {"name": "vllm", "servers": 2, "gpus": [1]}}))
