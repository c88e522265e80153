"""``posttrain quantize``. Imports only the standard library until executed (see ``cli``)."""

from __future__ import annotations

import argparse
from typing import Any

from posttrain.commands.options import (
    MAX_TOKENS,
    MODEL,
    TEMPLATE,
    CommandOptions,
    dtype_of,
    natural,
    new_place,
    option,
    seed_of,
)

EPILOG = """\
the output folder can be used as a model:
  posttrain quantize runs/tiny-grpo --bits 4
  posttrain evaluate runs/tiny-grpo/checkpoints/best/quantized_int4
  posttrain quantize runs/tiny-rm --bits 8 --limit 1000
  posttrain quantize Qwen/Qwen3-0.6B --bits 4 --dtype bf16 --task gsm8k --task.path gsm8k_test.jsonl.gz
"""


OPTIONS = CommandOptions(
    MODEL,
    option(
        "--bits", type=natural, choices=(8, 4), required=True,
        help="8: LLM.int8 rows; 4: NF4, double quantization",
    ),
    dtype_of("of all else"),
    option("--device", choices=("auto", "cpu", "cuda"), help="default: the run's, or auto"),
    option("--task", help="data for measuring the loss (default: the run's task)"),
    TEMPLATE,
    option("--limit", type=natural, default=200, metavar="N", help="rows for measuring; 0: skip (default: 200)"),
    MAX_TOKENS,
    seed_of(),
    option(
        "--out", type=new_place, metavar="DIR", help="default: quantized_int8 or quantized_int4 in the checkpoint"
    ),
    option("--quiet", action="store_true", help="print only errors; the report is written to the folder"),
    usage="posttrain quantize MODEL_OR_RUN --bits {8,4} [options] [--task.key value ...]",
    epilog=EPILOG,
)  # fmt: skip


def run_quantize(arguments: argparse.Namespace) -> int:
    """Store a model in few bits, measure the loss, and print both."""
    from pathlib import Path

    from posttrain.commands.options import chosen_components
    from posttrain.evaluation.quantization import REPORT, QuantizationRequest, quantize_model
    from posttrain.runs.models import find_source

    components = chosen_components(arguments)
    folder = None
    if arguments.out:
        folder = Path(arguments.out)
    request = QuantizationRequest(
        find_source(arguments.model, arguments.runs_dir),
        arguments.bits,
        dtype=arguments.dtype,
        device=arguments.device,
        task=components.get("task"),
        template=components.get("template"),
        n=arguments.limit,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        out=folder,
    )
    report, out = quantize_model(request)
    if not arguments.quiet:
        _print_report(report, f"the model and {REPORT}: {out}")
    return 0


def _print_report(report: dict[str, Any], place: str) -> None:
    from posttrain.evaluation.tables import TextTable
    from posttrain.terminal.console import open_console, print_table, say

    console = open_console()
    lines = []
    for kept, label in (("disk", "weights on disk"), ("memory", "weights in memory")):
        before = report[f"{kept}_bytes_before"]
        now = report[f"{kept}_bytes_after"]
        ratio = "–"
        if before:
            ratio = f"{now / before:.2f}"
        lines.append([label, _show_size(before), _show_size(now), ratio])
    title = f"{report['model']}, {report['num_parameters']:,} parameters, linear layers in {report['bits']} bits"
    print_table(console, TextTable(title, ["", "before", "after", "ratio"], lines))
    results = report.get("results")
    if results is None:
        say(console, "quantization loss was not measured; add --task NAME")
    else:
        say(console, f"on {report['task']['name']}:")
        for line in _result_lines(results):
            say(console, f"  {line}")
    say(console, place)


def _show_size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "–"
    return f"{num_bytes / 1e6:,.2f} MB"


def _result_lines(results: dict[str, float]) -> list[str]:
    def interval(name: str) -> str:
        low = results[f"{name}_low"]
        high = results[f"{name}_high"]
        return f"{results[name]:.4g} (95 % interval {low:.4g} to {high:.4g})"

    if "accuracy_before" in results:  # a reward model's
        same = f"same verdict on {results['same_verdict']:.1%} of {results['num_items']:.0f}"
        return [
            f"accuracy before: {interval('accuracy_before')}",
            f"accuracy after:  {interval('accuracy_after')}",
            f"change: {interval('change')}, {same}",
        ]
    return [
        f"KL to the original per answer: {interval('kl')} nats, {results['kl_per_token']:.4g} per generated token",
        f"{results['num_tokens']:.0f} tokens in {results['num_answers']:.0f} answers by the original at temperature 1",
    ]
