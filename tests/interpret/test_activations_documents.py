"""What is recorded over: prompts, texts and rollouts become documents of the right tokens, within their limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations.documents import recorded_rollouts, task_prompts, texts
from posttrain.render import encode_plain, encode_prompt
from posttrain.render.words import r1_zero
from posttrain.store.rollouts import RolloutStore
from posttrain.tasks.base import Task
from posttrain.types import Completion, Example, Message, Rollout

QUESTIONS = ("Tom has 7 apples.", "Eva starts with 19 shells. She finds 12 at the beach.", "Two?")


def asked(question: str) -> Example:
    return Example(question, (Message("user", question),))


def task() -> Task:
    return Task("toy", "test", [asked(question) for question in QUESTIONS])


def rollout(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Rollout:
    sampled = Completion(completion, tuple(-0.1 for _ in completion), "stop")
    return Rollout(asked("?"), prompt, sampled, "text", {}, 0.0, 1, 0, 0, 0)


def test_prompts_are_those_of_the_template(small_tokenizer: Any) -> None:
    template = r1_zero()
    found = task_prompts(task(), small_tokenizer, template, context_tokens=1000)
    expected = [encode_prompt(small_tokenizer, template, asked(question).messages) for question in QUESTIONS]
    assert found.ids == expected
    assert found.prompt_lengths == [len(ids) for ids in expected]
    assert not +found.dropped
    assert found.data == {
        "source": "task", "task": "toy", "split": "test", "template": "r1_zero", "context_tokens": 1000,
        "max_rows": None,
    }  # fmt: skip


def test_the_context_and_the_number_of_rows_are_limits(small_tokenizer: Any) -> None:
    template = r1_zero()
    whole = task_prompts(task(), small_tokenizer, template, context_tokens=1000).ids
    short = task_prompts(task(), small_tokenizer, template, context_tokens=20)
    assert short.ids == [ids[:20] for ids in whole]
    assert short.dropped["beyond_context_tokens"] == sum(len(ids) - 20 for ids in whole)
    few = task_prompts(task(), small_tokenizer, template, context_tokens=20, max_tokens=33)
    assert few.ids == [whole[0][:20], whole[1][:13]]
    assert few.prompt_lengths == [20, 13]
    assert few.num_tokens == 33


def test_a_text_is_cut_into_pieces(small_tokenizer: Any, tmp_path: Path) -> None:
    text = " ".join(QUESTIONS) + " <|endoftext|> is no marker here."
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    ids = encode_plain(small_tokenizer, text)
    found = texts(tmp_path / "a.txt", small_tokenizer, context_tokens=16)
    assert found.ids == [ids[start : start + 16] for start in range(0, len(ids), 16)]
    assert len(found.ids) > 2
    assert small_tokenizer.eos_token_id not in ids
    assert found.prompt_lengths == [0] * len(found.ids)
    assert found.data["file"] == "a.txt"


def test_every_piece_begins_as_the_tokenizer_begins_a_text(small_tokenizer: Any, tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend = type(small_tokenizer._tokenizer).from_str(small_tokenizer._tokenizer.to_str())
    start = small_tokenizer.eos_token
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, small_tokenizer.eos_token_id)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=start, eos_token=start)
    (tmp_path / "a.txt").write_text(QUESTIONS[1], encoding="utf-8")
    ids = encode_plain(small_tokenizer, QUESTIONS[1])
    found = texts(tmp_path / "a.txt", tokenizer, context_tokens=5)
    assert found.ids == [[small_tokenizer.eos_token_id, *ids[start : start + 4]] for start in range(0, len(ids), 4)]
    with pytest.raises(UsageError, match="at least 2 tokens"):
        texts(tmp_path / "a.txt", tokenizer, context_tokens=1)


def test_texts_of_a_file_of_rows(small_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": question}) for question in QUESTIONS) + "\n", encoding="utf-8")
    found = texts(path, small_tokenizer, context_tokens=1000)
    assert found.ids == [encode_plain(small_tokenizer, question) for question in QUESTIONS]
    path.write_text('{"text": "a"}\n{"txt": "b"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl:2: the key 'text' is missing\. Did you mean 'txt'\?"):
        texts(path, small_tokenizer, context_tokens=1000)


def test_files_that_are_no_texts_are_refused(small_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        texts(tmp_path / "a.txt", small_tokenizer, context_tokens=10)
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"no UTF-8 text \(invalid start byte at byte 2\)"):
        texts(tmp_path / "a.txt", small_tokenizer, context_tokens=10)
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"nothing to record over: text, a\.txt has no tokens"):
        texts(tmp_path / "a.txt", small_tokenizer, context_tokens=10)


def test_rollouts_are_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.db"
    with RolloutStore(path) as store:
        store.record([rollout((5, 6, 7), (8, 9)), rollout((1,), (2, 3, 4, 0))])
        store.record([rollout((9,), (9,))], evaluation="toy/test")  # not what it was trained on
    found = recorded_rollouts(path, context_tokens=4, about="a-run")
    assert found.ids == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert found.prompt_lengths == [3, 1]
    assert +found.dropped == {"beyond_context_tokens": 2}
    assert found.data["run"] == "a-run"


def test_recorded_rollouts_of_no_file_or_of_an_empty_one_are_refused(tmp_path: Path) -> None:
    RolloutStore(tmp_path / "empty.db").close()
    with pytest.raises(DataError, match="no rollouts to read: this run has sampled nothing"):
        recorded_rollouts(tmp_path / "empty.db", context_tokens=10)
    with pytest.raises(DataError, match="no such rollout database"):
        recorded_rollouts(tmp_path / "none.db", context_tokens=10)
