"""``posttrain sae train``, ``sae features`` and ``sae diff``. Imports little at first (``cli``)."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.commands.options import ACCEPT_HELP, CommandOptions, natural, naturals, new_place, option, positive
from posttrain.errors import INTERRUPTED, UsageError

if TYPE_CHECKING:
    from posttrain.interpret.differences.changes_recipe import Compared, DiffRecipe
    from posttrain.interpret.saes.sae_recipe import SaeRecipe
    from posttrain.runs.launch import RunStart

REPORT = "report.html"
PAGE, SOME = "features.html", "features-some.html"  # keeps page addresses stable across all features
TRAIN_EPILOG = """\
all recipe keys are options; to reuse recorded activations, give the folder:
  posttrain sae train tiny/sae --dictionary l1 --dictionary.coefficient 0.01 --train.steps 400
  posttrain sae train mine.yaml --activations.folder activations/both --activations.source difference
"""
FEATURES_EPILOG = """\
writes a self-contained page, plus JSON; try features out with generate:
  posttrain sae features runs/tiny-sae --features 3,17 --contexts 40 --out features/two.html
  posttrain sae features some-dictionary --activations activations/stories --model runs/tiny-grpo
  posttrain generate tiny --sae runs/tiny-sae --steer 3=4,17=off
"""
DIFF_EPILOG = """\
all recipe keys are options; repeating a command reuses finished work:
  posttrain sae diff runs/tiny-sft runs/tiny-grpo --layer 3 --changes.seeds 5
  posttrain sae diff tiny/what-did-rl-change --changes.causal.measure accuracy --run by-accuracy
"""


_YES = option("--yes", action="store_true", help="record activations of any size without asking")
TRAIN_OPTIONS = CommandOptions(
    option("recipe", metavar="RECIPE", help="tiny/sae, sae-qwen3-14b-layer20, or a YAML file"),
    option("--run", metavar="NAME", help="run directory name (default: recipe name)"),
    option("--resume", action="store_true", help="continue from the newest checkpoint"),
    option("--accept-changes", action="store_true", help=ACCEPT_HELP),
    _YES,
    option("--dry-run", action="store_true", help="check and print the resolved recipe; train nothing"),
    option("--quiet", action="store_true", help="hide progress; print only notices and results"),
    usage="posttrain sae train RECIPE [options] [--section.key value ...]",
    epilog=TRAIN_EPILOG,
)
FEATURES_OPTIONS = CommandOptions(
    option("dictionary", metavar="RUN_OR_DICTIONARY_FOLDER", help="a `sae train` run, or a folder"),
    option("--activations", metavar="FOLDER", help="rows to read (default: the training activations)"),
    option("--source", metavar="NAME", help="model, base, post or difference (default: the dictionary's)"),
    option("--model", metavar="NAME", help="for tokens and logit lens (default: the dictionary's)"),
    option("--no-lens", action="store_true", help="skip the logit lens, without loading the model"),
    option("--features", type=naturals, metavar="1,2,3", help="feature numbers (default: all)"),
    option("--contexts", type=positive, default=10, metavar="N", help="contexts per feature (default: 10)"),
    option(
        "--out", type=new_place, metavar="FILE",
        help="output page (default: features.html inside the run; features-some.html with --features)",
    ),
    option("--quiet", action="store_true", help="print only errors"),
    usage="posttrain sae features RUN_OR_DICTIONARY_FOLDER [options]",
    epilog=FEATURES_EPILOG,
)  # fmt: skip
DIFF_OPTIONS = CommandOptions(
    option(
        "models", metavar="MODEL_OR_RUN", nargs="+",
        help="models or runs before and after training, or a recipe such as tiny/what-did-rl-change",
    ),
    option("--layer", type=natural, metavar="L", help="layer to compare (default: middle layer)"),
    option("--run", metavar="NAME", help="output folder name in the runs directory"),
    _YES,
    option("--dry-run", action="store_true", help="check and print the resolved recipe; do nothing"),
    option("--quiet", action="store_true", help="hide progress; print only the report path"),
    usage="posttrain sae diff BASE POST | RECIPE [options] [--section.key value ...]",
    epilog=DIFF_EPILOG,
)  # fmt: skip


def run_sae_train(arguments: argparse.Namespace) -> int:
    """Check the recipe, record activations if it says so, train, measure, and write the dictionary."""
    from posttrain.commands.train import start_of
    from posttrain.interpret.saes.sae_recipe import load_sae_recipe
    from posttrain.runs.directory import check_run_name

    check_run_name(arguments.run or "run")
    recipe = load_sae_recipe(arguments.recipe, arguments.overrides).resolve()
    if arguments.dry_run:
        print(f"# {arguments.recipe}, resolved; fingerprint {recipe.fingerprint()}")
        print(recipe.to_yaml().rstrip())
        return 0
    return train_sae_recipe(recipe, start_of(arguments), quiet=arguments.quiet, allow_large=arguments.yes)


def train_sae_recipe(recipe: SaeRecipe, start: RunStart, *, quiet: bool, allow_large: bool) -> int:
    """Train a dictionary from a checked recipe, print results, and return the exit code."""
    from posttrain.interpret.saes.sae_training import DICTIONARY, RESULTS, train_run
    from posttrain.runs.launch import launch
    from posttrain.terminal.training_progress import choose_progress, show_duration

    with choose_progress(start.recipe_name, quiet) as progress:
        result = launch(recipe, start, observer=progress, train=partial(train_run, allow_large=allow_large))
    is_finished = result.reason == "finished"
    if not quiet:
        print(f"{result.step} steps, {show_duration(progress.elapsed())}")
        if is_finished:
            _print_results(json.loads((result.folder / RESULTS).read_text(encoding="utf-8")))
            print(f"dictionary: {result.folder / DICTIONARY}")
    print(f"run:        {result.folder}")
    if is_finished:
        return 0
    return INTERRUPTED


def _print_results(results: dict[str, Any]) -> None:
    held_out = results["held_out"]
    print(
        f"held out:   FVU {held_out['fvu']:.4f} · L0 {held_out['l0']:.1f} · {held_out['silent']:.1%} of the features "
        f"silent · {held_out['dense']:.1%} active on over 10 % of rows"
    )
    loss = results.get("recovered")
    if loss:
        print(
            f"in place:   CE {loss['ce']:.3f} becomes {loss['ce_spliced']:.3f} (zeros {loss['ce_zero']:.3f}): "
            f"{loss['ce_recovered']:.1%} recovered"
        )


def run_sae_features(arguments: argparse.Namespace) -> int:
    """Read all rows once, and write the page and JSON."""
    from posttrain.commands.interpret.steering import find_sae
    from posttrain.interpret.features.features import default_activations, read_features, write_features
    from posttrain.reports.features_page import render_features
    from posttrain.reports.page import write_html
    from posttrain.runs.models import find_source
    from posttrain.store.durable import storage_errors
    from posttrain.terminal.console import open_console

    console = open_console()
    folder, run = find_sae(arguments.dictionary, arguments.runs_dir)
    if arguments.out:
        page = Path(arguments.out)
    elif arguments.features is None:
        page = (run or folder) / PAGE
    else:
        page = (run or folder) / SOME
    if page.suffix != ".html":
        raise UsageError(f"--out {page}: the page name must end in .html; JSON is written to the same folder")
    with storage_errors("page", page):
        page.parent.mkdir(parents=True, exist_ok=True)
    report = read_features(
        arguments.dictionary,
        folder,
        arguments.activations or default_activations(folder, run),
        lambda name: find_source(name, arguments.runs_dir).path,
        model=arguments.model,
        source=arguments.source,
        features=arguments.features,
        contexts=arguments.contexts,
        with_lens=not arguments.no_lens,
    )
    written = write_features(report, page.with_suffix(".json"))
    write_html(render_features(report), page)
    if not arguments.quiet:
        about = report["about"]
        for notice in about["notices"]:
            console.print(f"note: {notice}")
        console.print(
            f"{about['features_shown']:,} features over {about['rows']:,} rows: {about['active_per_row']:.3g} active "
            f"at a token, {about['silent']:,} silent"
        )
        console.print(f"page: {page}\njson: {written}", soft_wrap=True)
    return 0


def run_sae_diff(arguments: argparse.Namespace) -> int:
    """Find or train both models, compare them, and write ``diff.json`` and ``report.html``."""
    from posttrain.interpret.differences.changes_recipe import Compared, load_diff_recipe
    from posttrain.runs.directory import check_run_name
    from posttrain.terminal.console import Text, open_console, say
    from posttrain.terminal.training_progress import show_duration

    if len(arguments.models) > 2:
        raise UsageError("give BASE and POST, or a recipe such as tiny/what-did-rl-change")
    overrides = list(arguments.overrides)
    if arguments.layer is not None:
        overrides.append(("changes.site", f"resid.{arguments.layer}"))
    check_run_name(arguments.run or "run")
    recipe = load_diff_recipe(arguments.models, overrides).resolve()
    if arguments.dry_run:
        print(f"# {' '.join(arguments.models)}, resolved; fingerprint {recipe.fingerprint()}")
        print(recipe.to_yaml().rstrip())
        return 0
    from posttrain.interpret.differences.comparison import compare_models, prepare_comparison
    from posttrain.reports.differences import findings, render_diff
    from posttrain.runs.models import find_source
    from posttrain.store.durable import replace_file

    started = time.monotonic()
    console = open_console()
    root = Path(arguments.runs_dir)

    def tell(line: str) -> None:
        if not arguments.quiet:
            say(console, line, "dim")

    folder = root / _folder_name(arguments)
    base = find_pair(recipe, root) or find_model(recipe.base, root, None, arguments.quiet, tell)
    if base is None:
        return INTERRUPTED
    post = find_model(recipe.post, root, base, arguments.quiet, tell)
    if post is None:
        return INTERRUPTED
    recipe = recipe.model_copy(update={"base": Compared(name=base), "post": Compared(name=post)})
    source = find_source(base, root)
    other = find_source(post, root)
    work = prepare_comparison(recipe, source, other, folder, tell, allow_large=arguments.yes)
    about = {
        "title": "What did training change?",
        "description": recipe.description,
        "base": source.section().name,
        "post": other.section().name,
        "recipe": work.recipe.dump(),
        "fingerprint": work.recipe.fingerprint(),
        "command": _command_of(arguments, overrides),
    }
    content = compare_models(work, about, started)
    replace_file(folder / REPORT, render_diff(content).encode())
    if not arguments.quiet:
        for line in findings(content):
            say(console, line)
        console.print(Text(f"{show_duration(time.monotonic() - started)} in all", style="dim"))
    say(console, f"report: {folder / REPORT}")
    return 0


def _command_of(arguments: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> str:
    """Build a command line that repeats this comparison."""
    words = ["posttrain", "sae", "diff", *arguments.models]
    for key, value in overrides:
        words += [f"--{key}", value]
    if arguments.run is not None:
        words += ["--run", arguments.run]
    if arguments.runs_dir != "runs":
        words += ["--runs-dir", arguments.runs_dir]
    return shlex.join(words)


def _folder_name(arguments: argparse.Namespace) -> str:
    from posttrain.folders import folder_name
    from posttrain.runs.directory import check_run_name, name_of_recipe

    if arguments.run is not None:
        return check_run_name(arguments.run)
    if len(arguments.models) == 1:
        return name_of_recipe(arguments.models[0])
    labels = [folder_name(Path(name).name) for name in arguments.models]
    return f"diff-{labels[0]}-{labels[1]}"


def find_pair(recipe: DiffRecipe, root: Path) -> str | None:
    """Find the newest finished base run that was used as initial model in a finished post-training run.

    Newer base runs without such a run are skipped. None if no pair exists.
    """
    from posttrain.recipes.recipe import load_recipe
    from posttrain.runs.launch import find_runs, runs_by_recipe

    if recipe.base.recipe is None or recipe.post.recipe is None:
        return None
    finished, _ = runs_by_recipe(load_recipe(recipe.base.recipe, []).resolve(), root)
    for folder in finished:
        began = [("model.name", json.dumps(str(folder)))]
        if find_runs(load_recipe(recipe.post.recipe, began).resolve(), root)[0] is not None:
            return str(folder)
    return None


def find_model(
    compared: Compared, root: Path, base: str | None, quiet: bool, say: Callable[[str], object]
) -> str | None:
    """Find a model by name, or a finished run of a recipe under ``root``; train one if missing.

    ``base``: initial model for the recipe. None if training was interrupted.
    """
    if compared.recipe is None:
        return compared.name
    from posttrain.api.training import write_run_summary
    from posttrain.recipes.recipe import load_recipe
    from posttrain.runs.launch import find_or_train
    from posttrain.terminal.training_progress import choose_progress

    name = compared.recipe
    changes = []
    if base is not None:
        changes.append(("model.name", json.dumps(base)))
    recipe = load_recipe(name, changes).resolve()
    folder, result = find_or_train(
        recipe,
        root=root,
        recipe_name=name,
        observing=lambda: choose_progress(name, quiet),
        say=say,
        summarize=write_run_summary,
    )
    if result is not None and result.reason != "finished":
        return None
    return str(folder)
