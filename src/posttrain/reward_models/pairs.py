"""A reward model on pairs: is the chosen answer scored higher, by how much, and more often than by length alone?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from posttrain.evals.ranking import pair_wins
from posttrain.evals.statistics import paired_bootstrap
from posttrain.render.rows import rows_of
from posttrain.reward_models.biases import add_biases
from posttrain.reward_models.scoring import RewardModel
from posttrain.reward_models.views import View, add_calibration, add_share, meta_of
from posttrain.types import Example, Response


def evaluate_pairs(model: RewardModel, examples: Sequence[Example]) -> View:
    """Each example's best response against its worst, as training pairs them; what training would drop is dropped.

    ``accuracy``: the chosen answer has the higher score, ties one half. ``margin``: mean difference of the scores.
    ``longer_accuracy``: what always taking the longer text (in characters) would get. ``gain_over_length``: accuracy
    less that of the better of "the longer" and "the shorter", with the interval of the paired difference
    (bootstrap). Length and style: ``biases.add_biases``. Where
    the difference of two scores is a log-odds (not of process models): calibration of ``σ(r_w − r_l)``.
    """
    view = View()
    pairs: list[tuple[Example, Response, Response]] = []
    for example in examples:
        (unit,) = rows_of(model.tokenizer, model.template, example, "pair")
        if isinstance(unit, str):
            view.dropped[unit] += 1
        else:
            best, worst = (choose(example.responses, key=lambda r: r.score) for choose in (max, min))
            pairs.append((example, best, worst))
    asked = [example for example, _, _ in pairs for _ in range(2)]
    scores = model.score_responses(asked, [response for _, *both in pairs for response in both])
    for (example, chosen, rejected), won, lost in zip(pairs, scores[0::2], scores[1::2], strict=True):
        if won is None or lost is None:
            view.dropped[model.unscored] += 1
            continue
        lengths = len(chosen.text), len(rejected.text)
        view.items.append(
            {
                "id": example.id,
                "meta": meta_of(example),
                "right": pair_wins([won], [lost])[0],
                "margin": won - lost,
                "chosen_score": won,
                "rejected_score": lost,
                "chosen_characters": lengths[0],
                "rejected_characters": lengths[1],
                "chosen": chosen.text,
                "rejected": rejected.text,
            }
        )
    _summarize(model, view)
    return view


def _summarize(model: RewardModel, view: View) -> None:
    wins = [float(item["right"]) for item in view.items]
    view.results["n"] = float(len(wins))
    if not wins:
        return
    add_share(view.results, "accuracy", wins)
    for name in ("margin", "chosen_score", "rejected_score"):
        view.results[name] = statistics.fmean(item[name] for item in view.items)
    longer = pair_wins(*([item[f"{side}_characters"] for item in view.items] for side in ("chosen", "rejected")))
    add_share(view.results, "longer_accuracy", longer)
    baseline = longer if sum(longer) >= len(longer) / 2 else [1.0 - win for win in longer]
    gain = paired_bootstrap(baseline, wins)
    view.results |= {
        "gain_over_length": gain.difference,
        "gain_over_length_low": gain.low,
        "gain_over_length_high": gain.high,
    }
    add_biases(view.results, view.items)
    if model.kind != "process":
        add_calibration(view, [item["margin"] for item in view.items], [1.0] * len(wins), folded=True)
