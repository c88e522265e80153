"""``posttrain serve``: serve a model or run through an OpenAI-compatible local API; also ``serve-command``."""

from __future__ import annotations

import argparse
import re
import secrets
import shlex
import sys
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.commands.options import (
    MODEL,
    TEMPLATE,
    CommandOptions,
    address,
    folder_of_runs,
    naturals,
    new_place,
    option,
    positive,
    refuse_open_host,
    seed,
)
from posttrain.commands.serve.listening import address_of, answer_requests, listen
from posttrain.errors import UsageError

if TYPE_CHECKING:
    from socket import socket

    from starlette.types import ASGIApp

    from posttrain.sampling.models import ModelSource

DEFAULT_MODELS = 4  # in training at a time
EPILOG = """\
works with any OpenAI client; use the printed address as base URL:
  posttrain serve runs/tiny-grpo --record asked.jsonl
  posttrain evaluate tiny --engine vllm --engine.url http://127.0.0.1:8000
train with Tinker clients, using the address as base_url:
  posttrain serve tiny --train
for large models on GPUs, print a vLLM command:
  posttrain serve-command runs/tiny-grpo
"""
LINE_EPILOG = """\
prints a command without running it; pipe it to a shell, or add more vLLM options:
  posttrain serve-command runs/tiny-grpo --gpus 1 | sh
  posttrain serve-command tiny --module /opt/vllm-cpu/bin/python
then, while training goes on elsewhere:
  posttrain evaluate runs/tiny-grpo --engine vllm --engine.url http://127.0.0.1:8000
"""
NOT_SHOWN = "request tools are not shown to the model, matching training (rollout.show_tools: false)"


OPTIONS = CommandOptions(
    MODEL,
    *address(8000),
    TEMPLATE,
    option(
        "--api-key", nargs="?", const="", metavar="KEY",
        help="required key for clients; needed with --host (without a value: generated)",
    ),
    option(
        "--record", type=new_place, metavar="FILE", help="append answers to this JSONL file, with log-probabilities"
    ),
    option(
        "--max-requests", type=positive, default=256, metavar="N", help="concurrently; others get 503 (default: 256)"
    ),
    option("--max-tokens", type=positive, help="default maximum answer length"),
    option("--model-name", metavar="NAME", help="additional model name for requests"),
    usage="posttrain serve MODEL_OR_RUN [options] [--template.key value ...]",
    epilog=EPILOG,
    groups={
        "training": (
            option("--train", action="store_true", help="use the Tinker protocol instead of OpenAI's"),
            option("--states", type=folder_of_runs, metavar="FOLDER", help="saved states (default: RUNS_DIR/tinker)"),
            option("--max-models", type=positive, metavar="N", help="models in training at a time (default: 4)"),
            option("--seed", type=seed, metavar="N", help="sampling seed if the client gives none (default: 0)"),
        )
    },
)  # fmt: skip
LINE_OPTIONS = CommandOptions(
    MODEL,
    *address(8000),
    option("--gpus", type=naturals, metavar="0,1", help="GPU numbers (default: chosen by vLLM)"),
    option(
        "--follows", nargs="?", const="nccl", choices=("nccl", "files"),
        help="weight transfer from training (engine.url): nccl (default) or files",
    ),
    option(
        "--module", metavar="PYTHON", nargs="?", const="python",
        help="start vLLM as a module with this Python, for CPU builds without `vllm serve`",
    ),
    usage="posttrain serve-command MODEL_OR_RUN [options]",
    epilog=LINE_EPILOG,
)  # fmt: skip


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve requests until Ctrl-C.

    Raises:
        UsageError: a public host without ``--api-key``, an unusable port, or an unknown model.
        MissingExtra: starlette or uvicorn is not installed.
    """
    from posttrain.commands.options import chosen_components
    from posttrain.errors import MissingExtra
    from posttrain.runs.models import find_source
    from posttrain.sampling.models import complete_template, open_model
    from posttrain.terminal.console import say_template

    host = arguments.host
    port = arguments.port
    key = _choose_key(arguments.api_key)
    _refuse_unread(arguments)
    refuse_open_host(host, key is not None, "--api-key")
    source = find_source(arguments.model, arguments.runs_dir)
    source.refuse_scorer()
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtra(package, "serve", "posttrain serve")
    if arguments.train:
        return _serve_training(arguments, source, key)

    from posttrain.commands.serve.answering import Answerer, Recorder
    from posttrain.commands.serve.application import Api
    from posttrain.sampling.vllm.server import served_names

    template = complete_template(chosen_components(arguments).get("template"), source)
    say_template(source, template)
    names = [*served_names(source.path), source.label, source.name]
    if arguments.model_name is not None:
        names.append(arguments.model_name)
    with ExitStack() as stack:
        listener = stack.enter_context(listen(host, port))
        answerer = stack.enter_context(closing(Answerer(open_model(source, template))))
        recorder = None
        if arguments.record is not None:
            recorder = stack.enter_context(closing(Recorder(Path(arguments.record), names[0])))
        api = Api(answerer, names, arguments.max_tokens or source.max_tokens, recorder)
        print(f"serves {names[0]} at {address_of(host, port)}/v1  (Ctrl-C ends it)", flush=True)
        if not api.conversations.shows:
            print(NOT_SHOWN, flush=True)
        _answer(arguments, api.application(), listener, key)
    return 0


def _answer(arguments: argparse.Namespace, application: ASGIApp, listener: socket, key: str | None) -> None:
    """Print a generated key, then answer until Ctrl-C: with the key, from this host, and within limits."""
    from posttrain.commands.serve.access import Access
    from posttrain.commands.serve.limits import RequestLimit

    if arguments.api_key == "":
        print(f"key: {key}", flush=True)
    command = "posttrain serve"
    if arguments.train:
        command = "posttrain serve --train"
    limited = RequestLimit(application, arguments.max_requests)
    answer_requests(Access(limited, arguments.host, key, command), listener)


def _serve_training(arguments: argparse.Namespace, source: ModelSource, key: str | None) -> int:
    """Serve Tinker clients until Ctrl-C.

    Raises:
        UsageError: an unusable port or model, or a folder used by another server.
        MissingExtra: protobuf is not installed.
    """
    from posttrain.errors import MissingExtra

    if find_spec("google") is None or find_spec("google.protobuf") is None:
        raise MissingExtra("protobuf", "tinker", "posttrain serve --train")

    from posttrain.commands.options import chosen_components
    from posttrain.commands.serve.tinker.application import TinkerApi
    from posttrain.commands.serve.tinker.service import Service, ServiceLimits
    from posttrain.commands.serve.tinker.states import StateFolder
    from posttrain.models.sources import resolve_model_name
    from posttrain.sampling.vllm.server import served_names
    from posttrain.store.locks import Held, hold

    if chosen_components(arguments).get("template") is not None:
        raise UsageError("--template: Tinker clients send tokens, not messages; remove it, or remove --train")
    folder = Path(arguments.states or Path(arguments.runs_dir, "tinker"))
    states = StateFolder(folder)
    names = [source.name, source.label, str(resolve_model_name(source.path)), *served_names(source.path)]
    if arguments.model_name is not None:
        names.insert(0, arguments.model_name)
    limits = ServiceLimits(arguments.max_models or DEFAULT_MODELS, arguments.seed or 0)
    host = arguments.host
    port = arguments.port
    states.make()
    with listen(host, port) as listener:
        try:
            with hold(folder / "server.lock"), closing(Service(source, names, states, limits)) as service:
                where = address_of(host, port)
                print(f"trains {names[0]} for clients of Tinker with base_url {where}  (Ctrl-C ends it)", flush=True)
                print(f"states: {folder}", flush=True)
                _answer(arguments, TinkerApi(service, arguments.max_requests).application(), listener, key)
        except Held as other:
            raise UsageError(
                f"--states {folder}: used by another server ({other}); choose a different folder"
            ) from None
    return 0


def _refuse_unread(arguments: argparse.Namespace) -> None:
    """Reject options that the selected protocol ignores.

    Raises:
        UsageError: names the first such option.
    """
    unread = {"--states": arguments.states, "--max-models": arguments.max_models, "--seed": arguments.seed}
    remedy = "add --train, or remove it"
    if arguments.train:
        unread = {"--record": arguments.record, "--max-tokens": arguments.max_tokens}
        remedy = "Tinker clients set this themselves; remove it, or remove --train"
    for name, value in unread.items():
        if value is not None:
            raise UsageError(f"{name}: no effect here; {remedy}")


def _choose_key(given: str | None) -> str | None:
    if given is None or re.fullmatch(r"[A-Za-z0-9_.~-]{16,256}", given):
        return given
    if given == "":
        return f"tml-{secrets.token_urlsafe(32)}"  # Tinker's client refuses a key without this beginning
    raise UsageError(
        "--api-key: keys have 16 to 256 letters, digits, '_', '-', '.' or '~' (put MODEL_OR_RUN before "
        "--api-key; without a value, a key is generated)"
    )


def run_serve_command(arguments: argparse.Namespace) -> int:
    """Print a vLLM command on stdout, ready to run, and instructions on stderr.

    Raises:
        UsageError: an unknown model, or a reward model run.
    """
    from posttrain.runs.models import find_source
    from posttrain.sampling.vllm.server import server_command

    source = find_source(arguments.model, arguments.runs_dir)
    source.refuse_scorer()
    section = source.section()
    command = server_command(
        source.path,
        host=arguments.host,
        port=arguments.port,
        dtype=section.dtype,
        gpus=tuple(arguments.gpus or ()),
        interpreter=arguments.module,
        trust_remote_code=section.runs_remote_code,
        transfer=arguments.follows,
    )
    print(command.shell(), flush=True)
    host = arguments.host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"http://{host}:{arguments.port}"
    use = f"posttrain evaluate {shlex.quote(arguments.model)} --engine vllm --engine.url {url}"
    if arguments.follows:
        use = f"posttrain train RECIPE --rollout.engine.name vllm --rollout.engine.url {url}"
    print(f"# serves {command.name}; after startup is complete:\n# {use}", file=sys.stderr)
    return 0
