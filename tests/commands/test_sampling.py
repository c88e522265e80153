"""Models by name, with their templates and engines; `posttrain generate`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.data.base import choose_task
from posttrain.errors import UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import Component
from posttrain.runs.models import find_source
from posttrain.sampling.models import complete_template, open_model
from posttrain.types import Message
from posttrain.untrusted import declare_code
from refusing import refuses

pytestmark = pytest.mark.usefixtures("no_curves")


@pytest.mark.parametrize(
    ("task", "recipe", "options"),
    [
        (None, None, {"split": "test"}),
        (Component(name="stories", split="validation"), None, {"split": "validation"}),
        (None, ("tiny/grpo", [("task.max_steps", "2")]), {"max_steps": 2, "split": "test"}),
        (None, ("grpo-gsm8k", [("task.path", "train.jsonl")]), {"split": "validation"}),
        (None, ("grpo-hh-gpt2", []), {"test_share": 0.5, "split": "validation"}),
    ],
)
def test_choose_task_measures_what_was_not_trained_on(
    task: Component | None, recipe: tuple[str, list[tuple[str, str]]] | None, options: dict[str, object]
) -> None:
    chosen = choose_task(task, "tiny" if recipe is None else "runs/x", load_recipe(*recipe).task if recipe else None)
    assert {key: chosen.options.get(key) for key in options} == options


def test_generation_is_a_function_of_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        assert main(["generate", "tiny", "--samples", "2", "--max-tokens", "8", "--seed", seed]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    assert shown[0].count("mean log-prob") == 2


def test_generation_from_the_likeliest_token_is_greedy(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for options in (["--top-k", "1"], ["--top-p", "1e-6"], ["--temperature", "0"]):
        assert main(["generate", "tiny", "--max-tokens", "8", *options]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]


def test_generation_answers_the_prompt_that_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny", "Eva has 3 shells [bold].", "--temperature", "0", "--max-tokens", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Eva has 3 shells [bold].\n")
    assert "4 tokens · cut off" in shown or "ended by itself" in shown
    assert "wrong" not in shown  # nobody knows the right answer


def test_generation_asks_an_example_of_the_task_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text('{"prompt": "What is 2 + 5?", "answer": "7"}\n')
    task = ["--task", "jsonl", "--task.path", "sums.jsonl", "--task.split", "all"]
    assert main(["generate", "tiny", *task, "--max-tokens", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("What is 2 + 5?\n")
    assert "wrong, it is 7" in shown
    assert main(["generate", "tiny", "Hello", *task]) == 2
    assert "--task" in capsys.readouterr().err
    assert main(["generate", "tiny", "What?", "--limit", "2"]) == 2
    assert "--limit" in capsys.readouterr().err


def test_generation_limit_rows_have_samples_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny", "--samples", "2", "--limit", "3", "--max-tokens", "4", "--seed", "5"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("mean log-prob") == 6
    assert main(["generate", "tiny", "--samples", "2", "--max-tokens", "4", "--seed", "5"]) == 0
    assert shown.startswith(capsys.readouterr().out.rstrip()), "the first row is that of one alone"


@pytest.mark.usefixtures("quick_stories")
def test_a_reward_model_is_not_requested_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--task.size", "40", "--data.batch_size", "2", "--train.steps", "1", "--eval.every", "0"]
    assert main(["train", "tiny/rm", "--runs-dir", str(tmp_path), "--run", "rm", *small]) == 0
    assert "ask it" not in capsys.readouterr().out
    assert "posttrain generate" not in (tmp_path / "rm" / "report.html").read_text()
    assert main(["generate", str(tmp_path / "rm")]) == 2
    assert "bradley_terry" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint after each, under a template with an option of its own."""
    root = tmp_path_factory.mktemp("runs")
    small = ["--task.size", "40", "--data.batch_size", "2", "--train.steps", "2", "--train.save_every", "1"]
    small += ["--eval.every", "0", "--eval.max_tokens", "17", "--prompt.template.preamble", "Think."]
    assert main(["train", "tiny/sft", "--runs-dir", str(root), "--run", "taught", "--quiet", *small]) == 0
    return root / "taught"


def test_a_name_stands_for_a_run_a_checkpoint_or_a_model(run: Path) -> None:
    for name in (str(run), "taught"):
        source = find_source(name, run.parent)
        assert (source.label, Path(source.path), source.run) == ("taught", run, run)
    folder = run / "checkpoints" / "step-000001"
    source = find_source(str(folder), "elsewhere")
    assert (source.label, Path(source.path), source.run) == ("taught@step-000001", folder, run)
    assert source.recipe is not None
    assert (source.template, source.max_tokens) == (Component(name="r1_zero", preamble="Think."), 17)
    with refuses(UsageError, "step-000009: no such checkpoint", "step-000002"):
        find_source(str(run / "checkpoints" / "step-000009"), run.parent)
    plain = find_source("tiny", run.parent)
    assert (plain.label, plain.run, plain.template, plain.max_tokens) == ("tiny", None, Component(name="r1_zero"), 256)


def test_a_checkpoint_has_its_own_weights_and_its_runs_template(run: Path) -> None:
    samplers = [open_model(find_source(str(run / "checkpoints" / f"step-00000{step}"), run.parent)) for step in (1, 2)]
    first, second = (dict(sampler.model.named_parameters()) for sampler in samplers)
    assert any(not first[name].equal(second[name]) for name in first)
    newest = dict(open_model(find_source("taught", run.parent)).model.named_parameters())
    assert all(newest[name].equal(second[name]) for name in second)
    assert samplers[0].source.max_tokens == 17
    drawn = samplers[0].sampling(5, 0.7, 3, 0.9)
    assert (drawn.max_tokens, drawn.temperature, drawn.top_k, drawn.top_p) == (5, 0.7, 3, 0.9)
    assert samplers[0].tokenizer.eos_token_id in drawn.stop_ids
    (piece,) = samplers[0].grader.template.prompt((Message("user", "Hello"),), samplers[0].tokenizer)[:1]
    assert piece.text.startswith("Think.")


def test_the_runs_own_template_keeps_its_options_when_it_is_named(run: Path) -> None:
    source = find_source(str(run), "elsewhere")
    assert complete_template(Component(name="r1_zero"), source) == Component(name="r1_zero", preamble="Think.")
    assert complete_template(Component(name="r1_zero", preamble=""), source) == Component(name="r1_zero", preamble="")
    assert complete_template(Component(name="", preamble="Go."), source) == Component(name="r1_zero", preamble="Go.")
    assert complete_template(Component(name="boxed"), source) == Component(name="boxed")
    assert complete_template(None, source) is None


def copy_of_tiny(folder: Path, *, has_chat_template: bool = True) -> str:
    """A model that no run here has trained, in a folder."""
    shutil.copytree(TINY, folder)
    if not has_chat_template:
        (folder / "chat_template.jinja").unlink()
    return str(folder)


def test_model_with_a_chat_template_is_spoken_to_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = copy_of_tiny(tmp_path / "mine")
    shown = {}
    for name, options in {"own": [], "chat": ["--template", "chat"], "r1_zero": ["--template", "r1_zero"]}.items():
        assert main(["generate", model, "Hi?", "--temperature", "0", "--max-tokens", "6", *options]) == 0
        shown[name] = capsys.readouterr()
    assert shown["own"].out == shown["chat"].out != shown["r1_zero"].out
    assert "prompt template chat" in shown["own"].err
    assert "prompt template" not in shown["chat"].err + shown["r1_zero"].err
    opened = open_model(find_source(model, tmp_path))
    assert opened.grader.template.name == "chat"


def test_model_without_a_chat_template_is_asked_under_r1_zero_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copy_of_tiny(tmp_path / "mine", has_chat_template=False)
    assert main(["generate", model, "Hi?", "--temperature", "0", "--max-tokens", "6"]) == 0
    assert "prompt template r1_zero" in capsys.readouterr().err
    assert find_source(model, tmp_path).template == Component(name="r1_zero")


@pytest.mark.parametrize(("name", "options"), [("tiny", {}), ("tiny-sft", {"preamble": ""})])
def test_embedded_model_keeps_its_template_without_a_line(name: str, options: dict[str, object]) -> None:
    source = find_source(name, "runs")
    assert (source.template.name, source.template.options) == ("r1_zero", options)
    assert source.describe_template() is None


@pytest.mark.parametrize("option", ["--template", "--prompt.template"])
def test_option_of_the_template_has_the_recipes_name_too(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tiny", "Hi?", "--max-tokens", "2", option, "boxed"]) == 0
    assert main(["generate", "tiny", "Hi?", "--max-tokens", "2", f"{option}.preamble", "Look."]) == 0
    assert main(["evaluate", "tiny", option, "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert main(["train", "tiny/sft", "--dry-run", f"{option}=boxed"]) == 0
    assert "name: boxed" in capsys.readouterr().out
    assert main(["train", "tiny/sft", "--dry-run", option, "r1_zero", f"{option}.preamble", "Look."]) == 0
    assert "preamble: Look." in capsys.readouterr().out


def test_choose_task_takes_the_held_out_split_of_a_task_without_test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_splits.py").write_text(
        "from typing import Literal\n"
        "from posttrain.data.base import Task\n"
        "from posttrain.registry import register\n"
        "@register('task', held_out='validation')\n"
        "def numbers(*, split: Literal['train', 'validation'] = 'train') -> Task:\n"
        "    '''None.'''\n"
        "    return Task('numbers', split, [])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    declare_code(["two_splits:numbers"])
    trained = Component(name="two_splits:numbers", split="train")
    assert choose_task(None, "runs/x", trained).options == {"split": "validation"}
    assert choose_task(Component(name="two_splits:numbers"), "tiny", None).options == {"split": "validation"}
    assert choose_task(Component(name="", split="train"), "runs/x", trained).options == {"split": "train"}
