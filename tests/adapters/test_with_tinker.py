"""Tinker's client and cookbook, unmodified, train ``tiny`` behind ``posttrain serve --train``."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import OF_EMBEDDED, approx
from posttrain.models.sources import EMBEDDED
from posttrain.recipes.sections import ModelSection
from posttrain.training.stepwise.datums import Datum
from posttrain.training.stepwise.losses import choose_loss
from posttrain.training.stepwise.trainee import AdamStep, AdapterChoice, Trainee
from serving import Served, serving

pytestmark = pytest.mark.adapters

NAME = "Qwen/Qwen3-8B-Base"  # a name that the cookbook has a renderer for (role_colon); the model is ``tiny``
OPTIONS = ("tiny", "--train", "--model-name", NAME)
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"The sum is \\boxed{{{a + b}}}"},
        ]
    }
    for a in range(8)
    for b in range(8)
]
# In place of GSM8K: sums of two numbers up to 3, with an answer in its form.
SUMS = [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a in range(4) for b in range(4)]
# The prompts of the RL loop over them, with their answers: what it is to begin from.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOWN = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9. \\boxed{3}"
)
ANSWERED = [
    {
        "messages": [
            {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
            {"role": "assistant", "content": SHOWN},
            {"role": "user", "content": row["question"] + SUFFIX},
            {"role": "assistant", "content": f"\\boxed{{{row['answer'].removeprefix('#### ')}}}"},
        ]
    }
    for row in SUMS
]


# The prompts of the cookbook's arithmetic, with their answers.
SHOWN_SUMS = [
    {
        "messages": [
            {"role": "user", "content": "What is 4 + 5?"},
            {"role": "assistant", "content": "9"},
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"].removeprefix("#### ")},
        ]
    }
    for row in SUMS
]
TAUGHT_PASSES = 8
RL_RATE = 1.5e-4
LOCAL = {"HuggingFaceH4/no_robots": ROWS, "openai/gsm8k": SUMS}  # rows in place of those of the hub


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key, the tokenizer and the data sets of this machine."""
    pytest.importorskip("tinker", reason="tinker is not installed (make test-adapters ADAPTERS=tinker)")
    pytest.importorskip(
        "tinker_cookbook", reason="tinker-cookbook is not installed (make test-adapters ADAPTERS=tinker)"
    )
    stand_in(monkeypatch)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this machine's key, tokenizer and rows in place of remote ones."""
    import datasets
    from tinker_cookbook import tokenizer_utils
    from transformers import AutoTokenizer

    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    tokenizer_utils.register_tokenizer(NAME, lambda: AutoTokenizer.from_pretrained(EMBEDDED["tiny"]))
    local = LOCAL

    def load(name: str, *_: object, **__: object) -> Any:
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(local[name])})

    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder, *OPTIONS) as server:
        yield server


def run_sl_loop(url: str, log: Path, **options: Any) -> list[dict[str, Any]]:
    """Run the cookbook's loop; return the metrics of its steps."""
    from tinker_cookbook.recipes import sl_loop

    settings: dict[str, Any] = {"batch_size": 8, "learning_rate": 2e-3, "lora_rank": 8, "save_every": 3} | options
    sl_loop.main(sl_loop.Config(base_url=url, log_path=str(log), model_name=NAME, max_length=512, **settings))
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def newest_states(log: Path) -> dict[str, str]:
    """The paths of the last checkpoint that a loop wrote down."""
    record: dict[str, str] = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    return record


def saved(folder: Path, path: str, name: str) -> bytes:
    """A file of a saved state."""
    model, kind, state = path.removeprefix("tinker://").split("/")
    (found,) = (folder / "runs" / "tinker" / model.replace(":", "-") / kind / state).glob(f"step-*/{name}")
    return found.read_bytes()


def own(datum: Any) -> Datum:
    """A row of the client as one of ours."""
    inputs = {name: torch.tensor(x.tolist()) for name, x in datum.loss_fn_inputs.items()}
    targets = inputs.pop("target_tokens")
    return Datum(tuple(datum.model_input.to_ints()), targets, {name: x.float() for name, x in inputs.items()})


def test_sl_loop_has_our_losses_at_every_step(served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tinker

    sent: list[tuple[list[Any], Any]] = []
    backward, step = tinker.TrainingClient.forward_backward, tinker.TrainingClient.optim_step

    def watch(client: Any, data: Any, loss_fn: str, *rest: Any) -> Any:
        sent.append((data, None))
        return backward(client, data, loss_fn, *rest)

    def watch_step(client: Any, params: Any) -> Any:
        sent[-1] = (sent[-1][0], params)
        return step(client, params)

    monkeypatch.setattr(tinker.TrainingClient, "forward_backward", watch)
    monkeypatch.setattr(tinker.TrainingClient, "optim_step", watch_step)
    metrics = run_sl_loop(served.url, folder / "sl")
    assert metrics[-1]["train_mean_nll"] < 0.5 * metrics[0]["train_mean_nll"], "it learns"
    ours = Trainee(ModelSection(name="tiny"), AdapterChoice(rank=8))
    assert len(sent) == len(metrics) == 8
    for (data, params), row in zip(sent, metrics, strict=True):
        rows = [own(datum) for datum in data]
        total, _ = ours.evaluate(rows, choose_loss("cross_entropy", {}), learns=True)
        weight = sum(float(datum.inputs["weights"].sum()) for datum in rows)
        assert row["train_mean_nll"] == approx(total / weight, rel=1e-6)
        ours.update(AdamStep.model_validate(params.model_dump()))
        assert row["loss_sum"] == approx(total, rel=1e-6)
    path = newest_states(folder / "sl")["state_path"]
    mine = ours.save(folder / "own", with_optimizer=True, note={})
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert saved(folder, path, name) == (mine / name).read_bytes(), "the same weights, to the bit"


def test_sl_loop_of_a_killed_server_is_resumed_to_the_bit(folder: Path) -> None:
    """The server is killed behind step 5, and the loop goes on from the state of step 3 on a new one."""
    if not (folder / "sl").is_dir():
        pytest.skip("the undisturbed loop did not run")
    log = folder / "killed"
    with serving(folder, *OPTIONS, "--states", "runs/tinker-2") as first:
        run_sl_loop(first.url, log, max_steps=5)
        assert first.process is not None
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    records = (log / "checkpoints.jsonl").read_text().splitlines()
    kept = [line for line in records if json.loads(line)["name"] == "000003"]
    (log / "checkpoints.jsonl").write_text("".join(f"{line}\n" for line in kept))  # as if killed before the last save
    with serving(folder, *OPTIONS, "--states", "runs/tinker-2") as second:
        run_sl_loop(second.url, log)
    model, kind, name = newest_states(log)["state_path"].removeprefix("tinker://").split("/")
    (place,) = (folder / "runs" / "tinker-2" / model.replace(":", "-") / kind / name).glob("step-*")
    undisturbed = newest_states(folder / "sl")["state_path"]
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (place / file).read_bytes() == saved(folder, undisturbed, file)


def small_sums(steps: int) -> Any:
    """The cookbook's arithmetic with numbers up to 3, which ``tiny`` can learn."""
    import chz
    import numpy as np
    from tinker_cookbook import renderers
    from tinker_cookbook.recipes.math_rl import arithmetic_env as cookbook
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    class Small(cookbook.ArithmeticDataset):
        def _make_env_group_builder(self, rng: np.random.RandomState) -> Any:
            class Below:
                randint = staticmethod(lambda low, high: rng.randint(0, 4))

            return super()._make_env_group_builder(Below())  # type: ignore[arg-type]

    @chz.chz
    class Builder(cookbook.ArithmeticDatasetBuilder):
        async def __call__(self) -> Any:
            renderer = renderers.get_renderer(self.renderer_name, tokenizer=get_tokenizer(NAME))
            return Small(self.batch_size, renderer, self.group_size, self.n_batches), None

    return Builder(
        batch_size=8, model_name_for_tokenizer=NAME, renderer_name="role_colon", n_batches=steps, group_size=8
    )


@pytest.fixture(scope="module")
def taught(served: Served, folder: Path) -> dict[str, str]:
    """States of ``tiny`` that was shown the prompts of the arithmetic, and answers some of them."""
    from tinker_cookbook.renderers import TrainOnWhat

    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        patch.setitem(LOCAL, "HuggingFaceH4/no_robots", TAUGHT_PASSES * SHOWN_SUMS)
        answer = TrainOnWhat.LAST_ASSISTANT_MESSAGE
        run_sl_loop(served.url, folder / "taught", learning_rate=6e-3, lora_rank=32, save_every=0, train_on_what=answer)
    return newest_states(folder / "taught")


def run_rl(served: Served, log: Path, loss: str, start: str, steps: int) -> list[dict[str, Any]]:
    """Run the cookbook's RL from a saved state; return the metrics of its steps."""
    from tinker_cookbook.rl import train

    config = train.Config(
        base_url=served.url,
        log_path=str(log),
        model_name=NAME,
        recipe_name="rl",
        renderer_name="role_colon",
        dataset_builder=small_sums(steps),
        loss_fn=loss,  # type: ignore[arg-type]
        load_checkpoint_path=start,
        max_tokens=8,
        eval_every=0,
        save_every=2,
        lora_rank=32,
        learning_rate=RL_RATE,
    )
    asyncio.run(train.main(config))
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [row for row in metrics if "optim/kl_sample_train_v1" in row]


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_rl_train_samples_what_it_trains(served: Served, folder: Path, taught: dict[str, str], loss: str) -> None:
    """RL over the cookbook's arithmetic from answers of which some are right: the sampler agrees with the trainer."""
    log = folder / f"rl-{loss}"
    steps = run_rl(served, log, loss, taught["state_path"], 3)
    assert len(steps) == 3
    for row in steps:
        assert row["optim/kl_sample_train_v1"] == approx(0.0, abs=OF_EMBEDDED)
        assert row["env/all/by_group/frac_mixed"] > 0.5, "groups with different rewards"
        assert row["grad_norm"] > 0
    moved = saved(folder, newest_states(log)["state_path"], "adapter_model.safetensors")
    assert moved != saved(folder, taught["state_path"], "adapter_model.safetensors")


def test_rl_train_raises_the_mean_reward(served: Served, folder: Path, taught: dict[str, str]) -> None:
    steps = run_rl(served, folder / "rl-rises", "importance_sampling", taught["state_path"], 12)
    rewards = [row["env/all/reward/total"] for row in steps]
    assert len(rewards) == 12
    for row in steps:
        assert row["optim/kl_sample_train_v1"] == approx(0.0, abs=OF_EMBEDDED)
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15, rewards


def test_rl_loop_trains_with_gspo(served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins from a state of the SL loop, which its folder names as if it were to go on from there."""
    pytest.importorskip("math_verify", reason="math-verify, which this loop grades by, is not installed")
    pytest.importorskip("pylatexenc", reason="pylatexenc, which this loop grades by, is not installed")
    from tinker_cookbook.recipes import rl_loop
    from tinker_cookbook.renderers import TrainOnWhat

    monkeypatch.setitem(LOCAL, "HuggingFaceH4/no_robots", 32 * ANSWERED)
    answer = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    options = {"learning_rate": 6e-3, "lora_rank": 32, "save_every": 0, "train_on_what": answer}
    run_sl_loop(served.url, folder / "answered", **options)
    log = folder / "rl-loop"
    log.mkdir()
    start = newest_states(folder / "answered")
    (log / "checkpoints.jsonl").write_text(json.dumps(start | {"name": "start", "batch": 0}) + "\n")
    rl_loop.main(
        rl_loop.Config(
            base_url=served.url,
            log_path=str(log),
            model_name=NAME,
            batch_size=4,
            group_size=8,
            max_tokens=24,
            save_every=2,
            learning_rate=1e-3,
            loss_fn="gspo",
        )
    )
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 4
    assert any("grad_norm" in row for row in metrics), "a group with different rewards"
    moved = saved(folder, newest_states(log)["state_path"], "adapter_model.safetensors")
    assert moved != saved(folder, start["state_path"], "adapter_model.safetensors")


def test_a_loss_of_the_client_runs_there(served: Served) -> None:
    """The loss and its gradients come from the client; a step along them lowers it."""
    import tinker
    from tinker import types

    with tinker.ServiceClient(base_url=served.url) as service:
        client = service.create_lora_training_client(base_model=NAME, rank=4).result()
        ids = client.get_tokenizer().encode("Tom has 3 apples and 4 pears.")
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
        )

        def squared(data: Any, logprobs: Any) -> tuple[torch.Tensor, dict[str, float]]:
            return sum((own**2).sum() for own in logprobs), {}

        losses = []
        for _ in range(3):
            losses.append(client.forward_backward_custom([datum], squared).result().metrics["loss:sum"])
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        assert losses[2] < losses[1] < losses[0]
        sampler = client.save_weights_and_get_sampling_client().result()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
        trained = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        assert scored[1:] == approx(trained, abs=OF_EMBEDDED)


def test_what_is_refused_ends_the_call(served: Served) -> None:
    import tinker
    from tinker import types

    with tinker.ServiceClient(base_url=served.url) as service:
        client = service.create_lora_training_client(base_model=NAME, rank=2).result()
        datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})
        with pytest.raises(tinker.BadRequestError, match="weights: missing"):
            client.forward_backward([datum], "cross_entropy").result()
        with pytest.raises(tinker.NotFoundError, match="base_model"):
            service.create_lora_training_client(base_model="Qwen/Qwen3-4B", rank=2).result()
        with pytest.raises(tinker.RequestFailedError, match="forward_backward"):
            client.optim_step(types.AdamParams()).result()
