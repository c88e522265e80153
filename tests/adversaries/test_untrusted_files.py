"""Links in a stranger's run lead nowhere, pickles are not opened, and what files say is neither code nor markup."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_untrusted_code import run
from untrusted_sources import contents, make_evil, plain_recipe

from posttrain import untrusted as consent
from posttrain.errors import RunFailure, UsageError, hide_secrets
from posttrain.evaluation.tables import TextTable, to_markdown
from posttrain.models.load import load_model, load_tokenizer
from posttrain.models.sources import TINY
from posttrain.option_types import server_address
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import ModelSection
from posttrain.runs.export import model_card
from posttrain.store.durable import refuse_links
from posttrain.untrusted import code, paragraph, plain
from refusing import refuses


@pytest.fixture
def place(tmp_path: Path, no_code_allowed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What is written to a run, and a link with that name to a file or folder of the user's.
LINKED_FILES = ["log.txt", "rollouts.db-wal", ".lock", "recipe.yaml"]
LINKED_FOLDERS = ["checkpoints", "checkpoints/.tmp-step-000002", "checkpoints/step-000001/quantized_int8", "wandb"]
WRITERS = {
    "runs resume": ["evil"],
    "train": ["runs/evil/recipe.yaml", "--run", "evil", "--resume"],
    "runs prune": ["evil", "--keep", "last", "--yes"],
    "runs export": ["evil", "--to", "exported"],
    "runs delete": ["evil", "--yes"],
}


def link(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", [*LINKED_FILES, *LINKED_FOLDERS])
def test_nothing_outside_of_a_run_is_written_or_deleted_through_a_link(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = make_evil(place / "runs" / "evil", {}, place / "it-ran")
    precious = place / "precious"
    (precious / "step-000007").mkdir(parents=True)
    (precious / "step-000007" / "weights").write_text("years of work")
    (precious / ".tmp-mine").write_text("not a leftover")
    is_file = name in LINKED_FILES
    file = precious / "file"
    file.write_bytes((evil / name).read_bytes() if (evil / name).is_file() else b"mine\n")
    before = contents(precious)
    link(evil / name, file if is_file else precious)
    for command, arguments in WRITERS.items():
        code = run(command, arguments, monkeypatch)
        message = capsys.readouterr().err
        assert contents(precious) == before, f"{command} changed what {name} leads to"
        assert code in (0, 1, 2)
        if command in ("runs resume", "train") and name != "recipe.yaml":
            assert code == 2, message
            assert f"{name}: this is a link leading outside this folder, to {precious}" in message


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.db"])
def test_a_second_name_of_a_file_is_not_written_to(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = make_evil(place / "runs" / "evil", {}, place / "it-ran")
    file = place / "mine"
    file.write_bytes((evil / name).read_bytes() if (evil / name).exists() else b"mine\n")
    before = file.read_bytes()
    (evil / name).unlink(missing_ok=True)
    os.link(file, evil / name)
    for command, arguments in WRITERS.items():
        run(command, arguments, monkeypatch)
        assert file.read_bytes() == before, f"{command} wrote to {name}"
        if command == "runs resume":
            assert f"{name}: this is a hard link" in capsys.readouterr().err


def test_every_file_that_is_written_in_place_is_refused_with_a_second_name(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "run"
    mine.write_bytes(b"mine")
    folder.mkdir()
    for name in ("log.txt", "metrics.jsonl", "rollouts.db", ".lock", "curves.png"):
        os.link(mine, folder / name)
        with pytest.raises(UsageError, match=f"{name}: this is a hard link"):
            refuse_links(folder)
        (folder / name).unlink()
    refuse_links(folder)


def test_links_of_ones_own_are_fine(tmp_path: Path) -> None:
    """A runs folder on another disk, ``best``, and what W&B keeps."""
    disk = tmp_path / "big-disk"
    make_evil(disk / "mine", {}, tmp_path / "it-ran")
    (tmp_path / "runs").symlink_to(disk)
    session = disk / "mine" / "wandb" / "offline-run-1"
    session.mkdir(parents=True)
    (session / "debug-core.log").symlink_to(tmp_path / "elsewhere.log")
    (disk / "mine" / "wandb" / "latest-run").symlink_to("offline-run-1")
    assert (disk / "mine" / "checkpoints" / "best").is_symlink()
    refuse_links(tmp_path / "runs" / "mine")
    os.mkfifo(disk / "mine" / "evaluation" / "pipe")
    with refuses(UsageError, "pipe:"):
        refuse_links(tmp_path / "runs" / "mine")


def test_the_best_checkpoint_lies_in_its_run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    evil = make_evil(place / "runs" / "evil", {}, place / "it-ran")
    shutil.copytree(TINY, place / "models" / "mine")
    link(evil / "checkpoints" / "best", place / "models" / "mine")
    assert run("quantize", ["evil", "--bits", "8"], monkeypatch) == 2
    assert "leads out of" in capsys.readouterr().err
    assert not list((place / "models" / "mine").glob("quantized*"))


class Payload:
    """A pickle that makes a file when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def adapter(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(TINY), "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    return folder


def test_weights_that_are_pickles_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    with_bin = adapter(tmp_path / "adapter")
    (with_bin / "adapter_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    whole = tmp_path / "whole"
    shutil.copytree(TINY, whole, ignore=shutil.ignore_patterns("*.safetensors"))
    (whole / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    for folder in (with_bin, whole):
        for load in (
            lambda name: load_model(ModelSection(name=str(name)), seed=0),
            lambda name: load_tokenizer(str(name)),
        ):
            with refuses(UsageError, "pickle, and loading", "safetensors"):
                load(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"megatron_config": {"a": 1}, "megatron_core": "runs.evil.payload"},
        {"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}},
        {"peft_type": None},
    ],
)
def test_adapters_that_name_code_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", **changes)
    with refuses(UsageError, "something else than"):
        load_model(ModelSection(name=str(folder)), seed=0)


@pytest.mark.parametrize("changes", [{"lora_alpha": float("nan")}, {"alpha_pattern": {"q_proj": 1e9}}])
def test_an_adapter_whose_scale_is_no_number_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", **changes)
    with refuses(UsageError, "adapter_config.json"):
        load_model(ModelSection(name=str(folder)), seed=0)


@pytest.mark.parametrize("limit", ["long", [], {"a": 1}, "\x1b[2J"])
def test_a_tokenizer_whose_limit_is_no_number_is_refused(
    limit: Any, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = place / "model"
    shutil.copytree(TINY, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": limit}))
    assert run("generate", ["model", "Hi", "--max-tokens", "2"], monkeypatch) == 2
    message = capsys.readouterr().err
    assert "model_max_length is" in message
    assert "no number" in message
    assert "\x1b" not in message


def test_an_adapter_that_stands_on_itself_ends(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", base_model_name_or_path=str(tmp_path / "b"))
    adapter(tmp_path / "b", base_model_name_or_path=str(folder))
    with refuses(UsageError, "adapter is its"):
        load_tokenizer(str(folder))


CODE_OF_A_MODEL = "from pathlib import Path\nPath({!r}).touch()\nfrom transformers import {} as C\n"


def model_with_code(folder: Path, marker: Path) -> Path:
    """The embedded model, as one that brings its own classes."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own_config.C", "AutoModelForCausalLM": "own_model.C"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "made_up_type"}))
    (folder / "own_config.py").write_text(CODE_OF_A_MODEL.format(str(marker), "Qwen3Config"))
    (folder / "own_model.py").write_text(CODE_OF_A_MODEL.format(str(marker), "Qwen3ForCausalLM"))
    return folder


def test_no_file_asks_for_the_python_of_a_model(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = place / "it-ran"
    model = model_with_code(place / "model", marker)
    asks = {**plain_recipe()["model"], "name": str(model), "trust_remote_code": True}
    (place / "mine.yaml").write_text(yaml.safe_dump({**plain_recipe(), "model": asks}))
    assert run("train", ["mine.yaml", "--dry-run"], monkeypatch) == 2
    message = capsys.readouterr().err
    assert "mine.yaml:" in message
    assert "model.trust_remote_code" in message
    assert "--trust-remote-code" in message
    evil = make_evil(place / "runs" / "evil", {"model": asks}, marker)
    checkpoint = evil / "checkpoints" / "step-000001"
    shutil.rmtree(checkpoint)
    model_with_code(checkpoint, marker)
    for command, arguments in (
        ("runs resume", ["evil"]),
        ("generate", ["evil", "Hi", "--max-tokens", "4"]),
        ("serve", ["evil", "--port", "8714"]),
        ("data", ["show", "stories", "--model", "model", "--limit", "2"]),
        ("activations", ["evil", "--layer", "1", "--out", "acts", "--yes"]),
    ):
        run(command, arguments, monkeypatch)
        assert "--trust-remote-code" not in capsys.readouterr().out
        assert not marker.exists(), f"{command} ran the Python of a model"


def test_the_flag_and_the_option_of_the_command_line_are_obeyed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("tiny/grpo", [("model.trust_remote_code", "true")])
    assert recipe.model.runs_remote_code
    assert not load_recipe("tiny/grpo").model.runs_remote_code
    consent.declare_from_command_line([], trust_remote_code=True)
    assert load_recipe("tiny/grpo").model.runs_remote_code
    assert consent.allow_code_options() == ["--trust-remote-code"]


SECRETS = [
    ("http://me:hunter2@host:8000/v1", "http://***@host:8000/v1"),
    ("https://host/v1?api_key=hunter2&n=3", "https://host/v1?api_key=***&n=3"),
    ("see https://token-hunter2@host, and http://plain:80/x", "see https://***@host, and http://plain:80/x"),
    ("http://me:hun/ter2@host", "http://***@host"),
    ("a@b.c and key=5 stay", "a@b.c and key=5 stay"),
]


@pytest.mark.parametrize(("text", "shown"), SECRETS)
def test_secrets_in_urls_are_not_shown(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown
    assert str(RunFailure(f"{text}: gone")) == f"{shown}: gone"


@pytest.mark.parametrize("url", [SECRETS[0][0], SECRETS[1][0], SECRETS[3][0]])
def test_a_key_in_the_servers_url_is_refused_without_being_reported(
    url: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {"extends": "tiny/grpo", "rollout": {"engine": {"name": "vllm", "url": url}}}
    (place / "mine.yaml").write_text(yaml.safe_dump(recipe))
    evaluation = ["tiny", "--task", "stories", "--engine", "vllm", "--engine.url", url, "--limit", "2", "--out", "out"]
    for command, arguments in (("evaluate", evaluation), ("train", ["mine.yaml"])):
        assert run(command, arguments, monkeypatch) == 2
        shown = capsys.readouterr()
        assert "VLLM_API_KEY" in shown.err
        assert "hunter2" not in shown.err + shown.out
        assert "ter2" not in shown.err + shown.out
    assert not any(b"ter2" in c for n, c in contents(place).items() if n != "mine.yaml" and isinstance(c, bytes))
    with refuses(UsageError, "VLLM_API_KEY") as refusal:
        server_address(url)
    assert "ter2" not in str(refusal.value)


EVIL_TEXT = (
    "---\nlicense: mit\n---\n# Official\n<script>x</script> [click](http://evil) ![i](http://e/i.png) `a` | b \x1b[2J"
)


def test_the_card_of_an_export_shows_text_as_text(tmp_path: Path) -> None:
    changes = {"description": EVIL_TEXT, "objective": "a | b\n\n# c", "task": "<b>", "model": "x`](http://evil)`\n# d"}
    evil = make_evil(tmp_path / "evil", changes, tmp_path / "it-ran", with_weights=False)
    (evil / "env.json").write_text(
        json.dumps({"recipe": "`\n<img src=x>", "starts": [{"versions": {"posttrain": "<i>"}}]})
    )
    lines = model_card(evil, 1, evil).splitlines()
    assert [i for i, line in enumerate(lines) if line.startswith("---")] == [0, 4]
    assert lines[1:4] == ["library_name: transformers", "tags:", "- posttrain"]
    assert [line for line in lines if line.startswith("#")] == ["# evil"]
    assert lines[8] == (
        r"\--- license: mit --- # Official \<script>x\</script> \[click\](http://evil) !\[i\](http://e/i.png) "
        r"\`a\` \| b  \[2J"
    )
    assert len([line for line in lines[5:] if line.startswith("- ")]) == 5
    assert "- from: ``x`](http://evil)` # d``" in lines
    assert "- objective: a \\| b # c" in lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1. one", r"1\. one"),
        ("- a", r"\- a"),
        ("> q", r"\> q"),
        ("2024 was", "2024 was"),
        ("plain words: 50 % & more", "plain words: 50 % & more"),
        ("a_b *c*", "a_b *c*"),
    ],
)
def test_a_paragraph_begins_no_block(text: str, shown: str) -> None:
    assert paragraph(text) == shown


def test_untrusted_notebook_values_and_code_are_refused() -> None:
    assert plain("a|b\nc\\d") == r"a\|b c\\d"
    assert (code("x"), code("a`b``c"), code("`x"), code("a|b\n")) == ("`x`", "```a`b``c```", "`` `x ``", "`a¦b `")
    table = to_markdown(TextTable("T\n# x", ["<b>", "n"], [["[l](u)", "1\n2"]]))
    assert table == "## T # x\n\n| \\<b> | n |\n| --- | ---: |\n| \\[l\\](u) | 1 2 |\n"
