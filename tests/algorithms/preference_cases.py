"""Batches of pairs, and every pair word written again in plain Python from its paper's equation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from posttrain.algorithms.objectives import preference
from posttrain.types import Batch, Loss, Outputs

Row = Sequence[float]


def make_rows(
    policy: Sequence[Row],
    reference: Sequence[Row] | None = None,
    *,
    rows_per_unit: int = 1,
    outside: float = 0.0,
    **fields: Sequence[float],
) -> tuple[Outputs, Batch]:
    """Ragged rows of log-probabilities, float64, from position 1 on; ``outside`` stands where nothing is trained.

    In every third row the first trained token is moved on by one: prompts need not have equal lengths.
    """
    width = 2 + max(len(row) for row in policy)
    tensors = torch.full((2, len(policy), width), outside, dtype=torch.float64)
    mask = torch.zeros(len(policy), width, dtype=torch.bool)
    for b, row in enumerate(policy):
        start = 2 if b % 3 == 2 else 1
        place = slice(start, start + len(row))
        mask[b, place] = True
        tensors[0, b, place] = torch.tensor(row, dtype=torch.float64)
        if reference is not None:
            tensors[1, b, place] = torch.tensor(reference[b], dtype=torch.float64)
    rows = len(policy)
    batch = Batch(
        tokens=torch.zeros(rows, width, dtype=torch.long),
        lengths=torch.full((rows,), width),
        mask=mask,
        group=torch.arange(rows) // rows_per_unit,
        prefix=torch.ones(rows, dtype=torch.long),
        fields={name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()},
        rows_per_unit=rows_per_unit,
    )
    if reference is not None:
        batch.fields["ref_logprobs"] = tensors[1]
    return Outputs(logprobs=tensors[0].clone().requires_grad_()), batch


def make_pairs(policy: Sequence[Row], reference: Sequence[Row] | None = None, outside: float = 0.0):
    return make_rows(policy, policy if reference is None else reference, rows_per_unit=2, outside=outside)


def random_rows(seed: int, num_rows: int = 8, scale: float = 1.0) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probabilities of rows of 1 to 6 tokens under a policy and under a reference."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (num_rows,), generator=generator).tolist()
    both = []
    for _ in range(2):
        both.append([(-scale * torch.rand(n, generator=generator, dtype=torch.float64)).tolist() for n in lengths])
    return both[0], both[1]


def one_pair(chosen_ratio: float, rejected_ratio: float) -> tuple[Outputs, Batch]:
    """A pair of answers of one token whose log-ratios to the reference are as given."""
    return make_pairs([[-5.0 + chosen_ratio], [-5.0 + rejected_ratio]], [[-5.0], [-5.0]])


def values_of(word: Callable[..., Loss], case: tuple[Outputs, Batch], **options: object) -> list[float]:
    return word(*case, **options).values.tolist()


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


class Pair:
    """One pair in plain Python: sums and means of its two answers."""

    def __init__(self, chosen: Row, rejected: Row, ref_chosen: Row, ref_rejected: Row) -> None:
        self.ratios_w = [new - old for new, old in zip(chosen, ref_chosen, strict=True)]
        self.ratios_l = [new - old for new, old in zip(rejected, ref_rejected, strict=True)]
        self.w, self.l = sum(chosen), sum(rejected)
        self.num_w, self.num_l = len(chosen), len(rejected)
        self.ratio_w, self.ratio_l = self.w - sum(ref_chosen), self.l - sum(ref_rejected)

    @property
    def delta(self) -> float:
        return self.ratio_w - self.ratio_l

    @property
    def delta_of_means(self) -> float:
        return self.ratio_w / self.num_w - self.ratio_l / self.num_l


def _cdpo(p: Pair, beta: float, eps: float, mean: bool) -> float:
    z = beta * (p.delta_of_means if mean else p.delta)
    return -(1 - eps) * math.log(sigmoid(z)) - eps * math.log(sigmoid(-z))


def _robust(p: Pair, beta: float, eps: float) -> float:
    clean, swapped = -log_sigmoid(beta * p.delta), -log_sigmoid(-beta * p.delta)
    return ((1 - eps) * clean - eps * swapped) / (1 - 2 * eps)


def _orpo(p: Pair, weight: float) -> float:
    prob_w, prob_l = math.exp(p.w / p.num_w), math.exp(p.l / p.num_l)
    odds_ratio = (prob_w / (1 - prob_w)) / (prob_l / (1 - prob_l))
    return -p.w / p.num_w - weight * math.log(odds_ratio / (1 + odds_ratio))


def _exo(p: Pair, beta: float, eps: float) -> float:
    top = math.exp(beta * p.ratio_w)
    share = top / (top + math.exp(beta * p.ratio_l))
    return share * math.log(share / (1 - eps)) + (1 - share) * math.log((1 - share) / eps)


def _nca(p: Pair, beta: float) -> float:
    w, rejected = beta * p.ratio_w, beta * p.ratio_l
    return -math.log(sigmoid(w)) - 0.5 * (math.log(1 - sigmoid(w)) + math.log(1 - sigmoid(rejected)))


def _discopop(p: Pair, beta: float, temperature: float) -> float:
    logit = beta * p.delta
    blend = sigmoid(logit / temperature)
    return (1 - blend) * -log_sigmoid(logit) + blend * math.exp(-logit)


def _alpha_dpo(p: Pair, beta: float, alpha: float) -> float:
    """f'(u) = (1 − u^(−α)) / α of the paper's table; α = 1 is the forward KL up to a constant."""
    slope_w, slope_l = ((1 - math.exp(z) ** -alpha) / alpha for z in (p.ratio_w, p.ratio_l))
    return -log_sigmoid(beta * (slope_w - slope_l))


def _js_dpo(p: Pair, beta: float) -> float:
    slope_w, slope_l = (math.log(2 * math.exp(z) / (1 + math.exp(z))) for z in (p.ratio_w, p.ratio_l))
    return -log_sigmoid(beta * (slope_w - slope_l))


def _ld_dpo(p: Pair, beta: float, alpha: float) -> float:
    common = min(p.num_w, p.num_l)
    w, rejected = (sum(r[:common]) + alpha * sum(r[common:]) for r in (p.ratios_w, p.ratios_l))
    return -log_sigmoid(beta * (w - rejected))


# name of the case -> (word, options, the same in plain Python)
Case = tuple[Callable[..., Loss], dict[str, object], Callable[[Pair], float]]
CASES: dict[str, Case] = {
    "dpo": (preference.dpo, {"beta": 0.7}, lambda p: _cdpo(p, 0.7, 0.0, False)),
    "cdpo": (preference.dpo, {"beta": 0.7, "label_smoothing": 0.2}, lambda p: _cdpo(p, 0.7, 0.2, False)),
    "dpo_norm": (preference.dpo, {"beta": 2.0, "length_normalized": True}, lambda p: _cdpo(p, 2.0, 0.0, True)),
    "robust_dpo": (preference.robust_dpo, {"beta": 0.7, "flip_rate": 0.2}, lambda p: _robust(p, 0.7, 0.2)),
    "ipo": (preference.ipo, {"beta": 0.3}, lambda p: (p.delta - 1 / 0.6) ** 2),
    "ipo_means": (
        preference.ipo,
        {"beta": 0.3, "length_normalized": True},
        lambda p: (p.delta_of_means - 1 / 0.6) ** 2,
    ),
    "hinge": (preference.hinge, {"beta": 0.5, "margin": 0.8}, lambda p: max(0.0, 0.8 - 0.5 * p.delta)),
    "simpo": (
        preference.simpo,
        {"beta": 2.5, "gamma": 0.6},
        lambda p: -log_sigmoid(2.5 * (p.w / p.num_w - p.l / p.num_l) - 0.6),
    ),
    "orpo": (preference.orpo, {"odds_weight": 0.4}, lambda p: _orpo(p, 0.4)),
    "cpo": (preference.cpo, {"beta": 0.2}, lambda p: -log_sigmoid(0.2 * (p.w - p.l)) - p.w / p.num_w),
    "cpo_sum": (
        preference.cpo,
        {"beta": 0.2, "nll_weight": 0.5, "nll_length_normalized": False},
        lambda p: -log_sigmoid(0.2 * (p.w - p.l)) - 0.5 * p.w,
    ),
    "rpo": (
        preference.rpo,
        {"beta": 0.3, "nll_weight": 0.7},
        lambda p: -log_sigmoid(0.3 * p.delta) - 0.7 * p.w / p.num_w,
    ),
    "exo": (preference.exo, {"beta": 0.8, "label_smoothing": 0.01}, lambda p: _exo(p, 0.8, 0.01)),
    "nca": (preference.nca, {"beta": 0.6}, lambda p: _nca(p, 0.6)),
    "apo_zero": (preference.apo_zero, {"beta": 0.6}, lambda p: 1 - sigmoid(0.6 * p.ratio_w) + sigmoid(0.6 * p.ratio_l)),
    "sppo": (preference.sppo, {"beta": 0.4}, lambda p: (p.ratio_w - 1.25) ** 2 + (p.ratio_l + 1.25) ** 2),
    "bco": (preference.bco, {"beta": 0.6}, lambda p: -log_sigmoid(0.6 * p.ratio_w) - log_sigmoid(-0.6 * p.ratio_l)),
    "discopop": (preference.discopop, {"beta": 0.3, "temperature": 0.2}, lambda p: _discopop(p, 0.3, 0.2)),
    "forward_kl_dpo": (preference.f_dpo, {"beta": 0.6, "divergence": "forward_kl"}, lambda p: _alpha_dpo(p, 0.6, 1.0)),
    "alpha_dpo": (
        preference.f_dpo,
        {"beta": 0.6, "divergence": "alpha", "alpha": 0.3},
        lambda p: _alpha_dpo(p, 0.6, 0.3),
    ),
    "js_dpo": (preference.f_dpo, {"beta": 0.6, "divergence": "jensen_shannon"}, lambda p: _js_dpo(p, 0.6)),
    "mpo": (
        preference.mpo,
        {"beta": 0.6, "preference_weight": 0.8, "quality_weight": 0.3, "nll_weight": 0.5},
        lambda p: (
            -0.8 * log_sigmoid(0.6 * p.delta)
            - 0.3 * (log_sigmoid(0.6 * p.ratio_w) + log_sigmoid(-0.6 * p.ratio_l))
            - 0.5 * p.w / p.num_w
        ),
    ),
    "ld_dpo": (preference.ld_dpo, {"beta": 0.6, "alpha": 0.3}, lambda p: _ld_dpo(p, 0.6, 0.3)),
    "apo_down": (preference.apo_down, {"beta": 0.6}, lambda p: sigmoid(0.6 * p.ratio_w) + 1 - sigmoid(0.6 * p.delta)),
}
