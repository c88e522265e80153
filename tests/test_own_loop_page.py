"""The uses in other people's loops run as the page shows them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

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


@pytest.mark.adapters
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_the_trainer_of_trl_trains_with_our_loss(tmp_path: Path):
    """Two steps of TRL's own trainer on the embedded model; its loss is ours, and a gradient reaches the model."""
    _, of_trl = blocks()
    program = f"""
{of_trl}
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from posttrain.models.sources import TINY

config = GRPOConfig(
    output_dir={str(tmp_path)!r}, max_steps=2, per_device_train_batch_size=4, num_generations=4,
    gradient_accumulation_steps=2, steps_per_generation=2, max_completion_length=8, use_cpu=True, report_to=[],
    logging_steps=1, save_strategy="no", bf16=False, learning_rate=1e-3,
)
model = AutoModelForCausalLM.from_pretrained(TINY)
before = [weight.detach().clone() for weight in model.parameters()]
trainer = CispoTrainer(
    model=model, args=config, processing_class=AutoTokenizer.from_pretrained(TINY),
    reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
    train_dataset=Dataset.from_dict({{"prompt": ["Eva has 3 shells."] * 16}}),
)
trainer.train()
moved = sum(float((a - b).abs().sum()) for a, b in zip(before, model.parameters(), strict=True))
print("MOVED", moved > 0.0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "MOVED True" in done.stdout
