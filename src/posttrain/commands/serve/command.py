"""``posttrain serve``: a model or a run behind HTTP on this machine, asked as OpenAI is asked."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import ExitStack, suppress
from pathlib import Path

from posttrain.commands.options.argument_types import new_place, port, positive

EPILOG = """\
any program that can ask OpenAI can ask this one; give it the address that is printed, with /v1 behind it:
  posttrain serve runs/tiny-grpo --record asked.jsonl
  posttrain evaluate tiny --engine vllm --engine.url http://127.0.0.1:8000
for large models on GPUs, the line of a vLLM server:
  posttrain serve-command runs/tiny-grpo
"""
UNTOLD = "tools of a request are not shown to the model, as its run did not show them (rollout.show_tools: false)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is served, where, to whom, and what is kept of it."""
    parser.usage = "posttrain serve MODEL_OR_RUN [options] [--template.key value ...]"
    parser.epilog = EPILOG
    parser.add_argument(
        "model", metavar="MODEL_OR_RUN", help="tiny, a model directory, a run, one of its checkpoints, or a hub name"
    )
    parser.add_argument("--template", help="how conversations are written (default: the run's, else r1_zero)")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=port, default=8000, help="default: 8000")
    parser.add_argument(
        "--api-key",
        nargs="?",
        const="",
        metavar="KEY",
        help="answer only who sends it; needed with --host (without a value: made up)",
    )
    parser.add_argument(
        "--record", type=new_place, metavar="FILE", help="add every answer to this JSONL file: ids, log-probabilities"
    )
    parser.add_argument(
        "--max-requests", type=positive, default=64, metavar="N", help="at a time; others wait outside (default: 64)"
    )
    parser.add_argument("--max-tokens", type=positive, help="longest answer where a request does not say")


def run_serve(arguments: argparse.Namespace) -> int:
    """Answer until Ctrl-C.

    Raises:
        UsageError: another host than this machine without ``--api-key``, a port that cannot be served, no such model.
        MissingExtra: starlette or uvicorn is not installed.
    """
    from posttrain.commands.options.words import chosen_words
    from posttrain.commands.serve.doorway import choose_token, is_loopback, open_door, serve, show_address
    from posttrain.engines.models import complete_template, open_model
    from posttrain.errors import MissingExtra, UsageError
    from posttrain.runs.models import find_source

    host, key = arguments.host, choose_token(arguments.api_key, "--api-key")
    if not host or (key is None and not is_loopback(host)):
        raise UsageError(f"--host {host!r}: others than this machine could ask; add --api-key, or leave --host out")
    source = find_source(arguments.model, arguments.runs_dir)
    source.refuse_scorer()
    try:
        import starlette  # noqa: F401 - asked for before a model is loaded
        import uvicorn  # noqa: F401

        from posttrain.commands.serve.application import Api, ApiDoor
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise MissingExtra(error.name, "serve", "posttrain serve") from None
    from posttrain.commands.serve.answering import Answerer
    from posttrain.commands.serve.speech import Recorder
    from posttrain.engines.vllm.command import served_names

    template = complete_template(chosen_words(arguments).get("template"), source)
    with ExitStack() as stack:
        door = stack.enter_context(open_door(host, arguments.port))
        opened = open_model(source, template)
        answerer = Answerer(opened)
        stack.callback(answerer.close)
        name, *others = served_names(source.path)
        recorder = None
        if arguments.record is not None:
            recorder = Recorder(Path(arguments.record), name)
            stack.callback(recorder.close)
        max_tokens = arguments.max_tokens or source.max_tokens
        api = Api(
            answerer, name, aliases=[source.label, source.name, *others], max_tokens=max_tokens, recorder=recorder
        )
        lines = [f"serves {name} at {show_address(host, arguments.port)}v1  (Ctrl-C ends it)"]
        lines += [f"key: {key}"] if arguments.api_key == "" else []
        lines += [] if api.conversations.shows else [UNTOLD]

        def announce() -> None:
            print(*lines, sep="\n", flush=True)

        with suppress(KeyboardInterrupt):
            asyncio.run(
                serve(ApiDoor(api.application(), host, arguments.port, key, arguments.max_requests), door, announce)
            )
    return 0
