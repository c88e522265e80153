"""``posttrain runs prune | delete | export | resume | manage``: actions that change runs. Deletions ask first."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from posttrain.commands import options
from posttrain.commands.console import counted, open_console, say
from posttrain.commands.runs.show import describe_link, run_compare, run_list, run_show, show_bytes
from posttrain.errors import DataError, PosttrainError, RunConflict, UsageError
from posttrain.registry import suggest
from posttrain.runs.directory import RunDirectory
from posttrain.runs.export import export_run
from posttrain.runs.lineage import find_links
from posttrain.runs.listing import disk_bytes, summarize_run
from posttrain.runs.models import read_run_recipe
from posttrain.runs.paths import Place, every_run_name, locate, locate_all, runs_of
from posttrain.runs.removal import (
    check_steps,
    check_unused,
    delete,
    find_leftovers,
    parse_keep,
    plan_prune,
    prune,
    refuse_live,
)
from posttrain.store.checkpoint_files import best_step, checkpoint_steps, step_folder
from posttrain.untrusted import harmless

NUM_SHOWN = 8


def locate_run(root: str, name: str) -> Place:
    """Return a run; a sweep is refused.

    Raises:
        UsageError: no such run.
    """
    place = locate(root, name)
    if place.is_sweep:
        runs = ", ".join(run.name for run in runs_of(root, place)[:NUM_SHOWN])
        raise UsageError(f"{name} is a sweep; name one of its runs: {runs}")
    return place


def _may_delete(console: Console, what: str, arguments: argparse.Namespace) -> bool:
    """Ask before a deletion if ``--yes`` is not given; print that nothing was changed where the answer is no.

    Raises:
        UsageError: there is no terminal to ask.
    """
    if arguments.dry_run:
        say(console, f"would delete {what}; nothing was changed")
        return False
    if not arguments.yes and not sys.stdin.isatty():
        raise UsageError(f"Delete {what}? There is no terminal to ask; give --yes. Nothing was changed")
    if arguments.yes or input(harmless(f"Delete {what}? [y/N] ")).strip().lower() in ("y", "yes"):
        return True
    say(console, "nothing was changed")
    return False


def run_prune(arguments: argparse.Namespace) -> int:
    """Print which checkpoints would go, ask, delete. With ``--all``, a run at work is left out."""
    root, keep, console = arguments.runs_dir, parse_keep(arguments.keep), open_console()
    if not arguments.names and not arguments.all:
        raise UsageError("give --all for every run, or names. Nothing was changed")
    links, plans = find_links(root), list[tuple[Place, list[int]]]()
    for place in locate_all(root, arguments.names or every_run_name(root)):
        for run in runs_of(root, place):
            try:
                refuse_live(root, run)
                plans.append((run, plan_prune(root, run, keep, links)))
            except (RunConflict, DataError) as error:
                if run.name in arguments.names:
                    raise
                say(console, f"left out: {error}", "yellow")
    _prune_all(console, root, [(run, steps) for run, steps in plans if steps or find_leftovers(run)], arguments)
    return 0


def _prune_all(
    console: Console, root: str, plans: Sequence[tuple[Place, Sequence[int]]], arguments: argparse.Namespace
) -> None:
    count = freed = 0
    for run, steps in plans:
        folder = run.path / "checkpoints"
        leftovers = [item for item in find_leftovers(run) if not item.is_symlink()]
        size = sum(map(disk_bytes, [*(step_folder(folder, step) for step in steps), *leftovers]))
        count, freed = count + len(steps), freed + size
        kept = [step for step in checkpoint_steps(folder) if step not in steps]
        going = [*map(str, steps), *(item.name for item in leftovers)]
        say(console, f"{run.name}: delete {', '.join(going)} ({show_bytes(size)}); keep {', '.join(map(str, kept))}")
        if (best := best_step(folder)) in steps:
            say(console, f"{run.name}: {best} is the best checkpoint; the run's name means its newest one without it")
    what = f"{counted(count, 'checkpoint')} of {counted(len(plans), 'run')}, {show_bytes(freed)}"
    if not plans:
        console.print("there is nothing to prune")
    elif _may_delete(console, what, arguments):
        for run, steps in plans:
            prune(root, run, steps)
        say(console, f"deleted {what}")


def run_delete(arguments: argparse.Namespace) -> int:
    """Delete runs and sweeps, or checkpoints of one run."""
    root, console = arguments.runs_dir, open_console()
    if not arguments.names:
        raise UsageError("give the names of runs. Nothing was changed")
    if not arguments.step:
        _delete_runs(console, root, locate_all(root, arguments.names), arguments)
        return 0
    if len(arguments.names) != 1:
        raise UsageError("--step N deletes checkpoints of one run; give its name. Nothing was changed")
    place = locate_run(root, arguments.names[0])
    refuse_live(root, place)
    steps = check_steps(root, place, arguments.step, find_links(root), force=arguments.force)
    _prune_all(console, root, [(place, steps)], arguments)
    return 0


def _delete_runs(console: Console, root: str, places: Sequence[Place], arguments: argparse.Namespace) -> None:
    sweeps = {place.name for place in places if place.is_sweep}
    places = [place for place in places if place.is_sweep or place.name.partition("/")[0] not in sweeps]
    for place in places:
        refuse_live(root, place)
    used = check_unused(root, places)
    if used and not arguments.force:
        lines = "\n".join(f"  {link.child}: its {link.role} is {describe_link(link)}" for link in used[:NUM_SHOWN])
        more = f"\n  and {len(used) - NUM_SHOWN} more" if len(used) > NUM_SHOWN else ""
        raise RunConflict(
            f"other runs were trained from or with what would go:\n{lines}{more}\n"
            "They can then no longer be resumed, nor loaded if they are adapters. Nothing was changed; name them as "
            "well, or delete it all the same with --force"
        )
    sizes = [disk_bytes(place.path) for place in places]
    for place, size in zip(places, sizes, strict=True):
        run = summarize_run(place.path)
        about = f"{run.state} at step {run.step} of {run.steps}{', ' * bool(run.result)}{run.result}"
        about = f"a sweep with {counted(len(runs_of(root, place)), 'run')}" if place.is_sweep else about
        say(console, f"{place.name}: {about}, {show_bytes(size)}")
    what = f"{counted(len(places), 'sweep' if sweeps else 'run')}, {show_bytes(sum(sizes))}"
    if _may_delete(console, what, arguments):
        for place in places:
            delete(root, place)
        say(console, f"deleted {what}")


def run_export(arguments: argparse.Namespace) -> int:
    """Copy a run to a place outside."""
    root, console = arguments.runs_dir, open_console()
    place = locate_run(root, arguments.name)
    done = export_run(root, place.path, arguments.to, weights=arguments.weights, merge=arguments.merge)
    what = "no weights" if done.step is None else f"the weights after step {done.step}"
    say(console, f"{done.target}: {what}, {done.num_files} files, {show_bytes(done.num_bytes)}")
    for notice in done.warnings:
        say(console, f"note: {notice}", "yellow")
    return 0


def run_resume(arguments: argparse.Namespace) -> int:
    """Train on by the run's own recipe, as ``posttrain train --resume`` does; returns the exit code.

    Raises:
        RunConflict: a process works in it.
    """
    from posttrain.commands.interpret.sae import run_sae_train
    from posttrain.commands.train import run_train

    place = locate_run(arguments.runs_dir, arguments.name)
    refuse_live(arguments.runs_dir, place)
    run = RunDirectory(place.path)
    is_sae = "dictionary" in run.read_recipe()
    if not is_sae:
        read_run_recipe(place.path).resolve(to_read=True)
    changes = [] if arguments.steps is None else [("train.steps", str(arguments.steps))]
    where = {"recipe": str(run.recipe_path), "runs_dir": str(place.path.parent), "run": place.path.name}
    how = {"overrides": changes, "resume": True, "yes": True, "dry_run": False, "memory": False}
    request = argparse.Namespace(**vars(arguments) | where | how)
    return run_sae_train(request) if is_sae else run_train(request)


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": run_list,
    "show": run_show,
    "compare": run_compare,
    "prune": run_prune,
    "delete": run_delete,
    "export": run_export,
    "resume": run_resume,
}


def run_manage(arguments: argparse.Namespace) -> int:
    """Take the actions line by line, until the user leaves.

    Raises:
        UsageError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "runs manage asks in a terminal, and there is none; `posttrain runs --help` lists the commands"
        )
    console, line = open_console(), "list"
    while line not in ("q", "quit", "exit"):
        try:
            if line:
                _run_action(arguments.runs_dir, *shlex.split(line))
            line = input(f"\n{' · '.join(ACTIONS)} · quit; ACTION -h prints its options\nruns> ").strip()
        except EOFError:
            return 0
        except (PosttrainError, ValueError, SystemExit) as error:  # of the action, shlex or argparse
            say(console, "" if isinstance(error, SystemExit) else str(error), "red")
            line = ""
        except KeyboardInterrupt:
            say(console, "\nstopped", "yellow")
            line = ""
    return 0


def _run_action(root: str, action: str, *words: str) -> None:
    if action not in ACTIONS:
        raise UsageError(f"there is no action {action!r}.{suggest(action, ACTIONS)}")
    parser = options.Parser(action, allow_abbrev=False)
    options.RUNS[action].add_to(parser)
    namespace = parser.parse_args(words)
    namespace.runs_dir = root
    ACTIONS[action](namespace)
