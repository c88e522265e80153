"""``posttrain runs tag | prune | delete | export | resume``: what changes a run, asked for where it deletes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from posttrain.commands.console import counted, open_console, say
from posttrain.commands.runs.show import describe_link, show_bytes
from posttrain.errors import DataError, RecipeError, RunConflict, UsageError
from posttrain.runs.directory import RunDirectory
from posttrain.runs.export import Weights, export_run
from posttrain.runs.lineage import find_links
from posttrain.runs.listing import Filter, check_states, disk_bytes, summarize_run
from posttrain.runs.models import read_run_recipe
from posttrain.runs.notes import change_tags, read_notes
from posttrain.runs.paths import Place, every_run_name, locate, locate_all, runs_of
from posttrain.runs.removal import (
    Prune,
    check_unused,
    delete,
    finish_deletions,
    parse_keep,
    plan_prune,
    plan_steps,
    prune,
    refuse_live,
    unfinished_deletions,
)
from posttrain.runs.resuming import refuse_other_version
from posttrain.store.checkpoint_files import best_step
from posttrain.untrusted import harmless

# Asks a question that yes or no answers.
Ask = Callable[[str], bool]
NUM_SHOWN = 8


def run_tag(arguments: argparse.Namespace) -> int:
    """Change tags, then show them."""
    place = locate_run(arguments.runs_dir, arguments.name)
    notes = change_tags(place.path, arguments.tags) if arguments.tags else read_notes(place.path)
    print(f"{place.name}: {' '.join(notes.tags) or 'no tags'}")
    return 0


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete checkpoints."""
    root, keep = arguments.runs_dir, parse_keep(arguments.keep)
    places = choose_places(root, arguments, default="--all for every run" if not arguments.all else None)
    named = set() if arguments.all else set(arguments.names)
    prune_runs(open_console(), root, places, keep, choose_ask(arguments), arguments.dry_run, named)
    return 0


def run_delete(arguments: argparse.Namespace) -> int:
    """Delete runs and comparisons; without a name, what deletions left that were cut off."""
    root, console = arguments.runs_dir, open_console()
    if arguments.step:
        if len(arguments.names) != 1 or arguments.state or arguments.tag:
            raise UsageError("--step N deletes checkpoints of one run; give its name. Nothing was changed")
        place = locate_run(root, arguments.names[0])
        delete_steps(console, root, place, arguments.step, choose_ask(arguments), arguments.force, arguments.dry_run)
        return 0
    if not arguments.names and not arguments.state and not arguments.tag and unfinished_deletions(root):
        return finish(console, root, choose_ask(arguments), arguments.dry_run)
    places = choose_places(root, arguments, default="the names of runs, or --state or --tag")
    delete_runs(console, root, places, choose_ask(arguments), force=arguments.force, dry_run=arguments.dry_run)
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Copy a run to a place outside."""
    place = locate_run(arguments.runs_dir, arguments.name)
    export_to(open_console(), arguments.runs_dir, place, arguments.to, arguments.weights, arguments.merge)
    return 0


def run_resume(arguments: argparse.Namespace) -> int:
    """Train on by the run's own recipe, as ``posttrain train --resume`` does."""
    place = locate_run(arguments.runs_dir, arguments.name)
    return resume(arguments.runs_dir, place, arguments.steps, arguments.quiet, arguments.accept_changes)


def locate_run(root: str, name: str) -> Place:
    """A run; a comparison is refused.

    Raises:
        UsageError: no such run.
    """
    place = locate(root, name)
    if place.is_comparison:
        runs = ", ".join(run.name for run in runs_of(root, place)[:NUM_SHOWN])
        raise UsageError(f"{name} is a comparison; name one of its runs: {runs}")
    return place


def choose_places(root: str, arguments: argparse.Namespace, default: str | None) -> list[Place]:
    """The runs and comparisons that names and filters mean; ``default`` says what to give where there are neither.

    Raises:
        UsageError: nothing is meant, or nothing fits.
    """
    wanted = Filter(check_states(arguments.state), tuple(arguments.tag))
    if not arguments.names and not wanted and default is not None:
        raise UsageError(f"give {default}. Nothing was changed")
    names = arguments.names or every_run_name(root)
    places = locate_all(root, names)
    if wanted:
        places = [run for place in places for run in runs_of(root, place)]
        places = [run for run in places if wanted(summarize_run(run.path))]
        if not places:
            raise UsageError(f"none of the runs in {root} is like that. Nothing was changed")
    return places


def choose_ask(arguments: argparse.Namespace) -> Ask:
    """How to ask: not at all with ``--yes``, else in the terminal.

    Without a terminal, asking raises ``UsageError``.
    """
    if arguments.yes:
        return lambda question: True

    def ask(question: str) -> bool:
        if not sys.stdin.isatty():
            raise UsageError(f"{question} There is no terminal to ask; give --yes. Nothing was changed")
        return answer_of(input(f"{harmless(question)} [y/N] "))

    return ask


def answer_of(text: str) -> bool:
    """Whether an answer means yes."""
    return text.strip().lower() in ("y", "yes")


def prune_runs(
    console: Console,
    root: str,
    places: Sequence[Place],
    keep: Sequence[str],
    ask: Ask,
    dry_run: bool = False,
    named: set[str] | frozenset[str] = frozenset(),
) -> None:
    """Say what would go, ask, delete. A run at work is skipped and said so, unless it is one of the ``named``."""
    links = find_links(root)
    plans: list[Prune] = []
    for run in [run for place in places for run in runs_of(root, place)]:
        try:
            refuse_live(root, run)
            plans.append(plan_prune(root, run, keep, links))
        except (RunConflict, DataError) as error:
            if run.name in named:
                raise
            say(console, f"left out: {error}", "yellow")
    plans = [plan for plan in plans if plan.steps or plan.leftovers]
    for plan in plans:
        steps = ", ".join(map(str, plan.steps)) or "no checkpoint"
        left = f", leftovers {', '.join(plan.leftovers)}" if plan.leftovers else ""
        kept = ", ".join(f"{step} ({why})" for step, why in plan.kept.items())
        line = f"{plan.run.name}: {steps}{left}: {show_bytes(plan.freed_bytes)}; kept: {kept or 'nothing'}"
        say(console, line)
    count, freed = sum(len(plan.steps) for plan in plans), sum(plan.freed_bytes for plan in plans)
    what = f"{counted(count, 'checkpoint')} of {counted(len(plans), 'run')}, {show_bytes(freed)}"
    if not plans:
        console.print("there is nothing to prune")
    elif _may_delete(console, what, ask, dry_run):
        for plan in plans:
            prune(root, plan)
        say(console, f"deleted {what}")


def delete_steps(
    console: Console, root: str, place: Place, steps: Sequence[int], ask: Ask, force: bool, dry_run: bool
) -> None:
    """Say which checkpoints of a run would go, ask, delete.

    Raises:
        RunConflict: a process works in the run, or a checkpoint is needed; nothing was changed.
    """
    refuse_live(root, place)
    plan, best = plan_steps(root, place, steps, find_links(root), force=force), best_step(place.path / "checkpoints")
    named = ", ".join(f"{step} (best)" if step == best else str(step) for step in plan.steps)
    what = f"{counted(len(plan.steps), 'checkpoint')} of {place.name}, step {named}, {show_bytes(plan.freed_bytes)}"
    if best in plan.steps:
        say(console, f"{place.name}: {best} is the best checkpoint; the run's name means its newest one without it")
    if _may_delete(console, what, ask, dry_run):
        prune(root, plan)
        say(console, f"deleted {what}")


def _may_delete(console: Console, what: str, ask: Ask, dry_run: bool) -> bool:
    """Whether to delete it; says so where not."""
    if not dry_run and ask(f"Delete {what}?"):
        return True
    say(console, f"would delete {what}; nothing was changed" if dry_run else "nothing was changed")
    return False


def delete_runs(
    console: Console, root: str, places: Sequence[Place], ask: Ask, *, force: bool = False, dry_run: bool = False
) -> None:
    """Say what would go, ask, delete.

    Raises:
        RunConflict: a process works in one of them, or runs that stay stand on them; nothing was changed.
    """
    above = {place.name for place in places if place.is_comparison}
    places = [place for place in places if place.name.partition("/")[0] not in above or place.name in above]
    for place in places:
        refuse_live(root, place)
    used = check_unused(root, places)
    if used and not force:
        lines = "\n".join(f"  {link.child}: its {link.role} is {describe_link(link)}" for link in used[:NUM_SHOWN])
        more = f"\n  and {len(used) - NUM_SHOWN} more" if len(used) > NUM_SHOWN else ""
        raise RunConflict(
            f"other runs were trained from or with what would go:\n{lines}{more}\n"
            "They can then no longer be resumed, nor loaded if they are adapters. Nothing was changed; name them as "
            "well, or delete it all the same with --force"
        )
    total = 0
    for place in places:
        size, line = describe(root, place)
        total += size
        say(console, line)
    what = f"{counted(len(places), 'comparison' if above else 'run')}, {show_bytes(total)}"
    if _may_delete(console, what, ask, dry_run):
        freed = sum(delete(root, place) for place in places)
        freed += sum(finish_deletions(root).values())
        say(console, f"deleted {what}" if freed == total else f"deleted, {show_bytes(freed)} freed")


def describe(root: str, place: Place) -> tuple[int, str]:
    """(bytes, one line) about what would be deleted."""
    runs = [summarize_run(run.path) for run in runs_of(root, place)]
    size = disk_bytes(place.path)
    if place.is_comparison:
        return size, f"{place.name}: a comparison with {len(runs)} runs, {show_bytes(size)}"
    run = runs[0]
    told = (
        "" if run.headline is None or run.value is None else f", {run.headline.tell(run.headline.only(run.held_out))}"
    )
    tags = f", tagged {' '.join(run.tags)}" if run.tags else ""
    return size, f"{place.name}: {run.state} at step {run.step} of {run.steps}{told}{tags}, {show_bytes(size)}"


def finish(console: Console, root: str, ask: Ask, dry_run: bool) -> int:
    """Go on with deletions that were cut off."""
    left = unfinished_deletions(root)
    for name, size in left.items():
        say(console, f"{Path(root) / name}: {show_bytes(size)}")
    what = f"what {counted(len(left), 'deletion')} left when cut off, {show_bytes(sum(left.values()))}"
    if _may_delete(console, what, ask, dry_run):
        finish_deletions(root)
        say(console, f"deleted {what}")
    return 0


def export_to(
    console: Console, root: str, place: Place, target: str, weights: Weights | None = None, merge: bool = False
) -> None:
    """Export, and say what is there now."""
    done = export_run(root, place.path, target, weights=weights, merge=merge)
    what = "no weights" if done.step is None else f"the weights after step {done.step}"
    line = f"{done.target}: {what}, {done.num_files} files, {show_bytes(done.num_bytes)}"
    say(console, line)
    for notice in done.notices:
        say(console, f"note: {notice}", "yellow")


def resume(root: str, place: Place, steps: int | None = None, quiet: bool = False, accept_changes: bool = False) -> int:
    """Continue a run as `posttrain train` with its stored recipe would; returns the exit code.

    Raises:
        RunConflict: a process works in it.
    """
    from posttrain.commands.interpret.sae import run_sae_train
    from posttrain.commands.train import TrainRequest, run_train

    refuse_live(root, place)
    is_dictionary = "dictionary" in RunDirectory(place.path).read_recipe()
    if not is_dictionary:
        try:
            read_run_recipe(place.path).resolve(to_read=True)
        except RecipeError:
            refuse_other_version(RunDirectory(place.path))
            raise
    run = run_sae_train if is_dictionary else run_train
    recipe, folder = RunDirectory(place.path).recipe_path, place.path
    overrides = [] if steps is None else [("train.steps", str(steps))]
    return run(
        TrainRequest(
            str(recipe), overrides, str(folder.parent), folder.name, accept_changes=accept_changes, quiet=quiet
        )
    )
