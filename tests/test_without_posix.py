"""The package where Python has no POSIX: modules, calls and signals are taken away, as on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
TAKE_AWAY = """
import os, signal, sys
os._posttrain_fork = os.fork  # the tests' own, to end a process that holds a lock
import psutil, torch.distributed.elastic.timer  # choose by the name of the system, which stays the same
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in (
    "fork forkpty killpg getpgrp getpgid setsid setuid getuid geteuid getgid umask chown fchown fchmod mkfifo "
    "pread pwrite sysconf sched_getaffinity getloadavg statvfs O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_PATH"
).split():
    if hasattr(os, name):
        delattr(os, name)
kept = {"SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV", "SIG_DFL", "SIG_IGN"}
for name in dir(signal):
    if name.startswith("SIG") and name.isupper() and name not in kept:
        delattr(signal, name)
for name in ("setitimer", "pthread_sigmask", "pidfd_send_signal", "alarm", "siginterrupt"):
    delattr(signal, name)
"""
IMPORT_ALL = """
import importlib, pkgutil, posttrain
failed = {}
for module in pkgutil.walk_packages(posttrain.__path__, "posttrain."):
    if module.name.endswith(("__main__",)):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name in ("fcntl", "resource", "pwd", "grp", "termios"):
            failed[module.name] = repr(error)
    except Exception as error:
        failed[module.name] = repr(error)
assert not failed, failed
"""
RUN = """
from posttrain.cli import main
for line in ("recipes", "train tiny/grpo --dry-run", "train tiny/grpo --train.steps 2 --eval.every 0 \\
--rollout.num_prompts 2 --rollout.group_size 2 --rollout.max_tokens 8 --run two-steps"):
    assert main(line.split()) == 0, line
"""
# The lock's file stays, and names the holder; what a killed process left is free.
LOCK = """
from pathlib import Path
from posttrain.store.locks import hold, holder
path = Path("run.lock")
with hold(path):
    assert holder(path).startswith(f"pid {os.getpid()} "), holder(path)
assert path.exists() and holder(path) is None
child = os._posttrain_fork()
if child == 0:
    with hold(path):
        os.kill(os.getpid(), 9)
os.waitpid(child, 0)
with hold(path):
    pass
"""


def test_without_posix_modules_are_imported_and_commands_and_locks_end_well(tmp_path: Path) -> None:
    """In one process, whose start costs the most; the lock comes first, while there are no threads to fork with."""
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", TAKE_AWAY + LOCK + IMPORT_ALL + RUN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "runs" / "two-steps" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if '"step": 2' in line]


# psutil picks its back end by ``sys.platform``, and that of Linux imports ``resource``. A simulation that takes the
# modules from psutil, too, ends in transformers' "Could not import module 'Qwen3ForCausalLM'"; on Windows it does not.
ONLY_FOR_PSUTIL = """
import builtins
BLOCKED, original, asked = ("fcntl", "resource", "pwd", "grp", "termios"), builtins.__import__, set()
def import_unless_posix(name, globals=None, *rest, **more):
    importer = (globals or {}).get("__name__", "").partition(".")[0]
    if name in BLOCKED and importer != "psutil":
        asked.add(importer)
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return original(name, globals, *rest, **more)
builtins.__import__ = import_unless_posix
from transformers import Qwen3ForCausalLM
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection
assert type(load_model(ModelSection(name="tiny"), seed=0).model) is Qwen3ForCausalLM
assert asked, "nobody asks, so this proves nothing"
"""


def test_without_posix_modules_from_the_start_a_model_is_loaded(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", ONLY_FOR_PSUTIL]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
