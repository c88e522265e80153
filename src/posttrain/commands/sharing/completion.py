"""``posttrain completion``: shell completion based on the command line parser.

Commands and options need only standard library imports. Names of recipes, runs and keys are loaded on demand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain.commands.options import CommandOptions, option

BASH = """\
_posttrain() {
    local words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    local IFS=$'\\n'
    COMPREPLY=($(posttrain completion words "${words[@]/#/:}" 2>/dev/null))
}
complete -o default -F _posttrain posttrain
"""
ZSH = """\
#compdef posttrain
_posttrain() {
    local -a found
    found=("${(@f)$(posttrain completion words "${(@)words[2,CURRENT]/#/:}" 2>/dev/null)}")
    found=(${found:#})
    if (( ${#found} )); then compadd -a found; else _files; fi
}
compdef _posttrain posttrain
"""
FISH = """\
function __posttrain_words
    set -l words (commandline -opc)[2..-1] (commandline -ct)
    posttrain completion words ":"$words 2>/dev/null
end
complete -c posttrain -a '(__posttrain_words)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
EPILOG = """\
  posttrain completion bash >> ~/.bashrc
  posttrain completion zsh >> ~/.zshrc                # after compinit
  posttrain completion fish > ~/.config/fish/completions/posttrain.fish
"""
OPTIONS = CommandOptions(
    option(
        "shell", choices=(*SCRIPTS, "words"), help="shell type; words: print completion candidates (used by scripts)"
    ),
    option("words", nargs="*", metavar=":WORD", help="with words: current command line words, each after a colon"),
    epilog=EPILOG,
)


class KeyedCommand(Protocol):
    """A command for completion; ``keys``: accepts recipe keys as options."""

    @property
    def keys(self) -> tuple[str, ...] | None: ...


@dataclass(frozen=True)
class CommandLine:
    """All commands and actions by name, and a function that builds a command's parsers."""

    commands: Mapping[str, KeyedCommand]
    build_parser: Callable[[str], tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]]


_ACTIONS = {"recipes": ("list", "show", "schema"), "data": ("list", "show")}


def run_completion(arguments: argparse.Namespace) -> int:
    """Print a completion script, or completion candidates."""
    if arguments.shell != "words":
        print(SCRIPTS[arguments.shell], end="")
        return 0
    words = [word.removeprefix(":") for word in arguments.words]
    for one in complete_words(arguments.command_line, words or [""]):
        print(one)
    return 0


def complete_words(line: CommandLine, words: Sequence[str], runs_dir: str = "runs") -> list[str]:
    """List completion candidates for a command line.

    Args:
        line: commands by name, and a parser factory.
        words: words after ``posttrain``. The last is the partial word to complete, possibly empty.
        runs_dir: default runs folder.
    """
    commands = line.commands
    *before, current = words
    command = next((word for word in before if not word.startswith("-")), None)
    if command is None:
        names = [name for name in commands if " " not in name]
        return _beginning(current, [*names, "--help", "--version"])
    if command not in commands:
        return []
    _, parsers = line.build_parser(command)
    after = before[before.index(command) + 1 :]
    actions = [name.partition(" ")[2] for name in commands if name.startswith(f"{command} ")]
    actions += _ACTIONS.get(command, ())
    name = command
    if after and f"{command} {after[0]}" in parsers:
        name = f"{command} {after[0]}"
    parser = parsers[name]
    options = parser._option_string_actions
    previous = before[-1]
    if previous in options and _takes_value(options[previous]):
        return _values_of(options[previous], current)
    if current.startswith("-"):
        return _beginning(current, [*options, *_keys(commands[name].keys, current)])
    if actions and not after:
        return _beginning(current, actions)
    return _beginning(current, _places(name, after, _runs_dir(before, runs_dir)))


def _beginning(current: str, words: Sequence[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(current)]


def _takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def _values_of(action: argparse.Action, current: str) -> list[str]:
    return _beginning(current, [str(choice) for choice in action.choices or ()])


def _runs_dir(before: Sequence[str], default: str) -> str:
    if "--runs-dir" in before[:-1]:
        return before[before.index("--runs-dir") + 1]
    return default


def _places(name: str, after: Sequence[str], runs_dir: str) -> list[str]:
    """List candidate names for positional arguments: recipes, sweeps, runs, components."""
    command = name.partition(" ")[0]
    if command == "explain":
        from posttrain.components import ComponentModules

        return sorted({one for names in ComponentModules().values() for one in names})
    if command in ("train", "sweep") or (command == "recipes" and after[:1] == ["show"]):
        from posttrain.recipes.document import recipe_names

        return recipe_names()
    runs: list[str] = []
    if Path(runs_dir).is_dir():
        from posttrain.runs.directory import RUN_NAME  # a shell takes what is listed as typed, so no other names

        named = [place for place in Path(runs_dir).iterdir() if RUN_NAME.fullmatch(place.name)]
        runs = sorted(place.name for place in named if (place / "recipe.yaml").is_file())
    if command in ("runs", "doctor", "what-if", "studio"):
        return runs
    if command in ("generate", "chat", "evaluate", "serve", "quantize", "activations"):
        return ["tiny", "tiny-sft", "smollm2-135m", *(f"{runs_dir}/{run}" for run in runs)]
    return []


def _keys(sections: Sequence[str] | None, current: str) -> list[str]:
    """List recipe keys as options: sections first, then keys in the typed section."""
    if not sections or not current.startswith("--"):
        return []
    from posttrain.recipes.json_schema import keys_of_sections

    known: Mapping[str, Sequence[str]] = keys_of_sections()
    section, dot, _ = current.removeprefix("--").partition(".")
    if not dot:
        return [f"--{name}" if not below else f"--{name}." for name, below in known.items()]
    return [f"--{section}.{key}" for key in known.get(section, ())]
