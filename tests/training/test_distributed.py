"""Training in several processes is training in one, but for the order of sums."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import broadcast_case, process_group_of, shard_case, train_case
from safetensors.torch import load_file
from torch import Tensor

from closeness import approx, logprob_rounding
from fake_follower import FakeFollower
from posttrain.errors import RecipeError
from posttrain.models.load import load_model
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.recipes.recipe import validate_recipe
from posttrain.recipes.sections import ModelSection
from posttrain.store.metrics import MetricsLog, MetricsRow, is_evaluation
from posttrain.training.checkpoint import load_checkpoint
from posttrain.training.checks import resolve_components
from posttrain.training.memory import Memory, estimate_memory
from refusing import refuses
from small_runs import make_recipe, recorded, same_bits, save_perturbed, saved_tensors, shallow, steps_of

SHARDED = {"scale": {"sharding": "fsdp2"}}
SHORT = {"num_prompts": 6, "group_size": 4, "max_tokens": 8, "temperature": 1.5}
TRAIN: dict[str, Any] = {"steps": 5, "lr": 1e-4, "micro_batch_tokens": 400}
EVALUATION = {"every": 5, "num_examples": 6, "max_tokens": 6}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "data": {"batch_size": 6}, "eval": {**EVALUATION, "loss": True}},
    "grpo": {
        "kind": "grpo",
        "rollout": SHORT,
        "regularize": {"kl_coef": 0.1},
        "eval": {**EVALUATION, "num_kl_prompts": 5},
    },
    "ppo": {"kind": "grpo", "objective": "ppo", "rollout": SHORT, "kl_in_reward": {"weight": 0.1}},
    "dpo": {"kind": "judged", "objective": "dpo", "data": {"batch_size": 6}},
    "reward model": {
        "kind": "judged",
        "data": {"batch_size": 6},
        "eval": {"every": 5, "num_examples": 6, "tasks": ["small_runs:judged_sums"]},
    },
    "lora": {"kind": "grpo", "rollout": SHORT, "model": {"adapter": {"rank": 4}}, "optimizer": "muon"},
    "dynamic sampling": {"kind": "grpo", "rollout": {**SHORT, "drop_uniform_groups": True}, "train": {"ppo_epochs": 2}},
    "mixture": {
        "kind": "grpo",
        "task": {
            "name": "mixture",
            "parts": [{"name": f"{n}-steps", "task": {"name": "stories", "size": 32, "max_steps": n}} for n in (1, 2)],
        },
        "rollout": SHORT,
    },
    "lora and adamw": {"kind": "grpo", "rollout": SHORT, "model": {"adapter": {"rank": 4}}},
    "recomputed": {"kind": "sft", "data": {"batch_size": 6}, "train": {"gradient_checkpointing": True}},
    "teacher": {
        "kind": "grpo",
        "rollout": SHORT,
        "objective": "on_policy_distillation",
        "teacher": {"name": "tiny"},
    },  # see below
}
# Nothing samples in these, so that with fsdp2 no process has a whole model.
NO_SAMPLES: dict[str, dict[str, Any]] = {
    "sft alone": {"kind": "sft", "data": {"batch_size": 6}, "eval": {"every": 0}},
    "sft alone, lora": {
        "kind": "sft",
        "data": {"batch_size": 6},
        "eval": {"every": 0},
        "model": {"adapter": {"rank": 4}},
        "optimizer": "muon",
    },
    "sft alone, recomputed": {
        "kind": "sft",
        "data": {"batch_size": 6},
        "eval": {"every": 0},
        "train": {"gradient_checkpointing": True, "micro_batch_tokens": 60},
    },
    "kto on an adapter": {  # the reference is the adapter as it was; see below
        "kind": "judged",
        "objective": "kto",
        "data": {"batch_size": 5},
        "eval": {"every": 0},
        "model": {},
        "optimizer": "muon",
    },
    "kto": {
        "kind": "judged",
        "objective": "kto",
        "data": {"batch_size": 5},
        "train": {"micro_batch_tokens": 60},
        "eval": {"every": 1, "num_examples": 6, "tasks": ["small_runs:judged_sums"]},
    },
}
CASES |= NO_SAMPLES


def slow(*cases: str) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def one_layer() -> dict[str, Any]:
    """Changes of a recipe for the first layer of the model, which shows what the fast tests are about."""
    return {"model": {"name": shallow(1)}}


def recipe_of(case: str, dtype: str = "float64", **changes: Any) -> dict[str, Any]:
    """A resolved recipe's plain data."""
    usual = {"rewards": ["small_runs:vowel_share"]} if CASES[case]["kind"] == "grpo" else {}  # it varies at any depth
    about = {"train": {}, "model": {}, **usual, **CASES[case], **changes}
    about["train"] = {**TRAIN, **CASES[case].get("train", {}), **changes.get("train", {})}
    about["model"] = {**CASES[case].get("model", {}), **changes.get("model", {}), "dtype": dtype}
    return make_recipe(**about).dump()


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, float]:
    """The largest difference of weights: relative to the largest of its tensor, and as it is."""
    assert left.keys() == right.keys()
    relative, absolute = 0.0, 0.0
    for name, tensor in left.items():
        if tensor.is_floating_point() and "optimizer" not in name:
            largest = float((tensor - right[name]).abs().max())
            relative, absolute = max(relative, largest / max(1e-12, float(tensor.abs().max()))), max(absolute, largest)
    return relative, absolute


def tokens_of(folder: Path) -> list[tuple[int, ...]]:
    """Return the tokens that were sampled in training, in order."""
    return [tuple(r.completion) for r in recorded(folder)[0]]


def check_same(ours: Path, theirs: Path, steps: int = 5) -> None:
    """Loss, norm, weights and rollouts of two runs in float64: sums of the same numbers in another order."""
    first, second = steps_of(ours), steps_of(theirs)
    assert len(first) == len(second) == steps
    for one, other in zip(first, second, strict=True):
        assert one["grad_norm"] > 0, "there is nothing to compare"
        assert other["loss"] == approx(one["loss"], rel=1e-10, abs=1e-13)
        assert other["grad_norm"] == approx(one["grad_norm"], rel=1e-10)
        assert other.keys() == one.keys()
        assert other == approx(one | {"padding_share": other["padding_share"]}, rel=1e-7, abs=1e-3)
    assert difference(saved_tensors(ours, steps), saved_tensors(theirs, steps))[0] == approx(0.0, abs=1e-10)
    assert tokens_of(ours) == tokens_of(theirs)


@pytest.fixture(scope="module", autouse=True)
def _models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the teacher and the adapter of the cases that name them."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    chosen = {item.callspec.params.get("case") for item in items}
    if "teacher" in chosen:
        CASES["teacher"]["teacher"] = {"name": save_perturbed(tmp_path_factory.mktemp("teacher"))}
    if "kto on an adapter" in chosen:
        adapter = tmp_path_factory.mktemp("adapter")
        train_case(SINGLE_PROCESS, recipe_of("lora", "float32", train={"steps": 1, "lr": 1e-2}), adapter)
        CASES["kto on an adapter"]["model"]["name"] = str(adapter / "checkpoints" / "step-000001")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a case trained by one process, which every number of processes is compared with."""

    folders: dict[str, Path] = {}

    def train_alone(case: str, steps: int = 5, **changes: Any) -> Path:
        recipe = recipe_of(case, train={"steps": steps}, **changes)
        if (key := str(recipe)) not in folders:
            folders[key] = tmp_path_factory.mktemp("alone")
            train_case(SINGLE_PROCESS, recipe, folders[key])
        return folders[key]

    return train_alone


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def several(request: pytest.FixtureRequest) -> Iterator[ProcessGroup]:
    """A world of so many processes; there is one at a time."""
    with process_group_of(request.param) as process_group:
        yield process_group


@pytest.mark.parametrize("case", ["ppo"])
def test_several_processes_train_as_one(
    case: str, several: ProcessGroup, alone: Callable[..., Path], tmp_path: Path
) -> None:
    train_case(several, recipe_of(case, train={"steps": 2}, **one_layer()), tmp_path)
    check_same(alone(case, 2, **one_layer()), tmp_path, steps=2)


@pytest.mark.exact  # in parts, bf16 rounds alike but for single bits
@pytest.mark.parametrize("case", ["sft", *slow("grpo", "lora and adamw")])
def test_products_in_bf16_with_the_weights_in_parts(case: str, several: ProcessGroup, tmp_path: Path) -> None:
    """As one process computes them, nearer than fp32 is; what is added up and what moves is fp32.

    Sums over rows in another order turn the last of bf16's 8 bits over now and then.
    """
    coarse = {"steps": 2, "precision": "bf16", "lr": 1e-7}
    changes: dict[str, Any] = {"eval": {}, **one_layer()}
    if CASES[case]["kind"] == "grpo":
        changes["rollout"] = {**SHORT, "old_logprobs": "trainer"}
    recipes = {
        "alone": recipe_of(case, "float32", **changes, train=coarse),
        "exact": recipe_of(case, "float32", **changes, train=coarse | {"precision": "fp32"}),
        "parted": recipe_of(case, "float32", **changes, train=coarse, **SHARDED),
    }
    for name, recipe in recipes.items():
        train_case(several if name == "parted" else SINGLE_PROCESS, recipe, tmp_path / name)
    alone, exact, parted = (steps_of(tmp_path / name) for name in recipes)
    # a mean of log-probabilities near -8, or of 0 but for their rounding where all ratios are 1 and advantages sum to 0
    one_token = logprob_rounding(1, size=8.0, dtype=torch.bfloat16)
    assert parted[0]["loss"] == approx(alone[0]["loss"], abs=one_token / math.sqrt(alone[0]["trained_tokens"]))
    one, other, sharded = (steps[0]["grad_norm"] for steps in (alone, exact, parted))
    assert sharded == approx(one, rel=1e-3)
    assert abs(sharded - other) > 1e-4 * other, "nothing was computed in bf16: fp32 is within 1e-5"
    if several.size == 2:  # four parts of a gradient, each rounded to bf16, are as far from one as fp32 is
        assert 3 * abs(sharded - one) < abs(other - one)
    tensors = [saved_tensors(tmp_path / name, 2) for name in ("alone", "parted")]
    floats = {name for name, x in tensors[1].items() if x.is_floating_point()}
    assert {tensors[1][name].dtype for name in floats} == {torch.float32}
    assert difference(*tensors)[1] <= 4 * coarse["lr"], "two updates in either direction"
    begun = load_model(ModelSection(name=shallow(1)), seed=0).model.state_dict()
    moved = {n.partition(":")[2]: x for n, x in tensors[1].items()}
    if "adapter" not in CASES[case].get("model", {}):  # bf16 has no step of 1e-7 at a weight of 0.02
        assert all(not torch.equal(moved[n], x) for n, x in begun.items() if n in moved)
    shapes, _ = shard_case(several, recipes["parted"])
    assert {kind for *_, kinds, _ in shapes for kind in kinds} == {"torch.float32"}


@pytest.mark.parametrize("case", ["sft alone", "sft", "ppo"])
def test_memory_of_a_sharded_run_counts_what_the_first_process_holds(case: str, several: ProcessGroup) -> None:
    """A part of each weight, its gradient and two moments; with sampling processes an unsharded copy of the weight."""
    recipe = recipe_of(case, "float32", **SHARDED, **one_layer())
    shapes, _ = shard_case(several, recipe)
    recipe["scale"]["processes"] = several.size
    plan = estimate_memory(validate_recipe(recipe).resolve())
    assert isinstance(plan, Memory)
    parts = sum(math.prod(trained) for _, _, _, trained, _, _ in shapes)
    unsharded = sum(math.prod(own) for *_, own in shapes)
    held = 16 * parts
    if case != "sft alone":
        assert unsharded > 1.9 * parts
        held += 4 * unsharded
    counts = 4 * len(shapes)  # AdamW's number of updates, of each tensor
    assert plan.weights + plan.gradients + plan.optimizer + plan.heads == approx(held + counts, abs=counts)
    assert plan.gathered > 0


WRITTEN_TOGETHER = {"scale": {"sharding": "fsdp2", "checkpoint": "sharded"}}


def stored(folder: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, however many processes wrote it."""
    checkpoint = load_checkpoint(folder / "checkpoints", step)
    assert checkpoint is not None
    weights = {n: t for file in sorted(checkpoint.path.glob("model*.safetensors")) for n, t in load_file(file).items()}
    return {**weights, **checkpoint.heads, **{f"optimizer of {name}": t for name, t in checkpoint.optimizer.items()}}


@pytest.mark.parametrize("case", ["sft alone", *slow("sft", "ppo")])
def test_a_checkpoint_that_all_have_written_goes_on_anywhere(
    case: str, several: ProcessGroup, alone: Callable[..., Path], tmp_path: Path
) -> None:
    """It holds, bit for bit, what the main process gathers; in another number of processes it goes on as any."""
    short: dict[str, Any] = {"train": {"steps": 2}, **one_layer()}
    together, gathered = (recipe_of(case, **short, **scale) for scale in (WRITTEN_TOGETHER, SHARDED))
    for name, recipe in (("together", together), ("gathered", gathered)):
        train_case(several, recipe, tmp_path / name, stop_after=1)
    assert same_bits(stored(tmp_path / "together", 1), stored(tmp_path / "gathered", 1))
    folder = tmp_path / "together" / "checkpoints" / "step-000001"
    assert len(list((folder / "optimizer").glob("*.safetensors"))) == several.size
    assert {file.suffix for file in folder.rglob("*") if file.is_file()} <= {".json", ".safetensors", ".jinja"}
    shutil.copytree(tmp_path / "together", tmp_path / "alone")
    train_case(SINGLE_PROCESS, recipe_of(case, **short), tmp_path / "alone", resume=True)
    check_same(alone(case, 2, **one_layer()), tmp_path / "alone", steps=2)
    train_case(several, together, tmp_path / "whole")
    train_case(several, together, tmp_path / "together", resume=True)
    assert same_bits(stored(tmp_path / "whole", 2), stored(tmp_path / "together", 2))


def test_shares_of_what_all_have_whole_are_refused() -> None:
    with refuses(RecipeError, "scale.checkpoint"):
        resolve_components(make_recipe("sft", scale={"processes": 2, "checkpoint": "sharded"}))


def test_a_share_that_is_missing_or_damaged_leaves_the_checkpoint_before(several: ProcessGroup, tmp_path: Path) -> None:
    recipe = recipe_of("sft alone", train={"steps": 2, "save_every": 1}, **one_layer(), **WRITTEN_TOGETHER)
    train_case(several, recipe, tmp_path)
    last = tmp_path / "checkpoints" / "step-000002"
    file = sorted((last / "optimizer").iterdir())[1]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    checkpoint = load_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    damaged = f"step-000002: optimizer/{file.name} differs from its SHA-256 in the manifest"
    assert (checkpoint.step, checkpoint.skipped) == (1, [damaged])
    file.unlink()
    longer = {**recipe, "train": {**recipe["train"], "steps": 3}}
    result, events = train_case(several, longer, tmp_path, resume=True)
    assert (result.step, [info["step"] for info in events.of("step")]) == (3, [2, 3])
    assert any("is missing" in info["message"] for info in events.of("notice"))


def _evaluations(folder: Path) -> list[MetricsRow]:
    return [row for row in MetricsLog(folder / "metrics.jsonl").read() if is_evaluation(row)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_several_processes_train_every_method_as_one(
    case: str, several: ProcessGroup, alone: Callable[..., Path], tmp_path: Path
) -> None:
    _, events = train_case(several, recipe_of(case), tmp_path)
    check_same(alone(case), tmp_path)
    assert len(events.of("step")) == 5
    ours, theirs = (MetricsLog(folder / "metrics.jsonl").read() for folder in (tmp_path, alone(case)))
    for row, other in zip(ours, theirs, strict=True):  # evaluations among them
        changed = {"padding_share": row.metrics["padding_share"]} if "loss" in row.metrics else {}
        assert row.metrics == approx(other.metrics | changed, rel=1e-7, abs=1e-12)


@pytest.fixture(scope="module")
def stopped() -> dict[tuple[str, int], Path]:
    """By case and number of processes, a run that was stopped after two updates; filled by the test below."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sft", "dynamic sampling"])
def test_a_run_goes_on_in_another_number_of_processes(
    case: str,
    several: ProcessGroup,
    alone: Callable[..., Path],
    stopped: dict[tuple[str, int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    recipe, process_groups = recipe_of(case), {1: SINGLE_PROCESS, several.size: several}
    for size, process_group in process_groups.items():
        folder = stopped[case, size] = tmp_path_factory.mktemp("stopped")
        result, _ = train_case(process_group, recipe, folder, stop_after=2)
        assert (result.step, result.reason) == (2, "interrupted")
    for (name, began), folder in stopped.items():
        if name == case:  # 2 to 4 among them, when 4 processes are there
            for size, process_group in process_groups.items():
                goes_on = tmp_path_factory.mktemp("goes_on") / "run"
                shutil.copytree(folder, goes_on)
                _, events = train_case(process_group, recipe, goes_on, resume=True)
                check_same(alone(case), goes_on)
                output = any("resuming with" in info["message"] for info in events.of("notice"))
                assert output == (size != began)
                if size == began == several.size:
                    whole = tmp_path_factory.mktemp("whole")
                    train_case(process_group, recipe, whole)
                    assert same_bits(saved_tensors(whole, 5), saved_tensors(goes_on, 5))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("dynamic sampling", "mixture", "teacher")])
def test_shards_train_as_one_process(
    case: str, several: ProcessGroup, alone: Callable[..., Path], tmp_path: Path
) -> None:
    """The norm among them: it is that of the whole gradient, and not of one process's part."""
    train_case(several, recipe_of(case, **SHARDED), tmp_path)
    check_same(alone(case), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["grpo", "sft", "ppo", "lora", "kto"])
def test_answers_of_a_server_leave_each_process_its_part(case: str, several: ProcessGroup, tmp_path: Path) -> None:
    """Weights go out and the probe is computed tensor by tensor, with all processes: none has a whole model.

    Of five problems and micro-batches of 60 tokens one process has more than another, and repeats of the other's count
    nowhere, not in what is held out and not in the drift either.
    """
    tiny = load_model(ModelSection(name=shallow(2), dtype="float64"), seed=0)
    folders = {}
    for name, process_group, scale in (("alone", SINGLE_PROCESS, {}), ("parted", several, SHARDED)):
        folders[name] = tmp_path / name
        with FakeFollower(tiny.model) as server:
            engine = {"name": "vllm", "url": server.url}
            shown = {
                **CASES[case].get("eval", {}),
                **EVALUATION,
                "num_examples": 5,
                "num_kl_prompts": 5,
                "engine": engine,
            }
            about: dict[str, Any] = {"model": {"name": shallow(2)}}
            about |= {} if case in ("kto", "sft") else {"rollout": {**SHORT, "engine": engine}}
            uneven = {"steps": 3, "micro_batch_tokens": 60}
            recipe = recipe_of(case, **about, eval=shown, train=uneven, **scale)
            train_case(process_group, recipe, folders[name])
            assert server.label.endswith(":3")
            shapes, _ = shard_case(process_group, recipe)
    check_same(folders["alone"], folders["parted"], steps=3)
    ours, theirs = ([row.metrics for row in _evaluations(folder)] for folder in folders.values())
    assert theirs == [approx(row, rel=1e-7, abs=1e-12) for row in ours]
    assert [kept[0] for *_, kept in shapes] == [-(-whole[0] // several.size) for whole, *_ in shapes]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in ("sft", "sft alone, lora") else pytest.mark.slow) for c in ("sft", *NO_SAMPLES)],
)
def test_a_whole_model_stays_next_to_the_parts_where_something_samples(case: str, several: ProcessGroup) -> None:
    """Otherwise a process has its rows of every tensor, and a model is gathered where it is read."""
    recipe, plain = (recipe_of(case, **one_layer(), **scale) for scale in (SHARDED, {}))
    shapes, _ = shard_case(several, recipe)
    rows = [whole[0] for whole, *_ in shapes]
    kept = [of[-1][0] for of in shapes]
    assert kept == (rows if case == "sft" else [-(-of // several.size) for of in rows])
    assert [of[0] for of in shapes] == [of[0] for of in shard_case(SINGLE_PROCESS, plain)[0]]


def test_broadcast_gives_the_value_of_rank_0_and_names_calls_that_differ(several: ProcessGroup) -> None:
    results = broadcast_case(several)
    assert len(results) == several.size
    for received, error in results:
        assert received["rank"] == 0
        assert received["ids"] == list(range(1000))
        assert received["x"].equal(torch.ones(2, 3))
        assert "call of rank" in error
        assert "of the others" in error


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "scale"), [(1, {}), (2, SHARDED)])
def test_several_processes_sample_ahead_as_one(
    staleness: int, scale: dict[str, Any], several: ProcessGroup, tmp_path: Path
) -> None:
    """Each samples its share; stopped, the run goes on in as many processes to the bit, and in one."""
    about: dict[str, Any] = {"rollout": {**SHORT, "staleness": staleness}, "train": {"steps": 4, "lr": 1e-3}}
    about["model"] = {"name": shallow(2)}
    plain, shared = recipe_of("grpo", **about), recipe_of("grpo", **about, **scale)
    train_case(SINGLE_PROCESS, plain, tmp_path / "alone")
    train_case(several, shared, tmp_path / "together")
    check_same(tmp_path / "alone", tmp_path / "together", steps=4)
    versions = {(row.step, row.version) for row in recorded(tmp_path / "together")[0]}
    assert versions == {(batch + 1, max(0, batch - staleness)) for batch in range(4)}
    train_case(several, shared, tmp_path / "stopped", stop_after=2)
    shutil.copytree(tmp_path / "stopped", tmp_path / "in one")
    train_case(several, shared, tmp_path / "stopped", resume=True)
    assert same_bits(saved_tensors(tmp_path / "together", 4), saved_tensors(tmp_path / "stopped", 4))
    train_case(SINGLE_PROCESS, plain, tmp_path / "in one", resume=True)
    check_same(tmp_path / "alone", tmp_path / "in one", steps=4)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_several_processes_leave_out_the_rows_that_one_does(
    several: ProcessGroup, tmp_path: Path, sharding: str
) -> None:
    """Groups of equal rewards; in some steps only few rows are left, so that a process may have none."""
    changes: dict[str, Any] = {"rewards": ["small_runs:many_vowels"], "rollout": SHORT, "scale": {"sharding": sharding}}
    train = {"steps": 4, "save_every": 0, "micro_batch_tokens": 60}
    skips = recipe_of("grpo", **(changes | one_layer() | {"regularize": {}}), train=train)
    trains = {**skips, "train": {**skips["train"], "skip_zero_rows": False}}
    train_case(several, skips, tmp_path / "several")
    train_case(SINGLE_PROCESS, skips, tmp_path / "one")
    train_case(SINGLE_PROCESS, trains, tmp_path / "trains")
    rows = {name: steps_of(tmp_path / name) for name in ("several", "one", "trains")}
    counts = [row["computed_rows"] for row in rows["several"]]
    assert counts == [row["computed_rows"] for row in rows["one"]]
    assert min(counts) < max(counts) == 24.0
    for ours, theirs, whole in zip(*rows.values(), strict=True):
        assert ours["grad_norm"] == approx(theirs["grad_norm"], rel=1e-9)
        assert ours["grad_norm"] == approx(whole["grad_norm"], rel=1e-9)
        assert ours["loss"] == approx(whole["loss"], abs=1e-12)
