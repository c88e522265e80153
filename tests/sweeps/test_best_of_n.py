"""Choices among n answers: against brute force, on the same answers, over problems and seeds."""

from __future__ import annotations

import random
import statistics
from itertools import combinations

from closeness import approx
from made_up_items import make_item, make_sample
from posttrain.errors import DataError
from posttrain.evaluation.items import Item
from posttrain.sweeps.best_of_n import RANDOM, best_of_n_part, choose
from refusing import refuses

MAJORITY, ORACLE = "majority", "oracle"


def scored(index: int, outcomes: str, scores: list[float], answers: str = "") -> Item:
    samples = tuple(
        make_sample(o, text=f"{index}-{i}", score=s, **({"extracted": answers[i]} if answers else {}))
        for i, (o, s) in enumerate(zip(outcomes, scores, strict=True))
    )
    return Item(f"made/{index}", index, "?", "1", {}, samples)


def random_items(seed: int, num_items: int = 6) -> list[Item]:
    rng = random.Random(seed)
    outcomes = ["".join(rng.choice("rww") for _ in range(4)) for _ in range(num_items)]
    return [scored(i, text, [rng.random() for _ in text]) for i, text in enumerate(outcomes)]


def rescored(items: list[Item], sign: float) -> list[Item]:
    """The same answers, scored by somebody who knows (1) or is always mistaken (−1)."""
    found = []
    for item in items:
        correct = [s.is_correct for s in item.samples]
        found.append(scored(item.index, "".join("r" if r else "w" for r in correct), [sign * r for r in correct]))
    return found


def test_choices_are_means_over_all_subsets() -> None:
    items = random_items(0)
    found = {c.name: c for c in choose({"orm": [items]})}
    assert list(found) == ["orm", MAJORITY, RANDOM, ORACLE]
    for n in (1, 2, 4):
        for item, value, any_correct in zip(items, found["orm"].values[n], found[ORACLE].values[n], strict=True):
            subsets = list(combinations(item.samples, n))
            best = [max(subset, key=lambda s: s.score or 0.0).is_correct for subset in subsets]
            assert value == approx(statistics.fmean(best))
            assert any_correct == approx(statistics.fmean(any(s.is_correct for s in subset) for subset in subsets))
        assert found[RANDOM].mean(n) == approx(statistics.fmean(item.share for item in items))
    pick = found[RANDOM]
    assert pick.bounds[1] == pick.bounds[4]  # it does not depend on n
    assert found["orm"].mean(1) == approx(found[RANDOM].mean(1))  # the best of one is a random pick


def test_the_majority_wins_its_votes() -> None:
    item = scored(0, "wwr", [0.0, 0.0, 0.0], "771")
    found = {c.name: c for c in choose({"orm": [[item]]})}
    assert found[MAJORITY].values[3] == [0.0]
    # of the three pairs, 7-7 is wrong and 7-1 is a tie twice: a half each
    assert found[MAJORITY].values[2] == [approx(1 / 3)]


def test_who_knows_equals_the_oracle_and_who_errs_is_below_a_random_pick() -> None:
    seeds = [random_items(seed, 40) for seed in (1, 2)]
    found = choose({"errs": [rescored(s, -1.0) for s in seeds], "knows": [rescored(s, 1.0) for s in seeds]})
    errs, knows, _, pick, oracle = found
    assert [knows.mean(n) for n in (1, 2, 4)] == [approx(oracle.mean(n)) for n in (1, 2, 4)]
    assert errs.mean(4) < pick.mean(4) < knows.mean(4)
    (gap, *_) = best_of_n_part(found, 2).data["differences"]
    assert (gap["a"], gap["b"]) == ("errs", "knows")
    assert gap["by_n"]["4"]["difference"] == approx(knows.mean(4) - errs.mean(4))
    assert gap["by_n"]["4"]["low"] > 0.2
    assert gap["by_n"]["1"]["difference"] == 0.0


def test_values_are_means_over_seeds_of_the_same_problem() -> None:
    seeds = [
        [scored(0, "rw", [1.0, 0.0]), scored(1, "ww", [1.0, 0.0])],
        [scored(0, "wr", [1.0, 0.0]), scored(1, "rr", [0, 1])],
    ]
    (orm, *_) = choose({"orm": seeds})
    assert orm.values[2] == [0.5, 0.5]
    assert orm.seeds[2] == [0.5, 0.5]
    assert orm.bounds[2][0] < 0.5 < orm.bounds[2][1]


def test_a_problem_without_answers_is_wrong_for_everybody() -> None:
    found = choose({"orm": [[scored(0, "rr", [0.0, 1.0]), Item("made/1", 1, "?", "1")]]})
    assert [c.mean(2) for c in found] == [0.5] * 4


def test_different_answers_are_refused() -> None:
    items = random_items(0)
    choose({"orm": [items], "prm": [rescored(items, 1.0)]})
    other = [make_item(0, "rrww"), *items[1:]]
    with refuses(DataError, "chosen"):
        choose({"orm": [items], "prm": [other]})


def test_best_of_n_part_tables_findings_and_data() -> None:
    items = random_items(3, 60)
    found = choose({"orm": [rescored(items, -1.0)], "prm": [rescored(items, 1.0)]})
    part = best_of_n_part(found, 2)
    assert [(d["b"], d["a"]) for d in part.data["differences"]] == [
        ("prm", "orm"),
        ("orm", MAJORITY),
        ("prm", MAJORITY),
        ("orm", RANDOM),
        ("prm", RANDOM),
    ]
    errs, knows, pick = found[0], found[1], found[3]
    assert part.findings[0] == f"orm is best at n = 1: {pick.mean(1):.1%}; at 4 {errs.mean(4):.1%}"
    assert part.findings[1] == f"prm is best at n = 4: {knows.mean(4):.1%}; at 4 {knows.mean(4):.1%}"
    assert part.findings[2].startswith("prm chooses better than orm at n = 4: +")
    assert part.findings[5].startswith(f"orm chooses worse than {RANDOM} at n = 4: -")
    shares, gaps = part.tables
    assert shares.header == ["chosen by", "n = 1", "n = 2", "n = 4", "95 % at 4"]
    assert [line[0] for line in shares.lines] == ["orm", "prm", MAJORITY, RANDOM, ORACLE]
    assert shares.lines[1][3] == f"{found[1].mean(4):.1%}"
    assert gaps.lines[0][0] == "prm minus orm"
    assert part.data["chosen_by"]["prm"]["4"]["mean"] == found[1].mean(4)


def test_equals_cannot_be_distinguished() -> None:
    items = random_items(5, 30)
    line = best_of_n_part(choose({"a": [items], "b": [items]}), 2).findings[2]
    assert line == "b chooses measurably neither better nor worse than a at n = 4: +0.0 points [+0.0 to +0.0]"
