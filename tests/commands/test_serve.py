"""`posttrain serve-command`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import load_recipe
from posttrain.store.checkpoint_files import seal


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], str]:
    """Return the words of the printed command, and stderr."""
    assert main(["serve-command", *arguments]) == 0
    found = capsys.readouterr()
    return shlex.split(found.out.replace("\\\n", "")), found.err


def make_run(root: Path, recipe: str, **changes: str) -> Path:
    run = root / "mine"
    shutil.copytree(TINY, run / "checkpoints" / "step-000010")
    seal(run / "checkpoints" / "step-000010", 10)
    overrides = [(key.replace("__", "."), value) for key, value in changes.items()]
    (run / "recipe.yaml").write_text(load_recipe(recipe, overrides).to_yaml())
    return run


def test_the_command_alone_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    words, hint = printed(capsys, "tiny", "--port", "8123", "--module")
    assert words[:4] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert words[words.index("--port") + 1] == "8123"
    assert "posttrain evaluate tiny --engine vllm --engine.url http://127.0.0.1:8123" in hint
    assert words[words.index("--served-model-name") + 1] in hint


def test_a_run_and_its_checkpoint_by_name_and_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "tiny/grpo", model__dtype="bfloat16")
    by_name, _ = printed(capsys, "mine", "--runs-dir", str(tmp_path))
    by_path, _ = printed(capsys, str(run))
    checkpoint, hint = printed(capsys, str(run / "checkpoints" / "step-000010"))
    assert by_name == by_path == checkpoint
    assert by_name[2] == str(run / "checkpoints" / "step-000010")
    assert by_name[by_name.index("--dtype") + 1] == "bfloat16", "as the run was trained"
    assert by_name[by_name.index("--served-model-name") + 1].startswith("mine-step-000010-")
    assert str(run) in hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "'./nowhere'"),
        (["tiny", "--gpu-memory-utilization", "0.5"], "was removed. Use"),
        (["tiny", "--gpus", "one"], "0 or more"),
    ],
)
def test_mistakes_end_in_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["serve-command", *arguments])
    except SystemExit as done:  # what argparse refuses
        code = int(str(done.code))
    assert code == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.out == ""


def test_a_reward_models_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "tiny/rm")
    assert main(["serve-command", str(run)]) == 2
    assert "trained a reward" in capsys.readouterr().err
