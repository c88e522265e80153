"""Saved checkpoints load in lm_eval unchanged, and it measures there what is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from posttrain.cli import main
from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.models.load import load_model
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection

pytestmark = pytest.mark.slow

ROWS = [
    {
        "question": "Ada has 3 shells. She finds 4 more. So the answer is",
        "choices": [" 7.", " 12.", " cat"],
        "answer": 0,
    },
    {"question": "Tom has 9 apples and eats 2. So the answer is", "choices": [" 7.", " 4.", " 11."], "answer": 0},
    {"question": "Mia had 8 pens.", "choices": [" She lost 3.", "x x x x", " 8 8 8"], "answer": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "made_choice": {
        "output_type": "multiple_choice",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}],
    },
    "made_generation": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["<never>"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training saves, after two steps."""
    root = tmp_path_factory.mktemp("runs")
    small = ["--task.size", "60", "--train.steps", "2", "--eval.every", "0", "--quiet"]
    assert main(["train", "tiny/sft", "--runs-dir", str(root), "--run", "x", *small]) == 0
    return root / "x" / "checkpoints" / "step-000002"


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of the harness over local rows."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",  # the choices begin with their own space
    }
    for name, settings in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **settings}))
    return folder


@pytest.mark.parametrize("source", ["checkpoint", "tiny"])
def test_lm_eval_measures_what_we_measure(source: str, checkpoint: Path, task_folder: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = checkpoint if source == "checkpoint" else TINY
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    loaded = load_model(ModelSection(name=str(folder), device="cpu"), seed=0)
    rights = 0
    for sample in sorted(found["samples"]["made_choice"], key=lambda s: s["doc_id"]):
        row = ROWS[sample["doc_id"]]
        theirs = [response[0][0] for response in sample["resps"]]
        ours = [loglikelihood(loaded, row["question"], choice) for choice in row["choices"]]
        assert theirs == pytest.approx(ours, abs=1e-4)
        rights += ours.index(max(ours)) == row["answer"]
    assert found["results"]["made_choice"]["acc,none"] == pytest.approx(rights / len(ROWS))
    for sample in found["samples"]["made_generation"]:
        assert sample["resps"][0][0] == greedy(loaded, ROWS[sample["doc_id"]]["question"], 24)


def loglikelihood(loaded: Any, prompt: str, continuation: str) -> float:
    """The log-probability of the continuation in nats, by the plain forward pass."""
    start = loaded.tokenizer(prompt)["input_ids"]
    ids = loaded.tokenizer(prompt + continuation)["input_ids"]
    assert ids[: len(start)] == start
    with torch.no_grad():
        logprobs = loaded.model(torch.tensor([ids])).logits.double().log_softmax(-1)[0]
    return sum(float(logprobs[i - 1, ids[i]]) for i in range(len(start), len(ids)))


def greedy(loaded: Any, prompt: str, max_tokens: int) -> str:
    """What the native engine continues with, without the end token."""
    end = loaded.tokenizer.eos_token_id
    sampling = Sampling(max_tokens, temperature=0.0, stop_ids=frozenset({end}))
    ((completion,),) = NativeEngine(loaded.model).generate([loaded.tokenizer(prompt)["input_ids"]], [[0]], sampling)
    kept = [token for token in completion.ids if token != end]
    return str(loaded.tokenizer.decode(kept, skip_special_tokens=True))
