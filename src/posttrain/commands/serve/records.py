"""What ``posttrain serve --record`` keeps: a line of JSON for every answer, with its tokens and log-probabilities."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.commands.serve.speech import Speech
from posttrain.store.durable import storage_errors


class Recorder:
    """A JSONL file that lines are added to; each is written whole, in one piece.

    Raises:
        UsageError, StorageError: the file cannot be written, at once or when an answer is recorded.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model = path, model
        with storage_errors("records", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(
        self, request_id: str, endpoint: str, index: int, prompt: Sequence[int], speech: Speech, **asked: Any
    ) -> None:
        """Keep an answer; one that was broken off has the finish null."""
        line = {
            "id": request_id,
            "time": round(time.time(), 3),
            "endpoint": endpoint,
            "model": self.model,
            "index": index,
            "prompt_ids": list(prompt),
            "ids": speech.ids,
            "logprobs": speech.logprobs,
            "text": speech.text,
            "finish": speech.finish,
            **asked,
        }
        with storage_errors("records", self.path):
            os.write(self._descriptor, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Nothing is recorded after this."""
        os.close(self._descriptor)
