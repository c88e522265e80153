"""The report on a machine has what a bug report needs, and nothing that names or lets in its owner."""

from __future__ import annotations

import getpass
import json
import platform
import socket
from pathlib import Path

import pytest
import torch

from posttrain import __version__
from posttrain.cli import main
from posttrain.store.tracking.machine_report import describe_machine


def test_report_has_versions_hardware_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"versions", "packages", "hardware", "settings"}
    assert (report["versions"]["posttrain"], report["versions"]["python"]) == (__version__, platform.python_version())
    assert report["packages"]["torch"] == torch.__version__
    assert report["hardware"]["threads of torch"] == str(torch.get_num_threads())
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"  torch: {torch.__version__}\n" in text
    assert len(describe_machine(all_packages=True)["packages"]) > len(report["packages"])


def test_report_has_no_secret_name_or_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = {
        "HF_TOKEN": "hf_0123456789abcdef",
        "WANDB_API_KEY": "0123456789abcdef0123",
        "MLFLOW_TRACKING_URI": "http://me:secretword@host.example",
        "POSTTRAIN_MODELS": "/home/somebody/models",
        "HF_HOME": "/home/somebody/.cache",
        "AWS_SECRET_ACCESS_KEY": "abcdefabcdefabcdef",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "\x1b[31m0",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for value in ("hf_0123", "0123456789abcdef0123", "secretword", "somebody", "abcdefabcdef", "AWS", "\x1b"):
        assert value not in text
    for line in ("  HF_TOKEN: set\n", "  MLFLOW_TRACKING_URI: set\n", "  OMP_NUM_THREADS: 2\n"):
        assert line in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    for owner in (socket.gethostname(), getpass.getuser()):
        assert owner not in text.split()
