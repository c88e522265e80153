from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from posttrain.cli import build_parser, main, parse
from posttrain.commands.typed import ANY, split_overrides
from posttrain.errors import UsageError
from posttrain.recipes.document import recipe_names
from posttrain.recipes.recipe import load_recipe
from refusing import refuses


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one message that a command ends with; no traceback."""
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith("posttrain: ")
    return captured.err.removeprefix("posttrain: ")


def options(*names: str) -> argparse.ArgumentParser:
    """Return a parser of these options; ``--resume`` takes no value."""
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(name, action="store_true" if name == "--resume" else "store")
    return parser


def test_overrides_are_distinguished_from_the_commands_own_options() -> None:
    own, overrides = split_overrides(
        ["tiny/grpo", "--run", "a", "--train.lr", "1e-4", "--objective=grpo", "--resume", "--rewards.0.weight", "-1"],
        options("--run", "--resume"),
        ANY,
    )
    assert own == ["tiny/grpo", "--run", "a", "--resume"]
    assert overrides == [("train.lr", "1e-4"), ("objective", "grpo"), ("rewards.0.weight", "-1")]


def test_overrides_hold_anything_and_end_at_two_dashes() -> None:
    _, overrides = split_overrides(["--template.preamble=a = b", "--x.y", "c d"], options(), ANY)
    assert overrides == [("template.preamble", "a = b"), ("x.y", "c d")]
    assert split_overrides(["tiny", "--", "--train.lr"], options(), ANY) == (["tiny", "--", "--train.lr"], [])


@pytest.mark.parametrize("arguments", [["--train.lr"], ["--train.lr", "--resume"]])
def test_a_key_without_a_value_is_refused(arguments: list[str]) -> None:
    with refuses(UsageError, "--train.lr"):
        split_overrides(arguments, options("--resume"), ANY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "'trian'"),
        (["evaluate", "tiny", "--taks", "x"], "--taks"),
        (["pipeline", "tiny"], "`posttrain pipeline`"),
        (["train", "grpo-gsm8k", "--trian.lr", "1"], "'trian'"),
        (["recipes", "show"], "missing recipe name"),
        (["train", "tiny/grpo", "--steps", "3"], "train.steps"),
        (["train", "tiny/grpo", "--model", "gpt2"], "model.name"),
        (["runs", "resume", "a", "--train.steps", "9"], "stored recipe"),
        (["--foo"], "`posttrain --help`"),
        (["train", "grpo"], "'tiny/grpo'"),
        (["train", "tiny/grpo", "--max-tokens", "5"], "rollout.max_tokens"),
        (["grpo"], "`posttrain train tiny/grpo`"),
        (["finetune", "tiny"], "`posttrain train RECIPE`"),
        (["sae", "tran", "tiny/sae"], "`posttrain sae train`"),
        (["runs", "rm", "a"], "`posttrain runs delete NAME`"),
        (["train", "tiny/grpo", "--dry-run", "--resume"], "--dry-run"),
        (["train", "tiny/grpo", "--dry-run", "--run", "a/b"], "--run"),
        (["generate", "tiny", __file__], "--task.path"),
        (["runs", "drop"], "`posttrain runs show drop`"),
        (["generate", "tiny", "--max_new_tokens", "4"], "--max_new_tokens"),
        (["evaluate", "tiny", "--n", "2"], "`posttrain evaluate --n`"),
        (["train", "tiny/grpo", "--train.lr", "=", "1e-5"], "--train.lr"),
        (["train", "tiny/grpo", "-train.lr", "1e-5"], "--train.lr"),
        (["train", "tiny/grpo", "+train.lr=1e-5"], "--train.lr"),
        (["train", "tiny/grpo", "--model.adapter", "lora"], "model.adapter.kind"),
        (["train", "tiny/grpo.yaml"], "tiny/grpo.yaml"),
        (["train", "tiny/grpo", "--task.path", "a.jsonl"], "'path'"),
        (["train", "ppo-grpo-dpo"], "`posttrain sweep ppo-grpo-dpo`"),
        (["evaluate", "tiny/grpo"], "'tiny/grpo'"),
        (["serve", "--model", "tiny"], "MODEL_OR_RUN"),
        (["evaluate", "tiny", "--num-samples", "2"], "--num-samples"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "usage: posttrain"),
        (["quantize", "tiny", "--bits", "5"], "invalid choice: 5"),
        (["exercise", "chekc"], "'chekc'"),
    ],
)
def test_what_argparse_refuses_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert message in capsys.readouterr().err


def test_words_after_options_are_found() -> None:
    arguments = parse(["generate", "tiny", "--max-tokens", "4", "2+2?", "--task.split=test", "--seed", "1"])
    assert (arguments.model, arguments.prompt, arguments.max_tokens, arguments.seed) == ("tiny", "2+2?", 4, 1)
    assert parse(["generate", "--seed", "1", "tiny", "-5"]).prompt == "-5"
    assert parse(["generate", "--seed", "1", "tiny", "--", "-x"]).prompt == "-x"
    assert parse(["chat", "tiny", "--top-k", "2", "tiny-sft"]).models == ["tiny", "tiny-sft"]
    shown = parse(["data", "show", "--limit", "3", "stories", "--plot"])
    assert (shown.name, shown.limit, shown.plot) == ("stories", 3, "")
    assert parse(["runs", "compare", "a", "--json", "b"]).names == ["a", "b"]


def test_options_with_underscores_are_those_with_dashes() -> None:
    arguments = parse(["generate", "tiny", "--max_tokens", "4", "--runs_dir=here", "--task.max-digits", "2"])
    assert (arguments.max_tokens, arguments.runs_dir) == (4, "here")
    written = [("train.ppo_epochs", "2"), ("rollout.max_tokens", "9"), ("model.dtype", "bfloat16")]
    typed = [("train.ppo-epochs", "2"), ("rollout.max-tokens", "9"), ("model.dtype", "torch.bfloat16")]
    assert load_recipe("tiny/grpo", typed) == load_recipe("tiny/grpo", written)
    assert load_recipe("tiny/grpo", typed).model.dtype == "bf16"


def test_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError):
        main(["train", "nowhere.yaml", "--traceback"])
    monkeypatch.setenv("POSTTRAIN_TRACEBACK", "1")
    with pytest.raises(UsageError):
        main(["train", "nowhere.yaml"])


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.commands.train.run_train", interrupt)
    assert main(["train", "tiny/grpo"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_dry_run_reads_the_file_that_the_task_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    command = ["train", "sft-math", "--task", "jsonl", "--task.path", str(path), "--eval.every", "0", "--dry-run"]
    assert main(command) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes[0] == ("note: task: jsonl in place of math, dropping recipe options: split (train)")
    assert "no such file" in notes[1]
    path.write_text('{"prompt": "1+1?", "answer": "\\\\sqrt3"}\n', encoding="utf-8")
    assert main(command) == 2  # one prompt cannot be parted
    assert main([*command, "--task.split", "all"]) == 0
    assert "note: task.grader" in capsys.readouterr().err
    path.write_text('{"prompt": "1+1?", "answer": "2"}\n{"prompt": "1+2?"}\n', encoding="utf-8")
    assert main(command) == 2
    assert "rows.jsonl:2" in capsys.readouterr().err


def test_dry_run_prints_a_recipe_that_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo-gsm8k", "--dry-run", "--train.lr", "1e-4", "--rollout.group_size=4"]) == 0
    text = capsys.readouterr().out
    resolved = yaml.safe_load(text)
    assert (resolved["train"]["lr"], resolved["rollout"]["group_size"]) == (1e-4, 4)
    assert resolved["objective"]["clip_low"] == 0.2  # a default of the function, filled in
    path = tmp_path / "resolved.yaml"
    path.write_text(text)
    assert main(["train", str(path), "--dry-run"]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[1:] == text.splitlines()[1:]
    assert again.splitlines()[0].endswith(text.splitlines()[0].rpartition(" ")[2])  # the same fingerprint


def test_dry_run_states_which_models_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be made before the recipe is trained, as the shipped ones say; of what a sweep makes nothing is said."""
    monkeypatch.chdir(tmp_path)

    def message(*words: str) -> list[str]:
        assert main([*words, "--dry-run"]) == 0
        printed = capsys.readouterr()
        assert yaml.safe_load(printed.out)
        notes = [line.removeprefix("note: ") for line in printed.err.splitlines()]
        return [note for note in notes if "missing folder" in note]

    behind = "; create it before training"
    missing = f"model.name: missing folder runs/mine{behind}"
    for name in ("$HOME/mine", "hf:org/model", "\u201ctiny\u201d"):  # no name of the hub has such letters
        assert message("train", "tiny/grpo", "--model.name", name) == [missing.replace("runs/mine", name)]
    assert message("train", "tiny/grpo", "--model.name", "runs/mine") == [missing]
    assert message("train", "distillation/reverse-kl") == [f"teacher.name: missing folder runs/tiny-grpo{behind}"]
    assert message("train", "grpo-hh-gpt2") == [f"rewards.0.run: missing folder runs/rm-hh-gpt2{behind}"]
    assert message("train", "grpo-gsm8k") == message("sweep", "tiny") == [], "a model of the hub, and what is made"
    sweep = tmp_path / "mine.yaml"
    sweep.write_text("base: {recipe: tiny/grpo, model: {name: runs/mine}}\nrows: {grpo: rl/grpo}\nseeds: 2\n")
    assert message("sweep", "mine.yaml") == [missing]
    Path("runs/mine").mkdir(parents=True)
    assert message("train", "tiny/grpo", "--model.name", "runs/mine") == []


def test_recipes_lists_what_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("grpo-gsm8k", "sft-math", "tiny/grpo"))
    lines = out.splitlines()
    (line,) = (line for line in lines if line.startswith("rl/dr-grpo "))
    assert "Dr. GRPO (Liu et al. 2025): no division" in line
    assert lines.index("policy gradients: posttrain train NAME") < lines.index(line)
    large = next(line for line in lines if line.startswith("grpo-gsm8k "))
    assert large.split()[1:8] == ["gsm8k", "Qwen3-14B", "14B", "GPU,", "42", "GiB", "Qwen3-14B"]
    assert main(["recipes", "show", "grpo-gsm8k"]) == 0
    assert "name: Qwen/Qwen3-14B" in capsys.readouterr().out


def test_recipes_as_json_hold_everything_that_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    rows = {row["recipe"]: row for group in json.loads(capsys.readouterr().out) for row in group["rows"]}
    assert list(map(set, rows.values())) == [{"recipe", "task", "model", "size", "hardware", "what it does"}] * len(
        rows
    )
    assert sorted(rows) == recipe_names()
    assert not [row for row in rows.values() if not all(row.values())]
    names = ("tiny/grpo", "sweep/tiny", "sae-qwen3-14b-layer20", "smollm2/grpo-sums", "smollm2/what-did-rl-change")
    output = {name: tuple(rows[name].values())[1:5] for name in (*names, "rm-hh-gpt2")}
    assert output == {
        "smollm2/grpo-sums": ("sums", "smollm2-135m", "135M", "CPU"),
        "smollm2/what-did-rl-change": ("sums", "smollm2-135m", "135M", "CPU"),
        "rm-hh-gpt2": ("hh_rlhf", "gpt2", "124M", "GPU, 19 GiB"),
        "tiny/grpo": ("stories", "tiny-sft", "0.9M", "CPU"),
        "sweep/tiny": ("stories", "tiny", "0.9M", "CPU"),
        "sae-qwen3-14b-layer20": ("text", "Qwen3-14B", "14B", "GPU"),
    }


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("posttrain ")
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out
    assert {"demo", "train", "evaluate", "generate", "recipes", "explain", "runs"} <= set(build_parser()[1])


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = "import sys; from posttrain.cli import main; sys.exit(main(['explain', 'recipe']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=600) == 0
