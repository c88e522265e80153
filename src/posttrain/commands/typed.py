"""Reading what a user typed: options in our spelling, dotted keys of a recipe, the likely meaning of an unknown word.

Only the standard library is imported here, as in ``cli``.
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

ANY = ("",)  # in the place of sections whose keys are options: all of a recipe
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # hyphen, and what web pages and word processors make of it
_OTHER_DASH = re.compile(f"-*[{_DASHES[1:]}][{_DASHES}]*[A-Za-z][\\w.-]*")


def split_overrides(
    arguments: Sequence[str], parser: argparse.ArgumentParser, sections: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the arguments of the command itself, words before options, and dotted keys with their values.

    Every ``--key value`` or ``--key=value`` whose key is no option of the command is an override. Words stand together,
    because argparse before Python 3.12 looks for them in one place alone.

    Raises:
        UsageError: neither an option nor a key in ``sections`` (ANY: the recipe will judge), no value, or a second one.
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
            raise UsageError(f"{quoted} = {shown(rest[1])[1:-1]}: leave out the =, as in --{key} VALUE")
        if action is not None:
            own.append(token)
            if rest and not equals:
                takes_next = action.nargs is None or (action.nargs == "?" and not rest[0].startswith("-"))
                if takes_next:
                    own.append(rest.pop(0))
            continue
        if _OTHER_DASH.fullmatch(name):
            raise UsageError(f"{quoted}: this begins with a dash that is no hyphen. Write --{key}")
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
            raise UsageError(f"there is no option {quoted}.{_suggest(name, parser, sections)}{listed}")
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
    """Return how a command takes what is an option elsewhere (``--model tiny``), if it is a word without one."""
    words = parser._get_positional_actions()
    plain = name.strip("-").replace("-", "_")
    listed = " ".join(str(word.metavar or word.dest) for word in words)
    for word in words:
        if plain in WORDS.get(word.dest, "").split():
            return f" {word.metavar} stands without one: `{parser.prog} {listed}`."
    return ""


def _suggest(name: str, parser: argparse.ArgumentParser, sections: Sequence[str]) -> str:
    """Return what was probably meant by ``name``, which is no option of the command."""
    if "." in name and (sections == ANY and not name.startswith("--")):
        return f" Did you mean -{name}?"
    if "." in name and parser.prog.endswith(" resume"):
        return " A run goes on by its own recipe, but for its length: --steps N."
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
    """Return the arguments with ``--max_tokens`` written as ``--max-tokens``, where that is a known option."""
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
    """Return the arguments with the option of the prompt template as the command names it.

    A recipe has the key ``prompt.template`` (``trains``), other commands the option ``--template``; both take both.
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
    """Refuse what is no command, with the one that is meant: a name elsewhere, an action, a slip, or a recipe.

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
    raise UsageError(f"there is no command {shown(command)}.{hint} Commands: {', '.join(commands)}")


def refuse_action(command: str, words: Sequence[str], actions: Sequence[str]) -> None:
    """Refuse a word after a command with actions that is none of them.

    Raises:
        UsageError: with the action that is meant.
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
    raise UsageError(f"there is no action {shown(word)} of `posttrain {command}`.{hint} Actions: {', '.join(actions)}")


def complete_action(arguments: Sequence[str]) -> list[str]:
    """Return the words after ``runs`` as argparse is to read them: without an action, ``list`` is meant."""
    words = list(arguments)
    start = 0  # of what is not an option of every action
    while start < len(words) and (words[start] == "--traceback" or words[start].startswith("--runs-dir")):
        if words[start] == "--runs-dir":
            start += 1  # its value
        start += 1
    has_action = start < len(words) and not words[start].startswith("-")
    asks_for_help = start < len(words) and words[start] in ("-h", "--help")
    if not has_action and not asks_for_help:
        words.insert(start, "list")
    return words
