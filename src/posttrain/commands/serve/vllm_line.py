"""``posttrain serve-command``: the line that starts a vLLM server. Only the standard library is imported at first."""

from __future__ import annotations

import argparse
import shlex
import sys

from posttrain.commands.options.argument_types import naturals, port, positive, seed, share

EPILOG = """\
the command is printed, not run; a shell takes it as it is:
  posttrain serve-command runs/tiny-grpo --gpus 1 | sh
  posttrain serve-command tiny --module /opt/vllm-cpu/bin/python
then, while training goes on elsewhere:
  posttrain evaluate runs/tiny-grpo --engine vllm --engine.url http://127.0.0.1:8000
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is served, where, and with what of the machine."""
    parser.usage = "posttrain serve-command MODEL_OR_RUN [options]"
    parser.epilog = EPILOG
    parser.add_argument(
        "model", metavar="MODEL_OR_RUN", help="tiny, a model directory, a run, one of its checkpoints, or a hub name"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=port, default=8000, help="default: 8000")
    parser.add_argument("--gpus", type=naturals, metavar="0,1", help="numbers of the GPUs it may use (default: vLLM's)")
    parser.add_argument("--gpu-memory", type=share, metavar="SHARE", help="of the GPU's memory (default: vLLM's)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "auto"), help="default: as evaluate has it"
    )
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="prompt and answer (default: the model's)")
    parser.add_argument(
        "--logprobs-mode",
        choices=("processed", "raw"),
        default="processed",
        help="processed: log-probabilities at any temperature; raw: with top-k or top-p, at temperature 1 only "
        "(default: processed)",
    )
    parser.add_argument(
        "--follows",
        action="store_true",
        help="for a run in training, which hands over its weights (engine.url)",
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
        gpu_memory=arguments.gpu_memory,
        gpus=tuple(arguments.gpus or ()),
        logprobs_mode=f"{arguments.logprobs_mode}_logprobs",
        seed=arguments.seed,
        interpreter=arguments.module,
        trust_remote_code=section.runs_remote_code,
        follows=arguments.follows,
    )
    command = server_command(source.path, options)
    print(command.shell(), flush=True)
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    url = f"http://{host}:{options.port}"
    use = f"posttrain evaluate {shlex.quote(arguments.model)} --engine vllm --engine.url {url}"
    if options.follows:
        use = f"posttrain train RECIPE --rollout.engine.name vllm --rollout.engine.url {url}"
    print(f"# serves {command.name}; when it says that startup is complete:\n# {use}", file=sys.stderr)
    return 0
