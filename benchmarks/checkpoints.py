"""Memory that rank 0 takes to save a checkpoint, gathered by it or written by all processes (``scale.checkpoint``).

    python benchmarks/checkpoints.py                     # a random model of 133 million weights, two processes
    python benchmarks/checkpoints.py --width 64 --layers 2

Each way trains one step with ``scale.sharding: fsdp2`` on CPUs, in a process of its own, and looks every millisecond at
the anonymous memory of rank 0 (``RssAnon``: no files) while it saves. Told is how much more that is than before,
next to the bytes of the optimizer's state, and the seconds. Writes results/checkpoints.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from posttrain.recipes.recipe import validate_recipe
from posttrain.runs.launch import RunStart, launch
from posttrain.training.loop import Loop

RESULTS = Path(__file__).parent / "results" / "checkpoints.json"
MEGABYTE = 1e6


def anonymous_bytes() -> int:
    """Return the bytes that this process holds now and that are not mapped from a file."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def recipe_of(way: str, processes: int, width: int, layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": max(1, width // 64), "num_key_value_heads": max(1, width // 64)}
    return {
        "model": {"init": {"architecture": "qwen3", "config": {**sizes, **heads}}, "device": "cpu"},
        "task": {"name": "stories", "size": 64},
        "data": {"batch_size": 4, "max_length": 512},
        "objective": "cross_entropy",
        "train": {"steps": 1},
        "scale": {"processes": processes, "sharding": "fsdp2", "checkpoint": way},
    }


def measure(way: str, processes: int, width: int, layers: int) -> dict[str, Any]:
    """One way in this process, which becomes rank 0."""
    info: dict[str, Any] = {}
    save = Loop.save

    def watched(loop: Loop) -> None:
        before, most, is_done = anonymous_bytes(), 0, threading.Event()

        def look() -> None:
            nonlocal most
            while not is_done.wait(0.001):
                most = max(most, anonymous_bytes())

        watcher, started = threading.Thread(target=look), time.monotonic()
        watcher.start()
        save(loop)
        info["seconds"] = round(time.monotonic() - started, 2)
        is_done.set()
        watcher.join()
        info["more_megabytes"] = round(max(0, most - before) / MEGABYTE, 1)
        info["optimizer_megabytes"] = round(8 * sum(p.numel() for _, p in loop.parts.parameters) / MEGABYTE, 1)

    Loop.save = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        launch(validate_recipe(recipe_of(way, processes, width, layers)).resolve(), RunStart(root=folder, name="it"))
    return info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("whole", "sharded"), help="measure this one alone, here")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=14)
    arguments = parser.parse_args()
    if arguments.way is not None:
        print(json.dumps(measure(arguments.way, arguments.processes, arguments.width, arguments.layers)))
        return
    rows = {}
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("processes", "width", "layers")]
    for way in ("whole", "sharded"):
        command = [sys.executable, __file__, "--way", way, *sizes]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows[way] = json.loads(output.splitlines()[-1])
        print(f"{way}: {rows[way]}")
    settings = {"processes": arguments.processes, "width": arguments.width, "layers": arguments.layers}
    content = {"machine": platform.processor() or platform.machine(), **settings, "ways": rows}
    if arguments.width == parser.get_default("width"):
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
