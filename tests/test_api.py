"""The public Python interface: runs, measuring, training, sweeps, and loops of one's own."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import posttrain as pt
from closeness import approx
from posttrain import registry
from posttrain.api.inputs import data_word, model_name, overrides_of, plain_recipe, reward_words
from posttrain.api.run import Run
from posttrain.api.training import given, read_recipe
from posttrain.errors import RecipeError, RewardFailure, RunConflict, UnallowedCode, UsageError
from refusing import refuses

pytestmark = pytest.mark.usefixtures("no_curves")
ROWS = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(40)]
RECIPE = {"task": "sums", "objective": "grpo", "advantage": "centered", "rollout": {}}
SMALL: dict[str, Any] = {
    "model": "tiny-sft",
    "data": ROWS,
    "template": {"name": "r1_zero", "preamble": ""},
    "num_prompts": 2,
    "group_size": 2,
    "rollout__max_tokens": 8,
    "steps": 2,
    "progress": False,
}
WITHOUT_EVALUATION = {"eval__every": 0}
SCRIPT = """\
import posttrain as pt
rows = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(300)]
train_rows, held_out = rows[:200], rows[200:]
def short(completions, **kwargs):                    # TRL's signature; (text, answer) -> float works too
    return [1.0 - len(c) / 200 for c in completions]
run = pt.train("tiny/grpo", data=train_rows, rewards=["correct", (short, 0.1)], steps=50, lr=1e-5, run="mine")
measured = pt.evaluate(run, data=held_out).accuracy  # value, interval, items
answers = pt.generate(run, ["What is 3 plus 4?"])
run = pt.load_run("runs/mine")                       # .metrics, .rollouts(step=10), .checkpoint("best"), .report, ...
"""
EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_own_loop.py"


def brief(text: str) -> float:
    return 1.0 - len(text) / 200


def short(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 - len(text) / 200 for text in completions]


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


AS_MINE = SMALL | {"rewards": ["correct", (brief, 0.5), (short, 0.1)], "eval__every": 2, "eval__num_examples": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two steps, with an evaluation before and after."""
    return pt.train(RECIPE, run="mine", runs_dir=tmp_path_factory.mktemp("api") / "runs", **AS_MINE)


def test_import_posttrain_loads_only_the_standard_library():
    code = (
        "import sys, posttrain; print(len([n for n in sys.modules if n.split('.')[0] in ('torch', 'numpy', 'yaml')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_public_names_have_types_and_an_example():
    stub = Path(pt.__file__).with_suffix(".pyi").read_text()
    assert sorted(re.findall(r"import (\w+) as \1$", stub, re.MULTILINE)) == sorted(pt._PUBLIC)
    for name in pt._PUBLIC:
        assert (getattr(pt, name).__doc__ or "").count("Examples:") == 1, name
        assert name in dir(pt)
    with refuses(AttributeError, "no attribute 'tran'"):
        pt.tran  # noqa: B018


def test_train_with_rows_and_functions_records_their_rewards(run: Run):
    assert run.status.state == "finished"
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert [(word["name"], word["weight"]) for word in run.recipe["rewards"]] == [
        ("correct", 1.0), ("test_api:brief", 0.5), ("test_api:short", 0.1),
    ]  # fmt: skip
    for rollout in run.rollouts(step=1):
        expected = 1.0 - len(rollout.completion) / 200
        assert rollout.parts["test_api:brief"] == rollout.parts["test_api:short"] == approx(expected)
        assert rollout.reward == approx(rollout.parts["correct"] + 0.6 * expected)
    assert len(run.rollouts(step=1)) == 4
    assert len(run.rollouts()) == 8


def test_run_shows_its_evaluations_checkpoints_and_files(run: Run, tmp_path: Path):
    assert [(one["step"], one["task"]) for one in run.evaluations] == [(0, "jsonl/validation"), (2, "jsonl/validation")]
    assert run.checkpoint() == run.checkpoint("last") == run.checkpoint(2) == run.folder / "checkpoints" / "step-000002"
    assert run.report == run.folder / "report.html"
    assert (run.name, os.fspath(run)) == ("mine", str(run.folder))
    with refuses(UsageError, "'bset'", "'best'", "Available: 2"):
        run.checkpoint("bset")
    assert same(run.export(tmp_path / "out"), run.checkpoint("best"))
    with refuses(UsageError, "has no adapter"):
        run.export(tmp_path / "merged", merge=True)


def test_run_refuses_an_evaluation_and_weights_that_it_has_not(run: Run, tmp_path: Path):
    with refuses(UsageError, "'jsonl'", "'jsonl/validation'"):
        run.rollouts(evaluation="jsonl")
    with refuses(UsageError, "--weights", "'newest'"):
        run.export(tmp_path / "out", weights="newest")  # type: ignore[arg-type]


def test_load_run_by_path_or_name_finds_it(run: Run):
    assert pt.load_run(run.folder) == run
    assert pt.load_run("mine", runs_dir=run.folder.parent) == run
    with refuses(UsageError, "'mime'", "'mine'"):
        pt.load_run("mime", runs_dir=run.folder.parent)


def test_evaluate_on_rows_gives_value_interval_and_items(run: Run):
    measured = pt.evaluate(run, data=ROWS[:6], max_tokens=4, progress=False)
    accuracy = measured.accuracy
    assert [item.question for item in accuracy.items] == [row["question"] for row in ROWS[:6]]
    assert accuracy.value == float(accuracy) == sum(item.num_correct for item in accuracy.items) / 6
    low, high = accuracy.interval
    assert low <= accuracy.value <= high
    assert measured["truncated"].interval is None
    assert measured.folder.is_relative_to(run.folder / "evaluation")
    with refuses(UsageError, "'acuracy'", "'accuracy'"):
        measured["acuracy"]


def test_generate_answers_each_prompt_in_order(run: Run):
    messages = [{"role": "user", "content": "What is 1 plus 1?"}]
    answers = pt.generate(run, ["What is 3 plus 4?", messages], samples=2, max_tokens=6)
    assert [answer.prompt for answer in answers] == ["What is 3 plus 4?"] * 2 + ["What is 1 plus 1?"] * 2
    assert all(0 < answer.num_tokens <= 6 and answer.text.startswith("<think>") for answer in answers)
    alone = pt.generate(run, "What is 3 plus 4?", samples=2, max_tokens=6)
    assert [answer.text for answer in alone] == [answer.text for answer in answers[:2]]
    with refuses(UsageError, "prompts.0"):
        pt.generate(run, [" "])


def test_train_in_a_thread_and_again_gives_two_equal_runs(run: Run):
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(pt.train(RECIPE, runs_dir=run.folder.parent, **AS_MINE)))
    thread.start()
    thread.join()
    assert [(again.name, again.status.state) for again in runs] == [("run", "finished")]
    assert same(runs[0].checkpoint(), run.checkpoint())
    assert len(list((run.folder.parent / ".rows").iterdir())) == 1


def test_callback_that_stops_ends_the_run_which_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps, paths = [], []

    def on_step(event: Any) -> None:
        steps.append((event.step, "reward" in event.metrics))
        if event.step == 1:
            event.stop()

    options = {"run": "mine", "runs_dir": tmp_path, "rewards": [lambda text: len(text) / 100], **WITHOUT_EVALUATION}
    stopped = pt.train(
        RECIPE, **options, **SMALL, on_step=on_step, on_checkpoint=lambda event: paths.append(event.path)
    )
    assert (stopped.status.state, stopped.status.step, steps) == ("stopped", 1, [(1, True)])
    assert paths == [stopped.checkpoint(1)]
    assert stopped.report.is_file()
    log = (stopped.folder / "log.txt").read_text()
    assert "python_session:function_" in log
    assert "no other process can resume this run" in log
    with refuses(RunConflict, "1 of 2"):
        pt.train(RECIPE, **options, **SMALL)
    resumed = pt.train(RECIPE, **options, **SMALL, resume=True)
    monkeypatch.setattr(registry, "_FUNCTIONS", {})  # as in another session
    monkeypatch.setattr("posttrain.untrusted._FOLDERS", {})
    assert pt.evaluate(resumed, data=ROWS[:2], max_tokens=2, progress=False).results["n"] == 2
    monkeypatch.undo()
    whole = pt.train(RECIPE, **{**options, "run": "whole"}, **SMALL)
    assert resumed.status.state == "finished"
    assert same(resumed.checkpoint(), whole.checkpoint())


def test_function_of_a_session_with_several_processes_is_refused(tmp_path: Path):
    with refuses(UsageError, "python_session:function_"):
        pt.train(RECIPE, rewards=[lambda text: 1.0], runs_dir=tmp_path, processes=2, **SMALL)
    assert not (tmp_path / "run").exists()


def test_function_of_another_session_is_refused_by_name():
    with refuses(UnallowedCode, "Put it into"):
        registry.find("reward", "python_session:gone", "rewards.0")


def test_script_that_trains_is_imported_up_to_its_first_call(tmp_path: Path):
    (tmp_path / "api_script.py").write_text(
        SCRIPT.replace("import posttrain as pt\n", "import posttrain as pt\nX = 1\n")
    )
    from posttrain.untrusted import declare_code

    declare_code("api_script:short", tmp_path)
    function = registry.find("reward", "api_script:short").function
    assert function(completions=["a" * 20]) == [0.9]
    assert not hasattr(sys.modules["api_script"], "run")


def test_reward_in_the_form_of_trl_gets_the_columns_of_the_rows(tmp_path: Path):
    seen: list[dict[str, Any]] = []

    def graded(prompts: list[str], completions: list[str], answer: list[str], level: list[int | None]) -> list[Any]:
        seen.append({"prompts": prompts, "answer": answer, "level": level})
        return [None if one is None else float(one) for one in level]

    rows = [ROWS[0] | {"level": 3}, ROWS[1]]
    settings = SMALL | {"data": {"name": "jsonl", "path": data_word(rows, tmp_path)["path"], "split": "all"}}
    run = pt.train(RECIPE, rewards=[graded], runs_dir=tmp_path, **settings | {"steps": 1}, **WITHOUT_EVALUATION)
    pairs = {(a, b) for one in seen for a, b in zip(one["answer"], one["level"], strict=True)}
    assert pairs == {("0", 3), ("2", None)}
    assert sorted(rollout.reward for rollout in run.rollouts()) == [0.0, 0.0, 3.0, 3.0]


def test_reward_with_the_wrong_number_of_results_is_refused(tmp_path: Path):
    with refuses(RewardFailure, "returned 1 results"):
        pt.train(RECIPE, rewards=[lambda completions, **rest: [1.0]], runs_dir=tmp_path, **SMALL, **WITHOUT_EVALUATION)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr": 1e-5, "steps": 3, "seed": 1}, [("train.lr", "1e-05"), ("train.steps", "3"), ("train.seed", "1")]),
        ({"rollout__max_tokens": 8}, [("rollout.max_tokens", "8")]),
        ({"rollout": {"max_tokens": 8}}, [("rollout.max_tokens", "8")]),
        ({"rollout.max_tokens": 8}, [("rollout.max_tokens", "8")]),
        ({"objective": {"name": "grpo", "clip_high": 0.3}}, [("objective", '{"name": "grpo", "clip_high": 0.3}')]),
        ({"objective": brief}, [("objective", '"test_api:brief"')]),
        ({"train__max_grad_norm": None}, [("train.max_grad_norm", "null")]),
    ],
)
def test_keywords_mean_keys_of_the_recipe(keys: dict[str, Any], expected: list[tuple[str, str]]):
    assert overrides_of(keys) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rate": 1e-5}, "learning_rate"),
        ({"stesp": 3}, "stesp"),
        ({"max_tokens": 3}, "max_tokens: several recipe sections"),
        ({"train__lrr": 3}, "train.lrr"),
        ({"recipe_file": object()}, "recipe_file"),
        ({"task": "sums"}, "task:"),
        ({"train": {"lr": 1e-4}, "lr": 1e-5}, "train.lr: given twice"),
    ],
)
def test_train_with_an_unknown_keyword_is_refused_with_a_suggestion(keys: dict[str, Any], message: str, tmp_path: Path):
    with refuses(RecipeError, message):
        pt.train(RECIPE, runs_dir=tmp_path, **SMALL, **keys)


def test_data_of_each_kind_is_a_task(tmp_path: Path):
    word = data_word(iter(ROWS), tmp_path)
    assert word["name"] == "jsonl"
    assert [json.loads(line) for line in Path(word["path"]).read_text().splitlines()] == ROWS
    assert (
        data_word([{"prompt": "a", "chosen": "b", "rejected": "c", "margin": None}], tmp_path)["name"] == "preferences"
    )
    datasets = pytest.importorskip("datasets")
    assert data_word(datasets.Dataset.from_list(ROWS), tmp_path) == word
    assert data_word("gsm8k", tmp_path) == {"name": "gsm8k"}
    assert data_word(Path("rows.jsonl"), tmp_path) == {"name": "jsonl", "path": "rows.jsonl"}
    assert data_word("hf:org/name", tmp_path) == {"name": "jsonl", "path": "hf:org/name"}
    assert data_word({"name": "sums", "size": 4}, tmp_path) == {"name": "sums", "size": 4}
    pandas = pytest.importorskip("pandas")
    assert data_word(pandas.DataFrame(ROWS), tmp_path) == word
    missing = data_word(pandas.DataFrame([ROWS[0], ROWS[1] | {"level": 2.0}]), tmp_path)["path"]
    assert [json.loads(line).get("level") for line in Path(missing).read_text().splitlines()] == [None, 2.0]
    for bad, message in [
        ([], "no rows"), (["a"], "row 1 is"), ({"a": 1}, "'name' is missing"), (3, "is not data"),
        ("summs", "'summs'"), ("org/name", "write hf:org/name"),
    ]:  # fmt: skip
        with refuses(UsageError, message):
            data_word(bad, tmp_path)
    with refuses(UsageError, "row 1 cannot"):
        data_word([{"prompt": object()}], tmp_path)


def test_eval_data_is_evaluated_and_all_of_data_is_trained(tmp_path: Path):
    run = pt.train(RECIPE, run="mine", runs_dir=tmp_path, eval_data=ROWS[:3], eval__every=1, **SMALL | {"steps": 1})
    assert [(one["task"], one["n"]) for one in run.evaluations] == [("jsonl/all", 3.0)] * 2
    assert run.recipe["task"]["split"] == "all"


def test_rewards_are_names_functions_and_mappings_with_weights():
    words = reward_words(["correct", (brief, 0.5), {"name": "truncated", "weight": 2}, ("xml_format", 0.2)])
    assert [(word["name"], word.get("weight")) for word in words] == [
        ("correct", None), ("test_api:brief", 0.5), ("truncated", 2), ("xml_format", 0.2),
    ]  # fmt: skip
    weights = reward_words({"correct": 0.5, brief: 0.1})
    assert [(word["name"], word["weight"]) for word in weights] == [("correct", 0.5), ("test_api:brief", 0.1)]
    assert reward_words({"name": "correct", "weight": 2}) == [{"name": "correct", "weight": 2}]
    with refuses(UsageError, "rewards.0"):
        reward_words([3])  # type: ignore[list-item]


def test_recipe_as_a_mapping_extends_a_shipped_one_and_holds_functions():
    own = {"extends": "tiny/grpo", "train": {"steps": 3}, "rewards": [brief], "optimizer": {"weight_decay": 0.1}}
    recipe, _ = read_recipe(plain_recipe(own), (), given("runs", None, None, None, {"name": "tiny", "dtype": "bf16"}))
    assert (recipe.train.steps, recipe.train.lr, recipe.rewards[0].name) == (3, 3e-5, "test_api:brief")
    assert (recipe.optimizer.name, recipe.optimizer.options["weight_decay"], recipe.model.dtype) == (
        "adamw",
        0.1,
        "bf16",
    )
    with refuses(RecipeError, "extends", "'tiny/grpo'"):
        read_recipe({"extends": "tiny/gropo"}, ())
    with refuses(UsageError, "recipe"):
        plain_recipe(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda runs: pt.train(RECIPE, runs_dir=runs, eval_data=ROWS[:3], **SMALL), "eval_data"),
        (lambda runs: pt.train(RECIPE, runs_dir=runs, on_step=3, **SMALL), "on_step"),
        (lambda runs: pt.train(RECIPE, runs_dir=runs, resume="last", **SMALL), "resume"),
        (lambda runs: pt.train(RECIPE, runs_dir=runs, data=lambda: iter(ROWS), steps=1), "task"),
        (lambda runs: pt.generate("tiny", "a", samples=0), "samples"),
        (lambda runs: pt.generate("tiny", "a", n=2), "(answers to each)"),
        (lambda runs: pt.generate("tiny", "a", length_penalty=1.1), "length_penalty"),
        (lambda runs: pt.generate("tiny", "a", temprature=1.0), "temprature"),
        (lambda runs: pt.generate("tiny", "a", max_new_tokens=4), "max_new_tokens"),
        (lambda runs: pt.generate("tiny", None), "prompts"),
        (lambda runs: pt.sweep({"recipe": "tiny/grpo", "over": {"lr": [1]}}, lr=1, runs_dir=runs), "train.lr: given"),
        (lambda runs: pt.sweep("tiny/grpo", over={"train.lr": 1}, runs_dir=runs), "over:"),
        (lambda runs: pt.sweep({"recipe": "tiny/grpo", "seeds": 1}, seeds=2, runs_dir=runs), "seeds: given twice"),
        (lambda runs: pt.sweep({"recipe": "tiny/grpo", "seeds": [0, 1]}, runs_dir=runs), "seeds"),
    ],
)
def test_calls_with_wrong_arguments_are_refused_by_name(call: Any, message: str, tmp_path: Path):
    with refuses(UsageError, message):
        call(tmp_path)


def test_generate_takes_one_text_and_any_iterable_of_prompts():
    options = {"max_tokens": 2, "temperature": 0}
    texts = [answer.text for answer in pt.generate("tiny-sft", (text for text in ["a", "b"]), **options)]
    assert len(texts) == 2
    assert [answer.text for answer in pt.generate("tiny-sft", "a", **options)] == texts[:1]


def test_model_by_the_name_of_a_run_is_its_folder(tmp_path: Path):
    for name in ("mine", "tiny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").touch()
    names = [model_name(name, tmp_path) for name in ("mine", "tiny", "other", str(tmp_path / "mine"))]
    assert names == [str(tmp_path / "mine"), "tiny", "other", str(tmp_path / "mine")]


def test_model_that_is_loaded_is_saved_once_by_its_weights(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain.models.sources import TINY

    loaded = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    name = model_name(loaded, tmp_path)
    assert model_name(loaded, tmp_path) == name
    assert [path.name for path in (tmp_path / ".models").iterdir()] == [Path(name).name]
    text = pt.generate(loaded, ["What is 3 plus 4?"], max_tokens=4, runs_dir=tmp_path, template="r1_zero")[0].text
    assert text == pt.generate("tiny", ["What is 3 plus 4?"], max_tokens=4)[0].text
    with refuses(UsageError, "tokenizer: (model, tokenizer)"):
        model_name(loaded[0], tmp_path)


def test_trainer_loop_of_the_example_equals_train_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLE.read_text().splitlines()) <= 80
    example = runpy.run_path(str(EXAMPLE), run_name="grpo_own_loop")
    example["train"](3, "own")
    run = pt.train(
        RECIPE,
        model="tiny-sft",
        data=example["ROWS"],
        rewards=["correct", (example["brief"], 0.5)],
        steps=3,
        progress=False,
        **WITHOUT_EVALUATION,
        **example["SETTINGS"],
    )
    assert same(tmp_path / "own", run.checkpoint())
    assert not same(tmp_path / "own", Path(pt.__file__).parent / "models" / "tiny-sft")


def test_trainer_takes_objectives_by_name_or_function(tmp_path: Path):
    from posttrain.types import Batch, Loss, Outputs

    settings = {name: SMALL[name] for name in ("data", "template", "rollout__max_tokens")}
    trainer = pt.Trainer("tiny-sft", runs_dir=tmp_path, rewards=[brief], **settings)
    groups = trainer.sample(["What is 3 plus 4?", trainer.prompts(1)[0]], samples=2)
    assert [len(group) for group in groups] == [2, 2]
    with refuses(UsageError, "completion has no"):
        trainer.forward_backward(groups)
    for group in groups:
        for number, rollout in enumerate(group):
            rollout.advantage = float(number)
    batch = trainer.batch(groups)

    def likelihood(outputs: Outputs, rows: Batch) -> Loss:
        return Loss(-outputs.logprobs * rows.field("advantages"))

    named = trainer.forward_backward(batch, "reinforce").loss
    assert trainer.forward_backward(batch, likelihood).loss == approx(named)
    assert trainer.optim_step(lr=1e-4) > 0
    assert trainer.step == 1
    with refuses(UsageError, "objective: 'distillation'", "pt.Trainer"):
        trainer.forward_backward(batch, "distillation")
    with refuses(UsageError, "'rollout'"):
        pt.Trainer("tiny-sft", {"task": "sums", "objective": "cross_entropy", "data": {}}, runs_dir=tmp_path)


def test_trainer_in_the_wrong_order_or_without_completions_is_refused(tmp_path: Path):
    trainer = pt.Trainer("tiny-sft", data=ROWS, group_size=2, num_prompts=2, rollout__max_tokens=2, runs_dir=tmp_path)
    with refuses(UsageError, "optim_step"):
        trainer.optim_step()
    assert [len(group) for group in trainer.sample("Hi?")] == [2]
    groups = trainer.sample(trainer.prompts(1))
    for bad in ([], [[]], groups[0]):
        with refuses(UsageError, "batch"):
            trainer.forward_backward(bad)  # type: ignore[arg-type]
    with refuses(UsageError, "step:"):
        trainer.prompts(0)
    for rollout in (one for group in groups for one in group):
        rollout.advantage = 1.0
    trainer.forward_backward(groups)
    with refuses(UsageError, "lr is nan"):
        trainer.optim_step(lr=float("nan"))
    assert trainer.optim_step(lr=1e-5) > 0
    assert trainer.step == 1


def test_sweep_with_a_wrong_description_is_refused(tmp_path: Path):
    for spec, message in [
        ({"recipe": "tiny/grpo", "ovr": {}}, "ovr:"),
        ({"seeds": 2}, "recipe"),
        ({"recipe": "tiny/grpo", "over": {"train.lr": 1e-5}}, "over:"),
    ]:
        with refuses(RecipeError, message):
            pt.sweep(spec, runs_dir=tmp_path)


def run_file(path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments, str(path)] if not arguments else [sys.executable, *arguments],
        cwd=path.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_script_runs_as_it_stands(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT + "print(measured.value, answers, run.report, run.export('out'))\n")
    run_file(tmp_path / "script.py")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    run = pt.load_run(tmp_path / "runs" / "mine")
    assert run.status.step == 50
    assert run.recipe["rewards"][1]["name"] == "script:short"
    assert (run.folder / "curves.png").is_file()


@pytest.mark.slow
def test_script_trains_in_two_processes_and_is_resumed_by_the_command_line(tmp_path: Path):
    small = "steps=2, num_prompts=2, group_size=2, rollout__max_tokens=8, eval__every=0, processes=2"
    text = SCRIPT.replace("steps=50", f"{small}, on_step=lambda event: event.step == 1 and event.stop()")
    (tmp_path / "script.py").write_text(text.partition("measured =")[0])
    run_file(tmp_path / "script.py")
    run = pt.load_run(tmp_path / "runs" / "mine")
    assert (run.status.state, run.status.step) == ("stopped", 1)
    command = ("-m", "posttrain", "runs", "resume", "mine")
    refused = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--allow-code script:short" in refused.stderr
    run_file(tmp_path / "script.py", *command, "--allow-code", "script:short")
    assert (run.status.state, run.status.step) == ("finished", 2)


@pytest.mark.slow
def test_sweep_trains_every_value_and_seed(tmp_path: Path):
    spec = {"recipe": "tiny/grpo", "over": {"train.lr": [1e-5, 1e-4]}, "seeds": 2}
    done = pt.sweep(
        spec, data=ROWS, rewards=["correct", (brief, 0.1)], runs_dir=tmp_path, progress=False,
        steps=2, num_prompts=2, group_size=2, rollout__max_tokens=8, eval__num_examples=4, eval__every=2,
    )  # fmt: skip
    assert done.failures == {}
    names = [f"{lr}-seed{seed}" for lr in ("lr-0.0001", "lr-1e-05") for seed in (0, 1)]
    assert sorted(run.name for run in done.runs) == names
    assert done.report is not None
    assert done.report.is_file()


def test_sweep_takes_over_rows_and_seeds_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    monkeypatch.setattr("posttrain.api.sweep.make_sweep", lambda plan, *_, **__: plans.append(plan))
    pt.sweep("tiny/grpo", over={"train.lr": [1e-5, 1e-4]}, seeds=2, runs_dir=tmp_path)
    pt.sweep({"recipe": "tiny/grpo", "over": {"train.lr": [1e-5, 1e-4]}, "seeds": 2}, runs_dir=tmp_path)
    pt.sweep("tiny/grpo", over={"train.lr": [1e-5, 1e-4]}, runs_dir=tmp_path)
    by_name, in_mapping, one_seed = plans
    assert [trial.name for trial in by_name.trials] == [trial.name for trial in in_mapping.trials]
    assert by_name.folder == in_mapping.folder
    assert len(by_name.trials) == 4
    assert len(one_seed.trials) != len(by_name.trials)


def test_sweep_over_texts_varies_exactly_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    monkeypatch.setattr("posttrain.api.sweep.make_sweep", lambda plan, *_, **__: plans.append(plan))
    pt.sweep("tiny/sft", over={"model.name": ["tiny", "tiny-sft"]}, seeds=1, runs_dir=tmp_path)
    pt.sweep("tiny/sft", over={"description": ["größer", "10"]}, seeds=1, runs_dir=tmp_path)
    assert [row.recipe.model.name for row in plans[0].rows] == ["tiny", "tiny-sft"]
    assert [row.recipe.description for row in plans[1].rows] == ["größer", "10"]


def test_sweep_over_values_of_several_keys_is_refused(tmp_path: Path) -> None:
    for values in ([{"lr": 1e-4}, {"steps": 4}], [{"lr": 1e-4, "steps": 4}]):
        with refuses(UsageError, "over", "train.lr", "train.steps"):
            pt.sweep("tiny/sft", over={"train": values}, runs_dir=tmp_path)


@pytest.mark.parametrize(("progress", "num_lines"), [(True, 1), (False, 0)])
def test_generate_without_progress_says_nothing(
    progress: bool, num_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr("posttrain.api.measure.say_template", lambda *given: said.append(given))
    pt.generate("tiny", "What is 3 plus 4?", max_tokens=2, progress=progress)
    assert len(said) == num_lines
