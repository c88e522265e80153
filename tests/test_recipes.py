"""Every recipe that ships resolves, and trains two steps with a small random model of its family."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest

import posttrain
from closeness import approx
from posttrain.recipes.document import interpretation_names, recipe_names
from posttrain.recipes.recipe import Recipe, load_recipe, validate_recipe
from posttrain.runs.launch import RunStart, launch
from posttrain.store.metric_names import find_metric
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore
from posttrain.sweeps.file import shipped_sweeps, training_recipe_names

pytestmark = pytest.mark.usefixtures("quick_stories")
PACKAGE = Path(posttrain.__file__).parent
# Those of `posttrain sae` and `posttrain sweep` have tests of their own.
OTHERS = {f"{name}.yaml" for name in (*interpretation_names(), *shipped_sweeps())}
FILES = sorted(
    path for path in (PACKAGE / "recipes").rglob("*.yaml") if str(path.relative_to(PACKAGE / "recipes")) not in OTHERS
)
NAMES = sorted(str(path.relative_to(PACKAGE / "recipes").with_suffix("")) for path in FILES)
# The family of each model that a recipe names; a new one is entered here with its transformers name.
FAMILIES = {
    "tiny": "qwen3",
    "tiny-sft": "qwen3",
    "runs/tiny-rm": "qwen3",
    "runs/tiny-sft-calculator": "qwen3",
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen3-0.6B-Base": "qwen3",
    "Qwen/Qwen3-1.7B": "qwen3",
    "Qwen/Qwen3-4B": "qwen3",
    "allenai/OLMo-2-0425-1B": "olmo2",
    "allenai/OLMo-2-0425-1B-SFT": "olmo2",
    "Qwen/Qwen3-14B": "qwen3",
    "Qwen/Qwen2.5-Math-1.5B": "qwen2",
    "openai-community/gpt2": "gpt2",
    "runs/tiny-lm-hh": "qwen3",
    "smollm2-135m": "llama",
    "runs/sft-gsm8k-smollm2-135m": "llama",
}
# Recipes that differ from another one below in the size of the model, in the task, or in an objective or advantage (all
# of which have tests of their own) alone, trained by `make test-slow`.
ALIKE = {
    *(
        f"preference/{name}"
        for name in ("apo-down", "apo-zero", "cdpo", "cpo", "dpo-normalized", "exo", "hinge", "ipo")
    ),
    *(f"preference/{name}" for name in ("nca", "robust-dpo", "rpo", "simpo")),
    *(f"rl/{name}" for name in ("cispo", "gmpo", "gspo", "maxrl", "reinforce-baseline", "rloo", "sapo")),
    "distillation/forward-kl",
    *("grpo-gsm8k-qwen3-0.6b", "grpo-gsm8k-qwen3-1.7b", "grpo-gsm8k-qwen3-4b", "grpo-hh-qwen3-0.6b"),
    *("rm-hh-qwen3-0.6b", "rm-hh-qwen3-1.7b", "rm-hh-qwen3-4b", "prm-prm800k-gpt2", "tiny/rm-hh", "tiny/lm-hh"),
    *("sft-math", "sft-math-qwen3-0.6b", "grpo-math-olmo2-1b", "dpo-preferences-olmo2-1b", "sft-hh-gpt2"),
    *("reasoning-gym/dr-grpo", "reasoning-gym/ppo", "reasoning-gym/cispo", "reasoning-gym/gspo"),
    *("reasoning-gym/reinforce", "reasoning-gym/rloo", "tiny/grpo", "tiny/grpo-demo", "rl/dr-grpo", "tiny/pretrain"),
    *("tiny/grpo-calculator", "tiny/grpo-top-p"),
    *("smollm2/grpo-chain-sum", "smollm2/sft", "smollm2/dpo", "sft-gsm8k-smollm2-135m", "grpo-gsm8k-smollm2-135m"),
}
TRAINED = [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in NAMES]
NUM_STEPS = 2
# A random model is never right. This reward is above every threshold that a recipe names, or 0.
COIN = {"name": "test_recipes:coin", "weight": 2.0}
# At its own reference the log-ratios of a policy are 0, so the first loss of a preference method is a constant.
LOSS_AT_THE_REFERENCE = {
    "preference/dpo": math.log(2),
    "preference/cdpo": math.log(2),
    "preference/dpo-normalized": math.log(2),
    "preference/robust-dpo": math.log(2),
    "preference/ipo": 5.0**2,  # (0 - 1 / (2 beta))² with beta = 0.1
    "preference/hinge": 1.0,
    "preference/exo": 0.5 * math.log(0.5 / 0.999) + 0.5 * math.log(0.5 / 0.001),
    "preference/nca": 2 * math.log(2),
    "preference/apo-zero": 1.0,
    "preference/apo-down": 1.0,
    "preference/kto": 0.5,
}


def coin(text: str) -> float:
    """0 or 1, a function of the text alone; it is 1 for about half of all texts."""
    return float(zlib.crc32(text.encode()) % 2)


def test_the_package_finds_every_file() -> None:
    assert training_recipe_names() == NAMES
    others = {*shipped_sweeps(), *interpretation_names()}
    assert set(recipe_names()) == {*NAMES, *others}
    assert {"sae-qwen3-14b-layer20", "tiny/sae"} <= set(interpretation_names())
    assert {"grpo-gsm8k", "grpo-math", "sft-math", "tiny/pretrain", "tiny/sft", "tiny/grpo"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_resolves_and_its_dump_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name).resolve()
    assert len(recipe.description) > 20
    path = tmp_path / "again.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(str(path)).resolve().fingerprint() == recipe.fingerprint()


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a small random model of each family, and of a teacher, with tiny's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "models" / "tiny")
    folders = {}
    for family in ("teacher", *sorted(set(FAMILIES.values()))):
        config = AutoConfig.for_model(
            "qwen3" if family == "teacher" else family,
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(int(family == "teacher"))
        folder = tmp_path_factory.mktemp(family)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[family] = folder
    return folders


@pytest.fixture(scope="module")
def local_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A few rows in the layout of each task that reads a file."""
    folder = tmp_path_factory.mktemp("data")
    sums = [(a, b) for a in range(2, 8) for b in range(2, 8)]
    rows = {
        "gsm8k": [
            {"question": f"What is {a} plus {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in sums
        ],
        "math": [{"problem": f"Find ${a}+{b}$.", "solution": f"It is $\\boxed{{{a + b}}}$."} for a, b in sums],
        "hh_rlhf": [
            {
                "chosen": f"\n\nHuman: {a} and {b}?\n\nAssistant: {a + b}.",
                "rejected": f"\n\nHuman: {a} and {b}?\n\nAssistant: {a * b + 1}!",
                "subset": "helpful-base",
            }
            for a, b in sums
        ],
        "ultrafeedback": [
            {"prompt": f"{a} + {b}?", "chosen": f"{a + b}.", "rejected": "No.", "score_chosen": 8, "score_rejected": 3}
            for a, b in sums
        ],
        "prm800k": [
            {
                "question": {"problem": f"Find ${a}+{b}$."},
                "label": {
                    "steps": [
                        {
                            "completions": [
                                {"text": f"It is {a + b}.", "rating": 1},
                                {"text": f"It is {a + b + 1}.", "rating": -1},
                            ],
                            "chosen_completion": 0,
                        }
                    ]
                },
            }
            for a, b in sums
        ],
        "jsonl": [{"prompt": f"{a} + {b}?", "response": f"{a} + {b} = {a + b}."} for a, b in sums],
        "judged_solutions": [
            {"question": f"{a} + {b}?", "response": f"It is {a + b + slip}.", "is_correct": slip == 0}
            for a, b in sums
            for slip in (0, 1)
        ],
        "math_shepherd": [
            {
                "input": f"{a} + {b}? Step 1: Add. ки\nStep 2: The answer is: {a + b} ки",
                "label": f"{a} + {b}? Step 1: Add. +\nStep 2: The answer is: {a + b} -",
                "task": "MATH",
            }
            for a, b in sums
        ],
        "mbpp": [
            {
                "task_id": 570 + 10 * a + b,  # of both the training and the validation split
                "prompt": f"Write a function that adds {a} and {b}.",
                "code": f"def add():\n    return {a} + {b}",
                "test_imports": [],
                "test_list": [f"assert add() == {a + b}"],
            }
            for a, b in sums
        ],
        "preferences": [{"prompt": f"{a} + {b}?", "chosen": f"{a + b}.", "rejected": f"{a * b}!"} for a, b in sums[1:]],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {name: folder / f"{name}.jsonl" for name in rows}


@pytest.fixture(scope="module")
def judge(
    random_models: dict[str, Path], local_data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run of a reward model, for recipes whose reward is one."""
    root = tmp_path_factory.mktemp("judge")
    return launch(small("rm-hh-gpt2", random_models, local_data), RunStart(root=root, name="judge")).folder


def small(name: str, models: dict[str, Path], data: dict[str, Path]) -> Recipe:
    """The recipe with a random model, little data and two steps; its method stays as it is."""
    return load_recipe(name, small_changes(load_recipe(name), models, data))


def small_changes(recipe: Recipe, models: dict[str, Path], data: dict[str, Path]) -> list[tuple[str, str]]:
    """Return the changes for that, as options."""
    changes: list[tuple[str, Any]] = [("train.steps", NUM_STEPS), ("train.warmup_steps", 0), ("train.save_every", 0)]
    if recipe.model.init is None:
        if not Path(recipe.model.name).is_dir():
            changes.append(("model.name", str(models[FAMILIES[recipe.model.name]])))
        changes.append(("model.dtype", "float32"))
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 1, "head_dim": 16}
        changes += [(f"model.init.config.{key}", value) for key, value in sizes.items()]
        changes += [("model.init.tokenizer.num_documents", 200)]
    if recipe.model.adapter is not None:
        changes.append(("model.adapter.rank", 4))
    if recipe.task.name in data:
        changes.append(("task.path", str(data[recipe.task.name])))
        if recipe.task.name != "mbpp":  # whose splits are by the number of a row
            changes.append(("task.validation_share", 0.3))
        if "test_share" in recipe.task.options:
            changes.append(("task.test_path", str(data[recipe.task.name])))
    elif recipe.task.name != "mixture":
        changes.append(("task.size", 200))
    if recipe.teacher is not None and recipe.teacher.name != "self":
        changes.append(("teacher.name", str(models["teacher"])))
    if recipe.rollout is not None:
        changes += [("rollout.num_prompts", 2 * recipe.train.num_minibatches), ("rollout.max_tokens", 6)]
        changes += [("prompt.max_prompt_tokens", 1500)]
    else:
        changes += [("data.batch_size", 2)]
    changes += [("eval.every", NUM_STEPS), ("eval.num_examples", 3), ("eval.max_tokens", 6), ("eval.tasks", [])]
    return [(key, json.dumps(value)) for key, value in changes]


def with_coin(recipe: Recipe, judge: Path) -> Recipe:
    """The recipe with one more reward, which a random model sometimes gets; ``judge`` stands for a reward's run."""
    data = recipe.dump()
    if recipe.rollout is not None:
        data["rewards"] = [word | ({"run": str(judge)} if "run" in word else {}) for word in data["rewards"]]
        data["rewards"] = [*data["rewards"], COIN]
        if data["rollout"]["uniform_by"] != "reward":  # it is never right, so no group would differ in that part
            data["rollout"]["uniform_by"] = COIN["name"]
    return validate_recipe(data)


def steps_of(folder: Path) -> list[dict[str, float]]:
    every = MetricsLog(folder / "metrics.jsonl").read()
    names = {name for row in every for name in (*row.metrics, *row.timing)}
    assert [name for name in names if find_metric(name) is None] == [], "add them to posttrain.store.metric_names"
    rows = [row for row in every if "loss" in row.metrics]
    assert [row.step for row in rows] == [1, 2]
    return [row.metrics for row in rows]


@pytest.mark.parametrize("name", TRAINED)
def test_every_recipe_trains_two_steps(
    name: str, random_models: dict[str, Path], local_data: dict[str, Path], judge: Path, tmp_path: Path
) -> None:
    recipe = with_coin(small(name, random_models, local_data), judge)
    result = launch(recipe, RunStart(root=tmp_path, name="run"))
    assert (result.step, result.reason) == (NUM_STEPS, "finished")
    steps = steps_of(result.folder)
    assert all(math.isfinite(value) for metrics in steps for value in metrics.values())
    assert all(metrics["grad_norm"] > 0 and metrics["trained_tokens"] > 0 for metrics in steps)
    assert [r["n"] for r in result.evaluations.values()] == [3.0]
    store = RolloutStore(result.folder / "rollouts.db", read_only=True)
    if recipe.rollout is None:
        assert store.count_training() == {}
        if "nll" in steps[0]:  # a random model knows nothing: its loss is the logarithm of the vocabulary's size
            assert steps[0]["nll"] == approx(math.log(_vocab_size(result.folder)), rel=0.05)
        else:  # and a random head hardly prefers one answer
            assert steps[0]["loss"] == approx(math.log(2), abs=0.1)
    else:
        fresh = 1 if recipe.train.ppo_epochs * recipe.train.num_minibatches >= NUM_STEPS else NUM_STEPS
        assert sum(store.count_training().values()) == fresh * recipe.rollout.num_prompts * recipe.rollout.group_size
        assert {word.name for word in recipe.rewards} <= set(store.training(step=1, limit=1)[0].parts)
        check_first_step(name, recipe, steps[0])
    saved = result.folder / "checkpoints" / f"step-{NUM_STEPS:06d}"
    weights = "model.safetensors" if recipe.model.adapter is None else "adapter_model.safetensors"
    assert (saved / weights).is_file()


def check_first_step(name: str, recipe: Recipe, metrics: dict[str, float]) -> None:
    """Check the metrics before any weight has moved."""
    assert metrics["kl_sampler"] == approx(0.0, abs=1e-8)  # the trainer scores what the sampler sampled
    assert metrics.get("effective_sample_size", 1.0) == approx(1.0, abs=1e-6)
    assert metrics.get("ratio", 1.0) == approx(1.0, abs=1e-4)
    assert metrics.get("clip_fraction", 0.0) == 0.0
    assert metrics.get("accepted_groups", 1.0) == 1.0
    assert metrics.get("kl_in_reward", 0.0) == approx(0.0, abs=1e-4)
    if name in LOSS_AT_THE_REFERENCE:
        assert metrics["loss"] == approx(LOSS_AT_THE_REFERENCE[name], rel=1e-4)
    every = recipe.rollout is not None and recipe.resolve().rollout.select.name == "every"
    assert 0.0 < metrics["selected"] <= 1.0
    assert (metrics["selected"] == 1.0) == every


def test_the_table_of_losses_names_recipes() -> None:
    assert set(LOSS_AT_THE_REFERENCE) | ALIKE <= set(NAMES)


@pytest.mark.parametrize("name", ["rl/rejection-sampling", "preference/kto"])
def test_where_nothing_is_right_nothing_is_updated(
    name: str, random_models: dict[str, Path], local_data: dict[str, Path], tmp_path: Path
) -> None:
    """A random model is never right, so these select nothing: the steps pass and the weights stay."""
    from safetensors.torch import load_file

    recipe = small(name, random_models, local_data)
    result = launch(recipe, RunStart(root=tmp_path, name="run"))
    assert (result.step, result.reason) == (NUM_STEPS, "finished")
    for metrics in steps_of(result.folder):
        assert (metrics["loss"], metrics["grad_norm"], metrics["trained_tokens"]) == (0.0, 0.0, 0.0)
    assert steps_of(result.folder)[0]["selected"] == 0.0
    before = load_file(Path(recipe.model.name) / "model.safetensors")
    after = load_file(result.folder / "checkpoints" / f"step-{NUM_STEPS:06d}" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(bool((before[key] == after[key]).all()) for key in before)


def _vocab_size(folder: Path) -> int:
    config = json.loads((folder / "checkpoints" / f"step-{NUM_STEPS:06d}" / "config.json").read_text())
    return int(config["vocab_size"])
