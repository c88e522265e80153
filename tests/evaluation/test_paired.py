"""Two evaluations of the same items: by hand, and what cannot be compared."""

from __future__ import annotations

from dataclasses import replace

from closeness import approx
from made_up_items import make_items
from posttrain.errors import UsageError
from posttrain.evaluation.items import Item
from posttrain.evaluation.tables import compare_items, pair_items, settings_apart
from refusing import refuses

A = ["r"] * 4 + ["r"] * 1 + ["w"] * 3 + ["n"] * 2  # 5 of 10
B = ["r"] * 4 + ["w"] * 1 + ["r"] * 3 + ["w"] * 2  # 7 of 10
LABELS = ("base", "tuned")


def test_ten_items_by_hand() -> None:
    found = compare_items(make_items(A), make_items(B)[::-1], labels=LABELS, samples=1)  # joined by id
    accuracy = found.differences["accuracy"]
    assert (accuracy.a, accuracy.b, found.n) == (0.5, 0.7, 10)
    assert accuracy.difference == approx(0.2)
    assert found.table == {"both": 4, "only_a": 1, "only_b": 3, "neither": 2}
    assert found.mcnemar == approx(2 * (1 + 4) / 16)
    assert found.differences["format"].difference == approx(0.2)
    assert found.differences["completion_length"].difference == 0.0
    assert found.gained == ["made/5", "made/6", "made/7"]
    assert found.lost == ["made/4"]
    assert "pass@1" not in found.differences
    words = found.in_words()
    assert words.startswith("tuned is better than base by 20.0 points, which may be chance, [")
    assert words.endswith("on 10 items")


def test_words_follow_the_sign() -> None:
    better = compare_items(make_items(["w"] * 20), make_items(["r"] * 18 + ["w"] * 2), labels=LABELS, samples=1)
    low, high = (100 * bound for bound in (better.differences["accuracy"].low, better.differences["accuracy"].high))
    assert better.in_words() == (
        f"tuned is better than base by 90.0 points [{low:.1f}, {high:.1f}], p < 0.001, on 20 items"
    )
    worse = compare_items(make_items(["r"] * 18 + ["w"] * 2), make_items(["w"] * 20), labels=LABELS, samples=1)
    assert (
        worse.in_words() == f"tuned is worse than base by 90.0 points [{low:.1f}, {high:.1f}], p < 0.001, on 20 items"
    )
    same = compare_items(make_items(A), make_items(A), labels=LABELS, samples=1)
    assert same.in_words() == "tuned and base have equal accuracy, [0.0, 0.0], p = 1, on 10 items"


def test_several_samples_are_compared_by_their_shares() -> None:
    a = make_items(["rrrr", "rrww", "rwww", "wwww"])
    b = make_items(["rrww", "rrww", "rrww", "rrrr"])
    found = compare_items(a, b, labels=LABELS, samples=4, ks=(1, 4))
    assert found.table == {"a_higher": 1, "b_higher": 2, "alike": 1}
    assert found.mcnemar is None
    assert found.differences["accuracy"].difference == approx((-2 + 0 + 1 + 4) / 16)
    assert found.differences["pass@4"].difference == approx(0.25)
    assert found.differences["majority@4"].difference == approx((0.5 + 0.5 + 0.5 + 1 - 1 - 0.5) / 4)
    assert found.gained == ["made/2", "made/3"]
    assert found.lost == ["made/0"]


def test_items_without_answers_count_as_wrong_and_ungraded_ones_do_not_count() -> None:
    a = [*make_items(["r", "w", "u"]), Item("made/3", 3, "What is 3?", "1")]
    b = make_items(["r", "r", "u", "r"])
    found = compare_items(a, b, labels=LABELS, samples=1)
    assert found.table == {"both": 1, "only_a": 0, "only_b": 2, "neither": 0}
    with refuses(UsageError, "no graded items"):
        compare_items(make_items(["u"]), make_items(["u"]), labels=LABELS, samples=1)


def test_other_items_are_refused() -> None:
    with refuses(UsageError, "such as made/1"):
        pair_items(make_items(["r"]), make_items(["r", "r"]))
    with refuses(UsageError, "share 1 ids"):
        pair_items(make_items(["r"]), make_items(["r"]) * 2)
    changed = [replace(item, answer="7") for item in make_items(["r"])]
    with refuses(UsageError, "such as made/0"):
        pair_items(make_items(["r"]), changed)


def test_other_settings_are_refused_or_reported() -> None:
    base = {"samples": 1, "max_tokens": 64, "temperature": 0.0, "template": {"name": "boxed"}, "model": "a", "seed": 0}
    with refuses(UsageError, "max_tokens"):
        settings_apart(base, base | {"max_tokens": 32, "temperature": 1.0})
    with refuses(UsageError, "top_k"):
        settings_apart(base, base | {"top_k": 5})
    apart = settings_apart(base, base | {"template": {"name": "plain"}, "model": "b"})
    assert apart == {"model": ("a", "b"), "template": ({"name": "boxed"}, {"name": "plain"})}


def test_few_items_that_all_differ_alike_may_be_chance() -> None:
    found = compare_items(make_items(["w"] * 3), make_items(["r"] * 3), labels=LABELS, samples=1)
    assert found.mcnemar == 0.25
    assert found.in_words() == (
        "tuned is better than base by 100.0 points, which may be chance, [100.0, 100.0], p = 0.25 "
        "(McNemar's exact test: p = 0.25), on 3 items"
    )
    assert found.cautions() == [
        "all 3 items differ by the same amount, so the interval is a point",
        "only 3 items: below 30 the interval is too narrow; McNemar's exact test remains valid",
    ]
    several = compare_items(make_items(["ww"] * 3), make_items(["rr"] * 3), labels=LABELS, samples=2)
    assert several.in_words().startswith("tuned is better than base by 100.0 points, which may be chance, [")
    assert several.cautions()[1] == "only 3 items: below 30 the interval is too narrow"


def test_both_tests_must_say_that_it_is_not_chance() -> None:
    found = compare_items(make_items(["w"] * 6), make_items(["r"] * 5 + ["w"]), labels=LABELS, samples=1)
    assert found.differences["accuracy"].low > 0  # the bootstrap alone would be sure
    assert found.mcnemar == 2 / 32
    assert "by 83.3 points, which may be chance, [" in found.in_words()
    assert "(McNemar's exact test: p = 0.062)" in found.in_words()
    sure = compare_items(make_items(["w"] * 30), make_items(["r"] * 9 + ["w"] * 21), labels=LABELS, samples=1)
    assert "chance" not in sure.in_words()
    assert sure.cautions() == []


def test_lengths_are_compared_where_both_answered() -> None:
    a = [*make_items(["r", "w"]), Item("made/2", 2, "What is 2?", "1")]
    b = make_items(["r", "r", "r"])
    found = compare_items(a, b, labels=LABELS, samples=1)
    tokens = found.differences["completion_length"]
    assert (tokens.a, tokens.b, tokens.n, found.n) == (10.0, 10.0, 2, 3)
    assert found.differences["format"].a == approx(2 / 3)  # a rate counts every item
    none = compare_items(a[1:], [Item("made/1", 1, "What is 1?", "1"), b[2]], labels=LABELS, samples=1)
    assert "completion_length" not in none.differences


def test_items_that_repeat_a_question_are_compared_once() -> None:
    """An evaluation of an earlier version may hold a question several times."""
    a, b = make_items(A), make_items(B)
    twice = [[*side, *(replace(item, id=f"{item.id}b") for item in side)] for side in (a, b)]
    once = compare_items(a, b, labels=LABELS, samples=1)
    found = compare_items(*twice, labels=LABELS, samples=1)
    assert (found.n, found.table, found.differences) == (once.n, once.table, once.differences)
