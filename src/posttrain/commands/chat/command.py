"""``posttrain chat``: talk to one model, or to several at once, in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from posttrain.commands.chat.conversation import Controls, Conversation
from posttrain.commands.console import Text, open_console
from posttrain.commands.options import chosen_components
from posttrain.errors import PosttrainError
from posttrain.runs.models import find_source
from posttrain.sampling.models import open_model

HELP = "/reset forgets the conversation; /quit leaves, as does the end of the input; Ctrl-C stops a reply"


def run_chat(arguments: argparse.Namespace) -> int:
    """Load the models, then answer line by line until ``/quit`` or the end of the input."""
    controls = Controls(arguments.temperature, arguments.top_p, arguments.top_k, arguments.max_tokens, arguments.seed)
    template = chosen_components(arguments).get("template")
    sources = [find_source(name, arguments.runs_dir) for name in arguments.models]
    conversations = [Conversation(open_model(source, template), controls) for source in sources]
    console = open_console()
    for conversation in conversations:
        conversation.set_system(arguments.system or "")
    if sys.stdin.isatty():
        labels = ", ".join(conversation.sampler.label for conversation in conversations)
        console.print(Text(f"{labels}. {HELP}", style="dim"))
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            for conversation in conversations:
                conversation.reset()
        elif line.startswith("/"):
            console.print(Text(HELP, style="dim"))
        elif line:
            speak(console, conversations, line)


def speak(console: Console, conversations: Sequence[Conversation], content: str) -> None:
    """Print every model's reply, one below the other; a model that cannot reply says why."""
    for conversation in conversations:
        label = conversation.sampler.label
        if len(conversations) > 1:
            console.print(Text(label, style="bold cyan"))
        texts = conversation.reply(content)
        try:
            for text in texts:
                console.print(Text(text), end="", soft_wrap=True)
        except KeyboardInterrupt:  # the reply is kept as far as it came
            texts.close()  # type: ignore[attr-defined]
        except PosttrainError as error:
            console.print(Text(f"{label}: {error}", style="red"))
            continue
        console.print()
        console.print(Text(conversation.info, style="dim"))
