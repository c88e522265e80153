"""The uses in other people's loops run as the page shows them."""

from __future__ import annotations

from pathlib import Path

from page_python import python_of
from torch_alone import run_with_torch_alone

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "in-your-own-loop.md"
TRL = "from trl import"


def blocks() -> tuple[list[str], str]:
    """The blocks that run anywhere, in order, and the one of TRL."""
    texts = python_of(PAGE)
    (of_trl,) = [text for text in texts if TRL in text]
    return [text for text in texts if TRL not in text], of_trl


def test_the_page_has_six_uses():
    plain, _ = blocks()
    assert len(plain) == 5
    assert PAGE.read_text(encoding="utf-8").count("\n## ") == 6


def test_the_uses_run_with_torch_alone():
    plain, _ = blocks()
    lines = run_with_torch_alone("\n".join(["import torch", "torch.manual_seed(0)", *plain])).splitlines()
    assert lines[-2] == "[1.0, 0.0]"
    assert lines[-1].startswith("pass@4 0.")
