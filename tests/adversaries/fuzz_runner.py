"""Runs fuzzer's cases: each in a forked child of this one warm process, under limits, and judges how it ended.

A program of its own, so that the fork happens where there are no other threads::

    python fuzz_runner.py --seed 3 --count 300 --out report.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fuzz_arguments import argument_cases, good_cases, override_cases, place_cases
from fuzz_case import Case
from fuzz_data import data_cases, good_data_cases
from fuzz_keys import key_cases, option_cases
from fuzz_texts import file_cases, text_cases

from posttrain import cli

WALL_SECONDS, CPU_SECONDS = 10.0, 10
TIMEOUT = 4  # a case that was too slow is tried once more with so many times the time: others may hold the cores
MEMORY_BYTES, FILE_BYTES = 2 * 2**30, 64 * 2**20  # beyond what the warm process has
LONGEST_MESSAGE = 6000
PR_SET_CHILD_SUBREAPER = 36
GENERATORS = {
    "keys": key_cases,
    "options": option_cases,
    "arguments": argument_cases,
    "overrides": override_cases,
    "places": place_cases,
    "texts": text_cases,
    "files": file_cases,
    "data": data_cases,
    "good data": good_data_cases,
    "good": good_cases,
}
# What a message says beside what is wrong: what would work.
REMEDY = re.compile(
    r"\b(should|must|give|choose|known|needs?|needed|there (is|are)|there:|did you mean|write|use|at least|at most|"
    r"set|import|makes one|try|no such|leave|expected|run it with|lists|invalid choice|unrecognized|instead|required|"
    r"has no|takes|holds|save|get it again|download|wait|name|train it with|is no|lower|drop|work on|means?|says)\b"
)


@dataclass
class Outcome:
    """How a case ended; ``faults`` is empty if it ended as it should."""

    case: Case
    code: int | None
    seconds: float
    text: str
    faults: list[str] = field(default_factory=list)


def make_cases(seed: int, count: int, only: str = "") -> list[tuple[str, Case]]:
    """``count`` cases of all classes with ``only`` in their name, drawn in turn from each until it is used up."""
    random = Random(seed)
    classes = {name: make(random) for name, make in GENERATORS.items() if only in name}
    for cases in classes.values():
        random.shuffle(cases)
    chosen: list[tuple[str, Case]] = []
    while len(chosen) < count and any(classes.values()):
        chosen += [(name, cases.pop()) for name, cases in classes.items() if cases]
    return chosen[:count]


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies in a folder: kind and size by path; links are not followed."""
    found = {}
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(top) / name
            state = path.lstat()
            found[str(path.relative_to(folder))] = (state.st_mode, 0 if name in folders else state.st_size)
    return found


def run_case(case: Case, place: Path) -> Outcome:
    """As ``try_case``; a second time if it took too long beside other work. CPU time is limited alike."""
    outcome = try_case(case, place, WALL_SECONDS)
    return outcome if outcome.code is not None else try_case(case, place, TIMEOUT * WALL_SECONDS)


def try_case(case: Case, place: Path, wall_seconds: float) -> Outcome:
    """Lay out the files, run the command, judge."""
    work, temporary = place / "work", place / "temporary"
    for folder in (work, temporary):
        folder.mkdir(parents=True)
    case.lay_out(work)
    before = listing(work)
    began = time.monotonic()
    child = _fork(case, place)
    code = _wait(child, began, wall_seconds)
    seconds = time.monotonic() - began
    text = (place / "stderr").read_text(encoding="utf-8", errors="replace")
    outcome = Outcome(case, code, seconds, text)
    if code is None:
        outcome.faults.append("did not end")
    outcome.faults += judge(case, code, text, (place / "stdout").read_text(encoding="utf-8", errors="replace"))
    if _children_left():
        outcome.faults.append("left a process")
    after = listing(work)
    if after != before and not case.good:
        changed = sorted(after.items() ^ before.items())
        outcome.faults.append(f"left files: {[name for name, _ in changed][:4]}")
    if os.listdir(temporary):
        outcome.faults.append(f"left temporary files: {os.listdir(temporary)[:4]}")
    shutil.rmtree(place)
    return outcome


def judge(case: Case, code: int | None, text: str, output: str) -> list[str]:
    """What is wrong with how the command ended."""
    faults = []
    if "Traceback" in text or "Traceback" in output:
        faults.append("traceback")
    if case.good:
        if code != 0:
            faults.append(f"good input ended with {code}")
        return faults
    if code is None:
        return faults
    if code != 2:
        faults.append(f"exit code {code}")
    messages = re.findall(r"^posttrain(?: [a-z -]+)?: ", text, re.MULTILINE)
    if len(messages) != 1:
        faults.append(f"{len(messages)} messages")
    message = text.lower()
    if not any(name.lower() in message for name in case.names):
        faults.append("no place")
    if not REMEDY.search(message):
        faults.append("no remedy")
    if len(text) > LONGEST_MESSAGE:
        faults.append(f"a message of {len(text)} characters")
    return faults


def _limit() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _fork(case: Case, place: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(place / "work")
        os.environ["TMPDIR"] = tempfile.tempdir = str(place / "temporary")
        _limit()
        try:
            code = cli.main([*case.words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:  # noqa: BLE001  as the interpreter would
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int, began: float, seconds: float) -> int | None:
    """The exit code of the child; None if it had to be killed for its time."""
    while time.monotonic() - began < seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.004)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _children_left() -> bool:
    """Whether a process outlives its command; each is ended."""
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        except ChildProcessError:
            return False
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError):
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass
    return True


def warm_up() -> None:
    """Import what the commands import, so that a child does not."""
    for command in cli.COMMANDS.values():
        with suppress(ImportError):
            cli.imported(command.body or "console:say")
    from posttrain import registry

    for kind in registry.COMPONENT_MODULES:
        registry.entries(kind)
    for module in (
        "posttrain.training.loop",
        "posttrain.models.load",
        "posttrain.reports.run",
        "peft",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.auto.modeling_auto",
        "posttrain.runs.launch",
        "posttrain.sampling.native.engine",
        "posttrain.models.quantize",
        "posttrain.sampling.vllm.server",
    ):
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", default="", help="only cases of classes with this in their name")
    parser.add_argument("--out", type=Path, default=Path("report.json"))
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warm_up()
    cases = make_cases(given.seed, given.count, given.only)
    failed: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for number, (name, case) in enumerate(cases):
            outcome = run_case(case, Path(folder) / str(number))
            if outcome.faults:
                record = {
                    "class": name,
                    "kind": case.kind,
                    "words": [w[:200] for w in case.words],
                    "names": [n[:80] for n in case.names],
                    "faults": outcome.faults,
                    "seconds": round(outcome.seconds, 2),
                    "text": outcome.text[-1500:],
                    "files": [name[:80] for name in case.files],
                }
                failed.append(record)
    report = {"total": dict(Counter(name for name, _ in cases)), "failed": failed}
    given.out.write_text(json.dumps(report, indent=1, ensure_ascii=True))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
