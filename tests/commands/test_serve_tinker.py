"""`posttrain serve --train` over a real socket, in the wire format of Tinker's protocol."""

from __future__ import annotations

import gc
import json
import math
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from closeness import OF_EMBEDDED, approx
from posttrain.cli import main
from posttrain.errors import StorageError
from posttrain.randomness import derive_key
from posttrain.recipes.sections import ModelSection
from posttrain.runs.models import find_source
from posttrain.sampling.base import Sampling
from posttrain.sampling.models import open_model
from posttrain.training.stepwise.datums import Datum
from posttrain.training.stepwise.losses import choose_loss
from posttrain.training.stepwise.trainee import AdamStep, AdapterChoice, Trainee
from serving import Served, serving_here
from tinker_client import API, TinkerClient, loss_request, tokens_of

pytest.importorskip("starlette", reason="the extra `tinker` is not installed")
pytest.importorskip("google.protobuf", reason="the extra `tinker` is not installed")

IDS = tuple(range(30, 50))
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}


def row(last: int = 60, **inputs: Tensor) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """A row whose targets are the next tokens; without inputs its weights are 1."""
    targets = torch.tensor([*IDS[1:], last])
    if not inputs:
        inputs = {"weights": torch.ones(len(IDS))}
    return IDS, {"target_tokens": targets, **inputs}


def rl_row(seed: int) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(IDS), generator=generator)
    return row(60 + seed, advantages=advantages, logprobs=-2 * torch.rand(len(IDS), generator=generator))


def datum(ids: tuple[int, ...], inputs: dict[str, Tensor]) -> Datum:
    return Datum(ids, inputs["target_tokens"], {name: x for name, x in inputs.items() if name != "target_tokens"})


HUGE = torch.full((len(IDS),), 1e38)


class Counted(Trainee):
    """A model in training, and those that exist."""

    alive: ClassVar[weakref.WeakSet[Counted]] = weakref.WeakSet()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.alive.add(self)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving_here(
        "tiny", "--train", "--states", str(folder), "--model-name", "Org/Name", "--max-models", "3"
    ) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[TinkerClient]:
    client = TinkerClient(served)
    yield client
    client.ask(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})


@pytest.mark.parametrize("rank", [4, 0])
def test_losses_and_weights_are_those_of_this_package(client: TinkerClient, folder: Path, rank: int) -> None:
    """The same rows, losses and steps give the same sums and, saved, the same weights, bit for bit."""
    client.create(rank)
    own = Trainee(ModelSection(name="tiny"), AdapterChoice(rank=rank, seed=1))
    steps: list[tuple[str, list[Any]]] = [("cross_entropy", [row(), row(61)]), ("ppo", [rl_row(1), rl_row(2)])]
    for name, rows in steps:
        total, logprobs = client.loss(rows, name)
        expected, expected_logprobs = own.evaluate([datum(*one) for one in rows], choose_loss(name, {}), learns=True)
        assert total == expected
        assert all(torch.equal(a, b) for a, b in zip(logprobs, expected_logprobs, strict=True))
        metrics = client.numbered("optim_step", adam_params=ADAM)["metrics"]
        assert metrics == own.update(AdamStep(**ADAM))
    path = client.numbered("save_weights", path="after-two")["path"]
    assert path == f"tinker://{client.model}/weights/after-two"
    mine = own.save(folder / f"own-{rank}", with_optimizer=True, note={})
    for name in ("optimizer.safetensors", "adapter_model.safetensors" if rank else "model.safetensors"):
        (saved,) = folder.glob(f"{client.session}-train-0/weights/after-two/step-000002/{name}")
        assert saved.read_bytes() == (mine / name).read_bytes()


def test_a_new_server_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Unseeded samples too: their random numbers follow from the step of the weights and the number of the request."""

    def step(client: TinkerClient, number: int) -> list[int]:
        session = client.numbered("save_weights_for_sampler", sampling_session_seq_id=number)["sampling_session_id"]
        ids, logprobs = tokens_of(client.sample(session, IDS, max_tokens=6).sequences[0])
        whole = (*IDS, *ids[:-1])
        padding = torch.zeros(len(IDS) - 1)
        inputs = {
            "target_tokens": torch.tensor([*whole[1:], ids[-1]]),
            "advantages": torch.cat([padding, torch.full((len(ids),), 0.5)]),
            "logprobs": torch.cat([padding, torch.tensor(logprobs)]),
        }
        client.loss([(whole, inputs)], "importance_sampling")
        client.numbered("optim_step", adam_params=ADAM)
        return ids

    def finish(client: TinkerClient, numbers: range) -> tuple[list[list[int]], dict[str, bytes]]:
        sampled = [step(client, number) for number in numbers]
        path = client.numbered("save_weights", path="end")["path"]
        place = tmp_path / path.split("/")[2].replace(":", "-") / "weights" / "end" / "step-000003"
        return sampled, {name: (place / f"{name}.safetensors").read_bytes() for name in ("adapter_model", "optimizer")}

    with serving_here("tiny", "--train", "--states", str(tmp_path)) as server:
        client = TinkerClient(server)
        client.create(4, user_metadata={"renderer_name": "role_colon"})
        step(client, 0)
        path = client.numbered("save_weights", path="one", user_metadata={"batch": "1"})["path"]
        undisturbed = finish(client, range(1, 3))
    with serving_here("tiny", "--train", "--states", str(tmp_path)) as server:
        client = TinkerClient(server)
        status, run = server.ask(f"{API}/training_runs/{path.split('/')[2]}")
        assert (status, run["lora_rank"], run["user_metadata"]) == (200, 4, {"renderer_name": "role_colon"})
        assert run["last_checkpoint"]["tinker_path"].endswith("/weights/end")
        body = {"session_id": client.session, "model_seq_id": 0, "path": path, "optimizer": True}
        client.model = client.keep(client.post("load_weights", body))["model_id"]
        assert client.model == f"{client.session}:train:0"
        assert client.post("get_info", {"model_id": client.model})["lora_rank"] == 4
        assert finish(client, range(1, 3)) == undisturbed
    assert not list(tmp_path.glob("*/sampler_weights/*")), "weights of sampling sessions do not stay"


def test_samples_are_those_of_the_engine(client: TinkerClient) -> None:
    opened = open_model(find_source("tiny", "runs"))
    session = client.post("create_sampling_session", {"session_id": client.session, "base_model": "Org/Name"})
    name = session["sampling_session_id"]
    assert client.served.ask(f"{API}/samplers/{name}")[1]["base_model"] == "Org/Name"
    drawn = client.sample(name, IDS, 0, num_samples=3, max_tokens=9, seed=5, temperature=0.7, stop=[])
    keys = [derive_key(5, "generate", number) for number in range(3)]
    (expected,) = opened.engine.generate([IDS], [keys], Sampling(9, 0.7))
    for sequence, own in zip(drawn.sequences, expected, strict=True):
        ids, logprobs = tokens_of(sequence)
        assert (ids, sequence.stop_reason) == (list(own.ids), 1)
        assert logprobs == approx(list(own.logprobs), abs=OF_EMBEDDED)


def test_a_stop_text_ends_an_answer_and_prompts_are_scored(client: TinkerClient) -> None:
    opened = open_model(find_source("tiny", "runs"))
    body = {"session_id": client.session, "base_model": "tiny"}
    session = client.post("create_sampling_session", body)["sampling_session_id"]
    whole, _ = tokens_of(client.sample(session, IDS, 1, max_tokens=12, seed=2, stop=[]).sequences[0])
    stop = opened.tokenizer.decode(whole[:2])[-2:]
    message = client.sample(session, IDS, 2, max_tokens=12, seed=2, stop=[stop])
    ids, _ = tokens_of(message.sequences[0])
    assert whole[: len(ids)] == ids
    assert len(ids) <= 2
    assert stop in opened.tokenizer.decode(ids)
    assert message.sequences[0].stop_reason == 0
    text = tuple(opened.tokenizer.encode("Tom has 12 apples. He gives 3 to Ann. Question: how many are left?"))
    with torch.no_grad():
        table = opened.model(torch.tensor([text])).logits[0].double().log_softmax(-1)
    expected = table[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    more = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 1}
    message = client.sample(session, text, 3, max_tokens=2, temperature=0.0, **more)
    scored = np.frombuffer(message.prompt_logprobs, "<f4")
    assert math.isnan(scored[0])
    assert scored[1:].tolist() == approx(expected.tolist(), abs=OF_EMBEDDED)
    top = np.frombuffer(message.topk_prompt_logprobs.token_ids, "<i4").reshape(len(text), 2)
    assert (top[0].tolist(), top[1:].tolist()) == ([0, 0], table[:-1].topk(2, -1).indices.tolist())
    greedy = message.sequences[0]
    assert np.frombuffer(greedy.topk_sampled_logprobs.token_ids, "<i4").tolist() == tokens_of(greedy)[0]
    last = client.sample(session, text, 4, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=3)
    assert np.isnan(np.frombuffer(last.prompt_logprobs, "<f4")).tolist() == [True] * (len(text) - 3) + [False] * 3


def test_saved_weights_are_sampled_and_kept_apart(client: TinkerClient) -> None:
    """A snapshot stays as it was while its model is trained, and its log-probabilities are the trainer's."""
    client.create(4)
    before, (trained,) = client.loss([row()], "cross_entropy", forward_only=True)
    path = client.numbered("save_weights_for_sampler", path="start")["path"]
    client.loss([row()], "cross_entropy")
    client.numbered("optim_step", adam_params=ADAM | {"learning_rate": 1e-2, "grad_clip_norm": 0.0})
    assert client.loss([row()], "cross_entropy", forward_only=True)[0] < before - 1.0
    body = {"session_id": client.session, "model_path": path}
    session = client.post("create_sampling_session", body)["sampling_session_id"]
    message = client.sample(session, (*IDS, 60), 0, max_tokens=1, prompt_logprobs=True)
    assert np.frombuffer(message.prompt_logprobs, "<f4")[1:].tolist() == trained.tolist()
    info = client.post("weights_info", {"tinker_path": path})
    assert (info["is_lora"], info["lora_rank"]) == (True, 4)
    listed = client.served.ask(f"{API}/training_runs/{client.model}/checkpoints")[1]["checkpoints"]
    assert [one["tinker_path"] for one in listed] == [path]


def test_two_clients_train_two_models(served: Served) -> None:
    clients = [TinkerClient(served), TinkerClient(served)]
    for one in clients:
        one.create(4)
    first, _ = clients[0].loss([row()], "cross_entropy")
    clients[0].numbered("optim_step", adam_params=ADAM)
    other, _ = clients[1].loss([row()], "cross_entropy")
    assert first == other
    assert clients[0].loss([row()], "cross_entropy", forward_only=True)[0] != other
    third, fourth = TinkerClient(served), TinkerClient(served)
    third.create(4)
    body = {"session_id": fourth.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    status, answer = fourth.ask("create_model", body)
    assert (status, "--max-models" in answer["error"]["message"]) == (400, True)
    for one in (*clients, third):
        assert one.ask(f"sessions/{one.session}/finish", {"reason": {"type": "success"}})[0] == 200
    assert clients[0].ask("session_heartbeat", {"session_id": clients[0].session})[0] == 410
    fourth.create(4, number=1)
    fourth.numbered("unload_model")
    assert fourth.ask("get_info", {"model_id": fourth.model})[0] == 404


def test_a_request_that_is_sent_again_counts_once(client: TinkerClient) -> None:
    client.create(4)
    content = loss_request(client.model, 1, [row()], "cross_entropy")
    first, again = client.send(content)[1], client.send(content)[1]
    assert first == again
    client.number = 1
    once, _ = client.loss([row()], "cross_entropy", forward_only=True)
    metrics = client.numbered("optim_step", adam_params=ADAM)["metrics"]
    assert metrics["loss_sum"] == once, "its gradients were added once"
    status, answer = client.send(loss_request(client.model, 3, [row()], "cross_entropy"))
    assert (status, "seq_id" in answer["error"]["message"]) == (400, True)


def test_an_answer_that_is_not_there_is_asked_for_again(client: TinkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for samples behind the loading of a model waits, and can be cancelled; others cannot."""
    monkeypatch.setattr("posttrain.commands.serve.tinker.application.WAIT_SECONDS", 0.001)
    body = {"session_id": client.session, "base_model": "tiny"}
    session = client.post("create_sampling_session", body)["sampling_session_id"]
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    loading = client.post("create_model", body)
    prompt = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2}}
    waiting = client.post("asample", {"sampling_session_id": session, "seq_id": 0, **prompt})
    status, answer = client.ask("retrieve_future", {"request_id": waiting["request_id"]})
    assert (status, answer["type"], answer["queue_state"]) == (408, "try_again", "active")
    assert client.ask("cancel_future", {"request_id": loading["request_id"]})[0] == 400
    assert client.post("cancel_future", {"request_id": waiting["request_id"]}) == {}
    assert client.keep(loading)["model_id"] == f"{client.session}:train:0"
    assert client.keep(waiting)["category"] == "user"


def test_what_computed_a_result_is_released_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A result that waits to be fetched holds no model and no rows, after success and after an error."""
    monkeypatch.setattr("posttrain.commands.serve.tinker.service.Trainee", Counted)
    with serving_here("tiny", "--train", "--states", str(tmp_path), "--max-models", "1") as server:
        client = TinkerClient(server)
        for number in range(3):
            client.create(2, number)
            client.number = 0
            client.loss([row()], "cross_entropy")
            assert "error" in client.keep(
                client.send(loss_request(client.model, 2, [row(weights=HUGE)], "cross_entropy"))[1]
            )
            client.number = 2
            client.numbered("unload_model")
            gc.collect()
            assert len(Counted.alive) == 0


def test_requests_that_wait_have_a_bound_in_bytes(client: TinkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.create(4)
    release = threading.Event()
    monkeypatch.setattr("posttrain.commands.serve.tinker.work.MOST_WAITING_BYTES", 3_000)
    monkeypatch.setattr(Trainee, "evaluate", lambda *_, **__: release.wait(30) and (0.0, []))
    content = [loss_request(client.model, number, [row()] * 10, "cross_entropy") for number in range(1, 4)]
    answers = [client.send(one) for one in content]
    waiting = [answer for status, answer in answers if status == 200]
    refused = [(status, answer["error"]["code"]) for status, answer in answers if status != 200]
    release.set()
    assert len(waiting) >= 1
    assert set(refused) == {(429, "server_busy")}
    for promise in waiting:
        client.keep(promise)


def test_a_model_is_not_reserved_by_a_request_that_cannot_wait(
    client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.commands.serve.tinker.work.MOST_WAITING", 0)
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    assert client.ask("create_model", body)[0] == 429
    monkeypatch.undo()
    assert "model_id" in client.keep(client.post("create_model", body))


def test_a_state_that_cannot_be_replaced_is_kept(
    client: TinkerClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older state goes when the one that takes its name is complete."""
    client.create(2)
    path = client.numbered("save_weights", path="mine")["path"]
    place = folder / client.model.replace(":", "-") / "weights"
    before = {file.name: file.read_bytes() for file in (place / "mine").rglob("*") if file.is_file()}
    save = Trainee.save

    def fail(self: Trainee, *given: Any, **named: Any) -> Path:
        save(self, *given, **named)
        raise StorageError("the disk is full")

    client.loss([row()], "cross_entropy")
    client.numbered("optim_step", adam_params=ADAM)
    monkeypatch.setattr(Trainee, "save", fail)
    assert "disk is full" in client.numbered("save_weights", path="mine", overwrite=True)["error"]
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in (place / "mine").rglob("*") if file.is_file()} == before
    assert client.numbered("load_weights", path=path, optimizer=True)["path"] == path
    assert client.numbered("save_weights", path="mine", overwrite=True)["path"] == path
    client.ask(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
    assert [one.name for one in place.iterdir()] == ["mine"]


def test_the_client_is_told_how_to_send(client: TinkerClient) -> None:
    config = client.post("client/config", {"sdk_version": "0.38.0"})
    assert (config["parallel_fwdbwd_chunks"], config["proto_compress_fwdbwd"]) == (False, False)
    assert client.post("client/dynamic_config", {"sdk_version": "0.38.0"})["sample_cancel_enabled"]
    assert client.post("telemetry", {"events": [1]}) == {"status": "accepted"}
    assert client.served.ask(f"{API}/healthz") == (200, {"status": "ok"})
    models = client.served.ask(f"{API}/get_server_capabilities")[1]["supported_models"]
    assert {"tiny", "Org/Name"} <= {one["model_name"] for one in models}
    assert {one["max_context_length"] for one in models} == {1024}


SESSION = {"session_id": "SESSION", "model_seq_id": 9}
PROMPT = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {}}


def prompted(**chunk: Any) -> dict[str, Any]:
    """A request for samples with a prompt of one part."""
    return {"sampling_session_id": "SAMPLER", "prompt": {"chunks": [chunk]}, "sampling_params": {}}


ONES = torch.ones(len(IDS))
PAIRS = torch.ones(len(IDS), 2)
BAD: list[tuple[str, Any, int, str]] = [
    ("create_session", b"{", 400, "JSON"),
    ("create_session", b"[" * 100_000, 400, "JSON"),
    ("create_session", [1], 400, "object"),
    ("create_session", {"tag": []}, 400, "tag"),
    ("create_session", {"user_metadata": {"a": "x" * 30_000}}, 400, "user_metadata"),
    ("create_session", b" " * 4_000_001, 413, "bytes"),
    ("create_model", {"session_id": "no", "model_seq_id": 0, "base_model": "tiny"}, 404, "session_id"),
    ("create_model", SESSION | {"base_model": "tinyy"}, 404, "'tiny'"),
    ("create_model", SESSION | {"base_model": "../../etc"}, 404, "base_model"),
    ("create_model", SESSION | {"base_model": "tiny", "lora_config": {"rank": -1}}, 400, "rank"),
    ("create_model", SESSION | {"base_model": "tiny", "lora_config": {"rank": 10**9}}, 400, "rank"),
    ("create_model", SESSION | {"base_model": "tiny", "optimizer_config": {"type": "dimuon"}}, 400, "optimizer_config"),
    ("create_model", SESSION | {"base_model": "tiny", "lora_config": {"rank": 4, "alpha": 1}}, 400, "alpha"),
    ("get_info", {"model_id": "../../x"}, 404, "model_id"),
    ("optim_step", {"model_id": "0" * 16 + ":train:0", "adam_params": {}}, 404, "model_id"),
    ("optim_step", {"model_id": "MODEL", "adam_params": {"learning_rate": -1}}, 400, "learning_rate"),
    ("optim_step", {"model_id": "MODEL", "adam_params": {"beta1": 1.0}}, 400, "beta1"),
    ("optim_step", {"model_id": "MODEL", "optimizer_params": {"type": "dimuon"}}, 400, "optimizer_params"),
    ("optim_step", b'{"model_id": "MODEL", "adam_params": {"learning_rate": NaN}}', 400, "learning_rate"),
    ("save_weights", {"model_id": "MODEL", "path": "../../out"}, 400, "path"),
    ("save_weights", {"model_id": "MODEL", "path": "/tmp/out"}, 400, "path"),
    ("save_weights", {"model_id": "MODEL", "path": ".."}, 400, "path"),
    ("save_weights", {"model_id": "MODEL", "path": "a\x00b"}, 400, "path"),
    ("save_weights_for_sampler", {"model_id": "MODEL", "path": ".session-0"}, 400, "path"),
    ("load_weights", SESSION | {"path": "tinker://../weights/x", "optimizer": True}, 404, "model_id"),
    ("load_weights", SESSION | {"path": "tinker://MODEL/../x", "optimizer": True}, 400, "path"),
    ("load_weights", SESSION | {"path": "tinker://MODEL/weights/..", "optimizer": True}, 400, "path"),
    ("load_weights", SESSION | {"path": "tinker://MODEL/weights/none", "optimizer": True}, 404, "path"),
    ("load_weights", SESSION | {"path": "/etc/passwd", "optimizer": True}, 400, "path"),
    ("load_weights", {"path": "tinker://MODEL/weights/none", "optimizer": True}, 400, "model_id"),
    ("create_sampling_session", {"session_id": "SESSION"}, 400, "base_model"),
    ("create_sampling_session", {"session_id": "SESSION", "model_path": "hf://x"}, 400, "path"),
    ("asample", {"sampling_session_id": "no", **PROMPT}, 404, "sampling_session_id"),
    ("asample", {"sampling_session_id": "SAMPLER", **PROMPT, "num_samples": 0}, 400, "num_samples"),
    ("asample", {"sampling_session_id": "SAMPLER", **PROMPT, "prompt_alt_tokens_k": 2}, 400, "prompt_alt_tokens_k"),
    ("asample", {"sampling_session_id": "SAMPLER", **PROMPT, "record_stability_info": True}, 400, "record_stability"),
    ("asample", {"sampling_session_id": "SAMPLER", **PROMPT, "prompt_logprobs_last_n": 5}, 400, "last_n"),
    ("asample", {"sampling_session_id": "SAMPLER", "prompt": {"chunks": []}, "sampling_params": {}}, 400, "empty"),
    ("asample", {"sampling_session_id": "SAMPLER", **PROMPT, "sampling_params": {"top_p": 0}}, 400, "top_p"),
    ("asample", {"sampling_session_id": "SAMPLER", **PROMPT, "sampling_params": {"stop": [""]}}, 400, "stop"),
    ("asample", prompted(tokens=[99_999]), 400, "99999"),
    ("asample", prompted(tokens=[1] * 2000), 400, "1024"),
    ("asample", prompted(type="image"), 400, "prompt"),
    ("retrieve_future", {"request_id": "no"}, 404, "request_id"),
    ("cancel_future", {"request_id": "no"}, 404, "request_id"),
    ("weights_info", {"tinker_path": "tinker://a/b/c/d"}, 400, "path"),
    ("forward", {}, 404, "forward_backward"),
]  # fmt: skip


@pytest.fixture(scope="module")
def names(served: Served) -> dict[str, str]:
    """What the words in capitals of requests stand for."""
    client = TinkerClient(served)
    client.create(2)
    body = {"session_id": client.session, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", body)["sampling_session_id"]
    return {"SESSION": client.session, "MODEL": client.model, "SAMPLER": sampler}


@pytest.mark.parametrize(("path", "body", "status", "said"), BAD)
def test_a_bad_request_is_refused_in_one_line(
    served: Served, names: dict[str, str], path: str, body: Any, status: int, said: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    for word, value in names.items():
        content = content.replace(word.encode(), value.encode())
    found, answer = served.ask(f"{API}/{path}", content)
    message = answer["error"]["message"]
    assert (found, said in message) == (status, True), message
    assert "Traceback" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("rows", "name", "said"),
    [
        ([], "cross_entropy", "data"),
        ([row()], "nll", "loss_fn"),
        ([row()], "ppo", "logprobs"),
        ([row(weights=torch.full((len(IDS),), float("inf")))], "cross_entropy", "weights"),
        ([row(weights=torch.ones(3))], "cross_entropy", "weights"),
        ([(IDS, {"target_tokens": (5000 * ONES).long(), "weights": ONES})], "cross_entropy", "5000"),
        ([row(advantages=torch.full((len(IDS),), float("nan")), logprobs=torch.zeros(len(IDS)))], "ppo", "advantages"),
        (
            [(IDS, {"advantages": PAIRS, "logprobs": PAIRS, "target_tokens": PAIRS.long()})],
            "ppo",
            "single target",
        ),
    ],
)  # fmt: skip
def test_rows_that_a_loss_cannot_read_are_refused(
    client: TinkerClient, names: dict[str, str], rows: Any, name: str, said: str
) -> None:
    status, answer = client.send(loss_request(names["MODEL"], 0, rows, name))
    assert (status, said in answer["error"]["message"]) == (400, True), answer


def test_other_forms_of_rows_are_refused(client: TinkerClient, names: dict[str, str]) -> None:
    content = loss_request(names["MODEL"], 0, [row()], "cross_entropy")
    assert client.send(content, "application/json")[0] == 415
    assert client.send(content, **{"Content-Encoding": "zstd"})[0] == 415
    assert client.send(b"\xff" * 10)[0] == 400
    assert client.send(b"\x00" * 32_000_001)[0] == 413
    assert client.send(loss_request("0" * 16 + ":train:5", 0, [row()], "cross_entropy"))[0] == 404


def test_what_fails_while_it_is_computed_is_the_answer(client: TinkerClient) -> None:
    client.create(2)
    answer = client.numbered("optim_step", adam_params={})
    assert (answer["category"], "forward_backward" in answer["error"]) == ("user", True)
    client.numbered("save_weights", path="once")
    answer = client.numbered("save_weights", path="once")
    assert (answer["category"], "overwrite" in answer["error"]) == ("user", True)
    assert client.numbered("save_weights", path="once", overwrite=True)["path"].endswith("/once")
    path = client.numbered("save_weights_for_sampler", path="to-sample")["path"]
    body = {"session_id": client.session, "model_seq_id": 5, "path": path, "optimizer": True}
    assert client.ask("load_weights", body)[0] == 400


def test_another_page_and_a_client_without_the_key_are_refused(served: Served, tmp_path: Path) -> None:
    status, answer = served.ask(f"{API}/healthz", Host="evil.example")
    assert (status, "--train" in answer["error"]["message"]) == (403, True)
    assert served.ask(f"{API}/healthz", Origin="http://evil.example")[0] == 403
    key = "tml-0123456789abcdef"
    with serving_here("tiny", "--train", "--states", str(tmp_path), "--api-key", key) as guarded:
        assert guarded.ask(f"{API}/healthz")[0] == 401
        assert guarded.ask(f"{API}/healthz", **{"X-API-Key": "tml-other"})[0] == 401
        for header in ({"X-API-Key": key}, {"Authorization": f"Bearer {key}"}):
            assert guarded.ask(f"{API}/healthz", **header)[0] == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "1"], "--seed"),
        (["--states", "x"], "--states"),
        (["--train", "--record", "x.jsonl"], "--record"),
        (["--train", "--max-tokens", "5"], "--max-tokens"),
        (["--train", "--template", "chat"], "--template"),
        (["--train", "--host", "0.0.0.0"], "--api-key"),
    ],
)
def test_options_of_the_other_protocol_are_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_second_server_of_the_same_states_is_refused(
    served: Served, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "tiny", "--train", "--states", str(folder), "--port", str(served.port + 1)]) != 0
    assert "--states" in capsys.readouterr().err
