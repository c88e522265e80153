"""``posttrain runs manage``: the other actions from a menu of keys in a plain terminal."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from posttrain.commands.console import open_console, say
from posttrain.commands.runs.change import locate_run, run_delete, run_export, run_prune, run_resume, run_tag
from posttrain.commands.runs.show import NUM_LISTED, print_runs, run_show
from posttrain.errors import PosttrainError, UsageError
from posttrain.runs.lineage import find_links_around
from posttrain.runs.listing import list_runs

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
        keep, target = (words or ("best,last",))[0], (words or ("",))[0]
        actions: dict[str, tuple[Callable[[argparse.Namespace], int], dict[str, object]]] = {
            "s": (run_show, {}),
            "t": (run_tag, {"tags": words}),
            "p": (run_prune, {"all": False, "keep": keep}),
            "e": (run_export, {"to": target, "weights": None, "merge": False}),
            "r": (run_resume, {"steps": None, "quiet": False, "accept_changes": False}),
            "d": (run_delete, {"step": None, "force": False}),
        }
        if command == "b":
            self.opened = ""
        elif command not in actions:
            raise UsageError(f"there is no {command!r} in this menu")
        elif command == "e" and not words:
            raise UsageError("give a new folder, or a file that ends in .tar.gz: e PLACE")
        else:
            common: dict[str, object] = {"runs_dir": self.root, "name": self.opened, "names": [self.opened]}
            common |= {"state": [], "tag": [], "yes": False, "dry_run": False}
            action, options = actions[command]
            action(argparse.Namespace(**common, **options))
            if not (Path(self.root) / self.opened).exists():  # it was deleted
                self.opened = ""
        if not self.opened:
            self.list()
