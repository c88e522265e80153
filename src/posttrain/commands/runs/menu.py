"""``posttrain runs manage``: the same as the other actions, from a menu of keys in a plain terminal."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from posttrain.commands.console import open_console, say
from posttrain.commands.runs.change import (
    answer_of,
    delete_runs,
    export_to,
    locate_run,
    prune_runs,
    resume,
)
from posttrain.commands.runs.show import (
    NUM_LISTED,
    ancestors,
    print_comparisons,
    print_run,
    print_runs,
    show_bytes,
)
from posttrain.errors import PosttrainError, UsageError
from posttrain.runs.lineage import find_links, find_links_around
from posttrain.runs.listing import RunSummary, list_comparisons, list_runs, sort_runs
from posttrain.runs.notes import change_tags, read_notes
from posttrain.runs.paths import Place, locate, locate_all
from posttrain.runs.removal import parse_keep

TOP = "NUMBER open · f TEXT filter · s KEY sort · p prune all · d 1 2 delete · l list · q quit"
ONE = "t tag · p prune · e export · r resume · d delete · s show · b back"
KEEP = "best,last"


def run_manage(arguments: argparse.Namespace) -> int:
    """Show the menu until the person leaves it.

    Raises:
        UsageError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "runs manage asks in a terminal, and there is none; `posttrain runs --help` lists the commands"
        )
    Menu(arguments.runs_dir, open_console(), input).serve()
    return 0


class Menu:
    """A menu over the runs in ``root``. ``read`` shows a prompt and returns a line; EOFError ends it."""

    def __init__(self, root: str, console: Console, read: Callable[[str], str]) -> None:
        self.root, self.console, self.read = root, console, read
        self.key, self.pattern = "created", ""
        self.runs: list[RunSummary] = []

    def serve(self) -> None:
        """List the runs, then do what is asked for, until ``q`` or the end of the input."""
        try:
            self.list()
            while True:
                line = self.read(f"\n{TOP}\nruns> ").strip()
                if line in ("q", "quit", "exit"):
                    return
                if line:
                    self._guarded(lambda line=line: self.choose(line))  # type: ignore[misc]
        except EOFError:
            self.console.print()

    def list(self) -> None:
        """The runs that fit the filter, numbered, and the comparisons."""
        part = self.pattern
        patterns = (f"*{part}*", f"*/*{part}*", f"*/*/*{part}*") if part else ()
        newest = NUM_LISTED if self.key == "created" else None
        every = list_runs(self.root, with_cells=bool(part), newest=newest, patterns=patterns)
        self.runs = sort_runs(every, self.key)[:NUM_LISTED]
        comparisons = [] if self.pattern else list_comparisons(self.root)
        if self.runs:
            links = find_links_around(self.root, [run.name for run in self.runs])
            among = [*every, *ancestors(self.root, links, every)]
            print_runs(self.console, self.runs, links, among, numbered=True)
            if len(self.runs) == NUM_LISTED:
                self._say(f"no more than {NUM_LISTED} are shown here; f TEXT finds others", "yellow")
        else:
            self._say(f"no runs in {self.root}" + (f" with {self.pattern!r} in their name" if self.pattern else ""))
        if comparisons:
            print_comparisons(self.console, comparisons)
        total = sum(run.disk_bytes for run in self.runs) + sum(item.disk_bytes for item in comparisons)
        self._say(f"{show_bytes(total)} in all", "dim")

    def choose(self, line: str) -> None:
        """One line of the top menu."""
        command, *rest = shlex.split(line)
        if command == "l":
            self.list()
        elif command == "s":
            before, self.key = self.key, rest[0] if rest else "created"
            self._listed_or(lambda: setattr(self, "key", before))
        elif command == "f":
            self.pattern = rest[0] if rest else ""
            self.list()
        elif command == "p":
            self.prune(locate_all(self.root, [run.name for run in self.runs]))
        elif command == "d":
            self.delete([locate(self.root, self._name(word)) for word in rest])
        elif len(rest) == 0:
            self.open(self._name(command))
        else:
            raise UsageError(f"there is no {line!r} in this menu")

    def open(self, name: str) -> None:
        """The menu of one run, until ``b`` or its deletion."""
        place = locate_run(self.root, name)
        self.show(place)
        while True:
            line = self.read(f"\n{ONE}\n{place.name}> ").strip()
            if line == "b":
                self.list()
                return
            if line:
                self._guarded(lambda line=line: self.change(place, line))  # type: ignore[misc]
            if not place.path.exists():
                self.list()
                return

    def change(self, place: Place, line: str) -> None:
        """One line of a run's menu."""
        if line == "s":
            self.show(place)
        elif line == "t":
            changes = self.read(
                f"tags: {' '.join(read_notes(place.path).tags) or 'none'}; +good adds, -good takes away> "
            )
            notes = change_tags(place.path, changes.split())
            self._say(f"{place.name}: {' '.join(notes.tags) or 'no tags'}")
        elif line == "p":
            self.prune([place])
        elif line == "e":
            target = self.read("to which new folder or .tar.gz (empty: not at all)> ").strip()
            if target:
                export_to(self.console, self.root, place, target)
        elif line == "r":
            resume(self.root, place)
        elif line == "d":
            self.delete([place])
        else:
            raise UsageError(f"there is no {line!r} in this menu")

    def show(self, place: Place) -> None:
        """One run in full."""
        print_run(self.console, place.path, place.name, find_links(self.root, of=place.name))

    def prune(self, places: Sequence[Place]) -> None:
        """Ask which checkpoints to keep, then whether to delete the others."""
        keep = self.read(f"keep which checkpoints of {len(places)} runs (empty: {KEEP})> ").strip() or KEEP
        prune_runs(self.console, self.root, places, parse_keep(keep), self.ask)

    def delete(self, places: Sequence[Place]) -> None:
        """Ask, and delete."""
        if not places:
            raise UsageError("name the runs to delete, such as: d 1 2")
        delete_runs(self.console, self.root, places, self.ask)

    def ask(self, question: str) -> bool:
        """A question that yes or no answers."""
        return answer_of(self.read(f"{question} [y/N] "))

    def _name(self, word: str) -> str:
        if word.isdigit():
            if not 1 <= int(word) <= len(self.runs):
                raise UsageError(f"there is no number {word} in the list; it has {len(self.runs)} runs")
            return self.runs[int(word) - 1].name
        return word

    def _listed_or(self, undo: Callable[[], None]) -> None:
        try:
            self.list()
        except UsageError:
            undo()
            raise

    def _guarded(self, action: Callable[[], None]) -> None:
        """A mistake is said, and the menu goes on."""
        try:
            action()
        except PosttrainError as error:
            self._say(str(error), "red")
        except ValueError as error:  # a quotation mark without its pair
            self._say(f"this cannot be read: {error}", "red")
        except KeyboardInterrupt:
            self._say("\nstopped", "yellow")

    def _say(self, text: str, style: str = "") -> None:
        say(self.console, text, style)
