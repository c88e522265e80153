"""Fakes of the processes of a sweep: what `posttrain train` and `posttrain evaluate` do to a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.sweeps.plan import SweepPlan, SweepTrial, Training
from posttrain.sweeps.runner import SweepOutcome, run_trials

# argv: folder, name, recipe (or nothing), what to do (finish, resume, fail, wait), evaluations as JSON.
SCRIPT = """\
import json, os, pathlib, signal, sys, time
folder, name, recipe, what = pathlib.Path(sys.argv[1]), *sys.argv[2:5]
evaluations = json.loads(sys.argv[5])
folder.mkdir(exist_ok=True, parents=True)
with open(folder.parent / "order.txt", "a") as file:
    file.write(f"{name} {what} {os.environ['OMP_NUM_THREADS']}\\n")

def status(state, step, message=None):
    facts = {"state": state, "step": step, "steps": 2, "pid": 1, "host": "here", "updated": 0}
    facts |= {"primary_metric": "accuracy", "held_out": {"accuracy": 0.5}}
    (folder / "status.new").write_text(json.dumps(facts | {"message": message}))
    os.replace(folder / "status.new", folder / "status.json")  # as a run does: its reader never sees a part

def evaluate(step, facts):
    line = {"step": step, "metrics": {f"eval/x/{k}": v for k, v in facts.items()}, "timing": {}}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")

def stop(number, frame):
    status("interrupted", 1)
    sys.exit(130)

signal.signal(signal.SIGINT, stop)
if recipe:
    (folder / "recipe.yaml").write_text(open(recipe).read())
    if what != "resume":
        status("running", 0)
        evaluate(*evaluations[0])
if what == "fail":
    status("failed", 0, "it broke at some place")
    print("a warning")
    print("posttrain: it broke at\\n  some place", file=sys.stderr)
    sys.exit(1)
if what == "wait":
    time.sleep(60)
if recipe:
    for evaluation in evaluations[1:]:
        evaluate(*evaluation)
    status("finished", 2)
else:
    samples = [
        {"text": "", "extracted": "1", "outcome": o, "num_tokens": 3, "finish": "stop", "reward": 0.0,
         "in_format": True, "parts": {}, "score": s}
        for o, s in (("right", 1.0), ("wrong", 2.0), ("wrong", 0.0), ("right", 0.5))
    ]
    item = {"id": "a", "index": 0, "question": "?", "answer": "1", "meta": {}, "samples": samples}
    (folder / "items.jsonl").write_text(json.dumps(item) + "\\n")
    (folder / "results.json").write_text(json.dumps({"results": {"n": 1}}))
"""
# (step, results) of the evaluations of a run: of rows that are compared, and of a policy whose gold reward turns over.
COMPARED = [(step, {"n": 20, "accuracy": value, "reward": value}) for step, value in ((0, 0.1), (2, 0.5))]
STUDIED = [
    (step, {"accuracy": 0.5, "kl_initial": step**2, "sampled_accuracy": gold, "sampled_reward": step + 1.0})
    for step, gold in ((0, 0.1), (1, 0.8), (2, 0.3))
]


class FakeRunner:
    """Runs the trials of a plan with fakes, and keeps the progress. ``doing``: by name or row of a trial."""

    def __init__(self, doing: Mapping[str, str] | None = None, evaluations: Sequence[Any] = COMPARED) -> None:
        self.doing, self.evaluations = dict(doing or {}), evaluations
        self.lines: list[str] = []

    def command(self, trial: SweepTrial, resume: bool) -> list[str]:
        request = self.doing.get(trial.name, self.doing.get(trial.row, "finish"))
        recipe = str(trial.settings[0]) if isinstance(trial, Training) else ""
        what = "resume" if resume else request
        return [sys.executable, "-S", "-c", SCRIPT, str(trial.folder), trial.name, recipe, what,
                json.dumps(self.evaluations)]  # fmt: skip

    def say(self, line: str, is_failure: bool) -> None:
        self.lines.append(line)

    def run(self, plan: SweepPlan, *, jobs: int | None = 2, **options: Any) -> SweepOutcome:
        wanted = {"say": self.say, "command": self.command, "poll_seconds": 0.02} | options
        return run_trials(plan, jobs=jobs, **wanted)

    @property
    def events(self) -> list[tuple[str, str]]:
        """(name of a trial, first word that was said of it)."""
        pairs = [line.partition(": ") for line in self.lines[1:]]
        return [(name, words.split()[0]) for name, _, words in pairs]

    def names(self, *wanted: str) -> list[str]:
        return [name for name, word in self.events if word in wanted]


def starts(plan: SweepPlan, name: str) -> list[str]:
    """Return the task of each process of a trial, and its number of threads."""
    lines = [line.split() for path in plan.folder.rglob("order.txt") for line in path.read_text().splitlines()]
    return [f"{what} {threads}" for own, what, threads in lines if own == name]


def doings(plan: SweepPlan, name: str) -> list[str]:
    return [line.split()[0] for line in starts(plan, name)]


def status_of(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["state"])
