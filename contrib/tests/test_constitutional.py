"""Preference pairs by principles: rules, critique and revision, dropped prompts, and training on the pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import feedback as command
import pytest
from feedback import Feedback, Request, make_pairs, write_pairs
from principles import Objection, at_most_words, closes_tags, read_principles, shows_working, without_phrases
from transformers import AutoTokenizer

from posttrain import registry
from posttrain.cli import main
from posttrain.data.base import Task
from posttrain.data.preferences import preferences
from posttrain.errors import PosttrainError, RunFailure, UsageError
from posttrain.models.sources import TINY
from posttrain.recipes.sections import RewardComponent
from posttrain.sampling.base import Sampling
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.rollout import Sampler, build_grader
from posttrain.types import Example, Message

pytestmark = pytest.mark.slow

SHORT = "  - name: short\n    rule: {name: at_most_words, limit: 3}\n"
KIND = "  - {name: kind, critique: 'What is rude?', revise: Say it kindly.}\n"
TOKENIZER = AutoTokenizer.from_pretrained(TINY)


def principles_file(folder: Path, *texts: str) -> str:
    path = folder / "mine.yaml"
    path.write_text("principles:\n" + "".join(texts))
    return str(path)


def make_task(size: int = 6) -> Task:
    return Task("t", "train", [Example(f"t/{i}", (Message("user", f"Question {i}?"),)) for i in range(size)])


def sampler_of(say: Callable[[str, int], str], template: str = "dialogue") -> tuple[Sampler, FakeEngine]:
    """A model that says ``say(prompt, key)`` and ends."""

    def choose(prompt: tuple[int, ...], key: int) -> list[int]:
        return [*TOKENIZER.encode(say(TOKENIZER.decode(list(prompt)), key)), TOKENIZER.eos_token_id]

    engine = FakeEngine(choose)
    grader = build_grader([RewardComponent(name="correct")], registry.find("template", template).bind({})())
    return Sampler(engine, TOKENIZER, grader, 400), engine


def request(task: Task, path: str, **options: Any) -> Request:
    sampling = Sampling(60, stop_ids=frozenset([TOKENIZER.eos_token_id]))
    return Request(task, read_principles(path), sampling, **{"n": 100, **options})


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
    message = {0: "a b c d", 1: "a b", 2: "<b> x", 3: "x </b> y z", 4: "a b. c d e", 5: "ok"}
    sampler, engine = sampler_of(lambda prompt, key: message[int(prompt.partition("Question ")[2][0])])
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


def test_the_file_is_read_as_pairs_with_their_meta(tmp_path: Path) -> None:
    sampler, _ = sampler_of(talk)
    talks = (Message("user", "Question 7?"), Message("assistant", "Yes?"), Message("user", "Question 8?"))
    task = Task("t", "train", [*make_task(2).examples, Example("t/long", talks)])
    found = make_pairs(sampler, request(task, principles_file(tmp_path, KIND)))
    about = write_pairs(tmp_path / "p.jsonl", found, {"seed": 0})
    content = json.loads(about.read_text())
    assert (about.name, content["num_pairs"], content["settings"]) == ("p.about.json", 2, {"seed": 0})
    first, long = preferences(path=str(tmp_path / "p.jsonl"), split="all").examples
    assert [(r.text, r.score) for r in first.responses] == [(" Please go, 0.", 1.0), (" Go away, 0.", 0.0)]
    assert first.meta["principle"] == "kind"
    assert long.messages == talks


def test_nothing_is_written_where_nothing_came_of_it(tmp_path: Path) -> None:
    found = Feedback(num_prompts=2)
    found.dropped["blank"] = 2
    with pytest.raises(RunFailure, match="no pair came of 2 prompts: 2 x blank"):
        write_pairs(tmp_path / "p.jsonl", found, {})
    assert list(tmp_path.iterdir()) == []


def test_tags_that_are_tokens_cannot_be_written_in_a_file(tmp_path: Path) -> None:
    sampler, _ = sampler_of(talk, "r1_zero")
    with pytest.raises(UsageError, match=r"--template r1_zero: it writes <think> and <answer> as tokens of their own"):
        make_pairs(sampler, request(make_task(), principles_file(tmp_path, SHORT)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  - {name: a}\n", "give either a 'rule', or both 'critique' and 'revise'"),
        ("  - {name: a, critique: b}\n", "give either a 'rule', or both 'critique' and 'revise'"),
        ("  - {name: a, rule: closes_tags, critique: b, revise: c}\n", "give either a 'rule', or both"),
        (SHORT.replace("words", "word"), "'short'.rule: there is no rule 'at_most_word'. Did you mean 'at_most_words'"),
        (SHORT.replace("limit", "limits"), "Did you mean 'limit'?"),
        (SHORT.replace("3", "0"), "limit: Input should be greater than or equal to 1"),
        (SHORT + SHORT, "'short' is the name of two principles"),
        ("  - {name: a, critic: b}\n", "has no key 'critic'. Did you mean 'critique'?"),
        ("  []\n", "principles: Input should have at least 1 item, not 0"),
    ],
)
def test_read_principles_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PosttrainError) as error:
        read_principles(principles_file(tmp_path, text))
    assert message in str(error.value)


QUESTION = Example("a/1", (Message("user", "How many?"),))
WORKED = Example("a/2", (Message("user", "How many?"),), "7", solution="3 + 4 = 7.")


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("One two. Three four five.", "One two."),  # whole sentences that fit
        ("One two three four five.", "One two three four"),  # none fits
        ('"Go." He  went. And\nthen some more.', '"Go." He  went.'),
        (" One two three four.", None),
        ("", None),
    ],
)
def test_at_most_words(text: str, revision: str | None) -> None:
    found = at_most_words(text, QUESTION, limit=4)
    assert (found and found.revision) == revision
    if found is not None:
        assert found.critique == f"It has {len(text.split())} words, and at most 4 are asked for."
        assert found.revision is not None
        assert at_most_words(found.revision, QUESTION, limit=4) is None


def test_without_phrases() -> None:
    text = "So  the answer is 4. Basso the Answer is, so THE answer\nis 5."
    found = without_phrases(text, QUESTION, phrases=["so the answer is"], instead="Answer:")
    assert found == Objection(
        "It says 'So the answer is', 'so THE answer is'.", "Answer: 4. Basso the Answer is, Answer: 5."
    )
    assert without_phrases("well, well!", QUESTION, phrases=["well"]) == Objection("It says 'well'.", ", !")
    assert without_phrases("well  then", QUESTION, phrases=["well"]) == Objection("It says 'well'.", "then")
    assert without_phrases("farewell", QUESTION, phrases=["well"]) is None
    # the longer phrase first, and what stands in its place is text, no pattern
    assert without_phrases("ab cd", QUESTION, phrases=["ab", "ab cd"], instead=r"\1") == Objection(
        "It says 'ab cd'.", r"\1"
    )


def test_closes_tags() -> None:
    def output(text: str) -> Objection | None:
        return closes_tags(text, QUESTION, tags=["a", "b"])

    assert output("<a> x <b> y") == Objection("It does not close <a>, <b>.", "<a> x <b> y</b></a>")
    assert output("<a> x </a> <c> y") is None
    assert output("<a> <b> </a>") == Objection("It closes <a> where that is not what is open.", None)
    assert output("x </b>") == Objection("It closes <b> where that is not what is open.", None)


def test_shows_working() -> None:
    assert shows_working("3 + 4 = 7. So 7.", QUESTION) is None
    assert shows_working("12 × 2 / 4 = 6", QUESTION) is None
    complaint = "It does not show how it finds its answer."
    assert shows_working("x = 7.", WORKED) == Objection(complaint, "3 + 4 = 7. x = 7.")
    assert shows_working("It is 7.", QUESTION) == Objection(complaint, None)


@pytest.mark.usefixtures("no_curves")
def test_feedback_command_dpo_on_its_pairs_breaks_the_rule_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """About 1 in 4 of 96 held-out answers breaks the rule; after thirty steps of DPO fewer than 1 in 10 do."""
    monkeypatch.chdir(tmp_path)
    Path("rule.yaml").write_text(
        "principles:\n  - name: plain ending\n"
        "    rule: {name: without_phrases, phrases: [So the answer is], instead: 'Answer:'}\n"
    )

    def run(*arguments: str) -> int:
        return command.main([*arguments, "--task", "stories", "--principles", "rule.yaml", "--max-tokens", "48"])

    def about(name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(Path(f"{name}.about.json").read_text())
        return content

    assert run("tiny", "--limit", "240", "--out", "pairs.jsonl") == 0
    made = about("pairs")
    assert f"{made['num_pairs']} pairs from 240 prompts of stories/train" in capsys.readouterr().out
    assert made["num_pairs"] == made["broken"]["plain ending"] > 40
    assert made["num_pairs"] + sum(made["dropped"].values()) == 240
    assert made["broken_chosen"] == {}
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    assert all(
        row["rejected"].replace("So the answer is", "Answer:") == row["chosen"] != row["rejected"] for row in rows
    )
    changes = [
        "--model.name",
        "tiny",
        "--model.adapter",
        "null",
        "--prompt.template",
        "plain",
        "--data.batch_size",
        "8",
    ]
    changes += ["--train.steps", "30", "--train.lr", "2e-4", "--train.warmup_steps", "3", "--eval.every", "0"]
    assert main(["train", "dpo-preferences", "--task.path", "pairs.jsonl", "--run", "dpo", *changes, "--quiet"]) == 0
    held_out = ["--task-options", '{"split": "validation"}', "--limit", "96", "--seed", "5"]
    assert run("tiny", *held_out, "--out", "before.jsonl") == 0
    assert run("dpo", *held_out, "--out", "after.jsonl") in (0, 1)  # 1: not one pair is left to make
    before = about("before")
    assert before["broken"]["plain ending"] / before["num_answers"] > 0.18
    after = about("after") if Path("after.about.json").exists() else {"num_answers": 80, "broken": {}}
    assert after["broken"].get("plain ending", 0) / after["num_answers"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "pairs.json"], "--out pairs.json: pairs are written as JSON lines; give a name that ends in .jsonl"),
        (["--template", "r1_zero"], "--template r1_zero: it writes <think> and <answer> as tokens of their own"),
        (["--principles", "nothere.yaml"], "--principles nothere.yaml: [Errno 2]"),
        (["--limit", "0"], "--limit, --rounds, --batch and --max-tokens are at least 1"),
    ],
)
def test_feedback_command_wrong_option_is_refused_in_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [] if "--principles" in arguments else ["--principles", principles_file(tmp_path, SHORT)]
    assert command.main(["tiny", "--task", "stories", *given, *arguments]) == 2
    assert message in capsys.readouterr().err
