"""``posttrain sae diff``: what training changed inside a model, as numbers and one page."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from posttrain.commands.console import Text, open_console
from posttrain.commands.progress import choose_progress, show_duration
from posttrain.errors import INTERRUPTED, DataError, RunConflict, RunFailure, UsageError
from posttrain.interpret.differences.recipe import Compared, DiffRecipe, load_diff_recipe
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.recipes.sections import ModelSection
from posttrain.runs.directory import RunDirectory, check_run_name, flatten, is_live, name_of_recipe, run_names
from posttrain.store.durable import replace_file, storage_errors
from posttrain.untrusted import harmless_json

RECIPE, RESULTS, REPORT = "changes.yaml", "diff.json", "report.html"
DEFAULT_RUNS = "runs"


class _Stopped(Exception):
    """A training was interrupted; everything so far is saved."""


def run_sae_diff(arguments: argparse.Namespace) -> int:
    """Find or train both models, compare them, write ``diff.json`` and ``report.html``."""
    if len(arguments.models) > 2:
        raise UsageError("give BASE and POST, or one recipe such as tiny/what-did-rl-change")
    recipe = load_diff_recipe(arguments.models, _overrides(arguments)).resolve()
    if arguments.dry_run:
        print(f"# {' '.join(arguments.models)}, resolved; fingerprint {recipe.fingerprint()}")
        print(recipe.to_yaml().rstrip())
        return 0
    started = time.monotonic()
    console = open_console()
    say: Callable[[str], Any] = (
        (lambda line: console.print(Text(line, style="dim"), soft_wrap=True))
        if not arguments.quiet
        else lambda line: None
    )
    root = Path(arguments.runs_dir)
    folder = root / _folder_name(arguments)
    try:
        base = find_model(recipe.base, root, None, arguments.quiet, say)
        post = find_model(recipe.post, root, base, arguments.quiet, say)
    except _Stopped:
        return INTERRUPTED
    recipe = recipe.model_copy(update={"base": Compared(name=base), "post": Compared(name=post)})
    from posttrain.interpret.differences.diff import compare
    from posttrain.reports.interpret.diff_report import findings, render_diff

    setting, recipe = _setting(recipe, root, arguments.yes)
    is_new, is_new_root = not folder.exists(), not root.exists()
    _claim(folder, recipe)
    try:
        found = _about(recipe, setting.sections, arguments) | compare(recipe, setting, folder, say)
    except UsageError:
        with suppress(OSError):  # what was worked out before stays
            if is_new and [item.name for item in folder.iterdir()] == [RECIPE]:
                shutil.rmtree(folder)
            if is_new_root:
                root.rmdir()
        raise
    found["seconds"]["all"] = round(time.monotonic() - started, 1)
    replace_file(folder / RESULTS, harmless_json(json.dumps(found, indent=1, ensure_ascii=False)).encode() + b"\n")
    replace_file(folder / REPORT, render_diff(found).encode())
    if not arguments.quiet:
        for line in findings(found):
            console.print(Text(line), soft_wrap=True)
        console.print(Text(f"{show_duration(time.monotonic() - started)} in all", style="dim"))
    console.print(Text(f"report: {folder / REPORT}"), soft_wrap=True)
    return 0


def _overrides(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Keys of the recipe; the command's own options are short for some of them."""
    found = list(arguments.overrides)
    if arguments.site is not None and arguments.layer is None:
        raise UsageError("--site: say which layer with --layer")
    if arguments.layer is not None:
        found.append(("changes.site", f"{arguments.site or 'resid'}.{arguments.layer}"))
    if arguments.seeds is not None:
        found.append(("changes.seeds", str(arguments.seeds)))
    return found


def _folder_name(arguments: argparse.Namespace) -> str:
    if arguments.run is not None:
        return check_run_name(arguments.run)
    if len(arguments.models) == 1:
        return name_of_recipe(arguments.models[0])
    labels = [re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name).strip("-.") for name in arguments.models]
    return f"diff-{labels[0]}-{labels[1]}"


def find_model(compared: Compared, root: Path, base: str | None, quiet: bool, say: Callable[[str], Any]) -> str:
    """The model of that name, or a finished run of that recipe under ``root``, which is trained where there is none.

    ``base``: what the recipe starts from, if it is to start from the base.

    Raises:
        RunFailure: the training failed.
    """
    if compared.recipe is None:
        assert compared.name is not None, "the section's validator"
        return compared.name
    changes = [("model.name", json.dumps(base))] if base is not None and compared.from_base else []
    recipe = load_recipe(compared.recipe, changes).resolve()
    finished, unfinished = find_runs(recipe, root)
    if finished is not None:
        say(f"{compared.recipe}: a finished run is there, {finished}")
        return str(finished)
    from posttrain.commands.summary import write_summary
    from posttrain.runs.launch import launch

    say(f"{compared.recipe}: {'going on with ' + str(unfinished) if unfinished else 'no finished run; training one'}")
    with choose_progress(compared.recipe, quiet) as progress:
        result = launch(
            recipe,
            root=root,
            name=unfinished.name if unfinished is not None else None,
            recipe_name=compared.recipe,
            resume=unfinished is not None,
            observer=progress,
        )
    if result.reason != "finished":
        raise _Stopped
    write_summary(result.folder)
    return str(result.folder)


def find_runs(recipe: Recipe, root: Path) -> tuple[Path | None, Path | None]:
    """The newest finished run of exactly this recipe, and the newest that could go on."""
    found: dict[str, tuple[float, Path]] = {}
    for name in run_names(root):
        run = RunDirectory(root / name)
        try:
            if "model" not in run.read_recipe() or run.changed_keys(recipe):
                continue
            status = run.read_status()
        except DataError:  # a damaged run is not this one; `posttrain runs` reports it
            continue
        state = status.state if status is not None else "unfinished"
        if state != "finished" and is_live(run.folder):
            raise RunFailure(f"{run.folder}: another process is training this recipe; wait for it")
        key = "finished" if state == "finished" else "unfinished"
        found[key] = max(found.get(key, (0.0, run.folder)), (run.recipe_path.stat().st_mtime, run.folder))
    return tuple(found[key][1] if key in found else None for key in ("finished", "unfinished"))  # type: ignore[return-value]


def _setting(recipe: DiffRecipe, root: Path, allow_large: bool) -> tuple[Any, DiffRecipe]:
    """What is compared, with the task, template and site that the recipe leaves to the run filled in."""
    from posttrain.engines.models import complete_template, grader_for, open_model
    from posttrain.interpret.activations.loading import check_layers, read_config
    from posttrain.interpret.differences.causal import Subject
    from posttrain.interpret.differences.diff import Setting
    from posttrain.runs.models import find_source
    from posttrain.tasks.base import build_task, choose_task

    assert recipe.base.name is not None, "found or trained by now"
    assert recipe.post.name is not None, "found or trained by now"
    sources = {"base": find_source(recipe.base.name, root), "post": find_source(recipe.post.name, root)}
    for source in sources.values():
        source.refuse_scorer()
    post = sources["post"]
    task_word = choose_task(recipe.task, post.name, post.recipe)
    template = complete_template(recipe.template, post) or post.template
    site = recipe.changes.site
    if site is None:
        site = f"resid.{max(1, read_config(post.path).get_text_config().num_hidden_layers // 2)}"
    for source in sources.values():
        check_layers(source.path, [site])
    changes = recipe.changes.model_copy(update={"site": site})
    recipe = recipe.model_copy(update={"task": task_word, "template": template, "changes": changes})
    grader = grader_for(post, template)

    def open_subject(name: str) -> Subject:
        model = open_model(sources[name], template)
        own = (model.engine, model.tokenizer, grader, model.context_tokens, model.model)
        return Subject(*own, recipe.changes.max_tokens or post.max_tokens, model.label)

    sections = {name: source.section() for name, source in sources.items()}
    return Setting(sections, open_subject, build_task(task_word, "task"), site, allow_large), recipe


def _claim(folder: Path, recipe: DiffRecipe) -> None:
    """Make the folder this comparison's, or accept that it is.

    Raises:
        RunConflict: it holds something else, or another comparison; nothing was changed.
    """
    path = folder / RECIPE
    if path.is_file():
        stored, given = flatten(yaml.safe_load(path.read_text(encoding="utf-8"))), flatten(recipe.dump())
        changed = sorted(key for key in {**stored, **given} if stored.get(key) != given.get(key))
        if changed:
            shown = ", ".join(f"{key} ({stored.get(key)!r} there, {given.get(key)!r} now)" for key in changed[:3])
            raise RunConflict(
                f"{folder}: this comparison was made by another recipe; it differs in {shown}. Nothing was changed; "
                "choose another name with --run NAME"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunConflict(f"{folder} holds something else. Nothing was changed; choose another name with --run NAME")
    with storage_errors("the comparison", folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, recipe.to_yaml().encode())


def _about(recipe: DiffRecipe, sections: dict[str, ModelSection], arguments: argparse.Namespace) -> dict[str, Any]:
    """What was compared, and the command that does it again."""
    words = ["posttrain", "sae", "diff", *arguments.models]
    for key, value in _overrides(arguments):
        words += [f"--{key}", value]
    words += ["--run", arguments.run] if arguments.run is not None else []
    words += ["--runs-dir", arguments.runs_dir] if arguments.runs_dir != DEFAULT_RUNS else []
    return {
        "title": "What did training change?",
        "description": recipe.description,
        "base": sections["base"].name,
        "post": sections["post"].name,
        "recipe": recipe.dump(),
        "fingerprint": recipe.fingerprint(),
        "command": shlex.join(words),
    }
