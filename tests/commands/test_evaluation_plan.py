"""The request of `posttrain evaluate`: components, drawings, trials, folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli import main, parse
from posttrain.commands.evaluate import SECTIONS
from posttrain.commands.evaluate.models import request_of
from posttrain.commands.options import read_components
from posttrain.errors import UsageError
from posttrain.evaluation.plan import Drawing, EvaluationPlan, make_plan
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import Component
from posttrain.runs.directory import RunDirectory
from refusing import refuses


def words(*arguments: str) -> dict[str, list[Component]]:
    return read_components(parse(["evaluate", "tiny", *arguments]), SECTIONS)


def drawing(*arguments: str) -> Drawing:
    return request_of(parse(["evaluate", "tiny", *arguments])).drawing


def plan(*arguments: str) -> EvaluationPlan:
    return make_plan(request_of(parse(["evaluate", *arguments])))


def test_words_take_their_options() -> None:
    found = words("--task", "gsm8k", "--task.path", "x.jsonl", "--template", "boxed", "--task.validation_share", "0.1")
    assert found["task"] == [Component(name="gsm8k", path="x.jsonl", validation_share=0.1)]
    assert found["template"] == [Component(name="boxed")]
    assert found["engine"] == [Component(name="native")]
    nothing = words()
    assert (nothing["task"], nothing["template"]) == ([], [])


def test_with_several_words_an_option_states_whose_it_is() -> None:
    found = words("--task", "stories,gsm8k", "--task.stories.size", "5", "--task.gsm8k.path", "a.b.jsonl")
    assert found["task"] == [Component(name="stories", size=5), Component(name="gsm8k", path="a.b.jsonl")]
    assert words("--task", "stories", "--task.stories.size", "5")["task"] == [Component(name="stories", size=5)]
    named = words("--template", "boxed,r1_zero", "--template.r1_zero.preamble", "Go.")["template"]
    assert named == [Component(name="boxed"), Component(name="r1_zero", preamble="Go.")]
    own = words("--task", "my.tasks:sums,stories", "--task.my.tasks:sums.size", "3")["task"]
    assert own == [Component(name="my.tasks:sums", size=3), Component(name="stories")]
    with refuses(UsageError, "--task.size", "--task.stories.size, --task.gsm8k.size"):
        words("--task", "stories,gsm8k", "--task.size", "5")


def test_one_answer_is_greedy_and_several_are_drawn() -> None:
    one = drawing()
    assert (one.samples, one.temperature, one.ks, one.top_p, one.top_k) == (1, 0.0, (), 1.0, None)
    several = drawing("--samples", "6", "--top-p", "0.9", "--top-k", "5")
    assert (several.temperature, several.ks, several.top_p, several.top_k) == (1.0, (1, 2, 4, 6), 0.9, 5)
    assert drawing("--samples", "8", "--k", "8,1,4,4", "--temperature", "0.6").ks == (1, 4, 8)
    assert drawing("--temperature", "0.6").temperature == 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "4", "--temperature", "0"], "--samples"),
        (["--top-p", "0.9"], "--top-p"),
        (["--samples", "4", "--k", "1,8"], "least 8 answers"),
        (["--best-of", "tiny"], "--best-of"),
        (["--task", "gsm9k"], "'gsm9k'"),
        (["--template", "plain,boxed", "--template.boxed.preambel", "x"], "'preambel'"),
        (["--task", "gsm8k", "--template", "boxd"], "'boxd'"),
        (["--task", "episodes"], "--task"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.sampling.models.load_model", None)  # before a model is loaded
    assert main(["evaluate", "tiny", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_models_times_tasks_times_templates(tmp_path: Path) -> None:
    problems = tmp_path / "p.jsonl"
    problems.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    found = plan(
        "tiny", "some/model", "--task", "stories,gsm8k", "--task.gsm8k.path", str(problems), "--template", "plain,boxed"
    )  # fmt: skip
    trials = [(trial.source.label, trial.name, trial.template.name) for trial in found.trials]
    assert trials[:5] == [
        ("tiny", "stories/test", "plain"),
        ("tiny", "stories/test", "boxed"),
        ("tiny", "gsm8k/test", "plain"),
        ("tiny", "gsm8k/test", "boxed"),
        ("some/model", "stories/test", "plain"),
    ]
    assert len(trials) == len({trial.folder for trial in found.trials}) == 8
    assert found.is_table
    assert str(found.folder) == "evaluations/tiny+some-model-stories-test+gsm8k-test-plain+boxed"
    assert found.trials[4].folder == found.folder / "some-model-stories-test-plain"
    assert found.trials[0].task is found.trials[4].task  # read once


def test_both_sides_of_a_comparison_may_answer_at_the_same_length(tmp_path: Path) -> None:
    for length in (300, 200):
        recipe = load_recipe("tiny/sft", [("eval.max_tokens", str(length))]).resolve()
        (tmp_path / f"run{length}").mkdir()
        RunDirectory(tmp_path / f"run{length}").write_recipe(recipe)
    models = [str(tmp_path / "run200"), str(tmp_path / "run300")]
    assert [trial.max_tokens for trial in plan(*models).trials] == [200, 300]
    assert [trial.max_tokens for trial in plan(*models, "--compare").trials] == [300, 300]
    assert [trial.max_tokens for trial in plan(*models, "--compare", "--max-tokens", "9").trials] == [9, 9]


def test_the_data_are_those_that_are_requested(tmp_path: Path) -> None:
    problems = tmp_path / "p.jsonl"
    rows = [f'{{"prompt": "{a} + 1?", "answer": "{a + 1}"}}\n' for a in range(5)]
    marks = []
    for lines, n in ((rows, 5), (rows, 5), (rows, 4), ([*rows[:4], rows[4].replace('"5"', '"6"')], 5)):
        problems.write_text("".join(lines))
        found = plan("tiny", "--task", "jsonl", "--task.path", str(problems), "--task.split", "all", "--limit", str(n))
        marks.append(found.settings(found.trials[0])["data"])
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3
