"""A model or run that is not there is refused at once: no library that loads models is imported, no hub asked twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.errors import UsageError
from posttrain.runs.paths import refuse_absent
from refusing import refuses

CLOSED = "http://127.0.0.1:9"  # nobody listens on the port for discarding
COMMANDS = [
    ["generate", "nothing"],
    ["evaluate", "tiny", "--against", "org/nothing"],
    ["chat", "./nothing"],
    ["activations", "tiny", "--paired", "runs/nothing", "--layer", "1"],
]


def test_it_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": CLOSED, "HF_HOME": str(tmp_path / "hub")}
    script = (
        "import json, sys; from posttrain.cli import main; print([main(words) for words in json.loads(sys.argv[1])], "
        "sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, json.dumps(COMMANDS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[2, 2, 2, 2] []\n", done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    assert all("nothing" in line and "no such run or folder" in line for line in lines), lines
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_or_in_the_cache_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "recipe.yaml").write_text("")
    (tmp_path / "hub" / "models--org--model").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "one", "runs/one", "runs/one/checkpoints/step-9", "hub", "org/model"):
        refuse_absent("runs", name)
    with refuses(UsageError, "'runs/two'"):
        refuse_absent("runs", "runs/two")
