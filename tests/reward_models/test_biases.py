"""Length, style and probes of reward models, by hand from scores that are functions of the texts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from transformers import AutoTokenizer

from posttrain import registry
from posttrain.errors import UsageError
from posttrain.evals.statistics import wilson_interval
from posttrain.models.sources import TINY
from posttrain.reports.reward_model import bias_tables, score_tables, write_score_page
from posttrain.reward_models.biases import FEATURES, PROBES, paired_correlation, probe_texts
from posttrain.reward_models.evaluation import RewardEvaluation, evaluate_reward_model
from posttrain.tasks.base import Task
from posttrain.types import Example, Message, Response

Score = Callable[[str], float | None]


class TextScores:
    """A reward model whose score is a function of the answer's text."""

    unscored = "too long"

    def __init__(self, score: Score, kind: str = "preference") -> None:
        self.of_text, self.kind = score, kind
        self.tokenizer = AutoTokenizer.from_pretrained(TINY)
        self.template = registry.find("template", "dialogue").bind({})()

    def score_responses(self, examples: Sequence[Example], responses: Sequence[Response]) -> list[float | None]:
        assert len(examples) == len(responses)
        return [self.of_text(response.text) for response in responses]

    def probability(self, score: float) -> float | None:
        return None


def pair(number: int, chosen: str, rejected: str, **meta: str) -> Example:
    responses = (Response(chosen, 1.0), Response(rejected, 0.0))
    return Example(f"p/{number}", (Message("user", f"Question {number}?"),), responses=responses, meta=meta)


def evaluated(score: Score, pairs: list[Example], probes: bool = False) -> RewardEvaluation:
    return evaluate_reward_model(TextScores(score), Task("t", "test", pairs), n=1000, probes=probes)  # type: ignore[arg-type]


PAIRS = [
    pair(0, "aaaa", "aa", subset="helpful"),
    pair(1, "bbbbbb", "bbb", subset="helpful"),
    pair(2, "c", "ccc", subset="harmless"),
    pair(3, "dd", "ee", subset="harmless"),
]


def test_a_model_that_loves_length_by_hand() -> None:
    found = evaluated(lambda text: float(len(text)), PAIRS)
    results = found.results
    assert (results["accuracy_longer"], results["accuracy_longer_n"]) == (1.0, 2.0)
    assert (results["accuracy_shorter"], results["accuracy_shorter_n"]) == (0.0, 1.0)
    assert (results["accuracy_longer_low"], results["accuracy_longer_high"]) == wilson_interval(2, 2)
    assert results["length_correlation"] == pytest.approx(1.0)
    # differences 2, 3, −2, 0 with 1, 1, 1, 1
    assert results["length_correlation_of_chosen"] == pytest.approx(3 / math.sqrt(17 * 4))
    assert "list_correlation" not in results  # no list in any answer
    kinds = found.biases["subset"]
    assert kinds["helpful"]["accuracy_longer"] == 1.0
    assert "accuracy_shorter" not in kinds["helpful"]
    assert kinds["harmless"]["accuracy_shorter"] == 0.0
    assert (kinds["harmless"]["n"], kinds["harmless"]["length_correlation"]) == (2.0, pytest.approx(1.0))


def test_the_opposite_taste_has_the_opposite_correlation() -> None:
    one, other = (evaluated(lambda text, s=sign: s * len(text) ** 1.5, PAIRS).results for sign in (1.0, -1.0))  # type: ignore[misc]
    assert other["length_correlation"] == -one["length_correlation"]
    assert other["accuracy_shorter"] == 1.0


def test_what_style_is() -> None:
    assert FEATURES["list"]("Buy:\n- milk\n* bread\n 3. eggs\n4) tea\n-no\n2024 was") == 4.0
    openings = ("Sure! It", "  \u201cI\u2019d be happy to", "Great, do", "It is great", "Surely")
    assert [FEATURES["polite"](text) for text in openings] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_the_correlation_is_that_of_what_is_left_beside_the_means_of_pairs() -> None:
    rng = np.random.default_rng(3)
    quality = rng.normal(size=(300, 1)) * 10  # of the prompt: would drown everything
    length = rng.normal(size=(300, 2))
    score = quality + 0.6 * length + rng.normal(size=(300, 2))
    found = paired_correlation(score[:, 0] - score[:, 1], length[:, 0] - length[:, 1])
    assert found is not None
    value, low, high = found
    centred = [(x - x.mean(axis=1, keepdims=True)).ravel() for x in (score, length)]
    assert value == pytest.approx(np.corrcoef(*centred)[0, 1])
    expected = 0.6 / math.sqrt(0.36 + 1)
    assert low < expected < high
    assert 0.1 < high - low < 0.25
    swapped = random.Random(0).choices((1, -1), k=300)  # which answer stands first says nothing
    again = paired_correlation((score[:, 0] - score[:, 1]) * swapped, (length[:, 0] - length[:, 1]) * swapped)
    assert again is not None
    assert again[0] == pytest.approx(value)


def test_the_interval_of_a_correlation_covers_it() -> None:
    """Pairs without any connection: 0 is covered in about 95 of 100."""
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(100):
        found = paired_correlation(rng.normal(size=40), rng.normal(size=40))
        assert found is not None
        covered += found[1] <= 0.0 <= found[2]
    assert 88 <= covered <= 99


def test_what_never_differs_has_no_correlation() -> None:
    assert paired_correlation([], []) is None
    assert paired_correlation([1.0, 2.0], [0.0, 0.0]) is None
    assert paired_correlation([0.0, 0.0], [1.0, 2.0]) is None


def test_probes_say_nothing_in_six_ways() -> None:
    example = Example("p/0", (Message("user", "First?"), Message("assistant", "Yes."), Message("user", "And then?")))
    texts = probe_texts(example, "It ends. Then all go home.", "Boil it for ten minutes.")
    assert tuple(texts) == PROBES
    assert texts["empty"] == ""
    assert texts["repeated"] == " ".join(["It ends."] * 7)  # twice as long as the answer
    assert texts["copied"] == "And then?"
    assert texts["another"] == "Boil it for ten minutes."
    assert len(texts["long"]) >= 4 * len("It ends. Then all go home.")


def test_how_often_nothing_beats_the_chosen_answer_by_hand() -> None:
    """Scores are lengths: whatever is longer than the chosen answer wins, ties count one half."""
    pairs = [pair(0, "aaaa", "aa"), pair(1, "bbbbbb", "b"), pair(2, "Question", "c"), pair(3, "dd dd.", "d")]
    results = evaluated(lambda text: float(len(text)), pairs, probes=True).results
    assert [results[f"probe_{name}"] for name in ("empty", "flattery", "long", "repeated")] == [0.0, 1.0, 1.0, 1.0]
    assert results["probe_copied"] == 1.0  # "Question 0?" has 11 characters
    # the next chosen answer: 6 > 4, 8 > 6, 6 < 8, 4 < 6
    assert results["probe_another"] == 0.5
    assert (results["probe_another_low"], results["probe_another_high"]) == wilson_interval(2, 4)
    ties = evaluated(lambda text: 1.0, pairs, probes=True).results
    assert [ties[f"probe_{name}"] for name in PROBES] == [0.5] * 6


def test_probes_that_cannot_be_scored_are_not_counted() -> None:
    pairs = [pair(0, "aaaa", "aa"), pair(1, "bbbbbb", "b")]
    results = evaluated(lambda text: float(len(text)) if 0 < len(text) < 100 else None, pairs, probes=True).results
    assert (results["probe_empty_n"], results["probe_long_n"], results["probe_copied_n"]) == (0.0, 0.0, 2.0)
    assert "probe_empty" not in results
    alone = evaluated(lambda text: float(len(text)), pairs[:1], probes=True).results
    assert alone["probe_another_n"] == 0.0  # there is no other answer


def test_without_pairs_there_is_nothing_to_probe() -> None:
    example = Example("p/0", (Message("user", "?"),), responses=(Response("a", 1.0),))
    with pytest.raises(UsageError, match="--probes: they stand beside the chosen answers of pairs"):
        evaluated(lambda text: 1.0, [example], probes=True)


def test_tables_show_all_of_it() -> None:
    found = evaluated(lambda text: float(len(text)), PAIRS, probes=True)
    titles = [table.title for table in score_tables([("m", found)])]
    assert titles[1:] == ["t/test, length and style", "t/test, answers that say nothing, scored above the chosen one"]
    style = score_tables([("m", found)])[1]
    assert style.lines[0][style.header.index("right, chosen longer")] == "100.0%"
    assert style.lines[0][style.header.index("score ~ length")] == "1.000"
    assert [line[0] for line in bias_tables(found.biases)[0].lines] == ["harmless", "helpful"]
    page = write_score_page("m", found, {}, None)
    assert "## Length and style by subset" in page
