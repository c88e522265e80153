from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from posttrain.errors import CheckpointError, StorageError
from posttrain.models.heads import ScalarHead
from posttrain.models.trained_heads import head_tensors, restore_heads
from posttrain.store.checkpoint_files import (
    Unverified,
    best_step,
    checkpoint_steps,
    clean_leftovers,
    mark_best,
    prune_checkpoints,
    seal,
    verify,
)
from posttrain.training.checkpoint import Checkpoint, load_checkpoint, restore_model, save_checkpoint
from posttrain.training.distributed import StoredShards, save_shards
from refusing import refuses

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def make_model(seed: int, **changes) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen3Config(**(SIZES | {"tie_word_embeddings": True} | changes)))


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {letter: i for i, letter in enumerate("abcdefgh")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])), eos_token="h")


def save(folder: Path, step: int, seed: int | None = None, **changes) -> Path:
    given = {
        "model": make_model(step if seed is None else seed),
        "tokenizer": make_tokenizer(),
        "optimizer": {"exp_avg": torch.full((3,), step / 3), "step": torch.tensor(float(step))},
        "state": {"best": {"accuracy": 0.1 + 0.2, "step": 1.0}, "step": step},
        "rollout_buffer": {"tokens": torch.arange(6).reshape(2, 3)},
    }
    return save_checkpoint(folder, step=step, **(given | changes))


def load(folder: Path, **options) -> Checkpoint:
    found = load_checkpoint(folder, **options)
    assert found is not None
    return found


def assert_same_weights(left: torch.nn.Module, right: torch.nn.Module) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def flip_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    awkward = torch.tensor([0.1, 1e-45, -0.0, 3.4e38, 1 / 3])
    model = make_model(1)
    with torch.no_grad():
        model.model.norm.weight[:5] = awkward
    path = save(tmp_path, 100, model=model, optimizer={"m": awkward, "half": torch.ones(2, dtype=torch.bfloat16)})
    assert path == tmp_path / "step-000100"
    found = load(tmp_path)
    assert (found.path, found.step, found.skipped) == (path, 100, [])
    assert found.state == {"best": {"accuracy": 0.30000000000000004, "step": 1.0}, "step": 100}
    assert torch.equal(found.optimizer["m"].view(torch.int32), awkward.view(torch.int32))
    assert found.optimizer["half"].dtype == torch.bfloat16
    assert found.rollout_buffer is not None
    assert found.rollout_buffer["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
    other = make_model(2)
    before = [p.data_ptr() for p in other.parameters()]
    restore_model(other, found.path)
    assert_same_weights(other, model)
    assert [p.data_ptr() for p in other.parameters()] == before, "an optimizer holds them by reference"
    assert all(p.requires_grad for p in other.parameters())


def test_the_folder_is_what_other_tools_load_and_holds_no_pickle(tmp_path: Path) -> None:
    model = make_model(5)
    path = save(tmp_path, 1, model=model)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(path), model)
    assert AutoTokenizer.from_pretrained(path)("abc")["input_ids"] == [0, 1, 2]
    names = {file.name for file in path.iterdir()}
    needed = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "optimizer.safetensors",
        "rollout_buffer.safetensors",
    }
    assert needed | {"state.json", "manifest.json"} <= names
    assert {name.rpartition(".")[2] for name in names} <= {"json", "safetensors", "jinja"}
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == names - {"manifest.json"}
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == {
        name: digest for name, digest in contents(path).items() if name != "manifest.json"
    }


@pytest.mark.parametrize("name", ["model.safetensors", "heads.safetensors", "state.json"])
def test_a_flipped_byte_in_any_file_falls_back_and_is_reported(tmp_path: Path, name: str) -> None:
    save(tmp_path, 10, heads={"value.weight": torch.ones(1, 32)})
    save(tmp_path, 20, heads={"value.weight": torch.zeros(1, 32)})
    size = (tmp_path / "step-000020" / name).stat().st_size
    for position in (0, size // 2, size - 1):
        flip_byte(tmp_path / "step-000020" / name, position)
        found = load(tmp_path)
        assert found.step == 10
        assert found.skipped == [f"step-000020: {name} differs from its SHA-256 in the manifest"]
        assert found.optimizer["step"].item() == 10.0
        assert found.heads["value.weight"].tolist() == [[1.0] * 32]
        flip_byte(tmp_path / "step-000020" / name, position)
    assert load(tmp_path).step == 20


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "step-000020"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    seal(folder, 20)
    assert list(verify(folder, 20)) == ["state.json"]
    manifest = folder / "manifest.json"
    original = manifest.read_bytes()
    for position in range(len(original)):
        for bit in (1, 32):  # the second one also turns letters of hashes into their capitals
            manifest.write_bytes(original[:position] + bytes([original[position] ^ bit]) + original[position + 1 :])
            with pytest.raises(Unverified):
                verify(folder, 20)


def test_missing_short_and_renamed_files(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    state = path / "state.json"
    content = state.read_bytes()
    state.write_bytes(content[:-1])
    assert load(tmp_path).skipped == [f"step-000020: state.json has {len(content) - 1} bytes instead of {len(content)}"]
    state.unlink()
    assert load(tmp_path).skipped == ["step-000020: state.json is missing"]
    state.write_bytes(content)
    assert load(tmp_path).step == 20
    (path / "manifest.json").unlink()
    assert load(tmp_path).skipped == ["step-000020: manifest.json is missing"]
    os.rename(tmp_path / "step-000010", tmp_path / "step-000030")  # another step's content under a step's name
    with refuses(CheckpointError, "step-000030", "manifest.json"):
        load(tmp_path)


def test_none_verifies(tmp_path: Path) -> None:
    for step in (10, 20):
        flip_byte(save(tmp_path, step) / "model.safetensors", -1)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, set_aside=True)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: no checkpoint verifies against its manifest. step-000020: model.safetens")
    assert "step-000010: model.safetensors differs" in message
    assert "--run NAME" in message
    assert contents(tmp_path) == before


def test_one_step_requested_by_number(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    assert load(tmp_path, step=10).step == 10
    with refuses(CheckpointError, "are: 10, 20"):
        load(tmp_path, step=15)
    flip_byte(path / "state.json", 0)
    with refuses(CheckpointError, "step-000020: state"):
        load(tmp_path, step=20)


def test_failed_ones_are_set_aside_so_that_pruning_keeps_the_good_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip_byte(save(tmp_path, 20) / "model.safetensors", -1)
    mark_best(tmp_path, 20)
    damaged = contents(tmp_path / "step-000020")
    assert load(tmp_path, set_aside=True).step == 10
    assert contents(tmp_path / "failed-step-000020") == damaged
    assert checkpoint_steps(tmp_path) == [10]
    assert best_step(tmp_path) is None
    save(tmp_path, 15)
    assert prune_checkpoints(tmp_path, keep=1) == [10]
    assert load(tmp_path).step == 15


def test_leftovers_of_a_killed_write_are_not_checkpoints_and_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    whole = contents(save(tmp_path / "elsewhere", 20, heads={"value.weight": torch.ones(1, 32)}))
    assert "heads.safetensors" in whole
    names = sorted(whole)
    for count in range(len(names) + 1):  # killed after each file
        aside = tmp_path / ".tmp-step-000020-4711"
        aside.mkdir()
        for name in names[:count]:
            (aside / name).write_bytes((tmp_path / "elsewhere" / "step-000020" / name).read_bytes())
        assert load(tmp_path).step == 10
        assert checkpoint_steps(tmp_path) == [10]
        assert clean_leftovers(tmp_path) == [aside.name]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["elsewhere", "step-000010"]
    assert clean_leftovers(tmp_path / "missing") == []


def test_writing_a_step_again_replaces_it_and_a_kill_between_the_renames_is_mended(tmp_path: Path) -> None:
    old = contents(save(tmp_path, 10, seed=1))
    new = contents(save(tmp_path, 10, seed=2))
    assert new != old
    assert contents(tmp_path / "step-000010") == new
    assert sorted(os.listdir(tmp_path)) == ["step-000010"]
    os.rename(tmp_path / "step-000010", tmp_path / ".tmp-replaced-step-000010")
    (tmp_path / ".tmp-step-000010-4711").mkdir()
    assert clean_leftovers(tmp_path) == [".tmp-step-000010-4711"]
    assert contents(tmp_path / "step-000010") == new
    assert load(tmp_path).step == 10


def test_pruning_keeps_the_newest_the_protected_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        (tmp_path / f"step-{step:06d}").mkdir()
    mark_best(tmp_path, 2)
    assert prune_checkpoints(tmp_path, keep=2, protect={3}) == [1, 4]
    assert sorted(os.listdir(tmp_path)) == ["best", "step-000002", "step-000003", "step-000005", "step-000006"]
    assert prune_checkpoints(tmp_path, keep=10) == []


@pytest.mark.parametrize("function", ["fsync", "rename", "mkdir"])
def test_a_write_error_anywhere_leaves_the_older_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    save(tmp_path, 10)
    before = contents(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        with refuses(StorageError, "write checkpoint step-000020", "MiB free)"):
            save(tmp_path, 20)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["step-000010"]
    assert load(tmp_path).step == 10


def test_a_real_write_error_of_the_system(tmp_path: Path) -> None:
    save(tmp_path, 10)
    before = contents(tmp_path)
    model, old_limit = make_model(3), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))
    try:
        with refuses(StorageError, "disk is full", "Free some space", "before is untouched"):
            save(tmp_path, 20, model=model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["step-000010"]
    assert load(save(tmp_path, 20, model=model).parent).step == 20


def test_fused_experts_have_other_names_on_disk(tmp_path: Path) -> None:
    def experts(seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        more = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **more))

    model, other = experts(1), experts(2)
    restore_model(other, save(tmp_path, 1, model=model))
    assert_same_weights(other, model)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_hidden_layers": 1}, "model.layers.1.self_attn.q_proj.weight"),
        ({"hidden_size": 16}, "torch.float32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_copied(tmp_path: Path, changes: dict, what: str) -> None:
    path = save(tmp_path, 1)
    other = make_model(9, **changes)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with refuses(CheckpointError, what):
        restore_model(other, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def make_adapter(base_folder: Path, seed: int) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["norm"], task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1 + len(name) * 1e-3)
    return model


def test_an_adapter_is_saved_in_pefts_layout_and_restored_bit_for_bit(tmp_path: Path) -> None:
    make_model(1).save_pretrained(tmp_path / "base")
    model, other = make_adapter(tmp_path / "base", 1), make_adapter(tmp_path / "base", 2)
    path = save(tmp_path / "run", 5, model=model)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(path))
    assert not (path / "model.safetensors").exists()
    restore_model(other, load(tmp_path / "run").path)
    assert_same_weights(other, model)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), path)
    ids = torch.arange(6)[None]
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_heads_and_critics_come_back_bit_for_bit_in_the_same_memory(tmp_path: Path) -> None:
    awkward = torch.tensor([0.1, 1e-45, -0.0, 3.4e38, 1 / 3])
    modules = {"value": ScalarHead(32, seed=1), "critic": make_model(1)}
    with torch.no_grad():
        modules["value"].weight[0, :5] = awkward
    path = save(tmp_path, 1, heads=head_tensors(modules))
    manifest = json.loads((path / "manifest.json").read_text())
    assert "heads.safetensors" in manifest["files"]
    found = load(tmp_path).heads
    assert found["value.weight"][0, :5].view(torch.int32).tolist() == awkward.view(torch.int32).tolist()
    assert {"value.weight", "critic.model.norm.weight"} <= found.keys()
    other = {"value": ScalarHead(32, seed=2), "critic": make_model(2)}
    before = [p.data_ptr() for module in other.values() for p in module.parameters()]
    restore_heads(other, found)
    for name, module in modules.items():
        assert_same_weights(other[name], module)
    assert [p.data_ptr() for module in other.values() for p in module.parameters()] == before
    assert all(p.requires_grad for module in other.values() for p in module.parameters())


def test_tied_weights_of_a_critic_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    critic, other = make_model(1), make_model(2)
    assert critic.lm_head.weight is critic.model.embed_tokens.weight
    save(tmp_path, 1, heads=head_tensors({"critic": critic, "again": critic}))
    found = load(tmp_path).heads
    assert "critic.model.embed_tokens.weight" in found
    assert not [name for name in found if name.startswith("again.") or "lm_head" in name]
    restore_heads({"critic": other}, found)
    assert_same_weights(other, critic)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    untied = make_model(1, tie_word_embeddings=False)
    with refuses(CheckpointError, "critic.lm_head.weight"):
        restore_heads({"critic": untied}, found)


@pytest.mark.parametrize(
    ("modules", "what"),
    [
        ({"value": ScalarHead(16)}, "torch.float32"),
        ({"value": ScalarHead(32).double()}, "torch.float32"),
        ({"reward": ScalarHead(32)}, "reward.weight"),
    ],
)
def test_other_heads_are_refused_and_nothing_copied(
    tmp_path: Path, modules: dict[str, torch.nn.Module], what: str
) -> None:
    save(tmp_path, 1, heads=head_tensors({"value": ScalarHead(32, seed=1)}))
    found = load(tmp_path).heads
    before = {name: tensor.clone() for name, tensor in head_tensors(modules).items()}
    with refuses(CheckpointError, what):
        restore_heads(modules, found)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head_tensors(modules).items())
    with refuses(CheckpointError, "value.weight"):
        restore_heads({"value": ScalarHead(32)}, {})


def test_tensors_of_a_group_are_read_unsharded_or_refused(tmp_path: Path) -> None:
    """Files of torch.distributed.checkpoint: safetensors whose headers say where a part begins."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save_shards({"m": torch.arange(8.0).reshape(4, 2), "step": torch.tensor(3.0)}, tmp_path / "optimizer")
    finally:
        dist.destroy_process_group()
    [file] = (tmp_path / "optimizer").iterdir()
    stored = StoredShards(tmp_path / "optimizer")
    assert (list(stored), stored["m"].tolist()[3], float(stored["step"])) == (["m", "step"], [6.0, 7.0], 3.0)
    for begin in ([2, 0], [0], ["x", 0], None):
        header = {} if begin is None else {"DCP_SHARDING_INFO": json.dumps({"m": {"saved_offsets": begin}})}
        save_file({"m": torch.zeros(2, 2)}, file, {"format": "pt", **header})
        if begin is None:  # a file of whole tensors
            assert StoredShards(tmp_path / "optimizer")["m"].shape == (2, 2)
            continue
        with pytest.raises(CheckpointError, match=r"rows of m are missing|contains no optimizer tensors"):
            dict(StoredShards(tmp_path / "optimizer"))
    file.write_bytes(b"no tensors")
    with refuses(CheckpointError, "contains no optimizer tensors"):
        StoredShards(tmp_path / "optimizer")
