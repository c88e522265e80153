"""The registry of metrics: names and families; the primary metric of a run, its direction and its text."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from posttrain.errors import UsageError
from posttrain.store.metric_names import ACCURACY, GROUPS, METRICS, REWARD, Metric, choose_primary_metric, find_metric

GRADED = {"n": 8.0, "accuracy": 0.5, "accuracy_low": 0.2, "accuracy_high": 0.8, "reward": 0.7, "format": 1.0}
UNGRADED = {"n": 8.0, "reward": 0.7, "reward_low": 0.6, "reward_high": 0.8, "format": 1.0}
DRIFT = {"kl_initial": 2.31, "entropy": 1.0}
PAIRS = {"n": 8.0, "pair_accuracy": 0.75, "loss": 0.61, "margin": 0.1}
LOSS = {"loss": 2.0, "perplexity": 7.389, "token_accuracy": 0.4}


def chosen(results: Mapping[str, float], *, samples: bool = True, named: str | None = None) -> Metric | None:
    return choose_primary_metric({"task/validation": results}, named=named, samples=samples)


@pytest.mark.parametrize(
    ("results", "samples", "metric", "higher"),
    [
        (GRADED | DRIFT, True, "accuracy", True),
        (GRADED | LOSS, False, "accuracy", True),
        (UNGRADED | DRIFT, True, "reward", True),
        (UNGRADED | LOSS, False, "loss", False),
        (PAIRS, False, "pair_accuracy", True),
        ({"n": 8.0, "answer_accuracy": 0.5, "loss": 0.7}, False, "answer_accuracy", True),
        ({"n": 8.0, "step_accuracy": 0.5, "loss": 0.7}, False, "step_accuracy", True),
    ],
)
def test_primary_metric_is_the_first_that_is_measured(
    results: dict[str, float], samples: bool, metric: str, higher: bool
) -> None:
    primary = chosen(results, samples=samples)
    assert primary is not None
    assert (primary.name, primary.better == "higher") == (metric, higher)


def test_data_without_reference_answers_and_loss_has_no_primary_metric() -> None:
    assert chosen(UNGRADED, samples=False) is None


def test_the_first_task_decides_and_the_mean_is_over_those_that_have_it() -> None:
    evaluations = {"sums": GRADED, "talk": UNGRADED, "more": GRADED | {"accuracy": 1.0}}
    metric = choose_primary_metric(evaluations, named=None, samples=True)
    assert metric is ACCURACY
    assert metric.mean(evaluations.values()) == 0.75
    assert choose_primary_metric(dict(reversed(evaluations.items())), named=None, samples=True) is ACCURACY
    talk_first = {"talk": UNGRADED, "sums": GRADED}
    assert choose_primary_metric(talk_first, named=None, samples=True) is REWARD
    assert REWARD.mean([{"reward": float("nan")}]) is None


def test_a_recipe_may_name_another() -> None:
    metric = chosen(GRADED | DRIFT, named="kl_initial")
    assert metric is METRICS["kl_initial"]
    assert (metric.better, metric.label, metric.goodness(2.0)) == ("lower", "KL from initial model", -2.0)
    assert chosen(GRADED, named="reward") is REWARD
    share = chosen(GRADED, named="format")
    assert share is not None
    assert (share.show(1.0), share.better) == ("100.0%", "higher")


@pytest.mark.parametrize("named", ["acuracy", "n", "accuracy_low"])
def test_an_unknown_one_is_refused_with_what_there_is(named: str) -> None:
    with pytest.raises(UsageError, match=rf"eval.best: no evaluation measures '{named}'.* There are: accuracy, format"):
        chosen(GRADED, named=named)


def test_describe_shows_value_interval_and_further_metrics() -> None:
    assert ACCURACY.describe(GRADED | DRIFT) == "accuracy 50.0% [20.0%, 80.0%]"
    assert ACCURACY.describe(UNGRADED) == ""
    assert REWARD.describe(UNGRADED | DRIFT) == "reward 0.700 [0.600, 0.800] · KL from initial model 2.310"
    assert REWARD.describe(REWARD.brief(UNGRADED | DRIFT)) == "reward 0.700 · KL from initial model 2.310"
    pairs, loss = chosen(PAIRS, samples=False), chosen(UNGRADED | LOSS, samples=False)
    assert pairs is not None
    assert loss is not None
    assert pairs.describe(PAIRS) == "pair accuracy 75.0% · loss 0.610"
    assert loss.describe(LOSS) == "loss 2.000 · perplexity 7.389 · token accuracy 40.0%"
    assert loss.goodness(1.0) > loss.goodness(2.0)
    assert REWARD.numbers(UNGRADED | DRIFT) == {
        "reward": 0.7, "reward_low": 0.6, "reward_high": 0.8, "kl_initial": 2.31,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("kl_sampler", 0.0000123, "1.2e-05"),
        ("kl_ref", 0.25, "0.250"),
        ("trained_tokens", 12345.0, "12,345"),
        ("completion_length", 12.34, "12.3"),
        ("grad_norm", 1.5e20, "1.5e+20"),
    ],
)
def test_show_writes_a_value_in_its_unit(name: str, value: float, text: str) -> None:
    assert METRICS[name].show(value) == text


@pytest.mark.parametrize(
    ("name", "label", "unit"),
    [
        ("eval/gsm8k/test/accuracy_low", "accuracy low", "share"),
        ("eval/gsm8k/test/sampled_reward/mine:brief", "sampled_reward/mine:brief", "number"),
        ("reward/correct_low", "reward/correct_low", "number"),
        ("gsm8k:num_calls", "gsm8k: calls", "number"),
        ("pass@4", "pass@4", "share"),
        ("completion_length_p90", "completion length p90", "tokens"),
        ("start_kl_initial", "start KL from initial model", "nats"),
    ],
)
def test_find_metric_knows_families(name: str, label: str, unit: str) -> None:
    metric = find_metric(name)
    assert metric is not None
    assert (metric.name, metric.label, metric.unit) == (name, label, unit)


def test_every_metric_is_registered_once_with_a_sentence() -> None:
    assert find_metric("surprise") is None
    every = [metric for group in GROUPS.values() for metric in group]
    assert len(every) == len(METRICS) > 140
    assert [metric.name for metric in every if not metric.meaning.endswith(".")] == []
