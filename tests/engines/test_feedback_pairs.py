"""Preference pairs from feedback: critique and revision, labels, what is dropped, and going on after a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from posttrain import registry
from posttrain.engines.base import Sampling
from posttrain.engines.feedback import revision
from posttrain.engines.feedback.pairs import Feedback, FeedbackRequest, Journal, make_pairs, write_pairs
from posttrain.engines.feedback.principles import read_principles
from posttrain.engines.feedback.revision import label, preference
from posttrain.engines.rollout import Sampler, build_grader
from posttrain.engines.scripted import ScriptedEngine
from posttrain.errors import PosttrainError, RunFailure, UsageError
from posttrain.models.forward.forward import Forward
from posttrain.models.load import load_model
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection, RewardWord
from posttrain.tasks.base import Task
from posttrain.tasks.preferences.task import preferences
from posttrain.types import Example, Message

SHORT = "  - name: short\n    rule: {name: at_most_words, limit: 3}\n"
KIND = "  - {name: kind, critique: 'What is rude?', revise: Say it kindly., prefer: 'Which is kinder?'}\n"
TOKENIZER = AutoTokenizer.from_pretrained(TINY)


def principles_file(folder: Path, *texts: str) -> str:
    path = folder / "mine.yaml"
    path.write_text("principles:\n" + "".join(texts))
    return str(path)


def make_task(size: int = 6) -> Task:
    return Task("t", "train", [Example(f"t/{i}", (Message("user", f"Question {i}?"),)) for i in range(size)])


def sampler_of(say: Callable[[str, int], str], template: str = "dialogue") -> tuple[Sampler, ScriptedEngine]:
    """A model that says ``say(prompt, key)`` and ends."""

    def choose(prompt: tuple[int, ...], key: int) -> list[int]:
        return [*TOKENIZER.encode(say(TOKENIZER.decode(list(prompt)), key)), TOKENIZER.eos_token_id]

    engine = ScriptedEngine(choose)
    grader = build_grader([RewardWord(name="correct")], registry.find("template", template).bind({})())
    return Sampler(engine, TOKENIZER, grader, 400), engine


def request(task: Task, path: str, **options: Any) -> FeedbackRequest:
    sampling = Sampling(60, stop_ids=frozenset([TOKENIZER.eos_token_id]))
    principles = read_principles(path, options.get("way", "revise"))
    return FeedbackRequest(task, principles, sampling, **{"n": 100, **options})


def talk(prompt: str, key: int) -> str:
    """Rude answers, a critique, a kind answer; the question's number decides what goes wrong."""
    number = int(prompt.partition("Question ")[2][0])
    if prompt.endswith("Say it kindly.\n\nAssistant:"):
        return {1: " Go away, 1. ", 2: ""}.get(number, f" Please go, {number}.")
    if prompt.endswith("What is rude?\n\nAssistant:"):
        return {3: " too long" * 60}.get(number, " It sends people away.")
    return {4: " \n ", 5: " Go <answer>"}.get(number, f" Go away, {number}.")


def test_the_revision_is_chosen_over_the_first_answer(tmp_path: Path) -> None:
    sampler, engine = sampler_of(talk)
    found = make_pairs(sampler, request(make_task(), principles_file(tmp_path, KIND)))
    assert found.rows == [
        {
            "prompt": "Question 0?",
            "chosen": " Please go, 0.",
            "rejected": " Go away, 0.",
            "meta": {"id": "t/0", "principle": "kind", "critique": "It sends people away."},
        }
    ]
    assert dict(found.dropped) == {
        "nothing is changed: no rule objects, or the revision is the first answer": 1,
        "revision: blank": 1,
        "critique: cut off at --max-tokens": 1,
        "first answer: blank": 1,
        "first answer: with a special token in it": 1,
    }
    assert (found.num_prompts, found.num_answers) == (6, 4)
    first, critique, revision = ([TOKENIZER.decode(list(ids)) for ids in prompts] for prompts, _, _ in engine.calls)
    assert (len(first), len(critique), len(revision)) == (6, 4, 3)
    assert critique[0] == "Human: Question 0?\n\nAssistant: Go away, 0.\n\nHuman: What is rude?\n\nAssistant:"
    begun = critique[0].removesuffix("\n\nAssistant:")
    assert revision[0] == f"{begun}\n\nAssistant: It sends people away.\n\nHuman: Say it kindly.\n\nAssistant:"


def test_rules_work_without_a_model_and_what_breaks_them_is_counted(tmp_path: Path) -> None:
    tags = "  - name: tags\n    rule: {name: closes_tags, tags: [b]}\n"
    said = {0: "a b c d", 1: "a b", 2: "<b> x", 3: "x </b> y z", 4: "a b. c d e", 5: "ok"}
    sampler, engine = sampler_of(lambda prompt, key: said[int(prompt.partition("Question ")[2][0])])
    found = make_pairs(sampler, request(make_task(), principles_file(tmp_path, SHORT, tags), rounds=2))
    assert {row["meta"]["id"]: (row["chosen"], row["meta"]["principle"]) for row in found.rows} == {
        "t/0": ("a b c", "short"), "t/2": ("<b> x</b>", "tags"), "t/4": ("a b.", "short"),
    }  # fmt: skip
    assert dict(found.broken) == {"short": 3, "tags": 2}
    assert dict(found.broken_chosen) == {}
    assert found.dropped == {
        "tags: broken, and the rule cannot put it right": 1,
        "nothing is changed: no rule objects, or the revision is the first answer": 2,
    }
    assert len(engine.calls) == 1  # nothing but the first answers is sampled


def test_one_round_takes_one_principle_which_the_seed_chooses(tmp_path: Path) -> None:
    path = principles_file(tmp_path, SHORT, SHORT.replace("short", "shorter").replace("limit: 3", "limit: 2"))
    sampler, _ = sampler_of(lambda prompt, key: "a b c d e")
    chosen = [
        [row["meta"]["principle"] for row in make_pairs(sampler, request(make_task(40), path, seed=seed)).rows]
        for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 8 < chosen[0].count("short") < 32
    both = make_pairs(sampler, request(make_task(40), path, rounds=5)).rows
    assert {row["chosen"] for row in both} == {"a b"}
    assert {row["meta"]["principle"] for row in both} == {"short, shorter", "shorter"}


def test_neither_batches_nor_more_prompts_change_a_pair(tmp_path: Path) -> None:
    path = principles_file(tmp_path, SHORT)
    sampler, _ = sampler_of(lambda prompt, key: f"{key} b c d")
    made = [
        {
            row["meta"]["id"]: row["rejected"]
            for row in make_pairs(sampler, request(make_task(30), path, **options)).rows
        }
        for options in ({"n": 30}, {"n": 30, "batch": 7}, {"n": 12})
    ]
    assert made[0] == made[1]
    assert made[2].items() < made[0].items()
    assert len(made[2]) == 12


def test_a_killed_command_goes_on_where_it_was(tmp_path: Path) -> None:
    asked = request(make_task(20), principles_file(tmp_path, SHORT), batch=6)
    sampler, engine = sampler_of(lambda prompt, key: f"{key} b c d")
    whole = make_pairs(sampler, asked)
    place = tmp_path / "pairs.jsonl.part"

    def interrupt(done: int, total: int) -> None:
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_pairs(sampler, asked, journal=Journal(place, "mark"), observe=interrupt)
    with place.open("a") as stream:
        stream.write('{"rows": [{"prom')  # a kill in the middle of a line
    engine.calls.clear()
    journal = Journal(place, "mark")
    resumed = make_pairs(sampler, asked, journal=journal)
    assert resumed == whole
    assert [len(prompts) for prompts, _, _ in engine.calls] == [6, 2]
    engine.calls.clear()
    make_pairs(sampler, asked, journal=Journal(place, "another mark"))  # other settings: nothing of it is used
    assert len(engine.calls) == 4
    journal.close()
    assert not place.exists()


def test_a_rule_labels_what_keeps_it(tmp_path: Path) -> None:
    task = make_task(60)
    sampler, _ = sampler_of(lambda prompt, key: "a b c d" if key % 3 == 0 else f"a {key % 2}")
    found = make_pairs(sampler, request(task, principles_file(tmp_path, SHORT), way="label"))
    assert {row["rejected"] for row in found.rows} == {"a b c d"}
    assert {row["chosen"] for row in found.rows} == {"a 0", "a 1"}
    assert {(row["score_chosen"], row["score_rejected"]) for row in found.rows} == {(1.0, 0.0)}
    assert set(found.dropped) == {"both answers are the same", "both answers keep the rule"}
    assert len(found.rows) + found.dropped.total() == 60
    assert found.num_answers == 120


def test_a_liking_for_a_letter_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says (A) with 0.9 where the kind answer is (A), and with 0.6 where it is (B): 0.65 for the kind one."""
    path = principles_file(tmp_path, KIND)
    asked: list[str] = []

    def liking(forward: Any, tokenizer: Any, prompt: list[int], words: tuple[str, str]) -> float:
        asked.append(tokenizer.decode(prompt))
        assert words == (" (A)", " (B)")
        return 0.9 if "(A) kind" in asked[-1] else 0.6

    monkeypatch.setattr(revision, "preference", liking)
    sampler, _ = sampler_of(lambda prompt, key: "kind" if key % 2 else "rude")
    examples = list(enumerate(make_task(20).examples))
    found = label(sampler, examples, read_principles(path, "label"), Sampling(20), 0, object())  # type: ignore[arg-type]
    sure = [one for one in found if one.reason is None]
    assert len(sure) == len(asked) / 2 > 4
    for one in sure:
        assert one.probability == pytest.approx(0.65 if one.first.text == "kind" else 0.35)
    assert "user: Question" in asked[0]
    assert "Which is kinder?\n\n(A) " in asked[0]
    row = make_pairs(sampler, request(make_task(20), path, way="label"), forward=object()).rows[0]  # type: ignore[arg-type]
    assert (row["chosen"], row["rejected"], row["score_chosen"]) == ("kind", "rude", pytest.approx(0.65))


def test_the_preference_is_that_of_the_model() -> None:
    model = load_model(ModelSection(name="tiny"), seed=0).model
    prompt = TOKENIZER.encode("What is 3 + 4? It is")
    words = (" 7.", " 12.")
    with torch.no_grad():
        sums = []
        for word in words:
            ids = TOKENIZER.encode(word, add_special_tokens=False)
            logprobs = model(torch.tensor([prompt + ids])).logits[0].double().log_softmax(dim=-1)
            sums.append(sum(float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(ids)))
    expected = math.exp(sums[0]) / (math.exp(sums[0]) + math.exp(sums[1]))
    forward = Forward(model.requires_grad_(False))
    assert preference(forward, TOKENIZER, prompt, words) == pytest.approx(expected, abs=1e-5)
    assert preference(forward, TOKENIZER, prompt, words[::-1]) == pytest.approx(1 - expected, abs=1e-5)


def test_the_file_is_read_as_pairs_with_their_meta(tmp_path: Path) -> None:
    sampler, _ = sampler_of(talk)
    talks = (Message("user", "Question 7?"), Message("assistant", "Yes?"), Message("user", "Question 8?"))
    task = Task("t", "train", [*make_task(2).examples, Example("t/long", talks)])
    found = make_pairs(sampler, request(task, principles_file(tmp_path, KIND)))
    about = write_pairs(tmp_path / "p.jsonl", found, {"seed": 0})
    content = json.loads(about.read_text())
    assert (about.name, content["num_pairs"], content["settings"]) == ("p.about.json", 2, {"seed": 0})
    first, long = preferences(path=str(tmp_path / "p.jsonl"), split="test").examples
    assert [(r.text, r.score) for r in first.responses] == [(" Please go, 0.", 1.0), (" Go away, 0.", 0.0)]
    assert first.meta["principle"] == "kind"
    assert long.messages == talks


def test_nothing_is_written_where_nothing_came_of_it(tmp_path: Path) -> None:
    found = Feedback(num_prompts=2)
    found.dropped["blank"] = 2
    with pytest.raises(RunFailure, match="no pair came of 2 prompts: 2 × blank"):
        write_pairs(tmp_path / "p.jsonl", found, {})
    assert list(tmp_path.iterdir()) == []


def test_tags_that_are_tokens_cannot_be_written_in_a_file(tmp_path: Path) -> None:
    sampler, _ = sampler_of(talk, "r1_zero")
    with pytest.raises(UsageError, match=r"--template r1_zero: it writes <think> and <answer> as tokens of their own"):
        make_pairs(sampler, request(make_task(), principles_file(tmp_path, SHORT)))


@pytest.mark.parametrize(
    ("text", "way", "message"),
    [
        ("  - {name: a}\n", "revise", "mine.yaml:2: principles.0: give a 'rule', or 'critique' and 'revise', or"),
        ("  - {name: a, critique: b}\n", "revise", "principles.0: 'critique' and 'revise' belong together; give both"),
        ("  - {name: a, rule: closes_tags, prefer: b}\n", "label", "a rule asks the model nothing; leave out prefer"),
        ("  - {name: a, prefer: b}\n", "revise", "mine.yaml:2: principles.0: to revise answers it needs 'critique'"),
        ("  - {name: a, critique: b, revise: c}\n", "label", "principles.0: to label answers it needs 'prefer'"),
        (SHORT.replace("words", "word"), "revise", "mine.yaml:2: principles.0.rule: there is no principle named"),
        (SHORT.replace("limit", "limits"), "revise", "Did you mean 'limit'?"),
        (SHORT + SHORT, "revise", "mine.yaml:4: principles.1.name: 'short' is the name of two principles"),
        ("  - {name: a, critic: b}\n", "revise", "has no key 'critic'. Did you mean 'critique'?"),
        ("  []\n", "revise", "principles: Input should have at least 1 item, not 0"),
    ],
)
def test_files_that_cannot_be_are_refused_with_their_line(tmp_path: Path, text: str, way: Any, message: str) -> None:
    with pytest.raises(PosttrainError) as error:
        read_principles(principles_file(tmp_path, text), way)
    assert message in str(error.value)
