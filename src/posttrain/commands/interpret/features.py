"""``posttrain sae features``: what the features of a dictionary stand for, as one page. Imports little at first."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.commands.options import naturals, new_place, positive
from posttrain.errors import UsageError

EPILOG = """\
one page that needs nothing else, and the same as JSON beside it:
  posttrain sae features runs/tiny-sae
  posttrain sae features runs/tiny-sae --features 3,17 --contexts 40 --out features/two.html
  posttrain sae features some-dictionary --activations activations/stories --model runs/tiny-grpo
a feature that looks interesting can be tried out:
  posttrain generate tiny --sae runs/tiny-sae --steer 3=4 --ablate 17
"""
PAGE, SOME = "features.html", "features-some.html"  # so that addresses in the page of all features stay


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which dictionary, over which rows, and what is shown of it."""
    parser.usage = "posttrain sae features RUN_OR_DICTIONARY_FOLDER [options]"
    parser.epilog = EPILOG
    parser.add_argument("dictionary", metavar="RUN_OR_DICTIONARY_FOLDER", help="a run of `sae train`, or a folder")
    parser.add_argument("--activations", metavar="FOLDER", help="rows to read (default: what the run was trained on)")
    parser.add_argument("--source", metavar="NAME", help="model, base, post or difference (default: the dictionary's)")
    parser.add_argument("--model", metavar="NAME", help="for tokens and logit lens (default: the dictionary's)")
    parser.add_argument("--no-lens", action="store_true", help="leave out the logit lens; the model is not loaded")
    parser.add_argument("--features", type=naturals, metavar="1,2,3", help="only these (default: all)")
    parser.add_argument("--contexts", type=positive, default=10, metavar="N", help="of each feature (default: 10)")
    parser.add_argument(
        "--out",
        type=new_place,
        metavar="FILE",
        help="the page (default: features.html beside the dictionary, or features-some.html for --features)",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def run_sae_features(arguments: argparse.Namespace) -> int:
    """Read all rows once, and write the page with its JSON beside it."""
    from rich.progress import Progress

    from posttrain.commands.console import open_console
    from posttrain.commands.interpret.steering import find_dictionary
    from posttrain.interpret.features.features import write_features
    from posttrain.interpret.features.reading import default_activations, read_features
    from posttrain.reports.features import render_features
    from posttrain.reports.page import write_html
    from posttrain.runs.models import find_source
    from posttrain.store.durable import storage_errors
    from posttrain.untrusted import guard_output

    console = open_console()
    place = find_dictionary(arguments.dictionary, arguments.runs_dir)
    name = PAGE if arguments.features is None else SOME
    page = Path(arguments.out) if arguments.out else (place.run or place.folder) / name
    if page.suffix != ".html":
        raise UsageError(
            f"--out {page}: this is the page, so give a name that ends in .html; the JSON stands beside it"
        )
    with storage_errors("page", page):
        page.parent.mkdir(parents=True, exist_ok=True)
    with Progress(console=console, transient=True, disable=arguments.quiet or not console.is_terminal) as progress:
        guard_output()
        bar = progress.add_task("reading", total=None)
        report = read_features(
            arguments.dictionary,
            place.folder,
            arguments.activations or default_activations(place.folder, place.run),
            lambda name: find_source(name, arguments.runs_dir).path,
            model=arguments.model,
            source=arguments.source,
            features=arguments.features,
            contexts=arguments.contexts,
            with_lens=not arguments.no_lens,
            observe=lambda done, total: progress.update(bar, completed=done, total=total),
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
