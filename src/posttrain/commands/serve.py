"""``posttrain serve-command``: the line that starts a vLLM server for a model or a run."""

from __future__ import annotations

import argparse
import shlex
import sys

from posttrain.engines.vllm.command import ServerOptions, server_command
from posttrain.runs.models import find_source


def run_serve_command(arguments: argparse.Namespace) -> int:
    """Print the command on stdout, ready for a shell, and what to do with it on stderr.

    Raises:
        UsageError: no such model, or a run that trained a reward model.
    """
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
    )
    command = server_command(source.path, options)
    print(command.shell(), flush=True)
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    print(
        f"# serves {command.name}; when it says that startup is complete:\n"
        f"# posttrain evaluate {shlex.quote(arguments.model)} --engine vllm --engine.url http://{host}:{options.port}",
        file=sys.stderr,
    )
    return 0
