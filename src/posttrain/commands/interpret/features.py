"""``posttrain sae features``: the features of a dictionary as one page. Imports little at first."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.commands.options import Options, naturals, new_place, option, positive
from posttrain.errors import UsageError

EPILOG = """\
one page that needs nothing else, and the same as JSON in the same folder; a feature can be tried out:
  posttrain sae features runs/tiny-sae --features 3,17 --contexts 40 --out features/two.html
  posttrain sae features some-dictionary --activations activations/stories --model runs/tiny-grpo
  posttrain generate tiny --sae runs/tiny-sae --steer 3=4,17=off
"""
PAGE, SOME = "features.html", "features-some.html"  # so that addresses in the page of all features stay


OPTIONS = Options(
    option("dictionary", metavar="RUN_OR_DICTIONARY_FOLDER", help="a run of `sae train`, or a folder"),
    option("--activations", metavar="FOLDER", help="rows to read (default: what the run was trained on)"),
    option("--source", metavar="NAME", help="model, base, post or difference (default: the dictionary's)"),
    option("--model", metavar="NAME", help="for tokens and logit lens (default: the dictionary's)"),
    option("--no-lens", action="store_true", help="leave out the logit lens; the model is not loaded"),
    option("--features", type=naturals, metavar="1,2,3", help="only these (default: all)"),
    option("--contexts", type=positive, default=10, metavar="N", help="of each feature (default: 10)"),
    option(
        "--out", type=new_place, metavar="FILE",
        help="the page (default: features.html in the run, or features-some.html for --features)",
    ),
    option("--quiet", action="store_true", help="print nothing but errors"),
    usage="posttrain sae features RUN_OR_DICTIONARY_FOLDER [options]",
    epilog=EPILOG,
)  # fmt: skip


def run_sae_features(arguments: argparse.Namespace) -> int:
    """Read all rows once, and write the page with its JSON."""
    from posttrain.commands.console import open_console
    from posttrain.commands.interpret.steering import find_sae
    from posttrain.interpret.features.features import default_activations, read_features, write_features
    from posttrain.reports.features import render_features
    from posttrain.reports.page import write_html
    from posttrain.runs.models import find_source
    from posttrain.store.durable import storage_errors

    console = open_console()
    folder, run = find_sae(arguments.dictionary, arguments.runs_dir)
    name = PAGE if arguments.features is None else SOME
    page = Path(arguments.out) if arguments.out else (run or folder) / name
    if page.suffix != ".html":
        raise UsageError(f"--out {page}: this is the page, so give a name that ends in .html; the JSON is next to it")
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
