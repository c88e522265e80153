"""Records of TRL's GRPO, by its table and by ``contrib/trl_records.py``, read by ``posttrain doctor --from trl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.sources import TINY
from posttrain.runs.diagnosis.others.checks import ForeignDiagnosis, diagnose_records

pytestmark = pytest.mark.adapters
pytest.importorskip("trl", reason="TRL is not installed")
CONTRIB = Path(__file__).parents[2] / "contrib"


def vowels(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps of TRL's GRPO on the embedded model, by the trainer of ``contrib``."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    monkeypatch.syspath_prepend(str(CONTRIB))
    from trl_records import Recorded

    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        logging_steps=1,
        log_completions=True,
        temperature=1.5,
        reward_weights=[1.0, -0.3],
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    rows = Dataset.from_list([{"prompt": f"What is {n} plus {n}? "} for n in range(4)])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = Recorded(
        model=model, args=arguments, train_dataset=rows, reward_funcs=[vowels, digits], processing_class=tokenizer
    )
    trainer.train()
    return folder


def agreeing(done: ForeignDiagnosis) -> set[str]:
    return {one.check for one in done.of("audit")}


def test_records_of_a_run_of_trl_balance_and_faults_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path / "out", monkeypatch)
    done = diagnose_records(folder, "trl")
    assert (done.num_answers, done.num_batches) == (8, 2)
    assert done.of("fault") == []
    assert agreeing(done) == {"groups", "advantage", "tokens"}
    table = diagnose_records(folder / "completions", "trl")
    assert table.of("fault") == []
    assert agreeing(table) == {"groups", "advantage"}
    path = folder / "records-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["advantage"] *= -1
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert [one.check for one in diagnose_records(folder, "trl").of("fault")] == ["advantage"]
