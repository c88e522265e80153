"""Seconds of each folder of tests: a table at the end, and a file of it.

``--folder-seconds FILE`` asks for it; `make test` does. Seconds are those of set-up, test and tear-down, summed over
all test processes.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--folder-seconds", metavar="FILE", help="write seconds and tests of every folder there")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--folder-seconds")
    if path is not None and not hasattr(config, "workerinput"):  # the controller hears of every worker's tests
        config.pluginmanager.register(FolderSeconds(Path(path)))


class FolderSeconds:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = Path(report.nodeid.partition("::")[0]).parent.as_posix()
        self.seconds[folder] += report.duration
        self.tests[folder] += report.when == "setup"  # every test has one, skipped or broken

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = {
            folder: {"seconds": round(seconds, 2), "tests": self.tests[folder]}
            for folder, seconds in self.seconds.most_common()
        }
        whole = {"seconds": round(self.seconds.total(), 2), "tests": self.tests.total()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"folders": rows, "all": whole}, indent=1) + "\n", encoding="utf-8")
        terminalreporter.section(f"seconds of all processes together, by folder ({self.path})")
        for folder, row in [*rows.items(), ("all", whole)]:
            terminalreporter.line(f"{row['seconds']:8.1f} s  {row['tests']:5d} tests  {folder}")
