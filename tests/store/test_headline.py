"""What a run is told by: which result, which way is better, how it reads, and that a file gives it back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from posttrain.errors import DataError, UsageError
from posttrain.store.headline import ACCURACY, REWARD, Headline, choose_headline
from posttrain.store.reading import read_stated

GRADED = {"n": 8.0, "accuracy": 0.5, "accuracy_low": 0.2, "accuracy_high": 0.8, "reward": 0.7, "format": 1.0}
UNGRADED = {"n": 8.0, "reward": 0.7, "reward_low": 0.6, "reward_high": 0.8, "format": 1.0}
DRIFT = {"kl_from_start": 2.31, "entropy": 1.0}
PAIRS = {"n": 8.0, "pair_accuracy": 0.75, "loss": 0.61, "margin": 0.1}
LOSS = {"loss": 2.0, "perplexity": 7.389, "token_accuracy": 0.4}


def chosen(results: Mapping[str, float], *, samples: bool = True, named: str | None = None) -> Headline | None:
    return choose_headline({"task/validation": results}, named=named, samples=samples)


@pytest.mark.parametrize(
    ("results", "samples", "metric", "higher"),
    [
        (GRADED | DRIFT, True, "accuracy", True),
        (GRADED | LOSS, False, "accuracy", True),
        (UNGRADED | DRIFT, True, "reward", True),
        (UNGRADED | LOSS, False, "loss", False),
        (PAIRS, False, "pair_accuracy", True),
        ({"n": 8.0, "final_accuracy": 0.5, "loss": 0.7}, False, "final_accuracy", True),
        ({"n": 8.0, "row_accuracy": 0.5, "loss": 0.7}, False, "row_accuracy", True),
        ({"n": 8.0, "step_accuracy": 0.5, "loss": 0.7}, False, "step_accuracy", True),
    ],
)
def test_what_is_optimized_is_the_headline(results: dict[str, float], samples: bool, metric: str, higher: bool) -> None:
    headline = chosen(results, samples=samples)
    assert headline is not None
    assert (headline.metric, headline.higher_is_better) == (metric, higher)


def test_without_gold_answers_and_loss_data_have_no_headline() -> None:
    assert chosen(UNGRADED, samples=False) is None


def test_the_first_task_decides_and_the_mean_is_over_those_that_have_it() -> None:
    evaluations = {"sums": GRADED, "talk": UNGRADED, "more": GRADED | {"accuracy": 1.0}}
    headline = choose_headline(evaluations, named=None, samples=True)
    assert headline is ACCURACY
    assert headline.mean(evaluations.values()) == 0.75
    assert choose_headline(dict(reversed(evaluations.items())), named=None, samples=True) is ACCURACY
    talk_first = {"talk": UNGRADED, "sums": GRADED}
    assert choose_headline(talk_first, named=None, samples=True) is REWARD
    assert REWARD.mean([{"reward": float("nan")}]) is None


def test_a_recipe_may_name_another() -> None:
    headline = chosen(GRADED | DRIFT, named="kl_from_start")
    assert headline == Headline("kl_from_start", False, "nats", "KL from start", "prompts")
    assert chosen(GRADED, named="reward") is REWARD
    share = chosen(GRADED, named="format")
    assert share is not None
    assert (share.show(1.0), share.higher_is_better) == ("100.0%", True)


@pytest.mark.parametrize("named", ["acuracy", "n", "accuracy_low"])
def test_an_unknown_one_is_refused_with_what_there_is(named: str) -> None:
    with pytest.raises(UsageError, match=rf"eval.best: no evaluation measures '{named}'.* There are: accuracy, format"):
        chosen(GRADED, named=named)


def test_how_it_reads() -> None:
    assert ACCURACY.tell(GRADED | DRIFT) == "50.0% right [20.0%, 80.0%]"
    assert ACCURACY.tell(UNGRADED) == ""
    assert REWARD.tell(UNGRADED | DRIFT) == "reward 0.700 [0.600, 0.800] · KL from start 2.310"
    assert REWARD.tell(REWARD.only(UNGRADED | DRIFT)) == "reward 0.700 · KL from start 2.310"
    pairs, loss = chosen(PAIRS, samples=False), chosen(UNGRADED | LOSS, samples=False)
    assert pairs is not None
    assert loss is not None
    assert pairs.tell(PAIRS) == "75.0% pairs right · loss 0.6100"
    assert loss.tell(LOSS) == "loss 2.000 · perplexity 7.39 · token accuracy 40.0%"
    assert loss.goodness(1.0) > loss.goodness(2.0)
    assert REWARD.numbers(UNGRADED | DRIFT) == {
        "reward": 0.7, "reward_low": 0.6, "reward_high": 0.8, "kl_from_start": 2.31,
    }  # fmt: skip


def test_a_file_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "headline.json"
    for headline in (ACCURACY, REWARD):
        path.write_text(json.dumps(asdict(headline)))
        assert read_stated(path, Headline) == headline
    path.write_text(json.dumps(asdict(REWARD) | {"higher_is_better": "yes"}))
    with pytest.raises(DataError, match="higher_is_better is 'yes'"):
        read_stated(path, Headline)
