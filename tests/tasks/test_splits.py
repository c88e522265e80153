"""Held-out rows: disjoint by prompt, chosen by the prompt's text alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import DataError
from posttrain.tasks.reader import choose_split, opening_hash, prompt_hash
from posttrain.types import Example, Message


def ask(text: str, number: int = 0) -> Example:
    return Example(f"x/{number}", (Message("user", text),), answer="1")


def test_the_hash_is_fixed_for_all_time() -> None:
    """A changed hash would leak yesterday's training questions into today's validation set."""
    assert prompt_hash(ask("How many shells?")) == pytest.approx(0.5487432984527636, abs=1e-12)
    assert prompt_hash(ask("a")) != prompt_hash(Example("x", (Message("system", "a"),)))
    assert prompt_hash(ask("a", 1)) == prompt_hash(ask("a", 2))


def test_shares_and_order() -> None:
    examples = [ask(f"question {i}", i) for i in range(4000)]
    train, validation = (choose_split(examples, split, 0.05, "f") for split in ("train", "validation"))
    assert len(train) + len(validation) == 4000
    assert 160 <= len(validation) <= 240, "four standard deviations around 200"
    assert {e.id for e in train}.isdisjoint(e.id for e in validation)
    assert [e.id for e in validation] == sorted((e.id for e in validation), key=lambda i: int(i[2:]))
    assert choose_split(examples, "test", 0.05, "f") == examples


def test_a_prompt_keeps_its_side_when_rows_come_or_go() -> None:
    examples = [ask(f"question {i}", i) for i in range(1000)]
    before = {e.id for e in choose_split(examples, "validation", 0.1, "f")}
    after = {e.id for e in choose_split(examples[::2], "validation", 0.1, "f")}
    assert after == {i for i in before if int(i[2:]) % 2 == 0}


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12), st.sampled_from([0.001, 0.05, 0.5, 0.999]))
def test_small_files_fill_both_sides_and_share_no_prompt(prompts: list[str], share: float) -> None:
    examples = [ask(text, i) for i, text in enumerate(prompts)]
    if len(set(prompts)) == 1:
        with pytest.raises(DataError, match="only one distinct prompt"):
            choose_split(examples, "train", share, "f")
        return
    train, validation = (choose_split(examples, split, share, "f") for split in ("train", "validation"))
    assert train
    assert validation
    assert len(train) + len(validation) == len(examples)
    assert {e.messages for e in train}.isdisjoint(e.messages for e in validation)


def test_nothing_held_out() -> None:
    examples = [ask("a"), ask("b")]
    assert choose_split(examples, "train", 0.0, "f") == examples
    with pytest.raises(DataError, match=r"set task.validation_share above 0"):
        choose_split(examples, "validation", 0.0, "f")
    with pytest.raises(DataError, match="f: no usable examples"):
        choose_split([], "train", 0.05, "f")


def test_the_opening_is_all_up_to_the_first_user_message() -> None:
    def asked(*turns: tuple[str, str]) -> Example:
        return Example("x", tuple(Message(role, content) for role, content in turns))

    system, first, answer, second = ("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")
    alone = asked(first)
    assert opening_hash(alone) == opening_hash(asked(first, answer, second)) == prompt_hash(alone)
    assert opening_hash(asked(system, first)) == opening_hash(asked(system, first, answer, second))
    assert len({opening_hash(asked(*turns)) for turns in ((first,), (system, first), (second,), (system,))}) == 4
    examples = [asked(("user", f"{i % 50}?"), *(answer, second) * (i // 50)) for i in range(150)]
    sides = [choose_split(examples, split, 0.2, "f", opening_hash) for split in ("train", "validation")]
    openings = [{example.messages[0] for example in side} for side in sides]
    assert not openings[0] & openings[1]
    assert [len(side) for side in sides] == [3 * len(side) for side in openings]
