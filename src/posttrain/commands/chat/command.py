"""``posttrain chat``: talk to one model, or to several at once, in the terminal."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console

from posttrain.commands.chat.conversation import Controls, Conversation, SpokenToken
from posttrain.commands.console import Text, open_console
from posttrain.commands.options import chosen_words
from posttrain.engines.models import open_model
from posttrain.errors import PosttrainError, UsageError
from posttrain.registry import suggest
from posttrain.runs.models import find_source

COMMANDS = {
    "/help": "what can be typed",
    "/reset": "forget the conversation",
    "/system TEXT": "put a system message above the conversation; without a text take it away",
    "/set NAME VALUE": "temperature, top_p, top_k, max_tokens or seed; `/set` alone shows them",
    "/again": "take back the last exchange and have the question answered anew with the next seed",
    "/quit": "leave (as does the end of the input)",
}


@dataclass(slots=True)
class Chat:
    """The conversations of one session, one for each model, and how they are shown."""

    conversations: list[Conversation]
    console: Console
    last_question: str | None = None

    def say(self, content: str) -> None:
        """Every model's reply, one below the other. A model that cannot reply says why; the others go on."""
        self.last_question = content
        for conversation in self.conversations:
            if len(self.conversations) > 1:
                self.console.print(Text(conversation.sampler.label, style="bold cyan"))
            try:
                self._show(conversation.reply(content))
            except PosttrainError as error:
                self.console.print(Text(f"{conversation.sampler.label}: {error}", style="red"))

    def _show(self, tokens: Iterator[SpokenToken]) -> None:
        count, total = 0, 0.0
        try:
            for token in tokens:
                count, total = count + 1, total + token.logprob
                self.console.print(Text(token.text), end="", soft_wrap=True)
        except KeyboardInterrupt:  # enough heard: what was said stays said
            tokens.close()  # type: ignore[attr-defined]
        self.console.print()
        facts = f"{count} tokens" + (f", mean log-probability {total / count:.2f}" if count else "")
        self.console.print(Text(facts, style="dim"))

    def obey(self, line: str) -> bool:
        """Carry out a command; False when it ends the session.

        Raises:
            UsageError: an unknown command, or one that cannot be carried out.
        """
        name, _, rest = line.partition(" ")
        actions: dict[str, Callable[[str], bool]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._system,
            "/set": self._set,
            "/again": self._again,
            "/quit": lambda _: False,
        }
        if name not in actions:
            raise UsageError(f"there is no command {name}.{suggest(name, actions)} /help lists them")
        return actions[name](rest.strip())

    def _help(self, _: str) -> bool:
        for command, meaning in COMMANDS.items():
            self.console.print(Text.assemble((f"  {command:<18}", "bold"), meaning))
        return True

    def _reset(self, _: str) -> bool:
        for conversation in self.conversations:
            conversation.reset()
        self.last_question = None
        return True

    def _system(self, rest: str) -> bool:
        for conversation in self.conversations:
            conversation.set_system(rest)
        return True

    def _set(self, rest: str) -> bool:
        controls = self.conversations[0].controls
        if rest:
            controls = change_controls(controls, *rest.partition(" ")[::2])
            for conversation in self.conversations:
                conversation.controls = controls
        shown = ", ".join(f"{field.name} {getattr(controls, field.name)}" for field in fields(controls))
        self.console.print(Text(shown, style="dim"))
        return True

    def _again(self, _: str) -> bool:
        if self.last_question is None:
            raise UsageError("nothing was asked yet")
        for conversation in self.conversations:
            conversation.take_back()
            conversation.controls = replace(conversation.controls, seed=conversation.controls.seed + 1)
        self.say(self.last_question)
        return True


def change_controls(controls: Controls, name: str, value: str) -> Controls:
    """The controls with one of them changed.

    Raises:
        UsageError: no such control, or a value that it cannot have.
    """
    readers: dict[str, tuple[Callable[[str], float | int], Callable[[float], bool], str]] = {
        "temperature": (float, lambda x: 0 <= x < math.inf, "a number of at least 0"),
        "top_p": (float, lambda x: 0 < x <= 1, "a number above 0, at most 1"),
        "top_k": (int, lambda x: x >= 1, "a whole number of at least 1"),
        "max_tokens": (int, lambda x: x >= 1, "a whole number of at least 1"),
        "seed": (int, lambda x: x >= 0, "a whole number of at least 0"),
    }
    if name not in readers:
        raise UsageError(
            f"there is nothing called {name!r} to set.{suggest(name, readers)} Known: {', '.join(readers)}"
        )
    read, fits, wanted = readers[name]
    try:
        number = read(value)
    except ValueError:
        number = math.nan
    if not fits(number):
        raise UsageError(f"{name} must be {wanted}, not {value.strip()!r}")
    changed: dict[str, Any] = {name: number}
    return replace(controls, **changed)


def run_chat(arguments: argparse.Namespace) -> int:
    """Load the models, then answer line by line until ``/quit`` or the end of the input."""
    controls = Controls(arguments.temperature, arguments.top_p, arguments.top_k, arguments.max_tokens, arguments.seed)
    template = chosen_words(arguments).get("template")
    sources = [find_source(name, arguments.runs_dir) for name in arguments.models]
    conversations = [Conversation(open_model(source, template), controls) for source in sources]
    chat = Chat(conversations, open_console())
    if arguments.system:
        chat.obey(f"/system {arguments.system}")
    is_asked = sys.stdin.isatty()
    if is_asked:
        labels = ", ".join(conversation.sampler.label for conversation in conversations)
        chat.console.print(Text(f"{labels}. /help tells what can be typed; Ctrl-C stops a reply", style="dim"))
    while True:
        line = _read_line(is_asked)
        if line is None:
            return 0
        try:
            if line.startswith("/"):
                if not chat.obey(line):
                    return 0
            elif line.strip():
                chat.say(line)
        except UsageError as error:
            chat.console.print(Text(str(error), style="red"))


def _read_line(is_asked: bool) -> str | None:
    """The next line of the input; None at its end."""
    try:
        return input("> " if is_asked else "")
    except EOFError:
        return None
