"""Where the parts of a sweep stand, and whether its folder may be gone on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.errors import RunConflict
from posttrain.runs.directory import refuse_live_folder, wait_for_end
from posttrain.store.durable import storage_errors
from posttrain.store.links import refuse_links
from posttrain.sweeps.plan import Plan, Standing

NUM_CONFLICTS_SHOWN = 3


def standings(plan: Plan) -> dict[str, Standing]:
    """Where each part stands, by name.

    Raises:
        RunConflict: some belong to another recipe, or to a process that does not end, or stand on weights that are
            gone; the message says which.
    """
    working = wait_for_end(part.folder for part in plan.parts)
    standing = {part.name: part.standing for part in plan.parts}
    begun = [part for part in plan.parts if standing[part.name] != "new"]
    conflicts = [conflict for part in begun if (conflict := part.conflict()) is not None]
    for part in begun:
        lost = [name for name in part.needs if standing[name] != "finished"]
        if lost:
            conflicts.append(f"{part.folder}: made from an earlier {lost[0]}, which is gone or not finished")
    busy = [f"{folder}: another process is working in it ({process})" for folder, process in working.items()]
    _refuse(plan, busy, conflicts)
    return standing


def _refuse(plan: Plan, busy: Sequence[str], conflicts: Sequence[str]) -> None:
    """Raises RunConflict if there is any of it. Nobody is told to delete what is at work."""
    problems = busy or conflicts
    if not problems:
        return
    more = len(problems) - NUM_CONFLICTS_SHOWN
    shown = "\n".join(problems[:NUM_CONFLICTS_SHOWN]) + (f"\nand {more} more." if more > 0 else "")
    remedy = "Wait for it or stop it; the same command then goes on. Or: " if busy else ""
    otherwise = "" if busy else f", or delete these {plan.parts_are} first"
    raise RunConflict(
        f"{shown}\nNothing was changed. {remedy}{plan.verb} under another name with --run NAME{otherwise}"
    )


def prepare_folder(plan: Plan) -> None:
    """Make the sweep's directory, or accept the one that is there.

    Raises:
        RunConflict: the folder holds something else, or a part of another sweep; nothing was changed.
    """
    folder = plan.folder
    if folder.exists() and not folder.is_dir():
        raise RunConflict(f"{folder}: this is a file, not a folder. Choose another name with --run NAME")
    if folder.is_dir() and not (folder / plan.file_name).is_file():
        others = [item.name for item in folder.iterdir() if not item.name.startswith((".lock", ".tmp-"))]
        if others:
            raise RunConflict(
                f"{folder}: this folder holds something else than a {plan.what}. Nothing was changed; choose another "
                "name with --run NAME"
            )
    refuse_live_folder(folder)
    standings(plan)
    refuse_links(folder)
    with storage_errors(plan.what, folder):
        for part in plan.parts:
            part.folder.parent.mkdir(parents=True, exist_ok=True)


def problems(plan: Plan, failures: Mapping[str, str]) -> dict[str, str]:
    """Why parts are not finished, by name: from now (``failures``), or from an earlier attempt."""
    told = dict(failures)
    for part in plan.parts:
        status = part.status
        if status is not None and status.state == "failed":
            told.setdefault(part.name, status.message or "no reason was recorded")
    return told
