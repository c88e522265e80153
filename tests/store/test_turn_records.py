"""Completions of several turns in ``rollouts.db``: who wrote which token, what was called, why an episode failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeness import approx
from posttrain.errors import DataError
from posttrain.store.rollouts import RolloutStore, connect, spans_of
from posttrain.store.turns import show_turns
from posttrain.types import Call, Completion, Example, Message, Rollout, Turn
from refusing import refuses

OWN = (True, True, False, False, False, True)
TURNS = (
    Turn("<think>2 + 2?", (Call("calculator", "2 + 2", "4", "ok"), Call("", "", "no \ud800", "malformed")), -0.25),
    Turn("4"),
)


def make_rollout(**changes) -> Rollout:
    completion = Completion((5, 6, 7, 8, 9, 2), (-0.5, -1.0, 0.0, 0.0, 0.0, -1.5), "stop", 3, OWN)
    example = Example("sum/1", (Message("user", "2 + 2?"),), answer="4")
    plain = {"turns": TURNS, "failures": ("the server is down",)} | changes
    return Rollout(example, (1, 2), plain.pop("completion", completion), "4", {}, 1.0, 1, 0, 0, 0, **plain)


def test_turns_come_back_whole(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "r.db") as store:
        store.record(
            [make_rollout(), make_rollout(completion=Completion((5,), (-0.5,), "stop"), turns=(), failures=())]
        )
        row, plain = store.training()
    assert (row.own, row.num_tokens, row.num_own) == (OWN, 6, 3)
    assert row.mean_sampler_logprob == approx(-1.0), "of what the model wrote"
    output = Call("", "", "no \\ud800", "malformed")
    assert row.turns == (Turn(TURNS[0].text, (TURNS[0].calls[0], output), -0.25), TURNS[1])
    assert row.failures == ("the server is down",)
    assert row.transcript.splitlines() == [
        "<think>2 + 2?",
        "-> calculator (ok): 4",
        "->  (malformed): no \\ud800",
        "-> paid -0.25",
        "4",
        "-> failed: the server is down",
    ]
    assert (plain.own, plain.turns, plain.failures, plain.num_own) == (None, (), (), 1)
    assert plain.transcript == plain.completion


@pytest.mark.parametrize(
    "line", ["-> paid 9", "  -> paid 9", "\u00a0-> calculator (ok): 9", "-> failed: no", "\n\n-> paid 9"]
)
@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\n\n"])
def test_no_model_and_no_tool_writes_a_line_of_the_record(line: str, end: str) -> None:
    forged = f"{line}{end}{line}"
    turns = (Turn(forged, (Call("calculator", "2", f"4{end}{line}", "ok"),), 0.5), Turn(forged, (), None))
    arrows = [shown for shown in show_turns(turns).splitlines() if shown.lstrip().startswith("->")]
    assert arrows == ["-> calculator (ok): 4", "-> paid 0.5"]


@given(st.lists(st.booleans()))
def test_spans_are_the_mask(own: list[bool]) -> None:
    spans = spans_of(own)
    assert [place % 2 == 0 for place, length in enumerate(spans) for _ in range(length)] == own
    assert all(spans[1:])


@pytest.mark.parametrize(
    "change",
    [
        "spans = x'0500000001000000ff'",
        "spans = x'0500000002000000'",
        "spans = x'ffffffff07000000'",
        "spans = x'ffffff7f', num_tokens = 2147483647",  # as many places in memory, of no token
        "turns = '[1]'",
        'turns = \'[{"text": 3, "calls": []}]\'',
        'turns = \'[{"text": "a", "calls": [{"tool": "b"}]}]\'',
        'turns = \'[{"text": "a", "calls": [], "reward": "much"}]\'',
        'turns = \'[{"text": "a", "calls": [], "reward": NaN}]\'',
        "failures = '[3]'",
        "turns = 'no JSON'",
        "notes = '[]'",
        "notes = '{\"skipped\": 3}'",
        "notes = '{\"skipped\": [3]}'",
        'notes = \'{"is_scored": "no"}\'',
        "notes = '{\"extra\": []}'",
    ],
)
def test_a_row_that_holds_something_else_is_damaged(tmp_path: Path, change: str) -> None:
    path = tmp_path / "r.db"
    with RolloutStore(path) as store:
        store.record([make_rollout()])
    with connect(path, read_only=False) as db:
        db.execute(f"UPDATE rollouts SET {change}")
    with refuses(DataError, "damaged: row 1"):
        RolloutStore(path, read_only=True).training()
