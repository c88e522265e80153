"""An evaluation as a library call: a typed request, its files, and what is handed in from above."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.engines.models import ModelSource
from posttrain.errors import UsageError
from posttrain.evals.files import read_finished
from posttrain.evals.plan import EvaluationProgress, EvaluationRequest, Pages, choose_drawing, make_plan, run_plan
from posttrain.recipes.sections import Word

TINY = ModelSource("tiny", "tiny", "tiny")


class Noted(EvaluationProgress):
    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, title: str, num_known: int = 0) -> None:
        self.begun.append(title)


class Lengths:
    """A reward model that likes long answers."""

    def score(self, examples: Any, texts: Any, finishes: Any) -> list[float]:
        return [float(len(text)) for text in texts]


@pytest.fixture
def problems(tmp_path: Path) -> Word:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a} + 1?", "answer": str(a + 1)}) + "\n" for a in range(4)))
    return Word(name="jsonl", path=str(path))


def test_a_library_call_measures_writes_and_goes_on(problems: Word, tmp_path: Path) -> None:
    asked = EvaluationRequest(
        models=[TINY],
        drawing=choose_drawing(n=4, samples=2),
        tasks=[problems],
        templates=[Word(name="plain"), Word(name="boxed")],
        engine=Word(name="scripted", texts=["The answer is 2.", "The answer is certainly 3."]),
        best_of=ModelSource("judge", "judge", "tiny"),
        out=tmp_path / "out",
    )
    opened: list[str] = []
    pages = Pages(lambda evaluation, *_: f"page of {evaluation.name}", lambda rows, notes, links: f"{len(rows)} rows")
    progress = Noted()
    finished = run_plan(make_plan(asked), pages, lambda source: opened.append(source.name) or Lengths(), progress)
    assert opened == ["judge"]
    assert [(one.evaluation, one.template) for one in finished] == [("jsonl/test", "plain"), ("jsonl/test", "boxed")]
    assert progress.begun == ["jsonl/test · tiny · plain", "jsonl/test · tiny · boxed"]
    assert (tmp_path / "out" / "summary.md").read_text() == "2 rows"
    assert (tmp_path / "out" / "plain" / "summary.md").read_text() == "page of jsonl/test"
    again = read_finished(tmp_path / "out" / "plain")
    assert (again.settings["best_of"], again.settings["samples"]) == ("judge", 2)
    # the same numbers once more: an evaluation is a function of its request
    once_more = run_plan(make_plan(asked), pages, lambda _: Lengths(), EvaluationProgress())
    assert [{**one.results, "seconds": 0} for one in once_more] == [{**one.results, "seconds": 0} for one in finished]


def test_what_cannot_be_is_refused_before_a_model_is_loaded(problems: Word) -> None:
    asked = EvaluationRequest([TINY], choose_drawing(n=4), tasks=[problems], best_of=TINY)
    with pytest.raises(UsageError, match="--best-of: there is nothing to choose from"):
        make_plan(asked)
    with pytest.raises(UsageError, match="--k 4: that needs at least 4 answers"):
        choose_drawing(n=4, samples=2, k=[4])
