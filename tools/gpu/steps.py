"""The steps of ``run.sh``: each is a process of its own with a time limit, and its result is an entry of a JSON file.

Steps of one stage run at the same time (they ask whether something is correct); a stage of one step has the GPU alone
(it asks how fast something is). The most informative stages come first, since time may run out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
OUT = Path(os.environ.get("OUT", ROOT / "build/gpu"))
Result = dict[str, Any]
Command = list[str]
LEAST_SECONDS = 15  # a step is not started with less
PACKAGES = ("torch", "triton", "transformers", "peft", "numpy", "pydantic", "vllm", "flash-attn", "bitsandbytes")


@dataclass(frozen=True)
class Step:
    """A named list of commands and the seconds that they may take together."""

    name: str
    commands: Callable[[bool], list[Command]]
    limit: int
    in_tree: bool = True  # run in the repository, not in an empty folder


# -- steps that are code of this file ----------------------------------------------------------------------------------


def environment(smallest: bool) -> Result:
    """Return versions and what the device reaches: matrix products in three precisions, and a copy."""
    import torch

    found: Result = {"python": sys.version.split()[0], "cpus": os.cpu_count(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if not torch.cuda.is_available():
        return found
    properties = torch.cuda.get_device_properties(0)
    found |= {"gpu": properties.name, "memory_gib": properties.total_memory / 2**30}
    for name, kind in (("tf32", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        a, b = (torch.randn(8192, 8192, device="cuda").to(kind) for _ in range(2))
        found[f"tflops_{name}"] = 2 * 8192**3 / _milliseconds(lambda a=a, b=b: torch.mm(a, b)) / 1e9
    c, d = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    found["copy_tb_per_second"] = 2 * (1 << 30) / _milliseconds(lambda: d.copy_(c)) / 1e9
    return found


def _milliseconds(work: Callable[[], Any], times: int = 5) -> float:
    """Return the median time on the device, after two calls."""
    import statistics

    import torch

    measured = []
    for _ in range(2 + times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        measured.append(begin.elapsed_time(end))
    return statistics.median(measured[2:])


def profile(smallest: bool) -> Result:
    """Return the operations that take longest on the device: of 40 decode steps, and of an optimizer step."""
    import torch

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu

    found: Result = {}
    on_gpu = torch.cuda.is_available()
    kinds = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    for name, prepare in (
        ("decode-64", partial(_decoding, gpu, smallest, 64)),
        ("decode-512", partial(_decoding, gpu, smallest, 512)),
        ("decode-64-fp32", partial(_decoding, gpu, smallest, 64, torch.float32)),
        ("update", partial(_updating, gpu, smallest, lora=False)),
        ("update-lora", partial(_updating, gpu, smallest, lora=True)),
    ):
        work = prepare()
        work()
        seconds = gpu.seconds_of(work)
        with torch.profiler.profile(activities=kinds) as seen:
            gpu.seconds_of(work)
        events = sorted(seen.key_averages(), key=lambda event: -getattr(event, time_of))
        total = sum(getattr(event, time_of) for event in events)
        found[name] = {"seconds": seconds, "device_seconds": total / 1e6}
        found[name]["top"] = [[e.key[:90], e.count, round(getattr(e, time_of) / 1e3, 3)] for e in events[:28]]
        print(json.dumps(found), flush=True)  # what is there if time runs out
    return found


def _decoding(gpu: Any, smallest: bool, rows: int, dtype: Any = None) -> Callable[[], Any]:
    from posttrain.randomness import derive_key
    from posttrain.sampling.base import Sampling
    from posttrain.sampling.native.engine import NativeEngine

    _, rows, _, model, prompts = gpu.decoded(smallest, rows)
    engine = NativeEngine(model if dtype is None else model.to(dtype), slots=rows)
    keys = [[derive_key(i, "profile", j) for j in range(gpu.GROUP)] for i in range(len(prompts))]
    return lambda: engine.generate(prompts, keys, Sampling(max_tokens=40, stop_ids=frozenset()))


def _updating(gpu: Any, smallest: bool, lora: bool) -> Callable[[], Any]:
    shape = (2, 1, 8, 16) if smallest else gpu.ROWS_OF_16K
    size = "smallest" if smallest else "0.6b"
    recipe, parts, config = gpu.parts_of(size, lambda folder: gpu.recipe_of("rl", folder, lora, False, shape))
    batch = gpu.make_batch(config.vocab_size, *shape)
    return lambda: gpu.one_step(recipe, parts, batch, 1)


# -- steps that are commands -------------------------------------------------------------------------------------------


def code(name: str, limit: int) -> Step:
    """A function of this file, called in a process of its own."""

    def commands(smallest: bool) -> list[Command]:
        return [[sys.executable, str(HERE), "--step", name, *(["--smallest"] if smallest else [])]]

    return Step(name, commands, limit)


def run_step(name: str, recipe: str, options: str = "", *, resumed: bool = False, limit: int = 100) -> Step:
    """A short run on the device; ``resumed``: twice, the second stopped and resumed, which must change nothing."""

    def commands(smallest: bool) -> list[Command]:
        device = "cpu" if smallest else "cuda"
        own = (options.replace("tf32", "fp32") if smallest else options).split()
        short = ["--model.device", device, "--task.size", "64", "--eval.every", "0", *own]
        if smallest and "sft" not in recipe:
            short += ["--rollout.num_prompts", "2", "--rollout.group_size", "2", "--rollout.max_tokens", "16"]
        half, whole = ("1", "2") if smallest else ("4", "8")

        def train(run: str, steps: str, *more: str) -> Command:
            base = [sys.executable, "-m", "posttrain.cli", "train", recipe, "--run", run]
            return [*base, "--train.steps", steps, *short, *more]

        if not resumed:
            return [train("a", whole)]
        return [train("a", whole), train("b", half), train("b", whole, "--resume", "--accept-changes")]

    return Step(f"run-{name}", commands, limit, in_tree=False)


def tests_step(name: str, file: str, workers: int) -> Step:
    """A file of tests/gpu; in the smallest form two tests of it, on a fake GPU."""

    def commands(smallest: bool) -> list[Command]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-rfE", "--tb=short"]
        if smallest:
            chosen = ["-k", "tokens_are_those_of_the_cpu and qwen3 or packed_forward_equals and qwen3-plain"]
            fake = ["env", "POSTTRAIN_GPU_TESTS_ON=fake"]
            return [[*fake, *command, *chosen, "tests/gpu"]] if name == "engine" else []
        spread = ["-n", str(workers), "--dist", "worksteal"]
        return [[*command, "--durations=6", "--timeout=150", *spread, f"tests/gpu/{file}"]]

    return Step(f"tests-{name}", commands, 170)


def row_step(name: str, limit: int) -> Step:
    """A row of benchmarks/gpu.py."""

    def commands(smallest: bool) -> list[Command]:
        few = ["--smallest", "--steps", "1"] if smallest else ["--steps", "3"]
        return [[sys.executable, "benchmarks/gpu.py", "--rows", name, *few]]

    return Step(name, commands, limit)


def demo_step(limit: int) -> Step:
    def commands(smallest: bool) -> list[Command]:
        return [] if smallest else [[sys.executable, "-m", "posttrain.cli", "demo", "--quiet"]]

    return Step("demo", commands, limit, in_tree=False)


VARIED = "--rewards training_reward:digits"  # a reward that differs between the answers of an untrained model
LORA = "--model.dtype bf16 --model.adapter.rank 8"
CHECK = [
    [code("environment", 60)],
    [
        run_step("grpo", "tiny/grpo"),
        run_step("sft-deterministic", "tiny/sft", "--train.deterministic true", resumed=True),
        run_step("grpo-deterministic", "tiny/grpo", f"--train.deterministic true {VARIED}", resumed=True, limit=150),
        run_step("grpo-bf16", "tiny/grpo", "--train.precision bf16 --rollout.old_logprobs trainer"),
        run_step("grpo-tf32", "tiny/grpo", "--train.precision tf32"),
        run_step("grpo-lora-bf16", "tiny/grpo", LORA),
        run_step("sft", "tiny/sft", "--train.precision bf16"),
        tests_step("attention", "test_attention_gpu.py", 3),
        tests_step("engine", "test_engine_gpu.py", 3),
        tests_step("training", "test_training_gpu.py", 2),
        tests_step("quantize", "test_quantize_gpu.py", 1),
        tests_step("recipes", "test_recipes_cuda.py", 8),
    ],
]
MEASURE = [
    *([row_step(name, 100)] for name in ("decode-64", "sft-0.6b-8k", "rl-0.6b-16k", "grpo-0.6b", "decode-512")),
    [code("profile", 90)],
    *([row_step(name, 100)] for name in ("generate-64", "sft-0.6b", "rl-0.6b", "rl-0.6b-lora-16k", "generate-512")),
    [demo_step(170)],
    *([row_step(name, 120)] for name in ("rl-8b-lora", "decode-256", "sft-8b-lora", "sft-1.5b", "rl-1.5b")),
    [row_step("rl-14b-lora", 200)],
]
CALLS = {"check": (CHECK, 355), "measure": (MEASURE, 555)}


class Call:
    """Runs the stages of a call until its time is up; writes the results after every step."""

    def __init__(self, name: str, seconds: float, smallest: bool, only: set[str], jobs: int) -> None:
        self.name, self.smallest, self.only = name, smallest, only
        self.free = threading.Semaphore(jobs)
        self.started, self.end = time.monotonic(), time.monotonic() + seconds
        self.results: dict[str, Result] = {}
        self.lock = threading.Lock()
        self.log = (OUT / f"{name}.log").open("w", encoding="utf-8")

    def run(self) -> bool:
        """Run every stage; return whether no step failed."""
        for stage in CALLS[self.name][0]:
            steps = [step for step in stage if not self.only or step.name in self.only]
            threads = [threading.Thread(target=self._run_one, args=(step,)) for step in steps]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return all(result["state"] in ("ok", "nothing to do") for result in self.results.values())

    def _run_one(self, step: Step) -> None:
        with self.free:
            left = self.end - time.monotonic()
            if left < LEAST_SECONDS:
                self._note(step.name, {"state": "no time left"}, "")
                return
            limit = step.limit * 4 if self.smallest else step.limit  # a rehearsal may run on a slow machine
            self._note(step.name, *_result(step, self.smallest, min(limit, left)))

    def _note(self, name: str, result: Result, output: str) -> None:
        with self.lock:
            self.results[name] = result
            brief = json.dumps(result["values"]) if "values" in result else (result.get("tail") or [""])[-1]
            seconds = time.monotonic() - self.started
            print(
                f"[{seconds:4.0f} s] {name}: {result['state']}, {result.get('seconds', 0)} s | {brief[:900]}",
                flush=True,
            )
            self.log.write(f"\n===== {name}: {result['state']}\n{output[-60_000:]}\n")
            self.log.flush()
            (OUT / f"{self.name}.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")


def _result(step: Step, smallest: bool, limit: float) -> tuple[Result, str]:
    """Run the commands of a step; return what to keep of them, and their output."""
    commands = step.commands(smallest)
    folder, started = OUT / "work" / step.name, time.monotonic()
    output, state = "", "ok" if commands else "nothing to do"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in commands:
        left = limit - (time.monotonic() - started)
        printed, state = _limited(command, ROOT if step.in_tree else folder, left)
        output += printed
        if state != "ok":
            break
    result: Result = {"state": state, "seconds": round(time.monotonic() - started, 1)}
    lines = [line for line in output.splitlines() if line.strip()]
    objects = [line for line in lines if line.startswith("{")]
    if objects:
        result["values"] = json.loads(objects[-1])
    else:
        result["failures"] = [line[:300] for line in lines if re.match(r"FAILED|ERROR", line)][:60]
        result["tail"] = [line[:300] for line in lines[-6:]]
    result |= _curves(folder)
    if result.get("same_losses") is False:
        result["state"] = "a resumed run differs"
    shutil.rmtree(folder, ignore_errors=True)
    return result, output


def _limited(command: Command, folder: Path, limit: float) -> tuple[str, str]:
    """Return a command's output and how it ended; everything that it started ends with it."""
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=max(1.0, limit))
            return printed, "ok" if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0], f"stopped after {limit:.0f} s"


def _curves(folder: Path) -> Result:
    """Return the first and last step of each run, and whether the losses of a resumed run equal those of the other."""
    curves = {}
    for path in sorted(folder.glob("runs/*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        curves[path.parent.name] = [row for row in rows if "loss" in row.get("metrics", row)]
    found: Result = {f"run {name}": {"first": rows[:1], "last": rows[-1:]} for name, rows in curves.items()}
    if {"a", "b"} <= curves.keys():
        a, b = ([row.get("metrics", row)["loss"] for row in curves[name]] for name in "ab")
        found["same_losses"] = a == b
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", nargs="?", choices=list(CALLS), default="check")
    parser.add_argument("--seconds", type=float, help="for the whole call")
    parser.add_argument("--jobs", type=int, default=12, help="steps that run at the same time (default: 12)")
    parser.add_argument("--only", default="", help="names of steps, separated by commas")
    parser.add_argument("--smallest", action="store_true", help="the same steps on a CPU, as small as possible")
    parser.add_argument("--step", help="run this step in this process")
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps({"environment": environment, "profile": profile}[arguments.step](arguments.smallest)))
        return 0
    stages, seconds = CALLS[arguments.call]
    only = {name for name in arguments.only.split(",") if name}
    known = sorted(step.name for stage in stages for step in stage)
    if unknown := sorted(only - set(known)):
        raise SystemExit(f"--only: there is no step {unknown[0]!r} in {arguments.call}; there are {', '.join(known)}")
    OUT.mkdir(parents=True, exist_ok=True)
    return (
        0 if Call(arguments.call, arguments.seconds or seconds, arguments.smallest, only, arguments.jobs).run() else 1
    )


if __name__ == "__main__":
    sys.exit(main())
