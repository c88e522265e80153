"""``posttrain runs manage``: the other actions from a menu of keys in a plain terminal."""

from __future__ import annotations

import argparse
import shlex
import sys

from posttrain.commands.console import open_console, say
from posttrain.commands.runs.change import answer_of, delete_runs, export_to, locate_run, prune_runs, resume
from posttrain.commands.runs.show import NUM_LISTED, print_run, print_runs
from posttrain.errors import PosttrainError, UsageError
from posttrain.runs.lineage import find_links, find_links_around
from posttrain.runs.listing import list_runs
from posttrain.runs.notes import change_tags
from posttrain.runs.removal import parse_keep
from posttrain.untrusted import harmless

TOP = "NUMBER or NAME open · f TEXT filter · l list · q quit"
ONE = "s show · t +TAG -TAG tag · p [best,last] prune · e PLACE export · r resume · d delete · b back · q quit"


def run_manage(arguments: argparse.Namespace) -> int:
    """Show the menu until the user leaves it.

    Raises:
        UsageError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "runs manage asks in a terminal, and there is none; `posttrain runs --help` lists the commands"
        )
    menu, console = Menu(arguments.runs_dir), open_console()
    menu.list()
    while True:
        try:
            line = input(f"\n{ONE if menu.opened else TOP}\n{menu.opened or 'runs'}> ").strip()
            if line in ("q", "quit", "exit"):
                return 0
            if line:
                menu.obey(*shlex.split(line))
        except EOFError:
            return 0
        except (PosttrainError, ValueError) as error:  # or a quotation mark without its pair
            say(console, str(error), "red")
        except KeyboardInterrupt:
            say(console, "\nstopped", "yellow")


class Menu:
    """A menu over the runs in ``root``; ``opened`` is the run that is being worked on."""

    def __init__(self, root: str) -> None:
        self.root, self.opened, self.pattern = root, "", ""
        self.names: list[str] = []

    def list(self) -> None:
        """List the newest runs that fit the filter, numbered."""
        patterns = [f"{'*/' * depth}*{self.pattern}*" for depth in range(3)] if self.pattern else []
        runs = list_runs(self.root, with_cells=bool(patterns), newest=NUM_LISTED, patterns=patterns)
        self.names, console = [run.name for run in runs], open_console()
        if not runs:
            say(console, f"no runs in {self.root}" + (f" with {self.pattern!r} in their name" if patterns else ""))
            return
        print_runs(console, runs, find_links_around(self.root, self.names), runs, numbered=True)
        if len(runs) == NUM_LISTED:
            say(console, f"no more than {NUM_LISTED} are shown here; f TEXT finds others", "yellow")

    def obey(self, command: str, *words: str) -> None:
        """Carry out one line.

        Raises:
            PosttrainError: it cannot be done.
        """
        if self.opened:
            self._change(command, *words)
        elif command == "l":
            self.list()
        elif command == "f":
            self.pattern = " ".join(words)
            self.list()
        else:
            number = int(command) if command.isdecimal() else None
            if number is not None and not 1 <= number <= len(self.names):
                raise UsageError(f"there is no number {command} in the list; it has {len(self.names)} runs")
            name = command if number is None else self.names[number - 1]
            self.opened = locate_run(self.root, name).name
            self._change("s")

    def _change(self, command: str, *words: str) -> None:
        place, console = locate_run(self.root, self.opened), open_console()
        if command == "s":
            print_run(console, place.path, place.name, find_links(self.root, of=place.name))
        elif command == "t":
            say(console, f"{place.name}: {' '.join(change_tags(place.path, words).tags) or 'no tags'}")
        elif command == "p":
            prune_runs(console, self.root, [place], parse_keep(words[0] if words else "best,last"), _ask)
        elif command == "e" and words:
            export_to(console, self.root, place, words[0])
        elif command == "r":
            resume(self.root, place)
        elif command == "d":
            delete_runs(console, self.root, [place], _ask)
        elif command != "b":
            missing = "give a new folder, or a file that ends in .tar.gz: e PLACE"
            raise UsageError(missing if command == "e" else f"there is no {command!r} in this menu")
        if command == "b" or not place.path.exists():
            self.opened = ""
            self.list()


def _ask(question: str) -> bool:
    return answer_of(input(f"{harmless(question)} [y/N] "))
