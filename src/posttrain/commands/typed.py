"""Parsing of typed words: our option spelling, dotted recipe keys, and suggestions for unknown words.

Imports only the standard library, like ``cli``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence

from posttrain import other_names
from posttrain.commands.options import shown
from posttrain.errors import UsageError, nearest
from posttrain.other_names import answer_absent, answer_command, answer_option, answer_other_name
from posttrain.other_names.command_names import WORDS

ANY = ("",)  # placeholder for commands that accept all recipe keys
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # hyphen, and look-alikes from web pages and word processors
_OTHER_DASH = re.compile(f"-*[{_DASHES[1:]}][{_DASHES}]*[A-Za-z][\\w.-]*")


def split_overrides(
    arguments: Sequence[str], parser: argparse.ArgumentParser, sections: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Split arguments into command arguments, positional words first, and dotted keys with values.

    Every ``--key value`` or ``--key=value`` that is not a command option becomes an override. Positional words are
    grouped, because argparse before Python 3.12 expects them together.

    Raises:
        UsageError: unknown option, not in ``sections`` (ANY defers the check to the recipe), or a missing or repeated
            value.
    """
    words: list[str] = []
    own: list[str] = []
    overrides: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        key = name.lstrip(_DASHES)
        quoted = shown(name)[1:-1]
        action = parser._option_string_actions.get(name)
        if token == "--":
            return [*own, *words, token, *rest], list(overrides.items())
        if rest[:1] == ["="] and rest[1:]:
            raise UsageError(f"{quoted} = {shown(rest[1])[1:-1]}: remove the =, write --{key} VALUE")
        if action is not None:
            own.append(token)
            if rest and not equals:
                takes_next = action.nargs is None or (action.nargs == "?" and not rest[0].startswith("-"))
                if takes_next:
                    own.append(rest.pop(0))
            continue
        if _OTHER_DASH.fullmatch(name):
            raise UsageError(f"{quoted}: starts with a dash instead of a hyphen. Write --{key}")
        if not token.startswith("-") or " " in name or token[1:2] in "0123456789.":
            words.append(token)
            continue
        is_key = sections == ANY or ("." in key and key.partition(".")[0] in sections)
        if not (is_key and name.startswith("--")) or (sections == ANY and _word_of(name, parser)):
            listed = ""
            if sections != ANY:
                known = [option for option in parser._option_string_actions if option.startswith("--")]
                known += [f"--{section}.KEY" for section in sections]
                listed = f" Known: {', '.join(known)}"
            raise UsageError(f"unknown option {quoted}.{_suggest(name, parser, sections)}{listed}")
        if equals:
            following = value
        elif rest:
            following = rest.pop(0)
        else:
            following = "--"
        if not equals and following.startswith("--"):
            raise UsageError(f"{quoted}: this key needs a value.{_suggest(name, parser, sections)}")
        if key in overrides:
            raise UsageError(f"{quoted}: given twice; give it once")
        overrides[key] = following
    return [*words, *own], list(overrides.items())


def _word_of(name: str, parser: argparse.ArgumentParser) -> str:
    """Suggest the right syntax if a positional word is used as an option (``--model tiny``)."""
    words = parser._get_positional_actions()
    plain = name.strip("-").replace("-", "_")
    listed = " ".join(str(word.metavar or word.dest) for word in words)
    for word in words:
        if plain in WORDS.get(word.dest, "").split():
            return f" {word.metavar} is positional: `{parser.prog} {listed}`."
    return ""


def _suggest(name: str, parser: argparse.ArgumentParser, sections: Sequence[str]) -> str:
    """Suggest a correction for ``name``, an unknown option."""
    if "." in name and (sections == ANY and not name.startswith("--")):
        return f" Did you mean -{name}?"
    if "." in name and parser.prog.endswith(" resume"):
        return " Resumed runs keep the stored recipe; only --steps N can change."
    said = answer_command(parser.prog.partition(" ")[2], name) or _word_of(name, parser)
    if said:
        return said
    own = parser._option_string_actions
    meant: str | None = answer_option(name, [*own, *(f"--{section}" for section in sections)])
    if not meant:
        if sections == ANY and "." not in name:
            elsewhere = answer_other_name(name)
        else:
            elsewhere = answer_absent(name)
        if elsewhere:
            return elsewhere
        meant = nearest(name, own)
    if not meant:
        return ""
    return f" Did you mean {meant}?"


def spelled(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Rewrite ``--max_tokens`` as ``--max-tokens`` for known options."""
    words = list(arguments)
    end = len(words)
    if "--" in words:
        end = words.index("--")
    for place in range(end):
        name, equals, value = words[place].partition("=")
        hyphenated = name.replace("_", "-")
        if name.startswith("--") and name not in known and hyphenated in known:
            words[place] = f"{hyphenated}{equals}{value}"
    return words


def with_own_template_option(arguments: Sequence[str], known: Collection[str], *, trains: bool) -> list[str]:
    """Rewrite prompt template options to the spelling used by the command.

    Recipes use ``prompt.template`` (``trains``), other commands ``--template``. Both spellings work everywhere.
    """
    if not trains and "--template" not in known:
        return list(arguments)
    written = "--prompt.template"
    own = "--template"
    if trains:
        written, own = own, written
    renamed = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == written or name.startswith(f"{written}."):
            argument = f"{own}{name.removeprefix(written)}{equals}{value}"
        renamed.append(argument)
    return renamed


def refuse_command(command: str, known: Sequence[str]) -> None:
    """Reject an unknown command, suggesting a command, an action, a typo correction, or a recipe.

    Raises:
        UsageError: always.
    """
    commands = [name for name in known if " " not in name]
    actions = [name for name in known if name.endswith(f" {command}")]
    near = nearest(command, commands)
    if command in other_names.COMMANDS:
        hint = f" Did you mean `posttrain {other_names.COMMANDS[command]}`?"
    elif actions:
        hint = f" Did you mean `posttrain {actions[0]}`?"
    elif near:
        hint = f" Did you mean {near}?"
    else:
        from posttrain.recipes.document import recipe_hint  # pydantic, for errors alone

        hint = recipe_hint(command, "posttrain train ")
    raise UsageError(f"unknown command {shown(command)}.{hint} Commands: {', '.join(commands)}")


def refuse_action(command: str, words: Sequence[str], actions: Sequence[str]) -> None:
    """Reject an unknown action.

    Raises:
        UsageError: suggests a valid action.
    """
    if not words or words[0].startswith("-") or words[0] in actions:
        return
    word = words[0]
    own, _, elsewhere = other_names.COMMANDS.get(word, "").partition(" ")
    meant = nearest(word, actions)
    if not meant and own == command:
        meant = elsewhere
    if not meant and "show" in actions:
        meant = f"show {word}"
    hint = ""
    if meant:
        hint = f" Did you mean `posttrain {command} {meant}`?"
    raise UsageError(f"unknown action {shown(word)} for `posttrain {command}`.{hint} Actions: {', '.join(actions)}")


def complete_action(arguments: Sequence[str]) -> list[str]:
    """Insert the default action ``list`` after ``runs`` if no action is given."""
    words = list(arguments)
    start = 0  # not an option shared by all actions
    while start < len(words) and (words[start] == "--traceback" or words[start].startswith("--runs-dir")):
        if words[start] == "--runs-dir":
            start += 1  # the option's value
        start += 1
    has_action = start < len(words) and not words[start].startswith("-")
    asks_for_help = start < len(words) and words[start] in ("-h", "--help")
    if not has_action and not asks_for_help:
        words.insert(start, "list")
    return words
