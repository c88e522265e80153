"""The options of ``posttrain activations``. Only the standard library is imported here (see ``cli``)."""

from __future__ import annotations

import argparse

from posttrain.commands.options.argument_types import naturals, new_place, nonnegative_float, positive

EPILOG = """\
layer L is what block number L gives (hidden_states[L] in transformers); layer 0 are the embeddings:
  posttrain activations runs/tiny-grpo --layer 2 --task stories --out activations/stories
  posttrain activations Qwen/Qwen3-0.6B --layer 14 --site resid,mlp --text corpus.jsonl --context-tokens 1024
  posttrain activations runs/tiny-grpo --layer 2 --rollouts runs/tiny-grpo
two models over the same tokens, for what training changed:
  posttrain activations runs/tiny-sft --paired runs/tiny-grpo --layer 2 --task stories
the same command goes on where it was interrupted; .pt files of others are written and read with:
  posttrain activations activations/stories --export-pt stories-pt
  posttrain activations stories-pt --import-pt resid.2 --out activations/stories-again
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which model, what of it, over which texts, and where to."""
    parser.usage = "posttrain activations MODEL_OR_RUN --layer N [options] [--task.key value ...]"
    parser.add_argument(
        "model",
        metavar="MODEL_OR_RUN",
        help="tiny, a model directory, a run, one of its checkpoints, or a hub name (a folder, with .pt files)",
    )
    what = parser.add_argument_group("what is recorded")
    what.add_argument("--layer", type=naturals, action="extend", metavar="N", help="layers, such as 20 or 10,20")
    what.add_argument(
        "--site",
        action="extend",
        type=lambda text: text.split(","),
        metavar="resid|mlp|attn",
        help="the residual stream after a layer, or what its MLP or its attention adds (default: resid)",
    )
    what.add_argument("--paired", metavar="OTHER", help="a second model over the same tokens: base, then post")
    what.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of what is stored (default: bf16)")
    over = parser.add_argument_group("over which texts (default: the prompts of the run's task)")
    over.add_argument("--task", metavar="NAME", help="the prompts of a task")
    over.add_argument("--text", metavar="FILE", help="plain text, or .jsonl with texts under `text`")
    over.add_argument("--rollouts", metavar="RUN", help="what a run has sampled: prompts with their completions")
    over.add_argument("--template", help="prompt template (default: the run's, else r1_zero)")
    over.add_argument("--context-tokens", type=positive, metavar="N", help="longest document (default: 8192 at most)")
    over.add_argument("--max-rows", type=positive, metavar="N", help="tokens to record at most (default: all)")
    over.add_argument(
        "--outliers",
        type=nonnegative_float,
        default=10.0,
        metavar="X",
        help="drop rows whose norm is above X times the median; 0 keeps them (default: 10)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--batch", type=positive, metavar="N", help="documents at a time (default: by their length)")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: the run's, or auto")
    how.add_argument("--weights", choices=("float32", "bfloat16"), help="of the model (default: the run's, or float32)")
    how.add_argument(
        "--out", type=new_place, metavar="FOLDER", help="where the shards go (default: activations/<model>)"
    )
    how.add_argument("--yes", action="store_true", help="write without asking, however large it is")
    how.add_argument("--quiet", action="store_true", help="print nothing but errors")
    files = parser.add_argument_group(".pt files of others, one tensor [rows, width] each")
    files.add_argument("--export-pt", metavar="FOLDER", help="write the recorded folder MODEL_OR_RUN as .pt shards")
    files.add_argument("--import-pt", metavar="SITE", help="read the .pt files in the folder MODEL_OR_RUN as this site")
