"""Write docs/reference/results.md from ``benchmarks/results``: what the runs that ship with the code came to.

``--check`` only says whether the file in the repository is what the results say.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.evaluation.statistics import half_width

ROOT = Path(__file__).resolve().parent.parent
RESULTS, TARGET = ROOT / "benchmarks" / "results", ROOT / "docs" / "reference" / "results.md"
COMPARISONS = ("compare-all-policy-gradient", "compare-all-preference")
HEADING = """# Reference runs

What the shipped recipes came to, to hold your own runs against: the command in front of a table makes it again, and
`posttrain runs compare RUN RUN` shows two runs side by side. Written by `make docs` from `benchmarks/results`, which
holds every cell with its seeds. All of these are runs of two cores; no recipe for a larger model was run at full size.

± is the half-width of a 95 % interval over seeds (Student's t), which does not cover the choice of the problems.
"""


def percent(summary: Mapping[str, float]) -> str:
    return f"{100 * summary['mean']:.1f} ± {100 * summary['half_width']:.1f} %"


def number(summary: Mapping[str, float] | None) -> str:
    return "–" if summary is None else f"{summary['mean']:.2f} ± {summary['half_width']:.2f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    ruler = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(columns) + " |" for columns in (head, ruler, *rows)) + "\n"


def comparison_text(name: str) -> str:
    """One comparison: what was equal, and a row for each method, the best mean first."""
    results = read(f"{name}.json")
    common = "; ".join(f"{key} {value}" for key, value in results["common"].items())
    rows = []
    for about in (results.get("rows") or results["methods"]).values():
        got = about["summaries"]
        kl, seconds = got.get("kl_initial"), f"{got['train_seconds']['mean']:.0f}"
        columns = [
            percent(got["accuracy"]),
            percent(got["mean_accuracy"]),
            number(kl),
            number(got["completion_length"]),
            seconds,
        ]
        rows.append([f"`{about['source'].partition(' ')[0]}`" + ("*" if " " in about["source"] else ""), *columns])
    start = results["start"]["results"]
    before = f"The start, {results['start']['label']}: {100 * start['accuracy']:.1f} % right."
    head = [
        "recipe",
        "accuracy at the end",
        "accuracy over the run",
        "KL from the initial model, nats",
        "completion length",
        "seconds of training",
    ]
    notes = "\n\\* with settings of its own, which the comparison's file tells.\n"
    return f"## `{results['command']}`\n\n{common}. {before}\n\n{table(head, rows)}{notes}"


def demo_text() -> str:
    """The demonstration, seed by seed."""
    rows = []
    for demo in read("demo.json")["demos"]:
        shares = [f"{100 * stage['accuracy']:.1f} %" for stage in demo["results"].values()]
        rows.append([str(demo["seed"]), *shares, f"{demo['command_seconds']:.0f}"])
    stages = list(read("demo.json")["demos"][0]["results"])
    return (
        f"## `posttrain demo`\n\nRight answers to 500 held-out problems.\n\n{table(['seed', *stages, 'seconds'], rows)}"
    )


def game_text() -> str:
    """A game of two players, seed by seed: what greedy play wins, as a share of the best play."""
    rows, seeds = [], read("game.json")["seeds"]
    kinds = [(label, when) for label, result in seeds[0]["results"].items() for when in result]
    for one in seeds:
        played = [one["results"][label][when] for label, when in kinds]
        shares = [f"{100 * result['reward'] / result['best']:.1f} %" for result in played]
        rows.append([str(one["seed"]), *shares, *(f"{one['seconds'][part]:.0f}" for part in ("sft", "grpo"))])
    head = ["seed", *(f"{label}, {when} GRPO" for label, when in kinds), "seconds of SFT", "seconds of GRPO"]
    about = (
        "Nim, `contrib/nim/sft-nim.yaml` then `grpo-nim.yaml` (`python benchmarks/game.py`): games won by greedy play, "
        "as a share of what the best play wins; 96 games of each kind, that begin from heaps as in training, "
        "from four heaps that no game of training began from, and from larger heaps (26 to 49 stones)."
    )
    return f"## A game against an opponent who makes no mistake\n\n{about}\n\n{table(head, rows)}"


def speed_text() -> str:
    """Return the cost of a step compared with other implementations, a table for each kind of CPU."""
    tables = []
    for path in sorted(RESULTS.glob("cpu-*.json")):
        measured = read(path.name)
        rows = []
        for row in measured["rows"].values():
            ours, plain, theirs = (row.get(f"{side}_cpu_seconds") for side in ("our", "plain", "peer"))
            ratio = theirs / ours if theirs and ours else None
            peer = "–" if theirs is None else f"{row['peer']} {measured['versions'][row['peer']]}"
            written = ["–" if one is None else f"{one:.3f}" for one in (ours, plain, theirs)]
            written.append("–" if ratio is None else f"{ratio:.2f} ×")
            rows.append([row["work"], *written, peer])
        head = ["work", "ours", "plain", "the peer", "ratio", "peer"]
        threads = sorted({row["threads"] for row in measured["rows"].values()})
        about = f"{measured['cpu']}, threads: {', '.join(map(str, threads))}; torch {measured['versions']['torch']}."
        tables.append(f"{about}\n\n{table(head, rows)}")
    intro = (
        "`make bench-cpu`: CPU-seconds, medians, ours and the peer's in turns in one process. `plain` is ours without "
        "the layers whose backward passes are written by hand."
    )
    return "\n".join([f"## Speed on a CPU\n\n{intro}\n", *tables]) if tables else ""


def gpu_texts() -> list[str]:
    """Return the cost of a step on a GPU, a section for each that was measured."""
    texts = []
    for path in sorted(RESULTS.glob("gpu-*.json")):
        measured = read(path.name)
        rows = []
        for row in measured["rows"].values():
            if "failed" in row:
                rows.append([row["work"], f"failed: {row['failed']}", *["–"] * 6])
                continue
            tera = row.get("model_flops_per_second")
            others = ("share_of_measured_rate", "share_of_data_sheet", "peak_gib", "launches_per_step")
            figures = [row["tokens_per_second"], None if tera is None else tera / 1e12, *map(row.get, others)]
            forms = ("{:,.0f}", "{:.1f}", "{:.0%}", "{:.0%}", "{:.1f}", "{:.0f}")
            columns = ["–" if one is None else form.format(one) for form, one in zip(forms, figures, strict=True)]
            peer = row.get("vllm_tokens_per_second")
            note = f" ({row['remark']})" if "remark" in row else ""
            rows.append(
                [row["work"] + note, *columns, "–" if peer is None else f"{peer:,.0f} ({row['ratio']:.2f} of it)"]
            )
        head = ["work", "tokens/s", "TFLOP/s", "of the measured rate", "of 989", "GiB", "launches/step", "vLLM"]
        about = f"`benchmarks/gpu.py`, torch {measured['versions']['torch']}, random weights."
        if "ceilings" in measured:
            ceilings = measured["ceilings"]
            about += (
                f" Products of 8,192 × 8,192 matrices reach {ceilings['tflops_bf16']:.0f} TFLOP/s in bf16, "
                f"{ceilings['tflops_tf32']:.0f} in TF32 and {ceilings['tflops_fp32']:.0f} in fp32 there, copies "
                f"{ceilings['copy_tb_per_second']:.1f} TB/s."
            )
        texts.append(f"## Speed on one {measured['gpu']}\n\n{about}\n\n{table(head, rows)}")
    return texts


def reward_model_text() -> str:
    """A reward model of human preferences, by kind of dialogue."""
    runs = read("reward_model_hh.json")["seeds"]
    rows = []
    for label in ("all", *runs[0]["kinds"]["subset"]):
        of_kind = [run["results"] if label == "all" else run["kinds"]["subset"][label] for run in runs]
        shares = [one["pair_accuracy"] for one in of_kind]
        over_seeds = {"mean": statistics.fmean(shares), "half_width": half_width(shares)}
        rows.append([label, f"{of_kind[0]['n']:.0f}", percent(over_seeds)])
    about = f"`tiny/rm-hh` on HH-RLHF (`benchmarks/reward_model_hh.py`), {len(runs)} seeds, held-out pairs."
    return f"## A reward model of human preferences\n\n{about}\n\n{table(['dialogues', 'pairs', 'agrees'], rows)}"


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def reference_text() -> str:
    """The whole document."""
    comparisons = [comparison_text(name) for name in COMPARISONS]
    return "\n".join([HEADING, demo_text(), *comparisons, reward_model_text(), game_text(), speed_text(), *gpu_texts()])


def main() -> int:
    text = reference_text()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        print("wrote docs/reference/results.md")
        return 0
    if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
        print("docs/reference/results.md does not match benchmarks/results: run `make docs`", file=sys.stderr)
        return 1
    print("docs/reference/results.md matches benchmarks/results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
