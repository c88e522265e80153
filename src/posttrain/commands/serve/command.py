"""``posttrain serve``: a model or a run behind HTTP on this machine, asked as OpenAI is asked; ``serve-command``."""

from __future__ import annotations

import argparse
import ipaddress
import re
import secrets
import shlex
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from posttrain.commands.options import naturals, new_place, port, positive, seed, share
from posttrain.errors import UsageError

EPILOG = """\
any program that can ask OpenAI can ask this one; give it the address that is printed, with /v1 behind it:
  posttrain serve runs/tiny-grpo --record asked.jsonl
  posttrain evaluate tiny --engine vllm --engine.url http://127.0.0.1:8000
for large models on GPUs, the line of a vLLM server:
  posttrain serve-command runs/tiny-grpo
"""
NOT_SHOWN = "tools of a request are not shown to the model, as its run did not show them (rollout.show_tools: false)"


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
        "--max-requests", type=positive, default=64, metavar="N", help="at a time; others get HTTP 503 (default: 64)"
    )
    parser.add_argument("--max-tokens", type=positive, help="longest answer where a request does not say")


def run_serve(arguments: argparse.Namespace) -> int:
    """Answer until Ctrl-C.

    Raises:
        UsageError: another host than this machine without ``--api-key``, a port that cannot be served, no such model.
        MissingExtra: starlette or uvicorn is not installed.
    """
    from posttrain.commands.options import chosen_words
    from posttrain.engines.models import complete_template, open_model
    from posttrain.errors import MissingExtra
    from posttrain.runs.models import find_source

    host, key = arguments.host, _choose_key(arguments.api_key)
    if not host or (key is None and not is_loopback(host)):
        raise UsageError(f"--host {host!r}: others than this machine could ask; add --api-key, or leave --host out")
    source = find_source(arguments.model, arguments.runs_dir)
    source.refuse_scorer()
    try:
        import uvicorn

        from posttrain.commands.serve.application import Access, Api
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn"):
            raise
        raise MissingExtra(package, "serve", "posttrain serve") from None
    from posttrain.commands.serve.answering import Answerer, Recorder
    from posttrain.engines.served_names import served_names

    template = complete_template(chosen_words(arguments).get("template"), source)
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(host, arguments.port))
        answerer = Answerer(open_model(source, template))
        stack.callback(answerer.close)
        names = [*served_names(source.path), source.label, source.name]
        recorder = None
        if arguments.record is not None:
            recorder = Recorder(Path(arguments.record), names[0])
            stack.callback(recorder.close)
        api = Api(answerer, names, arguments.max_tokens or source.max_tokens, recorder)
        server = uvicorn.Server(
            uvicorn.Config(
                Access(api.application(), host, arguments.port, key),
                http="h11",
                ws="none",
                log_level="warning",
                access_log=False,  # no line of a log holds the key
                proxy_headers=False,
                limit_concurrency=arguments.max_requests + 1,  # uvicorn counts the one that is being refused
                timeout_graceful_shutdown=1,
            )
        )
        address = f"[{host}]" if ":" in host else host
        print(f"serves {names[0]} at http://{address}:{arguments.port}/v1  (Ctrl-C ends it)", flush=True)
        print(f"key: {key}\n" * (arguments.api_key == ""), end="", flush=True)
        print("" if api.conversations.shows else f"{NOT_SHOWN}\n", end="", flush=True)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    return 0


def _choose_key(given: str | None) -> str | None:
    """Return the key of ``--api-key``: None without the option, a new one without a value.

    Raises:
        UsageError: it is too short, or has characters that a header cannot hold.
    """
    if given == "":
        return secrets.token_urlsafe(32)
    if given is not None and not re.fullmatch(r"[A-Za-z0-9_.~-]{16,256}", given):
        raise UsageError(
            "--api-key: a key has 16 to 256 letters, digits, '_', '-', '.' or '~' (write MODEL_OR_RUN before "
            "--api-key; without a value a key is made up)"
        )
    return given


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror.partition(" (while")[0] if isinstance(error, OSError) and error.strerror else error
        where = f"--host {host}, port {port}"
        raise UsageError(f"{where}: cannot be served ({reason}); give others with --host and --port") from error


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
        choices=("nccl", "files"),
        help="for a run in training, which sends its weights (engine.url): from GPU to GPU (default), or by files in "
        "this machine's memory, for a run without a GPU",
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
    from posttrain.engines.vllm.server import server_command
    from posttrain.runs.models import find_source

    source = find_source(arguments.model, arguments.runs_dir)
    source.refuse_scorer()
    section = source.section()
    command = server_command(
        source.path,
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
    print(command.shell(), flush=True)
    host = "127.0.0.1" if arguments.host in ("0.0.0.0", "::") else arguments.host
    url = f"http://{host}:{arguments.port}"
    use = f"posttrain evaluate {shlex.quote(arguments.model)} --engine vllm --engine.url {url}"
    if arguments.follows:
        use = f"posttrain train RECIPE --rollout.engine.name vllm --rollout.engine.url {url}"
    print(f"# serves {command.name}; when it says that startup is complete:\n# {use}", file=sys.stderr)
    return 0
