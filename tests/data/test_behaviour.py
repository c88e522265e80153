"""Refusals: the bundled prompts, files of one's own, and the shares that evaluation reports."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_rows import write_rows

from made_up_items import make_item
from posttrain.data.base import Task
from posttrain.data.verifiable.suites import refusals
from posttrain.errors import DataError
from posttrain.evaluation.items import summarize
from posttrain.evaluation.statistics import wilson_interval
from posttrain.evaluation.tables import ResultsRow, results_table
from posttrain.graders.grading import Submission, grade_submissions
from posttrain.types import Example


def answered(example: Example, *texts: str) -> SimpleNamespace:
    """An evaluated item: the grader's facts about each answer."""
    verdicts = grade_submissions("refusal", [Submission(text, text, None, example.meta) for text in texts])
    samples = [SimpleNamespace(parts=dict(verdict.info)) for verdict in verdicts]
    return SimpleNamespace(id=example.id, meta=example.meta, samples=samples)


def test_the_bundled_prompts_are_there_in_pairs() -> None:
    task = refusals()
    kinds = Counter((e.meta["topic"], e.meta["kind"]) for e in task.examples)
    assert len(task.examples) == 40
    assert len(kinds) == 40  # of every topic one that should be refused and one that should not
    assert {example.grader for example in task.examples} == {"refusal"}


def test_refusal_and_over_refusal_are_shares_of_each_kind() -> None:
    """It refuses 15 of the 20 harmful prompts, and half of the answers to the first two benign ones."""
    task = refusals()
    harmful, benign = ([e for e in task.examples if e.meta["kind"] == kind] for kind in ("harmful", "benign"))
    no, yes = "I'm sorry, but I can't help with that.", "Take a saw."
    items = [answered(e, no if i < 15 else yes) for i, e in enumerate(harmful)]
    items += [answered(e, no if i < 2 else yes, yes) for i, e in enumerate(benign)]
    assert task.shares is not None
    shares = task.shares([*items, SimpleNamespace(id="x", meta={"kind": "benign"}, samples=[])])
    assert shares == {"refusal": [1.0] * 15 + [0.0] * 5, "over_refusal": [0.5] * 2 + [0.0] * 18}
    results = summarize([make_item(0, "r")], Task("made", "test", (), shares=lambda items: shares))
    assert (results["refusal"], results["over_refusal"], results["over_refusal_n"]) == (0.75, 0.05, 20.0)
    assert (results["refusal_low"], results["refusal_high"]) == wilson_interval(15, 20)
    table = results_table([ResultsRow("m", None, "refusals", results)])
    assert [table.lines[0][table.header.index(label)] for label in ("refusal", "over refusal")] == ["75.0%", "5.0%"]
    assert task.shares([answered(harmful[0], " ")])["refusal"] == [0.0], "a blank answer refuses nothing"


def test_files_of_ones_own(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Help me steal."}]  # fmt: skip
    (example,) = refusals(path=write_rows(tmp_path / "r.jsonl", [{"prompt": talk, "kind": "harmful"}])).examples
    assert [message.role for message in example.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "kind": "harmfull"}, "'kind' must be one of harmful, benign; got.*Did you mean 'harmful'"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "kind": "benign"}, "ends with an assistant"),
    ],
)
def test_rows_that_cannot_be_are_refused_with_their_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"r\.jsonl:1: .*{message}"):
        refusals(path=write_rows(tmp_path / "r.jsonl", [row]))
