"""The command line of ``posttrain runs``. Only the standard library is imported here, as in ``cli``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from posttrain.commands.options.argument_types import ACCEPT_HELP, natural, new_place, positive

EPILOG = """\
a run is named by its folder under --runs-dir; one of a comparison as sweep-ppo/cells/ppo-seed0:
  posttrain runs --state finished --sort accuracy
  posttrain runs compare tiny-grpo tiny-grpo-2
  posttrain runs tag tiny-grpo +good -unsure
  posttrain runs prune --all --keep best,last --dry-run
  posttrain runs delete 'test-*'
  posttrain runs delete tiny-grpo --step 100
  posttrain runs export tiny-grpo --to exported/tiny-grpo
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``runs`` itself; its actions have options of their own."""
    parser.epilog = EPILOG


def add_list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="PATTERN", nargs="*", help="only runs whose name fits, such as 'tiny-*'")
    _add_filters(parser)
    parser.add_argument(
        "--sort",
        default="created",
        metavar="KEY",
        help="created, updated, name, state, step, accuracy, headline, size, or a metric of the last step "
        "(default: created)",
    )
    parser.add_argument(
        "--limit", type=natural, metavar="N", help="at most so many of a table, the last of them; 0: all (default: 50)"
    )
    parser.add_argument("--cells", action="store_true", help="the runs of comparisons as well")
    parser.add_argument("--families", action="store_true", help="as trees: runs under the run they were trained from")


def add_show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="the run or comparison")


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="two runs or more")


def add_tag_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("tags", metavar="TAG", nargs="*", help="+good or good adds, -good takes away; none: show")


def add_prune_options(parser: argparse.ArgumentParser) -> None:
    _add_removal(parser)
    parser.add_argument("--all", action="store_true", help="every run, those of comparisons included")
    parser.add_argument(
        "--keep",
        default="best,last",
        metavar="WHICH",
        help="best (kept in any case), last, a number of newest ones (default: best,last)",
    )


def add_delete_options(parser: argparse.ArgumentParser) -> None:
    _add_removal(parser)
    parser.add_argument(
        "--step", type=natural, metavar="N", action="append", help="only this checkpoint of one run; may be repeated"
    )
    parser.add_argument("--force", action="store_true", help="even if other runs were trained from it or with it")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--to", type=new_place, metavar="PLACE", required=True, help="a new folder, or a file that ends in .tar.gz"
    )
    parser.add_argument(
        "--weights", choices=("best", "last", "none"), help="which checkpoint (default: best, else last)"
    )
    parser.add_argument(
        "--merge", action="store_true", help="add a LoRA adapter to its base: a model that stands alone"
    )


def add_resume_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--steps", type=positive, metavar="N", help="go on to this step (train.steps)")
    parser.add_argument("--accept-changes", action="store_true", help=ACCEPT_HELP)
    parser.add_argument("--quiet", action="store_true", help="no progress, only notices and the result")


def add_manage_options(parser: argparse.ArgumentParser) -> None:
    """None: it asks."""


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the run")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", action="append", default=[], metavar="STATE", help="only runs in this state")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="only runs with this tag")


def _add_removal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="runs or comparisons; patterns such as 'test-*'")
    _add_filters(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def complete_action(arguments: Sequence[str]) -> list[str]:
    """The words behind ``runs`` as argparse is to read them.

    Without an action, ``list`` is meant. Behind ``tag NAME``, ``-good`` is a tag to take away and no option.
    """
    words = list(arguments)
    start = 0
    while start < len(words) and (words[start] == "--traceback" or words[start].startswith("--runs-dir")):
        start += 2 if words[start] == "--runs-dir" else 1
    if start >= len(words) or (words[start].startswith("-") and words[start] not in ("-h", "--help")):
        return [*words[:start], "list", *words[start:]]
    return words[: start + 1] + (_tags_last(words[start + 1 :]) if words[start] == "tag" else words[start + 1 :])


def _tags_last(words: Sequence[str]) -> list[str]:
    options: list[str] = []
    plain: list[str] = []
    following = iter(words)
    for word in following:
        if word.startswith("--") or (word == "-h" and not plain):
            options += [word, *([value] if word == "--runs-dir" and (value := next(following, None)) else [])]
        else:
            plain.append(word)
    return [*options, "--", *plain]
