"""Several servers as one engine: who is asked what, that all have the weights, and one of them that is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import keys_of
from respondents import Scripted, wordy

from fake_follower import SYNC, FakeFollower
from fake_vllm import Reset
from posttrain import registry
from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.vllm import follow as follow_module
from posttrain.engines.vllm.engine import vllm
from posttrain.engines.vllm.fleet import FollowingFleet
from posttrain.engines.weights import checkpoint_weights
from posttrain.errors import EngineMismatch, RecipeError, RunFailure, UsageError
from posttrain.models.load import LoadedModel
from posttrain.train.checks import words_of
from posttrain.world import ONE, World
from serving import free_port
from small_runs import Events, end_of, make_recipe, recorded, run, start, train_command, watched

pytestmark = pytest.mark.usefixtures("no_waiting")

ASKING: dict[str, Any] = {"timeout_seconds": 60.0, "retries": 0, "collectives": "gloo"}
PROMPTS = [[9, 10], [11, 12, 13], [14], [15, 16], [17]]
SAMPLING = Sampling(max_tokens=6)


@pytest.fixture
def three(tiny: LoadedModel) -> Iterator[list[FakeFollower]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeFollower(tiny.model, tiny.tokenizer)) for _ in range(3)]


def fleet_at(tiny: LoadedModel, servers: list[Any], **options: Any) -> FollowingFleet:
    engine = vllm(tiny.model, tiny.tokenizer, url=[server.url for server in servers], **(ASKING | options))
    assert isinstance(engine, FollowingFleet)
    return engine


def asked_seeds(server: FakeFollower) -> list[int]:
    """The seeds of the completions that it was asked for, in order; what the probe asks is none of them."""
    bodies = {id(body): body for body in server.bodies}  # the stand-in notes what it answers anew twice
    return [body["seed"] for body in bodies.values() if is_completion(body)]


def is_completion(body: dict[str, Any]) -> bool:
    return not body.get("logprobs") and "prompt_logprobs" not in body


def ids_of(groups: Any) -> list[list[tuple[int, ...]]]:
    return [[one.ids for one in group] for group in groups]


def update(model: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * torch.randn(parameter.shape, generator=generator)


def test_a_batch_is_divided_and_its_tokens_are_those_of_one_server(
    tiny: LoadedModel, three: list[FakeFollower]
) -> None:
    """11 completions of 5 prompts: 4, 4 and 3 of them in a row, each asked for once."""
    engine, keys = fleet_at(tiny, three), [[1, 2, 3], [4, 5], [6], [7, 8, 9], [10, 11]]
    for version in (0, 3):
        engine.sync(version)
        groups = engine.generate(PROMPTS, keys, SAMPLING)
        assert groups == with_version(NativeEngine(tiny.model).generate(PROMPTS, keys, SAMPLING), version, groups)
        update(tiny.model)
    assert [sorted(asked_seeds(server)) for server in three] == [
        sorted(seeds * 2) for seeds in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11])
    ]
    with FakeFollower(tiny.model, tiny.tokenizer) as alone:
        one = vllm(tiny.model, tiny.tokenizer, url=[alone.url], **ASKING)
        engine.sync(6)
        assert ids_of(one.generate(PROMPTS, keys, SAMPLING)) == ids_of(engine.generate(PROMPTS, keys, SAMPLING))
    assert isinstance(one, FollowingFleet)
    assert sorted(asked_seeds(alone)) == list(range(1, 12)), "one server is a fleet of one"


def with_version(expected: Any, version: int, groups: Any) -> Any:
    """The same ids with what the servers said of them; of their version what is expected."""
    assert ids_of(expected) == ids_of(groups)
    assert {one.version for group in groups for one in group} == {version}
    for theirs, ours in zip(expected, groups, strict=True):
        for a, b in zip(theirs, ours, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            assert a.finish == b.finish
    return groups


@pytest.mark.parametrize(("rank", "used"), [(0, [0, 1]), (1, [1, 2]), (2, [2, 0])])
def test_few_answers_begin_at_another_server_in_each_process(
    rank: int, used: list[int], tiny: LoadedModel, three: list[FakeFollower]
) -> None:
    engine = fleet_at(tiny, three)
    engine.sync(0)
    engine.world = World()
    engine.world.rank = rank
    said = engine.generate([[9, 10]], [[7, 8]], SAMPLING)
    assert ids_of(said) == ids_of(NativeEngine(tiny.model).generate([[9, 10]], [[7, 8]], SAMPLING))
    assert [asked_seeds(three[i]) for i in used] == [[7], [8]]
    assert sum(len(asked_seeds(server)) for server in three) == 2
    assert engine.generate([[9]], [[]], SAMPLING) == [[]]


def test_every_server_has_every_version_and_forgets_its_prompts(tiny: LoadedModel, three: list[FakeFollower]) -> None:
    engine = fleet_at(tiny, three)
    for version in range(3):
        engine.sync(version)
        ours = list(checkpoint_weights(tiny.model))
        for server in three:
            theirs = dict(server.model.named_parameters())
            assert all(torch.equal(weight, theirs[name]) for name, weight in ours)
            assert server.label.endswith(f":{version}")
        update(tiny.model, version)
    assert [server.said for server in three] == [["/init_weight_transfer_engine", *SYNC * 3]] * 3
    assert len({server.label for server in three}) == 3, "each has a name of its own for them"


@pytest.mark.parametrize("stale", range(3))
def test_one_stale_server_of_three_is_caught(stale: int, tiny: LoadedModel, three: list[FakeFollower]) -> None:
    engine = fleet_at(tiny, three)
    engine.sync(0)
    three[stale].drops = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    update(tiny.model)
    with pytest.raises(EngineMismatch, match=rf"{three[stale].url}: after 1 updates .* differ by [0-9.e-]+ nats"):
        engine.sync(1)


def test_one_that_somebody_else_gave_weights_is_caught(tiny: LoadedModel, three: list[FakeFollower]) -> None:
    engine = fleet_at(tiny, three)
    engine.sync(0)
    three[1].label = "another run:7"
    with pytest.raises(RunFailure, match=rf"{three[1].url}: the server has weights called 'another run:7'"):
        engine.generate(PROMPTS, keys_of([2] * 5), SAMPLING)


def test_a_server_of_the_users_that_dies_is_named_and_ends_the_others(tiny: LoadedModel) -> None:
    let_go = threading.Event()

    def hang(count: int, body: dict[str, Any]) -> None:
        if is_completion(body):
            let_go.wait(30)

    def die(count: int, body: dict[str, Any]) -> None:
        if is_completion(body):
            raise Reset

    with FakeFollower(tiny.model, trouble=hang) as slow, FakeFollower(tiny.model, trouble=die) as dying:
        engine = fleet_at(tiny, [slow, dying])
        engine.sync(0)
        with pytest.raises(RunFailure, match=rf"^{dying.url}: no completion of prompt [23]: ") as caught:
            engine.generate(PROMPTS[:4], keys_of([1] * 4), SAMPLING)
        assert "\n" not in str(caught.value)
        assert not let_go.is_set(), "nobody waited for the slow one"
        let_go.set()


def test_an_evaluation_is_divided_too(tiny: LoadedModel, three: list[FakeFollower]) -> None:
    urls = [server.url for server in three]
    for server in three:
        server.model.load_state_dict(tiny.model.state_dict())
    engine = vllm(None, tiny.tokenizer, url=urls, retries=0)
    assert engine.context_tokens == 512
    keys = [[1, 2], [3], [4], [5], [6]]
    assert ids_of(engine.generate(PROMPTS, keys, SAMPLING)) == ids_of(
        NativeEngine(tiny.model).generate(PROMPTS, keys, SAMPLING)
    )
    assert [sorted(asked_seeds(server)) for server in three] == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(UsageError, match="prompt 3 has token id -1"):
        engine.generate([*PROMPTS[:3], [-1], [9]], keys, SAMPLING)


# Servers of the run's own.


class Gone(dict[str, Any]):
    """The routes of a server that is no more: every connection breaks."""

    def __contains__(self, route: object) -> bool:
        return True

    def __getitem__(self, route: str) -> Any:
        raise Reset


class OwnStandIn:
    """In the place of ``OwnServer``: the stand-in in this process, which ``tests`` can end. ``all``: every one started.

    ``trouble``: as of ``FakeVllm``, with this server before its arguments; ``cannot_start``: numbers of those that end
    before they are ready.
    """

    def __init__(self, command: Any, url: str, log: Path) -> None:
        kind = type(self)
        words = command.words
        card = {"id": "policy", "root": words[words.index("--model") + 1], "max_model_len": 512}
        self.number, self.environment = len(kind.all), command.environment
        self.url, self.port = url, int(url.rpartition(":")[2])
        self.log, self.about = log, {"cards": [card], "port": self.port, "trouble": self._trouble}
        kind.all.append(self)

    all: list[OwnStandIn]
    model: Any
    trouble: Callable[[OwnStandIn, dict[str, Any]], None]
    cannot_start: tuple[int, ...]

    def start(self) -> None:
        self.fake = FakeFollower(type(self).model, **self.about)
        self.fake.__enter__()

    def wait(self) -> None:
        if self.number in type(self).cannot_start:
            raise RunFailure("the vLLM server ended before it was ready. Its log is empty")

    def stop(self) -> None:
        if not isinstance(self.fake.gets, Gone):
            self.end()

    def end(self) -> None:
        """As a process that is killed: nobody listens, and whoever waits for an answer gets none."""
        self.fake.gets = self.fake.posts = Gone()
        self.fake.__exit__()

    def tail(self) -> str:
        return f"Its log {self.log} is empty"

    def _trouble(self, count: int, body: dict[str, Any]) -> None:
        if is_completion(body):
            type(self).trouble(self, body)


@pytest.fixture
def started(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[OwnStandIn]]:
    class Started(OwnStandIn):
        all, model, cannot_start = [], tiny.model, ()
        trouble = staticmethod(lambda server, body: None)  # type: ignore[assignment]

    monkeypatch.setattr(follow_module, "OwnServer", Started)
    monkeypatch.setenv("POSTTRAIN_VLLM", sys.executable)
    yield Started
    for server in Started.all:
        server.stop()


def own_fleet(tiny: LoadedModel, folder: Path, servers: int = 3, **options: Any) -> FollowingFleet:
    engine = vllm(tiny.model, tiny.tokenizer, servers=servers, **(ASKING | {"concurrency": 1} | options))
    assert isinstance(engine, FollowingFleet)
    assert engine.settle(folder, ONE) is engine
    return engine


def dies_at(number: int, seed: int) -> Callable[[OwnStandIn, dict[str, Any]], None]:
    """The server that was started as ``number`` ends when it is asked for a completion of this seed."""

    def trouble(server: OwnStandIn, body: dict[str, Any]) -> None:
        if (server.number, body["seed"]) == (number, seed):
            server.end()
        if isinstance(server.fake.gets, Gone):
            raise Reset

    return trouble


KEYS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]]  # five for each of three servers


def test_one_that_dies_in_the_middle_is_asked_again_for_what_is_missing(
    tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path
) -> None:
    started.trouble = staticmethod(dies_at(1, 8))  # type: ignore[method-assign,assignment]
    engine = own_fleet(tiny, tmp_path)
    engine.sync(4)
    second = engine.members[1].url
    groups = engine.generate(PROMPTS, KEYS, SAMPLING)
    assert ids_of(groups) == ids_of(NativeEngine(tiny.model).generate(PROMPTS, KEYS, SAMPLING))
    seeds = [asked_seeds(server.fake) for server in started.all]
    assert seeds == [[1, 2, 3, 4, 5], [6, 7, 8], [11, 12, 13, 14, 15], [8, 9, 10]], (
        "the fourth is in the second's place"
    )
    assert started.all[3].port != started.all[1].port, "whoever still asks there is answered by nobody"
    assert [server.fake.label.rpartition(":")[2] for server in started.all] == ["4"] * 4
    (said,) = engine.take_notices()
    assert said.startswith(f"vLLM server 2 of 3 failed: {second}: no completion of prompt 2: ")
    assert said.endswith(
        "it is started again, given the weights of now, and asked for what it had not answered, with the same seeds"
    )
    update(tiny.model)
    engine.sync(5)
    assert ids_of(engine.generate(PROMPTS, KEYS, SAMPLING)) == ids_of(
        NativeEngine(tiny.model).generate(PROMPTS, KEYS, SAMPLING)
    )
    assert len(started.all) == 4
    engine.close()
    assert all(isinstance(server.fake.gets, Gone) for server in started.all), "all have ended"


def test_one_that_dies_between_batches_is_started_again_at_the_next(
    tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path
) -> None:
    engine = own_fleet(tiny, tmp_path)
    engine.sync(0)
    started.all[2].end()
    engine.sync(1)
    (said,) = engine.take_notices()
    assert "vLLM server 3 of 3 failed" in said
    started.all[0].end()
    assert ids_of(engine.generate(PROMPTS, KEYS, SAMPLING)) == ids_of(
        NativeEngine(tiny.model).generate(PROMPTS, KEYS, SAMPLING)
    )
    assert [server.fake.label.rpartition(":")[2] for server in started.all] == ["1", "1", "0", "1", "1"]
    assert len(engine.take_notices()) == 1


def test_one_that_hangs_is_started_again(tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path) -> None:
    let_go = threading.Event()

    def hang(server: OwnStandIn, body: dict[str, Any]) -> None:
        if server.number == 1 and body["seed"] in (9, 10):  # the tenth may be sent before the ninth is given up
            let_go.wait(60)
            raise Reset

    started.trouble = staticmethod(hang)  # type: ignore[method-assign,assignment]
    engine = own_fleet(tiny, tmp_path, timeout_seconds=5.0)
    said = engine.generate(PROMPTS, KEYS, SAMPLING)
    let_go.set()
    assert ids_of(said) == ids_of(NativeEngine(tiny.model).generate(PROMPTS, KEYS, SAMPLING))
    assert asked_seeds(started.all[1].fake)[:4] == [6, 7, 8, 9]
    assert [asked_seeds(server.fake) for server in started.all[2:]] == [[11, 12, 13, 14, 15], [9, 10]]
    (told,) = engine.take_notices()
    assert "vLLM server 2 of 3 failed: " in told
    assert "no answer within 5 seconds" in told


def test_several_turns_go_on_where_they_were(tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path) -> None:
    """A server dies in the second turn: nobody is answered twice, and all is as if nothing had been lost."""
    vocab = list(range(5, 60))
    prompts, keys = PROMPTS[:3], [[1, 2], [3, 4], [5, 6]]
    sampling = Sampling(max_tokens=40, stop_ids=frozenset(range(0, 768, 3)))
    engine = own_fleet(tiny, tmp_path, servers=2)
    engine.sync(0)
    expected = engine.converse(prompts, keys, sampling, Scripted(wordy(vocab)))
    second = asked_seeds(started.all[1].fake)
    turn = next(seed for seed in second if seed > 6)
    started.trouble = staticmethod(dies_at(1, turn))  # type: ignore[method-assign,assignment]
    heard = Scripted(wordy(vocab))
    assert engine.converse(prompts, keys, sampling, heard) == expected
    assert len(started.all) == 3
    assert asked_seeds(started.all[2].fake)[0] == turn
    for i, row in enumerate(expected):
        for g, one in enumerate(row):
            assert heard.transcript(i, g) == (one.ids, one.own)


def test_restarts_are_counted_over_all_servers(tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path) -> None:
    def trouble(server: OwnStandIn, body: dict[str, Any]) -> None:
        if server.number in (0, 1):
            server.end()
        if server.number in (0, 1, 3):
            raise Reset

    started.trouble = staticmethod(trouble)  # type: ignore[method-assign,assignment]
    engine = own_fleet(tiny, tmp_path, restarts=2)
    engine.sync(0)
    with pytest.raises(
        RunFailure,
        match=r"vLLM server [12] of 3 failed: .*Servers were started again 2 times already \(engine\.restarts\)\. Its",
    ):
        engine.generate(PROMPTS, KEYS, SAMPLING)
    assert len(engine.take_notices()) == 2
    assert len(started.all) == 5


def test_one_that_never_starts_is_not_tried_again(tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path) -> None:
    started.cannot_start = (2,)
    engine = own_fleet(tiny, tmp_path)
    with pytest.raises(RunFailure, match="ended before it was ready"):
        engine.sync(0)
    assert len(started.all) == 3
    engine.close()
    assert all(isinstance(server.fake.gets, Gone) for server in started.all)


def test_one_that_does_not_come_back_at_once_is_tried_again(
    tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path
) -> None:
    started.cannot_start = (3,)
    started.trouble = staticmethod(dies_at(0, 2))  # type: ignore[method-assign,assignment]
    engine = own_fleet(tiny, tmp_path)
    said = engine.generate(PROMPTS, KEYS, SAMPLING)
    assert ids_of(said) == ids_of(NativeEngine(tiny.model).generate(PROMPTS, KEYS, SAMPLING))
    assert [asked_seeds(server.fake) for server in started.all[3:]] == [[], [2, 3, 4, 5]]
    assert len(engine.take_notices()) == 2


class Ranks:
    """Two processes in two threads, which exchange what a world exchanges."""

    def __init__(self) -> None:
        self.barrier, self.parts = threading.Barrier(2, timeout=60), [None, None]

    def world(self, rank: int) -> World:
        ranks = self

        class Rank(World):
            size = 2

            def __init__(self) -> None:
                self.rank = rank

            def gather(self, mine: Any, what: str) -> Any:
                ranks.parts[rank] = (what, list(mine))
                ranks.barrier.wait()
                parts = list(ranks.parts)
                ranks.barrier.wait()
                assert parts[0][0] == parts[1][0] == what
                return [parts[i % 2][1][i // 2] for i in range(sum(len(part) for _, part in parts))]

            def tell(self, value: Any, what: str) -> Any:
                return self.gather([value], what)[0]

        return Rank()


@pytest.mark.parametrize("losing", [0, 1])
def test_of_two_processes_either_may_lose_one(
    losing: int, tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path
) -> None:
    """Rank 0 starts it again, for both; what rank 1 alone has lost is asked of the new one by rank 1 alone.

    What rank 0 has lost it starts at once: rank 1 is not answered before by the server that lives.
    """
    keys = [[[1, 2], [3, 4]], [[21, 22], [23, 24]]]
    # pieces go round by rank: rank 0's second is server 1's, rank 1's first is server 1's
    dies, is_dead, too_early, there = dies_at(1, (3, 22)[losing]), threading.Event(), [], [0]

    def trouble(server: OwnStandIn, body: dict[str, Any]) -> None:
        if server.number == 2 and not server.fake.label.endswith(":1"):
            too_early.append(body["seed"])
        if losing == 0 and server.number == 1 and body["seed"] > 20:
            is_dead.wait(20)  # then rank 1 tries again at that address
        if losing == 0 and server.number == 0 and body["seed"] > 20:
            deadline = time.monotonic() + 20
            while len(started.all) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            there[0] = len(started.all)
        try:
            dies(server, body)
        except Reset:
            is_dead.set()
            raise

    started.trouble = staticmethod(trouble)  # type: ignore[method-assign,assignment]
    ranks, said = Ranks(), [None, None]
    engines = [own_fleet(tiny, tmp_path, servers=2, timeout_seconds=20.0, retries=tries) for tries in (0, 8)]

    def work(rank: int) -> None:
        engines[rank].world = ranks.world(rank)
        engines[rank].sync(1)
        said[rank] = ids_of(engines[rank].generate(PROMPTS[:2], keys[rank], SAMPLING))  # type: ignore[call-overload]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(2):
        assert said[rank] == ids_of(NativeEngine(tiny.model).generate(PROMPTS[:2], keys[rank], SAMPLING))
    assert len(started.all) == 3, "rank 0 alone starts servers"
    assert too_early == [], "nobody asks a server that has no weights yet"
    assert there == [(3, 0)[losing]]
    assert len(engines[0].take_notices()) == 1
    assert engines[1].take_notices() == []
    asked = [sorted(asked_seeds(server.fake)) for server in started.all]
    assert set(asked[0]) == {1, 2, 23, 24}
    assert len(asked[0]) == 4
    assert set(asked[1]) | set(asked[2]) == {3, 4, 21, 22}
    assert (3, 22)[losing] in asked[2]


class Elsewhere(World):
    """Who started the processes, and starts servers for them: the stand-in, in this process."""

    starts_servers = True

    def __init__(self, model: Any, trouble: Callable[[str, dict[str, Any]], None], problem: str = "") -> None:
        self.model, self.trouble, self.problem = model, trouble, problem
        self.orders: list[dict[str, Any]] = []
        self.numbers: dict[str, str] = {}
        self.fakes: dict[str, FakeFollower] = {}
        self.said: dict[str, Any] = {}

    def order(self, name: str, facts: Any) -> None:
        """Its orders are numbered, so that a test can name them."""
        self.orders.append({"name": name, **facts})
        place = f"{name}/{facts['mark']}"
        self.numbers[place] = f"{name[-1]}/{len([order for order in self.orders if order['name'] == name])}"
        card = {"id": "policy", "root": facts["model"], "max_model_len": 512}

        def trouble(count: int, body: dict[str, Any]) -> None:
            if is_completion(body):
                self.trouble(number, body)

        number = self.numbers[place]
        self.fakes[number] = FakeFollower(self.model, cards=[card], trouble=trouble)
        self.fakes[number].__enter__()
        told = {"problem": self.problem} if self.problem else {"url": self.fakes[number].url}
        self.said[f"server {number}"] = told

    def delivered(self, key: str) -> Any:
        kind, place = key.split()
        return self.said.get(f"{kind} {self.numbers.get(place)}")


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_that_are_placed_elsewhere(
    servers: int, tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hangs, as where a machine is gone; who placed it says so, and another is ordered in its place."""
    monkeypatch.delenv("POSTTRAIN_VLLM", raising=False)
    let_go = threading.Event()

    def hang(place: str, body: dict[str, Any]) -> None:
        if place == "1/1" and body["seed"] == 2:
            world.said["lost 1/1"] = {"why": "node 10.0.0.7 is gone"}
            let_go.wait(60)
            raise Reset

    world = Elsewhere(tiny.model, hang)
    engine = vllm(tiny.model, tiny.tokenizer, servers=servers, port=7000, **(ASKING | {"concurrency": 1}))
    engine = engine.settle(tmp_path, world, "server")
    assert isinstance(engine, FollowingFleet)
    engine.sync(2)
    groups = engine.generate(PROMPTS[:2], [[1, 2], [3, 4]], SAMPLING)
    let_go.set()
    assert ids_of(groups) == ids_of(NativeEngine(tiny.model).generate(PROMPTS[:2], [[1, 2], [3, 4]], SAMPLING))
    assert [(order["name"], order["anew"]) for order in world.orders] == [
        *((f"server-{number + 1}", False) for number in range(servers)),
        ("server-1", True),
    ]
    assert [order["options"]["port"] for order in world.orders] == [*range(7000, 7000 + servers), 7000]
    assert Path(world.orders[0]["model"], "config.json").is_file()
    assert asked_seeds(world.fakes["1/2"])[0] == 2
    assert 1 not in asked_seeds(world.fakes["1/2"])
    assert world.fakes["1/2"].label.endswith(":2")
    (told,) = engine.take_notices()
    which = "the vLLM server" if servers == 1 else f"vLLM server 1 of {servers}"
    assert told.startswith(f"{which} failed: node 10.0.0.7 is gone; it is started again")


class Kept(Elsewhere):
    """One server is there already, from the processes before."""

    def __init__(self, model: Any, there: FakeFollower) -> None:
        super().__init__(model, lambda place, body: None)
        self.there = there

    def order(self, name: str, facts: Any) -> None:
        super().order(name, facts)
        if not facts["anew"]:
            number = self.numbers[f"{name}/{facts['mark']}"]
            self.said[f"server {number}"] = {"url": self.there.url, "is_kept": True}


def served_by(model: Any, folder: Path) -> FakeFollower:
    card = {"id": "policy", "root": str(folder / "server-1" / "served"), "max_model_len": 512}
    return FakeFollower(model, cards=[card])


def test_a_server_that_lives_is_given_the_weights_of_now(tiny: LoadedModel, tmp_path: Path) -> None:
    """And makes a new group with the process that is there now: the one before had made one with it, too."""
    with served_by(tiny.model, tmp_path) as there:
        for version in (3, 7):
            world = Kept(tiny.model, there)
            engine = vllm(tiny.model, tiny.tokenizer, **ASKING).settle(tmp_path, world, "server")
            engine.sync(version)
            groups = engine.generate(PROMPTS[:1], [[1, 2]], SAMPLING)
            assert ids_of(groups) == ids_of(NativeEngine(tiny.model).generate(PROMPTS[:1], [[1, 2]], SAMPLING))
            assert [order["anew"] for order in world.orders] == [False]
            assert there.label.endswith(f":{version}")
        assert there.said.count("/init_weight_transfer_engine") == 2
        assert engine.take_notices() == []


def test_a_server_between_two_versions_is_not_kept(tiny: LoadedModel, tmp_path: Path) -> None:
    with served_by(tiny.model, tmp_path) as there:
        there.paused.set()
        world = Kept(tiny.model, there)
        engine = vllm(tiny.model, tiny.tokenizer, **ASKING).settle(tmp_path, world, "server")
        engine.sync(3)
        assert [order["anew"] for order in world.orders] == [False, True]
        assert there.said == []
        assert world.fakes["1/2"].label.endswith(":3")


def test_a_kept_server_that_takes_no_weights_is_started_again(tiny: LoadedModel, tmp_path: Path) -> None:
    with served_by(tiny.model, tmp_path) as there:
        there.refuses = "/init_weight_transfer_engine"
        world = Kept(tiny.model, there)
        engine = vllm(tiny.model, tiny.tokenizer, **ASKING).settle(tmp_path, world, "server")
        engine.sync(3)
        assert [order["anew"] for order in world.orders] == [False, True]
        (said,) = engine.take_notices()
        assert said.startswith(f"the vLLM server failed: {there.url}: the weights could not be handed over")


def test_one_server_for_several_processes_is_a_fleet_of_one(
    tiny: LoadedModel, started: type[OwnStandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that one that dies is started again for all of them."""
    monkeypatch.setenv("POSTTRAIN_VLLM", sys.executable)
    engine = vllm(tiny.model, tiny.tokenizer, **ASKING).settle(tmp_path, Ranks().world(0))
    assert isinstance(engine, FollowingFleet)
    assert [member.folder for member in engine.members] == [tmp_path / "server-1"]


def test_what_a_node_lacks_is_for_the_user_to_mend(tiny: LoadedModel, tmp_path: Path) -> None:
    world = Elsewhere(tiny.model, lambda place, body: None, problem="node 10.0.0.7: POSTTRAIN_VLLM is not set")
    engine = vllm(tiny.model, tiny.tokenizer, servers=2, **ASKING)
    with pytest.raises(UsageError, match=r"^node 10\.0\.0\.7: POSTTRAIN_VLLM is not set"):
        engine.settle(tmp_path, world, "server").sync(0)


# Whole runs.


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in as a process in vLLM's place."""
    program = Path(__file__).parent / "fake_server_process.py"
    path = os.pathsep.join(p for p in sys.path if p)
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} {program} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("POSTTRAIN_VLLM", str(tmp_path / "python"))


def test_a_run_with_two_servers_of_which_one_is_killed(tmp_path: Path, python: None) -> None:
    """The rollouts are those of a run with one server that nothing befell."""
    pids: list[int] = []

    class Killing(Events):
        def __call__(self, event: str, facts: dict[str, Any]) -> None:
            super().__call__(event, facts)
            if event == "step" and facts["step"] == 1:
                pids.append(int((tmp_path / "two" / "server-2" / "pid").read_text()))
                os.kill(pids[0], signal.SIGKILL)

    def recipe(servers: int) -> Any:
        engine = {"name": "vllm", "retries": 0, "timeout_seconds": 120, "servers": servers}
        return make_recipe("grpo", rollout={"engine": engine}, train={"steps": 3})

    events = Killing()
    assert watched(tmp_path / "two", recipe(2), events).step == 3
    (said,) = [facts["message"] for facts in events.of("notice")]
    assert said.startswith("vLLM server 2 of 2 failed: ")
    assert int((tmp_path / "two" / "server-2" / "pid").read_text()) != pids[0]
    run(tmp_path / "one", recipe(1))
    ours, theirs = ([(r.step, r.version, r.token_ids) for r in recorded(tmp_path / n)[0]] for n in ("two", "one"))
    assert ours == theirs
    assert len(ours) == 48


# What cannot be.

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"servers": 0}, r"rollout\.engine\.servers: .*greater than or equal to 1"),
        (
            {"servers": 2, "url": [URL, "http://127.0.0.1:8"]},
            r"^rollout\.engine\.servers: 2 are started by a run, and rollout\.engine\.url names servers that run",
        ),
        ({"servers": 2, "url": URL}, r"^rollout\.engine\.servers: 2 are started by a run, and rollout\.engine\.url"),
        (
            {"url": [URL, "http://localhost:9/v1/"]},
            r"^rollout\.engine\.url: http://127\.0\.0\.1:9 and http://localhost:9/v1/ are one",
        ),
        ({"servers": 1025}, r"^rollout\.engine\.servers: 1025; 1024 at most"),
        ({"url": []}, r"^rollout\.engine\.url: an empty list"),
        ({"url": "ftp://there"}, r"^rollout\.engine\.url: 'ftp://there' is no server's URL"),
        ({"url": [URL, "ftp://there"]}, r"^rollout\.engine\.url: 'ftp://there' is no server's URL"),
        ({"servers": 2, "gpus": [0, 1, 2]}, r"^rollout\.engine\.gpus: 3 GPUs cannot be shared out among 2 servers"),
        ({"gpus": [0, -1]}, r"^rollout\.engine\.gpus: -1 is no GPU's number; they count from 0"),
        ({"servers": 2, "gpus": [1, 1]}, r"^rollout\.engine\.gpus: \[1, 1\] names one twice"),
        ({"servers": 2, "port": 65535}, r"^rollout\.engine\.port: 65536 is no port"),
        ({"port": -1}, r"^rollout\.engine\.port: -1 is no port"),
        ({"servers": 2, "restarts": -1}, r"engine\.restarts: -1; give 0 or more"),
    ],
)
def test_what_is_refused(engine: dict[str, Any], message: str) -> None:
    """When the recipe is read, so by a dry run, too."""
    with pytest.raises(UsageError, match=message) as caught:
        make_recipe("grpo", rollout={"engine": {"name": "vllm", **engine}})
    assert caught.value.exit_code == 2


def test_an_evaluation_starts_no_servers() -> None:
    message = r"^--engine\.servers: 2 are started .* an evaluation starts none; give --engine\.url"
    with pytest.raises(RecipeError, match=message):
        registry.find("engine", "vllm").options({"servers": 2}, "--engine")


def test_one_port_for_two_fleets() -> None:
    """Of rollouts, and of evaluations with options of their own."""
    engine = {"name": "vllm", "servers": 2, "port": 8000}
    for port, message in ((8001, r"^eval\.engine\.port: at port 8001 a server of rollout\.engine listens"), (8002, "")):
        evaluation = {"every": 1, "engine": {"name": "vllm", "port": port, "retries": 0}}
        recipe = make_recipe("grpo", rollout={"engine": engine}, eval=evaluation).resolve()
        with pytest.raises(RecipeError, match=message) if message else nullcontext():
            words_of(recipe)
    same = {"every": 1, "engine": engine}
    assert words_of(make_recipe("grpo", rollout={"engine": engine}, eval=same).resolve()).guarantee == "L1"
    ahead = make_recipe("grpo", rollout={"engine": engine, "staleness": 1}, eval=same).resolve()
    with pytest.raises(RecipeError, match=r"^eval\.engine\.port: at port 8000 "):
        words_of(ahead)


@pytest.fixture
def six_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVIDIA's driver lists on a machine that has six."""
    for number in range(6):
        (tmp_path / "driver" / f"0000:{number:02x}:00.0").mkdir(parents=True)
    monkeypatch.setattr("posttrain.engines.vllm.server.DRIVER_GPUS", tmp_path / "driver")


def test_gpus_that_are_not_there(
    tiny: LoadedModel, started: type[OwnStandIn], six_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before a server is started on them, which would take a minute to fail."""
    message = r"^rollout\.engine\.gpus: \[5, 7\]: this machine has no GPU 7; its 6 have the numbers 0 to 5$"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the trainer's, which says nothing about the server's
    with pytest.raises(UsageError, match=message):
        own_fleet(tiny, tmp_path, gpus=[5, 7], servers=2, where="rollout.engine")
    monkeypatch.setattr("posttrain.engines.vllm.server.DRIVER_GPUS", tmp_path / "none")
    own_fleet(tiny, tmp_path, gpus=[0], servers=1).close()  # another maker's, hidden from this process: nobody can tell
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"this machine has no GPU 0; it has none that CUDA sees$"):
        own_fleet(tiny, tmp_path, gpus=[0], servers=1)
    assert not started.all


def test_gpus_and_ports_are_shared_out(
    tiny: LoadedModel, started: type[OwnStandIn], six_gpus: None, tmp_path: Path
) -> None:
    port = free_port()
    engine = own_fleet(tiny, tmp_path, gpus=[0, 1, 2, 5], servers=2, port=port)
    engine.sync(0)
    assert [server.environment["CUDA_VISIBLE_DEVICES"] for server in started.all] == ["0,1", "2,5"]
    assert [server.port for server in started.all] == [port, port + 1]
    assert [server.log.parent.name for server in started.all] == ["server-1", "server-2"]


def test_one_of_a_list_that_is_not_there(tiny: LoadedModel, three: list[FakeFollower], tmp_path: Path) -> None:
    missing = f"http://127.0.0.1:{free_port()}"
    engine = {"name": "vllm", "url": [three[0].url, missing], "collectives": "gloo"}
    recipe = make_recipe("grpo", rollout={"engine": engine})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    code, error = end_of(start(train_command(tmp_path, recipe), environment, cwd=tmp_path))
    assert code == 2
    assert f"{missing}: no vLLM server answers there" in error
    assert "Traceback" not in error


def test_an_evaluation_beside_needs_servers_of_its_own() -> None:
    rollout = {"engine": {"name": "vllm", "url": [URL, "http://127.0.0.1:8"]}, "staleness": 1, "max_tokens": 6}
    for url, is_refused in ((URL, True), ("http://127.0.0.1:7", False)):
        evaluation = {"every": 2, "n": 2, "engine": {"name": "vllm", "url": url}}
        recipe = make_recipe("grpo", rollout=rollout, eval=evaluation).resolve()
        if is_refused:
            with pytest.raises(RecipeError, match=r"eval\.engine: the server of rollout\.engine"):
                words_of(recipe)
        else:
            assert words_of(recipe).guarantee == "L1"


def test_a_key_goes_to_the_hosts_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.addresses import key_for

    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_API_HOST", "node-1, node-2")
    for host in ("node-1", "node-2", "127.0.0.1"):
        assert key_for(f"http://{host}:8000", "engine.url", "VLLM_API_KEY") == "secret"
    for host in ("node", "node-3", "node-1.evil"):
        with pytest.raises(UsageError, match=rf"engine\.url: http://{host}:8000: VLLM_API_KEY holds a key"):
            key_for(f"http://{host}:8000", "engine.url", "VLLM_API_KEY")
