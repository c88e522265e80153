"""What may run, as options of every command that opens runs. Only the standard library is imported here."""

from __future__ import annotations

import argparse

from posttrain.consent import ALLOW_CODE, TRUST_REMOTE_CODE


def add_options(parser: argparse.ArgumentParser) -> None:
    """Code that a stored recipe names, and the Python of a model: neither runs without being asked for here."""
    parser.add_argument(
        ALLOW_CODE,
        metavar="MODULE:FUNCTION[@FOLDER]",
        action="append",
        default=argparse.SUPPRESS,
        help="a function that a run's recipe names, and that may be imported (again for another)",
    )
    parser.add_argument(
        TRUST_REMOTE_CODE,
        action="store_true",
        default=argparse.SUPPRESS,
        help="run the Python that comes with a model (no recipe can ask for it)",
    )
