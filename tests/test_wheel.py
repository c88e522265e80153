"""The wheel: small, complete, and enough to train without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MEBIBYTE = 2**20


@pytest.mark.slow
def test_wheel_in_a_fresh_environment_trains_and_evaluates(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("posttrain-*.whl")
    assert wheel.stat().st_size <= 10 * MEBIBYTE
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", wheel], check=True, capture_output=True)
    # What it depends on comes from this environment, after its own packages and without its editable checkout.
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    linked = tmp_path / "dependencies"
    linked.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "posttrain" not in path.name and path.suffix != ".pth":
            (linked / path.name).symlink_to(path)
    (site / "dependencies.pth").write_text(f"{linked}\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}

    def posttrain(*words: str) -> str:
        command = [python, "-m", "posttrain", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = subprocess.run(
        [python, "-c", "import posttrain; print(posttrain.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(place.stdout.strip()).is_relative_to(site)
    posttrain("train", "tiny/grpo", "--train.steps", "2", "--run", "mine")
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    assert "stories/test, n = 20" in posttrain("evaluate", "runs/mine", "--task", "stories", "--limit", "20")
