"""``posttrain env``: what a bug report needs to know of this machine, without names, places or secrets."""

from __future__ import annotations

import argparse

from posttrain.commands.options import CommandOptions, option

EPILOG = """\
paste it into a bug report:
  posttrain env
  posttrain env --json
"""
OPTIONS = CommandOptions(
    option("--packages", action="store_true", help="list all installed packages and versions"), epilog=EPILOG
)


def run_env(arguments: argparse.Namespace) -> int:
    """Print versions, hardware and settings."""
    from posttrain.store.tracking.machine_report import describe_machine
    from posttrain.terminal.console import print_json

    report = describe_machine(all_packages=arguments.packages)
    if print_json(report):
        return 0
    for title, values in report.items():
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
    return 0
