"""``posttrain sae``: its actions, and ``sae train``. Only the standard library is imported before it runs (``cli``)."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from posttrain.commands.interpret import features, sae_diff
from posttrain.commands.options.argument_types import ACCEPT_HELP
from posttrain.errors import INTERRUPTED

if TYPE_CHECKING:
    from posttrain.commands.train import TrainRequest
    from posttrain.interpret.dictionaries.recipe import SaeRecipe
    from posttrain.recipes.recipe import Recipe

# The actions of ``posttrain sae``: what each does, and where its body is.
SAE_ACTIONS = {
    "train": "train a sparse autoencoder on activations, by a recipe",
    "features": "what the features of a sparse autoencoder stand for, as one page",
    "diff": "what training changed: two models seen through the same features",
}
SAE_TRAIN_EPILOG = """\
any key of the recipe is an option; several sites are recorded in one pass, for a dictionary each:
  posttrain sae train tiny/sae --dictionary.k 8 --train.steps 400
  posttrain sae train tiny/sae --dictionary l1 --dictionary.coefficient 0.01
  posttrain sae train tiny/sae --activations.site resid.1,resid.2
  posttrain sae train mine.yaml --activations.folder activations/both --activations.source difference
"""


def add_options(
    sae: argparse.ArgumentParser, common: argparse.ArgumentParser, places: argparse.ArgumentParser
) -> dict[str, argparse.ArgumentParser]:
    """Give ``sae`` its actions; returns their parsers as ``sae train``."""
    actions = sae.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    made = {
        name: actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common, places],
            allow_abbrev=False,
        )
        for name, text in SAE_ACTIONS.items()
    }
    _add_train_options(made["train"])
    features.add_options(made["features"])
    sae_diff.add_options(made["diff"])
    return {f"sae {name}": parser for name, parser in made.items()}


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "posttrain sae train RECIPE [options] [--section.key value ...]"
    parser.epilog = SAE_TRAIN_EPILOG
    parser.add_argument("recipe", metavar="RECIPE", help="tiny/sae, sae-qwen3-14b-layer20, or a YAML file")
    parser.add_argument("--run", metavar="NAME", help="name of the run directory (default: the recipe's name)")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    parser.add_argument("--accept-changes", action="store_true", help=ACCEPT_HELP)
    parser.add_argument("--yes", action="store_true", help="record activations without asking, however large they are")
    parser.add_argument("--dry-run", action="store_true", help="check and print the resolved recipe; train nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress, only notices and the result")


def run_sae_train(arguments: argparse.Namespace | TrainRequest) -> int:
    """Check the recipe, record activations if it says so, train, measure, and write the dictionary, or one a site."""
    from posttrain.interpret.dictionaries.recipe import load_sae_recipe
    from posttrain.runs.directory import name_of_recipe, run_names

    recipe = load_sae_recipe(arguments.recipe, arguments.overrides).resolve()
    if arguments.dry_run:
        print(f"# {arguments.recipe}, resolved; fingerprint {recipe.fingerprint()}")
        print(recipe.to_yaml().rstrip())
        return 0
    recipes = recipe.each_site()
    if len(recipes) == 1:
        return _train(arguments, recipes[0], arguments.run, arguments.resume)
    base = arguments.run or name_of_recipe(arguments.recipe)
    for each in recipes:
        name = f"{base}-{each.activations.one_site}"
        code = _train(arguments, each, name, arguments.resume and name in run_names(arguments.runs_dir))
        if code:
            return code
    return 0


def _train(arguments: argparse.Namespace | TrainRequest, recipe: SaeRecipe, name: str | None, resume: bool) -> int:
    from posttrain.commands.progress import choose_progress, show_duration
    from posttrain.interpret.dictionaries.training import DICTIONARY, train_run
    from posttrain.runs.launch import launch

    with choose_progress(arguments.recipe, arguments.quiet) as progress:
        result = launch(
            cast("Recipe", recipe),  # a run directory asks no more of a recipe than this one has
            root=arguments.runs_dir,
            name=name,
            recipe_name=arguments.recipe,
            resume=resume,
            accept_changes=arguments.accept_changes and resume == arguments.resume,
            observer=progress,
            train=partial(train_run, allow_large=arguments.yes),
        )
    if not arguments.quiet:
        print(f"{result.step} steps, {show_duration(progress.history.elapsed())}")
        _print_results(result.folder)
    print(f"run:        {result.folder}")
    if not arguments.quiet and result.reason == "finished":
        print(f"dictionary: {result.folder / DICTIONARY}")
    return 0 if result.reason == "finished" else INTERRUPTED


def _print_results(folder: Path) -> None:
    from posttrain.interpret.dictionaries.training import RESULTS

    path = folder / RESULTS
    if not path.is_file():
        return
    results = json.loads(path.read_text(encoding="utf-8"))
    held_out = results["held_out"]
    print(
        f"held out:   FVU {held_out['fvu']:.4f} · L0 {held_out['l0']:.1f} · {held_out['silent']:.1%} of the features "
        f"silent · {held_out['dense']:.1%} active on more than a tenth of the rows"
    )
    if "recovered" in results:
        loss = results["recovered"]
        print(
            f"in place:   CE {loss['ce']:.3f} becomes {loss['ce_spliced']:.3f} (zeros {loss['ce_zero']:.3f}, mean "
            f"{loss['ce_mean']:.3f}): {loss['ce_recovered_zero']:.1%} recovered, {loss['ce_recovered_mean']:.1%} of "
            "what the mean loses"
        )
