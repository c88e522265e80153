"""The options of ``posttrain quantize``. Only the standard library is imported here (see ``cli``)."""

from __future__ import annotations

import argparse

from posttrain.commands.options.argument_types import natural, new_place, positive, seed

EPILOG = """\
the folder that it writes is a model like any other:
  posttrain quantize runs/tiny-grpo --bits 4
  posttrain evaluate runs/tiny-grpo/checkpoints/best/quantized_int4
  posttrain quantize runs/tiny-rm --bits 8 --n 1000
  posttrain quantize Qwen/Qwen3-0.6B --bits 4 --dtype bfloat16 --task gsm8k --task.path gsm8k_test.jsonl.gz
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is quantized, to what, and by how much of a task the loss is measured."""
    parser.usage = "posttrain quantize MODEL_OR_RUN --bits {8,4} [options] [--task.key value ...]"
    parser.add_argument(
        "model", metavar="MODEL_OR_RUN", help="tiny, a model directory, a run, one of its checkpoints, or a hub name"
    )
    parser.add_argument(
        "--bits",
        type=natural,
        choices=(8, 4),
        required=True,
        help="8: LLM.int8's rows; 4: NF4 with double quantization",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of all else (default: the run's, or float32)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: the run's, or auto")
    parser.add_argument("--task", help="what to measure the loss on (default for a run: its own)")
    parser.add_argument("--template", help="prompt template (default: the run's, or r1_zero)")
    parser.add_argument("--n", type=natural, default=200, help="examples to measure on; 0: none (default: 200)")
    parser.add_argument("--max-tokens", type=positive, help="longest answer (default: the run's, else 256)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--out", type=new_place, metavar="DIR", help="default: quantized_int8 or quantized_int4 in the checkpoint"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors; the report is in the folder")
