"""What a shell is offered behind ``posttrain``, and that a shell really gets it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.commands.options.completion import SCRIPTS


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, a folder that is none, and one whose name is more than a name to a shell."""
    for name in ("tiny-grpo", "tiny-sft", "$(touch gone)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").touch()
    (tmp_path / "runs" / "tiny-notes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tr", ["train"]),
        (
            "train tiny/g",
            [
                *("tiny/grpo", "tiny/grpo-calculator", "tiny/grpo-curriculum", "tiny/grpo-demo"),
                *("tiny/grpo-nim", "tiny/grpo-number-guess"),
            ],
        ),
        ("train sweep/", []),
        ("train tiny/grpo --train.l", ["--train.lr"]),
        ("train tiny/grpo --dry", ["--dry-run"]),
        ("sweep sweep/p", ["sweep/ppo-grpo-dpo", "sweep/prm-vs-orm"]),
        ("sae d", ["diff"]),
        ("sae train tiny/s", ["tiny/sae"]),
        ("generate tiny-", ["tiny-grpo", "tiny-sft"]),
        ("chat tiny-grpo t", ["tiny", "tiny-grpo", "tiny-sft"]),
        ("runs ta", ["tag"]),
        ("runs show tiny-s", ["tiny-sft"]),
        ("runs show --form", ["--format"]),
        ("runs --runs-dir nowhere show t", []),
        ("evaluate tiny --device c", ["cpu", "cuda"]),
        ("explain grp", ["grpo"]),
        ("data show gsm", ["gsm8k", "gsm8k_solutions"]),
        ("recipes show rl/grp", ["rl/grpo"]),
        ("completion z", ["zsh"]),
        ("nonsense x", []),
    ],
)
def test_what_is_offered(words: str, offered: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["__complete", *words.split(" ")]) == 0
    assert capsys.readouterr().out.split() == offered


def test_a_recipe_of_ones_own_has_its_keys(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "mine.yaml").write_text("extends: tiny/grpo\nobjective: {clip_high: 0.3}\n")
    assert main(["__complete", "train", "mine.yaml", "--objective.c"]) == 0
    assert capsys.readouterr().out == "--objective.clip_high\n"
    assert main(["__complete", "train", "nowhere.yaml", "--objective.c"]) == 1
    assert capsys.readouterr() == ("", "")


def test_commands_options_and_runs_need_nothing_but_the_standard_library() -> None:
    script = (
        "import sys; from posttrain.cli import main\n"
        "asked = (['t'], ['train', ''], ['runs', 'show', ''], ['train', 'tiny/grpo', '--dr'])\n"
        "for words in asked: main(['__complete', *words])\n"
        "print({'pydantic', 'yaml', 'rich', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_a_shell_is_one_that_it_can_read(
    shell: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script == SCRIPTS[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (place / "script").write_text(script)
    subprocess.run([shell, "-n", "script"], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(place: Path) -> None:
    (place / "bin").mkdir()
    command = place / "bin" / "posttrain"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m posttrain "$@"\n')
    command.chmod(0o755)
    (place / "script").write_text(SCRIPTS["bash"])
    ask = 'source ./script; COMP_WORDS=(posttrain runs show tiny-); COMP_CWORD=3; _posttrain; echo "${COMPREPLY[@]}"'
    environment = os.environ | {"PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "tiny-grpo tiny-sft\n"
    assert not (place / "gone").exists()
