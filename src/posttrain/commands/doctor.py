"""``posttrain doctor``: diagnose a run, separating faults from warnings and harmless oddities.

Imports only the standard library until executed (see ``cli``).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from posttrain.commands.options import CommandOptions, option, positive

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.runs.diagnosis.diagnose import Diagnosis
    from posttrain.runs.diagnosis.findings import RunFinding

EPILOG = """\
  fault        proven by the records: logged values contradict them
  level        a warning without proof; the message explains how to decide
  audit        audited values that match
  explanation  harmless despite appearances, or unreadable
other trainers, with --from: TRL completions (or output from contrib/trl_records.py), NeMo RL train_data, as a file
or folder
exit code: 1 for faults, 0 for none, 2 for unreadable runs
  posttrain doctor mine
  posttrain doctor runs/mine --json
  posttrain doctor mine --audit 101    recompute update 101 from checkpoint 100
  posttrain doctor outputs/completions --from trl
"""

OPTIONS = CommandOptions(
    option("run", metavar="RUN", help="a finished, running or interrupted run, or another trainer's records"),
    option("--audit", type=positive, metavar="STEP", help="recompute an update with plain code and compare"),
    option("--from", dest="trainer", choices=("trl", "nemo-rl"), help="read records written by this trainer"),
    usage="posttrain doctor RUN [options], or posttrain doctor FILE --from {trl,nemo-rl}",
    epilog=EPILOG,
)
STYLES = {"fault": "red", "audit": "green", "level": "yellow", "explanation": "dim"}
TITLES = {
    "fault": "faults",
    "audit": "audit: recomputed with plain code, identical",
    "level": "warnings without proof",
    "explanation": "no fault",
}


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print findings about a run; exit code 1 if any is a fault."""
    from dataclasses import asdict

    from posttrain.runs.diagnosis.diagnose import diagnose_run
    from posttrain.runs.directory import find_run
    from posttrain.terminal.console import open_console, print_json

    if arguments.trainer is not None:
        return _read_others(arguments)
    folder = find_run(arguments.runs_dir, arguments.run)
    done = diagnose_run(folder, arguments.audit)
    content = {
        "run": str(folder),
        "state": done.state,
        "step": done.step,
        "steps": done.steps,
        "updates": done.num_records,
        "findings": [asdict(one) for one in done.findings],
    }
    if not print_json(content):
        _print_diagnosis(open_console(), str(folder), done)
    return int(bool(done.of("fault")))


def _read_others(arguments: argparse.Namespace) -> int:
    """Print findings about another trainer's records; exit code 1 if any is a fault."""
    from dataclasses import asdict
    from pathlib import Path

    from posttrain.errors import UsageError
    from posttrain.runs.diagnosis.others.checks import diagnose_records
    from posttrain.terminal.console import open_console, pluralize, print_json, say

    if arguments.audit is not None:
        raise UsageError(
            "--audit: needs a posttrain checkpoint, so other trainers' records cannot be audited. Remove it"
        )
    done = diagnose_records(Path(arguments.run), arguments.trainer)
    content = {
        "records": arguments.run,
        "trainer": arguments.trainer,
        "answers": done.num_answers,
        "batches": done.num_batches,
        "findings": [asdict(one) for one in done.findings],
    }
    if not print_json(content):
        console = open_console()
        read = f"{pluralize(done.num_answers, 'answer')} in {done.num_batches:,} batches"
        balance = "all that is recorded balances"
        if done.of("fault"):
            balance = pluralize(len(done.of("fault")), "fault")
        say(console, f"{arguments.run}: {read} of {arguments.trainer}; {balance}", "bold")
        _print_findings(console, done.findings, TITLES | {"audit": "what balances"})
    return int(bool(done.of("fault")))


def _print_diagnosis(console: Console, folder: str, done: Diagnosis) -> None:
    from posttrain.terminal.console import say

    say(console, f"{folder}: {done.state}, step {done.step:,} of {done.steps:,}; {_describe_books(done)}", "bold")
    _print_findings(console, done.findings, TITLES)


def _print_findings(console: Console, findings: Sequence[RunFinding], titles: Mapping[str, str]) -> None:
    from posttrain.terminal.console import say

    for kind, title in titles.items():
        chosen = [one for one in findings if one.kind == kind]
        if chosen:
            say(console, f"\n{title}", STYLES[kind])
        for one in chosen:
            _print_finding(console, one)


def _describe_books(done: Diagnosis) -> str:
    from posttrain.terminal.console import pluralize

    if not done.num_records:
        return "no records of updates"
    read = f"{pluralize(done.num_records, 'update')} checked"
    if done.of("fault"):
        return f"{read}, {pluralize(len(done.of('fault')), 'fault')}"
    return f"{read}, all balance"


def _print_finding(console: Console, one: RunFinding) -> None:
    from posttrain.terminal.console import say

    place = ""
    if one.step is not None:
        place = f", step {one.step:,}"
    if one.num_updates > 1:
        place = f"{place} and {one.num_updates - 1:,} more"
    say(console, f"  {one.check}{place}: expected {one.expected}, found {one.found}")
    if one.kind == "audit":
        return
    if one.kind == "explanation":
        say(console, f"    why: {one.decided_by}", "dim")
        return
    if one.causes:
        say(console, f"    causes: {'; '.join(one.causes)}", "dim")
    say(console, f"    to decide: {one.decided_by}", "dim")
