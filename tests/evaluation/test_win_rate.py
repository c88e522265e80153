"""Two models on the same prompts: meetings by hand, exact divergences, identities."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from contextlib import nullcontext

from closeness import approx
from posttrain.errors import UsageError
from posttrain.evaluation.kl_from_initial import answers_as_batch, kl_of_states
from posttrain.evaluation.statistics import item_interval
from posttrain.evaluation.win_rate import HeadToHeadItem, measure_answer_kl, measure_wins, pair_up, summarize_kl
from posttrain.models.forward.forward import Forward
from posttrain.reports.evaluation_page import head_to_head_table, write_head_to_head_page
from posttrain.types import Completion, Example, Message, Rollout
from refusing import refuses

TEMPERATURE = 1.3


def answer(index: int, text: str = "", outcome: str = "wrong", ids: Sequence[int] = (5,)) -> Rollout:
    example = Example(f"e/{index}", (Message("user", "What is it?"),), "5")
    completion = Completion(tuple(ids), (0.0,) * len(ids), "stop")
    return Rollout(example, (1, 2, 3 + index), completion, text, {}, 0.0, 0, 0, index, 0, outcome=outcome)


def by_text(rollouts: Sequence[Rollout]) -> list[float | None]:
    """A judge that reads the score in the text: ``2 and some words``; ``none`` cannot be judged."""
    words = [rollout.text.split()[0] for rollout in rollouts]
    return [None if word == "none" else float(word) for word in words]


def test_wins_by_hand() -> None:
    items = [
        HeadToHeadItem(0, (answer(0, "2"), answer(0, "1")), (answer(0, "1"), answer(0, "0"))),
        HeadToHeadItem(
            3, (answer(3, "0 long long"), answer(3, "4 much longer still")), (answer(3, "3"), answer(3, "none"))
        ),
    ]
    found = measure_wins(items, by_text)
    # first: 2>1, 2>0, 1=1, 1>0; second: 0<3, 0>none, 4>3, 4>none
    assert [item["win_rate"] for item in found.items] == [3.5 / 4, 3 / 4]
    assert [(item["wins"], item["ties"], item["losses"]) for item in found.items] == [(0.75, 0.25, 0), (0.75, 0, 0.25)]
    results = found.results
    assert (results["n"], results["win_rate"]) == (2.0, approx(0.8125))
    assert (results["win_rate_low"], results["win_rate_high"]) == item_interval([3.5 / 4, 3 / 4], 2)
    assert (results["wins"], results["ties"], results["losses"]) == (0.75, 0.125, 0.125)
    assert results["unscored"] == 1 / 8
    assert results["characters_a"] == approx((1 + (11 + 19) / 2) / 2)
    assert results["characters_b"] == approx((1 + 2.5) / 2)
    # only the first item has answers of like length
    assert (results["n_similar"], results["win_rate_similar"]) == (1.0, 3.5 / 4)
    assert [item["num_similar"] for item in found.items] == [4, 0]
    assert [(a["score"], a["text"]) for a in found.items[1]["b"]] == [(3.0, "3"), (None, "none")]
    json.dumps(found.items, allow_nan=False)


def test_win_rates_of_both_sides_sum_to_one() -> None:
    rng = random.Random(0)
    sides = [[answer(i, str(rng.randint(0, 3))) for i in range(40) for _ in range(3)] for _ in range(2)]
    forward, backward = (measure_wins(pair_up(*order), by_text).results for order in (sides, sides[::-1]))
    assert forward["win_rate"] + backward["win_rate"] == approx(1.0)
    assert (forward["wins"], forward["ties"]) == (backward["losses"], backward["ties"])
    assert measure_wins(pair_up(sides[0], sides[0]), by_text).results["win_rate"] == approx(0.5)


def test_answers_meet_by_their_item() -> None:
    a = [answer(2, "1"), answer(0, "1"), answer(2, "2"), answer(7, "0")]
    b = [answer(2, "5"), answer(1, "1"), answer(0, "3")]
    found = pair_up(a, b)
    assert [(c.index, [r.text for r in c.a], [r.text for r in c.b]) for c in found] == [
        (0, ["1"], ["3"]),
        (2, ["1", "2"], ["5"]),
    ]
    with refuses(ValueError, "no items answered by both"):
        measure_wins([], by_text)


def test_divergences_are_those_of_each_answer_alone(tiny_random) -> None:
    """``test_kl_from_initial.py`` holds the divergence of one token against a slow reference."""
    rng = random.Random(1)
    answers = [answer(i, ids=[rng.randrange(300) for _ in range(1 + 2 * i)]) for i in range(5)]
    forwards = [Forward(tiny_random("qwen3", seed=seed), TEMPERATURE) for seed in (0, 1)]
    for own, other in (forwards, forwards[::-1]):
        found = measure_answer_kl(answers, own, other)
        alone = [float(kl_of_states(answers_as_batch([one]), own, nullcontext(other)).sum()) for one in answers]
        assert found == approx(alone, rel=1e-4)
        assert measure_answer_kl(answers, own, other, max_tokens=5) == approx(found, rel=1e-4)
        assert min(found) > 0.1
    assert measure_answer_kl(answers, forwards[0], forwards[0]) == [0.0] * 5


def test_a_vocabulary_that_lacks_a_token_is_refused(tiny_random) -> None:
    large, small = tiny_random("qwen3"), tiny_random("qwen3", vocab_size=290)
    answers = [answer(0, ids=[7, 8])]
    with refuses(UsageError, "second model's 290"):
        measure_answer_kl(answers, Forward(large, 1.0), Forward(small, 1.0))


def test_the_summary_of_divergences_by_hand() -> None:
    answers = [answer(0, ids=[1] * 4), answer(0, ids=[1] * 2), answer(1, ids=[1] * 6), answer(2, ids=[1] * 8)]
    found = summarize_kl("kl_ab", answers, [1.0, 3.0, 6.0, 4.0])
    means = [2.0, 6.0, 4.0]
    half = 4.302652729911275 * statistics.stdev(means) / math.sqrt(3)
    assert found == {
        "kl_ab": approx(4.0),
        "kl_ab_low": approx(max(0.0, 4.0 - half)),
        "kl_ab_high": approx(4.0 + half),
        "kl_ab_per_token": approx(14.0 / 20),
    }
    assert summarize_kl("kl", answers, [0.0, 0.0, 0.0, 9.0])["kl_low"] == 0.0


def test_the_page_shows_what_was_measured() -> None:
    items = [HeadToHeadItem(0, (answer(0, "2 ``` x"),), (answer(0, "1"),))]
    found = measure_wins(items, by_text)
    found.results |= summarize_kl("kl_ab", [answer(0)], [1.5])
    table = head_to_head_table("sums/test", "mine", "theirs", found.results, {})
    assert table.title == "sums/test: mine against theirs, n = 1"
    assert ["mine wins", "100.0%", f"{found.results['win_rate_low']:.1%} – 100.0%"] in table.lines
    assert ["better / equally good / worse", "100.0% / 0.0% / 0.0%", "–"] in table.lines
    assert ["KL(mine ‖ theirs), nats per answer", "1.5", "–"] in table.lines
    assert not any("lengths alike" in line[0] or "right" in line[0] for line in table.lines)
    page = write_head_to_head_page(table, ["no KL the other way"], {"seed": 0}, found.items)
    assert "- no KL the other way\n" in page
    assert "What is it?\n```\n\ngold answer: `5`\n" in page
    assert "A: wrong, score 2\n\n````\n2 ``` x\n````" in page  # a fence in the text does not end its block
