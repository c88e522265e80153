"""What a shell may offer behind ``posttrain``: commands, options, recipes, runs, words, keys of a recipe.

The script of a shell asks ``posttrain __complete WORD ...`` for the last of the words. Only the standard library is
imported for that, but for keys and words, which stand in the code.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from posttrain.errors import PosttrainError

ASK = "__complete"
SCRIPTS = {
    "bash": f"""\
# posttrain completion bash >> ~/.bashrc
_posttrain() {{
  mapfile -t COMPREPLY < <("${{COMP_WORDS[0]}}" {ASK} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null)
}}
complete -o default -F _posttrain posttrain
""",
    "zsh": f"""\
# posttrain completion zsh >> ~/.zshrc, below compinit
_posttrain() {{
  local -a offered
  offered=("${{(@f)$("${{words[1]}}" {ASK} "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}")
  if [[ -n "$offered[1]" ]]; then compadd -a offered; else _files; fi
}}
compdef _posttrain posttrain
""",
    "fish": f"""\
# posttrain completion fish > ~/.config/fish/completions/posttrain.fish
complete -c posttrain -a '((commandline -opc)[1] {ASK} (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
_PACKAGE = Path(__file__).parents[2]
_PLAIN = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9._/-]*"
)  # a folder with another name is no run, and might be more to a shell
_OF_RUNS = ("evaluate", "generate", "chat", "studio", "quantize", "serve", "serve-command", "activations")


def add_options(parser: argparse.ArgumentParser) -> None:
    """For which shell."""
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="whose script is printed; its first line says where to")


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script of a shell."""
    print(SCRIPTS[arguments.shell], end="")
    return 0


def complete(words: Sequence[str], parsers: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """What the last word could become, sorted; ``parsers``: of the commands, and of actions such as ``sae train``."""
    *before, current = words or [""]
    command = next((word for word in before if not word.startswith("-")), None)
    if command is None:
        return _fitting(current, [name for name in parsers if " " not in name])
    parser = parsers.get(" ".join(before[:2])) or parsers.get(command)
    if parser is None:
        return []
    if current.startswith("-"):
        options = [name for name in parser._option_string_actions if name.startswith("--")]
        return _fitting(current, options) or _fitting(current, [f"--{key}" for key in _keys(command, before)])
    option = parser._option_string_actions.get(before[-1])
    if option is not None and option.nargs != 0:
        return _fitting(current, option.choices or ())
    actions = [name.removeprefix(f"{command} ") for name in parsers if name.startswith(f"{command} ")]
    return _fitting(current, actions if actions and len(before) == 1 else _positional(command, before, parser))


def answer(words: Sequence[str], parsers: Callable[[str], Mapping[str, argparse.ArgumentParser]]) -> int:
    """Print what ``complete`` finds, a line each; nothing is an error here. ``parsers``: made for a command alone."""
    command = next((word for word in words[:-1] if not word.startswith("-")), "")
    try:
        print("".join(f"{line}\n" for line in complete(words, parsers(command))), end="")
    except PosttrainError:  # a recipe that cannot be read has no keys
        return 1
    return 0


def _fitting(current: str, names: Iterable[str]) -> list[str]:
    return sorted({str(name) for name in names if str(name).startswith(current)})


def _positional(command: str, before: Sequence[str], parser: argparse.ArgumentParser) -> Iterable[str]:
    number = len(before)
    if command in ("train", "sweep"):
        return _recipes(command) if number == 1 else ()
    if command in _OF_RUNS:
        return ["tiny", *_runs(before)]
    if command == "runs":
        return _runs(before)
    if command == "sae":
        return _recipes("sae")
    if command == "recipes" and number > 1:
        return _recipes("")
    if command in ("explain", "data") and number == (1 if command == "explain" else 2):
        return _words("task" if command == "data" else None)
    first = next((action for action in parser._actions if not action.option_strings), None)
    return first.choices or () if first is not None and number == 1 else ()


def _recipes(command: str) -> list[str]:
    """Shipped recipes that a command takes; those of the sweeps are in a folder of that name."""
    folder = _PACKAGE / "recipes"
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    if command == "sweep":
        return names
    if command == "sae":
        return [name for name in names if re.search(r"sae|what-did", name)]
    return [name for name in names if not command or not name.startswith("sweep/")]


def _runs(before: Sequence[str]) -> list[str]:
    """The runs below ``--runs-dir``."""
    root = next((value for option, value in pairwise(before) if option == "--runs-dir"), "runs")
    try:
        names = [item.name for item in os.scandir(root) if os.path.exists(os.path.join(item.path, "recipe.yaml"))]
    except OSError:
        return []
    return [name for name in names if _PLAIN.fullmatch(name)]


def _words(kind: str | None) -> list[str]:
    from posttrain.registry import HOMES

    homes = [home for own, home in HOMES.items() if kind in (None, own)]
    return [name for home in homes for names in home.values() for name in names.split()]


def _keys(command: str, before: Sequence[str]) -> list[str]:
    """Dotted keys of a recipe: those of the one that is named, and those that any has."""
    if command != "train":
        return []
    from posttrain.recipes.document import flatten
    from posttrain.recipes.recipe import Recipe, load_recipe

    sections = {name: field.annotation for name, field in Recipe.model_fields.items()}
    keys = [f"{name}.{key}" for name, kind in sections.items() for key in getattr(kind, "model_fields", ())]
    named = next((word for word in before[1:] if not word.startswith("-")), None)
    return [*sections, *keys, *(flatten(load_recipe(named).dump()) if named is not None else ())]
