"""In the place of ``python -m vllm.entrypoints.openai.api_server``: the fake as a process of its own."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from fake_follower import FakeFollower
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection

arguments = dict(zip(sys.argv, sys.argv[1:], strict=False))
assert arguments["-m"] == "vllm.entrypoints.openai.api_server"
assert "--no-enable-chunked-prefill" in sys.argv, "the model is on a CPU"
assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
folder = Path(arguments["--model"])
assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
loaded = load_model(ModelSection(), seed=0)
card = {"id": arguments["--served-model-name"], "root": arguments["--model"], "max_model_len": 512}
place = {"host": arguments["--host"], "port": int(arguments["--port"])}
with FakeFollower(loaded.model, cards=[card], **place) as fake:
    fake.paused.set()
    fake.reload({"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    fake.paused.clear()
    Path("pid").write_text(str(os.getpid()))
    threading.Event().wait()
