"""Completion by the parser: the words that may follow, and what three shells make of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.cli import COMMANDS, build_parser, main
from posttrain.commands.sharing.completion import SCRIPTS, CommandLine
from posttrain.commands.sharing.completion import complete_words as words_of
from posttrain.recipes.document import recipe_names


def complete_words(words: list[str], runs_dir: str = "runs") -> list[str]:
    return words_of(CommandLine(COMMANDS, build_parser), words, runs_dir)


def test_commands_actions_options_and_choices_are_those_of_the_parser() -> None:
    names = [name for name in COMMANDS if " " not in name]
    assert complete_words([""]) == [*names, "--help", "--version"]
    assert complete_words(["tr"]) == ["train"]
    assert complete_words(["runs", "ex"]) == ["export"]
    assert complete_words(["sae", ""]) == [name.partition(" ")[2] for name in COMMANDS if name.startswith("sae ")]
    assert complete_words(["recipes", "s"]) == ["show", "schema"]
    for name in ("evaluate", "runs export", "data"):
        options = build_parser(name.partition(" ")[0])[1][name]._option_string_actions
        assert set(complete_words([*name.split(), "-"])) >= set(options)
    assert complete_words(["evaluate", "tiny", "--format", ""]) == ["table", "json"]
    assert complete_words(["demo", "--story", "r"]) == ["reasoning"]
    assert complete_words(["nothing", ""]) == []
    assert complete_words(["evaluate", "tiny", "--limit", ""]) == []


def test_keys_of_a_recipe_and_names_are_completed(tmp_path: Path) -> None:
    assert complete_words(["train", "tiny/gr"]) == [name for name in recipe_names() if name.startswith("tiny/gr")]
    assert "--rollout." in complete_words(["train", "tiny/grpo", "--ro"])
    assert complete_words(["train", "tiny/grpo", "--rollout.group"]) == ["--rollout.group_size"]
    assert "grpo" in complete_words(["explain", "grp"])
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text("{}")
    (tmp_path / "no-run").mkdir()
    assert complete_words(["runs", "show", ""], str(tmp_path)) == ["mine", "other"]
    assert complete_words(["runs", "--runs-dir", str(tmp_path), "show", "o"])[:1] in (["other"], [])
    assert complete_words(["generate", "ti"]) == ["tiny", "tiny-sft"]


NO_RUNS = ["$(touch x)", "a;touch x", "`touch x`", "a b", "\x1b]0;x\x07", "two\nlines", "*", "-x"]


@pytest.mark.parametrize("name", NO_RUNS)
def test_folders_that_cannot_be_runs_are_not_completed(tmp_path: Path, name: str) -> None:
    """bash puts a candidate on the command line as it is, where Enter runs it."""
    for folder in (name, "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "recipe.yaml").touch()
    assert complete_words(["doctor", ""], str(tmp_path)) == ["mine"]
    assert complete_words(["generate", f"{tmp_path}/"], str(tmp_path)) == [f"{tmp_path}/mine"]


def test_script_of_a_shell_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script
    with pytest.raises(SystemExit) as ended:
        main(["completion", "powershell"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err


def test_words_begin_with_a_colon(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "words", ":evaluate", ":tiny", ":--forma"]) == 0
    assert capsys.readouterr().out.split() == ["--format"]
    assert main(["completion", "words", ":demo", ":--story", ":"]) == 0
    assert capsys.readouterr().out.split() == ["reasoning", "tools", "smollm2"]


BASH = """
posttrain() {{ {python} -m posttrain "$@"; }}
{script}
COMP_WORDS=(posttrain {words}); COMP_CWORD={place}; _posttrain; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path: Path) -> None:
    for words, expected in ((["recip"], ["recipes"]), (["demo", "--story", ""], ["reasoning", "tools", "smollm2"])):
        typed = " ".join(f"'{word}'" for word in words)
        text = BASH.format(python=sys.executable, script=SCRIPTS["bash"], words=typed, place=len(words))
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_of_the_shells_language(shell: str, tmp_path: Path) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell}")
    (tmp_path / "script").write_text(SCRIPTS[shell], encoding="utf-8")
    command = [found, "-n", str(tmp_path / "script")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
