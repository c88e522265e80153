"""lm-eval asks ``posttrain serve`` and gets the greedy answers of ``posttrain evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from answered import MAX_TOKENS, Answered

from serving import Served

pytestmark = pytest.mark.adapters


def test_greedy_answers_are_those_of_evaluate(served: Served, evaluated: Answered, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [json.loads(line) for line in evaluated.items.read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({key: row[key] for key in ("question", "answer")}) + "\n" for row in rows)
    )
    settings = {
        "task": "stories_of_ours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["<never>"], "max_gen_toks": MAX_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(settings))
    _, card = served.ask("/v1/models")
    options = {"base_url": f"{served.url}/v1/chat/completions", "model": card["data"][0]["id"], "num_concurrent": 2}
    output: Any = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args={**options, "max_retries": 1},
        tasks=["stories_of_ours"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    message = {one["doc"]["question"]: one["resps"][0][0] for one in output["samples"]["stories_of_ours"]}
    assert message == evaluated.answers
