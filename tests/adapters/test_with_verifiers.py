"""``vf-eval`` of verifiers, as it is, over a taskset of its kind, against ``posttrain serve``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from answered import MAX_TOKENS, Answered

from closeness import approx
from posttrain.models.load import load_model
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection
from serving import Served

pytestmark = pytest.mark.adapters
RUNTIME = ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]


def vf_eval(served: Served, evaluated: Answered, folder: Path, *client: str) -> list[dict[str, Any]]:
    """The traces of an evaluation, one for each item."""
    bin_folder = Path(sys.executable).parent
    _, card = served.ask("/v1/models")
    where = ["-m", card["data"][0]["id"], "--client.base-url", f"{served.url}/v1", *client]
    sampling = ["--sampling.temperature", "0", "--sampling.max-tokens", str(MAX_TOKENS)]
    taskset = ["stories-taskset", "--env.taskset.items", str(evaluated.items)]
    ended = subprocess.run(
        [str(bin_folder / "vf-eval"), *taskset, *RUNTIME, *where, *sampling, "--no-push", "--no-rich", "-o", "out"],
        cwd=folder,
        env=os.environ
        | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parent), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    [path] = folder.rglob("traces.jsonl")
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    assert [episode["errors"] for episode in episodes] == [[]] * len(evaluated.answers)
    return [trace for episode in episodes for trace in episode["traces"]]


def test_a_taskset_gets_the_greedy_answers_of_evaluate(served: Served, evaluated: Answered, tmp_path: Path) -> None:
    traces = vf_eval(served, evaluated, tmp_path)
    message = {trace["nodes"][0]["message"]["content"]: trace["nodes"][1]["message"]["content"] for trace in traces}
    assert message == evaluated.answers
    named = [trace["rewards"]["named"]["score"] for trace in traces]
    assert named == [float(t["task"]["data"]["answer"] in t["nodes"][1]["message"]["content"]) for t in traces]
    assert all(trace["calls"][0]["usage"]["completion_tokens"] > 0 for trace in traces)


def test_its_training_client_gets_token_ids_with_the_log_probabilities_of_a_forward_pass(
    served: Served, evaluated: Answered, tmp_path: Path
) -> None:
    """It writes the conversation with its own renderer, and asks ``/inference/v1/generate``."""
    traces = vf_eval(served, evaluated, tmp_path, "--client.type", "train", "--client.renderer-model-name", str(TINY))
    loaded = load_model(ModelSection(device="cpu"), seed=0)
    for trace in traces:
        read, wrote = trace["nodes"]
        ids = torch.tensor([[*read["token_ids"], *wrote["token_ids"]]])
        sampled = [i for i, own in enumerate([*read["mask"], *wrote["mask"]]) if own]
        assert 0 < len(sampled) == len(wrote["logprobs"]) <= MAX_TOKENS
        with torch.no_grad():
            table = loaded.model(ids).logits[0].log_softmax(-1)
        for i, logprob in zip(sampled, wrote["logprobs"], strict=True):
            assert int(table[i - 1].argmax()) == int(ids[0, i]), "greedy"
            assert logprob == approx(float(table[i - 1, ids[0, i]]), abs=1e-4)  # written down with four digits
