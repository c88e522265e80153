"""Labels by a judge, and their scores by detection: with judges whose answers are known."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.engines.models import OpenedModel, open_model
from posttrain.engines.scripted import ScriptedEngine
from posttrain.errors import RunFailure, UsageError
from posttrain.interpret.activations.shards import write_tensors
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.features.features import FeatureReport, describe_features, write_features
from posttrain.interpret.features.labels import (
    Windows,
    draw_windows,
    label_features,
    model_judge,
    read_label,
    read_verdict,
    remote_judge,
    score,
)
from posttrain.recipes.sections import Word
from posttrain.reports.features import render_features
from posttrain.runs.models import find_source

D = 8  # tokens 0 to 5 have a feature each, feature 6 is active at every token but the first, feature 7 never
# Document j: a token of its own, then tokens j and j + 1 (modulo 6) in turn.
DOCUMENTS = [[100 + j, *([j % 6, (j + 1) % 6] * 4)] for j in range(36)]
TEXTS = {i: f" tok{i}" for i in range(200)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[FeatureReport, Windows]:
    tokens = torch.tensor([token for ids in DOCUMENTS for token in ids])
    x = torch.zeros(len(tokens), D)
    known = tokens < 6
    x[known, tokens[known]] = 1.0 + torch.arange(int(known.sum())) / 1000  # so that the strongest are known
    x[known, 6] = 1.0
    store = write_tensors(tmp_path_factory.mktemp("labels") / "rows", {"resid.1": x}, documents=DOCUMENTS)
    dictionary = Dictionary(D, D, kind="l1")
    with torch.no_grad():
        dictionary.W_enc.copy_(torch.eye(D)[None])
        dictionary.W_dec.copy_(torch.eye(D)[:, None])
    report = describe_features(dictionary, store, contexts=8, about={"dictionary": "known"})
    return replace(report, texts=TEXTS), draw_windows(dictionary, StoreRows(store), seed=0)


def excerpt_of(question: str) -> str:
    return question.partition("excerpt of a text:\n")[2].partition("\n")[0]


def knowing(questions: Sequence[str]) -> list[str]:
    """Names the marked token that is in all texts; says yes where the label's token is in the text."""
    answers = []
    for question in questions:
        if "<<" in question:
            lines = re.findall(r"^\d+\. (.*)$", question, re.MULTILINE)
            marked = set.intersection(*(set(re.findall(r"<< (tok\d+)>>", line)) for line in lines))
            answers.append(f"<think>Hm, no?</think>\n{min(marked, default='tok0')}\nbecause")
        else:
            label = re.search(r"active on this: (tok\d+)", question)
            assert label is not None
            answers.append("Yes." if label[1] in excerpt_of(question).split() else "No, it is not.")
    return answers


def test_a_judge_that_knows_tells_all_contexts_apart(made: tuple[FeatureReport, Windows], tmp_path: Path) -> None:
    report, windows = made
    labelled = label_features(report, windows, TEXTS, knowing)
    for number in range(6):
        label = labelled.features[number].label
        assert label is not None
        assert label.text == f"tok{number}"
        assert (label.active, label.recognized, label.silent, label.rejected) == (4, 4, 4, 4)
        assert (label.balanced_accuracy, label.unreadable) == (1.0, 0)
    everywhere = labelled.features[6].label
    assert everywhere is not None
    assert (everywhere.balanced_accuracy, everywhere.silent) == (None, 0)
    assert labelled.features[7].label is None
    assert labelled.about["labels"] == {
        "labelled": 7, "too_few_contexts": 1, "no_label": 0, "without_silent_contexts": 1, "unreadable_answers": 0,
    }  # fmt: skip
    stored = json.loads(write_features(labelled, tmp_path / "features.json").read_text())["features"]
    assert stored[2]["label"]["text"] == "tok2"
    assert stored[2]["label"]["balanced_accuracy"] == 1.0
    assert "label" not in stored[7]
    page = render_features(labelled)
    assert '["tok2",1.0]' in page
    assert "half is chance" in page
    assert "half is chance" not in render_features(report)


def test_what_was_shown_is_not_asked_about(made: tuple[FeatureReport, Windows]) -> None:
    report, windows = made
    asked: list[str] = []

    def noting(questions: Sequence[str]) -> list[str]:
        asked.extend(questions)
        return knowing(questions)

    one = replace(report, features=[report.features[3]])
    label_features(one, windows, TEXTS, noting)
    shown = set(re.findall(r"tok1\d\d", asked[0]))
    tested = [re.findall(r"tok1\d\d", question) for question in asked[1:]]
    assert len(shown) == 4
    assert len(tested) == 8
    assert all(len(documents) == 1 and documents[0] not in shown for documents in tested)
    assert all("<<" not in question for question in asked[1:])
    assert sum("tok3" in excerpt_of(question).split() for question in asked[1:]) == 4
    again: list[str] = []
    label_features(one, windows, TEXTS, lambda questions: again.extend(questions) or knowing(questions))
    assert again == asked


@pytest.mark.parametrize(("answer", "accuracy", "unreadable"), [("yes", 0.5, 0), ("no", 0.5, 0), ("perhaps", 0.0, 8)])
def test_a_judge_that_does_not_look(
    answer: str, accuracy: float, unreadable: int, made: tuple[FeatureReport, Windows]
) -> None:
    labelled = label_features(*made, TEXTS, lambda questions: [answer] * len(questions))
    label = labelled.features[0].label
    assert label is not None
    assert (label.text, label.balanced_accuracy, label.unreadable) == (answer, accuracy, unreadable)
    assert labelled.about["labels"]["unreadable_answers"] == (6 * 8 + 4 if unreadable else 0)
    silent = label_features(*made, TEXTS, lambda questions: ["<think>on and on"[:7] + "</think> \n"] * len(questions))
    assert silent.about["labels"]["no_label"] == 7


def test_the_score_worked_by_hand() -> None:
    said = [(True, True), (True, None), (False, False), (False, True), (False, False)]
    label = score("x", said)
    assert label.balanced_accuracy == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert (label.active, label.recognized, label.silent, label.rejected, label.unreadable) == (2, 1, 3, 2, 1)
    assert score("x", [(True, True)]).balanced_accuracy is None


def test_answers_are_read() -> None:
    assert read_label("<think>a\nb</think>\n\n **names of people** \nmore") == "names of people"
    assert len(read_label("x" * 999)) == 200
    assert read_label(" \n`'") == ""
    verdicts = {"Yes": True, "no.": False, "It is not; no": False, "<think>yes</think>No": False, "nobody knows": None}
    assert {answer: read_verdict(answer) for answer in verdicts} == verdicts


def test_a_model_is_a_judge() -> None:
    opened: OpenedModel = open_model(find_source("tiny", "runs"), Word(name="plain"))
    ids = opened.tokenizer.encode("yes, they are", add_special_tokens=False)
    engine = ScriptedEngine([ids])
    answers = model_judge(replace(opened, engine=engine), max_tokens=40)(["Is it?", "And this?"])
    assert answers == ["yes, they are"] * 2
    prompts, _, sampling = engine.calls[0]
    assert "Is it?" in opened.tokenizer.decode(prompts[0])
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 40)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with the model ``m`` that echoes, wants a key, and gives no text for ``broken``."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            text = body["messages"][0]["content"]
            self.reply({} if text == "broken" else {"choices": [{"message": {"content": f"{body['model']}: {text}"}}]})

        def reply(self, content: Any) -> None:
            known = self.headers.get("Authorization") == "Bearer secret"
            data = json.dumps(content if known else {"error": "who?"}).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *details: object) -> None:
            pass

    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}", asked
    served.shutdown()
    served.server_close()


def test_a_server_is_a_judge(server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = server
    assert remote_judge(url)(["one", "two"]) == ["m: one", "m: two"]
    assert asked[0]["temperature"] == 0
    assert remote_judge(url, "other")(["one"]) == ["other: one"]
    with pytest.raises(RunFailure, match="an answer without a text"):
        remote_judge(url)(["broken"])
    with pytest.raises(UsageError, match=r"JUDGE_API_KEY holds a key.* set JUDGE_API_HOST=far\.example"):
        remote_judge("https://far.example")(["one"])
    monkeypatch.delenv("JUDGE_API_KEY")
    with pytest.raises(UsageError, match=r"the judge refuses .* put its key into .* JUDGE_API_KEY"):
        remote_judge(url)(["one"])
    with pytest.raises(UsageError, match="no judge answers there"):
        remote_judge("http://127.0.0.1:9")(["one"])
