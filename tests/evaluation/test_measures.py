"""Results computed from items with known outcomes, by hand."""

from __future__ import annotations

from dataclasses import replace

from closeness import approx
from made_up_items import make_item, make_items, make_sample
from posttrain.data.base import Task
from posttrain.evaluation.items import Item, break_down, summarize
from posttrain.evaluation.statistics import wilson_interval

FOUR = ["rrrr", "rrww", "rwwn", "wwww"]  # 4, 2, 1, 0 of 4 right


def test_four_items_with_four_samples_by_hand() -> None:
    results = summarize(make_items(FOUR), samples=4, ks=(1, 2, 4))
    assert (results["n"], results["samples"], results["num_graded"]) == (4.0, 4.0, 4.0)
    assert results["accuracy"] == approx(7 / 16)
    # shares 1, 1/2, 1/4, 0: spread 35/64, n* = (7/16)(9/16) 16 / (35/64) = 7.2
    assert (results["accuracy_low"], results["accuracy_high"]) == approx(wilson_interval(7.2 * 7 / 16, 7.2), abs=1e-12)
    assert results["standard_error"] == approx((35 / 64 / 3 / 4) ** 0.5)
    assert results["pass@1"] == approx(7 / 16)
    # no right one in a pair: 0, 1/6, 3/6, 1
    assert results["pass@2"] == approx((1 + 5 / 6 + 1 / 2 + 0) / 4)
    assert results["pass@4"] == approx(3 / 4)
    assert (results["pass@4_low"], results["pass@4_high"]) == wilson_interval(3, 4)
    # votes 1111; 1122: a tie; 122-: 2 wins; 2222
    assert results["majority@4"] == approx((1 + 0.5 + 0 + 0) / 4)
    # pairs of 122-: 12 twice ½, 1- 1, 22 0, 2- twice 0
    assert results["majority@2"] == approx((1 + (1 + 4 * 0.5 + 0) / 6 + (2 * 0.5 + 1) / 6 + 0) / 4)
    assert results["majority@1"] == results["pass@1"]
    assert results["parse_failures"] == 1 / 16
    assert results["format"] == 15 / 16
    assert not any(name.startswith("best_of") for name in results)


def test_intervals_of_pass_at_k_count_disjoint_groups() -> None:
    results = summarize(make_items(["rrww", "wrrw", "wwrr"]), samples=4, ks=(1, 2, 4))
    # every item has the same value, so nothing but the number of groups of k among its samples limits what is known
    for k, value, draws in ((1, 1 / 2, 4), (2, 5 / 6, 2), (4, 1.0, 1)):
        bounds = results[f"pass@{k}_low"], results[f"pass@{k}_high"]
        assert bounds == approx(wilson_interval(value * 3 * draws, 3 * draws), abs=1e-12)


def test_best_of_k_by_hand() -> None:
    def scored(outcomes: str, scores: list[float | None], index: int) -> Item:
        samples = tuple(make_sample(o, score=s) for o, s in zip(outcomes, scores, strict=True))
        return Item(f"made/{index}", index, "?", "1", {}, samples)

    items = [scored("rww", [0.9, 0.1, 0.2], 0), scored("rww", [0.1, None, 0.8], 1), scored("rrw", [0.5, 0.5, 0.5], 2)]
    results = summarize(items, samples=3, ks=(1, 2, 3))
    assert results["best_of@3"] == approx((1 + 0 + 2 / 3) / 3)
    # pairs: {.9,.1} {.9,.2} right, {.1,.2} wrong; {.1,-} right, {.1,.8} {-,.8} wrong; two of three
    assert results["best_of@2"] == approx((2 / 3 + 1 / 3 + 2 / 3) / 3)
    assert results["best_of@1"] == approx(results["accuracy"])
    assert results["unscored"] == approx(1 / 9)


def test_items_without_answers_count_as_wrong_everywhere() -> None:
    items = [*make_items(["rr", "rw"]), Item("made/2", 2, "long", "1"), Item("made/3", 3, "long", "1")]
    results = summarize(items, samples=2, ks=(2,))
    assert results["accuracy"] == approx((1 + 0.5) / 4)
    assert results["pass@2"] == 0.5
    assert results["majority@2"] == approx((1 + 0.5) / 4)
    assert results["format"] == 0.5
    assert results["completion_length"] == 10.0  # of the answers that there are


def test_items_without_gold_do_not_count_in_accuracy() -> None:
    results = summarize(make_items(["r", "w", "u", "u"]))
    assert (results["n"], results["num_graded"], results["accuracy"]) == (4.0, 2.0, 0.5)
    assert (results["accuracy_low"], results["accuracy_high"]) == wilson_interval(1, 2)
    nothing = summarize([*make_items(["uu", "uu"]), Item("made/2", 2, "long", None)], samples=2, ks=(1, 2))
    assert nothing["num_graded"] == 0.0
    assert {"accuracy", "accuracy_low", "accuracy_high", "pass@1"} & nothing.keys() == set()


def test_without_gold_the_reward_has_an_interval_over_items() -> None:
    """Two items of two samples: means 1 and 2, the middle 1.5, the standard error √(0.5 / 2) = 0.5, t = 12.706."""
    first, second = make_items(["uu", "uu"])
    rewards = ((0.5, 1.5), (1.0, 3.0))
    items = [
        replace(item, samples=tuple(replace(s, reward=r) for s, r in zip(item.samples, own, strict=True)))
        for item, own in zip((first, second), rewards, strict=True)
    ]
    results = summarize(items, samples=2)
    assert results["reward"] == 1.5
    assert (results["reward_low"], results["reward_high"]) == approx((1.5 - 6.3531, 1.5 + 6.3531), abs=1e-4)
    assert "reward_low" not in summarize(items[:1], samples=2)  # one item has no spread
    assert "reward_low" not in summarize(make_items(["rw", "uu"]), samples=2)


def test_lengths_outcomes_and_facts() -> None:
    lengths = [3, 5, 8, 40, 4, 6, 7, 9, 2, 1]
    samples = [make_sample("t" if n == 40 else "r", num_tokens=n) for n in lengths]
    samples = [
        replace(
            sample,
            finish="length" if sample.num_tokens == 40 else "stop",
            parts={"correct": 1.0, "strict": sample.num_tokens / 40, "n": 5.0, "xml": 1.0},
        )
        for sample in samples
    ]
    items = [Item(f"made/{i}", i, "?", "1", {}, (s,)) for i, s in enumerate(samples)]
    results = summarize(items, Task("made", "test", (), worked=lambda text: text == ""), format_part="xml")
    assert (results["truncated"], results["grading_failures"], results["accuracy"]) == (0.1, 0.1, 0.9)
    assert (results["completion_length_p50"], results["completion_length_p90"], results["completion_length_max"]) == (
        5.0,
        9.0,
        40.0,
    )
    assert results["completion_length"] == 8.5
    assert results["reward/strict"] == approx(8.5 / 40)
    assert (results["n"], results["reward/n"]) == (10.0, 5.0)  # a fact may not take a result's name
    assert "xml" not in results
    assert "correct" not in results
    assert results["shows_reasoning"] == 1.0


def test_every_way_to_end_has_its_share() -> None:
    ends = ["stop", "ended", "length", "out_of_turns", "out_of_turns", "tool_failed", "environment_failed", "stop"]
    samples = [replace(make_sample("r"), finish=finish) for finish in ends]
    results = summarize([Item(f"made/{i}", i, "?", "1", {}, (s,)) for i, s in enumerate(samples)])
    names = ("truncated", "out_of_turns", "tool_failed", "environment_failures")
    assert [results[name] for name in names] == [4 / 8, 2 / 8, 1 / 8, 1 / 8]


def test_accuracy_by_kind() -> None:
    def item(index: int, outcome: str, **meta) -> Item:
        return make_item(index, outcome, **meta)

    items = [
        item(0, "r", level=2, subject="Algebra", title="a", same=1, twin="x"),
        item(1, "w", level=10, subject="Algebra", title="b", same=1, twin="z"),
        item(2, "r", level=2, subject=None, title="c", same=1, twin="x"),
        item(3, "r", level=2, subject="Geometry", title="d", same=1, twin="x"),
        item(4, "u", level=7, subject="Algebra", title="e", same=1, twin="y"),
        item(5, "w", level=10, title="f", same=1, twin="z"),
        item(6, "r", level=2, subject="Geometry", title="g", same=1, twin="x"),
    ]
    kinds = break_down(items)
    # "title" has as many values as items, "same" has one, "twin" cuts as "level" does; the ungraded item is left out
    assert list(kinds) == ["level", "subject"]
    assert {value: (k["n"], k["accuracy"]) for value, k in kinds["level"].items()} == {
        "2": (4.0, 1.0),
        "10": (2.0, 0.0),
    }
    assert list(kinds["level"]) == ["2", "10"]  # numbers in their order
    assert list(kinds["subject"]) == ["Algebra", "Geometry", "none"]
    assert kinds["subject"]["none"]["n"] == 2.0
    assert (kinds["level"]["2"]["accuracy_low"], kinds["level"]["2"]["accuracy_high"]) == wilson_interval(4, 4)


def test_values_that_are_written_alike_are_one_kind() -> None:
    levels = [5, "5", 5, "none", None, 2, None, 2, 2.0, "none"]
    items = [make_item(i, "r" if i < 4 else "w", level=level) for i, level in enumerate(levels)]
    kinds = break_down(items)["level"]
    assert [(value, k["n"], k["accuracy"]) for value, k in kinds.items()] == [
        ("2", 3.0, 0.0),
        ("5", 3.0, 1.0),
        ("none", 4.0, 0.25),
    ]
