"""The pool of killable processes: whatever an item does, the others get their results, in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from other_processes import is_alive, wait_until
from posttrain.errors import RunFailure
from posttrain.graders.sandbox import workers
from posttrain.graders.sandbox.workers import Limits, WorkerPool, WorkerResult, shared_pool
from refusing import refuses

TARGET = "worker_functions:answer"
LIMITS = Limits(cpu_seconds=0.3, wall_seconds=15.0, memory_bytes=128 * 2**20)
PATIENT = replace(LIMITS, cpu_seconds=5.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool(TARGET, 2, LIMITS)) as made:
        yield made


def echo(*values: Any) -> list[list[Any]]:
    return [["echo", value] for value in values]


def values(results: list[WorkerResult]) -> list[Any]:
    assert [result.kind for result in results] == ["value"] * len(results), results
    return [result.value for result in results]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_come_in_order(num_workers: int) -> None:
    with closing(WorkerPool(TARGET, num_workers, LIMITS)) as pool:
        assert pool.pids == []
        assert pool.run([]) == []
        assert pool.pids == [], "workers start when there is work"
        assert values(pool.run(echo(*range(700)))) == list(range(700))
        assert values(pool.run(echo("a"))) == ["a"]
        assert len(pool.pids) == num_workers


def test_items_of_any_kind_pass_unchanged(pool: WorkerPool) -> None:
    odd = ["", "\x00", "\ud800", "é🤖", "\u2028", {"a": [None, True, 1.5]}, 10**40]
    assert values(pool.run(echo(*odd))) == odd


@pytest.mark.parametrize(
    ("kind", "argument", "outcome", "reason"),
    [
        ("spin", 0, "timeout", "over 0.3 s of CPU time"),
        ("multiply", 0, "timeout", "over 0.3 s of CPU time"),
        ("allocate", 200 * 2**20, "crash", "MemoryError"),
        ("recurse", 0, "crash", "RecursionError"),
        ("raise", "what", "crash", "KeyError: what"),
        ("leave", 0, "crash", "SystemExit"),
        ("leave at once", 0, "crash", "exit code 0"),
        ("fault", 0, "crash", "SIGSEGV"),
        ("repeat", 10**6, "crash", "1000002 bytes"),
        ("no json", 0, "crash", "TypeError: Object of type set"),
        ("close", 0, "crash", "exit code 1"),
        ("nonsense", "\x7f\x7f\x7f\x7f{}", "crash", "SIGKILL"),
        ("nonsense", '{"number": 99}\n', "crash", "SIGKILL"),
        ("say once", '{"ready": true}\n', "crash", "SIGKILL"),
    ],
)
def test_an_item_that_misbehaves_is_recorded_and_its_neighbours_are_not_touched(
    pool: WorkerPool, kind: str, argument: Any, outcome: str, reason: str
) -> None:
    before, bad, *after = pool.run([["echo", 1], [kind, argument], *echo(*range(40))])
    assert (bad.kind, bad.value) == (outcome, None)
    assert reason in bad.reason
    assert values([before, *after]) == [1, *range(40)]


def test_waiting_is_limited_apart_from_computing() -> None:
    with closing(WorkerPool(TARGET, 2, Limits(cpu_seconds=30, wall_seconds=0.4))) as pool:
        first, bad, last = pool.run([["sleep", 0.01], ["sleep", 30], ["sleep", 0.02]])
    assert (bad.kind, bad.reason) == ("timeout", "over 0.4 s elapsed")
    assert values([first, last]) == [0.01, 0.02]


def test_a_worker_that_is_killed_from_outside_costs_nobody_the_result() -> None:
    with closing(WorkerPool(TARGET, 2, Limits(cpu_seconds=5, wall_seconds=30))) as pool:
        assert values(pool.run(echo(1, 2))) == [1, 2]
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)  # while they wait for work
        assert values(pool.run(echo(*range(100)))) == list(range(100))
        killer = threading.Timer(0.3, lambda: os.kill(pool.pids[0], signal.SIGKILL))
        killer.start()
        assert values(pool.run([["sleep", 0.8], ["sleep", 0.8], *echo(*range(20))]))[2:] == list(range(20))
        killer.join()


def test_a_worker_that_is_stopped_is_not_started_again() -> None:
    """As at Ctrl-C and at the end of the program; otherwise the item would be computed once more, for 30 s."""
    with closing(WorkerPool(TARGET, 1, PATIENT)) as pool:
        assert values(pool.run(echo(1))) == [1]
        begun = time.monotonic()
        threading.Timer(0.3, pool._kill).start()
        (result,) = pool.run([["sleep", 14]])
        assert (result.kind, time.monotonic() - begun < 8) == ("crash", True)


def test_a_worker_that_keeps_too_much_memory_is_replaced() -> None:
    with closing(WorkerPool(TARGET, 1, PATIENT)) as pool:
        pids = values(pool.run([["keep", 60 * 2**20]] * 9))
    assert len(set(pids)) == 3, "each takes 60 MB three times, more than the 128 MB that one item may use"


@pytest.mark.parametrize("kind", ["system", "start", "open", "low open", "remove"])
def test_a_worker_has_no_effects(pool: WorkerPool, kind: str, tmp_path: Path) -> None:
    kept, canary = tmp_path / "kept", tmp_path / "canary"
    kept.touch()
    (result,) = pool.run([[kind, str(kept if kind == "remove" else canary)]])
    assert result.kind == "crash"
    assert "PermissionError: a worker" in result.reason
    assert kept.exists()
    assert not canary.exists()


def test_a_worker_runs_no_text(pool: WorkerPool) -> None:
    texts = ("1", "__import__('os').getcwd()", "open('/tmp/x', 'w')")
    results = pool.run([[kind, text] for kind in ("eval", "exec", "compile") for text in texts])
    assert results == [WorkerResult("crash", reason="PermissionError: a worker compiles no text")] * 9


def test_a_worker_is_a_light_process_of_its_own_with_fixed_hashes(pool: WorkerPool) -> None:
    info = values(pool.run([["facts", 0]] * 8))
    assert info == [[[], info[0][1], "0", True]] * 8


def test_a_worker_has_none_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    with closing(WorkerPool(TARGET, 1, LIMITS)) as pool:
        found = values(pool.run([["surroundings", 0]] * 8))
    for environment, folder, relative in found:
        assert set(environment) - {"LD_LIBRARY_PATH", "PYTHONHOME", "LC_CTYPE"} == {
            "PYTHONHASHSEED", "PYTHONUTF8", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        }  # fmt: skip
        assert (folder, relative) == ("/", [])


def test_a_worker_that_may_compile_still_has_no_effects_and_reads_no_strangers_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key", encoding="utf-8")
    attacks = ["__import__('os').system('true')", f"open({str(secret)!r}).read()", f"open({str(secret)!r}, 'w')",
               f"open('/proc/{os.getpid()}/environ').read()", "__import__('ctypes').CDLL(None)",
               "__import__('socket').create_connection(('127.0.0.1', 9))"]  # fmt: skip
    with closing(WorkerPool(TARGET, 1, replace(PATIENT, compiles=True))) as pool:
        assert values(pool.run([["eval", "1 + 1"]])) == [2]
        results = pool.run([["eval", text] for text in attacks])
    assert [result.kind for result in results] == ["crash"] * len(attacks)
    assert all(result.reason.startswith("PermissionError: a worker ") for result in results), results
    assert secret.read_text(encoding="utf-8") == "key"


@pytest.mark.parametrize(
    ("target", "reason"),
    [("no_such_module:f", "ModuleNotFoundError"), ("worker_functions:no_such", "AttributeError"), ("math:", "Attr")],
)
def test_a_function_that_is_not_there_is_an_error_and_no_endless_restart(target: str, reason: str) -> None:
    pool = WorkerPool(target, 2, LIMITS)
    with pytest.raises(RunFailure, match=f"a worker process for {target} cannot start: {reason}"):
        pool.run(echo(1))
    assert pool.pids == []


def test_workers_that_die_before_they_are_ready_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_BOOT", "raise SystemExit(7)")
    pool = WorkerPool(TARGET, 2, LIMITS)
    with refuses(RunFailure, "start: the process"):
        pool.run(echo(1))


def test_a_forked_copy_of_the_program_gets_workers_of_its_own() -> None:
    def pids() -> set[int]:
        return set(values(shared_pool(TARGET, 2, LIMITS).run([["pid", 0]] * 20)))

    mine = pids()
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = not pids() & mine
            shared_pool(TARGET, 2, LIMITS).close()
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pids() <= mine
    shared_pool(TARGET, 2, LIMITS).close()


def test_a_closed_pool_leaves_no_process_and_starts_again() -> None:
    with closing(WorkerPool(TARGET, 2, LIMITS)) as pool:
        values(pool.run(echo(1, 2)))
        pids = pool.pids
        pool.close()
        assert not any(map(is_alive, pids))
        assert pool.pids == []
        assert values(pool.run(echo(3))) == [3]


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from posttrain.graders.sandbox.workers import Limits, WorkerPool
print("once", flush=True)
pool = WorkerPool("worker_functions:answer", 2, Limits(cpu_seconds=1, wall_seconds=1.5))
print(*[result.value for result in pool.run([["echo", n] for n in range(4)])], flush=True)
print(*pool.pids, flush=True)
"""


def start_script(*lines: str) -> subprocess.Popen[str]:
    # a shell that starts the tests in the background lets them, and so the script, ignore SIGINT
    lines = ("import signal", "signal.signal(signal.SIGINT, signal.default_int_handler)", *lines)
    code = SCRIPT.format(folder=str(Path(__file__).parent)) + "\n".join(lines)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def read_pids(script: subprocess.Popen[str]) -> list[int]:
    assert script.stdout is not None
    assert [script.stdout.readline().strip() for _ in range(2)] == ["once", "0 1 2 3"]
    return [int(pid) for pid in script.stdout.readline().split()]


def test_a_script_needs_no_main_guard_and_leaves_no_process() -> None:
    script = start_script()
    pids = read_pids(script)
    out, err = script.communicate(timeout=30)
    assert (out, err, script.returncode) == ("", "", 0)
    wait_until(lambda: not any(map(is_alive, pids)), 5)


def test_control_c_ends_program_and_workers_without_their_tracebacks() -> None:
    script = start_script("pool.run([['sleep', 60]] * 4)")
    pids = read_pids(script)
    time.sleep(0.4)
    os.killpg(script.pid, signal.SIGINT)
    _, err = script.communicate(timeout=30)
    assert err.count("Traceback") == 1, "the program's own"
    assert err.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not any(map(is_alive, pids)), 5)


@pytest.mark.parametrize(("item", "seconds"), [(None, 1.0), ("['spin', 0]", 3.0), ("['sleep', 60]", 4.0)])
def test_workers_do_not_outlive_a_program_that_is_killed(item: str | None, seconds: float) -> None:
    script = start_script(f"pool.run([{item}] * 2)" if item else "sys.stdin.read()")
    pids = read_pids(script)
    time.sleep(0.3)
    script.kill()
    script.communicate(timeout=30)
    # the limits of an item end those that are at work
    wait_until(lambda: not any(map(is_alive, pids)), seconds + 5)


def test_a_thread_that_is_left_behind_does_not_hold_up_the_end() -> None:
    lines = (
        "import threading",
        "threading.Thread(target=pool.run, args=([['sleep', 1.4]] * 40,), daemon=True).start()",
    )
    script = start_script(*lines, "import time", "time.sleep(0.2)")
    pids = read_pids(script)
    start = time.monotonic()
    script.communicate(timeout=30)
    assert time.monotonic() - start < 10
    wait_until(lambda: not any(map(is_alive, pids)), 5)
