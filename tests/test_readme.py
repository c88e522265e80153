"""The README's claims: its numbers are recorded results, its methods are recipes, its words name what is there."""

from __future__ import annotations

import json
import re
import tomllib
from statistics import median
from typing import Any

from page_commands import ROOT, commands
from posttrain.evaluation.statistics import wilson_interval
from posttrain.models.load import load_model, num_parameters
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import ModelSection
from posttrain.sweeps.file import training_recipe_names

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def rows_after(heading: str) -> list[list[str]]:
    """Return the cells of the first table whose head begins so, row by row."""
    table = PAGE[PAGE.index(f"\n{heading}") + 1 :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def test_table_of_the_demo_is_the_recorded_one() -> None:
    expected = []
    demos = results("demo")["demos"]
    for demo in demos:
        base, trained, end = (demo["results"][name] for name in ("base", "after SFT", "after GRPO"))
        accuracy = f"{percent(end['accuracy'])} % ({percent(end['accuracy_low'])} – {percent(end['accuracy_high'])})"
        working = f"{100 * trained['shows_reasoning']:.0f} % → {100 * end['shows_reasoning']:.0f} %"
        before = [f"{percent(result['accuracy'])} %" for result in (base, trained)]
        expected.append([str(demo["seed"]), *before, accuracy, working])
    assert rows_after("| seed | base |") == expected
    seconds = [round(demo["command_seconds"]) for demo in demos]
    assert f"{min(seconds)} to {max(seconds)} s on two cores" in PAGE
    assert f"{demos[0]['results']['base']['n']:.0f} test problems, greedy" in PAGE
    first = demos[0]["results"]
    assert f"from {100 * first['after SFT']['accuracy']:.0f} % to {100 * first['after GRPO']['accuracy']:.0f} %" in PAGE


def test_the_demo_takes_the_steps_and_the_model_that_are_named() -> None:
    recipe = load_recipe("tiny/grpo-demo").resolve()
    assert f"over {recipe.train.steps} GRPO steps" in PAGE
    model = load_model(ModelSection(name="tiny"), seed=0).model
    assert f"{num_parameters(model) / 1e6:.1f}M parameters" in PAGE


SPEED = {"GRPO": "grpo", "SFT": "sft", "DPO": "dpo", "sampling": "sampling"}


def test_table_of_speed_is_the_recorded_one() -> None:
    recorded = results("cpu-intel-r-xeon-r-processor-avx512")
    assert recorded["unit"] == "CPU-seconds"
    rows = rows_after("| work | compared with |")
    assert [row[0].split()[0].rstrip(",") for row in rows] == list(SPEED)
    for row, name in zip(rows, SPEED.values(), strict=True):
        about = recorded["rows"][name]
        assert row[2] == f"{about['ratio']:.1f}"
        assert row[1].split()[0].lower() == about["peer"]
        assert about["threads"] == 1
    assert recorded["versions"]["trl"].startswith(rows[0][1].split()[1])


def test_speed_of_half_a_billion_parameters_is_the_recorded_one() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("cpu-*.json"))
    recorded = [json.loads(file.read_text(encoding="utf-8"))["rows"].get("sft-0.5b") for file in files]
    ratios = [row["ratio"] for row in recorded if row is not None]
    assert len(ratios) >= 2
    assert f"with 494M an SFT step is {min(ratios):.2f} to {max(ratios):.2f} times as fast" in PAGE


def test_counts_of_parity_are_the_recorded_ones() -> None:
    rows = results("parity")["rows"]
    num_equal = sum(row["verdict"] == "equal" for row in rows)
    text = " ".join(PAGE.split())
    assert f"of {len(rows)} rows {num_equal} are equal, and {len(rows) - num_equal} differ by" in text
    assert all(row["verdict"] == "equal" or row["verdict"].startswith("differs: ") for row in rows)


# What the table of methods names, as recipes.
METHODS = {
    "SFT": "tiny/sft",
    "DFT": "tiny/dft",
    "NEFTune": "tiny/neftune",
    "pretraining": "tiny/pretrain",
    "Bradley–Terry": "tiny/rm",
    "outcome (ORM)": "tiny/orm",
    "process (PRM)": "tiny/prm",
    "DPO": "preference/dpo",
    "cDPO": "preference/cdpo",
    "robust DPO": "preference/robust-dpo",
    "IPO": "preference/ipo",
    "SimPO": "preference/simpo",
    "ORPO": "preference/orpo",
    "CPO": "preference/cpo",
    "KTO": "preference/kto",
    "APO": "preference/apo-zero",
    "NCA": "preference/nca",
    "EXO": "preference/exo",
    "RPO": "preference/rpo",
    "BCO": "preference/bco",
    "SPPO": "preference/sppo",
    "f-DPO": "preference/f-dpo",
    "LD-DPO": "preference/ld-dpo",
    "TR-DPO": "preference/tr-dpo",
    "AOT": "preference/aot",
    "DiscoPOP": "preference/discopop",
    "MPO": "preference/mpo",
    "hinge": "preference/hinge",
    "REINFORCE": "rl/reinforce",
    "RLOO": "rl/rloo",
    "PPO": "rl/ppo",
    "GRPO": "rl/grpo",
    "Dr. GRPO": "rl/dr-grpo",
    "DAPO": "rl/dapo",
    "GSPO": "rl/gspo",
    "CISPO": "rl/cispo",
    "SAPO": "rl/sapo",
    "GMPO": "rl/gmpo",
    "MaxRL": "rl/maxrl",
    "REINFORCE++": "rl/reinforce-plus-plus",
    "DPPO": "rl/dppo-tv",
    "GDPO": "rl/gdpo",
    "DRO": "rl/dro",
    "Clip-Cov": "rl/clip-cov",
    "KL-Cov": "rl/kl-cov",
    "rejection sampling": "rl/rejection-sampling",
    "expert iteration": "rl/expert-iteration",
    "forward KL": "distillation/forward-kl",
    "reverse KL": "distillation/reverse-kl",
    "on-policy": "distillation/on-policy-distillation",
    "SDPO": "rl/sdpo",
    "SDFT": "tiny/sdft",
    "OPSD": "tiny/opsd",
}


def test_methods_of_the_table_are_recipes() -> None:
    named = [
        re.sub(r" of small models$", "", method.strip())
        for row in rows_after("| family | recipes |")[:6]
        for method in row[1].split(",")
    ]
    assert sorted(named) == sorted(METHODS)
    assert [recipe for recipe in METHODS.values() if recipe not in training_recipe_names()] == []


def test_dr_grpo_is_the_combination_that_is_named() -> None:
    recipe = load_recipe("rl/dr-grpo").resolve()
    parts = (recipe.objective.name, recipe.advantage.name, recipe.aggregate.name)
    assert parts == ("grpo", "centered", "constant")
    assert "`objective: grpo` with `advantage: centered` and `aggregate: constant`" in " ".join(PAGE.split())


def test_the_large_recipe_is_the_one_that_is_named() -> None:
    recipe = load_recipe("grpo-gsm8k").resolve()
    assert recipe.model.name == "Qwen/Qwen3-14B"
    assert recipe.model.adapter is not None
    assert recipe.model.adapter.kind == "lora"
    table = (ROOT / "docs" / "how-to" / "fit-in-memory.md").read_text(encoding="utf-8")
    row = next(line for line in table.splitlines() if line.startswith("| `grpo-gsm8k`, Qwen/Qwen3-14B |"))
    assert f"({float(row.split('|')[-2]):.0f} GiB by estimate" in PAGE


def test_python_that_is_asked_for_is_the_packages_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in PAGE


def test_an_evaluation_of_500_problems_has_an_interval_of_several_points() -> None:
    low, high = wilson_interval(250, 500)
    assert high - low > 0.05


def test_every_command_is_among_those_that_are_run_dry() -> None:
    """``test_docs.py`` checks what ``page_commands`` finds, and resolves the recipes of YAML blocks."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"bash", "yaml"}
    found = {command for place, command in commands() if place == "README.md"}
    lines = [
        line.partition("#")[0].strip()
        for language, block in blocks
        if language == "bash"
        for line in block.splitlines()
    ]
    typed = [line for line in lines if not line.startswith("source ")]
    assert [line for line in typed if line not in found] == []
    assert len(typed) >= 10
    assert "python benchmarks/demo.py --seeds 0 1 2" in found


def test_time_to_accuracy_is_the_recorded_one() -> None:
    runs = results("time_to_accuracy")["runs"]
    rows = rows_after("| task | held-out accuracy |")
    assert len(rows) == 2
    for row, task in zip(rows, ("stories", "sums"), strict=True):
        medians = []
        for side in ("ours", "trl"):
            own = [run for run in runs if (run["task"], run["side"]) == (task, side)]
            reached = [next(one for one in run["points"] if one["accuracy"] >= run["target"]) for run in own]
            assert len(reached) >= 2
            medians.append(median(one["cpu_seconds"] for one in reached))
        ours, theirs = medians
        assert row[1] == f"{100 * own[0]['target']:.0f} %"
        assert row[2:] == [f"{ours:.1f} s", f"{theirs:.0f} s", f"{theirs / ours:.1f}", str(len(reached))]
