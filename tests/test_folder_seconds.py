"""The table of seconds by folder, on a tiny suite of its own, in one process and in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SLEEP_SECONDS = 0.3
SUITE = {
    "slow/test_slow.py": f"import time\n\ndef test_slow():\n    time.sleep({SLEEP_SECONDS})\n",
    "quick/inner/test_inner.py": "import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test_n(n):\n    pass\n",
    "quick/test_several.py": (
        "import pytest\n\n@pytest.fixture\ndef broken():\n    raise ValueError\n\n"
        "def test_breaks(broken):\n    pass\n\n@pytest.mark.skip\ndef test_skipped():\n    pass\n\n"
        "def test_fails():\n    assert False\n"
    ),
}


@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["one process", "two processes"])
def test_seconds_and_tests_of_every_folder(tmp_path: Path, processes: list[str]) -> None:
    for name, text in SUITE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "folder_seconds", *processes]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--folder-seconds", "build/seconds.json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # of the test that fails
    written = json.loads((tmp_path / "build" / "seconds.json").read_text())
    folders = written["folders"]
    assert {name: row["tests"] for name, row in folders.items()} == {"slow": 1, "quick": 3, "quick/inner": 3}
    assert written["all"]["tests"] == 7
    assert folders["slow"]["seconds"] >= SLEEP_SECONDS
    assert written["all"]["seconds"] >= SLEEP_SECONDS
    assert list(folders.values()) == sorted(folders.values(), key=lambda row: -row["seconds"])
    lines = done.stdout.splitlines()
    assert any(line.endswith("s      3 tests  quick/inner") for line in lines), done.stdout
    assert any(line.endswith("s      7 tests  all") for line in lines), done.stdout


def test_make_test_asks_for_it() -> None:
    root = Path(__file__).parents[1]
    makefile = (root / "Makefile").read_text()
    assert "pytest $(SHARED) --folder-seconds build/test_seconds.json\n" in makefile
    assert "SHARED := -n 2 " in makefile
    assert 'pytest_plugins = ("folder_seconds",)' in (root / "tests" / "conftest.py").read_text()
    assert "build/" in (root / ".gitignore").read_text().splitlines()
