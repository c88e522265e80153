"""Changes of features between two models: the estimates, their intervals, and what chance alone brings."""

from __future__ import annotations

import math

import pytest
import torch
from planted import plant, plant_change
from torch import Tensor

from posttrain.interpret.differences.changes import (
    Changes,
    ChangeSums,
    LatentScaling,
    holm,
    match_rates,
    paired_changes,
    two_sided_p,
    unpaired_changes,
)

DOCUMENTS = torch.tensor([0, 0, 1, 1, 1, 2])
BASE = torch.tensor([[1.0], [0.0], [2.0], [0.0], [1.0], [0.0]])
POST = torch.tensor([[2.0], [1.0], [2.0], [3.0], [0.0], [1.0]])


def sums_of(base: Tensor, post: Tensor, documents: Tensor, batches: int = 1) -> ChangeSums:
    sums = ChangeSums(base.shape[1])
    for part in documents.unique().chunk(batches):
        rows = torch.isin(documents, part)
        sums.add(base[rows], post[rows], documents[rows])
    return sums


def test_a_small_case_by_hand() -> None:
    """Sums by document: base (1, 3, 0), post (3, 5, 1); fires base (1, 2, 0), post (2, 2, 1); tokens (2, 3, 1)."""
    found = paired_changes(sums_of(BASE, POST, DOCUMENTS), min_documents=1)
    assert found.base[:, 0].tolist() == pytest.approx([3 / 6, 4 / 6])
    assert found.post[:, 0].tolist() == pytest.approx([5 / 6, 9 / 6])
    assert found.ratio[:, 0].tolist() == pytest.approx([5 / 3, 9 / 4])
    delta = 5 / 6
    spread = sum((d - delta * n) ** 2 for d, n in ((2, 2), (2, 3), (1, 1)))
    assert float(found.error[1, 0]) == pytest.approx(math.sqrt(1.5 * spread) / 6)
    log_error = math.sqrt(1.5 * sum((p / 9 - b / 4) ** 2 for p, b in ((3, 1), (5, 3), (1, 0))))
    # three documents: Student's t with two degrees of freedom
    assert float(found.low[1, 0]) == pytest.approx(9 / 4 * math.exp(-4.302653 * log_error), rel=1e-6)
    assert float(found.high[1, 0]) == pytest.approx(9 / 4 * math.exp(4.302653 * log_error), rel=1e-6)
    assert found.documents.tolist() == [3]


def test_the_p_is_students_with_the_documents_that_it_fires_in() -> None:
    found = paired_changes(sums_of(BASE, POST, DOCUMENTS), min_documents=1)
    t = float(found.change[1, 0] / found.error[1, 0])
    # two degrees of freedom: P(|T| > t) = 1 − t/√(2 + t²)
    assert float(found.p[1, 0]) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)


def test_a_rare_feature_is_judged_by_the_documents_that_know_it() -> None:
    """Five of 200 documents: t ≈ 2.2 is beyond 5 % by the normal distribution, not with 4 degrees of freedom."""
    base, post = torch.zeros(200, 1), torch.zeros(200, 1)
    post[:5, 0] = torch.tensor([1.0, 1.2, 0.9, 1.1, 0.8]) * 4
    base[:5, 0] = 1.0
    found = paired_changes(sums_of(base, post, torch.arange(200)), min_documents=2)
    t = float(found.change[1, 0] / found.error[1, 0])
    assert 2.0 < t < 2.4
    assert float(found.p[1, 0]) == pytest.approx(float(two_sided_p(torch.tensor([t]).double(), torch.tensor([4]))))
    assert float(found.p[1, 0]) > 0.08


def test_batches_do_not_matter() -> None:
    torch.manual_seed(0)
    documents = torch.arange(400) // 7
    base, post = torch.relu(torch.randn(2, 400, 5))
    one, many = (paired_changes(sums_of(base, post, documents, n)) for n in (1, 9))
    assert torch.allclose(one.p, many.p, rtol=1e-9)
    assert torch.allclose(one.error, many.error, rtol=1e-9)


def clustered(seed: int, features: int = 150, documents: int = 100, tokens: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Two models that do not differ, whose noise hangs together within documents."""
    draws = torch.Generator().manual_seed(seed)
    place = torch.arange(documents * tokens) // tokens
    shared = torch.randn(documents * tokens, features, generator=draws)
    sides = [torch.relu(shared + torch.randn(documents, features, generator=draws)[place] - 1.5) for _ in range(2)]
    return sides[0], sides[1], place


def flagged_by_tokens(base: Tensor, post: Tensor) -> int:
    """What a test that takes tokens for units would flag, by the same rule."""
    delta = (post - base).double()
    t = delta.mean(0) / (delta.std(0) / math.sqrt(len(delta)))
    return int((holm(two_sided_p(t, torch.full_like(t, 10_000))) < 0.05).sum())


def test_chance_is_not_flagged_though_tokens_hang_together() -> None:
    flagged, by_tokens = [], []
    for seed in range(8):
        base, post, place = clustered(seed)
        flagged.append(int(paired_changes(sums_of(base, post, place)).significant.sum()))
        by_tokens.append(flagged_by_tokens(base, post))
    assert sum(count > 0 for count in flagged) <= 2  # 5 % of the data sets may have one
    assert min(by_tokens) > 30  # of 150: what tokens alone would call changed


def test_a_model_beside_itself_and_halves_of_its_documents_flag_nothing() -> None:
    base, _, place = clustered(3)
    same = paired_changes(sums_of(base, base, place))
    assert float(same.change.abs().max()) == 0.0
    assert same.p.min() == 1.0
    sides = []
    for half in (0, 1):
        kept = place % 2 == half
        sides.append(sums_of(base[kept], base[kept], place[kept]))
    halves = unpaired_changes(*sides)
    assert int(halves.significant.sum()) == 0
    assert int(halves.tested.sum()) == 150


def test_unpaired_errors_are_those_of_two_independent_means() -> None:
    """With documents of one token each, they are Welch's."""
    torch.manual_seed(1)
    a, b = torch.relu(torch.randn(2, 500, 4))
    one = torch.arange(500)
    found = unpaired_changes(sums_of(a, a, one), sums_of(b, b, one))
    welch = (a.double().var(0) / 500 + b.double().var(0) / 500).sqrt()
    assert torch.allclose(found.error[1], welch, rtol=1e-9)
    assert torch.allclose(found.change[1], (b.double().mean(0) - a.double().mean(0)))


def planted_changes(seed: int = 0) -> tuple[Changes, Tensor, Tensor, Tensor]:
    """The planted change seen through the true directions: (changes, factors, added, latent scaling post/base)."""
    planted = plant(d=64, features=64, l0=3.0, noise=0.02, seed=seed)
    change = plant_change(planted, 24_000)
    # reading by the pseudo-inverse on what is active would need a solver; the codes themselves are the best encoder
    codes = planted.codes(24_000)
    before = codes.clone()
    before[:, change.added] = 0.0
    after = codes * change.factors
    sums = sums_of(before, after, torch.arange(24_000) // 40)
    scaling = LatentScaling(planted.directions)
    reconstruction = before @ planted.directions
    scaling.add(before, change.base - reconstruction, change.post - reconstruction)
    beta = scaling.result(of_errors=True).beta
    return paired_changes(sums), change.factors, change.added, beta[1] / beta[0]


def test_planted_changes_are_read_and_nothing_else() -> None:
    found, factors, added, amplification = planted_changes()
    planted = (factors != 1).clone()
    planted[added] = True
    assert found.changed.tolist() == planted.tolist()
    amplified = factors == 1.8
    assert torch.allclose(found.ratio[1][amplified], torch.tensor(1.8, dtype=torch.float64), rtol=1e-5)
    assert float(amplification[amplified].min()) > 1.62
    assert float(amplification[amplified].max()) < 1.98
    assert float(amplification[factors == 0].abs().max()) < 0.1
    assert (found.base[0][added] == 0).all()
    assert int(found.ranking()[:24].sort().values.tolist() == planted.nonzero()[:, 0].tolist()) == 1


def test_a_sure_but_small_change_is_significant_and_not_called_one() -> None:
    torch.manual_seed(0)
    base = torch.relu(torch.randn(4000, 3))
    found = paired_changes(sums_of(base, base * 1.1, torch.arange(4000) // 20))
    assert found.significant.tolist() == [True] * 3
    assert found.changed.tolist() == [False] * 3


def test_rare_features_are_not_tested() -> None:
    documents = torch.arange(100)
    base = torch.zeros(100, 2)
    post = base.clone()
    post[:11, 0] = 1.0
    post[:12, 1] = 1.0
    found = paired_changes(sums_of(base, post, documents), min_documents=12)
    assert found.tested.tolist() == [False, True]
    assert found.p[:, 0].tolist() == [1.0, 1.0]


def test_holm_by_hand() -> None:
    p = torch.tensor([0.04, 0.01, 0.03], dtype=torch.float64)
    assert holm(p).tolist() == pytest.approx([0.06, 0.03, 0.06])
    assert holm(torch.tensor([0.6, 0.7], dtype=torch.float64)).tolist() == [1.0, 1.0]


def test_matched_features_fire_as_often_and_none_is_taken_twice() -> None:
    rates = torch.tensor([0.5, 0.1, 0.49, 0.0, 0.11, 0.48, 0.01])
    sizes = torch.ones(7)
    forbidden = torch.tensor([False, False, True, False, False, False, False])
    assert match_rates([0, 1], rates, sizes, forbidden, [0.0, 0.0]) == [5, 4]
    # the nearest of the free ones is drawn by the number; silent and forbidden ones never
    assert match_rates([0, 1], rates, sizes, forbidden, [0.99, 0.99]) == [6, 5]
    assert match_rates([0, 1, 5, 4], rates, sizes, forbidden, [0.0] * 4) == [6]


def least_squares(feature: Tensor, direction: Tensor, y: Tensor) -> float:
    """The β of min Σ ‖β f d − y‖², by a solver."""
    column = (feature[:, None] * direction).reshape(-1, 1).double()
    return float(torch.linalg.lstsq(column, y.reshape(-1, 1).double()).solution)


def test_latent_scaling_is_that_of_least_squares() -> None:
    torch.manual_seed(0)
    features, directions, y = torch.relu(torch.randn(300, 6)), torch.randn(6, 16), torch.randn(2, 300, 16)
    features[:, 5] = 0
    scaling = LatentScaling(directions)
    for part in (slice(0, 100), slice(100, 300)):
        scaling.add(features[part], y[0, part], y[1, part])
    found, of_errors = scaling.result(), scaling.result(of_errors=True)
    for j in range(5):
        own = features[:, j : j + 1] * directions[j]
        for m in range(2):
            assert abs(float(found.beta[m, j]) - least_squares(features[:, j], directions[j], y[m])) < 1e-5
            assert abs(float(of_errors.beta[m, j]) - least_squares(features[:, j], directions[j], y[m] + own)) < 1e-5
    assert torch.isnan(found.beta[:, 5]).all()  # a latent that never fires
    assert float(found.energy[0]) == pytest.approx(float(features[:, 0].double().square().sum()))
