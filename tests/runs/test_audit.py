"""``doctor --audit``: clean updates agree, faults that no balance sees do not, and what cannot be audited says why."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain as pt
from closeness import allclose
from faults.patches import of_attribute, of_update
from posttrain.cli import main
from posttrain.errors import PosttrainError, UsageError
from posttrain.models.forward.micro import MicroBatching
from posttrain.runs.diagnosis.audit import adam, audit
from posttrain.runs.diagnosis.findings import RunFinding
from posttrain.runs.directory import RunDirectory
from posttrain.training import build, loop, optimizer
from refusing import refuses
from runs.test_doctor import changed, status_of, trained
from small_runs import one_layer_recipe, run

EVERY = {"steps": 3, "save_every": 1, "keep_checkpoints": 9}
LORA = {"adapter": {"rank": 2}}
DECAY = {"name": "adamw", "weight_decay": 0.3, "betas": [0.8, 0.95]}


def recipe_of(kind: str, **changes: Any) -> Any:
    changes["train"] = EVERY | changes.get("train", {})
    if kind == "dpo":
        return one_layer_recipe("judged", objective="dpo", **changes)
    if kind == "lora":
        changes["model"] = LORA | changes.get("model", {})
        return one_layer_recipe("grpo", regularize={"kl_coef": 0.1}, **changes)
    return one_layer_recipe(kind, **changes)


def checks(findings: list[RunFinding], kind: str) -> dict[str, RunFinding]:
    return {one.check.removeprefix("audit: "): one for one in findings if one.kind == kind}


WITH_WEIGHTS = {
    "forward",
    "loss",
    "norm",
    "gradient sample",
    "Adam's count",
    "gradient",
    "second moments",
    "weights",
    "update",
}
CLEAN: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo"},
    "sft": {"kind": "sft"},
    "dpo": {"kind": "dpo"},
    "lora": {"kind": "lora"},
    "minibatches with all terms": {
        "kind": "grpo",
        "regularize": {"kl_coef": 0.1, "entropy_coef": 0.01},
        "train": {"steps": 4, "ppo_epochs": 2, "num_minibatches": 2, "micro_batch_rows": 2},
    },
    "the trainer's log-probabilities, corrected": {
        "kind": "grpo",
        "rollout": {"old_logprobs": "trainer", "temperature": 0.7},
        "correction": "token_tis",
        "train": {"ppo_epochs": 2},
    },
    "decay, warm-up and a clip that acts": {
        "kind": "sft",
        "optimizer": DECAY,
        "train": {"warmup_steps": 2, "schedule": "cosine", "max_grad_norm": 0.05},
    },
    "rates of their own": {"kind": "sft", "train": {"lr_ratios": {"*mlp*": 0.1, "*norm*": 0}}},
    "idle rows": {"kind": "grpo", "rewards": ["small_runs:many_vowels"]},
    "returns": {"kind": "grpo", "objective": "reinforce", "advantage": "return_to_go"},
    "bf16": {"kind": "lora", "model": {"dtype": "bf16"}},
    "lora of pairs": {"kind": "dpo", "model": LORA},
}


@pytest.mark.parametrize("name", CLEAN)
def test_audit_of_clean_updates_agrees(name: str, tmp_path: Path) -> None:
    """The first update begins with the model itself, the second in the middle of a batch where a batch has several."""
    folder = trained(tmp_path / "run", recipe_of(**CLEAN[name]))
    for number in (1, 2, 3):
        found = audit.audit_update(folder, number)
        assert checks(found, "fault") == {}
        assert checks(found, "audit").keys() - {"reference"} == WITH_WEIGHTS
        assert {one.step for one in found} == {number}


def test_audit_without_a_checkpoint_behind_it_compares_what_was_recorded(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", recipe_of("grpo", train={"save_every": 1}))
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    found = audit.audit_update(folder, 2)
    assert checks(found, "fault") == {}
    assert checks(found, "audit").keys() == {"forward", "loss", "norm", "gradient sample", "step sample"}


def test_a_run_that_became_longer_balances_and_its_updates_before_can_be_audited(tmp_path: Path) -> None:
    """Learning rates that fall to the end are those of the length that the run had."""
    falling = {"steps": 3, "schedule": "linear", "save_every": 1, "keep_checkpoints": 9}
    folder = trained(tmp_path / "run", one_layer_recipe("sft", train=falling))
    longer = one_layer_recipe("sft", train=falling | {"steps": 5})
    run(folder, longer, resume=True)
    RunDirectory(folder).write_recipe(longer)
    RunDirectory(folder).write_status(status_of(5))
    assert checks(pt.diagnose(folder), "fault") == {}
    for number in (2, 3, 4):
        assert checks(audit.audit_update(folder, number), "fault") == {}


# --- faults ---


def dropped_in_accumulation(over: Any) -> Any:
    """Gradients of all micro-batches but the last are lost, behind the back of what the loss says."""

    def changed(self: MicroBatching, batch: Any, forward: Any) -> Iterator[Any]:
        for number, micro in enumerate(over(self, batch, forward)):
            if number:
                for parameter in forward.model.parameters():
                    parameter.grad = None
            yield micro

    return changed


def scaled(part: str, factor: float) -> Callable[..., tuple[Any, ...]]:
    """Gradients of the tensors whose shape has so many dimensions are scaled, before anything looks at them."""

    def change(accumulate: Any) -> Any:
        def changed(method: Any, *rest: Any, **options: Any) -> Any:
            done = accumulate(method, *rest, **options)
            for name, parameter in method.forward.model.named_parameters():
                if part in name and parameter.grad is not None:
                    parameter.grad *= factor
            return done

        return changed

    return change  # type: ignore[return-value]


def unclipped(optimizer: Any, own: Any, lr: float, most: Any, *rest: Any) -> tuple[Any, ...]:
    return optimizer, own, lr, None, *rest


def faster(optimizer: Any, own: Any, lr: float, *rest: Any) -> tuple[Any, ...]:
    return optimizer, own, 1.02 * lr, *rest


def without_state(optimizer: Any, *rest: Any) -> tuple[Any, ...]:
    optimizer.state.clear()
    return optimizer, *rest


def without_a_layer(optimizer: Any, own: Any, *rest: Any) -> tuple[Any, ...]:
    own[len(own) // 2].grad = None
    return optimizer, own, *rest


def decay_of_all(groups: Any) -> Any:
    """Weight decay of norms, too, and not of matrices."""

    def changed(parameters: Any, lr: float, weight_decay: float, **settings: Any) -> Any:
        made = groups(parameters, lr, weight_decay, **settings)
        for group in made:
            group["weight_decay"] = weight_decay
        return made

    return changed


class OtherBetas(torch.optim.AdamW):
    def __init__(self, groups: Any, *, betas: tuple[float, float], **settings: Any) -> None:
        super().__init__(groups, betas=(betas[0], 0.9), **settings)


def frozen_layer(build: Any) -> Any:
    """A layer that is left out of the optimizer."""

    def changed(component: Any, train: Any, model: Any, *rest: Any) -> Any:
        next(p for n, p in model.named_parameters() if "v_proj" in n and p.requires_grad).requires_grad_(False)
        return build(component, train, model, *rest)

    return changed


# An adapter has matrices alone, and the first of them learns nothing at the first update.
OF_WHOLE_WEIGHTS = ("weight decay of norms", "a layer is not in the optimizer")
Patch = Callable[[pytest.MonkeyPatch], None]
SMALL = {"train": {"micro_batch_rows": 2}}
FAULTS: dict[str, tuple[Patch, dict[str, Any], set[str], set[str]]] = {
    "gradients dropped in accumulation": (
        of_attribute(MicroBatching, "over", dropped_in_accumulation),
        SMALL,
        {"norm", "gradient"},
        {"norm", "gradient sample"},
    ),
    "attention learns at half of its gradient": (
        of_attribute(loop, "accumulate", scaled("v_proj", 0.5)),
        {},
        {"gradient"},
        {"gradient sample"},
    ),
    "a gradient with the wrong sign": (
        of_attribute(loop, "accumulate", scaled("v_proj", -1.0)),  # its norm is the same
        {},
        {"gradient"},
        {"gradient sample"},
    ),
    "learning rate 2 % too high": (of_update(faster), {}, {"weights"}, {"step sample"}),
    "the clip is ignored": (
        of_update(unclipped),
        {"train": {"max_grad_norm": 0.01}},
        {"gradient"},
        {"step sample"},
    ),
    "Adam's state is lost": (of_update(without_state), {}, {"Adam's count", "gradient"}, {"step sample"}),
    "a layer is not updated": (of_update(without_a_layer), {}, {"Adam's count", "weights"}, {"step sample"}),
    "a layer is not in the optimizer": (
        of_attribute(build, "build_optimizer", frozen_layer),
        {},
        {"Adam's count", "weights"},
        {"norm"},
    ),
    "weight decay of norms": (
        of_attribute(optimizer, "_groups", decay_of_all),
        {"optimizer": DECAY},
        {"weights"},
        {"step sample"},
    ),
    "another β2": (
        of_attribute(torch.optim, "AdamW", lambda made: OtherBetas),
        {},
        {"second moments"},
        {"step sample"},
    ),
}

KINDS = ("grpo", "sft", "dpo", "lora")


def faulty_cases() -> Iterator[Any]:
    """Every fault in runs of every kind; one of each is in the fast suite."""
    for number, name in enumerate(FAULTS):
        for kind in KINDS:
            if kind == "lora" and name in OF_WHOLE_WEIGHTS:
                continue
            yield pytest.param(name, kind, marks=() if kind == KINDS[number % 3] else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind"), faulty_cases())
def test_audit_of_a_faulty_update_names_it(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second update is looked at: of the first, Adam's step hardly depends on the size of a gradient."""
    patch, changes, with_weights, recorded = FAULTS[name]
    number = 2
    with monkeypatch.context() as patched:
        patch(patched)
        folder = trained(tmp_path / "run", recipe_of(kind, **changes))
    found = checks(audit.audit_update(folder, number), "fault")
    assert with_weights <= found.keys(), found
    assert all(one.causes and one.decided_by for one in found.values())
    shutil.rmtree(folder / "checkpoints" / f"step-{number:06d}")
    assert recorded <= checks(audit.audit_update(folder, number), "fault").keys()


# --- what cannot be audited, and steps that are none ---


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates, two of a batch, with checkpoints of step 2 and 4."""
    changes = {"steps": 4, "save_every": 2, "ppo_epochs": 2}
    return trained(tmp_path_factory.mktemp("audit") / "clean", one_layer_recipe("grpo", train=changes))


def shown_by(folder: Path, step: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["doctor", str(folder), "--audit", step])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_doctor_audit_shows_numbers_and_diagnose_gives_them(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shown_by(clean, "3", capsys)
    assert code == 0
    assert "audit: step sample, step 3" in out
    found = pt.diagnose(clean, audit=3)
    assert checks(found, "fault") == {}
    norm = checks(found, "audit")["norm"]
    assert norm.expected.split()[-1] in out
    assert main(["doctor", str(clean), "--audit", "3", "--json"]) == 0
    kinds = [one["kind"] for one in json.loads(capsys.readouterr().out)["findings"]]
    assert kinds.count("audit") == 5


@pytest.mark.parametrize(("step", "words"), [("4", ("step 3", "1, 3")), ("9", ("up to update 4", "1, 3"))])
def test_doctor_audit_of_a_step_without_a_checkpoint_names_those_that_have_one(
    step: str, words: tuple[str, ...], clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = shown_by(clean, step, capsys)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert all(word in err for word in (f"--audit {step}", *words))


@pytest.mark.parametrize("step", ["12x", "-1", "0", "1.0", "", "1e3", "9" * 30])
def test_doctor_audit_of_no_step_is_refused(step: str, clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(clean), "--audit", step])
    assert ended.value.code == 2
    assert "--audit" in capsys.readouterr().err


@pytest.mark.parametrize("step", [0, -3, True, 1.5, "2"])
def test_diagnose_audit_of_no_step_is_refused(step: Any, clean: Path) -> None:
    with refuses(UsageError, "audit"):
        pt.diagnose(clean, audit=step)


EXPERTS = {
    "architecture": "qwen3_moe",
    "config": {
        "hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "tokenizer": {"num_documents": 50, "vocab_size": 280},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"kind": "sft", "optimizer": "muon"}, "optimizer"),
    "a head": ({"kind": "judged"}, "objective"),
    "a critic": ({"kind": "grpo", "objective": "ppo", "rollout": {"max_tokens": 6}}, "objective"),
    "answers to other prompts": ({"kind": "judged", "objective": "kto"}, "objective"),
    "a teacher": (
        {"kind": "grpo", "objective": "on_policy_distillation", "teacher": {"name": "tiny"}},
        "objective",
    ),
    "drawn tokens": ({"kind": "grpo", "objective": "clip_cov"}, "objective"),
    "a cut vocabulary": ({"kind": "grpo", "rollout": {"top_k": 8}}, "rollout.top_k"),
    "from outside": ({"kind": "grpo", "objective": "small_runs:plain_reinforce"}, "small_runs:plain_reinforce"),
    "dropout": ({"kind": "sft", "model": {"adapter": {"rank": 2, "dropout": 0.1}}}, "dropout"),
    "a reference that moves": (
        {"kind": "grpo", "regularize": {"kl_coef": 0.1}, "reference": {"every": 1, "mixing": 0.6}},
        "reference",
    ),
    "noise": ({"kind": "sft", "train": {"neftune_noise_alpha": 5}}, "train.neftune_noise_alpha"),
    "replayed experts": (
        {"kind": "grpo", "model": {"init": EXPERTS}, "rollout": {"router_replay": True}},
        "rollout.router_replay",
    ),
    "the loss of routers": (
        {"kind": "sft", "model": {"init": EXPERTS}, "train": {"router_aux_loss_coef": 0.1}},
        "train.router_aux_loss_coef",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_audit_of_what_has_no_second_formula_is_refused(name: str, tmp_path: Path) -> None:
    changes, word = REFUSED[name]
    train = {"steps": 2, "save_every": 1} | changes.get("train", {})
    folder = trained(tmp_path / "run", one_layer_recipe(**changes | {"train": train}))
    with refuses(UsageError, f"--audit 2: {word}" if "." in word or word == "optimizer" else word):
        audit.audit_update(folder, 2)


def test_audit_of_a_quantized_base_or_of_new_weights_is_refused(tmp_path: Path, clean: Path) -> None:
    folder = Path(shutil.copytree(clean, tmp_path / "bits"))
    text = (folder / "recipe.yaml").read_text()
    bits = "model:\n  load_bits: 4\n  adapter: {rank: 2}\n"
    (folder / "recipe.yaml").write_text(text.replace("model:\n", bits, 1))
    with refuses(UsageError, "model.load_bits"):
        audit.audit_update(folder, 3)
    (folder / "recipe.yaml").write_text(text.replace("processes: 1", "processes: 2"))
    with refuses(UsageError, "scale"):
        audit.audit_update(folder, 3)
    new = {"architecture": "gpt2", "config": {"n_layer": 1, "n_embd": 16, "n_head": 2}}
    made = trained(tmp_path / "new", one_layer_recipe("sft", model={"init": new}, train={"steps": 2, "save_every": 1}))
    with refuses(UsageError, "model.init"):
        audit.audit_update(made, 1)
    assert checks(audit.audit_update(made, 2), "fault") == {}


def test_audit_of_changed_files_is_refused_or_a_fault(tmp_path: Path, clean: Path) -> None:
    folder = Path(shutil.copytree(clean, tmp_path / "weights"))
    file = folder / "checkpoints" / "step-000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with refuses(PosttrainError, "model.safetensors"):
        audit.audit_update(folder, 3)
    folder = Path(shutil.copytree(clean, tmp_path / "database"))
    (folder / "rollouts.db").unlink()
    with refuses(UsageError, "no update records"):
        audit.audit_update(folder, 3)
    folder = changed(clean, tmp_path / "answers", "UPDATE rollouts SET reward = -reward")
    assert {"gradient sample"} <= checks(audit.audit_update(folder, 3), "fault").keys()
    folder = changed(clean, tmp_path / "tokens", "UPDATE rollouts SET num_tokens = num_tokens - 1")
    with refuses(PosttrainError, "rollouts"):
        audit.audit_update(folder, 3)
    folder = changed(clean, tmp_path / "deleted", "DELETE FROM rollouts WHERE rollout_index = 1")
    with refuses(PosttrainError, "rollouts"):
        audit.audit_update(folder, 3)


def test_audit_of_data_that_changed_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"Say {n}.", "completion": f"I say {n}, {n} and {n}."}) for n in range(12)]
    rows.write_text("\n".join(lines))
    changes: dict[str, Any] = {"task": {"name": "jsonl", "path": str(rows)}, "data": {"batch_size": 3}}
    changes["prompt"] = {"template": "chat"}
    folder = trained(tmp_path / "run", one_layer_recipe("sft", **changes, train=EVERY))
    assert checks(audit.audit_update(folder, 2), "fault") == {}
    rows.write_text("\n".join(line.replace("I say", "Well, I really say") for line in lines))
    with refuses(UsageError, "data"):
        audit.audit_update(folder, 2)


# --- the formulas, and what they import ---


def test_adam_once_more_is_what_torch_makes() -> None:
    """Three steps of float64 tensors: equal but for rounding, with weight decay."""
    torch.manual_seed(3)
    weights = torch.randn(4, 5, dtype=torch.float64)
    parameter = torch.nn.Parameter(weights.clone())
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    settings = adam.AdamSettings(1e-2, 0.3, (0.8, 0.95), 1e-6)
    moments = adam.Moments.none(weights)
    for _ in range(3):
        gradient = torch.randn(4, 5, dtype=torch.float64)
        parameter.grad = gradient.clone()
        theirs.step()
        following = adam.next_moments(moments, gradient, settings)
        assert allclose(adam.gradient_behind(moments, following, settings), gradient, atol=1e-13)
        weights = adam.next_weights(weights, following, settings)
        assert allclose(weights, parameter.detach(), atol=1e-13)
        moments = following
    assert moments.count == 3.0
    assert adam.ratio_of({"*norm*": 0.0, "*": 0.5}, "a.norm.weight") == 0.0
    assert adam.ratio_of({"*norm*": 0.0}, "a.mlp.weight") == 1.0


def test_the_formulas_of_an_audit_import_nothing_that_trains() -> None:
    folder = Path(audit.__file__).parent
    for name in ("adam.py", "gradient.py"):
        tree = ast.parse((folder / name).read_text())
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        own = {one for one in imported if one.startswith("posttrain")}
        assert all(one.startswith("posttrain.balances.") for one in own), own
