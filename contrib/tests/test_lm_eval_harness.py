"""Saved checkpoints load in lm_eval unchanged, and it measures there what is measured here; also through our engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from closeness import approx
from posttrain.cli import main
from posttrain.data.render import encode_prompt
from posttrain.data.render.template import build_template
from posttrain.evaluation.items import read_items
from posttrain.models.load import load_model, load_tokenizer
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection
from posttrain.runs.models import find_source
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.types import Message

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
    """Train for two steps and return the checkpoint."""
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
    correct = 0
    for sample in sorted(found["samples"]["made_choice"], key=lambda s: s["doc_id"]):
        row = ROWS[sample["doc_id"]]
        theirs = [response[0][0] for response in sample["resps"]]
        ours = [loglikelihood(loaded, row["question"], choice) for choice in row["choices"]]
        assert theirs == approx(ours, abs=1e-4)
        correct += ours.index(max(ours)) == row["answer"]
    assert found["results"]["made_choice"]["acc,none"] == approx(correct / len(ROWS))
    for sample in found["samples"]["made_generation"]:
        assert sample["resps"][0][0] == greedy(loaded, ROWS[sample["doc_id"]]["question"], 24)


def test_through_our_engine_it_measures_the_same(checkpoint: Path, task_folder: Path, tmp_path: Path) -> None:
    """Likelihoods are those of its own loader, greedy answers those of the native engine."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    assert ask(checkpoint, ",".join(TASKS), task_folder, tmp_path / "out") == 0
    results, ours = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("results", "samples"))
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results["made_choice"]["acc,none"] == theirs["results"]["made_choice"]["acc,none"]
    assert results["made_generation"]["exact_match,none"] == theirs["results"]["made_generation"]["exact_match,none"]
    for sample, other in zip(ours["made_choice"], theirs["samples"]["made_choice"], strict=True):
        for [mine], [its] in zip(sample["resps"], other["resps"], strict=True):
            assert mine[0] == approx(its[0], abs=1e-4)
            assert mine[1] == its[1]
    loaded = load_model(ModelSection(name=str(checkpoint), device="cpu"), seed=0)
    for sample in ours["made_generation"]:
        assert sample["resps"][0][0] == greedy(loaded, ROWS[sample["doc_id"]]["question"], 24)


@pytest.mark.parametrize("templated", [True, False])
def test_greedy_answers_are_those_of_evaluate(checkpoint: Path, tmp_path: Path, templated: bool) -> None:
    """One of our evaluations as a task of the harness: what users say under the run's template, or whole prompts."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    options = ["--task", "stories", "--task.max_steps", "1", "--task.size", "6", "--max-tokens", "20", "--quiet"]
    assert main(["evaluate", str(checkpoint), *options, "--device", "cpu", "--out", str(tmp_path / "own")]) == 0
    items = read_items(tmp_path / "own" / "items.jsonl")
    assert len(items) == 6
    tokenizer = load_tokenizer(str(TINY))
    template = build_template(find_source(str(checkpoint), "runs").template)
    request = [item.question for item in items]
    if not templated:
        request = [tokenizer.decode(encode_prompt(tokenizer, template, [Message("user", text)])) for text in request]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": q, "answer": "?"}) + "\n" for q in request))
    settings = {
        "task": "prompts_of_ours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        **{key: TASKS["made_generation"][key] for key in ("output_type", "metric_list")},
        "generation_kwargs": {"until": ["<never>"], "max_gen_toks": 20, "do_sample": False},
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "task.yaml").write_text(yaml.safe_dump(settings))
    options = ["--template", "r1_zero"] if templated else []
    assert ask(checkpoint, "prompts_of_ours", tmp_path / "tasks", tmp_path / "out", *options) == 0
    message = json.loads((tmp_path / "out" / "samples.json").read_text())["prompts_of_ours"]
    theirs = [one["resps"][0][0] for one in sorted(message, key=lambda one: one["doc_id"])]
    assert len(set(theirs)) > 2
    assert theirs == [item.samples[0].text.removeprefix("<think>") for item in items]


def ask(checkpoint: Path, tasks: str, task_folder: Path, out: Path, *options: str) -> int:
    """Ask a model through our engine."""
    from lm_eval_harness import main as run

    place = ["--task-folder", str(task_folder), "--device", "cpu", "--out", str(out)]
    return run([str(checkpoint), "--tasks", tasks, *place, *options])


def loglikelihood(loaded: Any, prompt: str, continuation: str) -> float:
    """The log-probability of the continuation in nats, by the plain forward pass."""
    start = loaded.tokenizer(prompt)["input_ids"]
    ids = loaded.tokenizer(prompt + continuation)["input_ids"]
    assert ids[: len(start)] == start
    with torch.no_grad():
        logprobs = loaded.model(torch.tensor([ids])).logits.double().log_softmax(-1)[0]
    return sum(float(logprobs[i - 1, ids[i]]) for i in range(len(start), len(ids)))


def greedy(loaded: Any, prompt: str, max_tokens: int) -> str:
    """Return the continuation of the native engine, without the end token."""
    end = loaded.tokenizer.eos_token_id
    sampling = Sampling(max_tokens, temperature=0.0, stop_ids=frozenset({end}))
    ((completion,),) = NativeEngine(loaded.model).generate([loaded.tokenizer(prompt)["input_ids"]], [[0]], sampling)
    kept = [token for token in completion.ids if token != end]
    return str(loaded.tokenizer.decode(kept, skip_special_tokens=True))
