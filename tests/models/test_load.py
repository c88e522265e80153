"""Models by name: the embedded one, folders, runs, adapters, new ones; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoTokenizer

from closeness import OF_TINY_RANDOM, assert_close
from posttrain.data.render import decode_response, end_id, stop_ids
from posttrain.data.render.template import further_ends
from posttrain.data.render.templates import plain
from posttrain.errors import UsageError
from posttrain.models.load import choose_device, load_model, load_tokenizer
from posttrain.models.lora import apply_adapter, has_adapter
from posttrain.models.sources import TINY, resolve_model_name
from posttrain.recipes.sections import AdapterSection, InitSection, ModelSection
from posttrain.store.checkpoint_files import seal
from refusing import refuses

IDS = torch.tensor([[9, 10, 11, 12]])
TEXTS = ["Eva starts with 19 shells. She finds 12 at the beach."] * 30
CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ROTARY = {"intermediate_size": 48, "num_key_value_heads": 1}


@pytest.fixture
def folder(tiny_random, small_tokenizer, tmp_path):
    """A model in the Hugging Face layout."""
    path = tmp_path / "model"
    tiny_random("qwen3").save_pretrained(path)
    small_tokenizer.save_pretrained(path)
    return path


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def init(architecture="qwen3", **config):
    config = config if architecture == "gpt2" else ROTARY | config
    return ModelSection(
        init=InitSection.model_validate(
            {"architecture": architecture, "config": CONFIG | config, "tokenizer": {"vocab_size": 280}}
        ),
        device="cpu",
    )


def test_a_folder(folder, tiny_random):
    loaded = load_model(ModelSection(name=str(folder), device="cpu"), seed=0)
    assert torch.equal(logits(loaded.model), logits(tiny_random("qwen3")))
    assert loaded.source == str(folder)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Tom has 7")) == "Tom has 7"
    half = load_model(ModelSection(name=str(folder), dtype="bfloat16", device="cpu"), seed=0)
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}


def test_a_run_is_its_best_checkpoint_else_its_newest(tmp_path):
    run = tmp_path / "run"
    for step in ("step-000002", "step-000010"):
        (run / "checkpoints" / step).mkdir(parents=True)
        seal(run / "checkpoints" / step, int(step[5:]))
    (run / "recipe.yaml").write_text("task: stories\n")
    assert resolve_model_name(str(run)) == str(run / "checkpoints" / "step-000010")
    (run / "checkpoints" / "best").symlink_to("step-000002")
    assert resolve_model_name(str(run)) == str(run / "checkpoints" / "step-000002")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with refuses(UsageError, "has no checkpoint"):
        resolve_model_name(str(run))


def make_adapter(name, folder, value, small_tokenizer):
    """An adapter on the model ``folder``, saved next to it, with all of B set to ``value``."""
    base = load_model(ModelSection(name=str(folder), device="cpu", adapter=AdapterSection()), seed=0).model
    wrapped = apply_adapter(base, AdapterSection(rank=2), seed=1).eval()
    with torch.no_grad():
        for parameter_name, parameter in wrapped.named_parameters():
            if ".lora_B." in parameter_name:
                parameter.fill_(value)
    wrapped.save_pretrained(folder.parent / name)
    small_tokenizer.save_pretrained(folder.parent / name)
    return folder.parent / name, logits(wrapped)


def test_an_adapter_folder_loads_base_and_adapter(folder, small_tokenizer):
    path, expected = make_adapter("adapter", folder, 0.02, small_tokenizer)
    loaded = load_model(ModelSection(name=str(path), device="cpu"), seed=0)
    assert has_adapter(loaded.model)
    assert torch.equal(logits(loaded.model), expected)
    assert (
        float((expected - logits(load_model(ModelSection(name=str(folder), device="cpu"), seed=0).model)).abs().max())
        > 1e-2
    )
    assert {n for n, p in loaded.model.named_parameters() if p.requires_grad} == {
        n for n, _ in loaded.model.named_parameters() if ".lora_" in n
    }


def test_an_adapter_on_an_adapter_finds_both_again(folder, small_tokenizer):
    first, expected_first = make_adapter("first", folder, 0.02, small_tokenizer)
    merged = load_model(ModelSection(name=str(first), device="cpu", adapter=AdapterSection(rank=2)), seed=0).model
    assert not has_adapter(merged)
    assert_close(logits(merged), expected_first, atol=OF_TINY_RANDOM, rtol=0)
    second, expected_second = make_adapter("second", first, -0.03, small_tokenizer)
    loaded = load_model(ModelSection(name=str(second), device="cpu"), seed=0).model
    assert_close(logits(loaded), expected_second, atol=OF_TINY_RANDOM, rtol=0)
    assert float((expected_second - expected_first).abs().max()) > 1e-2


def test_a_new_model_is_a_function_of_the_seed():
    torch.manual_seed(1)
    first = load_model(init(), seed=3, texts=iter(TEXTS))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = load_model(init(), seed=3, texts=iter(TEXTS))
    assert torch.equal(torch.get_rng_state(), state)
    other = load_model(init(), seed=4, texts=iter(TEXTS))
    assert torch.equal(logits(first.model), logits(again.model))
    assert not torch.equal(logits(first.model), logits(other.model))
    assert first.model.config.vocab_size == len(first.tokenizer) <= 280
    assert first.model.config.eos_token_id == first.tokenizer.eos_token_id
    assert first.source == "new qwen3"
    assert (first.model.config.num_hidden_layers, first.model.config.hidden_size) == (2, 32)


def test_no_dropout_even_in_training_mode():
    model = load_model(init("gpt2", resid_pdrop=0.3), seed=0, texts=iter(TEXTS)).model
    expected = logits(model)
    assert not model.training
    assert torch.equal(logits(model.train()), expected)
    llama = load_model(init("llama", attention_dropout=0.4), seed=0, texts=iter(TEXTS)).model
    assert torch.equal(logits(llama), logits(llama.train()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "'./nowhere'"),
        ("someone/nothing", "'someone/nothing'"),
    ],
)
def test_missing_models(name, message):
    with refuses(UsageError, message):
        load_model(ModelSection(name=name, device="cpu"), seed=0)


def test_folders_that_hold_no_causal_language_model(tmp_path, folder):
    with refuses(UsageError, "without config.json"):
        load_model(ModelSection(name=str(tmp_path), device="cpu"), seed=0)
    torn = Path(shutil.copytree(folder, tmp_path / "torn"))
    (torn / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    with refuses(UsageError, "causal language model"):
        load_model(ModelSection(name=str(torn), device="cpu"), seed=0)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with refuses(UsageError, "causal language model"):
        load_model(ModelSection(name=str(folder), device="cpu"), seed=0)


def test_what_a_new_model_cannot_be():
    with refuses(UsageError, "'qwem3'", "'qwen3'"):
        load_model(init("qwem3"), seed=0, texts=iter(TEXTS))
    with refuses(UsageError, "'hiden_size'", "'hidden_size'"):
        load_model(init(hiden_size=3), seed=0, texts=iter(TEXTS))
    with refuses(UsageError, "model.init.config.hidden_size"):
        load_model(init(hidden_size="wide"), seed=0, texts=iter(TEXTS))
    with refuses(UsageError, "'qwen3'", "rms_norm_eps"):
        load_model(init(rms_norm_eps="small"), seed=0, texts=iter(TEXTS))
    with refuses(UsageError, "this qwen3 takes"):
        load_model(init(hidden_size=1_000_000, intermediate_size=10_000_000), seed=0, texts=iter(TEXTS))
    with refuses(UsageError, "vocab_size"):
        load_model(init(vocab_size=100), seed=0, texts=iter(TEXTS))


def test_load_model_whose_weights_have_other_sizes_names_them(tiny_random, small_tokenizer, tmp_path):
    tiny_random("qwen3").save_pretrained(tmp_path)
    small_tokenizer.save_pretrained(tmp_path)
    place = tmp_path / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"vocab_size": 310}))
    with refuses(UsageError, "embed_tokens.weight"):
        load_model(ModelSection(name=str(tmp_path)), seed=0)


def test_load_model_whose_file_has_a_head_of_its_own_is_not_tied(tiny_random, small_tokenizer, tmp_path):
    """A configuration that says otherwise would lose the head in programs that believe it."""
    untied = tiny_random("qwen3", tie_word_embeddings=False)
    untied.save_pretrained(tmp_path)
    small_tokenizer.save_pretrained(tmp_path)
    place = tmp_path / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"tie_word_embeddings": True}))
    loaded = load_model(ModelSection(name=str(tmp_path), device="cpu"), seed=0).model
    assert torch.equal(logits(loaded), logits(untied))
    assert loaded.config.tie_word_embeddings is False


def test_end_tokens_of_the_generation_config_all_stop_and_the_templates_own_is_trained(folder, small_tokenizer):
    small_tokenizer = AutoTokenizer.from_pretrained(folder)
    small_tokenizer.add_tokens(["<end_of_turn>", "<other>"], special_tokens=True)
    small_tokenizer.save_pretrained(folder)
    turn, other = small_tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<other>"])
    for given_arguments, further in (
        ([small_tokenizer.eos_token_id, turn, 100], {turn}),
        (turn, {turn}),
        (None, set()),
    ):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given_arguments}))
        tokenizer = load_tokenizer(str(folder))
        assert stop_ids(tokenizer, plain()) == {small_tokenizer.eos_token_id} | further
        assert end_id(tokenizer, plain()) == small_tokenizer.eos_token_id
        message = further_ends(tokenizer, plain())
        assert [line.startswith("responses also stop at <end_of_turn> ") for line in message] == [True] * bool(further)
        text = decode_response(tokenizer, plain(), [*tokenizer.encode("Tom"), *further])
        assert text == "Tom"
        assert other not in stop_ids(tokenizer, plain())
    for content in ('{"eos_token_id": "0"}', "{"):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(
            UsageError, match=r"generation_config\.json.*(an id or a list of ids is needed|cannot be read)"
        ):
            load_tokenizer(str(folder))
    (folder / "generation_config.json").unlink()
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [turn, other, 100]}))
    assert stop_ids(load_tokenizer(str(folder)), plain()) == {small_tokenizer.eos_token_id, turn, other}


def test_a_cpu_that_is_asked_for_starts_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_attention_that_was_removed_is_answered_with_what_is_left(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"'{name}' was removed\. Use sdpa"):
        ModelSection(attention=name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Put a folder into an empty cache of the hub under a name, with changes of its config.json."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def put(name: str, folder: Path, **changes: object) -> str:
        kept = tmp_path / f"models--org--{name}"
        revision = "0" * 40
        shutil.copytree(folder, kept / "snapshots" / revision)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text(revision)
        place = kept / "snapshots" / revision / "config.json"
        if changes:
            place.write_text(json.dumps(json.loads(place.read_text()) | changes))
        return f"org/{name}"

    return put


def test_model_of_the_hub_is_loaded_from_its_cache(hub: Callable[..., str]) -> None:
    loaded = load_model(ModelSection(name=hub("tiny", TINY)), seed=0)
    assert loaded.source == "org/tiny"
    own = load_model(ModelSection(name="tiny"), seed=0).model.state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in loaded.model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_attention_heads": 10**9}, "num_attention_heads"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"intermediate_size": 800_000}, "weights, and the"),
    ],
)
def test_sizes_of_a_model_of_the_hub_are_checked_before_it_is_made(
    hub: Callable[..., str], changes: dict[str, object], named: str
) -> None:
    with refuses(UsageError, named):
        load_model(ModelSection(name=hub("changed", TINY, **changes)), seed=0)


def test_files_of_a_model_of_the_hub_are_those_of_a_model(hub: Callable[..., str], tmp_path: Path) -> None:
    name = hub("large", TINY)
    (snapshot,) = (tmp_path / "models--org--large" / "snapshots").iterdir()
    with (snapshot / "tokenizer_config.json").open("r+b") as file:
        file.truncate(300_000_000)
    for load in (lambda: load_model(ModelSection(name=name), seed=0), lambda: load_tokenizer(name)):
        with refuses(UsageError, "tokenizer_config.json: 300,000,000 bytes"):
            load()


def test_adapter_of_the_hub_is_loaded_as_a_folder_and_may_name_no_code(hub: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    base = load_model(ModelSection(name="tiny"), seed=0).model
    apply_adapter(base, AdapterSection(rank=2), 0).save_pretrained(folder)
    loaded = load_model(ModelSection(name=hub("adapter", folder)), seed=0)
    assert has_adapter(loaded.model)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"megatron_config": {"a": 1}}))
    with refuses(UsageError, "could run code"):
        load_model(ModelSection(name=hub("evil", folder)), seed=0)
