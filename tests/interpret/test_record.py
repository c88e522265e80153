"""Recordings: rows are the model's, pairs are matched, what is dropped is counted, a killed one goes on to the byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from closeness import allclose, approx, assert_close
from posttrain.cli import main
from posttrain.data.base import build_task
from posttrain.data.render import encode_plain, encode_prompt
from posttrain.data.render.template import build_template
from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations import record as recording
from posttrain.interpret.activations.record import (
    collect_documents,
    plan_batches,
    plan_shards,
    read_documents,
    read_rollouts,
    record_activations,
)
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.activations.sites import weights_hash
from posttrain.models.load import load_model
from posttrain.models.lora import apply_adapter
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import AdapterSection, Component, ModelSection
from posttrain.store.checkpoint_files import seal
from posttrain.store.rollouts import RolloutStore
from posttrain.types import Completion, Example, Message, Rollout
from refusing import refuses


def some_documents(n: int = 12, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 700, size=size).tolist() for size in generator.integers(1, 30, size=n)]


@pytest.fixture(scope="module")
def tiny():
    return load_model(ModelSection(name="tiny"), seed=0).model


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tiny, with other weights, as a folder."""
    loaded = load_model(ModelSection(name="tiny"), seed=0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.01)
    folder = tmp_path_factory.mktemp("models") / "other"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def states(model, ids: list[int], layer: int) -> torch.Tensor:
    return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]


def test_record_rows_are_the_hidden_states_without_first_tokens(tiny, tmp_path: Path) -> None:
    documents = [*some_documents(), [0, 5, 6]]  # 0 is the token that begins a text
    store = record_activations(
        "tiny", documents, ["resid.2", "resid.3"], tmp_path / "s", dtype="fp32", rows_per_shard=40
    )
    assert len(store.index.shards) > 2
    assert store.index.dropped == {"first_token": 12}
    assert store.num_rows == sum(map(len, documents)) - 12
    rows = torch.arange(store.num_rows)
    for number, ids in enumerate(documents):
        own = rows[store.documents(rows) == number]
        skipped = 0 if ids[0] == 0 else 1
        assert store.tokens(own).tolist() == ids[skipped:]
        assert store.positions(own).tolist() == list(range(skipped, len(ids)))
        for layer in (2, 3):
            found = store.gather(own, f"resid.{layer}")
            assert_close(found, states(tiny, ids, layer)[skipped:], rtol=1e-5, atol=1e-5)
        assert store.document_tokens(number) == ids
    assert torch.equal(rows, store.documents(rows).argsort(stable=True))  # the order of the documents
    assert (store.index.sources[0].model, store.index.sources[0].weights_hash) == ("tiny", weights_hash("tiny"))


def test_record_an_adapters_folder_with_its_adapter(tmp_path: Path) -> None:
    loaded = load_model(ModelSection(name="tiny"), seed=0)
    model = apply_adapter(loaded.model, AdapterSection(rank=2, targets=["q_proj", "up_proj"]), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.05)
    model.save_pretrained(tmp_path / "adapter")
    loaded.tokenizer.save_pretrained(tmp_path / "adapter")
    ids = some_documents()[0]
    store = record_activations(str(tmp_path / "adapter"), [ids], ["resid.2"], tmp_path / "s", dtype="fp32")
    found = store.gather(torch.arange(store.num_rows))
    assert_close(found, states(model, ids, 2)[1:], rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        assert not allclose(found, states(model, ids, 2)[1:], rtol=1e-2, atol=1e-2)
    assert store.index.sources[0].weights_hash not in ("", weights_hash("tiny"))


def test_record_pairs_are_the_same_tokens_in_both_models(
    tiny, other: str, small_tokenizer: Any, tmp_path: Path
) -> None:
    documents = some_documents()
    both = record_activations(
        ["tiny", other], documents, ["resid.2"], tmp_path / "both", dtype="fp32", rows_per_shard=50
    )
    alone = record_activations(other, documents, ["resid.2"], tmp_path / "alone", dtype="fp32", rows_per_shard=50)
    rows = torch.arange(both.num_rows)
    assert torch.equal(both.tokens(rows), alone.tokens(rows))
    assert torch.equal(both.gather(rows, source="post"), alone.gather(rows))
    for row in (0, 17, both.num_rows - 1):
        ids = both.document_tokens(int(both.documents(torch.tensor([row]))))
        expected = states(tiny, ids, 2)[int(both.positions(torch.tensor([row])))]
        assert_close(both.gather(torch.tensor([row]), source="base")[0], expected, rtol=1e-5, atol=1e-5)
    assert both.index.sources[0].weights_hash != both.index.sources[1].weights_hash
    tiny.save_pretrained(tmp_path / "m")
    small_tokenizer.save_pretrained(tmp_path / "m")
    with refuses(UsageError, "have different tokenizers"):
        record_activations(["tiny", str(tmp_path / "m")], [[1, 2]], ["resid.2"], tmp_path / "none")


def test_record_outliers_are_rows_above_so_many_medians_in_any_source(other: str, tmp_path: Path) -> None:
    documents = some_documents(30)
    options = {"dtype": "fp32", "rows_per_shard": 10_000}
    whole = record_activations(
        ["tiny", other], documents, ["resid.2", "resid.1"], tmp_path / "all", outliers=0, **options
    )
    assert whole.index.limits == {}
    rows = torch.arange(whole.num_rows)
    over = torch.zeros(len(rows), dtype=torch.bool)
    for site in whole.sites:
        for source in whole.sources:
            norms = whole.gather(rows, site, source).double().norm(dim=1)
            over |= norms > 1.4 * norms.median()
    assert 3 < int(over.sum()) < 0.5 * len(rows)
    kept = record_activations(
        ["tiny", other], documents, ["resid.2", "resid.1"], tmp_path / "kept", outliers=1.4, **options
    )
    assert kept.index.dropped == {"first_token": 30, "outlier": int(over.sum())}
    assert torch.equal(kept.tokens(torch.arange(kept.num_rows)), whole.tokens(rows[~over]))
    for source in whole.sources:
        found = kept.gather(torch.arange(kept.num_rows), "resid.1", source)
        assert torch.equal(found, whole.gather(rows[~over], "resid.1", source))


def test_record_the_limit_is_that_of_the_first_shard(tmp_path: Path) -> None:
    documents = some_documents(30)
    whole = record_activations("tiny", documents, ["resid.2"], tmp_path / "all", dtype="fp32", outliers=0)
    kept = record_activations(
        "tiny", documents, ["resid.2"], tmp_path / "kept", dtype="fp32", outliers=1.2, rows_per_shard=60
    )
    first = plan_shards([len(ids) for ids in documents], 60)[0]
    rows = torch.arange(whole.num_rows)
    norms = whole.gather(rows).norm(dim=1)
    limit = 1.2 * float(norms[whole.documents(rows) < first.stop].median())
    assert kept.limit("resid.2", "model") == approx(limit, rel=1e-6)
    assert kept.index.dropped["outlier"] == int((norms > limit).sum()) > 3


class Stop(Exception):
    pass


def test_record_an_interrupted_recording_goes_on_and_is_the_same_to_the_byte(tmp_path: Path) -> None:
    documents, folder = some_documents(40), tmp_path / "parts"
    options = {"rows_per_shard": 60, "outliers": 1.5}
    record_activations("tiny", documents, ["resid.2"], tmp_path / "whole", **options)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len(expected) > 6
    for number in (0, 1, 4):

        def stop(done: int, total: int, number: int = number) -> None:
            if done == number:
                raise Stop

        with pytest.raises(Stop):
            record_activations("tiny", documents, ["resid.2"], folder, **options, observe=stop)
        (folder / f"shard-{number:05d}.safetensors").write_bytes(b"half of a sha")  # a shard that no index names yet
    record_activations("tiny", documents, ["resid.2"], folder, **options)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    record_activations("tiny", documents, ["resid.2"], folder, **options)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times  # nothing is done twice


def test_record_other_settings_or_documents_do_not_go_on(other: str, tmp_path: Path) -> None:
    documents = some_documents(5)
    record_activations("tiny", documents, ["resid.2"], tmp_path / "s")
    for changes, key in (
        ({"outliers": 3.0}, "outliers"),
        ({"dtype": "fp32"}, "dtype"),
        ({"batch": 2}, "batch"),
        ({"models": other}, "model"),
        ({"sites": ["resid.1"]}, "sites"),
        ({"documents": documents[:-1]}, "documents"),
    ):
        request = {"models": "tiny", "documents": documents, "sites": ["resid.2"], **changes}
        with pytest.raises(UsageError, match=f"recorded with another `{key}`"):
            record_activations(folder=tmp_path / "s", **request)


def test_plans_of_shards_and_batches() -> None:
    assert plan_shards([3, 3, 3, 10, 1, 1], 5) == [range(2), range(2, 4), range(4, 6)]
    assert plan_shards([5, 5], 5) == [range(1), range(1, 2)]
    assert plan_shards([1], 100) == [range(1)]
    assert plan_batches([5, 1, 9, 2], 2, 100) == [[1, 3], [0, 2]]
    assert plan_batches([5, 1, 9, 2], None, 10) == [[1, 3], [0], [2]]
    assert plan_batches([50], None, 10) == [[0]]


# Documents.

QUESTIONS = ("Tom has 7 apples.", "Eva starts with 19 shells. She finds 12 at the beach.", "Two?")
STORIES, R1_ZERO = Component(name="stories", size=3), Component(name="r1_zero")


def rollout(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Rollout:
    sampled = Completion(completion, tuple(-0.1 for _ in completion), "stop")
    return Rollout(Example("?", (Message("user", "?"),)), prompt, sampled, "text", {}, 0.0, 1, 0, 0, 0)


def test_read_documents_prompts_are_those_of_the_template(small_tokenizer: Any) -> None:
    found = read_documents(small_tokenizer, task=STORIES, template=R1_ZERO, context_tokens=1000)
    template = build_template(R1_ZERO, "")
    examples = build_task(STORIES, "").examples
    expected = [encode_prompt(small_tokenizer, template, x.messages, x.variables) for x in examples]
    assert found.ids == expected
    assert found.prompt_lengths == [len(ids) for ids in expected]
    assert not +found.dropped


def test_collect_keeps_both_limits() -> None:
    whole = [(list(range(30)), 25), ([], 0), (list(range(40)), 10), ([1], 1)]
    found = collect_documents(whole, {"source": "x"}, 20, 33)
    assert found.ids == [list(range(20)), list(range(13))]
    assert found.prompt_lengths == [20, 10]
    assert +found.dropped == {"beyond_context_tokens": 30, "empty_documents": 1}
    assert found.data == {"source": "x", "context_tokens": 20, "max_rows": 33}
    with refuses(UsageError, "nothing to record"):
        collect_documents([], {"source": "x"}, 20, None)


def test_read_documents_a_text_is_cut_into_pieces(small_tokenizer: Any, tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    text, path = " ".join(QUESTIONS) + " <|endoftext|> is no marker here.", tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    ids = encode_plain(small_tokenizer, text)
    found = read_documents(small_tokenizer, text=str(path), context_tokens=16)
    assert found.ids == [ids[start : start + 16] for start in range(0, len(ids), 16)]
    assert small_tokenizer.eos_token_id not in ids
    assert (found.prompt_lengths, found.data["file"]) == ([0] * len(found.ids), "a.txt")
    backend = type(small_tokenizer._tokenizer).from_str(small_tokenizer._tokenizer.to_str())
    start, number = small_tokenizer.eos_token, small_tokenizer.eos_token_id
    backend.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=[(start, number)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=start, eos_token=start)
    found = read_documents(tokenizer, text=str(path), context_tokens=5)  # every piece begins as a text does
    assert found.ids == [[number, *ids[start : start + 4]] for start in range(0, len(ids), 4)]
    with refuses(UsageError, "least 2 tokens"):
        read_documents(tokenizer, text=str(path), context_tokens=1)


def test_read_documents_texts_of_a_file_of_rows(small_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": question}) for question in QUESTIONS) + "\n", encoding="utf-8")
    found = read_documents(small_tokenizer, text=str(path), context_tokens=1000)
    assert found.ids == [encode_plain(small_tokenizer, question) for question in QUESTIONS]
    path.write_text('{"text": "a"}\n{"texr": "b"}\n', encoding="utf-8")
    with refuses(DataError, "a.jsonl:2", "'text'", "'texr'"):
        read_documents(small_tokenizer, text=str(path), context_tokens=1000)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with refuses(DataError, "not UTF-8 text"):
        read_documents(small_tokenizer, text=str(tmp_path / "b.txt"), context_tokens=1000)


def test_read_rollouts_are_those_of_training_token_by_token(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.db"
    with RolloutStore(path) as store:
        store.record([rollout((5, 6, 7), (8, 9)), rollout((1,), (2, 3, 4, 0))])
        store.record([rollout((9,), (9,))], evaluation="toy/test")  # not what it was trained on
    found = read_rollouts(path, "a-run", 4)
    assert found.ids == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert found.prompt_lengths == [3, 1]
    assert +found.dropped == {"beyond_context_tokens": 2}
    RolloutStore(tmp_path / "empty.db").close()
    with refuses(DataError, "rollouts to read"):
        read_rollouts(tmp_path / "empty.db", "", 10)
    with refuses(DataError, "such rollout database"):
        read_rollouts(tmp_path / "none.db", "", 10)


# The command.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["activations", *arguments]) == 2
    return capsys.readouterr().err


def test_activations_prompts_of_a_task(tiny, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["activations", "tiny", "--layer", "2,3", "--max-rows", "700", "--dtype", "fp32"]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "700 tokens x 1,036 bytes = 0.7 MB at most, in activations/tiny-stories" in out
    assert "dropped: 4 first token" in out
    store = ActivationStore("activations/tiny-stories", verify=True)
    assert store.num_rows == 696
    assert store.index.data == {
        "source": "task", "task": "stories", "split": "test", "template": "r1_zero", "context_tokens": 1024,
        "max_rows": 700,
    }  # fmt: skip
    rows = torch.arange(store.num_rows)
    found = store.gather(rows[store.documents(rows) == 1], "resid.3")
    assert_close(found, states(tiny, store.document_tokens(1), 3)[1:], rtol=1e-5, atol=1e-5)
    assert main([*command, "--quiet"]) == 0  # all of it is there
    assert capsys.readouterr().out == ""
    assert "`outliers`" in refused(capsys, *command[1:], "--outliers", "3")


def test_activations_of_what_a_run_has_sampled(here: Path) -> None:
    run = here / "runs" / "a"
    shutil.copytree(TINY, run / "checkpoints" / "step-000001")
    seal(run / "checkpoints" / "step-000001", 1)
    resolved = load_recipe("tiny/grpo").resolve().model_dump(mode="json")
    (run / "recipe.yaml").write_text(yaml.safe_dump(resolved), encoding="utf-8")
    with RolloutStore(run / "rollouts.db") as rollouts:
        rollouts.record([rollout((5, 6), (11, 12, 0)) for _ in range(3)])
    assert main(["activations", "a", "--layer", "1", "--rollouts", "a", "--quiet"]) == 0
    store = ActivationStore("activations/a-a")
    assert store.tokens(torch.arange(store.num_rows)).tolist() == [6, 11, 12, 0] * 3
    assert store.prompt_lengths(torch.arange(3)).tolist() == [2, 2, 2]
    assert store.index.sources[0].model == "runs/a/checkpoints/step-000001"
    assert main(["activations", "a", "--layer", "1", "--max-rows", "50", "--quiet"]) == 0  # the task of its recipe
    assert ActivationStore("activations/a-stories").index.data["task"] == "stories"


def test_activations_mistakes_are_one_message(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "long.txt").write_text("apples " * 3000, encoding="utf-8")
    layer = ["tiny", "--layer", "2"]
    for arguments, message in (
        (["tiny"], "--layer: missing"),
        (["tiny", "--layer", "9"], "resid.9"),
        (["tiny", "--layer", "0"], "'resid.0'"),
        ([*layer, "--site", "mlp"], "`posttrain activations --site`"),
        ([*layer, "--text", "none.txt"], "none.txt"),
        ([*layer, "--text", "none.txt", "--task", "stories"], "--task"),
        ([*layer, "--text", "none.txt", "--task.n", "5"], "task and template"),
        ([*layer, "--rollouts", "none"], "none"),
        ([*layer, "--taks", "x"], "--taks"),
        ([*layer, "--context-tokens", "5000", "--text", "long.txt"], "truncate it first"),
        (["none", "--export-pt", "x"], "no recorded activations"),
        (["none", "--import-pt", "resid.2"], "give --out"),
    ):
        assert message in refused(capsys, *arguments), arguments


def test_activations_much_is_written_only_when_it_is_wanted(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ["tiny", "--layer", "1", "--max-rows", "100", "--out", "s"]
    monkeypatch.setattr(recording, "LARGE_BYTES", 26_000)
    assert "--yes" in refused(capsys, *request)
    assert not (here / "s").exists()
    assert main(["activations", *request, "--yes"]) == 0


def test_read_documents_with_a_limit_reads_so_many_rows(small_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": word}) + "\n" for word in ("one", "two", "three")))
    whole = read_documents(small_tokenizer, text=str(path), context_tokens=1000)
    found = read_documents(small_tokenizer, text=str(path), context_tokens=1000, limit=2)
    assert found.ids == whole.ids[:2]
    assert found.data == {**whole.data, "limit": 2}  # another recording than that of all
    prompts = read_documents(small_tokenizer, task=STORIES, template=R1_ZERO, context_tokens=1000)
    assert (
        read_documents(small_tokenizer, task=STORIES, template=R1_ZERO, context_tokens=1000, limit=3).ids
        == (prompts.ids[:3])
    )
    assert len(prompts.ids) > 2
